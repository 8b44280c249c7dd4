"""A hybrid learns by its second method: swaps, counts, export and restart; what cannot learn is refused before the load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import ConfigError, Engine, LearnOptions, SamplingParams, Service, ServiceOptions, Submission
from foretell.cli import settings
from foretell.engine.event import StepEvent
from foretell.learn.adapters import LearnedMethod
from foretell.learn.learner import Learner
from foretell.learn.session import Session
from foretell.methods.hybrid.drafter import Hybrid
from tests.engine.integrity import check_service
from tests.learn.test_revert import VERDICT, publish
from tests.service.test_service import Mailbox

OPTIONS = LearnOptions(where="inline", learn_share=1.0)
CONFIG = {"method": "hybrid", "second": "eagle1", "second_shape": "chain"}
REPEATED = [5, 6, 7, 8, 9, 10, 11] * 4


def hybrid_of(**more: Any) -> Engine:
    return Engine.load("bundled", speculative={**CONFIG, **more})


def service(engine: Engine, learn: LearnOptions | None) -> Service:
    made = Service(engine, ServiceOptions(speculation="on", max_num_seqs=4, max_model_len=200), learn=learn)
    made.start()
    return made


def texts(made: Service, tenant: str | None = None) -> tuple[list[list[int]], int]:
    """Four texts in one batch, and how many guesses were kept."""
    box = Mailbox()
    for number in range(4):
        params = SamplingParams(max_new_tokens=24, seed=number, temperature=number % 2, ignore_eos=True)
        made.submit(Submission(f"r{number}", [5 + number, *REPEATED], params, tenant=tenant), box.hear)
    done = [box.last(f"r{number}", 60.0).completion for number in range(4)]
    assert all(done)
    return [one.token_ids for one in done if one], sum(one.num_accepted_tokens for one in done if one)


def session_of(folder: Path | None = None, options: LearnOptions = OPTIONS) -> tuple[Session, Any, Any, Any]:
    """(session, learner, what serves, its trainer)."""
    session = Session(hybrid_of(), replace(options, learn_dir=None if folder is None else str(folder)), max_rows=2)
    learner: Any = session.learner
    (served,) = learner.adapters.by_name.values()
    (trainer,) = learner._inline.trainers.values()
    return session, learner, served, trainer


def test_new_weights_of_the_second_method_change_its_guesses_and_no_text() -> None:
    alone = service(hybrid_of(), None)
    expected, kept = texts(alone)
    alone.close()
    made = service(hybrid_of(), OPTIONS)
    try:
        assert texts(made) == (expected, kept)
        learner: Any = made._learning
        (served,) = learner.adapters.by_name.values()
        (trainer,) = learner._inline.trainers.values()
        assert served.name == "/hybrid/0"
        nothing = {name: torch.zeros_like(value) for name, value in trainer.served.items()}
        learner._result((served.name, trainer._publish(nothing, VERDICT)))
        made._call(learner.swap)
        assert served.method.serving[0] == 1
        swapped = texts(made)
        assert swapped[0] == expected
        assert swapped[1] < kept - 5, "the second method guesses by other weights"
        made.tell_learner("revert")
        assert texts(made)[0] == expected
        assert texts(made, "a client")[0] == expected  # its own suffixes, and its own weights
        assert {one.name for one in learner.adapters.by_name.values()} == {"/hybrid/0", "a client/hybrid/0"}
        check_service(made)
        assert learner.figures().num_failures == 0
        assert learner.figures().num_texts == 16
    finally:
        made.close()


def test_rows_of_one_adapter_share_a_method_and_what_it_has_learned() -> None:
    session, learner, served, _ = session_of()
    first, second = (learner.assign(session.choice, Submission(name, [1, 2]))[0].method for name in "ab")
    assert first is second
    assert isinstance(first, Hybrid)
    assert isinstance(first.second, LearnedMethod)
    base: Any = session.engine.method
    assert (first.suffix, first.trained) == (base.suffix, served.method)
    assert first.worth_at(0.7) is base.worth_at(0.7)
    assert base.trained is base.second, "the loaded method is as it was"
    session.close()


def test_steps_by_suffix_do_not_count_for_what_learns() -> None:
    """Live acceptance after a swap is compared with that before: suffix keeps its guesses whatever was learned."""
    session, learner, served, _ = session_of()
    by_suffix = by_second = 0

    def observe(event: StepEvent) -> None:
        nonlocal by_suffix, by_second
        for row, light in zip(event.rows, event.light_steps, strict=True):
            assert light is not None
            by_suffix += light.proposed
            by_second += row.steps[-1][0] > 0 and not light.proposed

    session.loop.observers.append(observe)
    params = SamplingParams(max_new_tokens=40, seed=0, temperature=0.0, ignore_eos=True)
    list(session.run([REPEATED, [11, *REPEATED]], params))
    assert by_suffix > 3
    assert by_second > 3
    assert sum(one["guessed"] for one in learner.history) == by_second
    assert served.watch._seen == by_second
    session.close()


def test_a_hybrid_learns_through_the_gate() -> None:
    options = replace(OPTIONS, learn_every=2, held_out=2, replay=2)
    session, learner, _, trainer = session_of(options=options)
    prompts = [[20 + number, *REPEATED, number] for number in range(12)]
    list(session.run(prompts, SamplingParams(max_new_tokens=12, seed=0, ignore_eos=True)))
    figures = learner.figures()
    assert (figures.num_texts, figures.num_failures) == (12, 0)
    assert trainer.num_updates == figures.num_updates >= 1
    assert figures.num_swaps + figures.num_refused >= 1, "the gate has judged"
    session.close()


def test_what_was_learned_is_loaded_again_by_a_restart_and_by_name(tmp_path: Path) -> None:
    session, learner, served, trainer = session_of(tmp_path)
    learner._result((served.name, publish(trainer, 1.5)))
    learner.swap()
    learner.act("save")
    session.learn()
    session.close()
    learned = served.method.serving[1].head.state_dict()
    other, _, again, _ = session_of(tmp_path)
    found = again.method.serving[1].head.state_dict()
    other.close()
    method: Any = hybrid_of(model=str(tmp_path / "hybrid-0" / "export")).method
    for state, exactly in ((found, 1e-6), (method.second.head.state_dict(), 2**-8)):  # a checkpoint is in bfloat16
        assert state.keys() == learned.keys()
        assert all(torch.allclose(state[name], value, rtol=exactly, atol=1e-6) for name, value in learned.items())


@pytest.mark.parametrize("target", ["smollm2-135m", "bundled"])
def test_the_default_methods_of_targets_with_drafters_can_learn(target: str) -> None:
    settings.check_learning([settings.default_config(target, None)], target)


def test_what_only_the_loaded_model_tells_is_refused_before_costs_are_measured(tmp_path: Path) -> None:
    def refused(options: LearnOptions, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            Service(hybrid_of(), ServiceOptions(speculation="auto", max_model_len=200), learn=options)

    refused(replace(OPTIONS, learn_device="banana"), "device 'banana'")
    first = Session(hybrid_of(), replace(OPTIONS, learn_dir=str(tmp_path)))
    assert isinstance(first.learner, Learner)
    refused(replace(OPTIONS, learn_dir=str(tmp_path)), "in use by another learner")
    first.close()
