"""The KV memory of some rows: written by slot, compacted by slot, never grown inside a step."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, [B, heads, S, head_dim] each, allocated once.

    Slots are written where a ``Plan`` says. What lies behind a row's length is garbage by definition: a rejected node
    is undone by not counting it. Memory is zeroed at birth, since a masked slot must still be finite.
    """

    def __init__(
        self,
        num_rows: int,
        capacity: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        value_dims: Sequence[int] | None = None,
    ) -> None:
        """shapes holds (kv heads, head_dim) of each layer, devices where each layer lives.

        value_dims is given where values have another head_dim than keys (multi-head latent attention).
        """
        self.num_rows = num_rows
        self.capacity = capacity
        self.keys = [
            torch.zeros(num_rows, heads, capacity, dim, dtype=dtype, device=device)
            for (heads, dim), device in zip(shapes, devices, strict=True)
        ]
        dims = [dim for _, dim in shapes] if value_dims is None else value_dims
        self.values = [key.new_zeros(*key.shape[:3], dim) for key, dim in zip(self.keys, dims, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [B, heads, n, head_dim] of one layer into slots [B, n]."""
        slots = slots.to(self.keys[layer].device)  # layers may live on several devices
        if self.num_rows == 1:  # one index is cheaper than two, and small models feel it
            self.keys[layer].index_copy_(2, slots[0], keys.to(self.keys[layer].dtype))
            self.values[layer].index_copy_(2, slots[0], values.to(self.values[layer].dtype))
            return
        rows = torch.arange(self.num_rows, device=slots.device)[:, None]  # [B, 1]
        # Advanced indices around a slice put their axes first: [B, n, heads, head_dim].
        self.keys[layer][rows, :, slots] = keys.transpose(1, 2).to(self.keys[layer].dtype)
        self.values[layer][rows, :, slots] = values.transpose(1, 2).to(self.values[layer].dtype)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [B, D] onto dst [B, D] in every layer; all are read before any is written."""
        if src.device.type == "cpu" and torch.equal(src, dst):
            return  # a host read is free here, and most commits move nothing
        rows = torch.arange(self.num_rows, device=src.device)[:, None]
        for memory in (*self.keys, *self.values):
            here = (rows.to(memory.device), src.to(memory.device), dst.to(memory.device))
            memory[here[0], :, here[2]] = memory[here[0], :, here[1]]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but rows [B'], in that order."""
        self.keys = [memory.index_select(0, rows.to(memory.device)) for memory in self.keys]
        self.values = [memory.index_select(0, rows.to(memory.device)) for memory in self.values]
        self.num_rows = len(rows)
