"""The configuration of a file is that of the model it was made of, in all that the model computes with."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from foretell.checkpoints.gguf.config import end_ids, read_config, read_generation, read_values, token_id
from foretell.checkpoints.gguf.file import open_gguf
from foretell.core.errors import ModelError
from foretell.model.llama.shape import read_shape
from tests.checkpoints.gguf.make import _add, write
from tests.checkpoints.gguf.oracle import FOLDER, case
from tests.cli import checkpoint
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
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # as files had it before they named the kind
        ({"type": "linear", "factor": 0.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 1.0, "attn_factor": 1.0, "yarn_beta_fast": 32.0}, {"rope_type": "default"}),
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


FACTORS = [1.0, 1.5, 2.0, 9.0]
COMBINED: dict[str, tuple[dict[str, Any], str]] = {
    "old": ({"scale_linear": 4.0}, ""),
    "old, of yarn": ({"scale_linear": 4.0, "scaling.type": "yarn", "scaling.original_context_length": 32}, ""),
    "the new name goes before": ({"scale_linear": 8.0, "scaling.factor": 2.0}, ""),
    "old, off": ({"scale_linear": 4.0, "scaling.type": "none"}, ""),
    "yarn of a scale": ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5}, ""),
    "yarn without a factor": ({"scaling.type": "yarn", "scaling.original_context_length": 32}, ""),
    "yarn, 1 is nothing stated": ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_attn_factor": 1.0}, ""),
    "yarn, its logarithm": ({"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_log_multiplier": 0.7}, ""),
    "factors and a factor": ({"scale_linear": 4.0}, "freqs"),
    "factors and a scale": ({"scaling.attn_factor": 1.25}, "freqs"),
    "two lists": ({"scaling.original_context_length": 64}, "short"),
    "two lists of a scale": ({"scaling.original_context_length": 64, "scaling.attn_factor": 1.19}, "short"),
    "two lists and a factor": ({"scaling.type": "longrope", "scaling.factor": 2.0}, "short"),
}  # fmt: skip


def rotation(keys: dict[str, Any], factors: list[float], context: int) -> tuple[list[float], float]:
    """What llama.cpp divides into an angle a position of each pair of 8 values, and multiplies its cosine and sine by:
    ``llama_model_base::load_hparams``, ``llama_context`` and ``ggml_rope_yarn`` in so many words."""
    kind = keys.get("scaling.type", "linear")
    factor = keys.get("scaling.factor", keys.get("scale_linear", 0.0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    scale, found = keys.get("scaling.attn_factor", 1.0), []
    original = keys.get("scaling.original_context_length", context)
    low, high = (8 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32.0, 1.0))
    low, high = max(0, math.floor(low)), min(7, math.ceil(high))
    if kind == "yarn":
        power = keys.get("scaling.yarn_log_multiplier", 0.0)
        scale *= 1 + 0.1 * math.log(factor)
        scale /= 1 + 0.1 * power * math.log(factor)
    for pair in range(4):
        plain = 10000.0 ** (-2 * pair / 8) / factors[pair]
        mixed = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low))) if kind == "yarn" else 0.0
        found.append(plain / factor * (1 - mixed) + plain * mixed)
    return found, scale


@pytest.mark.parametrize("case", COMBINED)
def test_rotation_is_llama_cpp_s(tmp_path: Path, case: str) -> None:
    """Every way in which keys of RoPE, old and new, come together: the frequencies and scales that the model runs with."""
    keys, tensors = COMBINED[case]
    names = {"freqs": ["freqs"], "short": ["factors_short", "factors_long"]}.get(tensors, [])
    replaced = {f"rope_{name}.weight": (np.float32(FACTORS), "F32") for name in names}
    module = tiny_module("llama")
    metadata = {f"llama.rope.{key}": value for key, value in keys.items()}
    rope = read_shape(read(write(tmp_path / "x.gguf", module, metadata=metadata, replaced=replaced))).ropes[0]
    factors = FACTORS if names else [1.0] * 4
    frequencies, scale = rotation(keys, factors, module.config.max_position_embeddings)
    assert rope.frequencies == pytest.approx(frequencies, rel=1e-5)
    assert rope.scale == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ({"scaling.attn_factor": 0.5}, (), r"attn_factor = 0.5; expected 1 with RoPE scaling 'linear'"),
        ({"scaling.type": "yarn"}, ("freqs",), r"scaling.type = 'yarn'; expected none, linear or longrope beside"),
        ({}, ("factors_long",), r"lacks tensor rope_factors_short\.weight; expected both"),
        ({"scale_linear": "4"}, (), r"rope.scale_linear = '4'; expected a positive number"),
        ({"dimension_count_swa": 4}, (), r"dimension_count_swa = 4; expected 8: layers of llama are alike"),
    ],
)
def test_what_no_rotation_says(tmp_path: Path, keys: dict[str, Any], tensors: tuple[str, ...], said: str) -> None:
    replaced = {f"rope_{name}.weight": (np.float32(FACTORS), "F32") for name in tensors}
    metadata = {f"llama.rope.{key}": value for key, value in keys.items()}
    with pytest.raises(ModelError, match=said):
        read(write(tmp_path / "x.gguf", tiny_module("llama"), metadata=metadata, replaced=replaced))


def with_keys(label: str, **metadata: Any) -> dict[str, Any]:
    """What config.json would say of a file of llama.cpp's converter with other values of keys; None leaves one out."""
    file = open_gguf(case(label).path, name="x")
    arch = file.get("general.architecture")
    named = {f"{arch}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    changed = {key: value for key, value in {**file.metadata, **named}.items() if value is not None}
    return read_values(replace(file, metadata=changed))


@pytest.mark.parametrize(
    ("label", "metadata", "key", "expected"),
    [
        ("granite", {"attention__scale": None}, "attention_multiplier", 16**-0.5),
        ("granite", {"attention__scale": 0.0}, "attention_multiplier", 16**-0.5),
        ("granite", {"residual_scale": 0.0, "embedding_scale": None}, "residual_multiplier", 1.0),
        ("granitehybrid", {"logit_scale": 0.0}, "logits_scaling", 1.0),
        ("gemma4", {"final_logit_softcapping": None}, "final_logit_softcapping", 30.0),
        ("gemma4", {"final_logit_softcapping": 0.0}, "final_logit_softcapping", None),
        ("gemma4", {"rope__freq_base": None}, "rope_parameters", 10000.0),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping", 50.0),
        ("gemma2", {"attention__sliding_window": None}, "sliding_window", 4096),
        ("glm4moe", {"expert_weights_scale": 0.0}, "routed_scaling_factor", 1.0),
        ("glm4moe", {"expert_gating_func": 0}, "n_routed_experts", 4),
        ("glm4", {"rope__dimension_sections": [0, 0, 0, 0]}, "model_type", "glm4"),
        ("qwen35", {"rope__dimension_count": None}, "rope_parameters", 1.0),
        ("mistral3", {"rope__scaling__type": "none"}, "rope_parameters", 64),
        ("olmo2", {"attention__head_count_kv": [4, 4, 4]}, "num_key_value_heads", 4),
    ],
)  # fmt: skip
def test_what_is_not_stated_is_llama_cpp_s(label: str, metadata: dict[str, Any], key: str, expected: Any) -> None:
    """A key that a file leaves out, or states as 0, where 0 is what llama.cpp has for nothing."""
    found = with_keys(label, **metadata)[key]
    if key == "rope_parameters":
        name = {"gemma4": "rope_theta", "qwen35": "partial_rotary_factor"}.get(
            label, "original_max_position_embeddings"
        )
        found = found.get("full_attention", found)[name]
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(
    ("label", "stated", "slides"),
    [
        ("gemma2", None, "10101010"),
        ("gemma2", 3, "11011011"),
        ("gemma2", 0, "11111111"),
        ("gemma2", 1, "00000000"),
        ("gpt-oss", 3, "11011011"),
        ("olmo2", 2, "10101010"),
        ("olmo2", [0, 1, 1, 0, 1, 0, 0, 0], "01101000"),
    ],
)
def test_which_layers_have_a_window(label: str, stated: Any, slides: str) -> None:
    """By a number, or by a list of true and false or of 1 and 0 (``set_swa_pattern``)."""
    layers = open_gguf(case(label).path, name="x").get("{arch}.block_count")
    stated = stated[:layers] if isinstance(stated, list) else stated
    found = with_keys(label, attention__sliding_window_pattern=stated, attention__sliding_window=8)
    kinds = {"1": "sliding_attention", "0": "full_attention"}
    assert found["layer_types"] == [kinds[each] for each in slides[:layers]]


@pytest.mark.parametrize(
    ("label", "metadata", "said"),
    [
        ("granite", {"logit_scale": None}, "logit_scale = None; expected a positive"),
        ("granite", {"rope__scaling__finetuned": False}, "finetuned = False; expected True: it is llama.cpp's switch"),
        ("gemma2", {"rope__freq_base_swa": 77.0}, "freq_base_swa = 77.0; expected 10000.0"),
        ("gemma2", {"attention__sliding_window_pattern": "x"}, "sliding_window_pattern = 'x'; expected a number"),
        ("gpt-oss", {"rope__freq_base_swa": 77.0}, "freq_base_swa = 77.0; expected"),
        ("gemma4", {"attention__value_length": 8}, "attention.value_length = 8; expected"),
        ("gemma4", {"rope__dimension_count": 8}, "rope.dimension_count = 8; expected"),
        ("glm4moe", {"rope__dimension_sections": [4, 2, 2, 0]}, "GLM-4V is not supported"),
        ("deepseek2", {"expert_gating_func": None}, "expected 1, softmax without a correction, or 2"),
        ("deepseek2", {"attention__key_length": 40}, "key_length = 40; expected 48"),
        ("falcon-h1", {"attention__value_length": 8}, "value_length = 8; expected 16"),
        ("nemotron_h", {"attention__value_length": 8}, "value_length = 8; expected 16"),
        *((label, {"attention__causal": False}, "attention.causal = False; expected True") for label in ("lfm2", "phi3")),
    ],
)  # fmt: skip
def test_what_an_architecture_does_not_do_is_said(label: str, metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        with_keys(label, **metadata)


@pytest.mark.parametrize("label", sorted(path.name.removesuffix(".gguf.xz") for path in FOLDER.glob("*.gguf.xz")))
def test_every_key_is_read_or_said(label: str, caplog: pytest.LogCaptureFixture) -> None:
    """What llama.cpp's converter writes is read, all of it. Of keys that this architecture does not know, those that change
    something are said, once; the others are not."""
    file = open_gguf(case(label).path, name=label)
    arch = file.get("general.architecture")
    read_values(file)
    assert not caplog.records
    idle = {"pooling_type": 3, "swin_norm": False, "attention.clamp_kqv": 0.0, "rope.scaling.yarn_ext_factor": -1.0}
    read_values(replace(file, metadata={**file.metadata, **{f"{arch}.{key}": value for key, value in idle.items()}}))
    assert not caplog.records
    changing = {
        "attention.clamp_kqv": 8.0,
        "attention.max_alibi_bias": 8.0,
        "new_key": "x",
        "rope.scaling.alpha": 1000.0,
    }
    odd = replace(file, metadata={**file.metadata, **{f"{arch}.{key}": value for key, value in changing.items()}})
    read_values(odd)
    read_values(odd)
    (record,) = caplog.records
    said = ", ".join(f"{arch}.{key} = {value!r}" for key, value in changing.items())
    assert record.getMessage().endswith(f"states {said}, which nothing here reads: the model may need it")


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


@pytest.mark.parametrize(
    ("kind", "keys", "bos", "ends"),
    [
        ("llama", {}, 1, [2]),  # </s> and <s> of Llama's vocabulary, which its first files do not name
        ("llama", {"bos_token_id": 99, "eos_token_id": 99}, 1, [2]),  # no tokens: as if nothing were stated
        ("llama", {"bos_token_id": 4, "eos_token_id": 3}, 4, [3]),
        ("gpt2", {}, None, None),
        ("gemma4", {}, None, None),
    ],
)
def test_ids_of_a_vocabulary_that_names_none(
    tmp_path: Path, kind: str, keys: dict[str, Any], bos: int | None, ends: list[int] | None
) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    _add(writer, "tokenizer.ggml.tokens", list("abcdef"))
    for key, value in {"model": kind, **keys}.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x.gguf", name="x")
    assert token_id(file, "bos") == bos
    assert end_ids(file) == ends


def test_the_head_is_tied_where_there_is_none(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder)
    assert read(write(tmp_path / "x.gguf", module)).tie_word_embeddings
    head = {"output.weight": (module.lm_head.weight.detach().numpy(), "F32")}
    assert not read(write(tmp_path / "y.gguf", module, replaced=head)).tie_word_embeddings
