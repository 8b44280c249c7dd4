"""Everything a user of foretell may catch.

::

    ForetellError                     every error that the caller can mend
    ├── ConfigError                    an invalid option, method or combination (also a ValueError)
    ├── ModelError                     a model that cannot be loaded or cannot be decoded by this engine
    │   └── VocabularyMismatchError    target and drafter have different vocabularies
    ├── PromptError                    a prompt that is empty or does not fit the context (also a ValueError)
    ├── DrafterError                   a drafter that failed, where that is to end the request ("drafter_errors")
    ├── VerifierError                  a verifier of a package that broke its contract; the message names it
    ├── CapacityError                  more slots or rows requested than allocated
    │   └── QueueFullError             a service whose queue is full: try again later
    ├── EngineError                    the engine failed in a pass of this request; others go on
    ├── ServiceClosedError             a service that drains or has stopped
    └── TrainError                     a training that cannot continue: loss not finite, disk full

Defects of the library raise AssertionError and RuntimeError.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from typing import Any


class ForetellError(Exception):
    """An error that the caller can mend; its message says what was given, what was expected, and how to mend it."""


class ConfigError(ForetellError, ValueError):
    """An invalid option, method or combination of them."""


class ModelError(ForetellError):
    """A model that cannot be loaded, or that this engine cannot decode."""


class VocabularyMismatchError(ModelError):
    """Target and drafter do not share one vocabulary."""


class PromptError(ForetellError, ValueError):
    """A prompt that is empty, or longer than the model's context."""


class DrafterError(ForetellError):
    """A drafter that failed, of an engine that is not to go on without its guesses. Its cause: the drafter's own error."""


class VerifierError(ForetellError):
    """A verifier of a package, or of the user's own, that raised or returned what is no distribution. Its cause: the
    verifier's own error, where it raised."""


class CapacityError(ForetellError):
    """More cache slots or rows were requested than allocated."""


class QueueFullError(CapacityError):
    """A service whose queue is full. ``retry_after_s`` is when a place is likely to be free."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(ForetellError):
    """The engine of a service failed while it worked on this request, which may be sent again; or so often that the service
    has ended. The log has the engine's own error."""


class UnreadableError(EngineError):
    """Weights that are read while a model runs, and cannot be read any more."""


class ServiceClosedError(ForetellError):
    """A request to a service that is draining, has stopped or failed, or has not started."""


class TrainError(ForetellError):
    """A training that cannot continue: the loss is not finite, or the disk is full."""


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint naming the nearest known word, e.g. ``; did you mean 'ngram'?``, and all of them where none is near."""
    known = sorted(words)
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def require(good: bool, name: str, value: object, expected: str, kind: type[ForetellError] = ConfigError) -> None:
    """Raise an error of this kind unless good."""
    if not good:
        raise kind(f"{name} = {value!r} must be {expected}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError where a setting is none of its choices."""
    require(value in choices, name, value, f"one of {', '.join(choices)}{nearest(value, choices)}")


Checks = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Of fields by name, whether a value is good, and what is expected, in words."""


def between(least: float, most: float) -> tuple[Callable[[Any], bool], str]:
    """A value of ``Checks``: a number within these bounds."""
    return lambda value: bool(least <= value <= most), f"between {least} and {most}"


def check_fields(settings: object, checks: Checks) -> None:
    """Raise ConfigError for the first field that fails its check; floats must be finite, too."""
    for name, (is_good, expected) in checks.items():
        value = getattr(settings, name)
        is_finite = not isinstance(value, float) or isfinite(value)
        finite = "" if is_finite or "finite" in expected else "finite and "
        require(is_finite and is_good(value), name, value, f"{finite}{expected}")


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
