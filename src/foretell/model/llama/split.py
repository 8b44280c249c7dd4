"""Fused matrices (Phi-3: qkv_proj, gate_up_proj; GLM-4: the latter) under the names of their parts, and partial or
interleaved rope as that of whole heads."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import rotation_order
from foretell.model.llama.weights import WeightSource, expect_shape
from foretell.model.packed import Packed

_PARTS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class SplitWeights(WeightSource):
    """Another source's tensors, its fused ones as rows of several; rows of queries and keys in ``rotation_order``."""

    def __init__(self, source: WeightSource, shape: LlamaShape, *, name: str) -> None:
        """Raises ShapeError, which names the model, for a fused tensor that is not as long as its parts."""
        self._source = source
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        inner = shape.intermediate_size
        self._rows = {
            "q_proj": (0, queries),
            "k_proj": (queries, queries + keys),
            "v_proj": (queries + keys, queries + 2 * keys),
            "gate_proj": (0, inner),
            "up_proj": (inner, 2 * inner),
        }
        lengths = {"qkv_proj": queries + 2 * keys, "gate_up_proj": 2 * inner}
        for each in source.names:
            for whole, length in lengths.items():
                if each.endswith(f".{whole}.weight"):
                    expect_shape(source, each, (length, shape.hidden_size), name)
        rotated, self._dim = shape.traits.rotated, shape.head_dim
        is_turned = rotated is not None or shape.traits.interleaved
        self._turn = (
            rotation_order(self._dim, rotated or self._dim, interleaved=shape.traits.interleaved) if is_turned else None
        )

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        found: set[str] = set()
        for name in self._source.names:
            parts = [name.replace(whole, part) for part, whole in _PARTS.items() if f".{whole}." in name]
            found |= set(parts or [name])
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        whole, rows = self._find(name)
        shape = self._source.shape(whole)
        return shape if rows is None else (rows[1] - rows[0], *shape[1:])

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        return self._source.called(self._find(name)[0])

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        whole, rows = self._find(name)
        if rows is None:
            self._source.read_into(whole, out)
        elif out.dim() == 1:  # a bias
            out.copy_(self._source.read(whole, out.dtype, out.device)[slice(*rows)][self._order(name, len(out))])
        else:
            out.copy_(self.reader(name)(0, rows[1] - rows[0]))

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``: a part whose rows keep their order is a view."""
        whole, rows = self._find(name)
        own = self._source.shared(whole)
        if own is None or rows is None:
            return own
        return None if self._is_turned(name) else own[slice(*rows)]

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``; the whole part where its rows are reordered."""
        whole, rows = self._find(name)
        read = self._source.reader(whole)
        if rows is None:
            return read
        first, last = rows
        if not self._is_turned(name):
            return lambda start, stop: read(first + start, first + stop)
        part = read(first, last)[self._order(name, last - first)]
        return lambda start, stop: part[start:stop].contiguous()

    def packed(self, name: str) -> Packed | None:
        """See ``WeightSource.packed``: rows are whole blocks, in any order."""
        whole, rows = self._find(name)
        packed = self._source.packed(whole)
        if packed is None or rows is None:
            return packed
        data = packed.data[slice(*rows)]
        data = data[self._order(name, len(data))] if self._is_turned(name) else data
        return Packed(packed.kind, (len(data), packed.shape[1]), data)

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._source.release()

    def _find(self, name: str) -> tuple[str, tuple[int, int] | None]:
        """The tensor that holds a name, and which of its rows; None: all."""
        for part, whole in _PARTS.items():
            if f".{part}." in name:
                first, last = self._rows[part]
                if name not in self._source.names:
                    return name.replace(part, whole), (first, last)
                if self._is_turned(name):
                    return name, (0, last - first)
        return name, None

    def _is_turned(self, name: str) -> bool:
        return self._turn is not None and (".q_proj." in name or ".k_proj." in name)

    def _order(self, name: str, count: int) -> Tensor:
        """[count] int64 rows in the order in which they are read."""
        if not self._is_turned(name) or self._turn is None:
            return torch.arange(count)
        starts = torch.arange(0, count, self._dim)
        return (starts[:, None] + self._turn).flatten()
