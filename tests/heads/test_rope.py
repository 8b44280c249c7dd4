"""Scaled rotary frequencies against those of transformers, with the parameters of published models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretell.core.errors import ModelError
from foretell.heads.config_keys import Keys
from foretell.heads.layer_keys import describe_rope, rope
from foretell.heads.modules import RopeScaling, frequencies, rotary

CPU = torch.device("cpu")
LLAMA = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA},
    "Llama 3.2": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **LLAMA},
    "Qwen3, long": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "gpt-oss": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
    "DeepSeek": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "an attention factor": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "yarn without a factor": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 1024,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
}  # fmt: skip


def config(parameters: dict[str, Any], head_dim: int) -> LlamaConfig:
    made = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072)
    made.rope_parameters = dict(parameters)
    return made


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(name: str, head_dim: int) -> None:
    parameters = PUBLISHED[name]
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config(parameters, head_dim), CPU)
    theta, scaling = rope(Keys({"rope_parameters": parameters, "max_position_embeddings": 131072}, "x"))
    assert scaling is not None
    assert theta == parameters["rope_theta"]
    torch.testing.assert_close(frequencies(head_dim // 2, theta, scaling, CPU), expected, rtol=1e-5, atol=0)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_spellings_and_what_is_written_mean_the_same(name: str) -> None:
    parameters = {key: value for key, value in PUBLISHED[name].items() if key != "rope_theta"}
    theta = PUBLISHED[name]["rope_theta"]
    rest = {"max_position_embeddings": 131072}
    found = rope(Keys({"rope_parameters": PUBLISHED[name], **rest}, "x"))
    assert rope(Keys({"rope_scaling": parameters, "rope_theta": theta, **rest}, "x")) == found
    legacy = {"type": parameters["rope_type"], **{key: parameters[key] for key in parameters if key != "rope_type"}}
    assert rope(Keys({"rope_scaling": legacy, "rope_theta": theta, **rest}, "x")) == found
    assert rope(Keys(describe_rope(*found), "x")) == found


def test_plain_frequencies_and_what_is_no_scaling() -> None:
    for values in (
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "partial_rotary_factor": 1.0},
    ):
        assert rope(Keys(values, "x")) == (500.0, None)
    assert describe_rope(500.0, None) == {"rope_theta": 500.0}
    assert rope(Keys({}, "x")) == (10000.0, None)


def test_where_the_original_positions_stand() -> None:
    """As in transformers: of the top level first, then inside, then those of the head itself."""
    inside = {"rope_type": "yarn", "factor": 2.0}
    for values, original in (
        ({"rope_scaling": inside, "max_position_embeddings": 64}, 64),
        ({"rope_scaling": {**inside, "original_max_position_embeddings": 32}, "max_position_embeddings": 64}, 32),
        (
            {
                "rope_scaling": {**inside, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 16,
            },
            16,
        ),
    ):
        scaling = rope(Keys(values, "x"))[1]
        assert scaling is not None
        assert scaling.original_max_positions == original


def test_the_attention_factor_is_on_cosines_and_sines() -> None:
    positions = torch.arange(5)[None]
    plain = rotary(positions, 8, 100.0, torch.float32, RopeScaling("yarn", 4.0, 16))
    scaled = rotary(positions, 8, 100.0, torch.float32, RopeScaling("yarn", 4.0, 16, attention_factor=1.5))
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, 1.5 * one)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "rotary scaling 'dynamic' is unknown; expected one of linear, llama3, yarn"),
        ({"kind": "linear", "factor": 0.0}, r"factor = 0\.0"),
        ({"kind": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        (
            {"kind": "llama3", "factor": 2.0, "original_max_positions": 8, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            r"low_freq_factor = 4\.0",
        ),
    ],
)  # fmt: skip
def test_scalings_that_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        RopeScaling(**values)
