"""The matrices of the native decoder in memory: plain in the model's dtype, or quantised and packed.

``weights`` is one of WEIGHTS. "auto" keeps what the file holds: a quantised matrix of a GGUF file with its very values, a
plain one in the model's dtype. "fp32" and "bf16" dequantise, to the model's dtype. "int8" and "int4" round; with "int4"
the embedding and the head have 8 bits, and a matrix that the file already holds in 4 bits or fewer is kept. The target's
distribution is then the rounded model's. "least" is for drafts, whose law may be any: as "int4", the embedding and the head
too, where a model has LARGE weights or more; of a smaller one other things than reading its weights take the time.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.checkpoints.names import WEIGHTS
from foretell.checkpoints.packed import Located, Packed
from foretell.checkpoints.weights import WeightSource
from foretell.core.errors import ModelError
from foretell.core.progress import tell
from foretell.kernels import structures
from foretell.kernels.dequantise import grid_of
from foretell.kernels.native import library, need
from foretell.model.llama import shape as llama

TILE = 16  # rows of a tile of quant.h


class Format(NamedTuple):
    """One format of ``native/quant.h``.

    Formats have scales, some a minimum or levels: ``tests/model/llama/quantised.py`` is the twin in plain torch.
    Every block kind of ``BLOCK_KINDS`` becomes a format without a change of its values: kinds of 2, 3 and 4 bits keep
    theirs, those of 5 and 6 are held in 8. TQ1_0 has 2 bits a weight here; of IQ1 to IQ3, whose files number the entries
    of a list of 4 or 8 weights, each weight has its own code, 3 bits of IQ1 and IQ2 and 4 of IQ3.
    """

    number: int  # in common.h
    bits: int  # of a stored code
    unit: int  # values of k that stand together: scales, then codes
    side_bytes: int  # of the scales of one unit of a tile

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of a tile."""
        return self.side_bytes + self.unit * TILE * self.bits // 8

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of a matrix with so many columns."""
        return -(-columns // self.unit) * self.unit_bytes // TILE


FORMATS = {
    "Q8": Format(2, 8, 64, 64),  # 32 codes and one float16 scale
    "Q8M": Format(3, 8, 64, 128),  # ... and one float16 minimum
    "Q4": Format(4, 4, 64, 64),
    "Q4M": Format(5, 4, 64, 128),
    "Q4K": Format(6, 4, 256, 320),  # scale and minimum in steps of two that 256 values share
    "Q8K": Format(7, 8, 256, 320),
    "Q8S": Format(8, 8, 256, 320),  # a scale for 16 values, in steps of one that 256 share
    "Q4N": Format(9, 4, 64, 64),
    "Q4X": Format(10, 4, 256, 192),  # scales in steps of one that 256 share
    "Q4E": Format(11, 4, 64, 32),  # a scale is a power of two
    "Q2K": Format(12, 2, 256, 320),  # as Q4K, but for 16 values
    "Q3S": Format(13, 3, 256, 320),  # as Q8S
    "Q2T": Format(14, 2, 256, 32),  # one scale for all 256
    "Q3I": Format(15, 3, 256, 160),  # a scale for 16 values, in odd steps of one that 256 share; so the next
    "Q3J": Format(16, 3, 256, 160),
    "Q4I": Format(17, 4, 256, 160),  # ... for 32 values
    "Q4J": Format(18, 4, 256, 160),
}
FORMAT_OF = {
    "Q8_0": "Q8", "Q5_0": "Q8", "Q5_1": "Q8M", "Q4_0": "Q4", "Q4_1": "Q4M", "Q4_K": "Q4K", "Q5_K": "Q8K", "Q6_K": "Q8S",
    "IQ4_NL": "Q4N", "IQ4_XS": "Q4X", "Q2_K": "Q2K", "Q3_K": "Q3S", "MXFP4": "Q4E",
    "TQ1_0": "Q2T", "TQ2_0": "Q2T", "IQ1_S": "Q3I", "IQ1_M": "Q3I", "IQ2_XXS": "Q3J", "IQ2_XS": "Q3J", "IQ2_S": "Q3J",
    "IQ3_XXS": "Q4I", "IQ3_S": "Q4J",
}  # fmt: skip


_KINDS: dict[str | torch.dtype, int] = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 30,
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "Q2_K": 10, "Q3_K": 11, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
    "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ3_S": 21, "IQ2_S": 22, "IQ1_M": 29,
    "TQ1_0": 34, "TQ2_0": 35,
}  # fmt: skip
"""GGUF's numbers, of ggml."""


