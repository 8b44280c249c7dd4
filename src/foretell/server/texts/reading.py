"""A choice's text as it comes, taken apart: what was thought, what was answered, and calls of tools."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foretell.engine.request.row import Piece
from foretell.engine.structured.thinking import of_answer
from foretell.engine.structured.thoughts import Part, Phase, Thinking, ThoughtState, read, rest_of
from foretell.server.texts.tools import CallDelta, ContentDelta, ToolCallStream, ToolUse, WrittenCall, new_call_id


@dataclass(frozen=True)
class ThoughtDelta:
    """A piece of what was thought."""

    text: str


Delta = ThoughtDelta | ContentDelta | CallDelta


class ThoughtStream:
    """Cuts a text into thoughts and answer as it comes; the deltas joined are the same however it was cut into pieces.

    White space around thoughts belongs to the form and is dropped.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._family, self._hidden = thinking.thoughts.family, thinking.thoughts.hidden
        self._phase, self._held = thinking.start, ""
        self._given = 0  # characters of the text so far
        self._due: deque[tuple[int, str]] = deque()  # marks that the text leaves out, and where they stood
        self._begins = self._phase == "thought"  # white space that comes now is the form's
        self._told: set[Phase] = set()
        self._blanks = ""  # at the end of a thought so far

    def push(self, pieces: Sequence[Piece], text: str) -> list[ThoughtDelta | ContentDelta]:
        """The deltas of further tokens, and of the text that became certain with them."""
        self._due += [(one.offset, self._hidden[one.token_id]) for one in pieces if one.token_id in self._hidden]
        shown, begin = "", 0
        while self._due and self._due[0][0] <= self._given + len(text):
            place, mark = self._due.popleft()
            end = max(begin, place - self._given)
            shown, begin = shown + text[begin:end] + mark, end
        self._given += len(text)
        self._phase, self._held, parts = read(self._family, self._phase, self._held, shown + text[begin:])
        return self._deltas(parts)

    def finish(self) -> list[ThoughtDelta | ContentDelta]:
        """The end of the text: what was held back."""
        return self._deltas(rest_of(self._family, self._phase, self._held))

    def _deltas(self, parts: Sequence[Part]) -> list[ThoughtDelta | ContentDelta]:
        made: list[ThoughtDelta | ContentDelta] = []
        for phase, text in parts:
            if not text:  # a mark
                self._begins, self._blanks = True, ""
                continue
            if self._begins:
                text = text.lstrip()
                if not text:
                    continue
                text = "\n\n" + text if phase in self._told else text  # a message of its own
                self._begins = False
            self._told.add(phase)
            if phase == "thought":
                text = self._blanks + text
                kept = text.rstrip()
                self._blanks = text[len(kept) :]
                if kept:
                    made.append(ThoughtDelta(kept))
            else:
                made.append(ContentDelta(text))
        return made


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
        self._thoughts = None if thinking is None else ThoughtStream(thinking)
        self._calls = (
            None if calls is None else ToolCallStream(new_id, only_calls=calls.only_calls, bare=calls.bare_tools)
        )

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, pieces: Sequence[Piece], text: str) -> list[Delta]:
        """The deltas of further tokens and text."""
        if self._thoughts is None:
            return self._called([ContentDelta(text)] if text else [])
        return self._called(self._thoughts.push(pieces, text))

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The end of the text: the deltas that were held back. cut: a limit ended it."""
        made = self._called(self._thoughts.finish()) if self._thoughts is not None else []
        return made if self._calls is None else [*made, *self._calls.finish(cut=cut)]

    def _called(self, deltas: Sequence[ThoughtDelta | ContentDelta]) -> list[Delta]:
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
