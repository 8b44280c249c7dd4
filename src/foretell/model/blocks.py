"""KV memory in blocks, for accelerators: a row takes as many as its text needs, and gives them back when it leaves.

So the rows of a batch need not have room for their longest texts all at once (Kwon et al., "PagedAttention", 2309.06180).
Memory and table are allocated once; between two steps the table alone changes, and within one nothing does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretell.core.errors import CapacityError
from foretell.core.upload import sent
from foretell.kernels.gpu.ops import BLOCK_SLOTS
from foretell.model.cache import SPARE, KVCache

BLOCK = BLOCK_SLOTS
"""Slots of a block."""
_FREE = -(1 << 20)
"""In the table: no block, whatever is added. What is written there goes to the first block of the memory, which nobody
reads, and a kernel does not write it."""
_FIRST = 2
"""Blocks before those of rows. The second is always zero, and read where a row has no block: masked, but finite."""


class BlockCache(KVCache):
    """Keys and values of every layer, [heads, blocks * BLOCK, head_dim] each, and ``table`` [rows, columns] int64: slot s
    of row b lies at ``table[b, s // BLOCK] + s % BLOCK``.

    ``keys`` and ``values`` show each layer's memory as [B, heads, blocks * BLOCK, head_dim], the same for every row. Rows
    take blocks by ``fit`` alone: the caller asks for them before it writes. A view (``rows``) reads and writes, and takes
    none.
    """

    table: Tensor

    def __init__(
        self, num_rows: int, capacity: int, slots: int | None, shapes: Sequence[tuple[int, int]], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Blocks for ``slots`` slots of all rows together (None: for all that they can use), and for one whole row in any
        case. shapes: (kv heads, head_dim) of each layer."""
        self.block = BLOCK
        whole = -(-capacity // BLOCK)
        every = num_rows * whole
        self.num_blocks = every if slots is None else max(whole, min(every, slots // BLOCK))
        self._columns = -(-(capacity + SPARE) // BLOCK)
        self._device = device
        super().__init__(num_rows, capacity, shapes, dtype, [device] * len(shapes))

    def _allocate(self, reserve: int) -> None:
        self.reserve, self._is_view = reserve, False
        self.memory = self._next_memory()
        count = (_FIRST + self.num_blocks) * self.block
        made = [
            [torch.zeros(heads, count, dim, dtype=self._dtype, device=device) for dim in (key_dim, value_dim)]
            for heads, key_dim, value_dim, device in self._layouts
        ]
        self._all_keys, self._all_values = [keys for keys, _ in made], [values for _, values in made]
        self._host = torch.full((reserve, self._columns), _FREE)
        self.table = sent(self._host, self._device)
        self._within = sent(torch.arange(self.block), self._device)
        self._taken: list[list[int]] = [[] for _ in range(reserve)]  # blocks of each row
        self._free = list(range(_FIRST + self.num_blocks - 1, _FIRST - 1, -1))  # the last is given first
        self._show()

    def _show(self) -> None:
        self.keys = [memory.expand(self.num_rows, *memory.shape) for memory in self._all_keys]
        self.values = [memory.expand(self.num_rows, *memory.shape) for memory in self._all_values]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that rows have."""
        return (self.num_blocks - len(self._free)) * self.block * self.bytes_per_slot

    # -- blocks ----------------------------------------------------------------------------------------------------

    def fit(self, needs: Sequence[int], first: int = 0) -> None:
        """Rows first, first + 1, ... have blocks for needs[0], needs[1], ... slots from now on. They keep what they have
        taken. Raises CapacityError, and gives none, where there are too few."""
        wanted = [-(-min(need, self.capacity) // self.block) for need in needs]
        grown = [row for row, count in enumerate(wanted, first) if count > len(self._taken[row])]
        if not grown:
            return
        missing = sum(wanted[row - first] - len(self._taken[row]) for row in grown)
        if missing > len(self._free):
            raise CapacityError(
                f"rows need {missing} more blocks of {self.block} slots, and {len(self._free)} of {self.num_blocks} are "
                "free: admit fewer requests, or give more KV memory"
            )
        for row in grown:
            while len(self._taken[row]) < wanted[row - first]:
                self._taken[row].append(self._free.pop())
        self._tell(grown)

    def _tell(self, rows: Sequence[int]) -> None:
        """Bring the device's table up to date with what these rows have taken, by one upload."""
        if not rows:
            return
        for row in rows:
            taken = self._taken[row]
            self._host[row, : len(taken)] = torch.tensor(taken, dtype=torch.int64) * self.block
            self._host[row, len(taken) :] = _FREE
        index = torch.tensor(rows)
        packed = sent(torch.cat((index[:, None], self._host[index]), 1), self._device)
        self.table.index_copy_(0, packed[:, 0], packed[:, 1:])

    def keep(self, rows: Tensor, used: int | None = None) -> None:
        """See ``KVCache.keep``: nothing is copied. The blocks of all other rows are free."""
        order = rows.tolist()
        before = self._taken
        self._taken = [before[row] for row in order]
        self._taken += [[] for _ in range(self.reserve - len(order))]
        kept = set(order)
        for row, blocks in enumerate(before):
            if row not in kept:
                self._free += reversed(blocks)
        self._tell([row for row, blocks in enumerate(self._taken) if blocks != before[row]])
        self.num_rows, self.loras = len(order), [self.loras[row] for row in order]
        self._show()

    def open_rows(self, count: int, kept: int | None = None) -> None:
        """See ``KVCache.open_rows``; they have no blocks yet. Raises CapacityError where the table has no row left."""
        if self.num_rows + count > self.reserve:
            raise CapacityError(f"{self.num_rows + count} rows are to be open, and {self.reserve} were allocated")
        self.num_rows += count
        self.loras += [0] * count
        self._show()

    def clear(self) -> None:
        """See ``KVCache.clear``."""
        self.keep(torch.arange(0))

    def release(self, row: int) -> None:
        """Nothing: ``keep`` has freed its blocks."""

    def scrub(self, row: int) -> None:
        """See ``KVCache.scrub``."""
        if self._taken[row]:
            view = self.rows(row, row + 1)
            places = view.sight(len(self._taken[row]) * self.block)
            for memory in (*self._all_keys, *self._all_values):
                memory.index_fill_(1, places, 0.0)

    def rows(self, start: int, stop: int) -> "BlockCache":
        """See ``KVCache.rows``."""
        view = object.__new__(BlockCache)
        view.__dict__.update(self.__dict__)
        view.num_rows, view.reserve, view._is_view = stop - start, stop - start, True
        view.table, view._taken, view._host = self.table[start:stop], [], self._host[:0]
        view.loras = (self.loras[start:stop] + [0] * (stop - start))[: stop - start]
        view._show()
        return view

    def join(self, other: KVCache, used: int, kept: int | None = None) -> None:
        """See ``KVCache.join``; the rows have blocks for their capacity."""
        if used > self.capacity:
            raise CapacityError(f"{used} slots of a row join a cache whose rows have {self.capacity}")
        start = self.num_rows
        self.open_rows(other.num_rows)
        self.fit([self.capacity] * other.num_rows, start)
        for row in range(other.num_rows):
            keys, values = other.rows(row, row + 1).saved(used)
            self.rows(start + row, start + row + 1).restore(keys, values, used)

    # -- reading and writing ---------------------------------------------------------------------------------------

    def places(self, slots: Tensor) -> Tensor:
        """See ``KVCache.places``: slots [..., B, n] of this memory."""
        starts = self.table[: slots.shape[-2]].expand(*slots.shape[:-2], -1, -1).gather(-1, slots // self.block)
        return (starts + slots % self.block).clamp_(min=0)

    def sight(self, span: int) -> Tensor:
        """[B * S] places of each row's slots, S being span rounded up to whole blocks."""
        starts = self.table[: self.num_rows, : -(-span // self.block)].clamp(min=self.block)
        return (starts[:, :, None] + self._within).flatten()

    def seen(self, layer: int, span: int, sight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See ``KVCache.seen``; a copy."""
        assert sight is not None
        found = (memory[layer].index_select(1, sight) for memory in (self._all_keys, self._all_values))
        keys, values = (
            each.view(len(each), self.num_rows, -1, each.shape[-1]).transpose(0, 1)[:, :, :span] for each in found
        )
        return keys, values

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """See ``KVCache.write``; slots as ``places`` returns them."""
        at = slots.flatten()
        for memory, new in ((self._all_keys[layer], keys), (self._all_values[layer], values)):
            memory.index_copy_(1, at, new.transpose(1, 2).flatten(0, 1).transpose(0, 1).to(memory.dtype))

    def move(self, src: Tensor, dst: Tensor) -> None:
        """See ``KVCache.move``."""
        source, target = self.places(torch.stack((src, dst))).flatten(1)
        for memory in (*self._all_keys, *self._all_values):
            memory.index_copy_(1, target, memory.index_select(1, source))

    def saved(self, stop: int, start: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """See ``KVCache.saved``."""
        places = self.sight(stop)[start:stop]
        keys, values = ([each.index_select(1, places) for each in all_] for all_ in (self._all_keys, self._all_values))
        return keys, values

    def restore(self, keys: Sequence[Tensor], values: Sequence[Tensor], count: int, start: int = 0) -> None:
        """See ``KVCache.restore``."""
        places = self.sight(start + count)[start : start + count]
        for memory, known in zip((*self._all_keys, *self._all_values), (*keys, *values), strict=True):
            memory.index_copy_(1, places, known[:, :count])
