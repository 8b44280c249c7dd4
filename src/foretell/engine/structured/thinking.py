"""A budget for thoughts, and a grammar that begins behind them: one more processor, at every node of a tree."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.engine.structured.thoughts import Phase, State, Thoughts


class Held(Protocol):
    """What an answer is held to: ``ConstraintProcessor``, made for a prompt of no tokens."""

    error: str
    left_out: tuple[str, ...]

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See ``LogitsProcessor``; ids: of the answer alone."""
        ...

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer can begin with these."""
        ...

    def stop(self, reason: str) -> None:
        """Permit nothing from now on."""
        ...


class ThinkingProcessor:
    """A pure LogitsProcessor: (ids int64 [L], logits [V]) -> logits [V], a function of ``ids[num_prompt:]`` alone.

    Once a thought has ``budget`` tokens on the path of a node, the tokens that end it are the only ones permitted. What
    holds the answer is asked from the end of the thought on, and until then no end of the output is permitted, as the
    answer would be missing. Called by one thread at a time.
    """

    def __init__(
        self,
        thoughts: Thoughts,
        num_prompt: int,
        start: Phase,
        budget: int | None,
        held: Held | None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """start: the phase after the prompt; budget: None: no limit; held: None: any answer; end_ids: of an output."""
        self._thoughts, self._num_prompt, self._budget, self._held = thoughts, num_prompt, budget, held
        self._ends = sorted(set(end_ids))
        self._path: NDArray[np.int64] = np.zeros(0, np.int64)
        self._states = [State(start)]  # after each token of the path
        self._reason = ""

    @property
    def error(self) -> str:
        """Why nothing is permitted; "" where something is."""
        return self._reason or (self._held.error if self._held is not None else "")

    @property
    def left_out(self) -> tuple[str, ...]:
        """See ``Constraint``."""
        return self._held.left_out if self._held is not None else ()

    def stop(self, reason: str) -> None:
        """Permit nothing from now on: the engine ends the request. reason: for its client."""
        self._reason = reason
        if self._held is not None:
            self._held.stop(reason)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See the class."""
        if self._reason:
            return torch.full_like(logits, -torch.inf)
        output: NDArray[np.int64] = ids[self._num_prompt :].cpu().numpy()
        state = self._follow(output)
        forced = self._thoughts.forced_by(state, self._budget)
        if forced is not None:
            made = torch.full_like(logits, -torch.inf)
            made[forced] = logits[forced] if bool(logits[forced] > -torch.inf) else 0.0
            return made
        if self._held is None:
            return logits
        if state.phase == "answer":
            return self._held(ids[self._num_prompt + state.since :], logits)
        if state.phase == "before":
            return self._opened(self._held, ids[self._num_prompt + state.since :], logits)
        made = logits.clone()
        made[[*self._ends, *self._thoughts.overrunning(state)]] = -torch.inf
        return made

    def _follow(self, output: NDArray[np.int64]) -> State:
        """The state after an output: back to what it shares with the last one, then forward."""
        common = min(len(output), len(self._path))
        differ = np.flatnonzero(output[:common] != self._path[:common])
        same = int(differ[0]) if len(differ) else common
        del self._states[same + 1 :]
        for token in output[same:].tolist():
            self._states.append(self._thoughts.after(self._states[-1], token, self._budget))
        self._path = output.copy()
        return self._states[-1]

    def _opened(self, held: Held, ids: Tensor, logits: Tensor) -> Tensor:
        """Before a thought: it may be opened, or the answer comes at once, where the family may leave a thought out."""
        path: list[int] = ids.tolist()
        opening = sorted(self._thoughts.opening(path))
        bare = self._thoughts.family.is_bare and held.begins(path)
        made = held(ids, logits) if bare else torch.full_like(logits, -torch.inf)
        if not opening and not bare:  # a head of a message of its own
            made = logits.clone()
            made[self._ends] = -torch.inf
            return made
        made = made.clone()
        made[opening] = logits[opening]
        return made
