"""A simulation of the planner, to check that planned speculation costs no time: no model, simulated machines and texts.

    python benchmarks/planning.py [--steps 2000] [--seeds 3] [--batches 1 2 4 8 16 32] [--only WORDS] [--layered]

Two machines: "bundled" (a small model: a guess costs 0.4 passes, up to 8 nodes are free, then in proportion) and
"inflated" (a guess costs 0.02 passes; 16 nodes cost 1.5, 32 cost 2.8). The planner is given a cost table measured with
noise, starts from no knowledge of acceptance, and sees drawn acceptances and noisy times. Reported are expected tokens
over true seconds, against plain decoding and against the best constant depth in hindsight: over the whole run, and
over the first 300 steps; and the host's time for plan and observe. Last line: JSON.

--layered: methods of which a part guesses for nothing (``Planner``), by machine and second method. The best fixed
choice is then the best of plain decoding, the light part and the whole method, at the best depth of each; reported with
and without what whole steps tell of the light part (``RowStep.light``).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from foretell.costs.measure import StepSeconds, measure
from foretell.costs.table import CostTable
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.planner import Planner

DEPTH = 8
START = 300
NOISE = 0.08
AIMS = {"plain": 0.98, "best": 0.95, "start_plain": 0.98, "start_best": 0.95}


@dataclass(frozen=True)
class Machine:
    """True seconds. wrong: what the table that the planner is given says of drafting, over the truth."""

    name: str
    plain_s: float
    guess: float  # passes
    points: dict[int, float]  # nodes -> passes, in proportion beyond
    wrong: float = 1.0

    def verify(self, nodes: float) -> float:
        last = max(self.points)
        passes = np.interp(nodes, list(self.points), list(self.points.values())) * max(1.0, nodes / last)
        return float(passes) * self.plain_s

    def draft(self, counts: list[int]) -> float:
        """counts: rows that reach each depth."""
        return sum(self.guess * max(1.0, rows / 8) for rows in counts if rows) * self.plain_s

    def cost(self, caps: list[int], nodes: int | float | None = None) -> tuple[float, float]:
        counts = [sum(cap > level for cap in caps) for level in range(max(caps, default=0))]
        return self.draft(counts), self.verify(len(caps) + (sum(caps) if nodes is None else nodes))


MACHINES = [
    Machine("bundled", 0.005, 0.4, {1: 1.0, 8: 1.0}),
    Machine("inflated", 0.05, 0.02, {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.25, 16: 1.5, 32: 2.8}),
    Machine("wrong table", 0.05, 0.3, {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.25, 16: 1.5, 32: 2.8}, wrong=0.15),
]


@dataclass(frozen=True)
class Text:
    """Acceptance of row ``row``'s ``number``-th request, at a share of the run."""

    name: str
    rate: Callable[[int, int, float], float]
    length: int = 10**9  # tokens of a request, after which another takes its row
    found: float = 1.0  # P(a proposal at all)
    two_halves: tuple[float, float] | None = None


TEXTS = [
    Text("nonsense", lambda row, number, at: 0.0),
    Text("0.3", lambda row, number, at: 0.3),
    Text("0.6", lambda row, number, at: 0.6),
    Text("0.8", lambda row, number, at: 0.8),
    Text("0.8 then 0", lambda row, number, at: 0.8 if at < 0.5 else 0.0, two_halves=(0.8, 0.0)),
    Text("0 then 0.8", lambda row, number, at: 0.0 if at < 0.5 else 0.8, two_halves=(0.0, 0.8)),
    Text("half 0.85 half 0", lambda row, number, at: 0.85 * (row % 2 == 0)),
    Text("short, 0.85 or 0", lambda row, number, at: 0.85 * ((row + number) % 2 == 0), length=150),
    Text("short nonsense", lambda row, number, at: 0.0, length=150),
    Text("rarely found 0.8", lambda row, number, at: 0.8, found=0.15),
]


def table_of(machine: Machine, max_batch: int, rng: np.random.Generator) -> CostTable:
    """What ``measure`` makes of this machine, with noise."""

    def step(method: str, batch: int, depth: int) -> StepSeconds:
        draft, verify = machine.cost([depth] * batch)
        noise = np.exp(NOISE * rng.standard_normal(2))
        return StepSeconds(draft * machine.wrong * noise[0], verify * noise[1], 0.0)

    return measure(step, {"guess": DEPTH}, max_batch, time_limit_s=1e9)


