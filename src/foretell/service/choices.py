"""The methods and verifiers that requests of one service may use: loaded ones, and those that need no weights."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.core.errors import ConfigError
from foretell.core.settings import fitted
from foretell.draft.config import MethodConfig
from foretell.draft.none import NoneConfig
from foretell.engine.config import METHODS, speculative_config
from foretell.engine.engine import Engine
from foretell.engine.speculation import Speculation, check_together

MARGIN = 64
"""Cache slots of a row beyond its longest text, for the guesses of a step."""


class Choices:
    """What requests may choose: the engine's method, further ones that were loaded, and those that need no weights."""

    def __init__(self, engine: Engine, also: Sequence[MethodConfig], *, off: bool) -> None:
        """engine: holds the default method. also: further methods to load. off: load nothing and never speculate.

        Raises ConfigError, ModelError.
        """
        self.engine, self.off = engine, off
        self.plain = self.of(NoneConfig())
        self.default, self.also = self.plain, []
        if off:
            return
        self.default = self.of(engine.speculative, load=True)
        self.also = [self.of(config, load=True) for config in also]
        exits = [choice.method.exit_layer for choice in (self.default, *self.also)]
        check_together([choice.method for choice in (self.default, *self.also)], exits)

    @property
    def guessing(self) -> list[Speculation]:
        """The default method and the further ones, without ``none``."""
        return [choice for choice in (self.default, *self.also) if choice is not self.plain]

    @property
    def weightless(self) -> list[Speculation]:
        """Methods that load nothing, with their own defaults: a request may ask for them though the service was not started
        with them."""
        started = {self.default.config.method, *(choice.config.method for choice in self.also)}
        return [
            self.of(kind())
            for name, kind in METHODS.items()
            if kind.capabilities.by_request and kind.guesses and name not in started and not self.off
        ]

    def method(self, given: Mapping[str, Any] | str | None) -> MethodConfig:
        """A request's speculation from vLLM-named keys, within what is loaded; "none" switches it off. Keys that are not
        given are those of the service's own choice, where the method is the same. Raises ConfigError."""
        if given is None:
            return self.default.config
        keys = {"method": given} if isinstance(given, str) else dict(given)
        mine = next(
            (
                one.config
                for one in (self.default, *self.also)
                if one.config.method == keys.get("method", one.config.method)
            ),
            None,
        )
        if mine is not None and mine.guesses:
            keys = {**mine.resolved(), **fitted(keys, mine.ranges, mine)}
        return self.of(speculative_config(keys)).config

    @property
    def names(self) -> list[str]:
        """Names of the methods that a request may ask for."""
        loaded = [choice.config.method for choice in (self.default, *self.also)]
        return sorted({*loaded, *(name for name, kind in METHODS.items() if kind.capabilities.by_request)})

    @property
    def settings(self) -> dict[str, str]:
        """The settings of each method that was loaded, by name, as text."""
        return {one.config.method: json.dumps(one.config.resolved(), default=str) for one in self.guessing}

    def of(self, config: MethodConfig, *, load: bool = False) -> Speculation:
        """The choice for a configuration. Weights are loaded only with ``load``; otherwise they must be loaded already.
        Raises ConfigError."""
        if config.guesses and self.off:
            raise ConfigError("speculation is off in this service: start it with --speculation auto or on")
        if max(config.max_nodes, config.max_read) > MARGIN and config.guesses:
            raise ConfigError(
                f"shape {config.branches or config.shape!r} has more than {MARGIN - 1} guesses, the most that a service "
                "takes"
            )
        if not load and not config.capabilities.by_request and not self.engine.holds(config):
            raise ConfigError(
                f"method {config.method!r} with these settings is not loaded here: choose one of {', '.join(self.names)}, "
                "with the weights that the service was started with"
            )
        return self.engine.choice(config)
