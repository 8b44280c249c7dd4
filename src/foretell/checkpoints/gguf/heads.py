"""Draft heads in GGUF files of their own, llama.cpp's ``eagle3`` and ``dflash`` (DSpark's heads included): what config.json
and the safetensors of their authors' directories would hold.

llama.cpp's converter (conversion/llama.py, conversion/qwen.py) counts hidden states, j = i + 1 for the output of layer i,
writes target ids where checkpoints have offsets (``d2t``), and reorders the rows of q and k of EAGLE-3's layer, which is a
Llama's, for its own RoPE. All of that is undone here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Change
from foretell.checkpoints.gguf.families.decoders import turned
from foretell.checkpoints.gguf.file import GGUFFile, called, open_gguf
from foretell.checkpoints.gguf.rope import read_rope
from foretell.checkpoints.gguf.values import decimal, refuse, whole
from foretell.checkpoints.gguf.weights import GGUFWeights
from foretell.checkpoints.packed import Packed
from foretell.core.errors import ModelError, nearest
from foretell.kernels.dequantise import can_dequantise

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
Adjust = Callable[[GGUFFile, str, tuple[str, ...]], Change | None]
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OUTPUT_LENT = "output_of_target"
"""A key of this library's own: the rows of the output head are the target's at the ids of d2t, and no file holds them."""
MARKER = "foretell"
"""As of ``heads.layout``: the key of config.json for what this library says."""
_WHOLE_NUMBERS = {"I64": np.int64, "I32": np.int32}


@dataclass(frozen=True)
class _Names:
    """Tensors of one architecture: theirs -> the authors'."""

    layer: Mapping[str, str]
    own: dict[str, str]
    may: Mapping[str, str] = field(default_factory=dict)  # those that a file may lack
    layers: str = "layers.{}."  # before the names of a layer

    def required(self, num_layers: int) -> dict[str, str]:
        """Of a head with so many layers."""
        return self.own | {
            f"blk.{index}.{theirs}": self.layers.format(index) + ours
            for index in range(num_layers)
            for theirs, ours in self.layer.items()
        }


