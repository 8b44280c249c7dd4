"""Comments, docstrings and messages are plain technical English: phrases that were removed once must not come back."""

import io
import re
import tokenize
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "foretell"
DENIED = (
    "nobody's business",
    "mean nothing",
    "means nothing",
    "goes through the motions",
    "who stands where",
    "books up",
    "books add up",
    "on the books",
    "in company",
    "in any company",
    "for ever",
    "may be had",
    "cannot be had",
    "becomes of",
    "became of",
    "is told",
    "are told",
    "looks on",
    "looking on",
    "values that cannot be",
    "behind the seam",
    "without a word",
    "is nobody's",
    "are nobody's",
    "in those of",
    "of so many",
    *(f"behind {article} {noun}" for article in ("a", "the") for noun in ("pass", "step", "trial", "guess")),
)


def found(text: str) -> list[str]:
    """The denied phrases in a text, whatever its case and line breaks."""
    text = re.sub(r"\s+(?:[#*]\s+)?", " ", text).lower()
    return [phrase for phrase in DENIED if re.search(rf"\b{re.escape(phrase)}\b", text)]


def prose(path: Path) -> str:
    """The comments and strings of a Python file, in order; all of a C file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".c", ".h"):
        return text
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(token.string for token in tokens if token.type in kinds)


@pytest.mark.parametrize("phrase", DENIED)
def test_each_denied_phrase_is_found(phrase: str) -> None:
    first, rest = phrase.split(" ", 1)
    assert phrase in found(f"# Here {first.upper()}\n    # {rest}, as an example")


def test_plain_text_is_accepted() -> None:
    assert found("Return the number of tokens. Raises ConfigError for a negative count.") == []


def test_no_mannered_phrase_in_the_source() -> None:
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in {".py", ".c", ".h"})
    assert len(files) > 100
    said = {str(path.relative_to(SOURCE)): phrases for path in files if (phrases := found(prose(path)))}
    assert said == {}, f"write plain technical English instead (who calls what, what is returned): {said}"
