"""Write a head as the GGUF file that llama.cpp's converter makes of its authors' directory: the inverse of ``heads``."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

from foretell.checkpoints.files import read_json
from foretell.checkpoints.gguf.file import is_gguf, open_gguf
from foretell.checkpoints.gguf.heads import MARKER, NAMES, OUTPUT_LENT, HeadFile
from foretell.checkpoints.gguf.tokenizer import CONTROL, UNUSED, USER_DEFINED
from foretell.core.errors import ConfigError, ModelError

_NORMAL = 1  # the token type of all others
_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PAIRS = ("attn_q", "attn_k")
_DFLASH = ("dflash", "dspark", "DFlashDraftModel", "DSparkDraftModel")  # speculators' types, and architectures


def write_head(
    path: Path,
    head: HeadFile,
    vocabulary: Mapping[str, Any],
    *,
    method: str,
    context: int | None = None,
    kind_of_matrices: str | None = None,
) -> None:
    """Write a head, whole or not at all. config: of the layouts that ``read_head`` gives. vocabulary: ``tokenizer.*`` of
    the target (see ``vocabulary_of``). method: the head's, for messages. context: the longest text of the target.

    Matrices keep their dtype, vectors become float32, as their converter has it; kind_of_matrices: those whose rows are
    whole blocks are rounded to it, "Q8_0" or "Q4_0". Raises ConfigError where llama.cpp has no place for the head, or path
    holds another model; OSError where it cannot be written.
    """
    if path.exists() and not _is_head(path):
        raise ConfigError(f"{path} is there, and holds no draft head; choose another file")
    config = head.config
    kind = _kind(config, method)
    values = {**vocabulary, **(_eagle3 if kind == "eagle3" else _dflash)(config, context)}
    count = values["block_count"]
    known = {**NAMES[kind].may, **NAMES[kind].required(count)}
    names = {ours: theirs for theirs, ours in known.items()}
    stray = sorted(head.tensors.keys() - names.keys() - {"t2d"})
    if stray:
        raise ConfigError(f"llama.cpp has no place for tensor {stray[0]} of this head in architecture {kind!r}")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    writer = GGUFWriter(part, kind)
    try:
        for key, value in values.items():
            _add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{kind}.{key}", value)
        for ours, tensor in head.tensors.items():
            if ours == "d2t":
                ids = tensor.long() + torch.arange(len(tensor))
                writer.add_tensor("d2t", ids.numpy(), raw_dtype=GGMLQuantizationType.I64)
            elif ours != "t2d":
                theirs = names[ours]
                own = _turned(tensor, values, theirs) if kind == "eagle3" else tensor
                _put(writer, theirs, own, kind_of_matrices)
        factors = _factors(values, config)
        if factors is not None:
            _put(writer, "rope_freqs.weight", factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def vocabulary_of(path: Path, *, name: str, size: int) -> dict[str, Any]:
    """``tokenizer.*`` of a target: of its GGUF file, or made of a directory's tokenizer.json. size: rows of its embedding.

    A head is fed tokens, never text: the rule of splitting is not told. Raises ModelError where there is none.
    """
    if path.is_file():
        metadata = open_gguf(path, name=name).metadata
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.") and "chat_" not in key}
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{name}: no tokenizer.json in {path}, whose vocabulary goes into the file")
    found = read_json(file, name=name)
    model, added = found.get("model") or {}, {int(each["id"]): each for each in found.get("added_tokens") or ()}
    if model.get("type") != "BPE":
        raise ModelError(f"{name}: its tokenizer is of type {model.get('type')!r}; only BPE goes into a GGUF file")
    by_id = {index: token for token, index in model["vocab"].items()} | {
        key: each["content"] for key, each in added.items()
    }
    types = [
        UNUSED if index not in by_id else _NORMAL if index not in added
        else CONTROL if added[index].get("special") else USER_DEFINED
        for index in range(size)
    ]  # fmt: skip
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    out: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if "ByteLevel" in json.dumps(found.get("pre_tokenizer")) else "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    ends = read_json(path / "config.json", name=name)
    for key, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = ends.get(f"{key}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int:
            out[f"tokenizer.ggml.{theirs}_token_id"] = value
    return out


def _is_head(path: Path) -> bool:
    try:
        return is_gguf(path) and open_gguf(path, name=str(path)).get("general.architecture") in NAMES
    except ModelError:
        return False


def _kind(config: Mapping[str, Any], method: str) -> str:
    """The architecture of a head. Raises ConfigError where llama.cpp has none."""
    library = config.get("speculators_model_type")
    named = str((config.get("architectures") or [library])[0])
    if named == "LlamaForCausalLMEagle3":
        return "eagle3"
    if library in _DFLASH or named in _DFLASH:
        return "dflash"
    qwen = named == "Eagle3Qwen3ForCausalLM"
    told = "its eagle3 has no norms of queries and keys" if qwen else "it reads eagle3 and dflash heads"
    raise ConfigError(f"llama.cpp cannot run this {method} head: {told}")


def _layer(layer: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    """Keys of the decoder layers, without the architecture. Raises ConfigError for what has no key."""
    for key, off in (("attention_bias", False), ("use_sliding_window", False), ("mlp_bias", False)):
        if layer.get(key, off) != off:
            raise ConfigError(f"llama.cpp's architectures of heads have no place for {key} = {layer[key]!r}")
    head_dim = layer["head_dim"]
    scaling = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    return {
        "block_count": layer["num_hidden_layers"],
        "context_length": context or layer.get("max_position_embeddings") or 4096,
        "embedding_length": layer["hidden_size"],
        "feed_forward_length": layer["intermediate_size"],
        "attention.head_count": layer["num_attention_heads"],
        "attention.head_count_kv": layer["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(layer["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(scaling.get("rope_theta", layer.get("rope_theta", 10000.0))),
        "vocab_size": layer["vocab_size"],
        **_scaling(scaling),
    }


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):  # the latter is a tensor of factors
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"RoPE scaling {kind!r} has no place in llama.cpp's architectures of heads")
    out: dict[str, Any] = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        out["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for ours in ("beta_fast", "beta_slow"):
            if ours in rope:
                out[f"rope.scaling.yarn_{ours}"] = float(rope[ours])
    return out


def _factors(values: Mapping[str, Any], config: Mapping[str, Any]) -> Tensor | None:
    """[head_dim / 2] by how much each frequency is divided, for Llama 3's scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    size, theta = values["rope.dimension_count"], values["rope.freq_base"]
    turns = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size) / (2 * math.pi)
    turns *= rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    factors: Tensor = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors.float()


