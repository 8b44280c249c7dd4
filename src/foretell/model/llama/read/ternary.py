"""Linears of BitNet checkpoints, whose weights are -1, 0 and 1 times one scale (Ma and others, The Era of 1-bit LLMs,
2024): packed by four in uint8 beside their scale, or plain and to be rounded. They become blocks of GGUF's TQ2_0.

transformers rounds a linear's input to int8 with one scale a token; here inputs are as of other quantised matrices.
"""

import re
from collections.abc import Callable, Collection
from functools import cache

import torch
from torch import Tensor

from foretell.checkpoints.packed import BLOCK_KINDS, Packed
from foretell.checkpoints.weights import WeightSource
from foretell.model.llama.shape import LlamaShape

_KIND = "TQ2_0"
_VALUES = BLOCK_KINDS[_KIND].values
_LINEAR = re.compile(r"\.(self_attn|mlp)\.\w+_proj\.weight$")
_EMPTY = torch.empty(0, dtype=torch.uint8)
_EACH = 4  # weights of a byte
_LEAST, _CPU = 1e-5, torch.device("cpu")


def ternary_weights(source: WeightSource, shape: LlamaShape) -> WeightSource:
    """Another source's tensors, its ternary linears by their values; the source itself where it has none."""
    return TernaryWeights(source, shape.traits.ternary) if shape.traits.ternary else source


class TernaryWeights(WeightSource):
    """A source with ternary linears. Each has [rows / 4, columns] bytes, of which byte r has row r in its lowest two bits,
    plus one, then rows / 4 + r, and so on, and a scale that is a factor ("times") or a divisor ("over"); or ("online")
    plain weights, whose scale is the mean of their sizes."""

    def __init__(self, source: WeightSource, form: str) -> None:
        self._source, self._form = source, form
        packed = (name for name in source.names if f"{name}_scale" in source.names)
        self._linears = {name for name in source.names if _LINEAR.search(name)} if form == "online" else {*packed}
        self._scale = cache(self._read_scale)

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return {*self._source.names} - {f"{name}_scale" for name in self._linears}

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        shape = self._source.shape(name)
        is_packed = name in self._linears and self._form != "online"
        return (_EACH * shape[0], *shape[1:]) if is_packed else shape

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        return self._source.called(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        if name in self._linears:
            out.copy_(self.reader(name)(0, len(out)))
        else:
            self._source.read_into(name, out)

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``: ternary values are made."""
        return None if name in self._linears else self._source.shared(name)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``."""
        if name not in self._linears:
            return self._source.reader(name)
        return lambda start, stop: (self._codes(name, start, stop).float() - 1.0) * self._scale(name)

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``; None where rows are not whole blocks, or float16 holds the scale badly."""
        if name not in self._linears:
            return self._source.packed(name, rows)
        (first, last), columns = rows or (0, self.shape(name)[0]), self.shape(name)[1]
        scale = self._scale(name).half()
        if columns % _VALUES or not _LEAST < float(scale) < float("inf"):
            return None

        def blocks(start: int, stop: int) -> Tensor:
            codes = self._codes(name, first + start, first + stop).view(stop - start, -1, 2, _EACH, 32)
            low = codes[..., 0, :] | codes[..., 1, :] << 2 | codes[..., 2, :] << 4 | codes[..., 3, :] << 6
            scales = scale[None].view(torch.uint8).expand(*low.shape[:2], 2)
            return torch.cat((low.flatten(2), scales), -1).flatten(1)

        return Packed(_KIND, (last - first, columns), _EMPTY, blocks)

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._source.release()

    def _codes(self, name: str, start: int, stop: int) -> Tensor:
        """[stop - start, columns] uint8: 0, 1 and 2."""
        read = self._source.reader(name)
        if self._form == "online":
            inverse = 1.0 / self._scale(name)
            return ((read(start, stop).float() * inverse).round().clamp(-1, 1) + 1).to(torch.uint8)
        each, parts = self._source.shape(name)[0], []
        for part in range(start // each, -(-stop // each)):
            held = read(max(start - part * each, 0), min(stop - part * each, each))
            parts.append(held >> 2 * part & 3)
        return torch.cat(parts)

    def _read_scale(self, name: str) -> Tensor:
        """float32, of no dimensions: what -1 and 1 stand for."""
        if self._form == "online":
            return self._source.read(name, torch.float32, _CPU).abs().mean().clamp(min=_LEAST)
        scale = self._source.read(f"{name}_scale", torch.float32, _CPU).reshape(())
        return scale if self._form == "times" else 1.0 / scale
