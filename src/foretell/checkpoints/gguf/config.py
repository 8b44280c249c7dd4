"""A transformers configuration from the metadata of a GGUF file.

transformers' own reader leaves out every kind of RoPE scaling, and takes float32 values as they are: 1e-5 becomes
9.999999747378752e-06. Here values are the shortest decimals, those of the config.json that the file was made of.
"""

from typing import Any

import torch

from foretell.checkpoints import ends
from foretell.checkpoints.configs import PlainConfig, plain_config
from foretell.checkpoints.gguf.families.architectures import architecture_of
from foretell.checkpoints.gguf.file import GGUFFile, listed
from foretell.checkpoints.gguf.values import all_read, only

_LLAMA_IDS = {
    "unknown": 0,
    "bos": 1,
    "eos": 2,
}  # where a file of a vocabulary of kind "llama" names none, as llama.cpp has it
_CONTROL = 3  # the token type of control tokens


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
    only(file, "attention.causal", True, "a model of which every token sees the whole text cannot decode")
    with all_read(file) as whole_file:
        own = architecture.config(whole_file)
    return {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_ids(file),
        "pad_token_id": token_id(file, "padding"),
        "dtype": {"F32": "float32", "F16": "float16"}.get(_matrix_kind(file), "bfloat16"),
        **own,
    }


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
    found = ends.joined(*(file.get(key) for key in keys), _usual(file, "eos", len(tokens)), marked)
    return [index for index in found if not tokens or index < len(tokens)] or None


def token_id(file: GGUFFile, key: str) -> int | None:
    """The id of the token that the file names for a purpose, or of the one that llama.cpp takes then."""
    value = file.get(f"tokenizer.ggml.{key}_token_id")
    tokens = listed(file, "tokens", str)
    return value if type(value) is int and 0 <= value < (len(tokens) or 1 << 31) else _usual(file, key, len(tokens))


def _usual(file: GGUFFile, key: str, num_tokens: int) -> int | None:
    """The id where a file of Llama's own vocabulary names none for a purpose, or none that it has."""
    named = [file.get(f"tokenizer.ggml.{key}_token_id{plural}") for plural in ("", "s")]
    ids = [one for each in named for one in (each if isinstance(each, list) else [each])]
    if file.get("tokenizer.ggml.model") != "llama" or any(type(one) is int and 0 <= one < num_tokens for one in ids):
        return None
    usual = _LLAMA_IDS.get(key)
    return usual if usual is not None and usual < num_tokens else None


def _matrix_kind(file: GGUFFile) -> str:
    """How the matrices are stored, by the first layer's last one."""
    names = ("blk.0.ffn_down.weight", "blk.0.ffn_down_exps.weight", "token_embd.weight")
    return next(file.tensors[name].kind for name in names if name in file.tensors)
