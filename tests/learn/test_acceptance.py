"""An acceptance head learns beside its draft model, is calibrated for it, and is swapped in with it."""

from typing import Any

import pytest
import torch

from foretell import ConfigError, Engine, LearnOptions, SamplingParams
from foretell.learn.session import Session
from foretell.learn.training.trainer import Version
from foretell.methods.draft_model.drafter import ACCEPTANCE
from tests.learn.test_student import OPTIONS, SECRET, secret

QUICK = LearnOptions(where="inline", learn_share=1.0, learn_lr=3e-3, learn_every=4, replay=4, held_out=3, seed=1)


def specdec() -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": 4, "shape": "specdec"}
    return Engine.load("bundled", speculative=config)


@pytest.fixture
def session() -> Any:
    made = Session(specdec(), QUICK, max_rows=2)
    yield made
    made.close()


def trained(session: Session, count: int = 24) -> tuple[Any, list[Version]]:
    assert session.learner is not None
    pool = session.learner._inline
    assert pool is not None
    trainer = next(iter(pool.trainers.values()))
    found: list[Version] = []
    for number in range(count):
        trainer.add(secret(SECRET, number).reduced(64))
        found += [one for one in trainer.work() if isinstance(one, Version)]
    return trainer, found


def test_it_foresees_the_learned_draft_better_than_the_head_that_was_loaded(session: Session) -> None:
    """The draft learns a text by heart: its guesses there are kept, which the loaded head does not know."""
    trainer, found = trained(session)
    assert found
    student = trainer.student
    assert any(name.startswith(ACCEPTANCE) for name in found[-1].weights)
    texts = [secret(SECRET, number).reduced(64) for number in (200, 201)]
    losses = []
    for head in (trainer.versions[0], trainer.served):
        own = {name: value for name, value in head.items() if name.startswith(ACCEPTANCE)}
        student.load({**trainer.served, **own})
        generator = torch.Generator().manual_seed(3)
        places = [student.acceptance.places(student._labeled(text), text, generator) for text in texts]
        assert all(len(one.labels) == len(SECRET) for one in places)
        losses.append(student.acceptance.loss(places))
    assert losses[1] < losses[0] - 0.05, losses


def test_its_weights_are_swapped_in_with_the_drafts_and_no_token_changes(session: Session) -> None:
    engine = session.engine
    _, found = trained(session)
    rebuilt: Any = engine.method.rebuilt(found[-1].weights)
    loaded: Any = engine.method
    assert rebuilt.acceptance is not loaded.acceptance
    assert not torch.equal(rebuilt.acceptance.out.weight, loaded.acceptance.out.weight)
    assert rebuilt.acceptance.native is not None or loaded.acceptance.native is None
    hidden = torch.randn(3, loaded.model.spec.hidden_size)
    probs = torch.tensor([[-0.5, -0.5, 1.0, 1.0]] * 3) if rebuilt.acceptance.config.reads_law else None
    with torch.no_grad():
        native = rebuilt.acceptance(hidden, probs)
        rebuilt.acceptance.native = None
        slow = rebuilt.acceptance(hidden, probs)
    assert torch.allclose(native, slow, atol=0.1), "the native pass has the new weights"
    params = SamplingParams(max_new_tokens=24, seed=2, ignore_eos=True)
    alone = engine.with_method("none").generate([5, 6, 7], params).token_ids
    assert engine.with_method(engine.speculative, method=rebuilt).generate([5, 6, 7], params).token_ids == alone


def test_a_worse_head_is_not_taken(session: Session) -> None:
    """The head that serves stays where the one that was trained foresees less."""
    assert session.learner is not None
    trainer, _ = trained(session, count=0)
    student = trainer.student
    served = student.weights()
    torch.manual_seed(3)  # some noise makes a head that is no worse, and what came before chose the noise
    noisy = {
        name: value + 3.0 * torch.randn_like(value) if name.startswith(ACCEPTANCE) and value.dim() == 2 else value
        for name, value in served.items()
    }
    text = secret(SECRET, 1).reduced(64)
    student.load(noisy)
    student.acceptance.calibrate = lambda places: None
    settled = student.settle_acceptance(noisy, served, [text], [text])
    assert all(torch.equal(settled[name], served[name]) for name in served if name.startswith(ACCEPTANCE))


def test_a_draft_of_fewer_tokens_learns_on_those_alone() -> None:
    """``draft_vocab_size``: rebuilt as narrow as it was, and its q, served and trained, is zero elsewhere."""
    config = {"method": "draft_model", "num_speculative_tokens": 3, "draft_vocab_size": 1024}
    engine = Engine.load("bundled", speculative=config)
    session = Session(engine, OPTIONS, max_rows=1)
    params = SamplingParams(max_new_tokens=24, seed=0, ignore_eos=True)
    alone = [one.token_ids for one in engine.with_method("none").generate_batch([[5, 6, 7]], params)]
    done = list(session.run([[5, 6, 7]], params))
    assert [one.token_ids for one in done] == alone
    assert session.learner is not None
    pool = session.learner._inline
    assert pool is not None
    student = next(iter(pool.trainers.values())).student
    base: Any = engine.method
    assert torch.equal(student.origin.tokens, base.model.tokens)
    slot = student.objective.outcome(
        student._labeled(secret(SECRET, 1).reduced(64)), student.teacher, torch.Generator(), training=False
    ).slots[0]
    assert slot.logits.shape[-1] == len(base.model.tokens)
    rebuilt: Any = engine.method.rebuilt(student.weights())
    assert torch.equal(rebuilt.model.tokens, base.model.tokens)
    again = engine.with_method(engine.speculative, method=rebuilt).generate([5, 6, 7], params)
    assert again.token_ids == alone[0]
    assert again.num_accepted_tokens > 0
    session.close()


def test_a_draft_of_another_vocabulary_is_refused_with_the_reason() -> None:
    from foretell.methods.draft_model.vocabulary.translated import TranslatedDraft

    engine = specdec()
    method = TranslatedDraft.__new__(TranslatedDraft)
    method.__dict__.update(engine.method.__dict__)
    other = engine.with_method(engine.speculative, method=method)
    with pytest.raises(ConfigError, match="another vocabulary"):
        Session(other, QUICK, max_rows=1)
