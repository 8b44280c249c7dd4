"""Keys and values of texts that later requests may begin with: system prompts, and the turns of a conversation.

A text's KV depends on its tokens and their positions alone, and a prefix stands at the same positions in every text that
begins with it; so it is copied instead of computed again. Texts that begin alike share the memory of what they have in
common (``KVPiece``): of a conversation only what a turn adds is copied. Recurrent states are sums of a whole text, and are
kept at some of its positions: such a text can be taken up at those alone. Only the tenant that sent a text can match it:
clients see the number of matched tokens (``cached_tokens``), which would reveal what others have sent. And only by the
adapter that it was read with, whose keys and values they are.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
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


MERGED = 512
"""Tokens up to which two pieces become one: few pieces are copied faster than many."""


@dataclass(eq=False)
class KVPiece:
    """Memory of some tokens of a text, one after the other. It does not change."""

    keys: list[Tensor]  # of each layer [heads, n, head_dim]
    values: list[Tensor]
    taps: Tensor | None  # [1, n, T * H] of ``Prefix.layers``
    users: int = 0  # prefixes of a store that have it

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        taps = [] if self.taps is None else [self.taps]
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values, *taps))

    def and_then(self, count: int, other: "KVPiece") -> "KVPiece":
        """Its first count tokens, and another one's after them, in one."""
        taps = None if self.taps is None or other.taps is None else torch.cat((self.taps[:, :count], other.taps), 1)
        keys, values = (
            [torch.cat((mine[:, :count], more), 1) for mine, more in zip(own, theirs, strict=True)]
            for own, theirs in ((self.keys, other.keys), (self.values, other.values))
        )
        return KVPiece(keys, values, taps)


