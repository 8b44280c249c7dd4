"""rope_parameters from the metadata of a GGUF file, and from its tensor of factors."""

import math
from typing import Any

import torch

from foretell.core.errors import ModelError
from foretell.kernels.dequantise import dequantise_into
from foretell.model.gguf.file import GGUFFile
from foretell.model.gguf.values import decimal, whole

FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors of factors, which frequencies are divided by."""


def read_rope(file: GGUFFile, rotated: int, context: int) -> dict[str, Any]:
    """rope_parameters: the base, and the kind of scaling. rotated: values of a head that are."""
    theta = decimal(file, "rope.freq_base", 10000.0)
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.get("{arch}.rope.scaling.type", "none")
    factor = decimal(file, "rope.scaling.factor", 1.0)
    if FREQS in file.tensors:
        return base | _by_factors(file, theta, rotated, context)
    if SHORT in file.tensors and LONG in file.tensors:
        return base | _longrope(file, rotated, context)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return base
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return base | _yarn(file, factor, context)
    raise ModelError(
        f"{file.name}: RoPE scaling {kind!r} is unknown here; known: none, linear, yarn, LongRoPE's with both tensors of "
        "factors, and Llama 3's factors"
    )


def _yarn(file: GGUFFile, factor: float, context: int) -> dict[str, Any]:
    original = whole(file, "rope.scaling.original_context_length", context)
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    more = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
    for theirs, ours in {**more, "yarn_log_multiplier": "mscale_all_dim"}.items():
        if file.get(f"{{arch}}.rope.scaling.{theirs}"):
            found[ours] = decimal(file, f"rope.scaling.{theirs}")
    return found | ({"mscale": 1.0} if "mscale_all_dim" in found else {})  # the 1 is llama.cpp's


def _longrope(file: GGUFFile, rotated: int, context: int) -> dict[str, Any]:
    """LongRoPE's factors (Phi-3), for short texts and for long ones. What cosines and sines are multiplied by follows from
    the two lengths, where the file says nothing else."""
    original = whole(file, "rope.scaling.original_context_length", context)
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": read_factors(file, SHORT, rotated).tolist(),
        "long_factor": read_factors(file, LONG, rotated).tolist(),
    }
    stretch = max(context / original, 1.0)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original))
    stated = decimal(file, "rope.scaling.attn_factor", usual)
    return found | ({} if math.isclose(stated, usual, rel_tol=1e-6) else {"attention_factor": stated})


def read_factors(file: GGUFFile, name: str, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] what a tensor of factors divides each frequency by."""
    factors = torch.empty(file.tensors[name].shape)
    dequantise_into(file.tensors[name].kind, file.raw(name), factors)
    if factors.shape != (head_dim // 2,):
        raise ModelError(f"{file.name}: {name} has {factors.numel()} factors for heads of {head_dim} values")
    return factors


def _by_factors(file: GGUFFile, theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """Scaling by one factor a frequency. Llama 3's are named again by their four parameters; others become LongRoPE's,
    which takes any, for texts of all lengths."""
    factors = read_factors(file, FREQS, head_dim)
    largest = float(factors.max())
    for original in (8192, 4096, 2048, 16384, 32768):
        if torch.allclose(_llama3_factors(theta, head_dim, largest, original), factors, rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    listed = factors.tolist()
    return {
        "rope_type": "longrope", "short_factor": listed, "long_factor": listed, "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }  # fmt: skip


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> torch.Tensor:
    """[head_dim / 2] by how much Llama 3 divides each frequency (its paper's code, with factors 1 and 4)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original * frequencies / (2 * math.pi)  # over the original context
    smooth = ((turns - 1.0) / 3.0).clamp(0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).float()
