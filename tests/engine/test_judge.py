"""The judge in the engine: loaded from a directory, tapped, exact at its strictest, everything at its laxest."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import ConfigError, Engine, ModelError, Request, SamplingParams
from foretell.cli.commands.methods import catalogue
from foretell.heads import formats
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights
from foretell.verify import Judge
from tests.engine.harness import ToyTokenizer, outcome, outcomes, plain, prompts, table

LAYER = 1


def judge_of(target: Any, directory: Path, **config: Any) -> str:
    """A judge of random weights for a target, stored."""
    spec = target.spec
    settings = {"layer": LAYER, "columns": spec.hidden_size, **config}
    head = JudgeWeights(JudgeHeadConfig(**{"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size, **settings}))
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1)))
    formats.save(head, directory)
    return str(directory)


def engine(directory: str | None, verify: str, **options: Any) -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": 4, "verify": verify, "judge": directory, **options}
    return Engine(table(num_layers=3), ToyTokenizer(), speculative=config, method=DraftModel(table(blur=0.5)))


def requests(temperature: float) -> list[Request]:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=20, ignore_eos=True) for seed in range(8)
    ]
    return [Request(ids, one) for ids, one in zip(prompts(), params, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2x1"])
def test_threshold_1_is_coupled_token_for_token(tmp_path: Path, temperature: float, shape: str) -> None:
    made = engine(judge_of(table(num_layers=3), tmp_path), "judge/threshold=1/off_support=true", shape=shape)
    assert made.verifier.taps == (LAYER,)
    expected = outcomes(plain(table(num_layers=3), requests(temperature)))
    assert outcomes(made.generate_batch(requests(temperature))) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_threshold_0_accepts_every_guess(tmp_path: Path, temperature: float) -> None:
    made = engine(judge_of(table(num_layers=3), tmp_path), "judge/threshold=0/off_support=true")
    for found in made.generate_batch(requests(temperature)):
        assert found.num_accepted_tokens == found.num_draft_tokens == 16
        assert found.num_steps == 4


def test_between_them_the_head_decides_and_company_does_not_matter(tmp_path: Path) -> None:
    directory = judge_of(table(num_layers=3), tmp_path)
    made = engine(directory, "judge/threshold=0.5/off_support=true")
    together = made.generate_batch(requests(0.0))
    assert outcomes(together) == [outcome(made.generate_batch([one])[0]) for one in requests(0.0)]
    exact = plain(table(num_layers=3), requests(0.0))
    assert outcomes(together) != outcomes(exact)
    accepted = sum(one.num_accepted_tokens for one in together)
    strict = engine(directory, "judge/threshold=1").generate_batch(requests(0.0))
    assert sum(one.num_accepted_tokens for one in strict) / sum(one.num_steps for one in strict) < accepted / sum(
        one.num_steps for one in together
    )
    greedy = engine(directory, "judge/threshold=0.5")
    assert outcomes(greedy.generate_batch(requests(0.0))) == outcomes(exact), (
        "without off_support no token is possible that greedy decoding does not take"
    )


def test_it_says_that_it_is_lossy(tmp_path: Path) -> None:
    made = engine(judge_of(table(num_layers=3), tmp_path), "judge")
    found = made.resolved()
    assert found["exact"] is False
    assert found["speculative"]["judge"] == str(tmp_path)
    rules = catalogue()
    assert rules["verifiers"]["judge"]["exact"] is False
    assert rules["verifiers"]["judge"]["reads"] == ["noise", "taps"]
    assert rules["pairs"]["draft_model"]["judge"]["refused"] == {}


def test_another_threshold_keeps_the_method(tmp_path: Path) -> None:
    made = engine(judge_of(table(num_layers=3), tmp_path), "judge")
    again = made.with_method({**made.speculative.resolved(), "verify": "judge/threshold=0.2"})
    assert again.method is made.method
    assert isinstance(again.verifier, Judge)
    assert again.verifier.threshold == 0.2
    coupled = made.with_method({**made.speculative.resolved(), "verify": "coupled", "judge": None})
    assert coupled.method is made.method
    assert coupled.verifier.taps == ()


def test_plain_decoding_needs_no_head() -> None:
    made = Engine(table(), ToyTokenizer(), speculative={"method": "none", "verify": "judge"})
    assert made.verifier.taps == ()
    (found,) = made.generate_batch(requests(0.0)[2:3])
    assert outcome(found) == outcome(plain(table(), requests(0.0)[2:3])[0])


def test_heads_that_are_missing_or_not_for_this_target(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        engine(str(tmp_path / "none"), "judge")
    with pytest.raises(ModelError, match=r"config\.json"):
        engine(str(tmp_path), "judge")
    other = judge_of(table(num_layers=3, context=4), tmp_path / "other")
    with pytest.raises(ModelError, match=r"hidden size 7.*has 5.*foretell train judge"):
        engine(other, "judge")
    deep = judge_of(table(num_layers=3), tmp_path / "deep", layer=3)
    with pytest.raises(ModelError, match="output of target layer 3"):
        engine(deep, "judge")
    with pytest.raises(ConfigError, match="judge = 3 must be a text"):
        engine(3, "judge")  # type: ignore[arg-type]
