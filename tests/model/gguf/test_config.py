"""The configuration of a file is that of the model it was made of, in all that the model computes with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from foretell.core.errors import ModelError
from foretell.model.gguf.config import end_ids, read_config, read_generation
from foretell.model.gguf.file import open_gguf
from foretell.model.llama.shape import read_shape
from tests.cli import checkpoint
from tests.model.gguf.make import _add, write
from tests.model.tiny import tiny_module

KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def read(path: Path) -> Any:
    return read_config(open_gguf(path, name="x"))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_every_architecture(tmp_path: Path, arch: str, eps: float) -> None:
    """Values are the decimals of the original, not float32's neighbours of them."""
    more = {"num_hidden_layers": 6} if arch == "gemma3" else {}
    if arch == "gemma3":
        more["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    if arch == "qwen2":
        more |= {"use_sliding_window": False, "tie_word_embeddings": True}
    if arch == "qwen3_moe":
        more["norm_topk_prob"] = True
    module = tiny_module(arch, rms_norm_eps=eps, **more)
    own, found = module.config, read(write(tmp_path / "x.gguf", module))
    assert found.architectures == [type(module).__name__]
    for key in KEYS:
        assert getattr(found, key) == getattr(own, key), key
    assert found.rope_parameters == own.rope_parameters
    if arch == "gemma3":
        for key in ("layer_types", "sliding_window", "query_pre_attn_scalar", "hidden_activation", "head_dim"):
            assert getattr(found, key) == getattr(own, key), key
    shape, other = read_shape(own), read_shape(found)
    assert shape.ropes == other.ropes
    assert shape.windows == other.windows
    assert (shape.traits, shape.head_dim, shape.tied) == (other.traits, other.head_dim, other.tied)
    assert shape.mixture == other.mixture
    assert (shape.mixture is not None) == arch.endswith("moe")


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 1.0}, {"rope_type": "default"}),
        ({"type": "none"}, {"rope_type": "default"}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    metadata = {f"qwen2.rope.scaling.{key}": value for key, value in scaling.items()}
    found = read(write(tmp_path / "x.gguf", tiny_module("qwen2"), metadata=metadata))
    assert found.rope_parameters == {"rope_theta": 10000.0, **expected}


def test_llama_3_s_factors(tmp_path: Path) -> None:
    """A tensor of factors, as the converter writes it, is named by its parameters again: the same frequencies."""
    module = tiny_module("llama", head_dim=64, rope_parameters=LLAMA3)
    own = read_shape(module.config)
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = (plain / torch.tensor(own.ropes[0].frequencies, dtype=torch.float64)).float()
    assert factors.max() == pytest.approx(8.0)
    metadata = {"llama.rope.dimension_count": 64, "llama.attention.key_length": 64, "llama.attention.value_length": 64}
    path = write(
        tmp_path / "x.gguf", module, metadata=metadata, replaced={"rope_freqs.weight": (factors.numpy(), "F32")}
    )
    found = read(path)
    assert found.rope_parameters == LLAMA3
    assert read_shape(found).ropes == own.ropes


def test_other_factors_become_longrope(tmp_path: Path) -> None:
    """Factors of nobody's formula are kept one by one."""
    factors = torch.tensor([1.0, 1.5, 2.0, 9.0])
    module = tiny_module("llama")
    found = read(write(tmp_path / "x.gguf", module, replaced={"rope_freqs.weight": (factors.numpy(), "F32")}))
    rope = found.rope_parameters
    assert rope["rope_type"] == "longrope"
    assert rope["short_factor"] == rope["long_factor"] == factors.tolist()
    assert rope["attention_factor"] == 1.0


def test_wrong_number_of_factors(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": (torch.ones(7).numpy(), "F32")}
    with pytest.raises(ModelError, match="7 factors for heads of 8 values"):
        read(write(tmp_path / "x.gguf", tiny_module("llama"), replaced=factors))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.rope.scaling.type": "magic"}, "RoPE scaling 'magic' is unknown"),
        ({"llama.rope.dimension_count": 4}, "heads of 8 values of which 4 are rotated"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "expected a positive number"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "= -1.0; expected a positive number"),
        ({"llama.rope.freq_base": 0.0}, "= 0.0; expected a positive number"),
        ({"llama.attention.key_length": "16"}, "key_length = '16'; expected a positive number"),
        ({"llama.embedding_length": 1 << 30}, r"attn_q\.weight has shape \(32, 32\); .* a width of 1073741824"),
        ({"llama.embedding_length": 0}, "expected a positive number"),
        ({"llama.context_length": None}, "states llama.context_length = None"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(write(tmp_path / "x.gguf", tiny_module("llama"), metadata=metadata))


TOKENS = ["a", "<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "b", "<eos>"]


@pytest.mark.parametrize(
    ("types", "keys", "found"),
    [
        ([1, 3, 1, 3, 4, 1, 1], {"eos_token_id": 3}, [3, 2, 1, 4]),  # a marker ends an answer whatever its type
        ([1, 1, 5, 1, 6, 1, 1], {"eos_token_id": 5}, [5, 2, 1, 4]),  # but "</s>" is a word where it is no special token
        ([1, 1, 1, 1, 1, 1, 3], {}, [2, 1, 4, 6]),
        ([3] * 7, {"eos_token_id": 0, "eot_token_id": 5, "eom_token_id": 1}, [0, 5, 1, 2, 4, 3, 6]),
        ([1] * 7, {"eos_token_ids": [5, 0]}, [5, 0, 2, 1, 4]),
        ([1] * 7, {"eos_token_id": [0, 5], "eot_token_id": 99}, [0, 5, 2, 1, 4]),  # 99 is no token
        (None, {"eos_token_id": 5}, [5, 2, 1, 4]),
    ],
)
def test_end_tokens(tmp_path: Path, types: list[int] | None, keys: dict[str, Any], found: list[int]) -> None:
    """What the file names, by one id or by several, and the markers of its vocabulary."""
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    _add(writer, "tokenizer.ggml.tokens", TOKENS)
    _add(writer, "tokenizer.ggml.token_type", types)
    for key, value in keys.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path, name="x")
    assert end_ids(file) == found
    assert read_generation(file).eos_token_id == found


def test_the_head_is_tied_where_there_is_none(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder)
    assert read(write(tmp_path / "x.gguf", module)).tie_word_embeddings
    head = {"output.weight": (module.lm_head.weight.detach().numpy(), "F32")}
    assert not read(write(tmp_path / "y.gguf", module, replaced=head)).tie_word_embeddings
