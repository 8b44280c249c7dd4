"""What a grammar leaves no choice about is guessed: the same tokens in fewer passes, whatever a planner would do."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission
from foretell.core.params import expected_of
from foretell.costs.table import CostTable
from foretell.engine.request.request import token_ids
from foretell.engine.structured.constraint import ConstraintProcessor, Constraints
from foretell.engine.structured.expected import blank_before
from foretell.engine.structured.format import Both
from foretell.planner.acceptance import Acceptance
from foretell.planner.expected import LOOKED_UP, Expected, guessing
from foretell.planner.observations import RowStep, RowView
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from foretell.service.processors import GuardedProcessor
from tests.service.test_service import Mailbox

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"enum": ["kelvin", "celsius"]},
            },
            "required": ["days", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
ANSWER = {"name": "weather", "arguments": {"days": 3, "unit": "kelvin"}}
STYLES = {
    "spaced": json.dumps(ANSWER),
    "closed up": json.dumps(ANSWER, separators=(",", ":")),
    "indented by two": json.dumps(ANSWER, indent=2),
    "indented by four": json.dumps(ANSWER, indent=4),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("bundled")


@pytest.fixture(scope="module")
def constraints(engine: Engine) -> Constraints:
    return Constraints(engine.tokenizer, engine.model.spec.vocab_size, engine.model.spec.eos_token_ids)


def encode(engine: Engine, text: str) -> list[int]:
    return token_ids(text, engine.tokenizer, add_special_tokens=False)


def passes(processor: ConstraintProcessor, ids: Sequence[int]) -> int:
    """How many write a text, if each guess of what comes is checked."""
    at = count = 0
    while at < len(ids):
        found = processor.expected(ids[:at])
        right = next(
            (place for place, pair in enumerate(zip(found, ids[at:], strict=False)) if pair[0] != pair[1]), None
        )
        at += 1 + (min(len(found), len(ids) - at) if right is None else right)
        count += 1
    return count


@pytest.mark.parametrize(
    ("before", "mark", "blank"),
    [
        (b'{"a":', b'"', b" "),
        (b'{"a": 1,', b'"', b" "),
        (b'{"a":1,', b'"', b""),
        (b"{", b'"', b""),
        (b'{"a": [', b'"', b""),
        (b'{\n  "a": 1,', b'"', b"\n  "),
        (b'{\n  "a": 1,\n', b'"', b"  "),
        (b'{\n  "a": {', b'"', b"\n    "),
        (b'{\n    "a": {', b'"', b"\n        "),
        (b'{\n  "a": {\n    "b": 1', b"}", b"\n  "),
        (b'{\n  "a": {\n    "b": 1\n  }', b"}", b"\n"),
        (b'{\n  "a":', b'"', b" "),
        (b'{\n  "a": {', b"}", b""),
        (b'{"a"', b":", b""),
        (b"", b"{", b""),
    ],
)
def test_white_space_is_that_of_the_json_before(before: bytes, mark: bytes, blank: bytes) -> None:
    assert blank_before(mark, before) == blank


@pytest.mark.parametrize("style", STYLES)
def test_most_of_a_call_comes_without_a_choice(engine: Engine, constraints: Constraints, style: str) -> None:
    """Only what the model chooses takes a pass of its own: white space once, the number, the unit."""
    ids = encode(engine, STYLES[style])
    processor = constraints.json_schema(CALL).processor(0)
    assert passes(processor, ids) <= len(ids) / 3
    assert constraints.json_schema(CALL).permits(ids)


def test_a_text_without_any_choice_is_known_whole(engine: Engine, constraints: Constraints) -> None:
    constraint = constraints.json_schema({"const": {"a": [1, 2], "text": "ñ ☃ 😀"}}, compact=True)
    found = list(constraint.processor(3).expected([7, 7, 7]))
    assert engine.tokenizer.decode(found) == '{"a":[1,2],"text":"ñ ☃ 😀"}'
    assert constraint.permits(found)
    assert list(constraint.processor(0).expected([*found])) == []
    assert list(constraint.processor(0).expected([*found, 2])) == [], "it has ended"


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "boolean"}, {"enum": ["a", "b"]}, {"type": "object"}])
def test_where_there_is_a_choice_nothing_more_is_guessed(
    engine: Engine, constraints: Constraints, schema: dict[str, Any]
) -> None:
    constraint = constraints.json_schema(schema)
    found = engine.tokenizer.decode(list(constraint.processor(0).expected([])))
    assert found in ("", '"', "{")


def test_tokens_without_a_text_are_known_by_their_ids(engine: Engine, constraints: Constraints) -> None:
    """As the marks of calls are in most vocabularies."""
    special = next(iter(sorted(set(constraints._added) - set(constraints.eos_token_ids))), None)
    assert special is not None
    ids = constraints.grammar(f'start: <[{special}]> "go" <[{special}]> "on"').processor(0).expected([])
    assert ids[0] == special
    assert list(ids).count(special) == 2
    assert engine.tokenizer.decode([token for token in ids if token != special]) == "goon"


def test_looking_ahead_changes_no_mask(engine: Engine, constraints: Constraints) -> None:
    """The matcher was moved: what is permitted after any text is what a fresh one says."""
    constraint = constraints.json_schema(CALL)
    ids, logits = encode(engine, STYLES["indented by two"]), torch.zeros(engine.model.spec.vocab_size)
    one = constraint.processor(0)
    for count in range(len(ids)):
        if count % 3 != 1:
            one.expected(ids[:count])
        if count % 3:
            text = torch.tensor(ids[:count], dtype=torch.int64)
            assert torch.equal(one(text, logits.clone()), constraint.processor(0)(text, logits.clone()))
        assert list(one.expected(ids[:count])) == list(constraint.processor(0).expected(ids[:count]))


def test_processors_around_another_say_what_comes(engine: Engine, constraints: Constraints) -> None:
    inner = constraints.json_schema(CALL).processor(0)
    first = tuple(inner.expected([]))
    assert first
    assert expected_of(GuardedProcessor(Both(lambda _, logits: logits, inner)), []) == first
    assert expected_of(None, []) == expected_of(lambda _, logits: logits, []) == ()
    inner.stop("over")
    assert expected_of(GuardedProcessor(inner), [1]) == ()

    class Broken:
        def expected(self, ids: Sequence[int]) -> Sequence[int]:
            raise RuntimeError("broken")

        def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return logits

    assert expected_of(GuardedProcessor(Broken()), []) == ()


METHODS = {
    "a line": {"method": "suffix"},
    "a tree": {"method": "suffix", "shape": "opt_tree"},
    "beside a draft model": {"method": "hybrid", "second": "draft_model"},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens_in_fewer_steps(engine: Engine, method: str, temperature: float) -> None:
    params = SamplingParams(json_schema=CALL, temperature=temperature, max_new_tokens=80)
    for seed in range(2):
        one = engine.with_method("none").generate("Call:", params, seed=seed)
        other = engine.with_method(METHODS[method]).generate("Call:", params, seed=seed)
        assert other.token_ids == one.token_ids
        assert other.num_steps < (0.6 if temperature == 0.0 else 0.9) * one.num_steps


# -- where nobody would guess --------------------------------------------------------------------------------------------


def test_a_service_guesses_it_before_costs_are_known(engine: Engine) -> None:
    """... and nothing else; a row beside it writes what it writes alone."""
    service = Service(engine.with_method({"method": "suffix"}), ServiceOptions(max_num_seqs=4, max_model_len=256))
    service.start()
    try:
        box = Mailbox()
        params = SamplingParams(json_schema=CALL, temperature=0.0, max_new_tokens=80, seed=1)
        free = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=0.0, seed=2)
        prompt = encode(engine, "Call:")
        for name, one in (("call", params), ("free", free)):
            service.submit(Submission(name, prompt, one), box.hear)
        made = {name: box.last(name, 60.0).completion for name in ("call", "free")}
    finally:
        service.close()
    for name, one in (("call", params), ("free", free)):
        completion = made[name]
        assert completion is not None
        assert completion.token_ids == engine.with_method("none").generate(prompt, one).token_ids
    call = made["call"]
    assert call is not None
    assert call.num_steps < 0.6 * call.num_tokens
    assert call.num_draft_tokens == sum(drafted for drafted, _ in call.steps)
    free_one = made["free"]
    assert free_one is not None
    assert free_one.num_draft_tokens == 0


def test_a_call_like_an_earlier_one_is_looked_up_before_costs_are_known(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its free texts, too, of which the grammar expects nothing."""
    params = SamplingParams(json_schema=CALL, temperature=0.0, max_new_tokens=80, seed=1)
    first = engine.with_method("none").generate("Call:", params)
    prompt = [*encode(engine, "Call:"), *(first.token_ids[:-1] + encode(engine, "\nCall:")) * 2]
    steps = list[int]()
    for most in (LOOKED_UP, 0):
        monkeypatch.setattr("foretell.planner.expected.LOOKED_UP", most)
        service = Service(engine.with_method({"method": "suffix"}), ServiceOptions(max_num_seqs=2, max_model_len=512))
        service.start()
        try:
            box = Mailbox()
            service.submit(Submission("call", prompt, params), box.hear)
            made = box.last("call", 60.0).completion
        finally:
            service.close()
        assert made is not None
        assert made.token_ids == engine.with_method("none").generate(prompt, params).token_ids
        steps.append(made.num_steps)
    assert steps[0] < steps[1], steps


