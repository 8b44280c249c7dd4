"""A checkpoint's tensors under the names of ``shape.layer_names``: renamed, and rows of fused ones by themselves."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.checkpoints.packed import Located, Packed
from foretell.checkpoints.weights import WeightSource


class Part(NamedTuple):
    """Where a tensor is."""

    theirs: str  # the source's name
    rows: tuple[int, int] | Tensor | None = None  # a range of its rows, or int64 numbers of rows; None: all, in order


class PartWeights(WeightSource):
    """Parts of another source's tensors. back: what the source would call one that it lacks."""

    def __init__(
        self, source: WeightSource, parts: Mapping[str, Part], back: Callable[[str], str] = lambda name: name
    ) -> None:
        self._source, self._parts, self._back = source, parts, back

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        theirs, rows = self._parts[name]
        shape = self._source.shape(theirs)
        if rows is None:
            return shape
        return (len(rows) if isinstance(rows, Tensor) else rows[1] - rows[0], *shape[max(1, len(shape) - 1) :])

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        part = self._parts.get(name)
        return self._source.called(self._back(name) if part is None else part.theirs)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        theirs, rows = self._parts[name]
        if rows is None:
            self._source.read_into(theirs, out.view(self._source.shape(theirs)))
        elif len(self._source.shape(theirs)) > 1:
            out.copy_(self.reader(name)(0, len(out)))
        else:
            whole = self._source.read(theirs, out.dtype, out.device)
            out.copy_(whole[rows] if isinstance(rows, Tensor) else whole[slice(*rows)])

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``: a range of rows is a view."""
        theirs, rows = self._parts[name]
        own = self._source.shared(theirs)
        if own is None or rows is None:
            return own
        return None if isinstance(rows, Tensor) else (own.flatten(0, -2) if own.dim() > 1 else own)[slice(*rows)]

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``; the whole tensor where its rows are reordered."""
        theirs, rows = self._parts[name]
        read = self._source.reader(theirs)
        if rows is None:
            return read
        if not isinstance(rows, Tensor):
            first = rows[0]
            return lambda start, stop: read(first + start, first + stop)
        part = read(0, self._source.shape(theirs)[0])[rows]
        return lambda start, stop: part[start:stop].contiguous()

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``."""
        theirs, own = self._parts[name]
        if not isinstance(own, Tensor):
            return self._source.packed(theirs, within(own, rows))
        packed = self._source.packed(theirs)
        if packed is None:
            return None
        data = packed.data[own if rows is None else own[slice(*rows)]]
        return Packed(packed.kind, (len(data), packed.shape[1]), data)

    def located(self, name: str, rows: tuple[int, int] | None = None) -> Located | None:
        """See ``WeightSource.located``."""
        theirs, own = self._parts[name]
        return None if isinstance(own, Tensor) else self._source.located(theirs, within(own, rows))

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._source.release()


def within(outer: tuple[int, int] | None, rows: tuple[int, int] | None) -> tuple[int, int] | None:
    """A range of rows of a range, in the whole; None: all."""
    if outer is None or rows is None:
        return outer or rows
    return outer[0] + rows[0], outer[0] + rows[1]


def in_heads(order: Tensor, count: int, *, of: int = 0) -> Tensor:
    """[count] int64 rows: ``order`` within each head, which begin ``of`` rows apart (default: len(order))."""
    each = of or len(order)
    return (torch.arange(0, count * each // len(order), each)[:, None] + order).flatten()
