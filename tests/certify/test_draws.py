"""Whether tokens come from the q that is reported: honest drafters pass, each liar is caught by the test meant for it.

The tests' own bounds are checked too: they hold for uniform noise at their stated rate, and for nothing else.
"""

import math
import random
from typing import Any

import pytest
import torch

from foretell.certify.draws import DrawChecks, freedman_bound, kolmogorov, kolmogorov_bound
from foretell.certify.recorder import VisitRecorder
from foretell.certify.report import Check
from foretell.certify.run import requests
from foretell.engine.config import speculative_config
from foretell.methods.draft_model.drafter import ModelDrafter
from tests.certify import harness as h

ALPHA = 1e-6


def observed(kind: Any, shape: str, draws: str) -> Check:
    """The check after 96 texts of 20 tokens."""
    options = {"num_speculative_tokens": 3, "verify": "rejection", "shape": shape, "draws": draws}
    collected = DrawChecks(seed=0)
    recorder = VisitRecorder(1, 0, [collected])
    engine = h.engine(method=h.Spoilt(kind), draws=draws)
    config = speculative_config({"method": "draft_model", **options})
    asked = requests(h.PROMPTS * 24, 1.0, 20, 0)
    recorder.engine(engine, config).generate_batch(asked, batch_size=48)
    return collected.check("rejection", shape, ALPHA)


@pytest.mark.parametrize("draws", ["iid", "without_replacement", "greedy"])
@pytest.mark.parametrize("shape", [h.CHAIN, h.TREE])
def test_honest_drafters_pass(shape: str, draws: str) -> None:
    found = observed(ModelDrafter, shape, draws)
    assert found.verdict == "pass", found.findings
    assert found.num_contexts > 300
    assert set(found.figures["tests"]) == {"order", "rank", "heavy", "pairs", "stop", "bonus"}
    assert found.deviation < found.tolerance


@pytest.mark.parametrize(
    ("kind", "shape", "draws", "tests"),
    [
        (h.Tempered, h.CHAIN, "iid", {"heavy"}),
        (h.Tempered, h.TREE, "without_replacement", {"heavy"}),
        (h.Greedy, h.CHAIN, "iid", {"rank", "heavy"}),
        (h.Echo, h.CHAIN, "iid", {"stop"}),
        (h.Twin, h.CHAIN, "iid", {"pairs"}),
        (h.Relabelled, h.TREE, "without_replacement", {"heavy"}),
    ],
)
def test_liars_are_caught(kind: Any, shape: str, draws: str, tests: set[str]) -> None:
    found = observed(kind, shape, draws)
    assert found.verdict == "DEFECT"
    assert tests <= {finding.figures["test"] for finding in found.findings}


def test_fixed_guesses_claim_nothing() -> None:
    found = observed(ModelDrafter, h.CHAIN, "fixed")
    assert (found.verdict, found.num_contexts, found.deviation) == ("nothing to check", 0, None)


def test_kolmogorov() -> None:
    assert kolmogorov([0.5]) == 0.5
    assert kolmogorov([0.25, 0.75]) == 0.25
    assert kolmogorov([0.1, 0.2]) == pytest.approx(0.8)
    chance = random.Random(4)
    count, alpha = 200, 0.05
    bound = kolmogorov_bound(count, alpha)
    exceeded = sum(kolmogorov([chance.random() for _ in range(count)]) > bound for _ in range(400))
    assert exceeded / 400 < 0.1, "at most alpha, and four standard errors"
    skewed = sum(kolmogorov([chance.random() ** 1.4 for _ in range(count)]) > bound for _ in range(100))
    assert skewed > 80


def test_freedman() -> None:
    for variance in (0.0, 1.0, 400.0):
        bound = freedman_bound(variance, ALPHA)
        assert 2 * math.exp(-(bound**2) / (2 * (variance + bound / 3))) == pytest.approx(ALPHA)
    generator = torch.Generator().manual_seed(1)
    coins = (torch.rand(400, 500, generator=generator) < 0.3).double() - 0.3
    bound = freedman_bound(500 * 0.21, 0.05)
    assert float((coins.sum(1).abs() > bound).double().mean()) < 0.1
    assert float(((coins + 0.1).sum(1).abs() > bound).double().mean()) > 0.9