def _eagle3(config: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    states = config["eagle_aux_hidden_state_layer_ids"]
    for good, what in (
        (config["num_hidden_layers"] == 1, f"{config['num_hidden_layers']} layers: it has one"),
        (len(states) == 3, f"{len(states)} tapped layers: it has three"),
        (not config.get("fc_norm"), "a norm of each tapped layer"),
        (not config.get("norm_output"), "norm_output"),
    ):
        if not good:
            raise ConfigError(f"llama.cpp's eagle3 has no place for {what}")
    return {
        **_layer(config, context),
        "target_layers": list(states),
        "target_hidden_size": config["hidden_size"],
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": bool(config.get("norm_before_fc")),
        **({OUTPUT_LENT: True} if config.get(MARKER, {}).get(OUTPUT_LENT) else {}),
    }


def _dflash(config: Mapping[str, Any], context: int | None) -> dict[str, Any]:
    layer = config.get("transformer_layer_config", config)
    own = {**config, **config.get("dflash_config", {})}
    spark = bool(own.get("markov_rank"))
    if not spark and own.get("sample_from_anchor"):
        raise ConfigError("llama.cpp's dflash has no place for an anchor that guesses without a Markov head")
    if own.get("enable_confidence_head") and not spark:
        raise ConfigError("llama.cpp's dflash has no place for a confidence head without a Markov head")
    states = own.get("aux_hidden_state_layer_ids") or [layer_id + 1 for layer_id in own["target_layer_ids"]]
    out = {
        **_layer(layer, context),
        "target_layers": list(states),
        "block_size": own["block_size"],
        "attention.causal": bool(own.get("causal_head")),
        "tokenizer.ggml.mask_token_id": own["mask_token_id"],
    }
    if spark:
        out |= {
            "sample_from_anchor": bool(own["sample_from_anchor"]),
            "has_confidence_head": bool(own["enable_confidence_head"]),
        }
    return out


def _turned(tensor: Tensor, values: Mapping[str, Any], theirs: str) -> Tensor:
    """Rows of q and k as llama.cpp's RoPE of a Llama wants them: (i, i + half) of a head beside each other."""
    part = theirs.split(".")[-2] if "." in theirs else ""
    if part not in _PAIRS:
        return tensor
    heads = values["attention.head_count" if part == "attn_q" else "attention.head_count_kv"]
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _put(writer: GGUFWriter, name: str, tensor: Tensor, rounded: str | None = None) -> None:
    tensor = tensor.detach().cpu().contiguous()
    if rounded is not None and tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
        made = GGMLQuantizationType[rounded]
        writer.add_tensor(name, quantize(tensor.float().numpy(), made), raw_dtype=made)
        return
    kind = "F32" if tensor.dim() == 1 else _KINDS.get(tensor.dtype, "F32")
    if kind == "BF16":
        raw: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, (tensor if kind == "F16" else tensor.float()).numpy())


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)
