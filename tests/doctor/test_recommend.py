"""What is recommended: by intervals, never plain decoding for want of certainty, in one sentence and one command."""

import shlex
from typing import Any

import pytest

from foretell.bench.stats import Interval
from foretell.doctor.examine import Examined
from foretell.doctor.predict import SpeedPrediction
from foretell.doctor.recommend import Advice, command_of, recommend, undecided


def examined(
    method: str, value: float, low: float, high: float, *, prompts: int = 10, speculation: str = "on",
    default: bool = False,
) -> Examined:  # fmt: skip
    made = SpeedPrediction(4, 2.0, 1.2, Interval(value, low, high))
    return Examined(
        method, None, "coupled", [0.5], None, 2.0, 0.1, 2.0, [made], speculation=speculation, num_prompts=prompts,
        is_default=default,
    )  # fmt: skip


GOOD = examined("eagle3", 1.2, 1.02, 1.4)
OTHERS = [examined(f"m{i}", 0.9, 0.8, 1.0) for i in range(5)]


def test_one_of_many_methods_is_sure_only_where_their_number_allows_it() -> None:
    """With ten prompts and an interval from 1.02 on: alone it is, as the best of six it is not."""
    advice = recommend([GOOD])
    assert (advice.config, advice.speculation) == ({"method": "eagle3", "num_speculative_tokens": 4}, "on")
    assert advice.is_sure
    assert "(1.02 to 1.40)" in advice.why
    many = recommend([GOOD, *OTHERS])
    assert (many.config["method"], many.speculation, many.is_sure) == ("eagle3", "auto", False)
    sure = recommend([examined("suffix", 1.5, 1.4, 1.6), *OTHERS])
    assert sure.config["method"] == "suffix"
    assert "as the best of 6)" in sure.why


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([examined("ngram", 1.39, 0.98, 1.99, prompts=3)],
         "ngram may be 1.39 times as fast as plain decoding (0.98 to 1.99); 3 prompts are too few to be sure"),
        ([examined("a", 2.0, 2.0, 2.0, prompts=1)], "one prompt is too few to be sure"),
        ([examined("a", 1.62, 0.001, 1e9, prompts=2)],
         "a may be 1.62 times as fast as plain decoding; 2 prompts are too few to be sure"),
        ([examined("a", 0.5, 0.5, 0.5, prompts=1)], "one prompt is too few"),
        ([examined("a", 0.93, 0.4, 2.0), examined("b", 0.5, 0.4, 0.6)], "a is perhaps no faster: 0.93 times"),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_no_reason_for_plain_decoding(found: list[Examined], said: str) -> None:
    """On a busy machine it was recommended where bench shows 1.4."""
    advice = recommend(found)
    assert (advice.config["method"], advice.speculation, advice.is_sure) == (found[0].method, "auto", False)
    assert said in advice.why


def test_plain_decoding_is_recommended_where_every_interval_lies_below_it() -> None:
    low = [examined("a", 0.8, 0.7, 0.9), examined("b", 0.5, 0.4, 0.6)]
    advice = recommend(low)
    assert (advice.config, advice.is_sure) == ({"method": "none"}, True)
    assert advice.why == "no method pays here: the best, a, is 0.80 times as fast as plain decoding (0.68 to 0.92)"
    assert recommend([]).why == "nothing could be measured"


def test_auto_is_a_method_among_the_others() -> None:
    auto = examined("hybrid", 1.5, 1.4, 1.6, speculation="auto")
    advice = recommend([auto, examined("hybrid", 1.3, 1.2, 1.42)])
    assert (advice.config, advice.speculation) == ({"method": "hybrid"}, "auto")
    assert advice.why.startswith("auto:hybrid is expected to be 1.50 times")


def of(*auto: float, prompts: int = 10) -> Examined:
    return examined("hybrid", *auto, prompts=prompts, speculation="auto", default=True)


