"""Comments, docstrings, messages and documents are plain technical English: phrases that were removed once must not come
back, and each word has the one meaning that docs/words.md gives it."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "foretell"
WORDS = ROOT / "docs" / "words.md"
FREE = ("help.md",)  # a page made of the source's own strings
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


CLAUSE = re.compile(r"\bWho [^.?!]*(?:[.!]|$)")
"""A clause as the subject of its sentence: "Who wants X does Y". Say "If you want X, do Y"; a question may begin so."""


def forms(page: str) -> list[str]:
    """What words.md says must not be said: the last column of its table, and the line of words that are no nouns."""
    cells = re.findall(r"^\| .* \| ([^|]*) \|$", page, re.MULTILINE) + re.findall(
        r"^Found, given.*Not: (.*)$", page, re.MULTILINE
    )
    return [form for cell in cells for form in re.findall(r"`([^`]+)`", cell)]


FORBIDDEN = forms(WORDS.read_text(encoding="utf-8"))
PHRASES = re.compile(
    rf"\b(?:{'|'.join(re.escape(phrase) for phrase in DENIED)}|(?:{'|'.join(map(re.escape, FORBIDDEN))})s?)\b"
)


def found(text: str) -> list[str]:
    """The denied phrases and forbidden forms in a text, whatever its case and line breaks, and clauses as subjects."""
    flat = re.sub(r"\s+(?:[#*]\s+)?", " ", text)
    return PHRASES.findall(flat.lower()) + CLAUSE.findall(flat)


def prose_of_page(text: str) -> str:
    """A document without its code: paragraphs, headings, cells."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def prose(path: Path) -> str:
    """The comments and strings of a Python file, in order; all of a C file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".c", ".h"):
        return text
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(token.string for token in tokens if token.type in kinds)


@pytest.mark.parametrize("phrase", [*DENIED, *FORBIDDEN])
def test_each_denied_phrase_is_found(phrase: str) -> None:
    first, _, rest = phrase.partition(" ")
    assert found(f"# Here {first.upper()}\n    # {rest}, as an example") == [phrase.lower()]


def test_a_relative_clause_is_no_subject() -> None:
    for text in ("Who wants\n    # speed sets it.", "* Who decodes\n * plainly waits.", "x\nWho calls whom\n"):
        assert found(text), text
    assert found("Who calls it? The one who waits. WHO says so.") == []


def test_plain_text_is_accepted() -> None:
    assert found("Return the number of tokens. Raises ConfigError for a negative count.") == []


def test_every_word_has_one_line_and_forms_that_are_none_of_the_words() -> None:
    """The table is read whole: a row that is written otherwise would check nothing."""
    page = WORDS.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 25
    assert all(len(row) == 3 for row in rows)
    assert all(forms(f"| {' | '.join(row)} |") for row in rows)
    words = [word for row in rows for word in re.split(r", ", row[0].replace("`", ""))]
    assert len(set(words)) == len(words)
    assert not set(FORBIDDEN) & set(words)
    assert len(set(FORBIDDEN)) == len(FORBIDDEN) > 60
    assert forms("| word | what it means | not |\n| --- | --- | --- |\n") == []


def test_no_mannered_phrase_in_the_source() -> None:
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in {".py", ".c", ".h"})
    assert len(files) > 100
    said = {str(path.relative_to(SOURCE)): phrases for path in files if (phrases := found(prose(path)))}
    assert said == {}, f"write plain technical English instead (who calls what, what is returned): {said}"


def test_no_forbidden_word_in_the_documents() -> None:
    pages = sorted(page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")) if page.name not in FREE)
    assert len(pages) > 20
    said = {page.name: phrases for page in pages if (phrases := found(prose_of_page(page.read_text(encoding="utf-8"))))}
    assert said == {}, f"docs/words.md says what to write instead: {said}"
