"""The tensors of a GGUF file under transformers' names: as floats, or packed as the file holds them."""

from collections.abc import Callable, Collection
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.core.errors import ModelError, nearest
from foretell.kernels.dequantise import can_dequantise, dequantise_into
from foretell.model.gguf.file import GGUFFile
from foretell.model.gguf.names import IGNORED, REQUIRED, optional, required
from foretell.model.llama.weights import WeightSource
from foretell.model.packed import BLOCK_KINDS, Packed


class _Entry(NamedTuple):
    theirs: str  # the name in the file
    order: Tensor | None  # [rows] where row i is in the file; None: at i
    shift: float  # what is subtracted from every value


class GGUFWeights(WeightSource):
    """See the module's docstring. Values are the gguf library's own dequantisation, with two things undone that
    llama.cpp's converter does: it reorders the rows of q and k of Llama for its own RoPE, and adds 1 to Gemma's norms.

    Raises ModelError for an architecture, a tensor or a quantisation that cannot be read, and for missing tensors.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        architecture = architecture_of(file)
        num_layers = file.get("{arch}.block_count")
        if not isinstance(num_layers, int) or not 0 < num_layers <= len(file.tensors):
            file_says = f"{architecture}.block_count is {num_layers!r}"
            raise ModelError(f"{file.name}: {file.path.name} is damaged: {file_says}, for {len(file.tensors)} tensors")
        whole = dict(required(architecture, num_layers))
        missing = [name for name in whole if name not in file.tensors]
        if missing:
            raise ModelError(
                f"{file.name}: {file.path.name} lacks {len(missing)} of its {len(whole)} tensors (the first: "
                f"{missing[0]}); expected a whole {architecture} model"
            )
        known = {**whole, **{theirs: ours for theirs, ours in optional(num_layers) if theirs in file.tensors}}
        strange = [name for name in file.tensors if name not in known and name not in IGNORED]
        if strange:
            raise ModelError(
                f"{file.name}: {file.path.name} has {len(strange)} tensors that no {architecture} model has here (the "
                f"first: {strange[0]}): another variant, which is not supported; mixtures of experts that are: qwen2moe, "
                "qwen3moe"
            )
        unreadable = [name for name in known if not can_dequantise(file.tensors[name].kind)]
        if unreadable:
            kind = file.tensors[unreadable[0]].kind
            raise ModelError(
                f"{file.name}: tensor {unreadable[0]} is {kind}, which cannot be dequantised; kinds that are decoded "
                f"packed: {', '.join(BLOCK_KINDS)}"
            )
        heads = {"attn_q": file.get("{arch}.attention.head_count")}
        heads["attn_k"] = file.get("{arch}.attention.head_count_kv", heads["attn_q"])
        self._entries: dict[str, _Entry] = {}
        for theirs, ours in known.items():
            part = theirs.split(".")[-2]
            is_turned = part in heads and architecture == "llama"
            order = _order(file, theirs, heads[part]) if is_turned else None
            shift = 1.0 if architecture == "gemma3" and theirs.endswith("norm.weight") else 0.0
            self._entries[ours] = _Entry(theirs, order, shift)

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return self._entries.keys()

    @property
    def kinds(self) -> frozenset[str]:
        """How the matrices are stored: "Q4_K", "F16", ..."""
        infos = (self._file.tensors[entry.theirs] for entry in self._entries.values())
        return frozenset(info.kind for info in infos if len(info.shape) > 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        return self._file.tensors[self._entries[name].theirs].shape

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        entry = self._entries.get(name)
        return name if entry is None else entry.theirs

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``. Raises ModelError where the configuration expects another shape."""
        theirs, order, shift = self._entries[name]
        info = self._file.tensors[theirs]
        if tuple(out.shape) != info.shape:
            raise ModelError(
                f"{self._file.name}: tensor {theirs} has shape {info.shape}; the configuration expects {tuple(out.shape)}"
            )
        raw: NDArray[np.uint8] = self._file.raw(theirs)
        if order is not None:
            raw = raw.reshape(len(order), -1)[order.numpy()].reshape(-1)
        direct = out.device.type == "cpu" and out.is_contiguous() and not shift
        held = out if direct else torch.empty(info.shape, dtype=torch.float32 if shift else out.dtype)
        dequantise_into(info.kind, raw, held)
        if not direct:
            out.copy_(held.sub_(shift) if shift else held)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``: only what is asked for is ever in memory."""
        theirs, order, shift = self._entries[name]
        info = self._file.tensors[theirs]
        if order is not None or shift or len(info.shape) < 2:
            return super().reader(name)
        raw = self._file.raw(theirs).reshape(prod(info.shape[:-1]), -1)
        dtype = torch.bfloat16 if info.kind == "BF16" else torch.float32

        def rows(start: int, stop: int) -> Tensor:
            part = torch.empty(stop - start, info.shape[-1], dtype=dtype)
            dequantise_into(info.kind, raw[start:stop].reshape(-1), part)
            return part

        return rows

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._file.release()

    def packed(self, name: str) -> Packed | None:
        """See ``WeightSource.packed``: the mapped bytes themselves, but for q and k of Llama, whose rows of blocks are
        copied in order. Of stacks of matrices all rows below each other."""
        theirs, order, _ = self._entries[name]
        info = self._file.tensors[theirs]
        if info.kind not in BLOCK_KINDS or len(info.shape) < 2:
            return None
        rows, columns = prod(info.shape[:-1]), info.shape[-1]
        data = torch.from_numpy(self._file.raw(theirs)).view(rows, -1)
        return Packed(info.kind, (rows, columns), data if order is None else data[order])


def architecture_of(file: GGUFFile) -> str:
    """The architecture of a file. Raises ModelError for one that cannot be read."""
    architecture = str(file.get("general.architecture"))
    if architecture not in REQUIRED:
        raise ModelError(
            f"{file.name}: {file.path.name} holds a model of architecture {architecture!r}"
            f"{nearest(architecture, REQUIRED)} (of GGUF files; save_pretrained directories run nearly all)"
        )
    return architecture


def _order(file: GGUFFile, name: str, num_heads: Any) -> Tensor:
    """[rows] where each row of q or k is in the file: transformers rotates (i, i + half) of a head, llama.cpp
    (2i, 2i + 1). Raises ModelError where rows cannot be divided among so many heads."""
    rows = file.tensors[name].shape[0]
    if type(num_heads) is not int or num_heads < 1 or rows % (2 * num_heads):
        raise ModelError(
            f"{file.name}: tensor {name} has {rows} rows, which are not {num_heads!r} heads of an even size"
        )
    return torch.arange(rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)
