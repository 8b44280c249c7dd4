"""rope_parameters from the metadata of a GGUF file, and from its tensor of factors."""

import math
from typing import Any

import torch

from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.values import decimal, refuse, whole
from foretell.core.errors import ModelError
from foretell.kernels.dequantise import dequantise_into

FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors of factors, which frequencies are divided by."""


def read_rope(file: GGUFFile, rotated: int, context: int) -> dict[str, Any]:
    """rope_parameters: the base, and the kind of scaling. rotated: values of a head that are.

    As llama.cpp reads the keys: a factor without a kind is linear; ``rope.scale_linear`` is the factor's name of before
    October 2023; a kind "none" has no factor; tensors of factors and the factor are multiplied; attn_factor, of whatever
    kind, multiplies cosines and sines. Raises ModelError for what no configuration of transformers says.
    """
    theta = decimal(file, "rope.freq_base", 10000.0)
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.get("{arch}.rope.scaling.type", "linear")
    stated = "rope.scaling.factor"
    old = stated if file.get(f"{{arch}}.{stated}") is not None else "rope.scale_linear"
    factor = decimal(file, old, 1.0, zero=True)
    if kind == "none":
        factor = 1.0
    attention = decimal(file, "rope.scaling.attn_factor", 1.0)
    tensors = [name for name in (FREQS, SHORT, LONG) if name in file.tensors]
    if tensors and kind not in ("none", "linear", "longrope"):
        refuse(file, "rope.scaling.type", f"expected none, linear or longrope beside tensor {tensors[0]}")
    if FREQS in tensors:
        return base | _by_factors(file, theta, rotated, context, factor, attention)
    if len(tensors) == 1:
        lacks = LONG if tensors == [SHORT] else SHORT
        raise ModelError(f"{file.where} lacks tensor {lacks}; expected both tensors of LongRoPE's factors")
    if tensors:
        return base | _longrope(file, rotated, context, factor, attention)
    if kind == "yarn":
        return base | _yarn(file, factor, context, attention)
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{file.name}: RoPE scaling {kind!r} is unknown here; known: none, linear, yarn, LongRoPE's with both tensors "
            "of factors, and Llama 3's factors"
        )
    if attention != 1.0:
        refuse(file, "rope.scaling.attn_factor", f"expected 1 with RoPE scaling {kind!r}")
    return base if factor == 1.0 else base | {"rope_type": "linear", "factor": factor}


def _yarn(file: GGUFFile, factor: float, context: int, attention: float) -> dict[str, Any]:
    original = whole(file, "rope.scaling.original_context_length", context)
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    more = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_log_multiplier": "mscale_all_dim"}
    for theirs, ours in more.items():
        if file.get(f"{{arch}}.rope.scaling.{theirs}"):
            found[ours] = decimal(file, f"rope.scaling.{theirs}")
    if "mscale_all_dim" in found:
        found["mscale"] = 1.0  # llama.cpp's
    # A checkpoint's; 1 is what llama.cpp writes for none
    own = decimal(file, "rope.scaling.yarn_attn_factor", 1.0, zero=True)
    if attention != 1.0 and (own != 1.0 or "mscale" in found):
        refuse(file, "rope.scaling.attn_factor", "expected 1 beside yarn_attn_factor or yarn_log_multiplier")
    if own != 1.0:
        found["attention_factor"] = own
    elif attention != 1.0:
        found["attention_factor"] = attention * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return found


def _longrope(file: GGUFFile, rotated: int, context: int, factor: float, attention: float) -> dict[str, Any]:
    """LongRoPE's factors (Phi-3), for short texts and for long ones."""
    original = whole(file, "rope.scaling.original_context_length", context)
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": (read_factors(file, SHORT, rotated) * factor).tolist(),
        "long_factor": (read_factors(file, LONG, rotated) * factor).tolist(),
    }
    stretch = max(context / original, 1.0)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original))  # what transformers takes where nothing is stated
    return found | ({} if math.isclose(attention, usual, rel_tol=1e-6) else {"attention_factor": attention})


def read_factors(file: GGUFFile, name: str, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] what a tensor of factors divides each frequency by."""
    factors = torch.empty(file.tensors[name].shape)
    dequantise_into(file.tensors[name].kind, file.raw(name), factors)
    if factors.shape != (head_dim // 2,):
        raise ModelError(f"{file.name}: {name} has {factors.numel()} factors for heads of {head_dim} values")
    return factors


def _by_factors(
    file: GGUFFile, theta: float, head_dim: int, context: int, factor: float, attention: float
) -> dict[str, Any]:
    """Scaling by one factor a frequency. Llama 3's are named again by their four parameters; others become LongRoPE's,
    which takes any, for texts of all lengths."""
    factors = read_factors(file, FREQS, head_dim) * factor
    largest = float(factors.max())
    for original in (8192, 4096, 2048, 16384, 32768) if attention == 1.0 else ():
        if torch.allclose(_llama3_factors(theta, head_dim, largest, original), factors, rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    listed = factors.tolist()
    return {
        "rope_type": "longrope", "short_factor": listed, "long_factor": listed, "attention_factor": attention,
        "original_max_position_embeddings": context,
    }  # fmt: skip


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> torch.Tensor:
    """[head_dim / 2] by how much Llama 3 divides each frequency (its paper's code, with factors 1 and 4)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original * frequencies / (2 * math.pi)  # over the original context
    smooth = ((turns - 1.0) / 3.0).clamp(0.0, 1.0)
    return (1 / ((1 - smooth) / factor + smooth)).float()
