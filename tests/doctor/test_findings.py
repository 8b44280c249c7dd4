"""Which mistake is named: the rules, on figures made by hand."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.core.errors import ConfigError
from foretell.doctor import findings as f, head as diagnosing
from foretell.doctor.contexts import TextScore
from foretell.doctor.diagnosis import HeadTrial, Slot
from foretell.doctor.record import HeadRecord
from foretell.heads.formats import TargetInfo
from foretell.train.metrics import SlotFigures

SPEC: Any = SimpleNamespace(name="t", architecture="LlamaForCausalLM", num_layers=4, is_quantised=False, weights="")


def text(length: float = 2.0, places: int = 10, *, rates: tuple[float, ...] = (), not_finite: int = 0) -> TextScore:
    slots = tuple(SlotFigures(places, rate, rate, rate, rate, 0.0) for rate in rates)
    return TextScore(length, slots, places, 0.0, 0.5, 0.4, not_finite)


def trial(accepted: float, gain: float, errors: float | None, fault: str = "rope", change: str = "c") -> HeadTrial:
    return HeadTrial(fault, change, accepted, gain, errors)


def record(*conditional: float, mark: str | None = None, about: TargetInfo | None = None) -> HeadRecord:
    return HeadRecord(about or TargetInfo(), mark, conditional)


def faults(found: Any) -> list[str]:
    return [one.fault for one in found]


def test_texts_count_by_their_places() -> None:
    assert f.accepted([text(2.0, 30), text(4.0, 10)]) == pytest.approx(1.5)
    assert f.accepted([text(2.0, 0)]) == 0.0
    first, second = f.slots_of([text(places=30, rates=(0.8, 0.5)), text(places=10, rates=(0.4,))], record(0.9))
    assert (first.slot, first.acceptance, first.expected) == (1, pytest.approx(0.7), 0.9)
    assert (second.slot, second.acceptance, second.expected) == (2, 0.5, None)


@pytest.mark.parametrize(
    ("trials", "named"),
    [
        ([trial(1.5, 0.5, 4.0)], ["rope"]),
        ([trial(1.5, 0.5, 3.4)], []),  # too unsure
        ([trial(1.04, 0.04, 9.0)], []),  # too little
        ([trial(9.0, 8.0, None)], []),  # on other texts
        ([trial(1.3, 0.3, 9.0, change="exit_layer = 2: one later")], []),  # a later layer knows more anyway
        ([trial(1.5, 0.5, 9.0, change="exit_layer = 2: one later")], ["rope"]),
        ([trial(1.5, 0.5, 9.0), trial(1.8, 0.8, 4.0, fault="norm")], ["norm"]),  # of two the better one
    ],
)
def test_a_variant_is_named_that_is_clearly_better(trials: list[HeadTrial], named: list[str]) -> None:
    assert faults(f.named(trials, [text()], "float16")) == named


def test_numbers_that_are_not_finite_are_named_alone() -> None:
    """The other figures of such a head mean nothing."""
    (found,) = f.named([trial(1.5, 0.5, 9.0)], [text(not_finite=3)], "float16")
    assert found.fault == "dtype"
    assert "3 of 10 places" in found.evidence
    assert "not float16" in found.remedy


@pytest.mark.parametrize(
    ("first", "accepted", "expected", "low"),
    [
        (Slot(1, 0.5, 0.5, None), 0.7, 1.0, True),  # 0.7 of 1.0 by the whole curve
        (Slot(1, 0.5, 0.5, None), 0.8, 1.0, False),
        (Slot(1, 0.5, 0.5, 0.8), 0.0, None, True),  # the curve is of another length: slot 1 decides
        (Slot(1, 0.7, 0.7, 0.8), 0.0, None, False),
        (Slot(1, 0.29, 0.3, None), 0.0, None, True),
        (Slot(1, 0.31, 0.3, None), 0.0, None, False),
    ],
)
def test_what_is_little(first: Slot, accepted: float, expected: float | None, low: bool) -> None:
    same = [text(1.0 + accepted, rates=(first.acceptance,))] * 4  # texts that are all alike leave nothing to chance
    assert f.is_low([first], same, expected) is low


def test_few_texts_prove_no_lack() -> None:
    """Texts of a head that accepts what is expected: two are below three quarters of it by chance one time in five."""
    generator, seems, said = random.Random(0), 0, 0
    for _ in range(1000):
        base = [text(1.0 + max(0.0, generator.gauss(1.0, 0.4)), rates=(0.5,)) for _ in range(2)]
        seems += f.is_low([Slot(1, 0.5, 0.5, None)], base, 1.0, certain=False)
        said += f.is_low([Slot(1, 0.5, 0.5, None)], base, 1.0)
    assert seems > 150
    assert said < 30
    many = [text(1.0 + generator.gauss(0.4, 0.2), rates=(0.5,)) for _ in range(10)]
    assert f.is_low([Slot(1, 0.5, 0.5, None)], many, 1.0)  # a head that lacks is still found
    assert not f.is_low([Slot(1, 0.2, 0.2, None)], [text(1.1, rates=(0.1,))], 1.0)  # one text has no interval


def test_a_head_without_a_slot_accepts_little() -> None:
    assert f.is_low([], [], 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (record(mark="aa"), "aa; this one is bb"),
        (record(about=TargetInfo(architecture="MistralForCausalLM")), "architecture"),
        (record(about=TargetInfo(num_layers=5)), "number of layers of its target is 5; this one has 4"),
    ],
)
def test_another_target_by_the_record(given: HeadRecord, said: str) -> None:
    (found,) = f.of_record(given, SPEC, "bb")
    assert found.fault == "other_target"
    assert said in found.evidence


def test_a_record_of_this_target_says_nothing() -> None:
    same = record(mark="bb", about=TargetInfo(architecture="LlamaForCausalLM", num_layers=4))
    assert f.of_record(same, SPEC, "bb") == []
    assert f.of_record(record(), SPEC, None) == []


@pytest.mark.parametrize(
    ("trials", "known", "named"),
    [
        ([trial(1.0, 0.25, None, "template")], (0.5, 0.5), True),  # 1.25 times, and 0.75 expected
        ([trial(1.0, 0.25, None, "template")], (), False),  # where nothing is recorded it must be 1.35 times
        ([trial(1.0, 0.4, None, "template")], (), True),
        ([trial(0.2, 0.9, None, "template")], (), False),  # still too little to be the reason
        ([trial(9.0, 9.0, None)], (), False),  # no template
    ],
)
def test_a_template_is_named(trials: list[HeadTrial], known: tuple[float, ...], named: bool) -> None:
    assert faults(f.of_template(trials, record(*known))) == (["template"] if named else [])


@pytest.mark.parametrize(
    ("rate", "stated", "true", "mark", "fault"),
    [
        (0.25, 0.8, 0.3, None, "other_target"),  # sure of itself and wrong
        (0.25, 0.8, 0.3, "aa", "untrained"),  # the record has named this target
        (0.25, 0.4, 0.3, None, "untrained"),
        (0.1, 0.2, 0.2, None, "other_target"),
    ],
)
def test_what_is_left(rate: float, stated: float, true: float, mark: str | None, fault: str) -> None:
    assert f.remaining([Slot(1, rate, rate, None)], stated, true, record(mark=mark), "t").fault == fault


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("d2t has 3 entries", "token_mapping"),
        ("was trained for a target of hidden size 8", "other_target"),
        ("target layers [9] of 4", "layer_ids"),
        ("holds float8 tensors", "dtype"),
    ],
)
def test_what_the_loader_refuses_is_a_fault(message: str, fault: str) -> None:
    found = f.refused(message)
    assert found is not None
    assert (found.fault, found.evidence) == (fault, message)
    assert f.refused("no such file") is None


def test_a_format_whose_prompts_do_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the other formats has no answer to measure on: the others are still tried, and a note says so."""

    def answers(engine: Any, prompts: Any, **_: Any) -> Any:
        if prompts == [[1]]:
            raise ConfigError("none of 1 prompts fits the context of 2 tokens")
        return "answers"

    monkeypatch.setattr(diagnosing, "answers", answers)
    monkeypatch.setattr(diagnosing, "_measure", lambda head, tried, engine, texts: ([text(3.0)], []))
    engine: Any = None
    others = {"ChatML": [[1]], "Llama 3": [[2]]}
    tried, left = diagnosing.in_other_formats(engine, engine, others, [text(2.0)], max_new_tokens=8, seed=0)
    assert [(one.change, one.accepted, one.gain) for one in tried] == [("Llama 3", 2.0, pytest.approx(1.0))]
    assert left == ["the format ChatML was not tried: none of 1 prompts fits the context of 2 tokens"]
