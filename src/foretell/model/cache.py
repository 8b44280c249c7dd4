"""The KV memory of some rows: written by slot, compacted by slot, never grown inside a step."""

import ctypes
from collections.abc import Sequence
from itertools import count
from math import prod

import torch
from torch import Tensor

from foretell.core.errors import CapacityError
from foretell.core.platform import anonymous_memory, discard
from foretell.core.upload import sent
from foretell.kernels import structures

SCALE_BYTES = 4
_TINY = 1e-30


def spread_of(bias: Tensor, heads: int) -> Tensor:
    """[heads, d] float32: what queries are multiplied by, and keys divided, before the latter are rounded.

    A bias makes some numbers of all keys hundreds of times as large as others, which one scale would round away (Qwen2.5:
    up to 158). Rotation mixes number i with i + d / 2, so both have one factor: the root of the mean square of their
    biases and of 1, what a normed stream's products come to. bias [heads * d] of the keys' matrix. Sums are float64 and the
    factors bf16, so that they are the same on every machine.
    """
    squares = bias.double().view(heads, 2, -1).square().mean(1, keepdim=True) + 1.0
    return squares.sqrt().expand(-1, 2, -1).reshape(heads, -1).bfloat16().float()


def to_codes(x: Tensor) -> Tensor:
    """x [..., d] as [..., d + SCALE_BYTES] int8: scale = largest / 127, ties to even. Where x is not finite the scale is
    not either.

    The slow twin of ``code_slot`` and ``open_slot`` in ``native/slots.h``. A slot of a head is ``head_dim`` codes
    and behind them the bytes of a float32, the scale: number i is scale * code i. The scale stands in the slot so
    that whatever moves, copies or keeps slots carries it along.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    empty = largest <= _TINY
    # Not "127.0 / largest": torch makes that a reciprocal and a product, rounded twice.
    inverse = torch.where(empty, torch.zeros_like(largest), torch.full_like(largest, 127.0) / largest)
    codes = torch.round(wide * inverse).nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    scale = torch.where(empty, torch.zeros_like(largest), largest / 127.0)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), -1)


def from_codes(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., d] of slots [..., d + SCALE_BYTES] int8: scales and codes are multiplied in float32."""
    scale = slots[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (slots[..., :-SCALE_BYTES].float() * scale).to(dtype)


_WORTH = 1 << 18  # bytes
SPARE = 64
"""Slots behind a row's capacity on an accelerator, where captured graphs write padding."""
_numbers = count()
Shared = tuple[tuple[tuple[int, ...], int], ...]
"""Groups of rows, and how many slots the rows of each have in common."""


class KVCache:
    """Keys and values of every layer, [B, heads, S, head_dim] each, allocated once.

    Slots are written where a ``Plan`` says. Slots at or after a row's length are undefined: a rejected node is undone
    by not counting it. Memory starts as zero, since a masked slot must still be finite.

    The rows in use are the first ``num_rows`` of a reserve, so that rows can be added (``join``) and removed (``keep``)
    while a batch is being decoded. On a CPU a reserve beyond the first rows costs address space alone: pages are
    allocated when they are written, and ``release`` frees them. (On an accelerator: ``blocks.BlockCache``.)
    """

    block: int = 1  # slots that a row takes or gives back together
    table: Tensor | None = None  # where blocks lie, where rows are not whole
    shared: Shared = ()
    """Rows in use whose first slots hold the same, as far as texts reach: passes may read one row's for all of a group. For
    as long as no row comes, goes or moves."""

    def __init__(
        self,
        num_rows: int,
        capacity: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        value_dims: Sequence[int] | None = None,
        *,
        reserve: int = 0,
    ) -> None:
        """shapes holds (kv heads, head_dim) of each layer, devices where each layer lives.

        value_dims is given where values have another head_dim than keys; 0: they are a part of these. reserve: how many
        rows there is room for (at least num_rows). dtype int8: slots hold codes and their scale (``codes``).
        """
        self.num_rows = num_rows
        self.capacity = capacity
        self.loras = [0] * num_rows
        """Of each row in use the adapter (of ``CausalModel.loras``, from 1 on) that its keys and values are of; 0: none."""
        dims = [dim for _, dim in shapes] if value_dims is None else value_dims
        more = SCALE_BYTES if dtype == torch.int8 else 0
        self._layouts = [
            (heads, key_dim + more, value_dim + more if value_dim else 0, device)
            for (heads, key_dim), value_dim, device in zip(shapes, dims, devices, strict=True)
        ]
        self._dtype = dtype
        self._allocate(max(num_rows, reserve))

    def _allocate(self, reserve: int) -> None:
        self.reserve, self._is_view = reserve, False
        self.memory = self._next_memory()
        shapes = [
            (reserve, heads, self.capacity + (0 if device.type == "cpu" else SPARE), key_dim, value_dim, device)
            for heads, key_dim, value_dim, device in self._layouts
        ]
        self._all_keys = [
            _lazy_zeros(*shape, key_dim, dtype=self._dtype, device=device) for *shape, key_dim, _, device in shapes
        ]
        self._all_values = [
            _lazy_zeros(*shape, value_dim, dtype=self._dtype, device=device) for *shape, _, value_dim, device in shapes
        ]
        self._show()

    @staticmethod
    def _next_memory() -> int:
        """Another number wherever it lies elsewhere."""
        return next(_numbers)

    def _show(self) -> None:
        """Bind ``keys`` and ``values``, what the models read, to the rows in use."""
        self.keys = [memory[: self.num_rows] for memory in self._all_keys]
        self.values = [memory[: self.num_rows] for memory in self._all_values]
        self.shared = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values of the rows in use."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token's keys and values take, all layers together."""
        return sum(heads * (key + value) for heads, key, value, _ in self._layouts) * self._dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row that do not depend on its length."""
        return 0

    def fit(self, needs: Sequence[int], first: int = 0) -> None:
        """Rows first, first + 1, ... will use needs[0], needs[1], ... slots: those of whole rows are there."""

    def places(self, slots: Tensor) -> Tensor:
        """Where the rows' slots [B, n] lie, as ``write`` reads it."""
        return slots

    def sight(self, span: int) -> Tensor | None:
        """Where the first span slots of all rows lie, as ``seen`` reads it: the same for all layers of a pass."""
        return None

    def seen(self, layer: int, span: int, sight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, span, head_dim] of a layer's first span slots: views; of codes copies, in dtype."""
        keys, values = self.keys[layer][:, :, :span], self.values[layer][:, :, :span]
        if self._dtype != torch.int8:
            return keys, values
        return from_codes(keys, dtype), from_codes(values, dtype) if values.numel() else values

    def saved(self, stop: int, start: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of each layer's keys and values [heads, n, head_dim], slots [start, stop) of a cache of one row."""
        keys, values = ([each[0, :, start:stop].clone() for each in memory] for memory in (self.keys, self.values))
        return keys, values

    def restore(self, keys: Sequence[Tensor], values: Sequence[Tensor], count: int, start: int = 0) -> None:
        """Write the first count of those into slots [start, start + count) of a cache of one row."""
        for memory, known in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            memory[0, :, start : start + count] = known[:, :count]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [B, heads, n, head_dim] of one layer into slots [B, n]."""
        slots = slots.to(self.keys[layer].device)  # layers may live on several devices
        keys, values = self._held(keys), self._held(values)
        if self.num_rows == 1:  # one index is cheaper than two, which is measurable with small models
            self.keys[layer].index_copy_(2, slots[0], keys)
            self.values[layer].index_copy_(2, slots[0], values)
            return
        rows = torch.arange(self.num_rows, device=slots.device)[:, None]  # [B, 1]
        # Advanced indices around a slice put their axes first: [B, n, heads, head_dim].
        self.keys[layer][rows, :, slots] = keys.transpose(1, 2)
        self.values[layer][rows, :, slots] = values.transpose(1, 2)

    def write_packed(self, layer: int, rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """The same for T nodes of any rows: rows [T], slots [T], keys and values [T, heads, head_dim]."""
        self.keys[layer][rows, :, slots] = self._held(keys)
        self.values[layer][rows, :, slots] = self._held(values)

    def _held(self, x: Tensor) -> Tensor:
        """Keys or values as slots hold them."""
        return to_codes(x) if self._dtype == torch.int8 and x.numel() else x.to(self._dtype)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [B, D] onto dst [B, D] in every layer; all are read before any is written."""
        if src.device.type == "cpu" and torch.equal(src, dst):
            return  # a host read is free here, and most commits move nothing
        rows = torch.arange(self.num_rows, device=src.device)[:, None]
        for memory in (*self.keys, *self.values):
            here = (rows.to(memory.device), src.to(memory.device), dst.to(memory.device))
            memory[here[0], :, here[2]] = memory[here[0], :, here[1]]

    def keep(self, rows: Tensor, used: int | None = None) -> None:
        """Drop all rows but rows [B'], in that order. Slots at or after ``used`` (default: all) need not survive. The
        memory of rows that are no longer in use is released."""
        used = self.capacity if used is None else used
        moved = [(place, row) for place, row in enumerate(rows.tolist()) if place != row]
        if moved:
            pairs = torch.tensor(moved).t()
            on = {device: sent(pairs, device) for device in {memory.device for memory in self._all_keys}}
            for memory in (*self._all_keys, *self._all_values):
                places, sources = on[memory.device]
                # All are read (a copy) before any is written: the order may be any permutation.
                chosen = memory[:, :, :used].index_select(0, sources)
                memory[:, :, :used].index_copy_(0, places, chosen)
        before, self.num_rows = self.num_rows, len(rows)
        self.loras = [self.loras[row] for row in rows.tolist()]
        self._show()
        for row in range(self.num_rows, before):
            self.release(row)

    def join(self, other: "KVCache", used: int, kept: int | None = None) -> None:
        """Append the other's rows after these, copying slots [0, used) of each. kept: slots of these rows that must survive
        (None: all). Raises CapacityError where they are too long for this cache."""
        if used > self.capacity:
            raise CapacityError(f"{used} slots of a row join a cache whose rows have {self.capacity}")
        start = self.num_rows
        self.open_rows(other.num_rows, kept)
        self.loras[start:] = other.loras
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[start:, :, :used] = theirs[:, :, :used]

    def open_rows(self, count: int, kept: int | None = None) -> None:
        """Take count more rows into use, after the others. Their contents are undefined, but finite. kept: see ``join``:
        where the memory moves, a copy of slots that were never written would allocate their pages."""
        if self.num_rows + count > self.reserve:
            keys, values = self._all_keys, self._all_values
            self._allocate(max(self.num_rows + count, 2 * self.reserve))
            for new, old in zip((*self._all_keys, *self._all_values), (*keys, *values), strict=True):
                new[: self.num_rows, :, :kept] = old[: self.num_rows, :, :kept]
        self.num_rows += count
        self.loras += [0] * count
        self._show()

    def clear(self) -> None:
        """Take all rows out of use; their memory is the reserve for rows to come."""
        self.num_rows, self.loras = 0, []
        self._show()

    def rows(self, start: int, stop: int) -> "KVCache":
        """Rows [start, stop) of the reserve as a cache of their own, sharing memory. It must not grow or be reordered."""
        view = object.__new__(KVCache)
        view.num_rows, view.capacity, view.reserve = stop - start, self.capacity, stop - start
        view._layouts, view._dtype, view._is_view, view.memory = self._layouts, self._dtype, True, self.memory
        view.loras = (self.loras[start:stop] + [0] * (stop - start))[: stop - start]  # nobody decodes the rest
        view._all_keys = [memory[start:stop] for memory in self._all_keys]
        view._all_values = [memory[start:stop] for memory in self._all_values]
        view._show()
        return view

    def scrub(self, row: int) -> None:
        """Zero a row that failed: it may hold what is no number, which no mask hides from the row that comes there."""
        for memory in (*self._all_keys, *self._all_values):
            memory[row] = 0.0

    def release(self, row: int) -> None:
        """Return the memory of an unused row to the system where possible; what it then holds is finite."""
        if self._is_view:
            return
        for memory in (*self._all_keys, *self._all_values):
            if memory.device.type == "cpu" and memory.numel() * memory.element_size() >= _WORTH:
                piece = memory[row]
                discard(piece.data_ptr(), piece.numel() * piece.element_size())


def _lazy_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages are allocated at the first write, on a CPU and for large tensors."""
    count = prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < _WORTH:
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = anonymous_memory(max(1, count * dtype.itemsize), huge=False)  # huge, one written slot would claim 2 MiB
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)  # keeps the mapping alive


class BoundCache(KVCache):
    """Keys and values on the CPU, with ``structures.Cache`` over them: ``address``, read again whenever they move."""

    def __init__(
        self,
        num_rows: int,
        capacity: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        rope: tuple[Tensor, Tensor],
        value_dims: Sequence[int] | None = None,
    ) -> None:
        """shapes: (kv heads, head dimension) of each layer; rope: float32 cosines and sines [capacity, d / 2];
        value_dims: as ``KVCache``."""
        super().__init__(num_rows, capacity, shapes, dtype, [torch.device("cpu")] * len(shapes), value_dims)
        self._rope = rope
        self._bind()

    def _bind(self) -> None:
        """Read the addresses again; needed after anything that replaces the tensors."""
        pointers = ctypes.c_void_p * len(self.keys)
        cos, sin = self._rope
        self._keys = pointers(*(key.data_ptr() for key in self.keys))
        self._values = pointers(*(value.data_ptr() for value in self.values))
        self.view = structures.Cache(
            self._keys, self._values, self.num_rows, self.capacity, cos.data_ptr(), sin.data_ptr(),
            coded=self._dtype == torch.int8,
        )  # fmt: skip
        self.address = ctypes.addressof(self.view)

    def _show(self) -> None:
        """See ``KVCache._show``; the rows in use begin where the reserve does, so their addresses are its."""
        super()._show()
        if hasattr(self, "_rope"):
            self._bind()

    def rows(self, start: int, stop: int) -> "BoundCache":
        """See ``KVCache.rows``."""
        view = super().rows(start, stop)
        view.__class__ = type(self)
        assert isinstance(view, BoundCache)
        view._rope = self._rope
        view._bind()
        return view
