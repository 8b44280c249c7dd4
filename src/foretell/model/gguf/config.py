"""A transformers configuration from the metadata of a GGUF file.

transformers' own reader leaves out every kind of RoPE scaling, and takes float32 values as they are: 1e-5 becomes
9.999999747378752e-06. Here values are the shortest decimals, those of the config.json that the file was made of.
"""

import math
from typing import Any

import numpy as np
import torch

from foretell.core.errors import ModelError
from foretell.kernels.dequantise import dequantise_into
from foretell.model import ends
from foretell.model.gguf.file import GGUFFile, listed
from foretell.model.gguf.weights import architecture_of
from foretell.model.plain import PlainConfig, plain_config

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_CONTROL = 3  # the token type of control tokens
_GEMMA_PATTERN = 6  # every sixth layer of Gemma 3 sees the whole text
_GEMMA_27B_LAYERS = 62


def read_config(file: GGUFFile) -> Any:
    """The transformers configuration. Raises ModelError where the file lacks a value, or asks for what the architecture
    does not do."""
    from transformers import AutoConfig

    values = read_values(file)
    dtype = getattr(torch, values.pop("dtype"))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.dtype = dtype
    return config


def read_plain(file: GGUFFile) -> PlainConfig | None:
    """The configuration without transformers; None where it has to read it. Raises ModelError as ``read_config``."""
    return plain_config(read_values(file))


