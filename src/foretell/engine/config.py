"""A method's configuration by name, or read from the JSON that ``--speculative-config`` takes.

Key names are those that vLLM's users know. An unknown key is refused with the nearest known one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, get_origin, get_type_hints

from foretell import bundled
from foretell.checkpoints.catalogue import BUNDLED
from foretell.core import builtin
from foretell.core.errors import ConfigError, DrafterError, ForetellError, ModelError
from foretell.core.jsontext import JSONDecodeError, parse_json
from foretell.core.registry import Registry, UnusableError, check_method
from foretell.core.settings import fitted, read
from foretell.draft.base import Capabilities, Method
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.none import NoneConfig
from foretell.methods.draft_model.config import DraftModelConfig
from foretell.model.trained import default_draft


def _method(name: str, found: Any) -> type[MethodConfig]:
    """A class of configurations. Raises UnusableError."""
    if not (isinstance(found, type) and issubclass(found, MethodConfig)):
        raise UnusableError(f"it is {found!r}; expected a subclass of foretell.MethodConfig")
    if not isinstance(getattr(found, "capabilities", None), Capabilities):
        raise UnusableError("it declares no capabilities; expected a foretell.Capabilities")
    if getattr(found, "method", None) != name:
        raise UnusableError(
            f"its attribute 'method' is {getattr(found, 'method', None)!r}: it must equal the entry point's name"
        )
    if found.__abstractmethods__:
        raise UnusableError(f"it does not define {', '.join(sorted(found.__abstractmethods__))}")
    for key, kind in get_type_hints(found).items():
        if key not in found.key_names() and get_origin(kind) is not ClassVar:
            raise UnusableError(f"its key {key!r} is not a field: decorate the class with @dataclass(frozen=True)")
        if key in found.key_names() and kind not in _KINDS:
            raise UnusableError(f"the type of its key {key!r} must be bool, int, float, str or 'str | None'")
    try:
        found()
    except Exception as error:
        raise UnusableError(f"its defaults do not make a configuration ({type(error).__name__}: {error})") from error
    return found


METHODS: Registry[type[MethodConfig]] = Registry("method", builtin.CONFIGS, "foretell.methods", _method)
"""Names, as the CLI and JSON configurations spell them, to configurations. Those of packages come from entry points of the
group "foretell.methods": a subclass of MethodConfig."""


def loaded(config: MethodConfig, loader: Loader) -> Method:
    """``config.load``. Whatever a package's raises is one error that names it. Raises ForetellError."""
    try:
        return config.load(loader)
    except ModelError as error:
        name, _, reason = str(error).partition(": ")
        if not name.startswith("bundled/") or name in dataclasses.asdict(config).values():
            raise
        raise ModelError(  # of weights that nobody named
            f"no weights are named for method {config.method!r}, and those that come with foretell do not fit: {reason}; "
            "or name some (--draft; in Python the key 'model'), or choose a method without weights, e.g. ngram"
        ) from error
    except ForetellError:
        raise
    except Exception as error:
        if type(config).__module__.startswith("foretell."):
            raise
        what = f"{type(error).__name__}: {error}"
        raise DrafterError(
            f"{METHODS.called(config.method)} ({type(config).__module__}) cannot be loaded ({what})"
        ) from error


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
            given = parse_json(given)
        except JSONDecodeError as error:
            raise ConfigError(f"speculative config is not JSON: {error}") from None
        assert isinstance(given, Mapping)
    options = dict(given)
    name = options.pop("method", None)
    if name is None:
        name = DraftModelConfig.method if options.get("model") else NoneConfig.method
    kind = _config_class(name)
    return read(kind, fitted(options, kind.ranges, kind), f"for method {name!r}")


def default_drafter(method: str, target: str) -> str | None:
    """The draft model or head that a method loads for a named target where none is given; None where none is here."""
    trained = default_draft(target, method)
    if trained is not None or target not in BUNDLED:
        return trained
    name = "draft" if method == "draft_model" else method
    try:
        is_here = bundled.path(name).is_dir()  # wheels leave some out
    except KeyError:
        is_here = False
    return f"bundled/{name}" if is_here else None


def with_draft(config: MethodConfig, target: str) -> MethodConfig:
    """The configuration with the draft model or head that its method takes for a named target, where it names none."""
    if getattr(config, "model", "none needed") is not None:
        return config
    draft = default_draft(target, config.trained.method)
    return config if draft is None else speculative_config({**config.resolved(), "model": draft})


_KINDS = (bool, int, float, str, str | None)
"""Kinds of keys that a method may have."""


def _config_class(name: object) -> type[MethodConfig]:
    check_method(name, builtin.CONFIGS)
    assert isinstance(name, str)
    return METHODS[name]
