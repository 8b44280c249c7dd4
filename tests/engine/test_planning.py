"""``speculation="auto"`` in an engine: costs are measured once, then planned by; the text is that of plain decoding."""

from pathlib import Path
from typing import Any

import pytest

from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.costs.table import CostTable
from foretell.engine import planning
from foretell.engine.calibrate import Calibration
from foretell.engine.engine import Engine, Request
from foretell.methods.draft_model.drafter import DraftModel
from tests.model.table import TableLM

PROMPTS = [[1, 2, 3], [4, 5], [6]]


def engine(**options: Any) -> Engine:
    target = TableLM(16, seed=3, sharpness=2.0)
    draft = DraftModel(TableLM(16, seed=3, sharpness=2.0, blur=0.1))
    return Engine(target, speculative={"method": "draft_model", "num_speculative_tokens": 4}, method=draft, **options)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))


def planted(monkeypatch: pytest.MonkeyPatch, draft: float) -> list[list[str]]:
    """Costs where a pass takes 1 and a guess ``draft``; returns which methods were measured, call by call."""
    asked: list[list[str]] = []

    def table(self: Calibration) -> CostTable:
        names = list(self.choices)
        asked.append(names)
        verify = {(b, b * n): 1.0 for b in (1, self.max_batch) for n in (1, 8)}
        return CostTable(verify, {name: {(1, 1): draft, (1, 4): 4 * draft} for name in names})

    monkeypatch.setattr(Calibration, "table", table)
    return asked


def test_the_text_is_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real costs, measured here: whatever is planned, the tokens are the same."""
    monkeypatch.setattr(planning, "COST_TIME_LIMIT_S", 0.2)
    requests = [Request(prompt, planning_params()) for prompt in PROMPTS]
    texts = [one.token_ids for one in engine().with_method("none").generate_batch(requests, batch_size=2)]
    auto = engine(speculation="auto")
    for _ in range(2):
        assert [one.token_ids for one in auto.generate_batch(requests, batch_size=2)] == texts


def planning_params() -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=7, max_new_tokens=40)


def test_it_guesses_where_that_pays_and_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch, draft=0.001)
    cheap = engine(speculation="auto")
    steps = cheap.generate([1, 2, 3], planning_params())
    assert steps.num_draft_tokens > 0
    assert asked == [["draft_model"]]
    cheap.generate([1, 2], planning_params())
    assert len(asked) == 1  # known
    planted(monkeypatch, draft=50.0)
    dear = engine(speculation="auto").generate([1, 2, 3], planning_params())
    assert dear.num_draft_tokens == 0
    assert dear.token_ids == steps.token_ids


def test_a_new_method_or_batch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch, draft=0.01)
    auto = engine(speculation="auto")
    params = planning_params()
    auto.generate([1, 2, 3], params)
    auto.generate_batch([Request([1, 2], params, speculative="ngram"), Request([3], params)], batch_size=2)
    assert asked == [["draft_model"], ["draft_model", "ngram"]]
    auto.generate([1, 2, 3], params)
    assert len(asked) == 2


def test_plain_decoding_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planted(monkeypatch, draft=0.01)
    engine(speculation="auto").with_method("none").generate([1, 2, 3], planning_params())
    assert asked == []


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = engine(speculation="auto")
    assert (auto.speculation, auto.with_method("ngram").speculation) == ("auto", "auto")
    assert auto.with_method("ngram", speculation="on").speculation == "on"
    assert auto.resolved()["speculation"] == "auto"
    with pytest.raises(ConfigError, match="speculation = 'off' must be 'on' or 'auto'"):
        engine(speculation="off")
    monkeypatch.setattr(TableLM, "is_shared", True)
    with pytest.raises(ConfigError, match="each process by its own clock"):
        engine(speculation="auto")
