"""Keys and values of texts that later requests may begin with: system prompts, and the turns of a conversation.

A text's KV depends on its tokens and their positions alone, and a prefix stands at the same positions in every text that
begins with it; so it is copied instead of computed again. Recurrent states are sums of a whole text, and are kept at
some of its positions: such a text can be taken up at those alone. Only the tenant that sent a text can match it: clients
see the number of matched tokens (``cached_tokens``), which would reveal what others have sent. And only by the adapter that
it was read with, whose keys and values they are.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretell.model.cache import KVCache
from foretell.model.recurrent import RecurrentCache, Saved

BLOCK = 16
"""Block size in tokens of the prefix index; the rest of a match is found token by token."""
Owner = tuple[str | None, str | None] | None
"""See ``Submission.owner``; None: of whoever tells nobody apart."""


def adapter_of(owner: Owner) -> str | None:
    """Whose keys and values they are, of the target itself None."""
    return None if owner is None else owner[1]


@dataclass
class Prefix:
    """One text and its memory."""

    ids: list[int]
    keys: list[Tensor]  # of each layer [heads, n, head_dim]
    values: list[Tensor]
    layers: tuple[int, ...]  # tapped when the text was read ...
    taps: Tensor | None  # ... [1, n, T * H]
    owner: Owner = None
    states: dict[int, Saved] | None = None  # recurrent ones, by position; None: the model has none
    store: bool = True  # whether a request that is to be stored had this text: others' are not written to disk
    settled: bool = False  # whether it is known to be on disk, or not worth it

    def reach(self, count: int, multiple: int = 1) -> int:
        """The largest number of tokens, at most count and a multiple of ``multiple``, after which it can be taken up."""
        return reach(None if self.states is None else self.states.keys(), count, multiple)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        taps = [] if self.taps is None else [self.taps]
        states = _num_bytes(self.states or {})
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values, *taps)) + states

    def copy_into(self, row: KVCache, count: int) -> None:
        """Write the first count tokens into slots [0, count) of a cache of one row; count as ``reach`` returns it."""
        if self.states is not None:
            assert isinstance(row, RecurrentCache)
            row.load(self.states[count])
        row.restore(self.keys, self.values, count)


class Further(Protocol):
    """Where prefixes are that the store does not hold: see ``prefix_files.py``."""

    def find(self, ids: list[int], layers: tuple[int, ...], owner: Owner, least: int) -> Prefix | None:
        """As ``PrefixStore.find``: one that shares clearly more than ``least`` tokens."""
        ...


class PrefixStore:
    """Prefixes by their blocks, the least recently used forgotten first."""

    def __init__(self, max_bytes: int, further: Further | None = None) -> None:
        self.max_bytes, self.further = max_bytes, further
        self.num_bytes = 0
        self.num_queries = self.num_hits = 0  # tokens
        self._prefixes: OrderedDict[int, Prefix] = OrderedDict()  # the most recently used last
        self._blocks: dict[int, int] = {}  # hash of a text's first blocks -> the number of a prefix that begins so
        self._next = 0
        self.num_tokens = 0  # whose memory is held: counted, so that any thread may read it while prefixes come and go

    def find(self, ids: list[int], layers: tuple[int, ...], owner: Owner = None) -> tuple[Prefix, int] | None:
        """The owner's prefix that shares most tokens with the beginning of ids, and how many; None where none does.

        layers: target layers whose outputs the caller needs too; prefixes without them are skipped.
        """
        self.num_queries += len(ids)
        found = self.held(ids, layers, owner)
        if self.further is not None:
            prefix = self.further.find(ids, layers, owner, 0 if found is None else found[1])
            if prefix is not None:
                self._take(prefix, block_hashes(prefix.ids, prefix.owner))
                found = prefix, prefix.reach(shared(ids, prefix.ids))
        self.num_hits += 0 if found is None else found[1]
        return found

    def held(self, ids: list[int], layers: tuple[int, ...], owner: Owner = None) -> tuple[Prefix, int] | None:
        """``find`` among those in memory."""
        for key in reversed(block_hashes(ids, owner)):
            number = self._blocks.get(key)
            prefix = None if number is None else self._prefixes[number]
            # The owner is part of the key; it is compared too, since hashes can be made to collide.
            if prefix is None or prefix.owner != owner or (layers and prefix.layers != layers):
                continue
            count = prefix.reach(shared(ids, prefix.ids))
            if not count:
                continue  # a collision of hashes, or no state is kept so early
            assert number is not None
            self._prefixes.move_to_end(number)
            return prefix, count
        return None

    def add(
        self,
        ids: list[int],
        row: KVCache,
        layers: tuple[int, ...],
        taps: Tensor | None,
        owner: Owner = None,
        states: Mapping[int, Saved] | None = None,
        *,
        store: bool = True,
    ) -> None:
        """Keep a copy of slots [0, len(ids)) of a cache of one row. A text that is stored already is not copied again.
        A stored text that this one continues is replaced. states: recurrent ones at some positions, of a model that has
        them; those of a text that is replaced are kept. store: see ``Submission``."""
        keys = block_hashes(ids, owner)
        if not keys:
            return
        number = self._blocks.get(keys[-1])
        if number is not None:
            known = self._prefixes[number]
            mine = known.owner == owner and known.ids[: len(ids)] == ids
            held = mine and (not layers or known.layers == layers)
            if held and (known.store or not store or len(known.ids) == len(ids)):  # else the rest is not to be stored
                self._prefixes.move_to_end(number)
                known.store |= store
                return
        count = len(ids)
        if states is not None:
            states = {**self._states_of(ids, keys, owner), **states}
            if not states:
                return
        size = (
            _num_bytes(states or {})
            + count * row.bytes_per_slot
            + (0 if taps is None else taps.numel() * taps.element_size())
        )
        if size > self.max_bytes:
            return
        for key in keys:
            older = self._blocks.get(key)
            if older is None:
                continue
            known = self._prefixes[older]
            mine = known.owner == owner and len(known.ids) < count and known.ids == ids[: len(known.ids)]
            if mine and (layers or not known.layers) and (store or not known.store):
                self._drop(older)
        self.shrink(self.max_bytes - size)
        prefix = Prefix(
            list(ids),
            *row.saved(count),
            layers if taps is not None else (),
            taps,
            owner,
            None if states is None else dict(states),
            store,
        )
        self._take(prefix, keys)

    def _take(self, prefix: Prefix, keys: list[int]) -> None:
        if prefix.num_bytes > self.max_bytes:
            return
        self.shrink(self.max_bytes - prefix.num_bytes)
        self._prefixes[self._next] = prefix
        self.num_bytes += prefix.num_bytes
        self.num_tokens += len(prefix.ids)
        self._blocks |= dict.fromkeys(keys, self._next)
        self._next += 1

    def to_store(self) -> list[Prefix]:
        """Prefixes that are yet to be written to disk, the least recently used first. Nothing changes what they hold.
        What an adapter has read is not: under its name another one may be loaded after a start."""
        held = self._prefixes.values()
        return [one for one in held if one.store and not one.settled and not adapter_of(one.owner)]

    def _states_of(self, ids: list[int], keys: list[int], owner: Owner) -> dict[int, Saved]:
        """States of stored texts that ids continue."""
        found: dict[int, Saved] = {}
        for key in keys:
            number = self._blocks.get(key)
            known = None if number is None else self._prefixes[number]
            if known is not None and known.owner == owner and known.ids == ids[: len(known.ids)]:
                found.update(known.states or {})
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._prefixes.clear()
        self._blocks.clear()
        self.num_bytes = self.num_tokens = 0

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used prefixes until at most max_bytes are held."""
        while self._prefixes and self.num_bytes > max_bytes:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, number: int) -> None:
        prefix = self._prefixes.pop(number)
        self.num_bytes -= prefix.num_bytes
        self.num_tokens -= len(prefix.ids)
        for key in block_hashes(prefix.ids, prefix.owner):
            if self._blocks.get(key) == number:
                del self._blocks[key]
                # A block shared with another prefix is indexed again when that prefix is next added.


def _num_bytes(states: Mapping[int, Saved]) -> int:
    return sum(saved.num_bytes for saved in states.values())


def reach(positions: Collection[int] | None, count: int, multiple: int = 1) -> int:
    """See ``Prefix.reach``; positions of its states, None: the model has none."""
    if positions is None:
        return count - count % multiple
    return max([at for at in positions if at <= count and at % multiple == 0], default=0)


def block_hashes(ids: Sequence[int], owner: Owner | str) -> list[int]:
    """A hash of the first 1, 2, ... whole blocks of an owner's text."""
    found, key = [], hash(owner)
    for start in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        key = hash((key, *ids[start : start + BLOCK]))
        found.append(key)
    return found


def shared(ids: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    count = 0
    for mine, theirs in zip(ids, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
