"""A choice's text as it comes, taken apart: what was thought, what was answered, and calls of tools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.engine.request.result import Completion
from foretell.engine.request.row import Piece
from foretell.engine.structured.parts import PartStream, Told
from foretell.engine.structured.thinking import of_answer
from foretell.engine.structured.thoughts import Thinking, ThoughtState, rest_of
from foretell.server.texts.tools import CallDelta, ContentDelta, ToolCallStream, ToolUse, WrittenCall, new_call_id


@dataclass(frozen=True)
class ThoughtDelta:
    """A piece of what was thought."""

    text: str


Delta = ThoughtDelta | ContentDelta | CallDelta


class AnswerPieces:
    """The tokens of one choice's answer as they come, without those of thoughts and of marks: log probabilities are of the
    text that stands beside them."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = of_answer("logprobs", thinking)
        self._state = ThoughtState("before" if thinking is None else thinking.start)
        self._unsure: list[Piece] = []  # of the answer, or of a mark

    def push(self, pieces: Sequence[Piece], *, last: bool = False) -> list[Piece]:
        """Those of further tokens. last: no more come."""
        if self._thinking is None:
            return list(pieces)
        kept: list[Piece] = []
        thoughts = self._thinking.thoughts
        for piece in pieces:
            before, self._state = self._state, thoughts.after(self._state, piece.token_id)
            if self._state.is_answer:
                kept += [*self._unsure, piece]
            is_unsure = self._state.phase == "before" and self._state.since == before.since
            self._unsure = [*self._unsure, piece] if is_unsure else []
        if last and self._state.phase == "before" and rest_of(thoughts.family, "before", self._state.held):
            kept += self._unsure
        return kept


class TextReading:
    """Reads one choice: thoughts first, then calls in what is left."""

    def __init__(
        self, thinking: Thinking | None, calls: ToolUse | None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        """thinking, calls: None where there are none. new_id makes the calls' ids."""
        in_channels = calls is not None and calls.channels
        self._thoughts = None if thinking is None else PartStream(thinking, calls=in_channels)
        self._calls = (
            None
            if calls is None or in_channels
            else ToolCallStream(new_id, only_calls=calls.only_calls, bare=calls.bare_tools)
        )
        self._new_id, self._num_calls = new_id, 0

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._num_calls if self._calls is None else self._calls.num_calls

    def push(self, pieces: Sequence[Piece], text: str, done: Completion | None = None) -> list[Delta]:
        """The deltas of further tokens and text. done: with the last of them."""
        if self._thoughts is None:
            made = self._called([ContentDelta(text)] if text else [])
        else:
            made = self._called(self._deltas(self._thoughts.push(pieces, text)))
        return made if done is None else [*made, *self.finish(cut=done.finish_reason != "stop")]

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The end of the text: the deltas that were held back. cut: a limit ended it."""
        made = self._called(self._deltas(self._thoughts.finish())) if self._thoughts is not None else []
        return made if self._calls is None else [*made, *self._calls.finish(cut=cut)]

    def _deltas(self, parts: Sequence[Told]) -> list[Delta]:
        made: list[Delta] = []
        for kind, text in parts:
            if kind == "called":
                made.append(CallDelta(self._num_calls, self._new_id(), text))
                self._num_calls += 1
            elif kind == "arguments":
                made.append(CallDelta(self._num_calls - 1, arguments=text))
            else:
                made.append(ThoughtDelta(text) if kind == "thought" else ContentDelta(text))
        return made

    def _called(self, deltas: Sequence[Delta]) -> list[Delta]:
        if self._calls is None:
            return list(deltas)
        made: list[Delta] = []
        for one in deltas:
            made += self._calls.push(one.text) if isinstance(one, ContentDelta) else [one]
        return made


def whole(deltas: Sequence[Delta]) -> tuple[str, str | None, list[WrittenCall]]:
    """(thought, content, calls) of all deltas of a text; content is None where there is nothing but calls."""
    thought, content, calls = "", "", list[WrittenCall]()
    for delta in deltas:
        if isinstance(delta, ThoughtDelta):
            thought += delta.text
        elif isinstance(delta, ContentDelta):
            content += delta.text
        elif delta.id is not None and delta.name is not None:
            calls.append(WrittenCall(delta.id, delta.name, ""))
        else:
            calls[delta.index].arguments += delta.arguments
    return thought, content or (None if calls else ""), calls
