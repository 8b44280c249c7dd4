"""Families of the native decoder in the engine: with guesses the text is that without."""

import pytest
import torch

from foretell import Engine
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.llama.run.native import NativeModel, supports
from tests.engine.test_recurrent import asked, expected_of, same
from tests.model.llama.family import make_model

REASON = supports(make_model("llama").config, torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
QUICK = ("cohere2", "starcoder2-window", "hunyuan_v1_dense", "ernie4_5_moe")
"""What is new in them: a parallel block, layer norms without a gate, norms behind the rotation, a router's bias."""
OTHERS = (
    "arcee", "cwm", "ernie4_5-bias", "exaone4", "exaone_moe", "flex_olmo", "glm", "granite_swa", "granitemoe_swa", "helium",
    "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "jais2", "mellum", "minimax_m2", "ministral", "nemotron",
    "seed_oss", "stablelm", "vaultgemma",
)  # fmt: skip


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_guesses_do_not_change_the_text(kind: str) -> None:
    """Greedy and at temperature 1, over a chain and over trees that the same weights in int8 guess, in a ragged batch."""
    module = make_model(kind)
    model, near = NativeModel.from_hf(module), NativeModel.from_hf(module, weights="int8")
    for temperature in (0.0, 1.0):
        requests = asked(4, temperature, most=9)
        expected, accepted = expected_of(model, requests), 0
        for shape in ("chain", "static/branching=3x2x1"):
            config = {"method": "draft_model", "num_speculative_tokens": 4, "shape": shape}
            engine = Engine(model, speculative=config, method=DraftModel(near), drafter_errors="raise")
            accepted += same(engine, requests, 3, expected)
        assert accepted > 3, "guesses that are never kept prove little"
