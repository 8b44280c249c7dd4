"""Experts that stay in files where a mixture does not fit memory: where each is there, and frames for those that are held.

``kernels/native/store.h`` reads them in the midst of a pass. Here it is decided how many are held; files stay open, and
are looked at after each pass that has read of them.
"""

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretell.checkpoints.weights import WeightSource
from foretell.core.errors import ModelError, UnreadableError
from foretell.core.platform import can_read_at, free_memory
from foretell.kernels import structures
from foretell.kernels.native import need
from foretell.model.llama.mixture import Mixture, expert_names
from foretell.model.llama.read.matrices import TILE, Matrices, MatrixLayout, layout_of
from foretell.model.target import DiskFigures

logger = logging.getLogger(__name__)
EXPERTS_SHARE = 0.75
"""Of the memory that is left beside the weights that every pass reads, what experts may take; the rest is for keys, values
and passes."""
NOT_READ = 9  # what foretell_forward returns where an expert could not be read
_PARTS = ("gate", "up", "down")
_AT_ONCE = 1 << 18  # bytes, about, that a thread reads at a time
_LINE = 64  # bytes; every matrix begins at a line of the cache
_GIB = 2**30
Parts = Mapping[str, MatrixLayout]
"""The matrices of an expert, by their short names."""


class DiskExperts:
    """The routed experts of a model's sparse layers, of each of which as many are held."""

    def __init__(self, layers: Mapping[int, Sequence[Parts]], num_bytes: int, *, name: str) -> None:
        """layers: by number, the experts of each; num_bytes: of those that are held, at most. Raises ModelError for a file
        that cannot be opened."""
        self.name, self._layers = name, layers
        self._matrices = [layout for each in layers.values() for parts in each for layout in parts.values()]
        self.names = frozenset(layout.name for layout in self._matrices)
        self._view, self._stores = structures.Disk(), dict[int, structures.Store]()
        self._tensors: list[Tensor] = []  # keeps alive what the C structures point to
        of_one = sum(_frame_bytes(each[0]) for each in layers.values())
        self._num_frames = num_bytes // of_one
        self.total, self.held = of_one * len(next(iter(layers.values()))), of_one * self._num_frames  # bytes
        self._num_read = 0  # bytes, when files were last looked at
        self._files: dict[Path, int] = {}
        weakref.finalize(self, _close, self._files)
        for file in {layout.stored.file for layout in self._matrices if layout.stored is not None}:
            try:
                self._files[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise ModelError(f"{name}: {file.name} cannot be opened ({error.strerror})") from error
        self._states = {file: _state(number) for file, number in self._files.items()}

    def hold(self, into: Matrices, allocate: Callable[[int], Tensor]) -> None:
        """Make room in ``allocate``'s memory (zeros), and enter the matrices beside those that are in memory; where each
        lies is the kernel's to say."""
        need({layout.matrix.format for layout in self._matrices})
        for index, each in self._layers.items():
            size = _frame_bytes(each[0])
            memory = allocate(self._num_frames * size)
            self._stores[index] = self._store(each, memory, size)
            for layout in (one for parts in each for one in parts.values()):
                layout.matrix.data = memory.data_ptr()
                into.held[layout.name] = layout.matrix
                into.num_bytes[layout.name], into.kinds[layout.name] = layout.num_bytes, layout.kind

    def _store(self, each: Sequence[Parts], memory: Tensor, size: int) -> structures.Store:
        count, frames = len(each), self._num_frames
        places = torch.zeros(count, len(_PARTS), 2, dtype=torch.int64)
        stored, at = (structures.Stored * len(_PARTS))(), 0
        for expert, parts in enumerate(each):
            for key, layout in parts.items():
                assert layout.stored is not None
                file, row_bytes, part = self._files[layout.stored.file], layout.stored.row_bytes, _PARTS.index(key)
                places[expert, part, 0], places[expert, part, 1] = file, layout.stored.offset
                if expert == 0:
                    step = max(TILE, _AT_ONCE // row_bytes // TILE * TILE)
                    stored[part] = structures.Stored(layout.number, layout.rows, row_bytes, step, at, layout.grid)
                    self._view.reading = max(self._view.reading, min(step, layout.rows) * row_bytes)
                    at += _lines(layout.num_bytes)
        frame, held = (torch.full((size,), -1, dtype=torch.int32) for size in (count, frames))
        score, last = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
        kept = [places, memory, frame, held, score, last, torch.zeros(count, dtype=torch.uint8)]
        self._tensors += kept
        addresses = [tensor.data_ptr() for tensor in kept]
        return structures.Store(stored, addresses[0], frames, size, 0, *addresses[1:])

    def enter(self, experts: structures.Experts, index: int) -> None:
        """Let a layer's mixture, as C sees it, have its experts read."""
        experts.store = ctypes.pointer(self._stores[index])

    @property
    def view(self) -> "ctypes._Pointer[structures.Disk]":
        """What the layers have in common, as C sees it."""
        return ctypes.pointer(self._view)

    def settle(self, problem: int) -> None:
        """To be called after each pass, with what it returned. Raises UnreadableError where an expert could not be read, or
        files are no more what they were: what was read of them is forgotten, and later passes read again."""
        if problem != NOT_READ and self._view.bytes == self._num_read:
            return
        self._num_read, failed = self._view.bytes, self._view.failed
        changed = [file for file, number in self._files.items() if _state(number) != self._states[file]]
        if not changed and problem != NOT_READ:
            return
        self._view.failed = 0
        for index, store in self._stores.items():
            ctypes.memset(store.held, 255, store.frames * 4)
            ctypes.memset(store.frame, 255, len(self._layers[index]) * 4)
        if changed:
            raise UnreadableError(
                f"{self.name}: {changed[0].name} was changed after the model was loaded, and its experts are read from it "
                "as they are needed: load the model again"
            )
        why = "it ends too early" if failed < 0 else os.strerror(failed)
        files = ", ".join(sorted(file.name for file in self._files))
        raise UnreadableError(f"{self.name}: an expert could not be read from {files} ({why}): check the disk")

    @property
    def figures(self) -> DiskFigures:
        """What is held, and what was read so far."""
        v = self._view
        return DiskFigures(
            self.total, self.held, v.bytes, v.bytes_ahead, v.hits, v.misses, v.named, v.used, v.waited_ns / 1e9
        )


def experts_on_disk(
    source: WeightSource,
    mixture: Mixture | None,
    sparse: Sequence[int],
    matrices: Sequence[str],
    routers: Sequence[str],
    *,
    weights: str,
    dtype: torch.dtype,
    memory: int | None,
    name: str,
) -> DiskExperts | None:
    """What stays in files of a mixture with these sparse layers; None where all fits memory. matrices: all but routers.
    memory: bytes for the whole model, keys and values too; None: what is free, and then a model that cannot be read so is
    None as well. Raises ModelError where it cannot be done."""
    given, memory = memory is not None, free_memory() if memory is None else memory
    if mixture is None and not given:
        return None
    count, every = (0, []) if mixture is None else (mixture.num_experts, range(mixture.num_experts))

    def experts(layer: int, some: Iterable[int]) -> list[Parts]:
        named = [expert_names(layer, expert, mixture) for expert in some] if mixture is not None else []
        return [{key: layout_of(source, one, weights, dtype) for key, one in names.items()} for names in named]

    firsts = [experts(layer, [0])[0] for layer in sparse]
    prefixes = tuple(f"model.layers.{layer}.mlp.experts." for layer in sparse)
    dense = sum(layout_of(source, one, weights, dtype).num_bytes for one in matrices if not one.startswith(prefixes))
    dense += sum(layout_of(source, one, "fp32", dtype).num_bytes for one in routers)
    of_one = sum(map(_frame_bytes, firsts))  # an expert of each layer
    left = int((memory - dense) * EXPERTS_SHARE)
    if count * of_one <= (left if given else memory - dense):
        return None
    said = f"{name}: its weights take {(dense + count * of_one) / _GIB:.1f} GiB, {memory / _GIB:.1f} GiB are"
    said += " given (memory_gib)" if given else " free"
    layers = {layer: experts(layer, every) for layer in sparse}
    reason = _unreadable(layers, weights)
    if reason is not None:
        if given:
            raise ModelError(f"{said}, and {reason}: give more, or weights='int4', or a smaller model")
        return None
    assert mixture is not None
    if left < mixture.num_chosen * of_one:
        least = dense + mixture.num_chosen * of_one / EXPERTS_SHARE
        raise ModelError(
            f"{said}, too few to hold the {mixture.num_chosen} experts that one token reads in a layer: expected at least "
            f"{least / _GIB:.2f} GiB"
        )
    made = DiskExperts(layers, left, name=name)
    total, held = made.total / _GIB, made.held / _GIB
    logger.warning(
        "%s: experts: %.1f of %.1f GiB stay on disk; %.1f GiB of them are held", name, total - held, total, held
    )
    return made


def _unreadable(layers: Mapping[int, Sequence[Parts]], weights: str) -> str | None:
    """Why experts cannot be read as they are needed; None where they can: a layer's are all stored alike."""
    if not layers:
        return "only a mixture's experts can stay on disk"
    if not can_read_at():
        return "this system cannot read experts as they are needed"
    if weights == "least":
        return "weights='least' is of drafts, whose experts do not stay on disk"
    for layout, first in ((parts[key], each[0][key]) for each in layers.values() for parts in each for key in parts):
        alike = layout.stored and first.stored and layout.stored[2:] == first.stored[2:]
        if not alike or layout.num_bytes != first.num_bytes:
            return f"{layout.name} cannot be read from its file as it is needed (a GGUF file's experts can)"
    return None


def _frame_bytes(parts: Parts) -> int:
    return sum(_lines(layout.num_bytes) for layout in parts.values())


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _state(number: int) -> tuple[int, int]:
    """What changes with what an open file holds."""
    state = os.fstat(number)
    return state.st_size, state.st_mtime_ns


def _close(files: dict[Path, int]) -> None:
    for number in files.values():
        os.close(number)