NAMES = {
    "eagle3": _Names(
        {**_LAYER, "attn_norm_2.weight": "hidden_norm.weight"},
        {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight"},
        {
            "output.weight": "lm_head.weight",
            "token_embd.weight": "embed_tokens.weight",
            "enc.output_norm.weight": "input_norm.weight",
            "d2t": "d2t",
        },
        layers="midlayer.",
    ),
    "dflash": _Names(
        {
            **_LAYER,
            "attn_q_norm.weight": "self_attn.q_norm.weight",
            "attn_k_norm.weight": "self_attn.k_norm.weight",
        },
        {
            "fc.weight": "fc.weight",
            "enc.output_norm.weight": "hidden_norm.weight",
            "output_norm.weight": "norm.weight",
        },
        {
            "output.weight": "lm_head.weight",
            "token_embd.weight": "embed_tokens.weight",
            "markov_w1.weight": "markov_head.markov_w1.weight",
            "markov_w2.weight": "markov_head.markov_w2.weight",
            "conf_proj.weight": "confidence_head.proj.weight",
            "conf_proj.bias": "confidence_head.proj.bias",
            "d2t": "d2t",
        },
    ),
}
"""By architecture."""
_REFUSED = {
    "gemma4-assistant": "it attends to its target's own keys and values, which no method here lends to a head",
}
_VARIANTS = {  # a part of a tensor's name -> what that is
    "attn_sinks": "attention sinks",
    "hc_": "DeepSeek-V4's hyper-connections",
    "post_": "Gemma 4's norms after a block",
}


@dataclass(frozen=True)
class HeadFile:
    """A head as its authors would publish it."""

    config: dict[str, Any]  # config.json, of the layout that its "architectures" or "speculators_model_type" names
    tensors: dict[str, Tensor]  # as stored; quantised ones float32; on the CPU
    packed: dict[str, Packed]  # of those the ones in blocks that are decoded, as the file holds them


def read_head(path: Path, *, name: str) -> HeadFile:
    """Raises ModelError for a file that holds no head, and for tensors and keys that are missing, unknown or wrong."""
    file = open_gguf(path, name=name)
    kind = str(file.get("general.architecture"))
    if kind in _REFUSED:
        raise ModelError(f"{called(name, path)} holds a draft head of architecture {kind!r}: {_REFUSED[kind]}")
    if kind not in NAMES:
        raise ModelError(
            f"{called(name, path)} holds a model of architecture {kind!r}{nearest(kind, NAMES)}, and no draft head; a "
            "model of its own drafts by method 'draft_model', the MTP module inside a target's file by method 'mtp'"
        )
    num_layers = whole(file, "block_count")
    names = _known(file, kind, num_layers)
    floats = {theirs: ours for theirs, ours in names.items() if theirs != "d2t"}
    source = HeadTensors(file, floats, turned if kind == "eagle3" else None)
    tensors = {ours: source.stored(ours) for ours in source.names}
    if "d2t" in names:
        tensors["d2t"] = _offsets(file)
    packed = {ours: found for ours in source.names if (found := source.packed(ours)) is not None}
    config = (_eagle3 if kind == "eagle3" else _dflash)(file, num_layers, tensors)
    file.release()
    return HeadFile(config, tensors, packed)


class HeadTensors(GGUFWeights):
    """Tensors of a file that are no whole model."""

    def __init__(self, file: GGUFFile, known: Mapping[str, str], adjust: Adjust | None) -> None:
        """known: theirs -> ours; adjust: as ``Architecture.adjust``."""
        self._file = file
        self._enter(known, adjust)

    def stored(self, name: str) -> Tensor:
        """A tensor in the dtype that it is stored in, float32 where that is in blocks."""
        parts, change = self._entries[name]
        dtype = _DTYPES.get(self._file.tensors[parts[0]].kind, torch.float32)
        return self.read(name, torch.float32 if change.undo is not None else dtype, torch.device("cpu"))


def _known(file: GGUFFile, kind: str, num_layers: int) -> dict[str, str]:
    """theirs -> ours of the tensors of a file, all of which are known and can be read."""
    where, names = file.where, NAMES[kind]
    if num_layers > len(file.tensors):
        raise ModelError(
            f"{where} is damaged: {kind}.block_count is {num_layers}, for {len(file.tensors)} tensors; download it again"
        )
    required = names.required(num_layers)
    known = {
        **required,
        **{theirs: ours for theirs, ours in names.may.items() if theirs in file.tensors},
    }
    strange = sorted(file.tensors.keys() - known.keys() - {"rope_freqs.weight"})
    if strange:
        variant = next((what for part, what in _VARIANTS.items() if part in strange[0]), "another variant")
        raise ModelError(f"{where} has tensor {strange[0]}: {variant}, which no {kind} head has here")
    missing = [theirs for theirs in required if theirs not in file.tensors]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} of its {len(required)} tensors (the first: {missing[0]}); expected a whole "
            f"{kind} head"
        )
    for theirs in known:
        stored = file.tensors[theirs].kind
        if theirs == "d2t" and stored not in _WHOLE_NUMBERS:
            raise ModelError(
                f"{where}: tensor d2t is {stored}; expected the target's ids as {'or '.join(_WHOLE_NUMBERS)}"
            )
        if theirs != "d2t" and (stored in _WHOLE_NUMBERS or not can_dequantise(stored)):
            raise ModelError(f"{where}: tensor {theirs} is {stored}, which cannot be dequantised")
    return known


def _offsets(file: GGUFFile) -> Tensor:
    """[DV] int64 what checkpoints call d2t: the target's id of output i, less i."""
    info = file.tensors["d2t"]
    ids = torch.from_numpy(file.raw("d2t").view(_WHOLE_NUMBERS[info.kind]).astype(np.int64))
    return ids.view(info.shape) - torch.arange(info.shape[-1])


