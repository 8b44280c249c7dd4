"""Where a learner writes: the newest weights of each adapter, and the log of events. Never a text."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.learn.student import Origin
from foretell.train.checkpoint import write_bytes

WEIGHTS, LOG = "weights.safetensors", "events.jsonl"


class VersionStore:
    """One folder. What a crash interrupts is lost; what was there before stays whole."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError where it cannot be written to."""
        self.root = Path(folder)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.root / LOG).touch()
        except OSError as error:
            raise ConfigError(f"learn_dir = {self.root} cannot be written to: {error.strerror or error}") from None

    def folder(self, adapter: str) -> Path:
        """Of one adapter."""
        return self.root / re.sub(r"[^\w-]+", "-", adapter).strip("-")

    def save(self, adapter: str, origin: Origin, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights. Raises OSError."""
        folder = self.folder(adapter)
        folder.mkdir(exist_ok=True)
        part = folder / f".{WEIGHTS}.part"
        write_bytes(part, save({name: value.contiguous().clone() for name, value in weights.items()}, _about(origin)))
        part.replace(folder / WEIGHTS)

    def load(self, adapter: str, origin: Origin) -> dict[str, Tensor] | None:
        """The weights that were learned from the same beginning; None where there are none. Raises ConfigError where they
        are damaged or of another drafter."""
        file = self.folder(adapter) / WEIGHTS
        if not file.is_file():
            return None
        try:
            content = file.read_bytes()
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            found = load(content)
        except Exception as error:  # safetensors raises its own
            raise ConfigError(f"{file} cannot be read ({error}): delete it to begin anew") from None
        about, expected = header.get("__metadata__", {}), _about(origin)
        if about != expected:
            raise ConfigError(f"{file} was learned by {about}, and this is {expected}: give another learn_dir")
        return {name: value.to(torch.float32) if value.is_floating_point() else value for name, value in found.items()}

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