@dataclass
class Prefix:
    """One text and its memory."""

    ids: list[int]
    pieces: list[tuple[KVPiece, int]]  # and how many of its tokens, the first ones, are this text's
    layers: tuple[int, ...]  # tapped when the text was read: all pieces have taps, where there are any
    owner: Owner = None
    states: dict[int, Saved] | None = None  # recurrent ones, by position; None: the model has none
    store: bool = True  # whether a request that is to be stored had this text: others' are not written to disk
    settled: bool = False  # whether it is known to be on disk, or not worth it

    def reach(self, count: int, multiple: int = 1) -> int:
        """The largest number of tokens, at most count and a multiple of ``multiple``, after which it can be taken up."""
        return reach(None if self.states is None else self.states.keys(), count, multiple)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, those that it shares too."""
        return sum(piece.num_bytes for piece, _ in self.pieces) + _num_bytes(self.states or {})

    def parts(self, count: int) -> Iterator[tuple[KVPiece, int, int]]:
        """Pieces of the first count tokens: each, where it begins, and how many of its tokens are among them."""
        start = 0
        for piece, used in self.pieces:
            if start < count:
                yield piece, start, min(used, count - start)
            start += used

    def whole(self) -> KVPiece:
        """All of it in one piece: a copy."""
        first, *others = self.pieces
        made, count = first
        for piece, used in others:
            made, count = made.and_then(count, piece), count + used
        return made

    def copy_into(self, row: KVCache, count: int) -> None:
        """Write the first count tokens into slots [0, count) of a cache of one row; count as ``reach`` returns it."""
        if self.states is not None:
            assert isinstance(row, RecurrentCache)
            row.load(self.states[count])
        for piece, start, used in self.parts(count):
            row.restore(piece.keys, piece.values, used, start)


class Further(Protocol):
    """Where prefixes are that the store does not hold: see ``prefix_files.py``."""

    def find(self, ids: list[int], layers: tuple[int, ...], owner: Owner, least: int) -> Prefix | None:
        """As ``PrefixStore.find``: one that shares clearly more than ``least`` tokens."""
        ...

    def load(self, ids: list[int], layers: tuple[int, ...], owner: Owner, least: int) -> Future[Any] | None:
        """Begin to read on another thread what ``find``, which waits for the rest, would read. None: it reads nothing."""
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

    def load(self, ids: list[int], layers: tuple[int, ...], owner: Owner = None) -> Future[Any] | None:
        """See ``Further``."""
        if self.further is None:
            return None
        found = self.held(ids, layers, owner)
        return self.further.load(ids, layers, owner, 0 if found is None else found[1])

    def held(self, ids: list[int], layers: tuple[int, ...], owner: Owner = None) -> tuple[Prefix, int] | None:
        """``find`` among those in memory."""
        for number, prefix, same in self._alike(ids, layers, owner):
            if count := prefix.reach(same):  # else no state is kept so early
                self._prefixes.move_to_end(number)
                return prefix, count
        return None

    def _alike(self, ids: list[int], layers: tuple[int, ...], owner: Owner) -> Iterator[tuple[int, Prefix, int]]:
        """Numbers and prefixes that share blocks with ids, and how many tokens: the most blocks first."""
        for key in reversed(block_hashes(ids, owner)):
            number = self._blocks.get(key)
            prefix = None if number is None else self._prefixes[number]
            # The owner is part of the key; it is compared too, since hashes can be made to collide.
            if number is None or prefix is None or prefix.owner != owner or (layers and prefix.layers != layers):
                continue
            if same := shared(ids, prefix.ids):  # else a collision
                yield number, prefix, same

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
        first: int = 0,
    ) -> None:
        """Keep a copy of slots [0, len(ids)) of a cache of one row: of what no stored text has. A stored text that this
        one continues is replaced. taps: of the tokens from ``first`` on, from now on the store's; those before must be
        stored. states: recurrent ones at some positions, of a model that has them; those of a text that is replaced are
        kept. store: see ``Submission``."""
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
        layers = layers if taps is not None else ()
        base, common = next(((base, same) for _, base, same in self._alike(ids, layers, owner)), (None, 0))
        if layers and common < first:
            return
        more = 0 if taps is None else taps[:, common - first :].numel() * taps.element_size()
        size = _num_bytes(states or {}) + (count - common) * row.bytes_per_slot + more
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
        pieces = [] if base is None else _clipped(base, common, mixed=not layers)
        if common < count:
            own = taps if taps is None or common == first else taps[:, common - first :].clone()
            new = KVPiece(*row.saved(count, common), own)
            if pieces and pieces[-1][1] + count - common <= MERGED:
                last, used = pieces.pop()
                pieces.append((last.and_then(used, new), used + count - common))
            else:
                pieces.append((new, count - common))
        self._take(Prefix(list(ids), pieces, layers, owner, None if states is None else dict(states), store), keys)

    def _take(self, prefix: Prefix, keys: list[int]) -> None:
        if prefix.num_bytes > self.max_bytes:
            return
        for piece, _ in prefix.pieces:
            self.num_bytes += 0 if piece.users else piece.num_bytes
            piece.users += 1
        self.num_bytes += _num_bytes(prefix.states or {})
        self.shrink(self.max_bytes)
        self._prefixes[self._next] = prefix
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
        self.shrink(-1)
        self._blocks.clear()

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used prefixes until at most max_bytes are held."""
        while self._prefixes and self.num_bytes > max_bytes:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, number: int) -> None:
        prefix = self._prefixes.pop(number)
        for piece, _ in prefix.pieces:
            piece.users -= 1
            self.num_bytes -= 0 if piece.users else piece.num_bytes
        self.num_bytes -= _num_bytes(prefix.states or {})
        self.num_tokens -= len(prefix.ids)
        for key in block_hashes(prefix.ids, prefix.owner):
            if self._blocks.get(key) == number:
                del self._blocks[key]
                # A block shared with another prefix is indexed again when that prefix is next added.


def _clipped(base: Prefix, count: int, *, mixed: bool) -> list[tuple[KVPiece, int]]:
    """Pieces of the first count tokens of a text. One that is little used is copied: a text does not hold memory of others
    that have gone. mixed: pieces may lack taps."""
    made = []
    for piece, _, used in base.parts(count):
        whole = piece.keys[0].shape[1] if piece.keys else used
        if 2 * used < whole:
            keys, values = ([each[:, :used].clone() for each in memory] for memory in (piece.keys, piece.values))
            taps = None if mixed or piece.taps is None else piece.taps[:, :used].clone()
            piece = KVPiece(keys, values, taps)
        made.append((piece, used))
    return made


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