def _layer(file: GGUFFile, num_layers: int) -> dict[str, Any]:
    """The decoder layers' keys, as transformers writes them."""
    hidden, heads = whole(file, "embedding_length"), whole(file, "attention.head_count")
    head_dim = whole(file, "attention.key_length", whole(file, "rope.dimension_count", hidden // heads))
    _only(file, "attention.value_length", head_dim)
    _only(file, "rope.dimension_count", head_dim)
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": whole(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": decimal(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(file, head_dim, whole(file, "context_length", 1 << 20)),
        "vocab_size": _vocabulary(file),
    }


def _vocabulary(file: GGUFFile) -> int:
    """Tokens of the target."""
    tokens = file.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else whole(file, "vocab_size")


def _layers_read(file: GGUFFile) -> list[int]:
    """The hidden states that the head reads, as the file counts them."""
    found = file.get("{arch}.target_layers")
    if not isinstance(found, list) or not found or not all(type(each) is int for each in found):
        refuse(file, "target_layers", "expected a list of layer numbers")
    return found


def _flag(file: GGUFFile, key: str, default: bool) -> bool:
    value = file.get(f"{{arch}}.{key}", default)
    if type(value) is not bool:
        refuse(file, key, "expected true or false")
    return value


def _only(file: GGUFFile, key: str, allowed: Any) -> None:
    """Refuse a value that is not implemented here."""
    value = file.get(f"{{arch}}.{key}", allowed)
    if value != allowed:
        refuse(file, key, f"only {allowed!r} is supported")


def _eagle3(file: GGUFFile, num_layers: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As ``LlamaForCausalLMEagle3``."""
    _only(file, "block_count", 1)
    lent = _flag(file, OUTPUT_LENT, default=False)
    if lent and ("d2t" not in tensors or "lm_head.weight" in tensors):
        raise ModelError(
            f"{file.where} states eagle3.{OUTPUT_LENT} = true, which goes with a tensor d2t and without "
            "output.weight; download it again"
        )
    if not lent and "lm_head.weight" not in tensors:
        raise ModelError(
            f"{file.where} has no output.weight: its guesses are read by the target's output head, and "
            "an eagle3 head needs its own here"
        )
    before = _flag(file, "norm_before_fc", default=False)
    if before != ("input_norm.weight" in tensors):
        has = "no" if before else "a"
        raise ModelError(
            f"{file.where} states eagle3.norm_before_fc = {before} and has {has} tensor "
            "enc.output_norm.weight: they are of different heads"
        )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(file, num_layers),
        "draft_vocab_size": len(tensors["d2t" if lent else "lm_head.weight"]),
        **({MARKER: {OUTPUT_LENT: True}} if lent else {}),
        "target_hidden_size": whole(file, "target_hidden_size"),
        "norm_before_residual": _flag(file, "norm_before_residual", default=False),
        "norm_before_fc": before,
        "eagle_aux_hidden_state_layer_ids": _layers_read(file),
    }


def _dflash(file: GGUFFile, num_layers: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As ``DFlashDraftModel`` or ``DSparkDraftModel``; with a vocabulary of its own as the speculators library has them."""
    for key, allowed in (
        ("embedding_scale", 1.0), ("attention.scale", 0.0), ("attention.value_scale", 0.0), ("logit_scale", 1.0),
        ("final_logit_softcapping", 0.0), ("hidden_activation", "silu"), ("attention.sliding_window", 0),
        ("hyper_connection.count", 0),
    ):  # fmt: skip
        _only(file, key, allowed)
    mask = file.get("tokenizer.ggml.mask_token_id")
    if type(mask) is not int:
        raise ModelError(f"{file.where} states tokenizer.ggml.mask_token_id = {mask!r}; expected the id of a token")
    states, is_spark = _layers_read(file), "markov_head.markov_w1.weight" in tensors
    kind, causal = "dspark" if is_spark else "dflash", _flag(file, "attention.causal", default=False)
    own: dict[str, Any] = {
        "mask_token_id": mask,
        "block_size": whole(file, "block_size"),
        "sample_from_anchor": _flag(file, "sample_from_anchor", default=is_spark),
    }
    if is_spark:
        has_confidence = "confidence_head.proj.weight" in tensors
        own |= {
            "markov_head_type": "vanilla",
            "markov_rank": tensors["markov_head.markov_w1.weight"].shape[-1],
            "enable_confidence_head": has_confidence,
            "confidence_head_with_markov": has_confidence,
        }
    layer = _layer(file, num_layers)
    if "d2t" not in tensors:
        inner = {**own, "target_layer_ids": [state - 1 for state in states], "causal_head": causal}
        named = ["DSparkDraftModel" if is_spark else "DFlashDraftModel"]
        return {"architectures": named, **layer, "dflash_config": inner}
    _only(file, "attention.causal", allowed=False)
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": {"model_type": "qwen3", **layer},
        "aux_hidden_state_layer_ids": states,
        "draft_vocab_size": tensors["d2t"].shape[-1],
        **own,
    }
