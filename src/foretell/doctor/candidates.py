"""What could guess for a target: what is used by default first, then every method that is here and fits, and why the others
do not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.checkpoints.catalogue import CATALOGUE, pulled
from foretell.checkpoints.directories import resolve
from foretell.core.errors import ConfigError, ForetellError
from foretell.core.spec import method_words
from foretell.engine.config import METHODS, default_drafter
from foretell.heads import formats
from foretell.methods.draft_model.vocabulary.tli import differences
from foretell.methods.hybrid.config import SECONDS
from foretell.model.load import load_tokenizer
from foretell.model.target import ModelSpec
from foretell.model.trained import default_speculation

SAME = {"eagle2": "it guesses as eagle1 does, in a tree"}
"""Methods that are not tried, and why."""
DEPTH = 8
"""Guesses in a line that are tried, of methods that can make any number."""


@dataclass(frozen=True)
class Candidate:
    """A method to be tried."""

    method: str
    config: Mapping[str, Any]
    drafter: str | None  # the draft model or head; None: the method's own for this target
    speculation: str = "on"
    is_default: bool = False  # whether it is what is used where no method is named
    chosen: Mapping[str, Any] = field(default_factory=dict)  # keys of the configuration that a command must name, too
    words: str = ""  # by which it was asked for, with its options; empty: the name of its method

    @property
    def label(self) -> str:
        """For people."""
        name = self.words or f"{'auto:' if self.speculation == 'auto' else ''}{self.method}"
        return name if self.drafter is None else f"{name} ({self.drafter})"


def drafter_method(name: str) -> str:
    """The method of a draft model or head, by its files: the kind of a head, else draft_model. Raises ModelError where it
    is not there, ConfigError where foretell wrote the head and it cannot be read."""
    path = Path(resolve(name))
    try:
        return formats.detect(path).head.method
    except ForetellError as error:
        if formats.is_ours(path):
            raise ConfigError(str(error)) from error
        return "draft_model"


def candidates(
    spec: ModelSpec,
    tokenizer: Any = None,
    *,
    draft: str | None = None,
    methods: Sequence[str] | None = None,
    predictions: bool = False,
) -> tuple[list[Candidate], dict[str, str]]:
    """(what is tried, why the other methods are not).

    The method that is used where none is named comes first; methods that look their guesses up before those that compute
    them; last the first one as "auto" decides, which measures costs of its own. tokenizer: the target's. draft: a draft
    model or head; None: those that come with the target, and named models that have been pulled, are smaller and have the
    target's vocabulary. methods: only these, with options as
    ``core.spec.method_words`` reads them. predictions: whether prompts bring a guess of their answer.
    """
    words = methods or ()
    methods = None if methods is None else [str(method_words(text)[0]["method"]) for text in words]
    given = drafter_method(draft) if draft is not None else None
    default = given or str(default_speculation(spec.name)["method"])
    found: list[Candidate] = []
    left: dict[str, str] = {}
    for name, kind in METHODS.items():
        can = kind.capabilities
        if name == "none" or (methods is not None and name not in methods):
            continue
        if name in SAME and (methods is None or name not in methods):
            left[name] = SAME[name]
        elif can.needs_prediction and not predictions:
            left[name] = "it needs prompts with a guess of the answer"
        elif can.needs_head or can.needs_draft:
            made = list(_with_weights(name, spec, tokenizer, draft, given))
            if not made:
                what = "a draft model" if can.needs_draft else "a trained head"
                left[name] = f"it needs {what} for this target: give one by --draft"
            found += made
        else:
            found.append(Candidate(name, {"method": name, **_depth(name)}, None))
    if any(":" in text for text in words):
        return [made for text in words for one in found for made in _with_options(one, text)], left
    first = next((one for one in found if one.method == default), None)
    if first is None:
        return sorted(found, key=_order), left
    rest = sorted((one for one in found if one is not first), key=_order)
    named = {key: value for key, value in first.config.items() if key != "num_speculative_tokens"}
    auto = Candidate(first.method, named, first.drafter, "auto", is_default=True, chosen=first.chosen)
    asked = methods is None or methods == [default]
    return [replace(first, is_default=True), *rest, *([auto] if asked else [])], left


def _with_options(one: Candidate, text: str) -> Iterator[Candidate]:
    """The candidate with the options of ``METHOD[:OPTION]...``, where that is its method."""
    options, speculation = method_words(text)
    if options.pop("method") == one.method:
        chosen = {key: value for key, value in options.items() if key != "num_speculative_tokens"}
        config, chosen = {**one.config, **options}, {**one.chosen, **chosen}
        yield replace(one, config=config, chosen=chosen, speculation=speculation, words=text if ":" in text else "")


def _order(one: Candidate) -> bool:
    return not METHODS[one.method].capabilities.by_request


def _depth(name: str) -> dict[str, int]:
    """As deep as a method that draws is looked at, unless its own default is what it was made for."""
    kind = METHODS[name]
    own = {"num_speculative_tokens": DEPTH}
    return own if kind.capabilities.draws and name not in ("medusa", "dflash", "hybrid") else {}


def _with_weights(
    name: str, spec: ModelSpec, tokenizer: Any, draft: str | None, given: str | None
) -> Iterator[Candidate]:
    """A method by each draft model or head that it has here. given: the method of ``draft``."""
    part = METHODS[name]().trained.method
    if draft is not None:
        chosen = {}
        if name == "hybrid" and given in SECONDS and given != part:
            chosen = {"second": given}
        elif given != part:
            return
        yield Candidate(name, {"method": name, "model": draft, **chosen, **_depth(name)}, draft, chosen=chosen)
        return
    own = default_drafter(part, spec.name)
    if own is not None:
        yield Candidate(name, {"method": name, "model": own, **_depth(name)}, None)
    elif name == "draft_model":
        for other, model in CATALOGUE.items():
            if other == spec.name or pulled(other) is None or model.size >= 0.8 * spec.weight_bytes:
                continue
            if tokenizer is not None and differences(tokenizer.get_vocab(), load_tokenizer(other).get_vocab()) is None:
                yield Candidate(name, {"method": name, "model": other, **_depth(name)}, other)
