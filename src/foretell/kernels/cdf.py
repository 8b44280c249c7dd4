"""Draws by inverting the cumulative distribution, in C (``cdf.c``) and in torch."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.kernels.build import optional
from foretell.kernels.gpu.ops import ops


@lru_cache(maxsize=1)
def _cdf_library() -> ctypes.CDLL | None:
    """The C kernel of ``invert_cdf``, or None where it cannot be built."""
    return optional("cdf", dict.fromkeys(("invert_cdf_float", "invert_cdf_double"), "nnppp"))


def invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B] int64 draws from probs [B, V] (any positive scale) by uniform float64 [B] in (0, 1); never a token of mass 0.

    Summed in float64, so a token of any representable mass can be drawn; ``torch.multinomial`` costs ten times as much.
    On the CPU ``cdf.c`` adds the same numbers in the same order, without writing the sums: the same token.
    Raises ConfigError where distribution is not [B, V], V >= 1, or uniform not one float64 a row.
    """
    if probs.ndim != 2 or not probs.shape[1] or uniform.shape != probs.shape[:1] or uniform.dtype != torch.float64:
        raise ConfigError(
            f"invert_cdf takes distributions [B, V], V >= 1, and float64 uniforms [B]; given {tuple(probs.shape)} and "
            f"{uniform.dtype} {tuple(uniform.shape)}"
        )
    on_cpu = probs.device.type == "cpu" and probs.dtype in (torch.float32, torch.float64)
    library = _cdf_library() if on_cpu else None
    if library is not None:
        probs, uniform = probs.contiguous(), uniform.contiguous()
        winners = torch.empty(probs.shape[0], dtype=torch.int64)
        name = "double" if probs.dtype == torch.float64 else "float"
        kernel = getattr(library, f"foretell_invert_cdf_{name}")
        kernel(*probs.shape, probs.data_ptr(), uniform.data_ptr(), winners.data_ptr())
        return winners
    if (gpu := ops(probs.device.type)) is not None:
        drawn: Tensor = gpu.invert_cdf(probs, uniform)
        return drawn
    mass = probs.double().cumsum(-1)
    point = uniform[:, None] * mass[:, -1:]
    # The first token whose cumulative mass exceeds the point: right=True steps over tokens of mass 0.
    return torch.searchsorted(mass, point, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)
