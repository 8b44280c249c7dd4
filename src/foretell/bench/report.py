"""From runs to figures: per category and overall, for each method and temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.bench import stats
from foretell.bench.quality import Quality, quality
from foretell.bench.stats import Interval, PairedRuns
from foretell.bench.suite import Item
from foretell.bench.trace import Cut, DecodedRun, cut, identical
from foretell.theory.possible import Possible, of_run
from foretell.theory.run_costs import MeanCosts, mean_costs

if TYPE_CHECKING:
    from foretell.draft.config import MethodConfig


@dataclass(frozen=True)
class Figures:
    """One method on one category (or all) at one temperature. Texts are counted up to their first loop. A message of a
    question with several turns is a prompt of its own; intervals draw whole questions."""

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
    num_questions: int = 0  # whose messages the prompts are, with their texts independent; 0: not told (older reports)

    @property
    def num_independent(self) -> int:
        """Of what intervals are: messages of one question are one."""
        return self.num_questions or self.num_prompts


@dataclass(frozen=True)
class Macro:
    """Means over tasks, each counting alike, whatever its length; ``overall`` counts tokens."""

    num_tasks: int
    tokens_per_second: float
    speedup: Interval
    mean_acceptance_length: float


@dataclass(frozen=True)
class MethodReport:
    """One method at one temperature."""

    label: str
    config: dict[str, Any]
    exact: bool  # False: lossy, the text has another distribution than plain decoding's
    identical_expected: bool  # False: another text, of the same distribution where the rule is exact
    overall: Figures
    macro: Macro
    categories: list[Figures]  # by task: Spec-Bench's mt_bench is one, elsewhere a task is a category
    subcategories: list[Figures]  # of tasks with several categories
    quality: list[Quality]  # where answers were judged
    possible: Possible | None = None  # None: of plain decoding, and of older reports


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
    questions: list[int] | None = None  # of which question an item is a message; None: each of its own
    right: Mapping[tuple[str, float, int], bool] = field(default_factory=dict)  # (method, temperature, item) judged


Runs = Mapping[tuple[float, int], Sequence[DecodedRun]]
"""(temperature, item) to one run a round."""


def assemble(
    session: Session,
    lanes: Mapping[str, tuple["MethodConfig", Runs]],
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
            asked = session.questions or range(len(session.items))
            of = {index: asked[index] for index in kept}
            tasks = _parts({index: session.items[index].group for index in kept})
            parts = _parts({index: session.items[index].category for index in kept})
            finer = {name: chosen for name, chosen in parts.items() if name not in tasks}

            def figures(name: str, chosen: Sequence[int]) -> Figures:
                return _figures(session, name, [counted[i] for i in chosen], [of[i] for i in chosen])  # noqa: B023

            overall = figures("overall", kept)
            by_task = [figures(name, chosen) for name, chosen in tasks.items()]
            macro = Macro(
                len(tasks),
                sum(one.tokens_per_second for one in by_task) / len(by_task),
                stats.macro(
                    [_pairs([counted[i] for i in c], [of[i] for i in c]) for c in tasks.values()], seed=session.seed
                ),
                sum(one.mean_acceptance_length for one in by_task) / len(by_task),
            )
            judged = _judged(session, label, temperature, kept)
            theirs = _judged(session, next(iter(lanes)), temperature, kept)
            # At temperature 0 every exact rule gives one text.
            rule = config.verifier
            one_text = rule.invariant or (rule.exact and temperature == 0)
            reports.append(
                MethodReport(
                    label, config.resolved(), rule.exact, one_text, overall, macro, by_task,
                    [figures(name, chosen) for name, chosen in finer.items()],
                    _quality(session, kept, judged, theirs),
                    _possible(session, list(counted.values()), overall) if config.guesses else None,
                )
            )  # fmt: skip
            for index, prompt in counted.items():
                key = {"temperature": temperature, "method": label, "seed": session.seed + index}
                prompts.append({**key, **prompt.record(), "right": judged.get(index)})
        if reports:
            temperatures.append(TemperatureReport(temperature, reports))
    return BenchReport(settings, session.dram_read, temperatures, prompts, peak_rss_bytes, provenance, partial)


def _parts(names: Mapping[int, str]) -> dict[str, list[int]]:
    """Items by name, in the order of their first."""
    parts: dict[str, list[int]] = {}
    for index, name in names.items():
        parts.setdefault(name, []).append(index)
    return parts


def _judged(session: Session, label: str, temperature: float, kept: Sequence[int]) -> dict[int, bool]:
    keys = {index: (label, temperature, index) for index in kept}
    return {index: session.right[key] for index, key in keys.items() if key in session.right}


def _quality(
    session: Session, kept: Sequence[int], judged: Mapping[int, bool], theirs: Mapping[int, bool]
) -> list[Quality]:
    """Overall and by task, and where questions have levels by these."""
    found = quality({index: session.items[index].group for index in kept}, judged, theirs)
    levels = {index: f"level {session.items[index].level}" for index in kept if session.items[index].level}
    by_level = quality(dict(sorted(levels.items(), key=lambda pair: pair[1])), judged, theirs)
    return found + [part for part in by_level if part.category != "overall"]


class _Prompt:
    """One prompt decoded plainly and by a method, all rounds; times are those of the round with the median time."""

    def __init__(self, item: Item, plain_runs: Sequence[DecodedRun], runs: Sequence[DecodedRun]) -> None:
        self.item, self.plain_runs, self.runs = item, plain_runs, runs
        self.plain_cuts, self.cuts = [cut(run) for run in plain_runs], [cut(run) for run in runs]
        self.identical = identical(runs, plain_runs)
        mine, plain = _middle(self.cuts), _middle(self.plain_cuts)
        self.middle = mine
        self.pair = PairedRuns(len(plain.token_ids), plain.seconds, len(mine.token_ids), mine.seconds)

    def record(self) -> dict[str, Any]:
        """Its record in the report."""
        mine, steps = self.middle, self.middle.steps
        return {
            "question_id": self.item.question_id,
            "category": self.item.category,
            "turn": self.item.turn,
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


def _pairs(prompts: Sequence[_Prompt], questions: Sequence[int]) -> list[PairedRuns]:
    """One pair a question: its messages summed, since the answer to a later one depends on those before."""
    sums: dict[int, PairedRuns] = {}
    for prompt, question in zip(prompts, questions, strict=True):
        sums[question] = sums[question] + prompt.pair if question in sums else prompt.pair
    return list(sums.values())


def _figures(session: Session, category: str, prompts: Sequence[_Prompt], questions: Sequence[int]) -> Figures:
    pairs = _pairs(prompts, questions)
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
        num_questions=len(pairs),
    )


def _costs(prompts: Sequence[_Prompt]) -> tuple[float | None, MeanCosts | None]:
    """The median plain pass, and costs in units of it; over all rounds' steps that count."""
    plain = [step for prompt in prompts for one in prompt.plain_cuts for step in one.steps]
    return mean_costs(plain, [step for prompt in prompts for one in prompt.cuts for step in one.steps])


def _possible(session: Session, prompts: Sequence[_Prompt], overall: Figures) -> Possible:
    """Of the steps whose times count, and plain ones of all rounds."""
    plain = [step for prompt in prompts for one in prompt.plain_cuts for step in one.steps]
    steps = [step for prompt in prompts for step in prompt.middle.steps]
    tokens, seconds = overall.num_tokens, overall.seconds_decode
    return of_run(plain, steps, overall.speedup.value, tokens=tokens, seconds=seconds, split=session.split_is_real)


def _outside(runs: Sequence[DecodedRun]) -> float | None:
    """Share of decode time that was spent outside passes of target and draft model."""
    wall = sum(sum(run.seconds_of()) for run in runs)
    inside = sum(sum(step.seconds_target for step in run.steps) + run.seconds_draft_forward for run in runs)
    return stats.ratio(wall - inside, wall)