def view(name: str, expected: int | None, **changes: Any) -> RowView:
    given: dict[str, Any] = {"max_depth": 15, "depth_limit": 100, "length": 50, **changes}
    return RowView(name, "suffix", expected=expected, **given)


def planner(node: float) -> Planner:
    """A further node adds so many plain passes of one row; eight rows take as long as one."""
    passes = {
        (rows, rows * (1 + more)): 0.01 * (1 + node * more * rows) for rows in (1, 8) for more in (0, 1, 3, 7, 15)
    }
    return Planner(CostTable(passes, {"suffix": {(1, 1): 1e-6, (8, 8): 1e-6}}), Acceptance(16, None, {"suffix"}))


def test_what_is_expected_is_guessed_as_deep_as_it_pays() -> None:
    rows = [view("a", 10)]
    plan = StepPlan([0], members=("a",))
    cheap = planner(0.1).with_expected(plan, rows)
    assert (cheap.caps, cheap.paid, cheap.expected) == ([10], [0], (10,))
    assert planner(0.4).with_expected(plan, rows).caps == [5], "ten are kept with a chance of .35"
    assert planner(2.0).with_expected(plan, rows) is plan
    assert plan.caps == [0], "the standing decision's plan is not changed"
    assert planner(0.1).with_expected(plan, [view("a", 10, depth_limit=3)]).caps == [3]
    assert planner(0.1).with_expected(plan, [view("a", 10, max_depth=0)]) is plan


