"""What guesses for a target where nothing is said: the head that ``foretell train auto`` has trained for it on this
machine, else what comes with its model, else suffix, which needs no weights.

``heads`` in the directory of models holds a file for each target that has one: where the head is, and how it guesses.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foretell.checkpoints.catalogue import BUNDLED, CATALOGUE, NamedModel
from foretell.core.cachedir import models_directory
from foretell.core.errors import ModelError
from foretell.core.jsontext import parse_json
from foretell.core.whole import write_whole

logger = logging.getLogger(__name__)
_said = set[str]()


@dataclass(frozen=True)
class TrainedHead:
    """A head that is used for a target where nothing is said."""

    target: str  # its path, or its hub id
    files: str | None  # a digest of the names, sizes and times of its weights; None: of a hub id
    head: str  # its directory or file
    method: str
    num_speculative_tokens: int

    @property
    def speculative(self) -> dict[str, Any]:
        """Keys of a speculative configuration."""
        return {"method": self.method, "num_speculative_tokens": self.num_speculative_tokens}


def heads_directory() -> Path:
    """Where ``foretell train auto`` puts heads, and says for which target each is."""
    return models_directory() / "heads"


def target_files(target: str) -> tuple[str, str | None]:
    """(the path of a target, or its hub id; a digest of the names, sizes and times of its weights). Raises ModelError."""
    from foretell.checkpoints.directories import find_here  # which --help does without

    path = find_here(target)
    if path is None:
        return target, None
    files = (
        [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin"))
    )
    about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return str(path.resolve()), hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def called(target: str) -> str:
    """The name of a target's files in ``heads_directory``: another one for each path. Raises ModelError."""
    key = target_files(target)[0]
    return f"{Path(key).stem}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def use(target: str, head: Path, method: str, num_speculative_tokens: int) -> None:
    """From now on this head guesses for the target where nothing is said. Raises ModelError, OSError."""
    made = TrainedHead(*target_files(target), str(head.resolve()), method, num_speculative_tokens)
    heads_directory().mkdir(parents=True, exist_ok=True)
    write_whole(_file(target), [(json.dumps(asdict(made), indent=1) + "\n").encode()])


def unuse(target: str, head: Path) -> None:
    """This head no longer guesses for the target where nothing is said; another one does not change. Raises ModelError."""
    found = _read(_file(target))
    if found is not None and Path(found.head) == head.resolve():
        _file(target).unlink(missing_ok=True)


def trained_head(target: str) -> TrainedHead | None:
    """The head of a target; None where there is none. One whose target has changed, or that has gone, is not used, which is
    said once."""
    try:
        if not heads_directory().is_dir():
            return None
        found = _read(_file(target))
        if found is None:
            return None
        reason = ""
        if (found.target, found.files) != target_files(target):
            reason = f"{target} has other weights now"
        elif not Path(found.head).exists():
            reason = "it has gone"
    except (ModelError, OSError):
        return None  # who loads the target says what is wrong with it
    if reason and target not in _said:
        _said.add(target)
        logger.warning(
            "the head that was trained for %s (%s) is not used: %s; 'foretell train auto' trains another, and without %s "
            "nothing is said", target, found.head, reason, _file(target),
        )  # fmt: skip
    return None if reason else found


def default_speculation(target: str) -> Mapping[str, Any]:
    """How to guess for a target where nothing is said."""
    found = trained_head(target)
    return bundled_speculation(target) if found is None else found.speculative


def bundled_speculation(target: str) -> Mapping[str, Any]:
    """The same without heads that were trained here."""
    if target in BUNDLED:
        return {"method": "draft_model"}
    entry = entry_of(target)
    return {"method": "suffix"} if entry is None else entry.speculative


def entry_of(target: str) -> NamedModel | None:
    """The catalogue's model that a target is: by its name, by its hub id, or by weights that lie here in any precision and
    form. None of any other. What comes with a model guesses for all of these: the text does not depend on it."""
    if target in CATALOGUE:
        return CATALOGUE[target]
    try:
        path, files = target_files(target)
    except (ModelError, OSError):
        return None  # who loads the target says what is wrong with it
    if files is None:
        known = {hub_id: entry for entry in CATALOGUE.values() for hub_id in entry.hub_ids}
        return known.get(target.partition("@")[0])
    return None if target in BUNDLED else _entry_of_files(target, path, files)


@cache
def _entry_of_files(target: str, path: str, files: str) -> NamedModel | None:
    """path and files: see ``target_files``; for as long as they are the same, the answer is."""
    from foretell.model.identity import weights_hash  # which imports torch

    try:
        found = weights_hash(target)
    except (ModelError, OSError):
        return None
    return None if found is None else {entry.weights_hash: entry for entry in CATALOGUE.values()}.get(found)


def default_draft(target: str, method: str) -> str | None:
    """The draft model or head that a method takes for a target where none is given; None where there is none (or the
    method's own, bundled one)."""
    found = trained_head(target)
    if found is not None and found.method == method:
        return found.head
    entry = entry_of(target)
    return None if entry is None else entry.drafts.get(method)


def _file(target: str) -> Path:
    return heads_directory() / f"{called(target)}.json"


def _read(file: Path) -> TrainedHead | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # absent, or not written by this version
        return TrainedHead(**parse_json(file.read_text(encoding="utf-8")))
    return None
