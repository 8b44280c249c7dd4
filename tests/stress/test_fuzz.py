"""Schemathesis against our server: no 5xx, and nothing that the document does not say."""

import pytest

from tests.stress import fuzz, minutes


@pytest.mark.slow
def test_fuzz() -> None:
    pytest.importorskip("schemathesis")
    assert fuzz.main(["--minutes", str(minutes(0.4)), "--serve-args", "--max-num-seqs 8"]) == 0


def test_a_valid_body_is_made_short_and_an_invalid_one_stays_invalid() -> None:
    assert fuzz.shorten({"model": "x", "max_tokens": 500, "n": 40}, "toy") == {"model": "toy", "max_tokens": 8, "n": 3}
    assert fuzz.shorten({"model": 5, "max_tokens": -1}, "toy") == {"model": 5, "max_tokens": -1}
    unlimited = {"model": "x", "ignore_eos": True, "max_tokens": None, "max_completion_tokens": None}
    assert fuzz.shorten(unlimited, "toy")["max_tokens"] == 8, "null means no limit: a whole context"
    assert fuzz.shorten({"model": "x", "max_completion_tokens": 500.0}, "toy")["max_completion_tokens"] == 8
    assert fuzz.shorten({"input": "x"}, "toy") == {"input": "x", "max_output_tokens": 8}
    assert fuzz.shorten({"messages": []}, "toy") == {"messages": [], "max_tokens": 8}, "a model need not be named"
    assert fuzz.shorten({"prompt": "x"}, "toy", "/tokenize") == {"prompt": "x"}, "it has no limit"
    assert fuzz.shorten([1], "toy") == [1]
