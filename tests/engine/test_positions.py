"""Drafters that were made for shorter texts than the target reads: they guess up to there, and it is said."""

from pathlib import Path
from typing import Any

import pytest

from foretell import Engine, SamplingParams
from foretell.draft.shapes import Chain
from foretell.draft.suffix import Suffix
from foretell.engine.methods import Methods
from foretell.engine.request.job import Job, plain_reason
from foretell.heads import formats
from foretell.heads.head import Head
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.hybrid.drafter import Hybrid
from tests.engine.harness import ToyTokenizer, table
from tests.methods.test_formats import dflash, eagle1, eagle3, spec

TARGET = table(1)
PARAMS = SamplingParams(max_new_tokens=80, ignore_eos=True, seed=3, temperature=0.7)


def places(engine: Engine, prompt: list[int]) -> tuple[list[int], list[tuple[int, str]]]:
    """The text, and of each step with guesses the length of the text before it and who made the first."""
    made: list[tuple[int, str]] = []

    def look(event: Any) -> None:
        if event.commit.tree.num_nodes > 1:
            made.append((len(event.text(0)), "light" if event.is_light else "whole"))

    engine.observers.append(look)
    return engine.generate(prompt, PARAMS).token_ids, made


def test_a_draft_guesses_up_to_the_positions_it_was_made_for_and_the_text_stays() -> None:
    plain = Engine(TARGET, ToyTokenizer()).generate([1, 2, 3], PARAMS).token_ids
    method = DraftModel(table(blur=0.2))
    assert method.max_positions == 4096
    method.max_positions = 30
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    found, made = places(Engine(TARGET, ToyTokenizer(), speculative=config, method=method), [1, 2, 3])
    assert found == plain
    assert 20 < max(length for length, _ in made) < 30


def test_behind_them_a_method_goes_on_with_its_light_part_alone() -> None:
    plain = Engine(TARGET, ToyTokenizer()).generate([1, 2] * 8, PARAMS).token_ids
    method = Hybrid(Suffix(), DraftModel(table(blur=0.3)), shape=Chain(3), discount=0.85)
    method.max_positions = 40
    config = {"method": "hybrid", "second": "draft_model", "second_tokens": 3}
    found, made = places(Engine(TARGET, ToyTokenizer(), speculative=config, method=method), [1, 2] * 8)
    assert found == plain
    assert 30 < max(length for length, part in made if part == "whole") < 40
    assert max(length for length, part in made if part == "light") > 60


def test_a_request_with_a_longer_text_is_told_why_nothing_was_guessed() -> None:
    method = DraftModel(table(blur=0.2))
    method.max_positions = 10
    config = {"method": "draft_model", "num_speculative_tokens": 4}
    engine = Engine(TARGET, ToyTokenizer(), speculative=config, method=method)
    seen: list[Job] = []
    engine.observers.append(lambda event: seen.extend(Job(row, None, 0.0, 0.0) for row in event.rows))
    engine.generate([1] * 20, PARAMS)
    assert plain_reason(seen[-1], None) == "draft_model was made for texts of at most 10 tokens, and this one is longer"


@pytest.mark.parametrize("make", [eagle1, eagle3, dflash])
def test_heads_know_what_their_checkpoints_say(make: Any, tmp_path: Path) -> None:
    head: Head = make()
    formats.save(head, tmp_path, target=spec())
    assert formats.load(tmp_path).max_positions == 512
    assert head.max_positions is None, "it comes from no file"


def test_it_is_said_when_a_method_is_loaded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = DraftModel(table(blur=0.2))
    monkeypatch.setattr("foretell.engine.methods.loaded", lambda config, loader: made)
    config = Engine(TARGET, speculative={"method": "draft_model", "model": "a/draft"}, method=made).speculative
    Methods(TARGET, None).method(config)
    assert caplog.text == ""
    made.max_positions = 2048
    Methods(TARGET, None).method(config)
    assert (
        "a/draft was made for texts of 2048 tokens, and the target reads 4096: longer ones are decoded without it"
        in caplog.text
    )
