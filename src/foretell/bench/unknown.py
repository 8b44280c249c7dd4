"""Does an answer say that the answer is not known? Rules that anyone can read, and check by hand.

For questions whose answer nobody knows (suite ``abstention``, after "The Impossible Test", Noever and McKee 2024,
2411.14486) to say so is the right answer, and the only one. The rule looks for words; it does not understand a text:
``benchmarks.papers.agreement`` measures how far it agrees with others.
"""

import re

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
    """Whether the text says anywhere that the answer is not known: what counts as right for such a question."""
    return SAYS.search(text.replace("\u2019", "'")) is not None
