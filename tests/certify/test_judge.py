"""Rounding is told from defects: models that round differently when a pass has several nodes, by planted amounts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.certify.plain import RoundingJudge, Tolerance, after, distribution_of
from foretell.certify.recorder import Text, Visit
from foretell.certify.report import DEFECT, NEAR_TIE, Certificate
from foretell.certify.run import deviations
from foretell.core.params import SamplingParams
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.target import Output
from tests.certify import harness as h
from tests.model.table import TableLM


class Rounding(TableLM):
    """Adds ``amount`` to the logit of one token where a pass has several nodes."""

    amount, token = 0.0, 1

    def forward(self, tokens: Tensor, *args: Any, **options: Any) -> Output:
        out = super().forward(tokens, *args, **options)
        if out.logits is not None and tokens.shape[1] > 1:
            out.logits[..., self.token] += self.amount
        return out


def tied(context: tuple[int, ...]) -> Tensor:
    """Tokens 0 and 1 are equally likely, the rest hardly; token 2 now and then."""
    probs = torch.full((h.VOCAB,), 1e-3, dtype=torch.float64)
    probs[:2] = 1.0
    probs[2 + context[-1] % 3] = 1.0 + 0.5 * (context[-1] % 2)
    return probs / probs.sum()


def rounding(amount: float, **options: Any) -> Certificate:
    settings: dict[str, Any] = {"seed": 1, "sharpness": 2.0, "num_layers": 1, **options}
    target = Rounding(h.VOCAB, **settings)
    target.amount = amount
    # The replay is the same table without the fault, as the transformers model in float32 would be.
    exact = TableLM(h.VOCAB, **settings)
    draft = DraftModel(TableLM(h.VOCAB, **{**settings, "blur": 0.2}))
    return h.certificate(
        h.engine(target, draft),
        verifiers=["coupled"],
        temperatures=(0.0, 1.0),
        replay=lambda: exact,
        prompts=h.PROMPTS * 2,
    )


def test_small_differences_pass_and_large_ones_do_not() -> None:
    found = rounding(1e-5)
    window = h.check(found, "window")
    assert window.verdict == "pass"
    assert 1e-7 < window.deviation < 1e-5
    found = rounding(0.05)
    assert "window" in h.failed(found)
    finding = h.check(found, "window").findings[0]
    assert "from float32" in finding.what
    assert finding.verdict == DEFECT


def test_a_tie_at_temperature_0_is_no_defect() -> None:
    """The plain pass takes token 0, a wide one token 1: logits differ by 1e-5, the texts from there on by everything."""
    found = rounding(1e-5, probs=tied)
    assert found.passed, [check.findings for check in found.defects]
    tokens, window = h.check(found, "tokens"), h.check(found, "window")
    assert (tokens.verdict, window.verdict) == (NEAR_TIE, NEAR_TIE)
    assert tokens.figures["texts_parted"] > 0
    assert all(finding.figures["gap"] < 2e-4 for finding in tokens.findings)
    assert {finding.figures["equal_at_width"] for finding in tokens.findings} == {True}
    assert "edge of a filter, or of the largest logit" in window.findings[0].what
    assert found.verdict == "certified"
    # Were the difference not one of rounding: the tokens are tied all the same, but the distributions are not.
    assert "window" in h.failed(rounding(0.05, probs=tied))


@pytest.mark.parametrize(
    ("params", "logits", "observed", "near"),
    [
        # top-k 2: the second and third differ by 1e-5; the observed distribution has the third.
        (SamplingParams(top_k=2), [2.0, 1.0, 1.0 - 1e-5, 0.0], [0, 2], True),
        (SamplingParams(top_k=2), [2.0, 1.0, 0.9, 0.0], [0, 2], False),
        # top-p 0.5: the first has half of the mass, to rounding; the observed distribution goes on.
        (SamplingParams(top_p=0.5), [math.log(3.0) + 1e-5, 0.0, 0.0, 0.0], [0, 1, 2, 3], True),
        (SamplingParams(top_p=0.5), [math.log(3.0) + 0.1, 0.0, 0.0, 0.0], [0, 1, 2, 3], False),
        (SamplingParams(min_p=0.5), [math.log(2.0) + 1e-5, 0.0, -1.0, -2.0], [0, 1], True),
        (SamplingParams(min_p=0.5), [math.log(2.0) + 0.1, 0.0, -1.0, -2.0], [0, 1], False),
        (SamplingParams(temperature=0.0), [1.0, 1.0 - 1e-5, 0.0, 0.0], [1], True),
        (SamplingParams(temperature=0.0), [1.0, 0.9, 0.0, 0.0], [1], False),
    ],
)
def test_edges_of_filters(params: SamplingParams, logits: list[float], observed: list[int], near: bool) -> None:
    model = TableLM(4, probs=lambda context: torch.softmax(torch.tensor(logits, dtype=torch.float64), 0), num_layers=1)
    text = Text([0, 1, 2], 2, params)
    mine = torch.full((4,), -torch.inf)
    mine[observed] = torch.tensor(logits)[observed]
    if params.temperature == 0:
        probs = torch.zeros(4).scatter(0, torch.tensor(observed), 1.0)
    else:
        probs = torch.softmax(mine, 0)
    visit = Visit(text, torch.tensor([2]), torch.tensor([-1]), torch.tensor([0]), None, probs[None])
    plain = after(model, text.ids)
    assert deviations(probs, distribution_of(plain, text, text.ids, model))[0] > 1e-3
    explained, words = RoundingJudge(model, lambda: model).explain(visit, 0, probs, plain)
    assert explained is near, words


def test_tolerance_follows_dtype_and_temperature() -> None:
    half, full = (Tolerance.of(dtype, SamplingParams()) for dtype in (torch.bfloat16, torch.float32))
    assert half.log > 100 * full.log
    assert Tolerance.of(torch.float32, SamplingParams(temperature=0.5)).log == pytest.approx(2 * full.log)
    assert Tolerance.of(torch.float32, SamplingParams(temperature=2.0)) == full
    assert Tolerance.of(torch.float32, SamplingParams(repetition_penalty=0.5)).log == pytest.approx(2 * full.log)


def test_laws_that_are_none() -> None:
    fine, broken = torch.tensor([0.5, 0.5]), torch.tensor([math.nan, 0.0])
    assert deviations(fine, fine) == (0.0, 0.0)
    assert deviations(broken, broken) == (0.0, 0.0), "the same failure, which decoding reports"
    assert deviations(broken, fine) == deviations(fine, broken) == (math.inf, math.inf)
