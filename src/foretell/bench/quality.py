"""Are a method's answers as often right as plain decoding's? Shares with Wilson intervals, pairs with McNemar's exact test.

The same questions with the same seeds are answered plainly and by the method. Where both are right or both are wrong
a pair says nothing; of the others, an exact rule gives each side as many on average (McNemar 1947, by the binomial law).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretell.bench import sandbox
from foretell.bench.answers import AnswerCheck, program, same_number
from foretell.bench.stats import Interval, mcnemar, wilson


@dataclass(frozen=True)
class Quality:
    """Right answers of one method on one task at one temperature."""

    category: str
    num_judged: int
    num_right: int
    share: Interval  # Wilson, 95 %
    num_right_plain: int
    num_plain_only: int  # right answers that plain decoding alone has
    num_method_only: int
    p_value: float  # of the two counts above, if both sides were right equally often


class Judge:
    """Judges answers; the same answer to the same question is judged once."""

    def __init__(self) -> None:
        self._known: dict[tuple[AnswerCheck, str], bool] = {}

    def right(self, check: AnswerCheck, text: str) -> bool:
        """Whether an answer is right. Python programs are run: see ``sandbox``."""
        key = (check, text)
        if key not in self._known:
            self._known[key] = self._judge(check, text)
        return self._known[key]

    @staticmethod
    def _judge(check: AnswerCheck, text: str) -> bool:
        if check.kind == "number":
            return same_number(text, check.expected)
        if check.kind == "unknown":
            return says_unknown(text)
        source = f"{program(text, check)}\n{check.expected}\ncheck({check.entry_point})\n"
        return sandbox.run(source) == sandbox.PASSED


def quality(groups: Mapping[int, str], method: Mapping[int, bool], plain: Mapping[int, bool]) -> list[Quality]:
    """By task, and over all where there are several ("overall", first). groups: question -> task; method, plain: question
    -> whether the answer is right; questions that either side lacks are left out."""
    both = [index for index in groups if index in method and index in plain]
    names = list(dict.fromkeys(groups[index] for index in both))
    parts = {name: [index for index in both if groups[index] == name] for name in names}
    if len(parts) > 1:
        parts = {"overall": both, **parts}
    return [_quality(name, [(method[i], plain[i]) for i in chosen]) for name, chosen in parts.items()]


def _quality(name: str, pairs: Sequence[tuple[bool, bool]]) -> Quality:
    right, plain = sum(mine for mine, _ in pairs), sum(theirs for _, theirs in pairs)
    plain_only = sum(theirs and not mine for mine, theirs in pairs)
    method_only = sum(mine and not theirs for mine, theirs in pairs)
    return Quality(
        name, len(pairs), right, wilson(right, len(pairs)), plain, plain_only, method_only,
        mcnemar(plain_only, method_only),
    )  # fmt: skip


SAYS = re.compile(
    r"(?:\b|(?=n't))(?:un(?:known|knowable|solved|proven|proved|decided|resolved|answered|answerable|certain|clear|determined|deciphered"
    r"|identified|explained)"
    r"|(?:not|never|n't)\s+(?:yet\s+|currently\s+|been\s+|be\s+|fully\s+|completely\s+|well\s+|definitively\s+"
    r"|conclusively\s+|entirely\s+|precisely\s+|exactly\s+|really\s+|yet\s+been\s+|possible\s+to\s+)*(?:known?|solved|proven"
    r"|proved|decided|resolved|answered|certain|clear|determined?|deciphered|identified|established|understood|explained"
    r"|settled|agreed|predict(?:ed)?|say|sure|found)"
    r"|(?:nobody|no\s+one|no-one|none\s+of\s+us)\s+(?:really\s+|yet\s+|currently\s+|truly\s+)?knows"
    r"|(?:open|unsettled)\s+(?:question|problem|conjecture)|no\s+(?:(?:definit(?:e|ive)|known|clear|single|conclusive|agreed"
    r"|accepted|certain|scientific|universal(?:ly\s+accepted)?|generally\s+accepted)\s+)+(?:answer|proof|evidence|explanation"
    r"|consensus|theory|way)|no\s+consensus"
    r"|(?:remains?|is\s+still|is)\s+(?:a\s+|an\s+)?(?:mystery|debated|disputed|open|subject\s+of\s+debate|matter\s+of\s+debate)"
    r"|there\s+is\s+no\s+answer|no\s+answer\s+yet"
    r"|impossible\s+to\s+(?:know|say|predict|determine|answer))\b",
    re.IGNORECASE,
)


def says_unknown(text: str) -> bool:
    """Whether the text says anywhere that the answer is not known: what counts as right for such a question.

    For questions whose answer nobody knows (suite ``abstention``, after "The Impossible Test", Noever and McKee
    2024, 2411.14486) to say so is the right answer, and the only one. The rule looks for words, which anyone can
    read and check by hand; it does not understand a text: ``benchmarks.papers.agreement`` measures how far it
    agrees with others.
    """
    return SAYS.search(text.replace("\u2019", "'")) is not None
