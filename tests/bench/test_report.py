"""From planted runs to figures: every number can be worked out by hand."""

from collections.abc import Sequence

import pytest

from foretell.bench.report import BenchReport, Session, assemble
from foretell.bench.suite import Item
from foretell.bench.trace import DecodedRun, cut, identical
from foretell.draft.config import MethodConfig
from foretell.engine.config import speculative_config
from foretell.engine.recorder import StepTime

UNIQUE = list(range(1000))


def step(
    ended: float, *, tokens: int, guessed: int = 0, accepted: int = 0, draft: float = 0.0, target: float = 1.0
) -> StepTime:
    """A step that spent 0.1 on the rest."""
    return StepTime(ended, draft, target, 0.1, guessed, accepted, tokens)


def plain_run(num_tokens: int, ids: Sequence[int] = UNIQUE) -> DecodedRun:
    """One token a step, 1.1 seconds each (1.0 in the target)."""
    return DecodedRun(list(ids[:num_tokens]), [step(1.1 * (i + 1), tokens=1) for i in range(num_tokens)], 0.5)


def fast_run(num_steps: int, ids: Sequence[int] = UNIQUE) -> DecodedRun:
    """Four guesses a step, three accepted: 4 tokens in 2.0 seconds (0.8 drafting, 1.1 in the target)."""
    steps = [step(2.0 * (i + 1), tokens=4, guessed=4, accepted=3, draft=0.8, target=1.1) for i in range(num_steps)]
    return DecodedRun(list(ids[: 4 * num_steps]), steps, 0.5, seconds_draft_forward=0.6 * num_steps)


def report(
    plain: list[DecodedRun], fast: list[DecodedRun], config: MethodConfig | None = None, *, temperature: float = 0.0
) -> BenchReport:
    """Both lanes over prompts of two categories."""
    items = [Item(i, "ab"[i % 2], "x") for i in range(len(plain))]
    session = Session(items, list(range(len(items))), [temperature], 1000, True, 4000.0, 0)
    lanes = {
        "none": (speculative_config("none"), {(temperature, i): [run] for i, run in enumerate(plain)}),
        "fast": (config or speculative_config("ngram"), {(temperature, i): [run] for i, run in enumerate(fast)}),
    }
    return assemble(session, lanes, settings={}, provenance={}, peak_rss_bytes=1)


def test_figures_of_planted_runs() -> None:
    found = report([plain_run(8), plain_run(16)], [fast_run(2), fast_run(4)])
    none, fast = found.temperatures[0].methods
    assert none.overall.speedup.value == 1.0
    assert none.overall.tokens_per_second == pytest.approx(1 / 1.1)
    assert none.overall.share_of_bandwidth == pytest.approx(1000 / 1.0 / 4000)
    assert none.overall.share_outside_forwards == pytest.approx(0.1 / 1.1)
    assert none.overall.predicted_speedup == pytest.approx(1.0)
    overall = fast.overall
    assert overall.num_prompts == overall.num_identical == 2
    assert (overall.num_tokens, overall.num_steps) == (24, 6)
    assert overall.seconds_decode == pytest.approx(1.9 + 1 * 2.0 + 1.9 + 3 * 2.0 + 0.1 * 2)
    assert overall.mean_acceptance_length == 4.0
    assert overall.acceptance_rate == 0.75
    assert overall.conditional_acceptance_per_pos == [1.0, 1.0, 1.0, 0.0]
    assert overall.draft_cost == pytest.approx(0.2)
    assert overall.verify_cost == pytest.approx(1.1)
    assert overall.predicted_speedup == pytest.approx(4.0 / (1.1 + 4 * 0.2))
    assert overall.predicted_speedup_with_overhead == pytest.approx(4.0 * 1.1 / (1.1 + 0.8 + 0.1))
    assert overall.speedup.value == pytest.approx(24 * 1.1 / overall.seconds_decode)
    assert overall.measured_over_predicted == pytest.approx(overall.speedup.value / overall.predicted_speedup)
    assert overall.share_outside_forwards == pytest.approx(1 - (6 * 1.1 + 6 * 0.6) / 12.0)
    assert overall.share_of_bandwidth == pytest.approx(1000 / 1.1 / 4000)
    assert [figures.category for figures in fast.categories] == ["a", "b"]
    assert [figures.num_tokens for figures in fast.categories] == [8, 16]
    assert fast.identical_expected