def test_of_eight_rows_those_guess_that_know_what_comes() -> None:
    rows = [view(str(number), 12 if number == 3 else 0) for number in range(8)]
    plan = StepPlan([0] * 8, members=tuple(map(str, range(8))))
    assert planner(0.01).with_expected(plan, rows).caps == [0, 0, 0, 12, 0, 0, 0, 0]
    assert planner(0.4).with_expected(plan, rows) is plan, "one row's guesses would hold up seven others"
    assert [planner(node).asks_expected(8, 50.0) for node in (0.01, 0.4)] == [True, False]
    assert [planner(node).asks_expected(1, 50.0) for node in (0.1, 2.0)] == [True, False]
    assert [Expected().can_pay(batch, 50.0, None) for batch in (1, 4, 5)] == [True, True, False]


def test_plans_that_guess_and_trials_stay_as_they_are() -> None:
    rows = [view("a", 10)]
    for plan in (StepPlan([2]), StepPlan([0], charged=0.1, trial=True)):
        assert planner(0.1).with_expected(plan, rows) is plan
    for mode in ("off", "on"):
        other = Planner(CostTable({(1, 1): 1.0}, {}), Acceptance(16), mode=mode)
        plan = StepPlan([0])
        assert other.with_expected(plan, rows) is plan
    assert guessing(StepPlan([0]), [view("a", 0)], 9).caps == [0]
    made = Expected().unplanned(StepPlan([0, 0, 0, 0]), [view("a", 30), view("b", None), view("c", 3), view("d", 0)])
    assert (made.caps, made.expected, made.least) == ([11, 0, 15, 15], (11, 0, 3, 0), 0.5)
    assert Expected().unplanned(plan, [view("a", 3, depth_limit=5)]).caps == [5]


def test_what_is_not_kept_is_guessed_less() -> None:
    expected, first = Expected(), Expected()
    for _ in range(300):
        assert expected.learn([5], [RowStep("a", "suffix", 5, 5, 0)]) == 0
    assert expected.rate < 0.1
    assert expected.unplanned(StepPlan([0]), [view("a", 30)]).caps == [0]
    for _ in range(1000):
        assert expected.learn([5, 0], [RowStep("a", "suffix", 5, 5, 5), RowStep("b", "suffix", 0, 0, 0)]) == 5
    assert first.rate < expected.rate < 1.0
    rate = expected.rate
    assert expected.learn([0], [RowStep("a", "suffix", 9, 9, 0)]) == 0, "what was looked up says nothing of grammars"
    assert expected.learn([2], []) == 0
    assert expected.rate == rate
