"""GGUF files of tiny models, written by the gguf library's own writer as llama.cpp's converter lays them out."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretell.checkpoints.gguf.families import architectures

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
ARCHITECTURES |= {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}
K_BLOCKS = {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q2_K": (256, 84), "Q3_K": (256, 110)}
# Kinds that the library does not write, or not as it reads them all: random blocks.
K_BLOCKS |= {"IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17)}
FEW_BITS = {
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "TQ1_0": (256, 54), "TQ2_0": (256, 66),
}  # fmt: skip
K_BLOCKS |= FEW_BITS
SCALES = {  # bytes of a block where a float16 stands: random ones are kept finite
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (),  # of which four bytes have four bits each: see ``put_scales``
}  # fmt: skip

SIZES = {"IQ4_NL": 1e-3, "IQ4_XS": 6e-5, "Q2_K": 4e-3, "Q3_K": 1.5e-3, "IQ2_XXS": 4e-4, "IQ2_XS": 4e-4, "IQ2_S": 4e-4}
SIZES |= {"IQ1_S": 4e-3, "IQ1_M": 4e-3, "IQ3_XXS": 1e-4, "IQ3_S": 2e-4, "TQ1_0": 0.03, "TQ2_0": 0.03}
"""Sizes of scales with which matrices have a trained model's: so that rounded activations move logits by little."""


def put_scales(kind: str, blocks: np.ndarray[Any, np.dtype[np.uint8]], scales: np.ndarray[Any, Any]) -> None:
    """Write float16 numbers [n] to the places of a kind's scales in blocks [n, bytes]."""
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":
        bits = scales.view(np.uint16)
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[rows, bytes] random blocks of a kind with finite scales: also those of kinds that the library cannot write."""
    values, size = (BLOCKS | K_BLOCKS)[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = generator.normal(0, SIZES.get(kind, 0.01), len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":
        put_scales(kind, blocks, generator.normal(0, SIZES[kind], len(blocks)).astype(np.float16))
    if kind == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 4  # powers of two about 0.005
    return blocks.reshape(rows, -1)


def write(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    kind: str | Callable[[str], str] = "F32",
    metadata: Mapping[str, Any] | None = None,
    replaced: Mapping[str, Any] | None = None,
    arch: str | None = None,
) -> Path:
    """Write a model. kind: of the matrices, one or by name. replaced: tensors in other words: (array, kind), or None for
    leaving one out. metadata: further or other values."""
    config = model.config.get_text_config()
    arch = arch or ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, arch)
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    values = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        **_tokens(tokenizer, config.vocab_size),
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and arch != "llama":
        values |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
    if arch.endswith("moe"):
        values |= {
            f"{arch}.expert_count": config.num_experts,
            f"{arch}.expert_used_count": config.num_experts_per_tok,
            f"{arch}.expert_feed_forward_length": config.moe_intermediate_size,
        }
    if arch == "gemma3":
        values[f"{arch}.attention.sliding_window"] = config.sliding_window
    for key, value in {**values, **(metadata or {})}.items():
        _add(writer, key, value)
    tensors = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:  # gate and up apart, E by E
        prefix = name.removesuffix("gate_up_proj")
        gate, up = tensors.pop(name).chunk(2, 1)
        down = tensors.pop(f"{prefix}down_proj")
        for key, tensor in (("gate", gate), ("up", up), ("down", down)):
            tensors[f"{prefix}{key}_proj.weight"] = tensor.contiguous()
    own = architectures.ARCHITECTURES[ARCHITECTURES.get(config.model_type, arch)]
    names = dict([*own.required(config.num_hidden_layers), *own.optional(config.num_hidden_layers)])
    for theirs, ours in names.items():
        if ours not in tensors or (theirs == "output.weight" and config.tie_word_embeddings):
            continue
        tensor = _converted(theirs, tensors[ours], arch, config)
        asked = kind if isinstance(kind, str) else kind(theirs)
        if theirs not in (replaced or {}):
            _put(writer, theirs, tensor.numpy(), asked if tensor.dim() > 1 and "_inp" not in theirs else "F32")
    for theirs, given in (replaced or {}).items():
        if given is not None:
            _put(writer, theirs, *given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(theirs: str, tensor: Tensor, arch: str, config: Any) -> Tensor:
    """As llama.cpp's converter changes a tensor (conversion/llama.py, conversion/gemma.py)."""
    if arch == "llama" and theirs.split(".")[-2] in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if ".attn_q." in theirs else config.num_key_value_heads
        shape = (heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape).contiguous()
    if theirs.endswith("ffn_gate_inp_shexp.weight"):
        return tensor[0]
    return tensor + 1 if arch == "gemma3" and theirs.endswith("norm.weight") else tensor


def _put(writer: GGUFWriter, name: str, array: Any, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    if array.dtype == np.uint8:
        writer.add_tensor(name, array, raw_dtype=number)
    elif kind in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float16 if kind == "F16" else np.float32))
    elif kind in K_BLOCKS:
        blocks = random_blocks(kind, array.size // array.shape[-1], array.shape[-1], seed=len(name))
        writer.add_tensor(name, blocks.reshape(*array.shape[:-1], -1), raw_dtype=number)
    else:
        writer.add_tensor(name, quantize(array, number), raw_dtype=number)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _tokens(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's part of the metadata, of a byte-level one."""
    if tokenizer is None:
        return {}
    inner = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    added = inner.get_added_tokens_decoder()
    types = [
        int(TokenType.UNUSED if index not in by_id else _type(added[index]) if index in added else TokenType.NORMAL)
        for index in range(vocab_size)
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges(inner),
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _type(added: Any) -> TokenType:
    return TokenType.CONTROL if added.special else TokenType.USER_DEFINED


def merges(inner: Any) -> Sequence[str]:
    """The merges of a tokenizers BPE, as files list them."""
    import json

    return [" ".join(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]


def random_model(module: PreTrainedModel) -> PreTrainedModel:
    """The module with norms and biases away from their initial ones and zeros, so that a lost one shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if "gemma" in module.config.model_type or name.endswith("bias") else 1.0
                parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return module
