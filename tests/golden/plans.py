"""Writes ``plans.json``: what planners decide in 700 steps on each of 24 made-up machines. ``python -m tests.golden.plans
--overwrite``

Run it only where decisions are meant to change, and say why in the commit. A machine has rows whose guesses are kept at
rates of their own, a table of costs that its planner is told, and true costs. A step is written as the depths of its rows,
a digit each, and after a slash those with guesses that cost time, where they are others; ``*n`` stands for n equal steps.
Deciding is charged no time here, so that a run depends on nothing but its seed.
"""

import argparse
import json
import math
import random
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from foretell.costs.table import CostTable
from foretell.planner import decisions
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowStep, RowView, StepObservation
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner

PATH = Path(__file__).with_name("plans.json")
STEPS, DEPTH = 700, 6
COLD = (
    1.35  # of a pass whose weights another model's have displaced from a cache: that of a drafter's step, and two more
)


@dataclass(frozen=True)
class Light:
    """A part of the method that guesses for nothing, where it finds something."""

    found: float
    kept: float  # rate at which its guesses are kept
    tells: bool = True  # whether whole steps say what it would have done ...
    by_light: bool = False  # ... and whether the whole method's guess is its own


@dataclass(frozen=True)
class Machine:
    """Rows and costs: a plain step of one row takes 1 s."""

    name: str
    guess: float  # seconds that a row's guess takes to draft
    rates: tuple[float, ...]  # at which the guesses of each row are kept ...
    then: tuple[float, ...] = ()  # ... and in the second half
    slope: float = 0.02  # seconds that a node adds to a pass
    told: float = 1.0  # what the table says of drafting, over the truth
    found: float = 1.0  # P(a proposal at all)
    nodes: int = 1  # of a proposal, at each depth
    length: int = 10**9  # tokens of a request, after which another takes its row
    lag: float = 0.0  # seconds for a token that a drafter has not read
    mode: str = "auto"
    light: Light | None = None
    heavy: bool = False  # whether drafting displaces the target's weights
    room: bool = False  # whether the rows' room changes
    arrives: bool = False  # whether rows join at times
    always: bool = False  # whether all rows ask to guess, in a part of the run
    new_table: bool = False  # whether costs are measured anew in the middle
    plain_row: bool = False  # whether the last row's method has no light part


MACHINES = [
    Machine("a good drafter", 0.1, (0.9,)),
    Machine("nonsense", 0.1, (0.0,)),
    Machine("it hardly pays", 0.3, (0.55,)),
    Machine("too dear at any acceptance", 4.0, (0.9,)),
    Machine("it falls", 0.1, (0.85,), (0.0,)),
    Machine("it rises", 0.2, (0.0,), (0.9,)),
    Machine("a table that flatters", 0.6, (0.3,), told=0.04),
    Machine("a table that is too dark, and another", 0.05, (0.8,), told=6.0, new_table=True),
    Machine("trees that are rarely found", 0.02, (0.8,), found=0.2, nodes=2),
    Machine("drafters that lag", 0.1, (0.4,), (0.7,), lag=0.05),
    Machine("a drafter that displaces weights", 0.4, (0.8,), (0.42,), heavy=True),
    Machine("short requests, greedy and drawn", 0.3, (0.9,), length=50),
    Machine("two rows", 0.1, (0.9, 0.1)),
    Machine("half of eight", 0.1, (0.85, 0.0) * 4),
    Machine("eight of nonsense", 0.2, (0.0,) * 8, slope=0.05),
    Machine("sixteen, dear nodes", 0.1, tuple(row / 16 for row in range(16)), slope=0.1),
    Machine("four with short requests", 0.2, (0.9, 0.1, 0.7, 0.4), length=60, room=True),
    Machine("rows that join", 0.1, (0.8, 0.6, 0.3), (0.2, 0.9, 0.6), arrives=True),
    Machine("always, for a while", 0.5, (0.5, 0.3), always=True),
    Machine("guessing in every step", 0.1, (0.6, 0.2), mode="on", room=True),
    Machine("a light part beside a dear method", 0.3, (0.55,), light=Light(0.3, 0.6, tells=False)),
    Machine("neither part pays, and it displaces weights", 0.5, (0.1,), light=Light(0.3, 0.05), heavy=True),
    Machine("a second method that falls", 0.1, (0.85,), (0.0,), light=Light(0.5, 0.8, by_light=True), heavy=True),
    Machine("four rows with light parts but one", 0.15, (0.8, 0.3, 0.6, 0.5), light=Light(0.4, 0.8, by_light=True),
            length=120, room=True, plain_row=True),
]  # fmt: skip


