"""Counters of a scheduler: only ever added to, and read by ``Snapshot``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.engine.snapshot import MethodFigures
from foretoken.engine.state import Row
from foretoken.engine.step import StepReport


@dataclass
class _Method:
    """Sums of one method, as ``MethodFigures`` has them."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def figures(self) -> MethodFigures:
        """As a snapshot holds them."""
        return MethodFigures(
            self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, tuple(self.drafted), tuple(self.accepted)
        )


@dataclass
class Books:
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
    methods: dict[str, _Method] = field(default_factory=dict)

    def add(self, report: StepReport, caps: Sequence[int]) -> None:
        """One step."""
        self.num_steps += 1
        self.seconds_draft += report.seconds_draft
        self.seconds_target += report.seconds_target
        self.seconds_rest += report.seconds_rest
        self.num_generated_tokens += sum(map(len, report.commit.tokens))
        self.planned = sum(caps) / max(1, len(caps))
        self.guessed = report.commit.tree.num_nodes > 1

    def add_row(self, method: str, drafted: int, accepted: int, nodes: int) -> None:
        """One row of one step that guessed: the depth of its proposal, how many were kept, and its guesses in all."""
        sums = self.methods.setdefault(method, _Method())
        sums.num_drafts += 1
        sums.num_draft_tokens += nodes
        sums.num_accepted_tokens += accepted
        for counts, reached in ((sums.drafted, drafted), (sums.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for position in range(reached):
                counts[position] += 1

    def finish(self, row: Row, seconds: float) -> None:
        """A request has ended, seconds after it came."""
        assert row.finish_reason is not None
        self.num_finished[row.finish_reason] += 1
        known = self.seconds_per_request
        self.seconds_per_request = 0.9 * known + 0.1 * seconds if known else seconds
