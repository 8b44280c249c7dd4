"""Where a learner writes: the newest weights of each adapter, and the log of events. Never a text."""

import contextlib
import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json
from foretell.core.platform import lock_file
from foretell.core.whole import write_bytes
from foretell.learn.training.student import Origin

logger = logging.getLogger(__name__)
WEIGHTS, LOG, UNUSABLE = "weights.safetensors", "events.jsonl", "unusable.safetensors"
_OTHERS = re.compile(r"-[1-9](-[0-9a-f]{16})?$")
"""The end of the folder's name of a method's second adapter, and of further ones: see ``VersionStore.folder``."""
KEPT = 3
"""Versions whose weights are kept to go back to: the one that serves, the one before, and one on its way."""


class VersionStore:
    """One folder. What a crash interrupts is lost; what was there before stays whole."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError where it cannot be written to, another learner writes there, or weights lie there that nothing
        would load."""
        self.root = Path(folder)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = os.open(self.root / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"learn_dir = {self.root} cannot be written to: {error.strerror or error}") from None
        self._leave = weakref.finalize(self, os.close, held)
        if not lock_file(held):
            self._leave()
            raise ConfigError(
                f"learn_dir = {self.root} is in use by another learner, and each would delete what the other has learned: "
                "give each a folder of its own"
            )
        unread = sorted(file.parent.name for file in self.root.glob(f"*/{WEIGHTS}") if _OTHERS.search(file.parent.name))
        if unread:
            self._leave()
            raise ConfigError(
                f"learn_dir = {self.root} is of an earlier version, in which several adapters of a method learned side by "
                f"side, and one does now: delete {', '.join(unread)} to go on with the first, or give another learn_dir"
            )

    def close(self) -> None:
        """Leave the folder to others."""
        self._leave()

    def folder(self, adapter: str) -> Path:
        """Of one adapter, "tenant/method/0". Tenants whose names differ never share one."""
        name = re.sub(r"[^\w-]+", "-", adapter).strip("-")
        if not re.fullmatch(r"(\w([\w-]*\w)?)?/[^/]+/[^/]+", adapter):  # other characters have become a "-"
            name += "-" + sha256(adapter.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return self.root / name

    def save(self, adapter: str, origin: Origin, weights: Mapping[str, Tensor], number: int) -> None:
        """Keep a version's weights; they are loaded at the next start once ``serve`` has named them. Raises OSError."""
        folder = self.folder(adapter)
        folder.mkdir(exist_ok=True)
        part = folder / f".{_version(number)}.saving.part"  # another name than links have: they are made meanwhile
        try:
            write_bytes(
                part, save({name: value.contiguous().clone() for name, value in weights.items()}, _about(origin))
            )
            part.replace(folder / _version(number))
        finally:
            part.unlink(missing_ok=True)
        known = sorted(int(file.name.split(".")[1]) for file in folder.glob(_version("*")))
        for old in [old for old in known if old][:-KEPT]:
            (folder / _version(old)).unlink(missing_ok=True)

    def serve(self, adapter: str, number: int) -> None:
        """A version that was saved, or 0, what was there at the start, is what the next start begins with."""
        folder = self.folder(adapter)
        try:
            if (folder / _version(number)).is_file():
                _link(folder / _version(number), folder / WEIGHTS)
            elif not number:
                (folder / WEIGHTS).unlink(missing_ok=True)  # nothing was: the drafter as it was loaded
        except OSError as error:
            logger.warning("learn: the next start will not know that version %d serves: %s", number, error)

    def load(self, adapter: str, origin: Origin) -> dict[str, Tensor] | None:
        """The weights that were learned from the same beginning; None where there are none. Raises ConfigError where they
        are damaged, of another drafter, or cannot be read."""
        file = self.folder(adapter) / WEIGHTS
        try:
            for old in (*file.parent.glob(_version("*")), *file.parent.glob(".*.part")):  # of the run before
                old.unlink(missing_ok=True)
            if not file.is_file():
                return None
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror or error}): mend that, or give another learn_dir"
            ) from None
        try:
            header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
            found = load(content)
        except Exception as error:  # safetensors raises its own
            raise ConfigError(f"{file} cannot be read ({error}): delete it to begin anew") from None
        about, expected = header.get("__metadata__", {}), _about(origin)
        if about != expected:
            raise ConfigError(f"{file} was learned by {about}, and this is {expected}: give another learn_dir")
        try:
            _link(file, file.parent / _version(0))
        except OSError as error:
            raise ConfigError(f"learn_dir = {self.root} cannot be written to: {error.strerror or error}") from None
        return {name: value.to(torch.float32) if value.is_floating_point() else value for name, value in found.items()}

    def set_aside(self, adapter: str) -> None:
        """What was kept of an adapter and cannot be used is left to people under another name."""
        file = self.folder(adapter) / WEIGHTS
        with contextlib.suppress(OSError):
            file.replace(file.with_name(UNUSABLE))

    def log(self, event: Mapping[str, Any]) -> None:
        """Append one line; a full disk loses the line, not the service."""
        try:
            with (self.root / LOG).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(event, default=str) + "\n")
        except OSError:
            return


def _about(origin: Origin) -> dict[str, str]:
    return {"method": origin.method, "init": origin.init, "target": origin.target.name,
            "vocab_size": str(origin.target.vocab_size)}  # fmt: skip


def _version(number: int | str) -> str:
    return f"weights.{number}.safetensors"


def _link(file: Path, name: Path) -> None:
    """The same content by another name, put there at once. Raises OSError."""
    part = name.with_name(f".{name.name}.part")
    part.unlink(missing_ok=True)
    try:
        try:
            os.link(file, part)
        except OSError:  # no such thing on this disk
            shutil.copyfile(file, part)
        part.replace(name)
    finally:
        part.unlink(missing_ok=True)
