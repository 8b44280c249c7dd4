"""An output's text as it comes, cut into what was thought and what was answered."""

from collections import deque
from collections.abc import Sequence

from foretell.engine.request.row import Piece
from foretell.engine.structured.thoughts import Part, Phase, Thinking, read, rest_of


class PartStream:
    """Cuts a text as it comes; the parts of a phase joined are the same however it was cut into pieces. White space around
    thoughts belongs to the form and is dropped."""

    def __init__(self, thinking: Thinking) -> None:
        self._family, self._hidden = thinking.thoughts.family, thinking.thoughts.hidden
        self._phase, self._held = thinking.start, ""
        self._given = 0  # characters of the text so far
        self._due: deque[tuple[int, str]] = deque()  # marks that the text leaves out, and where they stood
        self._begins = self._phase == "thought"  # white space that comes now is the form's
        self._told: set[Phase] = set()
        self._blanks = ""  # at the end of a thought so far

    def push(self, pieces: Sequence[Piece], text: str) -> list[Part]:
        """The parts of further tokens, and of the text that became certain with them: none is empty."""
        self._due += [(one.offset, self._hidden[one.token_id]) for one in pieces if one.token_id in self._hidden]
        shown, begin = "", 0
        while self._due and self._due[0][0] <= self._given + len(text):
            place, mark = self._due.popleft()
            end = max(begin, place - self._given)
            shown, begin = shown + text[begin:end] + mark, end
        self._given += len(text)
        self._phase, self._held, parts = read(self._family, self._phase, self._held, shown + text[begin:])
        return self._formed(parts)

    def finish(self) -> list[Part]:
        """The end of the text: what was held back."""
        return self._formed(rest_of(self._family, self._phase, self._held))

    def _formed(self, parts: Sequence[Part]) -> list[Part]:
        made: list[Part] = []
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
                    made.append((phase, kept))
            else:
                made.append((phase, text))
        return made
