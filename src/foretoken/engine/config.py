"""Configuration: one frozen dataclass a method, read from the JSON that ``--speculative-config`` takes.

Key names are those that vLLM's users know. An unknown key is refused with the nearest known one.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.draft.base import Method
from foretoken.draft.model import DraftModel
from foretoken.draft.ngram import Ngram
from foretoken.draft.none import NoMethod
from foretoken.draft.prediction import Prediction
from foretoken.draft.recycling import Recycling
from foretoken.draft.shape import SpecDec
from foretoken.draft.suffix import Suffix, SuffixOptions
from foretoken.engine.learned import LEARNED
from foretoken.engine.method import Loader, MethodConfig
from foretoken.errors import ConfigError, nearest
from foretoken.heads.load import load_acceptance


@dataclass(frozen=True)
class NoneConfig(MethodConfig):
    """Plain decoding."""

    method = NoMethod.name
    capabilities = NoMethod.capabilities

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return NoMethod()


@dataclass(frozen=True)
class DraftModelConfig(MethodConfig):
    """A smaller model of the same vocabulary."""

    method = DraftModel.name
    capabilities = DraftModel.capabilities

    model: str | None = None  # hub id, directory, or None for the bundled draft (of the bundled target alone)
    acceptance: str | None = None  # directory of the head that shape "specdec" asks; None: the bundled draft's

    def load(self, loader: Loader) -> Method:
        """Load the draft model, and its acceptance head where the shape asks it."""
        draft = loader.draft(self.model or "bundled/draft")
        if not isinstance(self.proposal_shape, SpecDec):
            return DraftModel(draft)
        if self.acceptance is None and self.model not in (None, "bundled/draft"):
            raise ConfigError(
                f"shape 'specdec' asks an acceptance head, and none is given for the draft {self.model}: train one with "
                "'foretoken train acceptance' and give its directory as 'acceptance', or choose shape 'adaptive'"
            )
        return DraftModel(draft, load_acceptance(self.acceptance or "bundled/acceptance", draft.spec))


@dataclass(frozen=True)
class NgramConfig(MethodConfig):
    """Prompt lookup."""

    method = Ngram.name
    capabilities = Ngram.capabilities

    prompt_lookup_min: int = 2  # one matching token is chance: it costs a wider pass and rarely hits
    prompt_lookup_max: int = 5

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Ngram(min_ngram=self.prompt_lookup_min, max_ngram=self.prompt_lookup_max)

    def __post_init__(self) -> None:
        """Refuse bounds that cannot be."""
        super().__post_init__()
        Ngram(min_ngram=self.prompt_lookup_min, max_ngram=self.prompt_lookup_max)


@dataclass(frozen=True)
class PredictionConfig(MethodConfig):
    """The caller's guess of the output."""

    method = Prediction.name
    capabilities = Prediction.capabilities

    num_speculative_tokens: int = 7

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Prediction()


@dataclass(frozen=True)
class SuffixConfig(MethodConfig):
    """Suffix automata of the text and of earlier outputs."""

    method = Suffix.name
    capabilities = Suffix.capabilities

    num_speculative_tokens: int = 15  # few matches are long enough to use them all, and those are nearly certain
    suffix_decoding_min_match: int = 1
    suffix_decoding_max_match: int = 64
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_max_spec_offset: float = 0.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = 65536

    @property
    def options(self) -> SuffixOptions:
        """What the method reads. Raises ConfigError."""
        prefix = "suffix_decoding_"
        given = {name: getattr(self, prefix + name) for name in SuffixOptions.__dataclass_fields__}
        return SuffixOptions(**given)

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Suffix(self.options)

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        super().__post_init__()
        _ = self.options


@dataclass(frozen=True)
class RecyclingConfig(MethodConfig):
    """The target's own candidates of earlier passes."""

    method = Recycling.name
    capabilities = Recycling.capabilities

    num_candidates: int = Recycling.capabilities.candidates

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Recycling(num_candidates=self.num_candidates)

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        super().__post_init__()
        Recycling(num_candidates=self.num_candidates)


_ALL: tuple[type[MethodConfig], ...] = (
    NoneConfig, DraftModelConfig, *LEARNED, NgramConfig, PredictionConfig, SuffixConfig, RecyclingConfig,
)  # fmt: skip
METHODS: dict[str, type[MethodConfig]] = {config.method: config for config in _ALL}
"""Names, as the CLI and JSON configurations spell them, to configurations."""


def speculative_config(given: Mapping[str, Any] | str | MethodConfig | None) -> MethodConfig:
    """A method's configuration from a method's name, a mapping, or JSON text. Raises ConfigError."""
    if isinstance(given, MethodConfig):
        return given
    if given is None:
        return NoneConfig()
    if isinstance(given, str):
        if not given.lstrip().startswith("{"):
            return _config_class(given)()
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative config is not JSON: {error}") from None
        assert isinstance(given, Mapping)
    options = dict(given)
    name = options.pop("method", None)
    if name is None:
        name = DraftModel.name if options.get("model") else NoMethod.name
    kind = _config_class(name)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r} for method {name!r}{nearest(key, known)}")
        if value is None and known[key].default is None:
            continue
        options[key] = _value(key, value, known[key].type)
    return kind(**options)


_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _value(key: str, value: object, kind: object) -> object:
    """value as a field of this kind holds it: a whole number may stand for a number. Raises ConfigError."""
    expected = next((known for known in _KINDS if known is kind), str)
    if expected is float and type(value) is int:
        value = float(value)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ConfigError(f"{key} = {value!r} must be {_KINDS[expected]}")
    return value


def _config_class(name: object) -> type[MethodConfig]:
    if not isinstance(name, str) or name not in METHODS:
        raise ConfigError(f"method = {name!r} is not a method{nearest(str(name), METHODS)}")
    return METHODS[name]
