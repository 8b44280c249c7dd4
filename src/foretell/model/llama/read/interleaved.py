"""gpt-oss's experts as checkpoints hold them, each by itself: matrices are transposed, gate and up interleaved.

``experts.gate_up_proj`` is [experts, hidden, 2 inner] and ``down_proj`` [experts, inner, hidden]. OpenAI's files hold
``*_blocks`` [experts, rows, columns / 32, 16] and ``*_scales`` [experts, rows, columns / 32] in their place: MXFP4 (OCP
Microscaling Formats 1.0, section 6.3), rows of gate and up interleaved, which become GGUF's blocks.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.checkpoints.packed import BLOCK_KINDS, Packed
from foretell.checkpoints.weights import WeightSource, expect_shape
from foretell.kernels.dequantise import dequantise_into

_STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_blocks)?$")
_KIND = "MXFP4"
_VALUES, _BYTES = BLOCK_KINDS[_KIND]
_EMPTY = torch.empty(0, dtype=torch.uint8)


class _Place(NamedTuple):
    """Where a matrix is: every step-th row of an expert's part of a stack, from the first on; without blocks, column."""

    stack: str
    expert: int
    first: int
    step: int
    shape: tuple[int, int]
    has_blocks: bool


class InterleavedExperts(WeightSource):
    """Another source's tensors; those of its experts by the names of ``mixture.expert_names``."""

    def __init__(self, source: WeightSource, sizes: tuple[int, int], *, name: str = "the checkpoint") -> None:
        """sizes: experts of a layer, and rows of an expert's gate. Raises ShapeError, which names the model, for a stack of
        others."""
        num_experts, inner = sizes
        self._source, self._places = source, dict[str, _Place]()
        self._others = set(source.names)
        for stack in source.names:
            found = _STACK.fullmatch(stack)
            if found is None:
                continue
            has_blocks, parts = found[3] is not None, found[2].split("_")
            rows = len(parts) * inner if parts[0] == "gate" else None
            if has_blocks:
                scales = f"{stack.removesuffix('blocks')}scales"
                expect_shape(source, stack, (num_experts, rows, None, _BYTES - 1), name)
                shape = source.shape(stack)
                expect_shape(source, scales, shape[:3], name)
                size, columns = shape[1] // len(parts), shape[2] * _VALUES
                self._others.discard(scales)
            else:
                expect_shape(source, stack, (num_experts, inner if rows is None else None, rows), name)
                columns, size = source.shape(stack)[1], source.shape(stack)[2] // len(parts)
            self._others.discard(stack)
            for expert in range(num_experts):
                for at, part in enumerate(parts):
                    self._places[f"{found[1]}.{expert}.{part}_proj.weight"] = _Place(
                        stack, expert, at, len(parts), (size, columns), has_blocks
                    )

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return {*self._others, *self._places}

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        place = self._places.get(name)
        return self._source.shape(name) if place is None else place.shape

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        place = self._places.get(name)
        return self._source.called(name if place is None else place.stack)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        place = self._places.get(name)
        if place is None:
            self._source.read_into(name, out)
        elif place.has_blocks:
            held = torch.empty(place.shape, dtype=torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32)
            dequantise_into(_KIND, self._blocks(place, 0, place.shape[0]).view(-1).numpy(), held)
            out.copy_(held)
        else:
            columns = place.shape[1]
            part = self._source.reader(place.stack)(place.expert * columns, (place.expert + 1) * columns)
            out.copy_(part[:, place.first :: place.step].mT)

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``: a transposed matrix is none."""
        return None if name in self._places else self._source.shared(name)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``."""
        return super().reader(name) if name in self._places else self._source.reader(name)

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``: blocks are read, and put into GGUF's order, where they are wanted."""
        place = self._places.get(name)
        if place is None:
            return self._source.packed(name, rows)
        if not place.has_blocks:
            return None
        start, stop = rows or (0, place.shape[0])
        return Packed(
            _KIND, (stop - start, place.shape[1]), _EMPTY, lambda a, b: self._blocks(place, start + a, start + b)
        )

    def _blocks(self, place: _Place, start: int, stop: int) -> Tensor:
        """[stop - start, bytes of a row] uint8: rows of a matrix in GGUF's blocks, the scale before 16 bytes whose low
        halves are the first 16 values."""
        first, step, size, each = place.first, place.step, place.shape[0], place.shape[1] // _VALUES
        begin, end = ((place.expert * size + row) * step for row in (start, stop))
        codes = self._source.reader(place.stack)(begin * each, end * each)
        codes = codes.view(-1, step, each, _BYTES - 1)[:, first]
        scales = self._source.reader(f"{place.stack.removesuffix('blocks')}scales")(begin, end)
        low, high = codes[..., :8], codes[..., 8:]  # each byte holds two neighbours
        out = torch.empty(stop - start, each, _BYTES, dtype=torch.uint8)
        out[..., 0] = scales.view(-1, step, each)[:, first]
        out[..., 1::2], out[..., 2::2] = low & 15 | high << 4, low >> 4 | high & 240
        return out.flatten(1)

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._source.release()