ON = examined("hybrid", 1.42, 1.1, 2.0, default=True)
NGRAM = examined("ngram", 1.6, 1.5, 1.7)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([ON, NGRAM, of(1.53, 1.4, 1.9)], ("hybrid", "auto", True, "; ngram may do as well")),  # a quiet machine ...
        ([ON, NGRAM, of(1.1, 1.1, 1.1, prompts=1)],  # ... one on which there was no time, ...
         ("hybrid", "auto", True, "hybrid with 4 guesses is expected to be 1.42")),
        ([examined("hybrid", 0.8, 0.8, 0.8, prompts=1, default=True), NGRAM, of(1.1, 1.1, 1.1, prompts=1)],  # ... or less
         ("hybrid", "auto", False, "hybrid, which is used where no method is named, may be 1.10 times as fast as plain "
          "decoding (ngram may be faster); one prompt is too few")),
        ([examined("hybrid", 1.1, 0.9, 1.3, default=True), NGRAM, of(1.2, 0.8, 1.4)], ("ngram", "on", True, "ngram with")),
        ([ON, examined("hybrid", 1.2, 1.1, 1.3, speculation="auto", default=True)], ("hybrid", "auto", True, "")),
        ([ON, NGRAM], ("hybrid", "auto", True, "hybrid with 4 guesses is expected to be 1.42")),  # no time for auto
        ([examined("hybrid", 1.42, 1.35, 1.5, default=True), of(1.2, 1.1, 1.3)], ("hybrid", "on", True, "hybrid with 4")),
        ([examined("hybrid", 0.8, 0.7, 0.9, default=True), of(0.9, 0.8, 0.95)], ("none", "on", True, "no method pays")),
    ],
)  # fmt: skip
def test_only_what_is_ahead_for_certain_is_advised_in_place_of_the_default(
    found: list[Examined], said: tuple[str, str, bool, str]
) -> None:
    """On a busy machine it advised what had one good prompt, and on a quiet one something else."""
    advice = recommend(found)
    assert (advice.config["method"], advice.speculation, advice.is_sure) == said[:3]
    assert said[3] in advice.why
    assert ("num_speculative_tokens" in advice.config) == (said[1] == "on" and said[0] != "none")


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ([examined("a", 1.5, 1.4, 1.6), examined("b", 0.9, 0.8, 0.95)], []),  # one pays, the other never
        ([examined("a", 1.5, 1.4, 1.6), examined("b", 1.2, 1.1, 1.3)], []),  # ... or less
        ([examined("a", 1.5, 1.4, 1.6), examined("b", 1.4, 1.3, 1.5)], ["a", "b"]),
        ([examined("a", 1.2, 0.9, 1.6), examined("b", 0.8, 0.7, 0.9)], ["a"]),
        ([examined("a", 0.8, 0.7, 0.9)], []),
        ([examined("a", 1.5, 1.4, 1.6), examined("b", 0.2, 0.2, 0.2, prompts=1)], ["a", "b"]),  # nothing is known of it
    ],
)  # fmt: skip
def test_more_prompts_are_for_what_they_may_decide(found: list[Examined], left: list[str]) -> None:
    assert [one.method for one in undecided(found)] == left


def test_the_command_names_what_was_chosen() -> None:
    config = {"method": "hybrid", "model": "a b", "second": "draft_model", "num_speculative_tokens": 15}
    made = command_of("t", Advice(config, "auto", False, ""), 0.7, ["--weights", "int8"], chat=True)
    assert shlex.split(made) == [
        "foretell", "generate", "--target", "t", "--weights", "int8", "--method", "hybrid", "--draft", "a b",
        "--num-speculative-tokens", "15", "--speculative-config", '{"second": "draft_model"}', "--speculation", "auto",
        "--temperature", "0.7", "--chat", "MESSAGE",
    ]  # fmt: skip
    plain: Any = command_of("t", Advice({"method": "none"}, "on", True, ""), 0.0)
    assert plain == 'foretell generate --target t --method none "PROMPT"'
