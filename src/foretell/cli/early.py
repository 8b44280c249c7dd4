"""What can be known of configurations without torch: a wrong one is refused at once, in the words of the registries.

Names of options and their kinds are read from ``methods.json``, which ``python -m foretell.cli.commands.methods`` makes of
the registries; ranges of a verifier's or a method's options are left to these, as is all of what packages add.
"""

import json
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretell.core import builtin
from foretell.core.registry import check_draws, check_method, check_number, check_spec
from foretell.core.settings import check_keys, value_of
from foretell.core.spec import method_words, parse_spec

FILE = Path(__file__).with_name("methods.json")
KINDS: dict[str, Any] = {
    str(kind).removeprefix("<class '").removesuffix("'>"): kind
    for kind in (bool, int, float, str, int | None, float | None, str | None, tuple[int, ...], tuple[float, ...])
}
"""Types of options, by their names in the file. Values of others are not checked."""


@cache
def known() -> dict[str, Any]:
    """The file's content."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def check_verifier(text: str) -> None:
    """Raise ConfigError for a verifier that is unknown, or an option that it does not have."""
    check_spec(text, builtin.VERIFIERS, "verifier")
    name = text.strip().split("/")[0]
    options = known()["options"]["verifiers"].get(name)
    if options is not None and "/" in text:
        fields = [(key, type(default), field(default=default)) for key, default in options.items()]
        parse_spec(text, {name: make_dataclass(name, fields, frozen=True)()}, "verifier")


def check_shape(text: str) -> None:
    """Raise ConfigError for a shape that is unknown, or an option that it does not have or take."""
    check_spec(text, builtin.SHAPES, "shape")
    if "/" in text:
        from foretell.draft.shapes import SHAPES

        parse_spec(text, SHAPES, "shape")


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a speculative configuration, perhaps without a method, that none can be made of."""
    name = config.get("method")
    if name is not None:
        check_method(name, builtin.CONFIGS)
        check_options(known()["options"]["methods"].get(name), config, f"for method {name!r}", but=("method", "model"))
    if type(config.get("num_speculative_tokens")) is int:
        check_number(config["num_speculative_tokens"])
    checks = {"verify": check_verifier, "shape": check_shape, "draws": check_draws}
    for key, check in checks.items():
        if isinstance(config.get(key), str):
            check(config[key])


def check_options(
    kinds: Mapping[str, str] | None, given: Mapping[str, Any], where: str, *, but: tuple[str, ...] = ()
) -> None:
    """Raise ConfigError for an option that is unknown or of another kind. kinds: None: of a package, not known here; but:
    keys that are not looked at."""
    asked = {key: value for key, value in given.items() if key not in but}
    if kinds is None:
        return
    check_keys(asked, kinds, where)
    for key, value in asked.items():
        if kinds[key] in KINDS:
            value_of(value, KINDS[kinds[key]], key)


def check_methods(text: str) -> None:
    """Raise ConfigError where one of the methods of a list, as ``bench`` reads it, cannot be."""
    for name in filter(str.strip, text.split(",")):
        check_config(method_words(name)[0])
