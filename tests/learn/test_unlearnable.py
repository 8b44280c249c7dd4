"""Texts and drafts that learning cannot take as they are: what one of them must not cost the others, nor the process."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import Engine, LearnOptions, Request, SamplingParams, bundled
from foretell.learn.session import Session
from foretell.learn.training.pool import TrainerPool
from foretell.learn.training.texts import RawText
from foretell.learn.training.trainer import AdapterTrainer
from foretell.model.hf.adapter import TransformersModel
from tests.engine.harness import ToyTokenizer
from tests.learn.test_student import engine_of
from tests.learn.test_texts import raw
from tests.model.tiny import tiny_module

OPTIONS = LearnOptions(where="inline", learn_share=1.0, learn_every=2, held_out=1000)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Its draft has dropout, and 48 learned positions."""
    folder = tmp_path_factory.mktemp("draft")
    tiny_module("gpt2", vocab_size=8192, n_positions=48, resid_pdrop=0.5, embd_pdrop=0.5).save_pretrained(folder)
    for file in Path(bundled.path("draft")).glob("token*"):
        shutil.copy(file, folder)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    return Session(Engine.load("bundled", speculative=config, drafter_errors="raise"), OPTIONS, max_rows=2)


def answer(session: Session, *prompts: list[int], tokens: int = 20, seed: int = 1) -> list[int]:
    params = SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)
    return [one.num_tokens for one in session.run(prompts, params)]


def test_dropout_leaves_the_process_s_random_numbers_alone(session: Session) -> None:
    """And does not depend on them: what is learned is a function of texts and seed."""
    learner: Any = session.learner
    student = next(iter(learner._inline.trainers.values())).student
    text = raw([5, *range(30)], 6).reduced(8)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        student._dropping.manual_seed(7)
        losses.append([student.learn(text), student.learn(text)])
        student.forget()
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1], "nothing was dropped"


def test_a_text_longer_than_the_draft_s_positions_is_cut(session: Session) -> None:
    learner: Any = session.learner
    trainer = next(iter(learner._inline.trainers.values()))
    before = trainer.num_updates
    assert answer(session, [5, 6, 7], [8, 9], tokens=60) == [60, 60]
    assert trainer.num_updates == before + 1
    assert {len(text.tokens) for text in trainer.replay} == {48}
    assert answer(session, list(range(5, 52)), [8, 9], [7, 9], tokens=20) == [20, 20, 20]  # of one no more than a token
    assert learner.failure == ""
    assert learner.figures().num_failures == 0


def pool_of(session: Session, method: str) -> tuple[TrainerPool, Any]:
    learner: Any = session.learner
    return learner._inline, learner._inline.trainers[f"/{method}/0"]


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-4, 1e4, 1e38, 1e308])
def test_at_any_temperature_what_is_learned_are_numbers(session: Session, temperature: float) -> None:
    """One text of temperature 1e-46, held out, had every later update refused; elsewhere it cost the step."""
    pool, trainer = pool_of(session, "draft_model")
    trainer.fresh = []
    given = raw([5, *range(30)], 6, temperature)
    pool.add("/draft_model/0", given)
    (text,) = trainer.fresh
    for number in (trainer.student.score(text), trainer.student.learn(text)):
        assert torch.isfinite(torch.tensor(number))
    trainer.student.forget()
    trainer.fresh = []


def test_texts_with_numbers_that_are_none_are_left_out_and_told_once() -> None:
    session = Session(engine_of("eagle1"), OPTIONS)
    pool, trainer = pool_of(session, "eagle1")
    size = session.engine.model.spec.hidden_size
    for bad in (float("inf"), float("nan"), 1.0):
        given = raw([5, *range(11)], 6)
        taps = torch.full((12, size), bad).half()
        pool.add("/eagle1/0", RawText(given.tokens, given.start, 1.0, given.logits, taps))
    assert trainer.num_texts == 1
    assert trainer.num_left_out == 2
    assert [event["event"] for _, event in pool.results] == ["left out"]  # type: ignore[index]
    session.close()


def test_a_row_that_has_read_the_draft_s_last_position_waits_there() -> None:
    """It was fed nothing, at a place behind its learned positions, whenever another was fed: guessing failed for all."""
    models = [tiny_module("gpt2", vocab_size=32, n_positions=count) for count in (128, 48)]
    for parameter in (parameter for model in models for parameter in model.parameters()):
        parameter.data.zero_()  # both write token 0: every guess is kept
    target, draft = map(TransformersModel, models)
    config = {"method": "draft_model", "model": draft.spec.name, "num_speculative_tokens": 3}
    engine = Engine(target, ToyTokenizer(), speculative=config, draft=draft, drafter_errors="raise")
    params = SamplingParams(max_new_tokens=70, temperature=0.0, ignore_eos=True)
    requests = [Request([5] * length, params) for length in (3, 12, 13, 14, 15)]
    done = engine.generate_batch(requests, batch_size=5)
    assert [one.token_ids for one in done] == [[0] * 70] * 5
    assert min(one.num_accepted_tokens for one in done) > 20


def test_new_texts_stay_within_their_memory_and_are_learned_where_no_more_have_room(session: Session) -> None:
    """--learn-every 100000, or a head of a large target, held hundreds of texts beyond --learn-memory-mib."""
    learner: Any = session.learner
    student = next(iter(learner._inline.trainers.values())).student
    size = raw([5, *range(30)], 6).reduced(8).num_bytes
    for one_in, most in ((1000, 5), (2, 5), (2, 1)):
        options = LearnOptions(learn_every=10_000, held_out=one_in)
        trainer = AdapterTrainer(student, options, max_bytes=3 * most * size)
        for number in range(40):
            trainer.add(raw([number, *range(30)], 6).reduced(8))
            assert trainer.num_bytes <= 3 * max(most, 4) * size
        if one_in == 1000:
            assert len(trainer.replay) == 2 * most, "what is held out and what is new leave room"
        assert trainer.is_due
        held = (*trainer.held_out.recent, *trainer.held_out.old)
        assert len(held) == (max(4, most) if one_in == 2 else 0)
        for _ in trainer._update():
            break
        assert trainer.fresh == []
        assert not trainer.is_due
    student.forget()
