"""What could guess for a target: every method that is here and fits, and why the others do not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell import bundled as travelling
from foretell.core.errors import ForetellError
from foretell.engine.config import METHODS
from foretell.methods.common import formats
from foretell.model.catalogue import BUNDLED, CATALOGUE, pulled
from foretell.model.checkpoint import resolve
from foretell.model.target import ModelSpec

BUNDLED_DRAFTERS = {*travelling.HEADS, "draft_model", "eagle2"}
"""Methods that the bundled target has a draft model or head for; eagle2 has eagle1's."""
SAME = {"eagle2": "it guesses as eagle1 does, in a tree"}
"""Methods that are not tried, and why."""
DEPTH = 8
"""Guesses in a line that are tried, of methods that can make any number."""


@dataclass(frozen=True)
class Candidate:
    """A method to be tried."""

    method: str
    config: Mapping[str, Any]
    drafter: str | None  # the draft model or head


def drafter_method(name: str) -> str:
    """The method of a draft model or head, by its files: the kind of a head, else draft_model. Raises ModelError where it
    is not there."""
    path = Path(resolve(name))
    try:
        return formats.detect(path).head.method
    except ForetellError:
        return "draft_model"


def candidates(
    spec: ModelSpec, *, draft: str | None = None, methods: Sequence[str] | None = None, predictions: bool = False
) -> tuple[list[Candidate], dict[str, str]]:
    """(what is tried, why the other methods are not).

    draft: a draft model or head; None: the bundled ones for the bundled target, and for others the named models that have
    been pulled and are smaller. methods: only these. predictions: whether prompts bring a guess of their answer.
    """
    given = drafter_method(draft) if draft is not None else None
    bundled = spec.name in BUNDLED
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
            names = _drafters(name, spec, draft if given == name else None, bundled=bundled and draft is None)
            if not names:
                what = "a draft model" if can.needs_draft else "a trained head"
                left[name] = f"it needs {what} for this target: give one by --draft"
            for one in names:
                own = {} if one is None else {"model": one}
                found.append(Candidate(name, {"method": name, **own, **_depth(name)}, one))
        else:
            found.append(Candidate(name, {"method": name, **_depth(name)}, None))
    return found, left


def _depth(name: str) -> dict[str, int]:
    """As deep as a method that draws is looked at, unless its own default is what it was made for."""
    kind = METHODS[name]
    own = {"num_speculative_tokens": DEPTH}
    return own if kind.capabilities.draws and name not in ("medusa", "dflash", "hybrid") else {}


def _drafters(name: str, spec: ModelSpec, draft: str | None, *, bundled: bool) -> list[str | None]:
    """Draft models or heads of a method; None is the method's bundled one."""
    if draft is not None:
        return [draft]
    if bundled:
        return [None] if name in BUNDLED_DRAFTERS else []
    if spec.name in CATALOGUE and name in CATALOGUE[spec.name].drafts:
        return [CATALOGUE[spec.name].drafts[name]]
    if name != "draft_model":
        return []
    return [
        other
        for other, model in CATALOGUE.items()
        if other != spec.name and pulled(other) is not None and model.size < 0.8 * spec.weight_bytes
    ]