def expected(rate: float, cap: int, found: float) -> float:
    return 1.0 + found * sum(rate**k for k in range(1, cap + 1))


def fixed_rate(machine: Machine, rates: list[float], depth: int, found: float) -> float:
    """Tokens a second at one constant depth."""
    batch = len(rates)
    tokens = sum(expected(rate, depth, found) for rate in rates)
    if found == 1.0 or depth == 0:
        return tokens / sum(machine.cost([depth] * batch))
    ways = np.array([1.0])
    for _ in range(batch):
        ways = np.convolve(ways, [1 - found, found])
    draft = machine.cost([depth] * batch)[0]
    return tokens / (draft + sum(p * machine.verify(batch + n * depth) for n, p in enumerate(ways)))


@dataclass
class Outcome:
    plain: float  # auto / plain
    best: float  # auto / best fixed
    start_plain: float
    start_best: float
    host_us: float
    trial_share: float


def simulate(machine: Machine, text: Text, batch: int, steps: int, seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    planner = Planner(table_of(machine, max(batch, 2), rng), Acceptance(DEPTH))
    tokens = np.zeros(batch)
    number = [0] * batch
    done = seconds = host = plain_equal = 0.0
    plain_s = machine.verify(batch)
    work = steps * batch  # tokens, where a run has two halves of equal work
    num_unread = [0] * batch
    marks: list[tuple[float, float]] = []
    step = 0
    while (done < work) if text.two_halves else (step < steps):
        rates = [text.rate(row, number[row], done / work if text.two_halves else 0.0) for row in range(batch)]
        views = [RowView(f"{row}.{number[row]}", "guess", DEPTH, 100, num_unread[row]) for row in range(batch)]
        began = time.thread_time()
        plan = planner.plan(views)
        caps = plan.caps
        host += time.thread_time() - began
        drafted = [cap if rng.random() < text.found else 0 for cap in caps]
        accepted = [
            int(np.argmin(np.append(rng.random(count) < rate, False)))
            for count, rate in zip(drafted, rates, strict=True)
        ]
        draft, verify = machine.cost(caps, sum(drafted))
        noise = np.exp(NOISE * rng.standard_normal(2))
        rows = [
            RowStep(view.request_id, "guess", cap, count, kept)
            for view, cap, count, kept in zip(views, caps, drafted, accepted, strict=True)
        ]
        began = time.thread_time()
        planner.observe(plan, StepObservation(batch, rows, draft * noise[0], verify * noise[1], 0.0))
        host += time.thread_time() - began
        got = [expected(rate, cap, text.found) for rate, cap in zip(rates, caps, strict=True)]
        done += sum(got)
        seconds += draft + verify
        plain_equal += plain_s * sum(got) / batch
        tokens += got
        for row in range(batch):
            num_unread[row] = 0 if caps[row] else num_unread[row] + 1
            if tokens[row] >= text.length:
                planner.forget(views[row].request_id)
                tokens[row], number[row], num_unread[row] = 0.0, number[row] + 1, 0
        step += 1
        if step == START or (not marks and text.two_halves and done >= work / 2):  # the start is over where it changes
            marks.append((done, seconds))
    at_start = marks[0] if marks else (done, seconds)

    def best(first: bool) -> float:
        """The best fixed depth's tokens a second, over the start or the whole."""
        choices = []
        for depth in range(DEPTH + 1):
            if text.two_halves:
                halves = [fixed_rate(machine, [rate] * batch, depth, text.found) for rate in text.two_halves]
                choices.append(halves[0] if first else 2.0 / (1 / halves[0] + 1 / halves[1]))
            elif text.length < 10**6:  # rows spend in each kind of request the time that its tokens take: simulated
                choices.append(_churn(machine, text, batch, depth, START if first else steps))
            else:
                choices.append(fixed_rate(machine, [text.rate(row, 0, 0.0) for row in range(batch)], depth, text.found))
        return max(choices)

    plain_rate = batch / plain_s
    rate, start = done / seconds, at_start[0] / at_start[1]
    return Outcome(
        rate / plain_rate, rate / best(False), start / plain_rate, start / best(True), host / step * 1e6,
        planner.state["trial_seconds"] / seconds,
    )  # fmt: skip


def _churn(machine: Machine, text: Text, batch: int, depth: int, steps: int) -> float:
    tokens, number, done = [0.0] * batch, [0] * batch, 0.0
    cost = sum(machine.cost([depth] * batch))
    for _ in range(steps):
        for row in range(batch):
            got = expected(text.rate(row, number[row], 0.0), depth, text.found)
            done += got
            tokens[row] += got
            if tokens[row] >= text.length:
                tokens[row], number[row] = 0.0, number[row] + 1
    return done / (steps * cost)


@dataclass(frozen=True)
class Mixed:
    """A method with a light part: in a share of the steps that finds a guess, strong or weak; the second one stands in for
    weak ones where the whole method guesses."""

    name: str
    found: float
    strong: float  # acceptance of the light part's strong guesses (three of four) ...
    weak: float  # ... and of the others
    second: tuple[float, float]  # of the second method, in each half of the run
    seconds_tokens: int = 4


MIXED = [
    Mixed("light pays, second not", 0.5, 0.85, 0.3, (0.5, 0.5)),
    Mixed("both pay", 0.3, 0.8, 0.3, (0.85, 0.85)),
    Mixed("second pays alone", 0.1, 0.4, 0.1, (0.85, 0.85)),
    Mixed("neither pays", 0.3, 0.1, 0.0, (0.1, 0.1)),
    Mixed("second falls", 0.5, 0.8, 0.3, (0.85, 0.0)),
    Mixed("second rises", 0.5, 0.8, 0.3, (0.0, 0.85)),
]


class MixedRun:
    """Steps of one row on a machine: true expected tokens and seconds, and what a planner is told."""

    def __init__(self, machine: Machine, text: Mixed, seed: int) -> None:
        self.machine, self.text, self.rng = machine, text, np.random.default_rng(seed)

    def expected(self, kind: str, cap: int, half: int) -> tuple[float, float]:
        """Tokens and seconds of a step of "light" or "whole"."""
        text, machine = self.text, self.machine
        short = min(cap, text.seconds_tokens)
        strong, weak = 0.75 * text.found, 0.25 * text.found
        parts = [(strong, text.strong, cap, False)]
        if kind == "light":
            parts += [(weak, text.weak, cap, False), (1 - text.found, 0.0, 0, False)]
        else:
            parts.append((1 - strong, text.second[half], short, True))
        tokens = seconds = 0.0
        for share, rate, depth, drafts in parts:
            tokens += share * expected(rate, depth, 1.0)
            seconds += share * (machine.verify(1 + depth) + machine.draft([1] * depth) * drafts)
        return tokens, seconds

    def best(self) -> float:
        """Tokens a second of the best fixed choice over both halves of equal work."""
        rates = []
        for kind in ("light", "whole"):
            for cap in range(DEPTH + 1):
                each = [tokens / seconds for tokens, seconds in (self.expected(kind, cap, half) for half in (0, 1))]
                rates.append(2.0 / (1 / each[0] + 1 / each[1]))
        return max(rates)

    def auto(self, steps: int, *, tells: bool) -> float:
        """Tokens a second of the planner."""
        machine, text, rng = self.machine, self.text, self.rng

        def step(method: str, batch: int, depth: int) -> StepSeconds:
            draft = 0.0 if method == "light" else machine.draft([batch] * min(depth, text.seconds_tokens))
            noise = np.exp(NOISE * rng.standard_normal(2))
            return StepSeconds(draft * noise[0], machine.verify(batch * (1 + depth)) * noise[1], 0.0)

        costs = measure(step, {"whole": DEPTH, "light": DEPTH}, 2, time_limit_s=1e9, weightless=("light",))
        planner = Planner(costs, Acceptance(DEPTH), {"whole": "light"})
        done = seconds = 0.0
        work = 2.0 * steps
        while done < work:
            half = int(done >= work / 2)
            plan = planner.plan([RowView("row", "whole", DEPTH, 100)])
            (cap,) = plan.caps
            paid = cap if plan.paid is None else plan.paid[0]
            kind = "whole" if paid else "light"
            got, took = self.expected(kind, cap, half)
            done, seconds = done + got, seconds + took
            finds = rng.random() < text.found
            strong = finds and rng.random() < 0.75
            drafts = cap > 0 and kind == "whole" and not strong
            depth = min(cap, text.seconds_tokens) if drafts else cap if finds else 0
            rate = text.second[half] if drafts else text.strong if strong else text.weak
            kept = int(np.argmin(np.append(rng.random(depth) < rate, False)))
            light = (cap, depth, kept) if finds and not drafts else (cap, 0, 0)
            if finds and drafts:  # what it would have kept, as far as the tokens that came reach
                would = int(np.argmin(np.append(rng.random(cap) < text.weak, False)))
                light = (cap, cap, would) if would <= kept else (kept + 1,) * 3
            noise = np.exp(NOISE * rng.standard_normal(2))
            row = RowStep("row", "whole", cap, depth, kept, light=light if tells and cap else None)
            draft = machine.draft([1] * depth) * noise[0] if drafts else 0.0
            planner.observe(plan, StepObservation(1, [row], draft, machine.verify(1 + depth) * noise[1], 0.0))
        return done / seconds


def layered(steps: int, seeds: int, only: str) -> None:
    """Print what the layered planner attains."""
    print("machine      text                     | /plain  /best | told: /plain  /best")
    records: list[dict[str, float | str]] = []
    for machine in (replace(MACHINES[1], name=f"guess {guess}", guess=guess) for guess in (0.05, 0.2, 0.5)):
        for text in MIXED:
            if only not in f"{machine.name}/{text.name}":
                continue
            plain, best = 1 / machine.verify(1), MixedRun(machine, text, 0).best()
            rates = {
                tells: statistics.fmean(MixedRun(machine, text, seed).auto(steps, tells=tells) for seed in range(seeds))
                for tells in (False, True)
            }
            silent, told = rates[False], rates[True]
            print(
                f"{machine.name:12} {text.name:24} | {silent / plain:6.3f} {silent / best:6.3f} |"
                f" {told / plain:12.3f} {told / best:6.3f}", flush=True,
            )  # fmt: skip
            records.append({"machine": machine.name, "text": text.name, "silent": silent / best, "told": told / best,
                            "silent_plain": silent / plain, "told_plain": told / plain})  # fmt: skip
    means = {name: statistics.fmean(float(one[name]) for one in records) for name in ("silent", "told")}
    least = {
        name: min(float(one[name]) for one in records) for name in ("silent", "told", "silent_plain", "told_plain")
    }
    print(json.dumps({"mean_of_best": means, "least": least, "runs": len(records)}))


def below(run: dict[str, float | int | str]) -> bool:
    """Whether a run misses the aims: 0.98 of plain, 0.95 of the best fixed depth."""
    return any(float(run[name]) < aim for name, aim in AIMS.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--only", default="", help="runs whose machine or text holds this")
    parser.add_argument("--layered", action="store_true", help="methods with a light part instead")
    args = parser.parse_args()
    if args.layered:
        layered(args.steps, args.seeds, args.only)
        return
    print("machine      text               batch | /plain  /best | first 300: /plain  /best | host us  trials %")
    worst: dict[str, float] = {}
    records = []
    for machine in MACHINES:
        for text in TEXTS:
            if args.only not in f"{machine.name}/{text.name}":
                continue
            for batch in args.batches:
                outcomes = [simulate(machine, text, batch, args.steps, seed) for seed in range(args.seeds)]
                means = {
                    name: statistics.fmean(getattr(one, name) for one in outcomes) for name in Outcome.__annotations__
                }
                print(
                    f"{machine.name:12} {text.name:18} {batch:5} | {means['plain']:6.3f} {means['best']:6.3f} |"
                    f" {means['start_plain']:17.3f} {means['start_best']:6.3f} | {means['host_us']:7.1f}"
                    f" {100 * means['trial_share']:9.2f}{'  <' if below(means) else ''}",
                    flush=True,
                )
                records.append({"machine": machine.name, "text": text.name, "batch": batch, **means})
                for name in AIMS:
                    worst[name] = min(worst.get(name, 9.0), means[name])
    print(json.dumps({"worst": worst, "below": [one for one in records if below(one)], "runs": len(records)}))


if __name__ == "__main__":
    main()
