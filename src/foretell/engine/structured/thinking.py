"""What of a request governs its thoughts and what its answer (``GOVERNS``), and what follows of it: where an answer stands
in a text, and one more processor, at every node of a tree, for a budget of thoughts and for a grammar after them."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.engine.structured.thoughts import Part, Phase, Thinking, Thoughts, ThoughtState, read, rest_of

Governed = Literal["thought", "answer", "output"]
GOVERNS: Mapping[str, Governed] = {
    "thinking_budget": "thought",
    # What the client reads as the answer is looked at and held to a form: a thought that quotes a stop text is not its end.
    "stop": "answer",
    "stop_token_ids": "answer",
    "response_format": "answer",
    "tools": "answer",
    "allowed_token_ids": "answer",
    "logprobs": "answer",
    # The model's own end, limits (a token of a thought costs as much as another), and how each token is drawn.
    "ignore_eos": "output",
    "max_tokens": "output",
    "min_tokens": "output",
    "temperature": "output",
    "top_k": "output",
    "top_p": "output",
    "min_p": "output",
    "repetition_penalty": "output",
    "presence_penalty": "output",
    "frequency_penalty": "output",
    "logit_bias": "output",
    "seed": "output",
}
"""What a setting of a request governs where thoughts stand apart from the answer; elsewhere all govern the output. The
table of docs/serving.md says the same."""


def of_answer(setting: str, thinking: Thinking | None) -> Thinking | None:
    """thinking, where this setting governs the answer alone; None: it governs all the output."""
    return thinking if GOVERNS[setting] == "answer" else None


class AnswerText:
    """Where in an output's text the answer stands, as the text comes."""

    def __init__(self, thinking: Thinking) -> None:
        self._family, self._phase, self._held = thinking.thoughts.family, thinking.start, ""
        self.hidden = thinking.thoughts.hidden
        self._length = 0
        self.begin: int | None = None if thinking.start == "thought" else 0
        """The place of the answer's first character, or of what may be one (``is_open``); None: a thought comes."""
        self._skips = False  # white space after a mark, which belongs to the form

    @property
    def is_open(self) -> bool:
        """Whether what comes may be the answer, or a mark."""
        return self._phase == "before"

    def push(self, text: str, *, shown: bool = True) -> None:
        """A further piece of the output. shown: False for a mark that the text leaves out."""
        self._phase, self._held, parts = read(self._family, self._phase, self._held, text)
        self._length += len(text) if shown else 0
        self._follow(parts, text)
        if not shown and self.begin is not None:
            self.begin = self._length  # the client reads it there, so no stop text lies on both sides of it

    def finish(self) -> None:
        """Nothing more comes: what is open is the answer, unless it is the head of a message that was cut off."""
        if self.is_open and rest_of(self._family, self._phase, self._held):
            self._phase = "answer"

    def _follow(self, parts: Sequence[Part], text: str) -> None:
        marks = [place for place, (_, part) in enumerate(parts) if not part]
        if marks:
            text = "".join(part for _, part in parts[marks[-1] :]) + self._held
            self._skips = True
            self.begin = None if self._phase == "thought" else self._length - len(text)
        if self._skips and self._phase == "answer" and self.begin is not None:
            told = text.lstrip()
            self.begin += len(text) - len(told)
            self._skips = not told


class Held(Protocol):
    """What an answer is held to: ``ConstraintProcessor``, made for a prompt of no tokens."""

    error: str
    left_out: tuple[str, ...]

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See ``LogitsProcessor``; ids: of the answer alone."""
        ...

    def expected(self, ids: Sequence[int]) -> Sequence[int]:
        """See ``expected_of``; ids: of the answer alone."""
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
    answer would be missing. The first ``least`` tokens end no answer. Called by one thread at a time.
    """

    def __init__(
        self,
        thoughts: Thoughts,
        num_prompt: int,
        start: Phase,
        budget: int | None,
        held: Held | None,
        end_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        least: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        """start: the phase after the prompt; budget: None: no limit; held: None: any answer; end_ids: of an output;
        stop_ids: of an answer, after at least so many tokens of the output; whole: what is held is all the output."""
        self._is_whole = whole
        self._thoughts, self._num_prompt, self._budget, self._held = thoughts, num_prompt, budget, held
        self._ends, self._stops, self._least = sorted(set(end_ids)), tuple(stop_ids), least
        self._path: NDArray[np.int64] = np.zeros(0, np.int64)
        self._states = [ThoughtState(start)]  # after each token of the path
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
        made = self._held_to(state, ids, logits)
        if self._stops and len(output) < self._least:
            early = [token for token in self._stops if self._thoughts.after(state, token, self._budget).is_answer]
            made = made.clone()
            made[early] = -torch.inf
        return made

    def expected(self, ids: Sequence[int]) -> Sequence[int]:
        """See ``expected_of``: the rest of a thought's end that its budget forces, and what holds the answer expects."""
        output = ids[self._num_prompt :]
        state = self._follow(np.array(output, np.int64))
        if self._thoughts.forced_by(state, self._budget) is not None:
            return self._thoughts.closer[state.forced :]
        if self._held is None or (state.phase != "answer" and not self._is_whole):
            return ()
        if self._is_whole:
            return self._held.expected(output)
        return self._held.expected(output[state.since :])

    def _held_to(self, state: ThoughtState, ids: Tensor, logits: Tensor) -> Tensor:
        forced = self._thoughts.forced_by(state, self._budget)
        if forced is not None:
            made = torch.full_like(logits, -torch.inf)
            made[forced] = logits[forced] if bool(logits[forced] > -torch.inf) else 0.0
            return made
        if self._held is None:
            return logits
        if self._is_whole:
            return self._held(ids[self._num_prompt :], logits)
        if state.phase == "answer":
            return self._held(ids[self._num_prompt + state.since :], logits)
        if state.phase == "before":
            return self._opened(self._held, ids[self._num_prompt + state.since :], logits)
        made = logits.clone()
        made[[*self._ends, *self._thoughts.overrunning(state)]] = -torch.inf
        return made

    def _follow(self, output: NDArray[np.int64]) -> ThoughtState:
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
