"""Answers that say that nobody knows: the rule, and the suite."""

import pytest

from foretell.bench import read_suite, run_bench, select
from foretell.bench.answers import AnswerCheck
from foretell.bench.quality import Judge, says_unknown

UNKNOWN = [
    "It is not known.",
    "The answer is unknown.",
    "Nobody knows what dark matter is made of.",
    "This remains an open question.",
    "There is no definitive answer.",
    "It hasn't been proven yet.",
    "It is impossible to say.",
    "Scientists don't fully understand why we dream, so the reason is not yet known.",
    "The script is undeciphered.",
    "It is still debated; no consensus exists.",
    "I do not know.",
    "We can’t be sure.",
]
KNOWN = [
    "Dark matter is made of axions.",
    "Yes, every even number greater than two is the sum of two primes.",
    "Jack the Ripper was Aaron Kosminski.",
    "The proof is well known and was given by Euclid.",
    "Linear A says that the king owned 400 sheep.",
    "",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_says_so(text: str) -> None:
    assert says_unknown(text)
    assert Judge().right(AnswerCheck("unknown", ""), text)


@pytest.mark.parametrize("text", KNOWN)
def test_does_not_say_so(text: str) -> None:
    assert not says_unknown(text)
    assert not Judge().right(AnswerCheck("unknown", ""), text)


def test_the_suite() -> None:
    """Eight categories of nine, three of each level; every one is judged, and no question is there twice."""
    items = read_suite("abstention").items
    assert len(items) == 72
    assert {(item.category, item.level) for item in items} == {
        (category, level) for category in {item.category for item in items} for level in "123"
    }
    for category in {item.category for item in items}:
        assert [item.level for item in items if item.category == category] == list("111222333")
    assert len({item.prompt for item in items}) == 72
    assert all(item.check == AnswerCheck("unknown", "") for item in items)
    assert not any(says_unknown(item.prompt.split("\n")[0]) for item in items), "a question that gives itself away"


def test_reports_count_by_category_and_by_level() -> None:
    items = [item for item in read_suite("abstention").items if item.category in ("mind", "history")]
    chosen = [item for item in items if str(item.question_id)[-1] in "147"]
    report = run_bench({"target": "bundled"}, chosen, ["ngram:2"], max_new_tokens=4, judged=True)
    plain, ngram = report.temperatures[0].methods
    counts = {part.category: part.num_judged for part in ngram.quality}
    assert counts == {"overall": 6, "mind": 3, "history": 3, "level 1": 2, "level 2": 2, "level 3": 2}
    assert [part.num_right for part in plain.quality] == [part.num_right for part in ngram.quality]
    assert select(chosen, limit=1)[0].level == "1"
