"""An output's text as it comes, cut into what was thought and what was answered."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Literal

from foretell.engine.request.row import Piece
from foretell.engine.structured.thoughts import Part, Phase, Thinking, read, rest_of

Told = tuple[Literal["thought", "answer", "called", "arguments"], str]
"""A part as a client reads it. "called": a call begins, of the function of this name."""
_CALLED = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]{1,128})")
"""In the head of a message of gpt-oss's."""


class PartStream:
    """Cuts a text as it comes; the parts of a phase joined are the same however it was cut into pieces. White space around
    thoughts belongs to the form and is dropped."""

    def __init__(self, thinking: Thinking, *, calls: bool = False) -> None:
        """calls: messages to functions are calls, and no answer."""
        self._reads_calls, self._is_call = calls, False
        self._family, self._hidden = thinking.thoughts.family, thinking.thoughts.hidden
        self._phase, self._held = thinking.start, ""
        self._given = 0  # characters of the text so far
        self._due: deque[tuple[int, str]] = deque()  # marks that the text leaves out, and where they stood
        self._begins = self._phase == "thought"  # white space that comes now is the form's
        self._told: set[Phase] = set()
        self._blanks = ""  # at the end of a thought so far

    def push(self, pieces: Sequence[Piece], text: str) -> list[Told]:
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

    def finish(self) -> list[Told]:
        """The end of the text: what was held back."""
        return self._formed(rest_of(self._family, self._phase, self._held))

    def _formed(self, parts: Sequence[Part]) -> list[Told]:
        made: list[Told] = []
        for phase, text in parts:
            if not text:  # a mark
                self._begins, self._blanks = True, ""
                self._is_call = self._is_call and phase == "answer"
                continue
            if phase == "before":  # the head of a message
                found = _CALLED.search(text) if self._reads_calls else None
                self._is_call = found is not None
                made += [("called", found[1])] if found else []
                continue
            if self._is_call:
                made.append(("arguments", text))
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
