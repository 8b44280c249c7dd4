"""From runs to figures: per category and overall, for each method and temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.bench import stats
from foretoken.bench.stats import Interval, Pair
from foretoken.bench.suite import Item
from foretoken.bench.trace import Cut, Run, cut, identical
from foretoken.draft.config import MethodConfig
from foretoken.planner.observed import MeanCosts, mean_costs


@dataclass(frozen=True)
class Figures:
    """One method on one category (or all) at one temperature. Texts are counted up to their first loop."""

    category: str
    num_prompts: int
    num_tokens: int
    num_steps: int
    seconds_decode: float
    tokens_per_second: float
    speedup: Interval  # against plain decoding of the same prompts in the same run
    mean_acceptance_length: float  # 1 + accepted / steps
    acceptance_rate: float  # accepted / guessed
    conditional_acceptance_per_pos: list[float]  # of guess k + 1 where all before it were accepted
    num_identical: int  # prompts whose tokens, all of them, equal the plain ones
    share_looped: float  # of prompts whose text looped and was cut
    seconds_plain_pass: float | None  # median target pass of plain decoding
    draft_cost: float | None  # c: one guess / plain pass
    verify_cost: float | None  # v: a step's target pass / plain pass
    overhead_cost: float | None  # a step's time outside drafting and the target's pass / plain pass
    predicted_speedup: float | None  # E[tokens/step] / (v + guesses/step * c)
    predicted_speedup_with_overhead: float | None
    measured_over_predicted: float | None  # speedup / predicted_speedup
    share_outside_forwards: float | None  # of decode time, outside passes of target and draft model
    share_of_bandwidth: float | None  # target's weight bytes per pass / time of the pass / measured DRAM read


@dataclass(frozen=True)
class MethodReport:
    """One method at one temperature."""

    label: str
    config: dict[str, Any]
    exact: bool  # False: lossy, the text has another law than plain decoding's
    identical_expected: bool  # False: another text, of the same law where the rule is exact
    overall: Figures
    categories: list[Figures]


@dataclass(frozen=True)
class TemperatureReport:
    """All methods at one temperature, plain decoding first."""

    temperature: float
    methods: list[MethodReport]


@dataclass(frozen=True)
class BenchReport:
    """All results of ``run_bench``. Costs and shares are None on accelerators, where the host clock times only the
    queueing."""

    settings: dict[str, Any]
    dram_read_bytes_per_second: float | None
    temperatures: list[TemperatureReport]
    prompts: list[dict[str, Any]]  # one record per prompt, method and temperature
    peak_rss_bytes: int
    provenance: dict[str, Any]
    partial: bool = False  # interrupted: only prompts decoded by every method, with the same number of rounds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Session:
    """Settings of all runs of a report."""

    items: list[Item]
    fitting: list[int]  # items whose prompt fits the context
    temperatures: list[float]
    weight_bytes: int
    split_is_real: bool  # whether the host clock can separate the parts of a step
    dram_read: float | None
    seed: int


Runs = Mapping[tuple[float, int], Sequence[Run]]
"""(temperature, item) to one run a round."""


def assemble(
    session: Session,
    lanes: Mapping[str, tuple[MethodConfig, Runs]],
    *,
    settings: dict[str, Any],
    provenance: dict[str, Any],
    peak_rss_bytes: int,
    partial: bool = False,
) -> BenchReport:
    """The report of lanes, plain decoding the first of them."""
    plain = next(iter(lanes.values()))[1]
    temperatures, prompts = [], []
    for temperature in session.temperatures:
        reports = []
        for label, (config, runs) in lanes.items():
            kept = [index for index in session.fitting if (temperature, index) in runs]
            if not kept:
                continue
            counted = {
                index: _Prompt(session.items[index], plain[temperature, index], runs[temperature, index])
                for index in kept
            }
            names = list(dict.fromkeys(session.items[index].category for index in kept))
            figures = [
                _figures(session, name, [prompt for prompt in counted.values() if prompt.item.category == name])
                for name in names
            ]
            overall = _figures(session, "overall", list(counted.values()))
            # At temperature 0 every exact rule gives one text.
            rule = config.verifier
            one_text = rule.invariant or (rule.exact and temperature == 0)
            reports.append(MethodReport(label, config.resolved(), rule.exact, one_text, overall, figures))
            for index, prompt in counted.items():
                key = {"temperature": temperature, "method": label, "seed": session.seed + index}
                prompts.append({**key, **prompt.record()})
        if reports:
            temperatures.append(TemperatureReport(temperature, reports))
    return BenchReport(settings, session.dram_read, temperatures, prompts, peak_rss_bytes, provenance, partial)


class _Prompt:
    """One prompt decoded plainly and by a method, all rounds; times are those of the round with the median time."""

    def __init__(self, item: Item, plain_runs: Sequence[Run], runs: Sequence[Run]) -> None:
        self.item, self.plain_runs, self.runs = item, plain_runs, runs
        self.plain_cuts, self.cuts = [cut(run) for run in plain_runs], [cut(run) for run in runs]
        self.identical = identical(runs, plain_runs)
        mine, plain = _middle(self.cuts), _middle(self.plain_cuts)
        self.middle = mine
        self.pair = Pair(len(plain.token_ids), plain.seconds, len(mine.token_ids), mine.seconds)

    def record(self) -> dict[str, Any]:
        """Its record in the report."""
        mine, steps = self.middle, self.middle.steps
        return {
            "question_id": self.item.question_id,
            "category": self.item.category,
            "num_tokens": len(mine.token_ids),
            "num_steps": len(steps),
            "num_draft_tokens": sum(step.num_draft_tokens for step in steps),
            "num_accepted_tokens": sum(step.num_accepted_tokens for step in steps),
            "seconds_prefill": self.runs[0].seconds_prefill,
            "seconds_decode": mine.seconds,
            "plain_num_tokens": self.pair.plain_tokens,
            "plain_seconds_decode": self.pair.plain_seconds,
            "identical": self.identical,
            "looped": mine.looped,
        }


def _middle(cuts: Sequence[Cut]) -> Cut:
    return sorted(cuts, key=lambda one: one.seconds)[(len(cuts) - 1) // 2]


def _figures(session: Session, category: str, prompts: Sequence[_Prompt]) -> Figures:
    pairs = [prompt.pair for prompt in prompts]
    middles = [prompt.middle for prompt in prompts]
    steps = [step for one in middles for step in one.steps]
    num_tokens, seconds = sum(pair.tokens for pair in pairs), sum(pair.seconds for pair in pairs)
    accepted = sum(step.num_accepted_tokens for step in steps)
    guessed = sum(step.num_draft_tokens for step in steps)
    length = 1 + accepted / max(1, len(steps))
    speedup = stats.bootstrap(pairs, seed=session.seed)
    plain_pass = costs = outside = bandwidth = None
    if session.split_is_real:
        plain_pass, costs = _costs(prompts)
        outside = _outside([run for prompt in prompts for run in prompt.runs])
        passes = stats.median(step.seconds_target for prompt in prompts for one in prompt.cuts for step in one.steps)
        bandwidth = stats.ratio(stats.ratio(session.weight_bytes, passes), session.dram_read)
    predicted = with_overhead = None
    if costs is not None:
        per_step = guessed / max(1, len(steps))
        predicted = costs.speedup(length, per_step)
        with_overhead = costs.speedup(length, per_step, overhead=True)
    return Figures(
        category=category,
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        num_steps=len(steps),
        seconds_decode=seconds,
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        speedup=speedup,
        mean_acceptance_length=length,
        acceptance_rate=accepted / max(1, guessed),
        conditional_acceptance_per_pos=stats.conditional_rates(
            (s.num_draft_tokens, s.num_accepted_tokens) for s in steps
        ),
        num_identical=sum(prompt.identical for prompt in prompts),
        share_looped=sum(one.looped for one in middles) / max(1, len(middles)),
        seconds_plain_pass=plain_pass,
        draft_cost=costs.draft if costs is not None else None,
        verify_cost=costs.verify if costs is not None else None,
        overhead_cost=costs.overhead if costs is not None else None,
        predicted_speedup=predicted,
        predicted_speedup_with_overhead=with_overhead,
        measured_over_predicted=stats.ratio(speedup.value, predicted),
        share_outside_forwards=outside,
        share_of_bandwidth=bandwidth,
    )


def _costs(prompts: Sequence[_Prompt]) -> tuple[float | None, MeanCosts | None]:
    """The median plain pass, and costs in units of it; over all rounds' steps that count."""
    plain = [step for prompt in prompts for one in prompt.plain_cuts for step in one.steps]
    return mean_costs(plain, [step for prompt in prompts for one in prompt.cuts for step in one.steps])


def _outside(runs: Sequence[Run]) -> float | None:
    """Share of decode time that was spent outside passes of target and draft model."""
    wall = sum(sum(run.seconds_of()) for run in runs)
    inside = sum(sum(step.seconds_target for step in run.steps) + run.seconds_draft_forward for run in runs)
    return stats.ratio(wall - inside, wall)
