"""Totals of all steps. Counters only grow. ``Snapshot`` and ``bench`` read them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from foretell.core.tree import depths
from foretell.engine.event import StepEvent
from foretell.engine.request.row import Row
from foretell.engine.state import count_up


@dataclass(frozen=True)
class StepTime:
    """One step of a batch, on the host clock."""

    ended: float  # perf_counter
    seconds_draft: float
    seconds_target: float
    seconds_rest: float
    num_draft_tokens: int  # nodes guessed, padding not counted
    num_accepted_tokens: int  # before an end or limit cut the path
    num_tokens: int  # emitted
    seconds_draft_model: float = 0.0  # of seconds_draft: passes of a draft model
    is_light: bool = False  # see ``StepEvent``
    num_beside_tokens: int = 0  # guesses beside the kept path, no deeper than it: 0 of a chain

    @property
    def seconds(self) -> float:
        """The step's own time."""
        return self.seconds_draft + self.seconds_target + self.seconds_rest

    @classmethod
    def of(cls, event: StepEvent) -> "StepTime":
        """The times of a step that has just ended."""
        tree, beside = event.commit.tree, 0
        if tree.num_nodes > 1 and tree.max_children != 1:
            kept = torch.tensor(event.verdict.counts, device=tree.parent.device)[:, None] - 1
            beside = int(((tree.parent >= 0) & (depths(tree.parent) <= kept)).sum() - kept.sum())
        return cls(
            ended=perf_counter(),
            seconds_draft=event.seconds_draft,
            seconds_target=event.seconds_target,
            seconds_rest=event.seconds_rest,
            num_draft_tokens=int((tree.parent >= 0).sum()) if tree.num_nodes > 1 else 0,
            num_accepted_tokens=sum(event.verdict.counts) - len(event.rows),
            num_tokens=sum(map(len, event.commit.tokens)),
            seconds_draft_model=event.seconds_draft_model,
            is_light=event.is_light,
            num_beside_tokens=beside,
        )


@dataclass
class MethodFigures:
    """Speculation by one method, summed over all requests since the start."""

    num_drafts: int = 0  # (row, step) pairs that proposed anything
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)

    def figures(self) -> "MethodFigures":
        """A copy, as a snapshot holds it."""
        return replace(self, drafted_per_pos=[*self.drafted_per_pos], accepted_per_pos=[*self.accepted_per_pos])


@dataclass
class Recorder:
    """See the module's docstring."""

    num_submitted: int = 0
    num_rejected: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    seconds_draft: float = 0.0
    seconds_target: float = 0.0
    seconds_rest: float = 0.0
    seconds_prefill: float = 0.0
    seconds_per_request: float = 0.0  # from submission to the end, running mean
    planned: float = 0.0  # guesses allowed a row in the last step, mean
    guessed: bool = False  # whether it guessed
    methods: dict[str, MethodFigures] = field(default_factory=dict)
    steps: list[StepTime] | None = None  # every single step, while ``timing`` is active

    @contextmanager
    def timing(self) -> Iterator[list[StepTime]]:
        """Within it every step is appended to the list it gives."""
        before = self.steps
        steps: list[StepTime] = []
        self.steps = steps
        try:
            yield steps
        finally:
            self.steps = before

    def add(self, event: StepEvent, num_before: Sequence[int]) -> None:
        """One step. num_before: guesses that each of its rows had made before."""
        self.num_steps += event.num_passes
        self.seconds_draft += event.seconds_draft
        self.seconds_target += event.seconds_target
        self.seconds_rest += event.seconds_rest
        self.num_generated_tokens += event.num_before + sum(map(len, event.commit.tokens))
        self.planned = sum(event.depth_limit) / max(1, len(event.depth_limit))
        self.guessed = event.commit.tree.num_nodes > 1
        if self.steps is not None:
            self.steps.append(StepTime.of(event))
        for row, before in zip(event.rows, num_before, strict=True):
            if row.error is None and row.num_draft_tokens > before:
                self._add_row(row.method, *row.steps[-1], row.num_draft_tokens - before)

    def _add_row(self, method: str, drafted: int, accepted: int, nodes: int) -> None:
        """One row of one step that guessed: the depth of its proposal, how many were kept, and its guesses in all."""
        sums = self.methods.setdefault(method, MethodFigures())
        sums.num_drafts += 1
        sums.num_draft_tokens += nodes
        sums.num_accepted_tokens += accepted
        count_up(sums.drafted_per_pos, drafted)
        count_up(sums.accepted_per_pos, accepted, drafted)

    def finish(self, row: Row, seconds: float) -> None:
        """A request has ended, seconds after it came."""
        assert row.finish_reason is not None
        self.num_finished[row.finish_reason] += 1
        known = self.seconds_per_request
        self.seconds_per_request = 0.9 * known + 0.1 * seconds if known else seconds
