"""GGUF's quantised blocks to floats: in C, about ten times as fast as the gguf library's numpy, which is its slow twin and
serves where there is no compiler, and for the kinds that the kernel does not know."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from foretell.kernels.build import optional

KINDS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "MXFP4",
    "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ3_S", "IQ2_S", "IQ1_M", "TQ1_0", "TQ2_0",
)  # fmt: skip
"""In the order of the C code."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_CHUNK = 1 << 22  # values at a time


dequantise_library = cache(partial(optional, "dequantise", {"dequantise": "inpppi:i"}))
"""The C kernel, or None where it cannot be built."""


@cache
def grid_of(kind: str) -> NDArray[np.int8] | None:
    """[entries, 8 or 4]: the list of which values of a kind (IQ1 to IQ3) are chosen; None for kinds without."""
    quant = getattr(quants, kind, None)
    if quant is None or getattr(quant, "grid_hex", None) is None:
        return None
    quant.init_grid()
    return np.ascontiguousarray(quant.grid.reshape(quant.grid_shape), np.int8)


@cache
def can_dequantise(kind: str) -> bool:
    """Whether tensors of a kind can be read: floats, the kernel's kinds, and what else the gguf library can."""
    if kind in _FLOATS or kind in KINDS:
        return True
    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except NotImplementedError:
        return False
    return True


def dequantise_into(kind: str, raw: NDArray[np.uint8], out: Tensor) -> None:
    """Fill out (contiguous, on the CPU, any float dtype) with the values of raw, whole blocks one after the other."""
    assert out.is_contiguous()
    assert out.device.type == "cpu"
    flat = out.view(-1)
    if kind in _FLOATS:
        flat.copy_(torch.from_numpy(raw).view(_FLOATS[kind]))
        return
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert raw.size // size * values == flat.numel()
    library = dequantise_library() if kind in KINDS else None
    grid = grid_of(kind)
    step = max(1, _CHUNK // values)

    def part(start: int) -> None:
        blocks = raw[start * size : (start + step) * size]
        place = flat[start * values : (start + step) * values]
        if library is None:
            whole = dequantize(blocks.reshape(1, -1), GGMLQuantizationType[kind]).reshape(-1)
            place.copy_(torch.from_numpy(whole))
            return
        direct = place.dtype in (torch.float32, torch.bfloat16)
        held = place if direct else torch.empty(place.shape)
        library.foretell_dequantise(
            KINDS.index(kind),
            blocks.size // size,
            blocks.ctypes.data,
            None if grid is None else grid.ctypes.data,
            held.data_ptr(),
            int(held.dtype == torch.bfloat16),
        )
        if not direct:
            place.copy_(held)

    starts = range(0, raw.size // size, step)
    if len(starts) == 1 or library is None:
        for start in starts:
            part(start)
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # the kernel runs without the interpreter's lock
        list(pool.map(part, starts))
