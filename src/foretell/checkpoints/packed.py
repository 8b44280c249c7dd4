"""Quantised matrices as files hold them: blocks of small integers with their scales, kept packed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype


class BlockKind(NamedTuple):
    """The layout of one kind of block, by the names and sizes of GGUF."""

    values: int  # weights of one block
    size: int  # bytes of one block


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18),
    "Q4_1": BlockKind(32, 20),
    "Q5_0": BlockKind(32, 22),
    "Q5_1": BlockKind(32, 24),
    "Q8_0": BlockKind(32, 34),
    "Q4_K": BlockKind(256, 144),
    "Q5_K": BlockKind(256, 176),
    "Q6_K": BlockKind(256, 210),
    "IQ4_NL": BlockKind(32, 18),
    "IQ4_XS": BlockKind(256, 136),
    "Q2_K": BlockKind(256, 84),
    "Q3_K": BlockKind(256, 110),
    "MXFP4": BlockKind(32, 17),
    "IQ2_XXS": BlockKind(256, 66),
    "IQ2_XS": BlockKind(256, 74),
    "IQ3_XXS": BlockKind(256, 98),
    "IQ1_S": BlockKind(256, 50),
    "IQ3_S": BlockKind(256, 110),
    "IQ2_S": BlockKind(256, 82),
    "IQ1_M": BlockKind(256, 56),
    "TQ1_0": BlockKind(256, 54),
    "TQ2_0": BlockKind(256, 66),
}
"""Block kinds that are read and decoded (GGUF specification, ``ggml-common.h``)."""


@dataclass(frozen=True)
class Packed:
    """One quantised matrix [out, in], row after row, each row whole blocks along ``in``."""

    kind: str  # a key of BLOCK_KINDS
    shape: tuple[int, int]  # (out, in); in is a multiple of the block's values
    data: "Tensor"  # [out, bytes of a row] uint8 on the CPU, the file's own bytes; empty where they are read
    read: "Callable[[int, int], Tensor] | None" = None  # rows [start, stop) of them

    def part(self, rows: tuple[int, int] | None) -> "Packed":
        """A range of its rows; None: all."""
        if rows is None:
            return self
        data = self.data[slice(*rows)] if self.read is None else self.read(*rows)
        return Packed(self.kind, (rows[1] - rows[0], self.shape[1]), data)

    def rows(self, start: int, stop: int) -> "Tensor":
        """Rows [start, stop), contiguous."""
        return self.data[start:stop].contiguous() if self.read is None else self.read(start, stop)


class Located(NamedTuple):
    """Where a file has a matrix whose rows stand behind each other as they are read."""

    file: Path
    offset: int  # bytes from the start of the file
    kind: "str | dtype"  # a key of BLOCK_KINDS, or the type of its values
    row_bytes: int
