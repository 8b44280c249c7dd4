"""A head that learns guesses other tokens: those that the target writes, with rows and moments that belong to them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, LearnOptions, SamplingParams
from foretell.heads import formats
from foretell.learn.training.pool import export
from foretell.learn.training.student import Origin, Student, matrices_of
from foretell.learn.training.texts import RawText, Text

SHOWN = {"method": "eagle3", "num_speculative_tokens": 3, "shape": "chain"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled", speculative=SHOWN)


def student_of(engine: Engine, weights: dict[str, Tensor] | None = None) -> Student:
    head: Any = engine.method.head  # type: ignore[attr-defined]
    found = weights or {
        name: value.float() if value.is_floating_point() else value for name, value in head.state_dict().items()
    }
    origin = Origin("eagle3", "bundled/eagle3", engine.model.spec, matrices_of(engine.model), 3, found)
    return Student(origin, LearnOptions(where="inline"))


def outside(student: Student) -> list[int]:
    """Tokens that its head does not guess."""
    known = student.objective.head.target_ids  # type: ignore[union-attr]
    ids = torch.arange(8192)
    return ids[~torch.isin(ids, known)].tolist()


def sure(tokens: list[int]) -> Text:
    """A text whose every token the target was sure of."""
    logits = torch.full((len(tokens), 8192), -30.0)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    taps = torch.randn(3 + len(tokens), 3 * 256, generator=torch.Generator().manual_seed(0)).half()
    return RawText([1, 2, 7, *tokens], 3, 0.0, [logits.half()], taps).reduced(8)


def plainly(ids: list[int], counts: dict[int, float]) -> list[int]:
    """The slow twin: one exchange after the other."""
    chosen = set(ids)
    while True:
        comes = max((t for t in counts if t not in chosen), key=lambda t: (counts[t], -t), default=None)
        leaves = min(chosen, key=lambda t: (counts.get(t, 0.0), -t))
        if comes is None or counts[comes] - counts.get(leaves, 0.0) < 0.5:
            return sorted(chosen)
        chosen = chosen - {leaves} | {comes}


def test_a_version_lies_between_with_the_learned_vocabulary_whole(engine: Engine) -> None:
    """Rows of a vocabulary halfway to another would be of no token."""
    student = student_of(engine)
    served = student.weights()
    text = sure(outside(student)[:20])
    assert student.renew([text])
    student.learn(text)
    student.apply()
    learned = student.weights()
    asked = student.between(served, learned)
    assert asked.keys() == learned.keys()
    moved = [name for name in served if not torch.equal(served[name], learned[name])]
    assert {"d2t", "t2d", "lm_head.weight", "fc.weight"} <= set(moved)
    for name in moved:
        whole = name in ("d2t", "t2d", "lm_head.weight")
        expected = learned[name] if whole else served[name] + 0.5 * (learned[name] - served[name])
        torch.testing.assert_close(asked[name], expected)
    student.load(asked)


def test_tokens_that_the_target_writes_take_the_places_of_those_that_it_does_not(engine: Engine) -> None:
    student = student_of(engine)
    head: Any = student.objective.head
    with torch.no_grad():  # a head whose rows were trained: the bundled one's are the target's to the last bit
        head.lm_head.weight.add_(torch.randn(head.lm_head.weight.shape, generator=torch.Generator().manual_seed(3)))
    before, rows = head.target_ids.clone(), head.lm_head.weight.detach().clone()
    new = outside(student)[5:40:5]
    written = [*new, *new[:3], int(before.max()), int(before.max())]
    count = student.renew([sure(written)])
    after = head.target_ids
    counts = {token: float(written.count(token)) for token in set(written)}
    assert after.tolist() == plainly(before.tolist(), counts)
    assert count == len(set(after.tolist()) - set(before.tolist())) == len(new)
    assert set(head.t2d.nonzero()[:, 0].tolist()) == set(after.tolist())
    assert int(before.max()) in after  # written, so it stays
    expected = student.teacher.model.matrices.head.clone()  # type: ignore[attr-defined]
    expected[before] = rows
    assert torch.equal(head.lm_head.weight, expected[after])
    assert student.renew([]) == 0  # it stays as it is


def test_a_version_has_its_maps_whatever_is_judged_between(engine: Engine) -> None:
    student = student_of(engine)
    head: Any = student.objective.head
    before, loaded = head.target_ids.clone(), student.weights()
    text = sure(outside(student)[:3])
    assert student.score(text) == 0.0  # greedy: no guess can be right
    student.renew([text])
    learned, after = student.weights(), head.target_ids.clone()
    for weights, ids in ((loaded, before), (learned, after)):
        student.load(weights)
        assert torch.equal(head.target_ids, ids)
        slot = student.objective.outcome(
            student._labeled(text), student.teacher, torch.Generator(), training=False
        ).slots[0]
        assert torch.equal(slot.vocab, ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [True, False])
def test_a_version_s_q_is_on_its_own_tokens_and_no_text_changes(engine: Engine, native: bool, tmp_path: Path) -> None:
    student = student_of(engine)
    new = outside(student)[:3]
    student.renew([sure(new)])
    student.learn(sure(new * 4))
    student.apply()
    weights = student.checkpoint(student.weights())
    method: Any = engine.method.rebuilt(weights)
    if not native:
        method.native = None
    served = engine.with_method(engine.speculative, method=method)
    read = torch.randn(1, 2, 256, generator=torch.Generator().manual_seed(1))
    logits = method.native.logits(read) if native else _by_torch(method, method.head.norm(read))
    ids = student.objective.head.target_ids  # type: ignore[union-attr,operator]
    assert logits[0, 0].isfinite().nonzero()[:, 0].tolist() == ids.tolist()
    expected = student.objective.head.logits(student.objective.head.norm(read), student.teacher.model)  # type: ignore[operator]
    assert torch.allclose(logits[..., ids], expected, rtol=1e-3, atol=1e-3)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    plain = engine.with_method("none").generate([5, 6, 7], params)
    mine = served.generate([5, 6, 7], params)
    assert mine.token_ids == plain.token_ids
    export(student, weights, tmp_path / "head")
    assert formats.load(tmp_path / "head").dtype == torch.bfloat16, "in half of the bytes of what learns"
    exported = Engine.load("bundled", speculative={**SHOWN, "model": str(tmp_path / "head")})
    assert torch.equal(exported.method.head.target_ids, ids)  # type: ignore[attr-defined]
    assert exported.generate([5, 6, 7], params).steps == mine.steps
    again = student_of(engine, weights)  # the next start: what was learned before is not the first to leave
    assert torch.equal(again.objective.head.target_ids, ids)  # type: ignore[union-attr]
    assert torch.equal(again.vocabulary.mass, student.vocabulary.mass)
    again = student_of(engine, student.weights())  # of an earlier foretell
    assert again.vocabulary.mass.nonzero()[:, 0].tolist() == sorted(new)


def _by_torch(method: Any, read: Tensor) -> Tensor:
    logits = method.head.logits(read, method.model)
    return logits.new_full((*logits.shape[:2], 8192), -torch.inf).index_copy_(2, method.head.vocabulary, logits)