def read_values(file: GGUFFile) -> dict[str, Any]:
    """What config.json would say. Raises ModelError as ``read_config``."""
    architecture = architecture_of(file)
    hidden, heads = _whole(file, "embedding_length"), _whole(file, "attention.head_count")
    head_dim = _whole(file, "attention.key_length", hidden // heads)
    values = _whole(file, "attention.value_length", head_dim)
    turned = _whole(file, "rope.dimension_count", head_dim)
    if values != head_dim or turned != head_dim:
        raise ModelError(
            f"{file.name}: heads of {head_dim} values of which {turned} are rotated, beside {values} of v; {architecture} "
            "models have the same number of all three"
        )
    found = file.tensors["blk.0.attn_q.weight"].shape
    if found != (heads * head_dim, hidden):
        raise ModelError(
            f"{file.name}: tensor blk.0.attn_q.weight has shape {found}; {file.path.name} states {heads} heads of "
            f"{head_dim} values and a width of {hidden}, so expected {(heads * head_dim, hidden)}"
        )
    num_layers, context = _whole(file, "block_count"), _whole(file, "context_length")
    values_of: dict[str, Any] = {
        "model_type": MODEL_TYPES[architecture],
        "architectures": [CLASSES[architecture]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, head_dim, context),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token(file, "bos"),
        "eos_token_id": end_ids(file),
        "pad_token_id": _token(file, "padding"),
    }
    if architecture == "llama":
        values_of["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values_of["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if architecture.endswith("moe"):
        values_of |= _experts(file, architecture)
    else:
        values_of["intermediate_size"] = _whole(file, "feed_forward_length")
    if architecture == "gemma3":
        values_of |= _gemma3(file, num_layers, head_dim, hidden // heads)
    values_of["dtype"] = {"F32": "float32", "F16": "float16"}.get(_matrix_kind(file), "bfloat16")
    return values_of


def read_generation(file: GGUFFile) -> Any:
    """The ids that end an answer, as transformers' generation configuration."""
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=end_ids(file))


def end_ids(file: GGUFFile) -> list[int] | None:
    """Tokens that end an answer: those that the file names, by one id or by several, and its markers."""
    keys = [f"tokenizer.ggml.{name}_token_id{plural}" for name in ("eos", "eot", "eom") for plural in ("", "s")]
    tokens, types = listed(file, "tokens", str), listed(file, "token_type", int)
    wanted = {*ends.MARKERS, *ends.SPECIAL_MARKERS}
    known = {token: index for index, token in enumerate(tokens) if token in wanted}
    marked = ends.marked(known, lambda index: types[index : index + 1] == [_CONTROL])
    found = ends.joined(*(file.get(key) for key in keys), marked)
    return [index for index in found if not tokens or index < len(tokens)] or None


def _token(file: GGUFFile, key: str) -> int | None:
    value = file.get(f"tokenizer.ggml.{key}_token_id")
    return value if type(value) is int else None


def _rope(file: GGUFFile, head_dim: int, context: int) -> dict[str, Any]:
    """rope_parameters: the base, and the kind of scaling."""
    theta = _decimal(file, "rope.freq_base", 10000.0)
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = file.get("{arch}.rope.scaling.type", "none")
    factor = _decimal(file, "rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in file.tensors:
        return base | _by_factors(file, theta, head_dim, context)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return base
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _whole(file, "rope.scaling.original_context_length", context)
        given: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        more = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        for theirs, ours in more.items():
            if file.get(f"{{arch}}.rope.scaling.{theirs}") is not None:
                given[ours] = _decimal(file, f"rope.scaling.{theirs}")
        return base | given
    raise ModelError(f"{file.name}: RoPE scaling {kind!r} is unknown; known: none, linear, yarn, and Llama 3's factors")


def _by_factors(file: GGUFFile, theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """Scaling by one factor a frequency. Llama 3's are named again by their four parameters; others become LongRoPE's,
    which takes any, for texts of all lengths."""
    factors = torch.empty(file.tensors["rope_freqs.weight"].shape)
    dequantise_into(file.tensors["rope_freqs.weight"].kind, file.raw("rope_freqs.weight"), factors)
    if len(factors) != head_dim // 2:
        raise ModelError(f"{file.name}: rope_freqs.weight has {len(factors)} factors for heads of {head_dim} values")
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


def _gemma3(file: GGUFFile, num_layers: int, head_dim: int, usual: int) -> dict[str, Any]:
    """What Gemma 3 has beside the Llama family."""
    window = _whole(file, "attention.sliding_window", 0) or None
    full = [window is None or (layer + 1) % _GEMMA_PATTERN == 0 for layer in range(num_layers)]
    local = {"rope_type": "default", "rope_theta": _decimal(file, "rope.freq_base_swa", 10000.0)}
    context = _whole(file, "context_length")
    return {
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in full],
        "sliding_window": window or context,
        "query_pre_attn_scalar": usual if num_layers == _GEMMA_27B_LAYERS else head_dim,
        "final_logit_softcapping": file.get("{arch}.final_logit_softcapping"),
        "rope_parameters": {"full_attention": _rope(file, head_dim, context), "sliding_attention": local},
    }


def _experts(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """What mixtures of experts have beside the Llama family. Every layer has experts."""
    inner = _whole(file, "expert_feed_forward_length", 0) or file.tensors["blk.0.ffn_gate_exps.weight"].shape[-2]
    found = {
        "num_experts": _whole(file, "expert_count"),
        "num_experts_per_tok": _whole(file, "expert_used_count"),
        "moe_intermediate_size": inner,
        "intermediate_size": _whole(file, "feed_forward_length", 0) or inner,  # read by no layer
        # llama.cpp takes these where a file does not say
        "norm_topk_prob": bool(file.get("{arch}.expert_weights_norm", architecture == "qwen3moe")),
        "decoder_sparse_step": 1,
    }
    if architecture == "qwen2moe":
        found["shared_expert_intermediate_size"] = file.tensors["blk.0.ffn_gate_shexp.weight"].shape[0]
    return found


def _matrix_kind(file: GGUFFile) -> str:
    names = ("blk.0.ffn_down.weight", "blk.0.ffn_down_exps.weight")
    return next(file.tensors[name].kind for name in names if name in file.tensors)


def _whole(file: GGUFFile, key: str, default: int | None = None) -> int:
    """A positive number, or the default, which 0 stands for too where that is 0."""
    value = file.get(f"{{arch}}.{key}", default)
    if type(value) is not int or value < (0 if default == 0 else 1):
        arch = file.get("general.architecture")
        raise ModelError(f"{file.name}: {file.path.name} states {arch}.{key} = {value!r}; expected a positive number")
    return value


def _decimal(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A float32 of the file, a base, a factor or an epsilon, as the shortest decimal that it stands for."""
    value = file.get(f"{{arch}}.{key}", default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        arch = file.get("general.architecture")
        raise ModelError(f"{file.name}: {file.path.name} states {arch}.{key} = {value!r}; expected a positive number")
    return float(str(np.float32(value)))