def pack_into(out: Tensor, form: str, kind: str | torch.dtype, rows: Tensor, columns: int) -> None:
    """Write rows as tiles to the front of out (uint8, zeros). The first row is the first of a tile.

    rows: [n, bytes of a row] uint8 of a block kind, whose values are kept, or [n, columns] floats, which are rounded to
    format "Q8" or "Q4".
    """
    assert rows.is_contiguous()
    assert rows.device.type == "cpu"
    assert (form in ("Q8", "Q4")) if isinstance(kind, torch.dtype) else form == FORMAT_OF[kind]
    assert out.numel() >= -(-len(rows) // TILE) * TILE * FORMATS[form].row_bytes(columns)
    pack_function()(
        FORMATS[form].number, _KINDS[kind], rows.data_ptr(), len(rows), columns, rows.stride(0) * rows.itemsize,
        _grid(kind), out.data_ptr(),
    )  # fmt: skip


def _grid(kind: str | torch.dtype) -> int | None:
    """The address of ``grid_of`` a kind."""
    grid = grid_of(kind) if isinstance(kind, str) else None
    return None if grid is None else grid.ctypes.data


def pack_function() -> Callable[..., int]:
    """``foretell_pack`` of the native library. Raises ModelError where there is none."""
    lib, reason = library()
    if lib is None:
        raise ModelError(f"quantised weights need the native decoder, which is not available: {reason}")
    pack: Callable[..., int] = lib.foretell_pack
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.foretell_pack.argtypes = [number, number, pointer, number, number, number, pointer, pointer]
    return pack


_LINE = 64  # bytes; every matrix begins at a line of the cache
_VALUES = 1 << 20  # about so many are converted at a time by one thread
LARGE = 1 << 26
"""Weights of a model that are rounded by "least"."""


@dataclass
class Matrices:
    """Matrices by name where they lie, and the memory that they lie in."""

    held: dict[str, structures.Matrix] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # "float32", "bfloat16", "int8", "int4", or the file's: "Q4_K"
    plain: dict[str, Tensor] = field(default_factory=dict)
    memory: list[Tensor] = field(default_factory=list)

    @property
    def label(self) -> str:
        """All kinds, those with most bytes first: "Q4_K+Q6_K"."""
        size: dict[str, int] = {}
        for name, kind in self.kinds.items():
            size[kind] = size.get(kind, 0) + self.num_bytes[name]
        return "+".join(sorted(size, key=lambda kind: -size[kind]))


@dataclass(frozen=True)
class _Making:
    """How one matrix is made."""

    shape: tuple[int, int]
    kind: str  # see Matrices.kinds
    format: str | None = None  # a key of FORMATS; None: plain
    packed: Packed | None = None  # what is kept; None: values are read, and rounded where there is a format

    def num_bytes(self, dtype: torch.dtype) -> int:
        if self.format is None:
            return prod(self.shape) * dtype.itemsize
        rows, columns = self.shape
        return -(-rows // TILE) * TILE * FORMATS[self.format].row_bytes(columns)


def read_matrices(
    source: WeightSource,
    names: Sequence[str],
    *,
    weights: str,
    dtype: torch.dtype,
    allocate: Callable[[int], Tensor],
    plain: Collection[str] = (),
    told: str | None = None,
) -> Matrices:
    """Every named matrix: the source's own tensor where it can be shared, else in one arena of ``allocate``'s (zeros).
    plain: those that are never quantised, and not in the label. told: the model whose progress this is.

    Loading takes the arena and some MiB more. Raises ModelError for a block kind that is not known.
    """
    out, plans = Matrices(), {}
    if weights == "least" and sum(prod(source.shape(name)) for name in names) < LARGE:
        weights = "auto"
    for name in names:
        plan = _plan(source, name, "fp32" if name in plain else weights, dtype)
        own = source.shared(name) if plan.format is None else None
        if own is not None and own.dtype == dtype and own.device.type == "cpu" and own.is_contiguous():
            out.memory.append(own)
            _add_plain(out, name, own)
        else:
            plans[name] = plan
    need(structures.FORMATS[dtype] if plan.format is None else FORMATS[plan.format].number for plan in plans.values())
    need(matrix.format for matrix in out.held.values())
    if not plans:
        return _labelled(out, plain)
    sizes = [-(-plan.num_bytes(dtype) // _LINE) * _LINE for plan in plans.values()]
    arena = allocate(sum(sizes))
    out.memory.append(arena)
    done = 0
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for (name, plan), part in zip(plans.items(), torch.split(arena, sizes), strict=True):
            if told is not None:
                tell(told, done / arena.numel())
            done += part.numel()
            place = part[: plan.num_bytes(dtype)]
            if plan.format is None:
                tensor = place.view(dtype).view(plan.shape)
                source.read_into(name, tensor)
                _add_plain(out, name, tensor)
                continue
            _fill(source, name, plan, place, pool)
            form, columns = FORMATS[plan.format], plan.shape[1]
            out.held[name] = structures.Matrix(place.data_ptr(), None, form.number, columns, form.row_bytes(columns))
            out.num_bytes[name], out.kinds[name] = place.numel(), plan.kind
            source.release()
    return _labelled(out, plain)


def _labelled(out: Matrices, plain: Collection[str]) -> Matrices:
    for name in plain:
        out.kinds.pop(name, None)
    return out


def _add_plain(out: Matrices, name: str, tensor: Tensor) -> None:
    out.held[name] = structures.Matrix.of(tensor)
    out.plain[name], out.num_bytes[name] = tensor, tensor.numel() * tensor.itemsize
    out.kinds[name] = str(tensor.dtype).removeprefix("torch.")


def _plan(source: WeightSource, name: str, weights: str, dtype: torch.dtype) -> _Making:
    assert weights in WEIGHTS
    rows, columns = source.shape(name)
    packed = None if weights in ("fp32", "bf16") else source.packed(name)
    if packed is not None and packed.kind not in FORMAT_OF:
        raise ModelError(f"tensor {name} is {packed.kind}; quantised kinds that are decoded: {', '.join(FORMAT_OF)}")
    wanted = "int8" if weights == "int4" and name in (llama.EMBEDDING, llama.HEAD) else weights
    wanted = "int4" if weights == "least" else wanted
    if packed is not None:
        form = FORMAT_OF[packed.kind]
        if wanted == "auto" or (wanted == "int8" and form == "Q8") or (wanted == "int4" and FORMATS[form].bits <= 4):
            return _Making((rows, columns), packed.kind, form, packed)
    if wanted in ("int8", "int4"):
        return _Making((rows, columns), wanted, "Q8" if wanted == "int8" else "Q4")
    return _Making((rows, columns), str(dtype))


def _fill(source: WeightSource, name: str, plan: _Making, place: Tensor, pool: ThreadPoolExecutor) -> None:
    """place: the bytes of the tiles, zero; every thread makes some tiles at a time."""
    assert plan.format is not None
    rows, columns = plan.shape
    tile_bytes = TILE * FORMATS[plan.format].row_bytes(columns)
    step = max(TILE, _VALUES // columns // TILE * TILE)
    read = source.reader(name) if plan.packed is None else plan.packed.rows

    def fill(start: int) -> None:
        part = read(start, min(start + step, rows))
        kind = part.dtype if plan.packed is None else plan.packed.kind
        pack_into(place[start // TILE * tile_bytes :], plan.format or "", kind, part, columns)

    for _ in pool.map(fill, range(0, rows, step)):
        pass  # raises what a thread raised


class MatrixLayout(NamedTuple):
    """How one matrix would lie in memory, and where its file has the rows that it is made of."""

    name: str
    kind: str  # see Matrices.kinds
    matrix: structures.Matrix  # whose data is to be set
    rows: int
    num_bytes: int
    stored: Located | None  # None: it cannot be made of a file's rows as they are
    number: int  # of the file's kind, by GGUF
    grid: int | None = None  # see ``grid_of``: its address


def layout_of(source: WeightSource, name: str, weights: str, dtype: torch.dtype) -> MatrixLayout:
    """What ``read_matrices`` would make of a matrix (not with "least", which asks for all of a model's)."""
    plan, stored = _plan(source, name, weights, dtype), source.located(name)
    rows, columns = plan.shape
    form, row_bytes = structures.FORMATS[dtype], columns * dtype.itemsize
    floats = (torch.float32, torch.float16, torch.bfloat16) if plan.format or dtype == torch.float32 else (dtype,)
    if plan.format is not None:
        form, row_bytes = FORMATS[plan.format].number, FORMATS[plan.format].row_bytes(columns)
    if stored is not None and stored.kind not in (floats if plan.packed is None else (plan.packed.kind,)):
        stored = None
    matrix = structures.Matrix(None, None, form, columns, row_bytes)
    number, grid = (-1, None) if stored is None else (_KINDS[stored.kind], _grid(stored.kind))
    return MatrixLayout(
        name, plan.kind.removeprefix("torch."), matrix, rows, plan.num_bytes(dtype), stored, number, grid
    )
