"""Draft models of fewer tokens than the target learn on those alone; of another vocabulary they do not learn."""

from typing import Any

import pytest
import torch

from foretell import ConfigError, Engine, SamplingParams
from foretell.learn.session import Session
from tests.learn.test_student import OPTIONS, SECRET, secret


def test_a_draft_of_fewer_tokens_learns_on_those_alone() -> None:
    """``draft_vocab_size``: rebuilt as narrow as it was, and its q, served and trained, is zero elsewhere."""
    config = {"method": "draft_model", "num_speculative_tokens": 3, "draft_vocab_size": 1024}
    engine = Engine.load("bundled", speculative=config)
    session = Session(engine, OPTIONS, max_rows=1)
    params = SamplingParams(max_new_tokens=24, seed=0, ignore_eos=True)
    alone = [one.token_ids for one in engine.with_method("none").generate_batch([[5, 6, 7]], params)]
    done = list(session.run([[5, 6, 7]], params))
    assert [one.token_ids for one in done] == alone
    pool = session.learner._inline
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
    from foretell.methods.draft_model.vocabulary.tli import TranslatedDraft

    engine = Engine.load("bundled", speculative={"method": "draft_model", "num_speculative_tokens": 4})
    method = TranslatedDraft.__new__(TranslatedDraft)
    method.__dict__.update(engine.method.__dict__)
    other = engine.with_method(engine.speculative, method=method)
    with pytest.raises(ConfigError, match="another vocabulary"):
        Session(other, OPTIONS, max_rows=1)
