"""What is recommended, by the intervals of what was measured, and how that is said."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.bench.stats import Interval, best_of
from foretell.doctor.examine import Examined
from foretell.doctor.predict import SpeedPrediction

MOST_SPREAD = 100.0
"""An interval whose ends lie further apart says nothing that a sentence could use."""


@dataclass(frozen=True)
class Advice:
    """What to run."""

    config: dict[str, Any]  # of the speculative configuration
    speculation: str  # "on" or "auto"
    is_sure: bool  # False: the intervals do not decide, and a machine that was busy must not either
    why: str  # one sentence


@dataclass(frozen=True)
class Standing:
    """One method beside the others."""

    one: Examined
    best: SpeedPrediction
    value: Interval  # widened for the best of all that were tried


def standings(found: Sequence[Examined]) -> list[Standing]:
    """Of all methods with a prediction, in their order."""
    known = [(one, one.best) for one in found if one.best is not None]
    return [Standing(one, best, best_of(best.speedup, len(known), one.num_prompts)) for one, best in known]


def undecided(found: Sequence[Examined]) -> list[Examined]:
    """The methods of which more prompts could show that they are the one to use: all others cannot be the fastest, or
    lose for certain. One alone whose whole interval lies above 1 needs no more."""
    known = standings(found)
    pays = max((each.value.low for each in known if not each.value.is_point), default=0.0)
    left = [each for each in known if each.value.is_point or each.value.high > max(1.0, pays)]
    decided = len(left) == 1 and not left[0].value.is_point and left[0].value.low > 1.0
    return [] if decided else [each.one for each in left]


def recommend(found: Sequence[Examined]) -> Advice:
    """What is used where no method is named, unless another method is ahead of it for certain: its whole interval, widened
    for the best of all that were tried, is above plain decoding, and neither figure lies in the other's interval. A busy
    machine widens intervals, so that its advice is the idle one's. Where the default was not tried: the fastest of those
    whose whole interval is above plain decoding, or where there is none the one that may be fastest. What is not certain
    decides itself before every step whether to guess. Plain decoding only where every interval lies below 1."""
    known = standings(found)
    if not known:
        return Advice({"method": "none"}, "on", False, "nothing could be measured")
    paying = [each for each in known if each.value.low > 1.0 and not each.value.is_point]
    own = [each for each in known if each.one.is_default]
    ahead = [each for each in paying if not own or _is_ahead(each, [one for one in own if one is not each])]
    sure = ahead or [each for each in paying if each in own]
    if sure:
        best = max(sure, key=lambda each: each.value.value)
        return _sure(known, best, paying, speculation=best.one.speculation if ahead else "auto")
    open_ones = [each for each in known if each.value.is_point or each.value.high >= 1.0]
    best = max(open_ones or known, key=lambda each: each.value.value)
    if not open_ones:
        why = f"no method pays here: the best, {best.one.label}, is {_times(best.value)}"
        return Advice({"method": "none"}, "on", True, why)
    best = max(own[::-1], key=lambda each: each.one.num_prompts, default=best)
    name, count = best.one.label, best.one.num_prompts
    name += ", which is used where no method is named," if own else ""
    prompts = "one prompt is" if count == 1 else f"{count} prompts are"
    may = "may be" if best.value.value > 1.0 else "is perhaps no faster:"
    others = f" ({_names(paying)} may be faster)" if paying else ""
    why = (
        f"{name} {may} {_times(best.value)}{others}; {prompts} too few to be sure, so let it step aside where guessing "
    )
    return Advice(_config(best, "auto"), "auto", False, f"{why}does not pay")


def _is_ahead(one: Standing, others: Sequence[Standing]) -> bool:
    """Whether one is faster than others beyond their intervals and its own."""
    mine, its = one.value, [other.value for other in others]
    return bool(its) and all(not it.is_point and mine.low > it.value and mine.value > it.high for it in its)


def _sure(known: Sequence[Standing], best: Standing, paying: Sequence[Standing], *, speculation: str) -> Advice:
    near = [each for each in paying if each.one.method != best.one.method and each.value.high >= best.value.low]
    near_by = f"; {_names(near)} may do as well" if near else ""
    of = f", as the best of {len(known)}" if len(known) > 1 else ""
    with_ = "" if best.one.speculation == "auto" else f" with {best.best.num_speculative_tokens} guesses"
    why = f"{best.one.label}{with_} is expected to be {_times(best.value, of)}{near_by}"
    return Advice(_config(best, speculation), speculation, True, why)


def _names(those: Sequence[Standing]) -> str:
    return ", ".join(each.one.label for each in those)


def _times(value: Interval, more: str = "") -> str:
    is_known = not value.is_point and value.high < MOST_SPREAD * value.low
    bounds = f" ({value.low:.2f} to {value.high:.2f}{more})" if is_known else ""
    return f"{value.value:.2f} times as fast as plain decoding{bounds}"


def _config(each: Standing, speculation: str) -> dict[str, Any]:
    """Of a command: with "auto" without a number of guesses, which it chooses itself."""
    one = each.one
    drafter = {} if one.drafter is None else {"model": one.drafter}
    count = {} if speculation == "auto" else {"num_speculative_tokens": each.best.num_speculative_tokens}
    return {"method": one.method, **drafter, **one.config, **count}


def command_of(
    target: str, advice: Advice, temperature: float, flags: Sequence[str] = (), *, chat: bool = False
) -> str:
    """The command line that generates so. flags: of how the target runs. chat: the prompt is a message."""
    config: Mapping[str, Any] = advice.config
    words = ["foretell", "generate", "--target", target, *flags, "--method", config["method"]]
    if config.get("model") is not None:
        words += ["--draft", str(config["model"])]
    if "num_speculative_tokens" in config:
        words += ["--num-speculative-tokens", str(config["num_speculative_tokens"])]
    rest = {key: config[key] for key in config if key not in ("method", "model", "num_speculative_tokens")}
    if rest:
        words += ["--speculative-config", json.dumps(rest)]
    if advice.speculation == "auto":
        words += ["--speculation", "auto"]
    if temperature:
        words += ["--temperature", f"{temperature:g}"]
    if chat:
        words.append("--chat")
    return " ".join(shlex.quote(word) for word in words) + (' "MESSAGE"' if chat else ' "PROMPT"')
