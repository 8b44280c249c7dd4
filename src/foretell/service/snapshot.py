"""Counters and gauges of a service."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from foretell.costs.outlook import Cell
from foretell.engine.failures import Failures
from foretell.engine.loop import Loop
from foretell.engine.recorder import MethodFigures
from foretell.engine.request.row import Row
from foretell.model.target import DiskFigures
from foretell.planner.plan import Option
from foretell.planner.planner import Planner
from foretell.service.drift import Drifts
from foretell.service.learning import LearnFigures, Learning
from foretell.theory.possible import NAN, Guesses, Possible, possible

RECORDED = (
    "num_steps", "num_rejected", "num_preemptions", "num_prompt_tokens", "num_cached_prompt_tokens",
    "num_generated_tokens", "seconds_draft", "seconds_target", "seconds_rest", "seconds_prefill",
)  # fmt: skip
"""Fields with the same name in a recorder and a snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """Counters only grow; gauges are as they stood after the last step."""

    # Gauges.
    num_running: int = 0
    num_prefilling: int = 0
    num_waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    prefix_cached_tokens: int = 0  # tokens whose KV is kept for requests to come
    is_speculating: bool = False  # whether the last step guessed
    num_speculative_tokens: float = 0.0  # guesses planned a row in the last step, mean
    # Live estimate: tokens a second now, against this engine with speculation off. None where nothing is being decoded, and
    # where plain steps are not measured (``speculation`` "on" or "off").
    speedup: float | None = None
    possible: Possible | None = None  # of these requests; None: nothing is being decoded
    outlook: tuple[Cell, ...] = ()  # what ``speculation`` "auto" would do by length of text and number of requests
    # Counters.
    num_steps: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason; "error" is one
    num_rejected: int = 0  # refused because the queue was full
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # of them found in the prefix store
    num_generated_tokens: int = 0
    seconds_draft: float = 0.0
    seconds_target: float = 0.0
    seconds_rest: float = 0.0
    seconds_prefill: float = 0.0
    methods: dict[str, MethodFigures] = field(default_factory=dict)
    drifts: dict[str, int] = field(default_factory=dict)  # falls of acceptance against its own history, by method
    recent_acceptance: dict[str, float | None] = field(default_factory=dict)  # of first guesses, last steps, by method
    drafter_failures: dict[str, int] = field(default_factory=dict)  # drafters that raised, by method
    internal_errors: dict[str, int] = field(default_factory=dict)  # of other parts, by place
    # Gauge: seconds for which it rests for that; 0: it works
    drafter_rests: dict[str, float] = field(default_factory=dict)
    learn: LearnFigures | None = None  # None: nothing learns
    disk: DiskFigures | None = None  # None: all of the target's weights are in memory


def possible_now(planner: Planner, rows: Sequence[Row]) -> Possible | None:
    """What is possible for the rows of a planner's last plan, by what it expects of their guesses and of costs; None
    without rows. Any thread may ask."""
    standing, have, batch = planner.standing, planner.speedup, len(rows)
    if not rows or have is None:
        return Possible(NAN, unknown="plain steps are not measured") if rows else None
    length, costs, factors = sum(row.length for row in rows) / batch, planner.costs, planner.corrections
    plain = costs.verify(batch, batch, length) * factors.plain
    caps = [0] * batch if standing.expected is None else standing.expected.caps
    light = standing.stands == Option.LIGHT
    methods = [planner.parts.get(row.method, row.method) if light else row.method for row in rows]
    steps = [Guesses(0, 0)] * (batch - sum(map(bool, caps)))
    for (method, cap), count in Counter(zip(methods, caps, strict=False)).items():
        if not cap:
            continue
        expected = planner.acceptance.expected(method)
        if expected is None:
            return Possible(have, unknown="how many guesses are kept was not seen yet")
        kept, nodes = [1.0, *expected[0][:cap], 0.0], list(accumulate(expected[1][:cap], initial=0.0))
        guessing = sum(other == method and bool(also) for other, also in zip(methods, caps, strict=False))
        draft = costs.draft(method, guessing, cap, length) * factors.draft[method] / plain * batch / guessing
        for depth in range(cap + 1):  # so many are kept with this chance
            beside = max(nodes[depth] - depth, 0.0)
            chance = count * (kept[depth] - kept[depth + 1])
            steps.append(Guesses(max(nodes[cap], depth + beside), depth, beside, draft, chance))

    def price(nodes: float) -> float:
        return max(1.0, costs.verify(batch, batch * (1 + nodes), length) * factors.guess / plain) if nodes else 1.0

    widest = max(nodes // each for each, nodes in costs.verify_cells if each <= batch) - 1  # that was timed
    return possible(steps, price, have, widest=widest)


def snapshot_of(
    loop: Loop,
    planner: Planner,
    *,
    kv_tokens: int,
    num_inbox: int,
    drifts: Drifts,
    failures: Failures,
    learning: Learning | None,
    longest: int,
) -> Snapshot:
    """The counters and gauges of a loop as they stand. num_inbox: requests that have not reached it. longest: tokens of a
    text."""
    recorder, prefixes, run = loop.recorder, loop.prefixes, failures.run
    return Snapshot(
        num_running=len(loop.batch.members),
        num_prefilling=len(loop.batch.arrivals),
        num_waiting=len(loop.waiting) + len(loop.scoring) + num_inbox,
        kv_used_tokens=loop.used_tokens,
        kv_capacity_tokens=kv_tokens,
        prefix_cached_tokens=0 if prefixes is None else prefixes.num_tokens,
        is_speculating=recorder.guessed,
        num_speculative_tokens=recorder.planned,
        speedup=run("figures", None, lambda: planner.speedup) if loop.batch.members else None,
        possible=run("figures", None, possible_now, planner, list(loop.batch.members)),
        outlook=tuple(run("figures", [], planner.outlook, longest, loop.limits.max_rows)),
        num_finished=dict(recorder.num_finished),
        **{name: getattr(recorder, name) for name in RECORDED},
        methods={name: sums.figures() for name, sums in list(recorder.methods.items())},
        drifts=run("figures", {}, drifts.num_drifts),
        recent_acceptance=run("figures", {}, drifts.recent_acceptance),
        drafter_failures=failures.totals(),
        internal_errors=failures.by_place(),
        drafter_rests=failures.rests(),
        disk=loop.batch.model.disk,
        learn=None if learning is None else run("figures", None, learning.figures),
    )
