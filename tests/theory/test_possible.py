"""What was possible on a run's steps: each level against a run in which that part is as good as the level says."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.possible import told

from foretell.bench.run import measure
from foretell.bench.trace import DecodedRun
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent
from foretell.engine.recorder import StepTime
from foretell.theory.possible import Guesses, Possible, of_run, possible

PLAIN, REST = 1.25, 0.25
"""Seconds of a plain step, and of it outside of the pass."""


def target(nodes: int) -> float:
    """Of a pass over the root and so many guesses: free up to five, then dear."""
    return 1.0 + 0.01 * nodes + 0.3 * max(0, nodes - 5)


def timed(nodes: int, kept: int, beside: int = 0, *, draft: float = 0.1) -> StepTime:
    """A step as the table has it; draft: seconds of each guess."""
    return StepTime(0.0, draft * nodes, target(nodes), REST, nodes, kept, kept + 1, num_beside_tokens=beside)


def speed(steps: Sequence[StepTime]) -> float:
    """Over plain decoding, by the steps' clock."""
    return PLAIN * sum(step.num_accepted_tokens + 1 for step in steps) / sum(step.seconds for step in steps)


def found(steps: Sequence[StepTime], split: bool = True) -> Possible:
    plain = [StepTime(0.0, 0.0, 1.0, REST, 0, 0, 1)] * 3
    tokens = sum(step.num_accepted_tokens + 1 for step in steps)
    return of_run(plain, steps, speed(steps), tokens=tokens, seconds=sum(step.seconds for step in steps), split=split)


