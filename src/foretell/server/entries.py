"""The models that a server may load, and what their files tell of them before they are loaded."""

import asyncio
import os
import sys
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.checkpoints.directories import find_here
from foretell.checkpoints.source import read_plain
from foretell.core.errors import ForetellError
from foretell.engine.request.conversation import template_of
from foretell.engine.structured.thoughts import family_of
from foretell.model.load import load_tokenizer
from foretell.server.backend import Backend
from foretell.server.options import GGUF, name_of, without_suffix
from foretell.server.texts.fill import Fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.metrics_core import Metric

    from foretell.engine.prefix import PrefixStore

# Bytes of weights by bytes of files, before a model was loaded: those of bf16 are float32 here.
IN_MEMORY = {GGUF: 1.25, "": 2.0}


@dataclass(frozen=True)
class About:
    """What clients read of a model."""

    format: str
    size: int  # bytes of its weights
    architecture: str = ""
    quantisation: str = ""
    context: int | None = None  # tokens; None: not known yet, as hidden_size and num_layers
    hidden_size: int | None = None
    num_layers: int | None = None
    size_vram: int = 0
    template: str = ""
    thinks: bool = False
    fills: bool = False  # gaps, as far as files tell it


@dataclass(eq=False)
class Entry:
    """One model of several."""

    name: str
    target: str  # as it is loaded by
    is_found: bool = False  # in the folder, and not named by the operator
    pinned: bool = False
    backend: Backend | None = None  # None: it is not loaded
    users: int = 0  # requests that have it
    waiters: list["asyncio.Future[None]"] = field(default_factory=list)
    bringing: "asyncio.Task[None] | None" = None
    is_leaving: bool = False  # another waits for its room: requests to come wait until it is loaded again
    used: float = 0.0  # monotonic: when a request last came or left
    keep_alive_s: float = inf
    expiry: asyncio.TimerHandle | None = None
    about: About | None = None  # as it was last loaded
    stamp: Any = None  # of its files then
    prefixes: "PrefixStore | None" = None  # what was read of prompts, while it is not loaded
    num_loads: int = 0
    counted: "Sequence[Metric]" = ()  # what earlier loads counted

    @property
    def serves(self) -> bool:
        """Whether a request may have it now."""
        return self.backend is not None and not self.is_leaving and self.backend.service.healthy

    @property
    def state(self) -> str:
        """As llama.cpp's router says it."""
        return "loaded" if self.backend is not None else "loading" if self.bringing is not None else "unloaded"

    @property
    def path(self) -> Path | None:
        """Where its files are; None where that is not known before it is loaded."""
        try:
            return find_here(self.target)
        except ForetellError:
            return None

    @property
    def seconds_left(self) -> float:
        """Until it is unloaded, where nobody asks."""
        return inf if self.expiry is None else max(0.0, self.expiry.when() - asyncio.get_running_loop().time())

    @property
    def doing(self) -> str:
        """Why it is not unloaded, in words."""
        return "never unloaded" if self.pinned else f"answers {self.users}" if self.users else "idle"

    def told(self) -> About:
        """What is known of it without reading its files."""
        path = self.path
        form = "gguf" if path is not None and path.is_file() else "safetensors"
        return self.about or About(form, size_of(path))


def about(backend: Backend) -> About:
    """Of a model that is loaded."""
    spec, template = backend.service.engine.model.spec, backend.template()
    return About(
        format=spec.implementation,
        size=spec.weight_bytes,
        architecture=spec.architecture,
        quantisation=str(spec.dtype).removeprefix("torch."),
        context=backend.max_model_len,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        size_vram=0 if spec.device.type == "cpu" else spec.weight_bytes,
        template=template,
        thinks=backend.thoughts(template) is not None,
    )


def about_files(entry: Entry) -> About:
    """What is known of a model, from its files where it was never loaded; what cannot be read is left out. Slow."""
    told, path = entry.told(), entry.path
    if entry.about is not None:
        return told
    try:
        found = None if path is None else read_plain(path, name=entry.name)
        tokenizer = load_tokenizer(entry.target)
        template, fills = template_of(tokenizer) or "", Fill(tokenizer, sys.maxsize).prefix is not None
    except (ForetellError, OSError, ValueError):
        return told
    told = replace(told, template=template, thinks=family_of(template) is not None, fills=fills)
    if found is None:
        return told
    kind = (getattr(found[0], "architectures", None) or [str(getattr(found[0], "model_type", ""))])[0]
    sizes = {"context": found[0].max_position_embeddings, "hidden_size": found[0].hidden_size}
    return replace(told, architecture=kind, num_layers=found[0].num_hidden_layers, **sizes)


def models_in(folder: Path) -> dict[str, str]:
    """Targets under a folder by name, in order: GGUF files by their stem, and directories that hold a config.json. Those
    that would have one name go by their path in the folder. What is hidden is left out."""
    found: dict[str, list[Path]] = {}
    seen: set[str] = set()  # links may lead back
    for root, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = [Path(root)] if "config.json" in files else []
        here += [Path(root, name) for name in files if name.lower().endswith(GGUF) and not name.startswith(".")]
        for path in here:
            found.setdefault(name_of(str(path.absolute())), []).append(path)
    named: dict[str, str] = {}
    for name, paths in found.items():
        for path in paths:
            own = without_suffix(path.relative_to(folder).as_posix())
            named[name if len(paths) == 1 else own] = str(path.absolute())
    return dict(sorted(named.items()))


def stamp_of(path: Path | None) -> Any:
    """Sizes and times of a model's files."""
    if path is None:
        return None
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    stats = [file.stat() for file in files if file.is_file()]
    return [(one.st_size, one.st_mtime_ns) for one in stats]


def size_of(path: Path | None) -> int:
    """About how many bytes the weights in some files take when they are loaded; 0 where nobody knows."""
    if path is None:
        return 0
    files = [path] if path.is_file() else [*path.glob("*.safetensors")] or [*path.glob("*.bin")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return int(size * IN_MEMORY.get(path.suffix.lower(), IN_MEMORY[""]))
