"""Checkpoints of hybrids: each type loads natively by default; what is missing or not supported is said in a line."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.core.tree import layout
from foretell.model.llama.run.native import NativeModel, supports
from foretell.model.load import load_model
from foretell.model.target import CausalModel
from tests.model.llama.hybrid import CASES, hybrid_config, hybrid_module
from tests.model.recurrent import family_module

REASON = supports(hybrid_config("lfm2"), torch.float32, torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.filterwarnings("ignore"),  # transformers tells which kernels are not installed
]
TOKENS = torch.arange(3, 12)[None]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def saved(path: Path, case: str, change: Change | None = None) -> str:
    """A checkpoint of one of CASES, its tensors changed afterwards."""
    hybrid_module(case).save_pretrained(path)
    if change is not None:
        file = path / "model.safetensors"
        save_file(
            {name: x.contiguous() for name, x in change(load_file(file)).items()}, file, metadata={"format": "pt"}
        )
    return str(path)


def logits_of(model: CausalModel) -> Tensor:
    """[n, V] of TOKENS."""
    count = TOKENS.shape[1]
    plan = layout(torch.arange(-1, count - 1)[None], torch.zeros(1, dtype=torch.int64), 16)
    logits = model.forward(TOKENS, plan, model.new_cache(1, 16)).logits
    return logits[0]


def expected(case: str) -> Tensor:
    return logits_of(NativeModel.from_hf(hybrid_module(case)))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_loads_natively_by_default(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load_model(saved(tmp_path, case))
    assert model.spec.implementation == "native"
    assert not model.spec.chains_only
    assert not [record.message for record in caplog.records if "not read" in record.message]
    assert torch.equal(logits_of(model), expected(case))


def composite(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As Qwen3.5's checkpoints are: the text model within another, images and heads for several tokens beside it."""
    inner = {name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()}
    extra = {"mtp.fc.weight": torch.ones(2, 4), "model.visual.patch_embed.proj.weight": torch.ones(3)}
    return inner | extra


def backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As Nemotron-H's checkpoints are."""
    names = (
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.", "backbone."),
    )
    found = {}
    for name, x in weights.items():
        for ours, theirs in names:
            if name.startswith(ours):
                name = name.replace(ours, theirs, 1)
                break
        found[name] = x
    return found


@pytest.mark.parametrize(
    ("case", "change"), [("qwen3_5", composite), ("qwen3_5_moe", composite), ("nemotron_h_moe", backbone)]
)
def test_names_of_published_checkpoints(
    case: str, change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, case, change)
    assert not any(name.startswith("model.layers.") for name in load_file(tmp_path / "model.safetensors"))
    with caplog.at_level(logging.WARNING):
        model = load_model(path, implementation="native")
    assert not [record.message for record in caplog.records if "not read" in record.message]
    assert torch.equal(logits_of(model), expected(case))


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("qwen3_5", "linear_attn.A_log"), ("qwen3_next", "linear_attn.in_proj_qkvz.weight"), ("lfm2", "conv.conv.weight"),
        ("lfm2-bias", "conv.in_proj.bias"), ("falcon_h1-norm", "mamba.norm.weight"), ("nemotron_h", "mixer.D"),
        ("granite_hybrid", "mamba.dt_bias"), ("bamba-bias", "mamba.conv1d.bias"),
        ("nemotron_h_moe", "mixer.gate.e_score_correction_bias"), ("nemotron_h_moe", "mixer.shared_experts.up_proj"),
        ("lfm2_moe", "feed_forward.expert_bias"), ("lfm2_moe", "operator_norm"), ("nemotron_h", "layers.2.norm.weight"),
        ("granite_hybrid_moe", "mamba.in_proj.weight"), ("granite_hybrid", "shared_mlp.output_linear.weight"),
        ("qwen3_5", "self_attn.q_proj.weight"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_of_another_shape(case: str, part: str, tmp_path: Path) -> None:
    """Named in one line."""

    def without(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        assert any(part in name for name in weights)
        return {name: x for name, x in weights.items() if part not in name}

    def longer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.cat([x, x]) if part in name else x for name, x in weights.items()}

    for number, (change, said) in enumerate(((without, "missing"), (longer, "has shape"))):
        with pytest.raises(ModelError, match=said) as raised:
            load_model(saved(tmp_path / str(number), case, change), implementation="native")
        assert "\n" not in str(raised.value)
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (
            "nemotron_h",
            {"head_dim": 16, "moe_latent_size": 24},
            "experts between projections of their own (moe_latent_size 24)",
        ),
        ("nemotron_h", {"head_dim": 16, "mlp_bias": True}, "experts beside a shared one with biases (mlp_bias)"),
        ("qwen3_5", {"head_dim": 16, "linear_conv_kernel_dim": 9}, "a convolution over 9 inputs; implemented: 2 to 8"),
        ("qwen3_5", {"head_dim": 16, "linear_key_head_dim": 7}, "states of 7 rows; implemented: even numbers"),
    ],
)
def test_what_is_not_supported_runs_by_transformers_and_says_why(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family_module(family, **changes).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"]
    with caplog.at_level(logging.WARNING):
        model = load_model(str(tmp_path))
    assert model.spec.implementation == "transformers"
    told = [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert len(told) == 1, [record.getMessage() for record in caplog.records]
    assert "\n" not in told[0]
