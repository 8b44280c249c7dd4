"""The methods of one target: loaded once for each set of weights, with draft models by name or in memory."""

import logging
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from foretell.core.errors import ConfigError
from foretell.draft.base import Method
from foretell.draft.config import Loader, MethodConfig, can_stop, check_stop
from foretell.engine.config import loaded, speculative_config
from foretell.engine.request.request import check_sizes, check_vocabulary
from foretell.engine.request.text import Tokenizer
from foretell.engine.speculation import Speculation, check_branching
from foretell.model.load import load_model, load_tokenizer
from foretell.model.target import CausalModel

logger = logging.getLogger(__name__)
MOST_METHODS, MOST_CHOICES = 64, 1024
"""Requests choose freely: so many are held, and the others are made for each request."""


class Methods:
    """Loaded methods by what they were loaded for, and the choices made of them: for ``Engine`` and ``Service`` alike."""

    def __init__(
        self,
        target: CausalModel,
        tokenizer: Tokenizer | None,
        given: CausalModel | None = None,
        given_tokenizer: Tokenizer | None = None,
        *,
        trusts_code: bool = False,
    ) -> None:
        """given: a draft model in memory, used for its name; given_tokenizer: the draft's tokenizer, where its vocabulary
        is another. trusts_code: see ``load_model``."""
        self.target, self.tokenizer = target, tokenizer
        self.given, self.given_tokenizer, self.trusts_code = given, given_tokenizer, trusts_code
        self._tokenizers: dict[str, Any] = {}
        self._methods: dict[tuple[Any, ...], Method] = {}
        self._choices: dict[MethodConfig, Speculation] = {}

    def held(self, config: MethodConfig) -> Method | None:
        """The method that is loaded for a configuration's weights, with an acceptance head if its shape needs one; None
        where there is none."""
        asks = config.proposal_shape.asks_acceptance
        mine, other = (self._methods.get((*config.weights, key)) for key in (asks, not asks))
        if mine is None and other is not None and can_stop(other, config.proposal_shape):
            return other
        return mine

    def method(self, config: MethodConfig) -> Method:
        """The method of a configuration, loaded where it is not held. Raises ConfigError, ModelError."""
        method = self.held(config)
        if method is None:
            method, longest = loaded(config, self.loader), self.target.spec.max_positions
            if method.max_positions is not None and method.max_positions < longest:
                logger.warning(
                    "%s was made for texts of %d tokens, and the target reads %d: longer ones are decoded without it",
                    getattr(config, "model", None) or method.name, method.max_positions, longest,
                )  # fmt: skip
            if len(self._methods) < MOST_METHODS:
                self.hold(config, method)
        return method

    def hold(self, config: MethodConfig, method: Method) -> None:
        """Use a loaded method for a configuration's weights."""
        self._methods[*config.weights, config.proposal_shape.asks_acceptance] = method

    def choice(self, config: MethodConfig) -> Speculation:
        """The method and verifier of a configuration. Raises ConfigError, ModelError."""
        found = self._choices.get(config)
        if found is None:
            method = self.method(config)
            check_stop(method, config.proposal_shape)
            check_branching(config, method, self.target.spec)
            found = Speculation(config, method, config.load_verifier(self.target))
            if len(self._choices) < MOST_CHOICES:
                self._choices[config] = found
        return found

    def forget(self) -> None:
        """Drop what methods have learned from earlier requests; weights and settings stay."""
        self._methods = {key: one.fresh() if one.capabilities.learns else one for key, one in self._methods.items()}
        self._choices = {key: one for key, one in self._choices.items() if not one.method.capabilities.learns}

    @property
    def loader(self) -> Loader:
        """What configurations load methods by."""
        return Loader(self.target, self.load, self.tokenizers)

    def tokenizers(self, name: str) -> tuple[Any, Any] | None:
        """The tokenizers of target and of a draft model by name or directory, or of the target twice by the target's own
        name; None where one is not known. Raises ModelError where a directory has none."""
        if self.tokenizer is None:
            return None
        in_memory = self.given is not None and name == self.given.spec.name
        if self.given_tokenizer is not None and (in_memory or self.given is None):
            return self.tokenizer, self.given_tokenizer
        if in_memory:
            return None
        if name == self.target.spec.name:
            return self.tokenizer, self.tokenizer
        if name not in self._tokenizers:
            self._tokenizers[name] = load_tokenizer(name, trust_remote_code=self.trusts_code)
        return self.tokenizer, self._tokenizers[name]

    def load(self, name: str, weights: str = "auto", *, checked: bool = True) -> CausalModel:
        """A draft model by name or directory, its vocabulary compared with the target's unless it is not to be checked.
        Raises ConfigError, ModelError.

        weights: see ``load_model``.
        """
        spec = self.target.spec
        tokenizers = self.tokenizers(name) if checked else None
        if tokenizers is not None:
            check_vocabulary(*tokenizers, target_name=spec.name, draft_name=name)
        if self.given is not None and name == self.given.spec.name:
            if checked and tokenizers is None:
                check_sizes(spec, self.given.spec)
            return self.given
        dtype = str(spec.dtype).removeprefix("torch.")
        implementation = "transformers" if spec.implementation == "transformers" else "auto"
        found = load_model(
            name, dtype=dtype, device=str(spec.device), implementation=implementation, weights=weights,
            trust_remote_code=self.trusts_code,
        )  # fmt: skip
        if checked and tokenizers is None:
            check_sizes(spec, found.spec)
        return found


def with_named_draft(
    speculative: MethodConfig | Mapping[str, Any] | str | None, draft: str | PathLike[str] | None
) -> MethodConfig:
    """A configuration whose key "model" is the draft, where one is given. Raises ConfigError where it takes none."""
    if draft is None:
        return speculative_config(speculative)
    config = speculative_config("draft_model" if speculative is None else speculative)
    if "model" not in config.key_names():
        raise ConfigError(f"draft = {fspath(draft)!r} is for methods with weights, and {config.method!r} has none")
    given, name = getattr(config, "model", None), fspath(draft)
    if given not in (None, name):
        raise ConfigError(f"the draft is given twice, as draft = {name!r} and as model = {given!r}: drop one")
    return speculative_config({**config.resolved(), "model": name})