def steps_of(seed: int) -> list[StepTime]:
    """Proposals of a simulated drafter, some of them trees: all sizes were timed often enough to be known."""
    rng = random.Random(seed)
    steps = [timed(nodes, min(nodes, 2)) for nodes in range(9) for _ in range(3)]
    for _ in range(200):
        nodes = rng.choice((0, 2, 4, 8))
        kept = rng.randint(0, nodes // 2)
        steps.append(timed(nodes, kept, rng.randint(0, nodes // 2 - kept) if nodes else 0))
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_each_level_is_the_speed_of_a_run_with_that_part_perfect(seed: int) -> None:
    steps = steps_of(seed)
    one = found(steps)
    assert one.have == pytest.approx(speed(steps))
    short = [timed(s.num_accepted_tokens + s.num_beside_tokens, s.num_accepted_tokens) for s in steps]
    assert one.stopped == pytest.approx(speed(short))
    free = [replace(step, seconds_draft=0.0) for step in short]
    path = [timed(step.num_accepted_tokens, step.num_accepted_tokens, draft=0.0) for step in steps]
    assert one.candidates == pytest.approx(speed(path))
    assert one.possible == pytest.approx(max(speed([timed(n, n, draft=0.0)]) for n in range(9)))
    assert one.possible == pytest.approx(speed([timed(5, 5, draft=0.0)])), "wider passes are dear"
    assert one.guesses == pytest.approx(one.possible - one.candidates)
    assert one.shape == pytest.approx(speed(path) - speed(free))
    assert one.time + one.width == pytest.approx(speed(free) - one.have)
    # Of what stopping would save, the drafter's share and that of passes are as their seconds.
    late, wide = (sum(getattr(a, part) - getattr(b, part) for a, b in zip(steps, short, strict=True))
                  for part in ("seconds_draft", "seconds_target"))  # fmt: skip
    assert one.width == pytest.approx((one.stopped - one.have) * wide / (late + wide))
    assert min(one.guesses, one.shape, one.time, one.width) >= 0.0
    assert one.guesses + one.shape + one.time + one.width == pytest.approx(one.possible - one.have)


def test_a_part_that_is_perfect_costs_nothing() -> None:
    perfect = found([timed(5, 5, draft=0.0)] * 9)
    assert perfect.line == (
        f"possible here {perfect.have:.2f}x, you have {perfect.have:.2f}x: the drafter's guesses cost 0.00, "
        "its shape 0.00, its time 0.00, the width of passes 0.00"
    )
    slow = found([timed(5, 5)] * 9)
    assert (slow.guesses, slow.shape, slow.width) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    assert slow.possible == pytest.approx(perfect.have)
    wrong = found([timed(5, 0, draft=0.0)] * 9)
    assert (wrong.candidates, wrong.time) == pytest.approx((1.0, 0.0), abs=1e-9)
    assert wrong.width == pytest.approx(1.0 - wrong.have)


def test_time_beside_the_steps_stays_in_every_level() -> None:
    """The loop's own, which plain decoding has too, and slow steps: prices are of the machine as it was."""
    steps = steps_of(1)
    tokens, seconds = sum(s.num_tokens for s in steps), sum(s.seconds for s in steps)
    plain = [StepTime(0.0, 0.0, 1.0, REST, 0, 0, 1)] * 3
    drafting = sum(step.seconds_draft for step in steps)
    busy = drafting + 1.3 * (seconds - drafting)
    one = of_run(plain, steps, 1.3 * PLAIN * tokens / busy, tokens=tokens, seconds=busy, split=True)
    assert one.possible == pytest.approx(found(steps).possible)
    assert one.candidates == pytest.approx(found(steps).candidates)
    slow = of_run(plain, steps, PLAIN * tokens / busy, tokens=tokens, seconds=busy, split=True)
    assert slow.possible == pytest.approx(found(steps).possible / 1.3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (found([timed(4, 2)] * 9, split=False), "the clock of this device"),
        (found([timed(0, 0)] * 9), "nothing was guessed"),
        (found([timed(0, 0)] * 9 + [timed(4, 4)]), "too few steps guessed"),
        (of_run([], [timed(4, 2)], 2.0, tokens=3, seconds=1.0, split=True), "no steps were timed"),
        (of_run([timed(0, 0)], [], 2.0, tokens=3, seconds=1.0, split=True), "no steps were timed"),
        (of_run([timed(0, 0)], [timed(4, 2)], math.nan, tokens=3, seconds=1.0, split=True), "no steps were timed"),
        (possible([Guesses(4, 2)], lambda _: 1.0, 9.0), "does not explain"),
        (possible([Guesses(4, 2, draft=9.0)], lambda _: 1.0, 2.0), "does not explain"),
        (possible([Guesses(4, 2)], lambda _: 1.0, math.nan), "plain decoding was not measured"),
        (possible([], lambda _: 1.0, 2.0, widest=4), "too few steps guessed"),
    ],
)
def test_what_is_not_known_is_said_without_a_number(given: Possible, said: str) -> None:
    assert said in given.unknown
    assert given.line.startswith(f"possible here: not known, {given.unknown}")
    assert all(math.isnan(figure) for figure in (given.possible, given.candidates, given.guesses, given.width))
    assert "nan" not in given.line


def by_table(run: DecodedRun) -> list[StepTime]:
    """A run's steps with the clock of the table."""
    return [
        replace(
            timed(step.num_draft_tokens, step.num_accepted_tokens, step.num_beside_tokens), num_tokens=step.num_tokens
        )
        for step in run.steps
    ]


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_the_bundled_pair_told_when_to_stop_is_as_fast_as_foretold(method: str) -> None:
    prompt, params = [5, 6, 7] * 6, SamplingParams(seed=1, max_new_tokens=60, ignore_eos=True)
    engine = Engine.load("bundled", speculative={"method": method, "num_speculative_tokens": 5}, speculation="on")
    run = measure(engine, prompt, params)
    steps = by_table(run)[:-1]  # the end cuts the last one
    kept = [step.num_accepted_tokens for step in run.steps]
    assert 0 < sum(kept) < sum(step.num_draft_tokens for step in run.steps)

    stopped = measure(told(engine, kept), prompt, params)
    assert stopped.token_ids == run.token_ids
    assert [step.num_draft_tokens for step in stopped.steps[:-1]] == kept[:-1], "no guess was wrong"
    assert found(steps).stopped == pytest.approx(speed(by_table(stopped)[:-1]))

    # A drafter that is always right, as the target is of itself, is as fast as it is possible where it costs nothing.
    perfect = engine.with_method({"method": "draft_model", "model": "bundled", "num_speculative_tokens": 5})
    right = [replace(step, seconds_draft=0.0) for step in by_table(measure(perfect, prompt, params))]
    assert all(step.num_accepted_tokens == 5 for step in right[:-1])
    assert found(steps).possible == pytest.approx(speed(right[:-1]))


def test_guesses_beside_the_kept_path_are_counted() -> None:
    engine = Engine.load(
        "bundled", speculative={"method": "draft_model", "num_speculative_tokens": 3, "shape": "static/branching=3x2x1"}
    )
    expected: list[int] = []

    def see(event: StepEvent) -> None:
        parent, deep = event.commit.tree.parent[0].tolist(), {0: 0}
        for node, above in enumerate(parent[1:], 1):
            if above >= 0:
                deep[node] = deep[above] + 1
        kept = event.verdict.counts[0] - 1
        expected.append(sum(0 < depth <= kept for depth in deep.values()) - kept)

    engine.observers.append(see)
    run = measure(engine, [5, 6, 7] * 6, SamplingParams(seed=1, max_new_tokens=40, ignore_eos=True))
    assert [step.num_beside_tokens for step in run.steps] == expected
    assert max(expected) > 2
    assert found(by_table(run)).shape > 0.0
