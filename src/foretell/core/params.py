"""How a request is sampled."""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.core.errors import Checks, ConfigError, check_fields, require
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.places import keyed
from foretell.core.settings import fitted, setting, settle

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""A user's own rule: (ids int64 [L] of prefix and path, logits float [V]) -> logits [V]. It must be pure: it is called
for nodes that are never emitted, in any order."""

FORMATS = ("json_schema", "regex", "grammar", "choice")
"""Fields of which one at most says what the text must look like."""

MAX_SEED = 2**53 - 1
"""The largest seed that is drawn, or derived for a text of a user's: readers of JSON such as JavaScript hold no larger
number exactly, and a seed that is sent back must give the same text. Users may give any."""

ALIKE, MOST_ALIKE = 0.4, 4
"""Temperatures above 0 that are alike: below ALIKE, below 2 ALIKE, ... up to all above MOST_ALIKE of them."""


def expected_of(processor: LogitsProcessor | None, ids: Sequence[int]) -> Sequence[int]:
    """Tokens that a processor expects after a text, as its method ``expected(ids)`` says: what it leaves no choice about,
    as guesses that the target checks. None of one without such a method."""
    expected = getattr(processor, "expected", None)
    return () if expected is None else tuple(expected(ids))


def fresh_seed() -> int:
    """A random seed in [0, ``MAX_SEED``], for who gives none."""
    return secrets.randbits(MAX_SEED.bit_length())


def check_speculation(value: str) -> None:
    """Raise ConfigError for what is no speculation of an engine."""
    if value not in ("on", "auto"):
        raise ConfigError(f"speculation = {value!r} must be 'on' or 'auto'; for plain decoding give method 'none'")


HEATS = 2 + MOST_ALIKE
"""How many numbers ``heat_of`` has."""


def heat_of(temperature: float) -> int:
    """A number for temperatures that are alike, 0 for greedy text: it repeats itself far more than text that is drawn, and
    guesses of it are kept more often. What is learned of guesses is learned by this."""
    return 0 if temperature == 0 else 1 + int(min(temperature / ALIKE, MOST_ALIKE))


@keyed
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Every row of a batch has its own."""

    temperature: float = setting(1.0, "0 is greedy, ties to the lowest id.", envvar="FORETELL_TEMPERATURE")
    top_k: int = setting(0, "Keep the k likeliest tokens, and those that tie with the k-th. 0: off.")
    top_p: float = setting(1.0, "Keep the likeliest tokens of this mass, and those that tie with the last. 1: off.")
    min_p: float = setting(0.0, "Drop tokens below this share of the likeliest one's probability. 0: off.")
    repetition_penalty: float = setting(
        1.0, "Over prompt and output: logits are divided by it where positive, multiplied where negative. 1: off."
    )
    presence_penalty: float = setting(0.0, "Over the output: subtracted once from each token that was written.")
    frequency_penalty: float = setting(0.0, "Over the output: subtracted for each time that a token was written.")
    logit_bias: Mapping[int, float] = setting(
        dict, "Token ids and what is added to their logits, e.g. '{\"42\": -5}'.", metavar="JSON"
    )
    banned_token_ids: Sequence[int] = ()
    min_new_tokens: int = setting(0, "No end token and no stop text before that many.")
    max_new_tokens: int = setting(128, "The most tokens to write.", envvar="FORETELL_MAX_NEW_TOKENS")
    stop: Sequence[str] = setting((), "Stop before this text; may be repeated.")  # a text, or several
    stop_token_ids: Sequence[int] = ()  # further end tokens
    ignore_eos: bool = setting(False, "Continue after the model's end token.")
    seed: int | None = setting(
        None,
        "The same seed gives the same text.",
        envvar="FORETELL_SEED",
        default_text="a fresh one, shown in the figures",
    )
    logits_processor: LogitsProcessor | None = None  # its method expected(ids), where it has one: see ``expected_of``
    logprobs: int | None = setting(
        None, "Log probabilities of every token, and of that many of the likeliest beside it (0: its own alone).", min=0
    )
    # What the text must look like; at most one of the four, enforced at every token by the package llguidance. A text that
    # max_new_tokens ends is the beginning of such a text. A schema, or JSON text of one; of a pydantic model give
    # Model.model_json_schema().
    json_schema: Mapping[str, Any] | bool | str | None = setting(None, "The text is JSON of this schema.")
    regex: str | None = setting(None, "The whole text matches this regular expression (Rust's syntax).")
    grammar: str | None = setting(None, "The text is of this grammar: Lark in llguidance's dialect, or GBNF.")
    choice: Sequence[str] | None = setting(None, "The text is one of these; may be repeated.")
    lenient_schema: bool = setting(
        False, "Leave out what of a schema cannot be enforced, and name it, rather than refuse the schema."
    )

    def __post_init__(self) -> None:
        """Refuse invalid values, each with one clear ConfigError. Lists become tuples."""
        settle(self)
        check_fields(self, _CHECKS)
        between = f"between 0 and max_new_tokens = {self.max_new_tokens}"
        require(0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", self.min_new_tokens, between)
        self._check_format()

    def _check_format(self) -> None:
        asked = [name for name in FORMATS if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ConfigError(f"{asked[0]} and {asked[1]} both say what the text must look like: give one")
        if not isinstance(self.json_schema, (Mapping, bool, str, type(None))):
            raise ConfigError(
                f"json_schema = {self.json_schema!r:.80} must be a JSON schema: a mapping, true or false, or JSON text of "
                "one; of a pydantic model give Model.model_json_schema()"
            )
        if isinstance(self.json_schema, str):
            object.__setattr__(self, "json_schema", schema_of(self.json_schema, "json_schema"))
        if self.lenient_schema and self.json_schema is None:
            raise ConfigError("lenient_schema is of json_schema, which was not given: drop it, or give json_schema")

    @property
    def heat(self) -> int:
        """``heat_of`` the temperature; 0 where one token is kept."""
        return 0 if self.top_k == 1 else heat_of(self.temperature)

    @property
    def reads_history(self) -> bool:
        """Whether the probabilities depend on more than the last logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_new_tokens > 0
            or self.logits_processor is not None
        )


_CHECKS: Checks = {
    "temperature": (lambda value: value >= 0, "at least 0"),
    "top_k": (lambda value: value >= 0, "0 (off) or a positive number"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda value: value > 0, "positive"),
    "presence_penalty": (lambda value: True, "finite"),
    "frequency_penalty": (lambda value: True, "finite"),
    "max_new_tokens": (lambda value: value >= 1, "at least 1"),
    "logits_processor": (
        lambda value: value is None or callable(value),
        "a function (ids [L], logits [V]) -> [V], or None",
    ),
    "logprobs": (lambda value: value is None or value >= 0, "at least 0, or None (off)"),
    "choice": (lambda value: value is None or len(value) > 0, "a list of at least one text"),
    "stop": (all, "texts that are not empty"),
    "logit_bias": (lambda value: not any(map(math.isnan, value.values())), "not NaN"),
}


def schema_of(text: str, field: str) -> Mapping[str, Any] | bool:
    """A JSON schema from its text. field: in messages. Raises ConfigError."""
    try:
        schema = parse_json(text)
    except JSONDecodeError as error:
        raise ConfigError(f"{field}: the text is not JSON ({error})") from None
    if not isinstance(schema, (dict, bool)):
        raise ConfigError(f"{field}: a JSON schema is an object, true or false")
    return schema


def params_of(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of the fields that were given: with min_new_tokens alone, as many tokens may be written. Raises
    ConfigError."""
    return SamplingParams(**fitted(given, [("min_new_tokens", "max_new_tokens")], SamplingParams))
