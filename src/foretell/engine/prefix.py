"""Keys and values of texts that later requests may begin with: system prompts, and the turns of a conversation.

A text's KV depends on its tokens and their positions alone, and a prefix stands at the same positions in every text that
begins with it; so it is copied instead of computed again. Recurrent states are sums of a whole text, and are kept at
some of its positions: such a text can be taken up at those alone. Only the tenant that sent a text can match it: clients
see the number of matched tokens (``cached_tokens``), which would reveal what others have sent.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from foretell.model.cache import KVCache
from foretell.model.recurrent import RecurrentCache, Saved

BLOCK = 16
"""Block size in tokens of the prefix index; the rest of a match is found token by token."""


@dataclass
class Prefix:
    """One text and its memory."""

    ids: list[int]
    keys: list[Tensor]  # of each layer [heads, n, head_dim]
    values: list[Tensor]
    layers: tuple[int, ...]  # tapped when the text was read ...
    taps: Tensor | None  # ... [1, n, T * H]
    tenant: str | None = None  # who sent it
    states: dict[int, Saved] | None = None  # recurrent ones, by position; None: the model has none

    def reach(self, count: int, multiple: int = 1) -> int:
        """The largest number of tokens, at most count and a multiple of ``multiple``, after which it can be taken up."""
        if self.states is None:
            return count - count % multiple
        return max([at for at in self.states if at <= count and at % multiple == 0], default=0)

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


class PrefixStore:
    """Prefixes by their blocks, the least recently used forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_queries = self.num_hits = 0  # tokens
        self._prefixes: OrderedDict[int, Prefix] = OrderedDict()  # the most recently used last
        self._blocks: dict[int, int] = {}  # hash of a text's first blocks -> the number of a prefix that begins so
        self._next = 0
        self.num_tokens = 0  # whose memory is held: counted, so that any thread may read it while prefixes come and go

    def find(self, ids: list[int], layers: tuple[int, ...], tenant: str | None = None) -> tuple[Prefix, int] | None:
        """The tenant's prefix that shares most tokens with the beginning of ids, and how many; None where none does.

        layers: target layers whose outputs the caller needs too; prefixes without them are skipped. tenant None: all
        requests without a tenant, as one tenant.
        """
        self.num_queries += len(ids)
        for key in reversed(_hashes(ids, tenant)):
            number = self._blocks.get(key)
            prefix = None if number is None else self._prefixes[number]
            # The tenant is part of the key; it is compared too, since hashes can be made to collide.
            if prefix is None or prefix.tenant != tenant or (layers and prefix.layers != layers):
                continue
            count = prefix.reach(_shared(ids, prefix.ids))
            if not count:
                continue  # a collision of hashes, or no state is kept so early
            assert number is not None
            self._prefixes.move_to_end(number)
            self.num_hits += count
            return prefix, count
        return None

    def add(
        self,
        ids: list[int],
        row: KVCache,
        layers: tuple[int, ...],
        taps: Tensor | None,
        tenant: str | None = None,
        states: Mapping[int, Saved] | None = None,
    ) -> None:
        """Keep a copy of slots [0, len(ids)) of a cache of one row. A text that is stored already is not copied again.
        A stored text that this one continues is replaced. states: recurrent ones at some positions, of a model that has
        them; those of a text that is replaced are kept."""
        keys = _hashes(ids, tenant)
        if not keys:
            return
        number = self._blocks.get(keys[-1])
        if number is not None:
            known = self._prefixes[number]
            mine = known.tenant == tenant and known.ids[: len(ids)] == ids
            if mine and (not layers or known.layers == layers):
                self._prefixes.move_to_end(number)
                return
        count = len(ids)
        if states is not None:
            states = {**self._states_of(ids, keys, tenant), **states}
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
            mine = known.tenant == tenant and len(known.ids) < count and known.ids == ids[: len(known.ids)]
            if mine and (layers or not known.layers):
                self._drop(older)
        while self.num_bytes + size > self.max_bytes:
            self._drop(next(iter(self._prefixes)))
        prefix = Prefix(
            list(ids),
            *row.saved(count),
            layers if taps is not None else (),
            taps,
            tenant,
            None if states is None else dict(states),
        )
        self._prefixes[self._next] = prefix
        self.num_bytes += prefix.num_bytes
        self.num_tokens += count
        for key in keys:
            self._blocks[key] = self._next
        self._next += 1

    def _states_of(self, ids: list[int], keys: list[int], tenant: str | None) -> dict[int, Saved]:
        """States of stored texts that ids continue."""
        found: dict[int, Saved] = {}
        for key in keys:
            number = self._blocks.get(key)
            known = None if number is None else self._prefixes[number]
            if known is not None and known.tenant == tenant and known.ids == ids[: len(known.ids)]:
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
        for key in _hashes(prefix.ids, prefix.tenant):
            if self._blocks.get(key) == number:
                del self._blocks[key]
                # A block shared with another prefix is indexed again when that prefix is next added.

    def check_integrity(self) -> None:
        """Check the invariants. Raises RuntimeError where one is violated."""
        held = sum(prefix.num_bytes for prefix in self._prefixes.values())
        if held != self.num_bytes or held > self.max_bytes:
            raise RuntimeError(f"prefixes hold {held} bytes, {self.num_bytes} are counted, {self.max_bytes} allowed")
        if self.num_tokens != sum(len(prefix.ids) for prefix in self._prefixes.values()):
            raise RuntimeError(f"{self.num_tokens} tokens are counted, and the prefixes hold another number")
        if any(number not in self._prefixes for number in self._blocks.values()):
            raise RuntimeError("a block refers to a prefix that was removed")


def _num_bytes(states: Mapping[int, Saved]) -> int:
    return sum(saved.num_bytes for saved in states.values())


def _hashes(ids: list[int], tenant: str | None) -> list[int]:
    """A hash of the first 1, 2, ... whole blocks of a tenant's text."""
    found, key = [], hash(tenant)
    for start in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        key = hash((key, *ids[start : start + BLOCK]))
        found.append(key)
    return found


def _shared(ids: list[int], other: list[int]) -> int:
    count = 0
    for mine, theirs in zip(ids, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
