"""The record of one decoding: its tokens, and for each step the guesses, accepted tokens and seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from foretell.bench.stats import first_loop

if TYPE_CHECKING:
    from foretell.engine.recorder import StepTime


@dataclass(frozen=True)
class DecodedRun:
    """One prompt decoded once by one method."""

    token_ids: list[int]
    steps: "list[StepTime]"
    seconds_prefill: float
    seconds_draft_forward: float = 0.0  # of the steps' seconds_draft, spent in passes of a draft model

    def seconds_of(self) -> list[float]:
        """Wall time of each step: from the end of the one before it, so that nothing between steps is lost."""
        own = [step.seconds for step in self.steps[:1]]
        return own + [step.ended - before.ended for before, step in zip(self.steps, self.steps[1:], strict=False)]

    def record(self) -> dict[str, Any]:
        """As JSON; every step is a list of the fields of ``StepTime``."""
        return {
            "token_ids": self.token_ids,
            "steps": [astuple(step) for step in self.steps],
            "seconds_prefill": self.seconds_prefill,
            "seconds_draft_forward": self.seconds_draft_forward,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "DecodedRun":
        """From ``record``; other keys are left alone."""
        from foretell.engine.recorder import StepTime  # here: reports are read without torch

        steps = [StepTime(*step) for step in record["steps"]]
        return cls(record["token_ids"], steps, record["seconds_prefill"], record["seconds_draft_forward"])


@dataclass(frozen=True)
class Cut:
    """The part of a run that counts: all of it, or what came before its first loop."""

    token_ids: list[int]
    steps: "list[StepTime]"  # whole steps within the part
    seconds: float  # decode time of the part; of the step that the cut falls into, the share of its tokens
    looped: bool


def cut(run: DecodedRun) -> Cut:
    """A run up to its first loop."""
    end = first_loop(run.token_ids)
    if end is None:
        return Cut(run.token_ids, run.steps, sum(run.seconds_of()), False)
    kept: list[StepTime] = []
    seconds, done = 0.0, 0
    for step, spent in zip(run.steps, run.seconds_of(), strict=True):
        if done + step.num_tokens > end:
            seconds += spent * (end - done) / step.num_tokens
            break
        kept.append(step)
        seconds += spent
        done += step.num_tokens
    return Cut(run.token_ids[:end], kept, seconds, True)


def identical(ours: Sequence[DecodedRun], plain: Sequence[DecodedRun]) -> bool:
    """Whether every run has the tokens of its plain counterpart, all of them, loops included."""
    return len(ours) == len(plain) and all(a.token_ids == b.token_ids for a, b in zip(ours, plain, strict=True))