def test_what_was_possible_of_planted_runs() -> None:
    """Plain steps take 1.1 s; those of four guesses 1.2 and .8 for guessing, and one in four of these is wrong."""
    none, fast = report([plain_run(8), plain_run(16)], [fast_run(2), fast_run(4)]).temperatures[0].methods
    assert none.possible is None
    one, have = fast.possible, fast.overall.speedup.value
    assert one is not None
    seconds = 4 / have  # of a step, in plain ones
    drafting = 0.8 * seconds / (fast.overall.seconds_decode / 6)
    passes = seconds - drafting  # of four guesses; plain ones take 1.1 / 1.2 of it
    assert one.possible == pytest.approx(5 / passes)
    three = passes * (1.1 + 0.1 * 3 / 4) / 1.2
    assert one.candidates == pytest.approx(4 / three)
    assert one.stopped == pytest.approx(4 / (three + drafting * 3 / 4))
    assert one.guesses + one.shape + one.time + one.width == pytest.approx(one.possible - have)
    assert f"you have {have:.2f}x" in one.line


def test_a_planted_difference_is_seen() -> None:
    other = [*UNIQUE[:7], 5555]
    found = report([plain_run(8), plain_run(8)], [fast_run(2), fast_run(2, other)])
    fast = found.temperatures[0].methods[1]
    assert fast.overall.num_identical == 1
    assert [record["identical"] for record in found.prompts if record["method"] == "fast"] == [True, False]
    assert not identical([plain_run(3)], [plain_run(4)])
    assert not identical([], [plain_run(4)])


@pytest.mark.parametrize(
    ("verify", "temperature", "expected"),
    [("coupled", 1.0, True), ("exact", 1.0, True), ("rejection", 1.0, False), ("rejection", 0.0, True)],
)
def test_whether_identical_tokens_are_expected(verify: str, temperature: float, expected: bool) -> None:
    config = speculative_config({"method": "draft_model", "verify": verify})
    found = report([plain_run(4)], [fast_run(1)], config, temperature=temperature)
    assert found.temperatures[0].methods[1].identical_expected is expected


def test_both_sides_are_cut_at_the_first_loop() -> None:
    ids = [*range(10), *[77] * 50]  # loops from token 11 on
    plain, fast = cut(plain_run(60, ids)), cut(fast_run(15, ids))
    assert plain.looped
    assert fast.looped
    assert plain.token_ids == fast.token_ids == [*range(10), 77]
    assert plain.seconds == pytest.approx(11 * 1.1)
    # Three tokens of the third step of four: three quarters of its time, and the step itself is not counted as whole.
    assert fast.seconds == pytest.approx((1.9 + 0.1) + 2.0 + 0.75 * 2.0)
    assert len(fast.steps) == 2
    found = report([plain_run(60, ids), plain_run(8)], [fast_run(15, ids), fast_run(2)])
    assert found.temperatures[0].methods[1].overall.share_looped == 0.5
    assert found.temperatures[0].methods[1].overall.num_tokens == 11 + 8
    # The difference behind the loop still counts as a difference.
    other = [*ids[:-1], 5]
    assert report([plain_run(60, ids)], [fast_run(15, other)]).temperatures[0].methods[1].overall.num_identical == 0


def test_the_round_with_the_median_time_counts() -> None:
    slow, middle, quick = (
        DecodedRun(UNIQUE[:1], [StepTime(s, 0.0, s, 0.0, 0, 0, 1)], 0.0) for s in (9.0, 2.0, 1.0)
    )  # fmt: skip
    session = Session([Item(0, "a", "x")], [0], [0.0], 1000, True, None, 0)
    lanes = {"none": (speculative_config("none"), {(0.0, 0): [slow, quick, middle]})}
    overall = assemble(session, lanes, settings={}, provenance={}, peak_rss_bytes=1).temperatures[0].methods[0].overall
    assert overall.seconds_decode == 2.0
    assert overall.share_of_bandwidth is None


def test_nothing_that_a_host_clock_cannot_tell_is_claimed_on_accelerators() -> None:
    session = Session([Item(0, "a", "x")], [0], [0.0], 1000, False, None, 0)
    lanes = {"none": (speculative_config("none"), {(0.0, 0): [plain_run(3)]})}
    overall = assemble(session, lanes, settings={}, provenance={}, peak_rss_bytes=1).temperatures[0].methods[0].overall
    assert overall.tokens_per_second > 0
    assert (
        overall.draft_cost is overall.verify_cost is overall.share_outside_forwards is overall.predicted_speedup is None
    )