def table(machine: Machine, told: float) -> CostTable:
    """Costs of up to 16 rows; drafting costs ``told`` times the truth. A light part's guess costs next to nothing."""
    batches, depths = (1, 2, 4, 8, 16), (1, 2, 4, 6)
    verify = {(b, b * (1 + d)): 1.0 + machine.slope * (b * (1 + d) - 1) for b in batches for d in (0, *depths)}
    draft = {"whole": {(b, d): machine.guess * told * d * (1.0 + 0.1 * b) for b in batches for d in depths}}
    if machine.light:
        draft |= {"light": {(b, d): 0.001 for b in batches for d in depths}, "alone": draft["whole"]}
    return CostTable(verify, draft, dict.fromkeys(draft, machine.lag) | {"light": 0.0})


def planner_of(machine: Machine) -> Planner:
    """As an engine or a service makes it."""
    costs = table(machine, machine.told)
    if machine.light:
        return Planner(costs, Acceptance(DEPTH), {"whole": "light"})
    return Planner(costs, Acceptance(DEPTH), mode=machine.mode)


@dataclass
class Run:
    """700 steps of a machine."""

    machine: Machine
    planner: Planner = field(init=False)
    plans: list[str] = field(default_factory=list)
    seconds: float = 0.0
    plain_seconds: float = 0.0  # what plain decoding would have taken for the same tokens
    plain_step: float = 0.0

    def __post_init__(self) -> None:
        self.planner = planner_of(self.machine)
        self.rng = random.Random(self.machine.name)
        self.true = table(self.machine, 1.0)
        self.number = [0] * len(self.machine.rates)
        self.tokens = [0] * len(self.machine.rates)
        self.unread = [0] * len(self.machine.rates)
        self.since_heavy = 99
        self.before: list[str] = []

    def steps(self) -> "Run":
        """All steps."""
        for step in range(STEPS):
            if self.machine.new_table and step == STEPS // 2:
                self.planner.use(table(self.machine, 1.0))
            self._step(step)
        self.planner._flush()
        return self

    def _step(self, step: int) -> None:
        machine, rng = self.machine, self.rng
        batch = len(machine.rates)
        arriving = 0
        if machine.arrives:
            batch, arriving = 1 + step // 150 % batch, int(step % 150 > 140)
        room = int(rng.random() * 9) if machine.room else 99
        always = machine.always and 200 <= step < 260
        views = [
            RowView(f"{row}.{self.number[row]}", self._method(row), DEPTH, room if row == 0 else 99, self.unread[row],
                    always, 3 * (self.number[row] % 2))
            for row in range(batch)
        ]  # fmt: skip
        plan = self._decide(views, arriving)
        caps, paid = plan.caps, plan.caps if plan.paid is None else plan.paid
        rates = machine.then if machine.then and step >= STEPS // 2 else machine.rates
        rows, drafting = [], []
        for row, view in enumerate(views):
            made, drafts = self._row(view, caps[row], paid[row], rates[row])
            rows.append(made)
            drafting.append(made.drafted if drafts else 0)
        draft = self.true.draft("whole", sum(depth > 0 for depth in drafting), max(drafting))
        if any(drafting):
            draft += machine.lag * max(unread for unread, depth in zip(self.unread, drafting, strict=False) if depth)
        self.since_heavy = 0 if machine.heavy and any(drafting) else self.since_heavy + 1
        verify = self.true.verify(batch, batch + sum(row.num_nodes for row in rows))
        verify *= COLD if self.since_heavy < 3 else 1.0
        noise = [0.92 + 0.16 * rng.random() for _ in range(2)]
        times = (draft * noise[0], verify * noise[1] * 0.9, verify * noise[1] * 0.1)
        self.planner.observe(plan, StepObservation(batch, rows if any(caps) else (), *times))
        self.seconds += draft + verify
        self.plain_step = self.true.verify(batch, batch)
        for row, made in enumerate(rows):
            self.plain_seconds += (1 + made.accepted) * self.plain_step / batch
            self.unread[row] = 0 if caps[row] else self.unread[row] + 1
            self.tokens[row] += 1 + made.accepted
            if self.tokens[row] >= machine.length:
                self.planner.forget(made.request_id)
                self.before = []
                self.tokens[row], self.number[row], self.unread[row] = 0, self.number[row] + 1, 0
        digits = "".join(map(str, caps))
        self.plans.append(digits if paid == caps else f"{digits}/{''.join(map(str, paid))}")

    def _method(self, row: int) -> str:
        return "alone" if self.machine.plain_row and row == len(self.machine.rates) - 1 else "whole"

    def _decide(self, views: list[RowView], arriving: int) -> StepPlan:
        """As the loop asks: the cheapest question first."""
        names = [view.request_id for view in views]
        same, self.before = names == self.before and not arriving, names
        plan = None
        if same:
            plan = self.planner.again(views[0].depth_limit, lagging=views[0].num_unread > 2)
        return self.planner.plan(views, arriving) if plan is None else plan

    def _row(self, view: RowView, cap: int, paid: int, rate: float) -> tuple[RowStep, bool]:
        """What a row guesses and keeps, and whether that was drafted at a cost."""
        machine, rng, light = self.machine, self.rng, self.machine.light
        if light is None or view.method == "alone":
            depth = cap if rng.random() < machine.found else 0
            kept = self._kept(depth, rate if view.heat == 0 else rate / 6)
            nodes = depth * machine.nodes
            return RowStep(view.request_id, view.method, cap, depth, kept, nodes, heat=view.heat), depth > 0
        finds = rng.random() < light.found
        depth = cap if finds else paid
        kept = self._kept(depth, light.kept if finds else rate)
        known = (cap, depth if finds else 0, kept if finds else 0) if light.tells and cap else None
        by_light = finds if light.by_light and cap else None
        row = RowStep(view.request_id, "whole", cap, depth, kept, light=known, heat=view.heat, by_light=by_light)
        return row, depth > 0 and not finds

    def _kept(self, depth: int, rate: float) -> int:
        kept = 0
        while kept < depth and self.rng.random() < rate:
            kept += 1
        return kept

    @property
    def record(self) -> dict[str, Any]:
        """What is written down."""
        runs = [(plan, len(list(steps))) for plan, steps in groupby(self.plans)]
        state = {name: _rounded(value) for name, value in self.planner.state.items()}
        return {
            "machine": self.machine.name,
            "plans": " ".join(plan if count == 1 else f"{plan}*{count}" for plan, count in runs),
            "state": state,
        }


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


def steps_of(plans: str) -> list[str]:
    """The steps that are written so."""
    found: list[str] = []
    for run in plans.split():
        plan, _, count = run.partition("*")
        found += [plan] * int(count or 1)
    return found


def main() -> None:
    """Make the file; refuse to replace one unless asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overwrite", action="store_true", help="replace the file that is there")
    if not parser.parse_args().overwrite and PATH.exists():
        sys.exit(f"{PATH} is there: its decisions are what later versions are held to. --overwrite replaces it")
    decisions.thread_time = lambda: 0.0  # type: ignore[attr-defined]
    records = [Run(machine).steps().record for machine in MACHINES]
    PATH.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")


if __name__ == "__main__":
    main()
