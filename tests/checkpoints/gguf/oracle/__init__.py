"""llama.cpp as a judge: tiny GGUF files that its converter wrote, with the logits, tokens and ends that its library gives.

``record.py`` writes ``data/`` (``data/README.md`` says from what); ``table.py`` has the checkpoints, which transformers
runs too.
"""

import lzma
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints.gguf.oracle.table import tiny

FOLDER = Path(__file__).with_name("data")
FILTERS: list[dict[str, Any]] = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 2, "pb": 2}]
"""How files are packed: numbers of four bytes, which are few."""


@dataclass(frozen=True)
class Case:
    """One file and what llama.cpp makes of it.

    Its logits are of a build for a machine with AVX2, one thread, keys and values in float32 (llama.cpp's default is
    float16), no flash attention.
    """

    label: str
    """The file's name: an architecture, or one with a kind of blocks: ``qwen35-q8_0``."""
    name: str
    """The checkpoint's name in ``table.ARCHITECTURES``."""
    sequences: tuple[list[int], ...]
    ends: tuple[int, ...]
    """The ids after which llama.cpp ends a text."""
    texts: tuple[list[int], ...]
    """The tokens of ``tokens.TEXTS``."""
    largest: float
    """The largest logit."""
    noise: float
    """How far llama.cpp's own logits lie apart: two threads, one token at a time, without repacking, without AVX."""
    rounding: float
    """How far they lie from those of the same file with its blocks taken apart, as products round activations to 8 bits
    (float16, bfloat16) for blocks. 0 for float32."""
    _kept: dict[str, Tensor]

    @property
    def path(self) -> Path:
        """The file itself."""
        return _unpacked(self.label)

    def apart(self, index: int, logits: Tensor, *, exact: bool = False) -> float:
        """How far logits [n, V] of sequence ``index`` lie from llama.cpp's at the most, over the positions and columns
        that are kept; ``exact``: from those of blocks taken apart."""
        kept, columns = self._kept, self._kept["columns"].long()
        part = logits.detach().float()[kept[f"positions/{index}"].long()][:, columns]
        found = float((part - kept[f"{'exact' if exact and self.rounding else 'logits'}/{index}"]).abs().max())
        if not exact:
            found = max(found, float((logits[-1].detach().float() - kept[f"last/{index}"]).abs().max()))
        return found if np.isfinite(found) else float("inf")


def labels(*, quantised: bool = True) -> tuple[str, ...]:
    """The names of all files, or of those in float32."""
    found = sorted(path.name.removesuffix(".gguf.xz") for path in FOLDER.glob("*.gguf.xz"))
    return tuple(label for label in found if quantised or case(label).name == label)


def cases() -> Iterator[Case]:
    """Every file."""
    return map(case, labels())


@cache
def case(label: str) -> Case:
    """One file by its name."""
    with safe_open(FOLDER / f"{label}.safetensors", "pt") as file:
        said, kept = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    groups = {
        group: tuple(kept[key].tolist() for key in sorted(kept) if key.startswith(f"{group}/"))
        for group in ("tokens", "texts")
    }
    return Case(
        label=label, name=said["name"], sequences=groups["tokens"], texts=groups["texts"],
        ends=tuple(kept["ends"].tolist()), largest=float(said["largest"]), noise=float(said["noise"]),
        rounding=float(said.get("rounding", 0)), _kept=kept,
    )  # fmt: skip


@cache
def checkpoint(name: str) -> PreTrainedModel:
    """The checkpoint that a file was converted from, in float32, as transformers runs it. Do not change it."""
    with torch.random.fork_rng():
        return tiny(name)


_PLACE = tempfile.TemporaryDirectory(prefix="oracle-")


@cache
def _unpacked(label: str) -> Path:
    path = Path(_PLACE.name) / f"{label}.gguf"
    path.write_bytes(lzma.decompress((FOLDER / f"{label}.gguf.xz").read_bytes()))
    return path
