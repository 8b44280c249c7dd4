"""Text on a terminal: words stay whole at its width, thoughts are a line."""

import shutil
import sys
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from textwrap import fill

from rich.cells import cell_len

from foretell.cli.output import PieceWriter

FENCES = ("```", "~~~")


def tell(text: str) -> None:
    """Lines for a person on stderr, broken between words."""
    wide = shutil.get_terminal_size().columns - 1
    lines = (fill(line, wide, subsequent_indent="  ", break_on_hyphens=False) for line in text.splitlines())
    print(*lines, sep="\n", file=sys.stderr, flush=True)


class Prose(PieceWriter):
    """Breaks lines between words at the terminal's width, but for blocks of code. A word is written once it is whole."""

    _word: tuple[tuple[str, bool], ...] = ()  # letters that are not written yet, and whether they were guessed
    _blanks, _column, _is_code, _phase, _thought = "", 0, False, "answer", 0

    def show(self, parts: Iterable[tuple[str, str]], *, accepted: bool, folds: bool) -> None:
        """Thoughts and answers, as ``PartStream`` gives them with a token. folds: a thought is a count of tokens."""
        begins, ends = ("", "\n") if folds else ("<think>\n", "\n</think>\n\n")
        for phase, text in parts:
            between = "" if phase == self._phase else begins if phase == "thought" else ends
            self.write(between + ("" if folds and phase == "thought" else text), accepted=accepted)
            self._phase = phase
        if self._phase == "thought" and folds:
            self._thought += 1
            self.stream.write(f"\r\x1b[Ka thought of {self._thought} tokens (/set thoughts on)")
            self.stream.flush()
            self.last = ")"

    def write(self, text: str, *, accepted: bool) -> None:
        """See ``PieceWriter``."""
        for letter in text:
            if letter in " \t\n":
                self.end_word()
                self._blanks += letter
            else:
                self._word += ((letter, accepted),)
            if letter == "\n":
                self._end_line()
            elif cell_len(letter) > 1 or len(self._word) >= shutil.get_terminal_size().columns:
                self.end_word()  # wide letters are of scripts without blanks

    def end_word(self) -> None:
        """Write what is held back."""
        word = "".join(letter for letter, _ in self._word)
        if word and not self._column and word.startswith(FENCES):
            self._is_code = not self._is_code
        is_over = self._column + cell_len(self._blanks + word) > shutil.get_terminal_size().columns
        if word and is_over and self._column and not self._is_code:
            self._end_line()
        if word:
            super().write(self._blanks, accepted=False)
            for accepted, run in groupby(self._word, itemgetter(1)):
                super().write("".join(letter for letter, _ in run), accepted=accepted)
            self._word, self._blanks, self._column = (), "", self._column + cell_len(self._blanks + word)

    def _end_line(self) -> None:
        super().write("\n", accepted=False)
        self._blanks, self._column = "", 0

    def close(self) -> None:
        """See ``PieceWriter``."""
        self.end_word()
        super().close()
