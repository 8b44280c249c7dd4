"""The tensors of a GGUF file under transformers' names: as floats, or packed as the file holds them."""

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Change
from foretell.checkpoints.gguf.families.architectures import ARCHITECTURES, architecture_of
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.values import depth
from foretell.checkpoints.packed import BLOCK_KINDS, Located, Packed
from foretell.checkpoints.weights import WeightSource
from foretell.core.errors import ModelError
from foretell.kernels.dequantise import can_dequantise, dequantise_into

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Entry(NamedTuple):
    parts: tuple[str, ...]  # names in the file, of which Change.undo makes one tensor
    change: Change


class GGUFWeights(WeightSource):
    """See the module's docstring. Values are the gguf library's own dequantisation, and what llama.cpp's converter changes
    is undone (``Architecture.adjust``): orders of rows, norms with 1 added, parts of a tensor.

    Raises ModelError for an architecture, a tensor or a quantisation that cannot be read, and for missing tensors.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        architecture, name = architecture_of(file), file.get("general.architecture")
        blocks = file.get("{arch}.block_count")
        if not isinstance(blocks, int) or not 0 < blocks <= len(file.tensors):
            file_says = f"{name}.block_count is {blocks!r}"
            raise ModelError(f"{file.where} is damaged: {file_says}, for {len(file.tensors)} tensors")
        num_layers, num_heads = depth(file)
        whole = dict(architecture.required(num_layers, file))
        missing = [name for name in whole if name not in file.tensors]
        if missing:
            raise ModelError(
                f"{file.where} lacks {len(missing)} of its {len(whole)} tensors (the first: "
                f"{missing[0]}); expected a whole {name} model"
            )
        optional = dict(architecture.optional(num_layers, file))
        known = {**whole, **{theirs: ours for theirs, ours in optional.items() if theirs in file.tensors}}
        heads = tuple(f"blk.{num_layers + head}." for head in range(num_heads))  # of drafts, not of the model
        expected = {*known, *architecture.ignored}
        strange = [name for name in file.tensors if name not in expected and not name.startswith(heads)]
        if strange:
            mixtures = [arch for arch in ARCHITECTURES if arch.endswith("moe")]
            raise ModelError(
                f"{file.where} has {len(strange)} tensors that no {name} model has here (the "
                f"first: {strange[0]}): another variant, which is not supported; mixtures of experts that are: "
                f"{', '.join(mixtures)}"
            )
        unreadable = [name for name in known if not can_dequantise(file.tensors[name].kind)]
        if unreadable:
            kind = file.tensors[unreadable[0]].kind
            raise ModelError(
                f"{file.name}: tensor {unreadable[0]} is {kind}, which cannot be dequantised; kinds that are decoded "
                f"packed: {', '.join(BLOCK_KINDS)}"
            )
        self._enter(known, architecture.adjust)
        for layer in range(num_layers):
            for theirs, ours in architecture.apart.items():
                if f"blk.{layer}.{theirs}" in file.tensors:
                    self._entries[f"{architecture.prefix}.{layer}.{ours}"] = _Entry(
                        (f"blk.{layer}.{theirs}",), Change()
                    )

    def _enter(
        self, known: Mapping[str, str], adjust: Callable[[GGUFFile, str, tuple[str, ...]], Change | None] | None
    ) -> None:
        """known: theirs -> ours; adjust: as ``Architecture.adjust``."""
        parts: dict[str, tuple[str, ...]] = {}
        for theirs, ours in known.items():
            parts[ours] = (*parts.get(ours, ()), theirs)
        self._entries = {
            ours: _Entry(names, (adjust and adjust(self._file, ours, names)) or Change())
            for ours, names in parts.items()
        }
        self._names = frozenset(self._entries)

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return self._names

    @property
    def apart(self) -> Collection[str]:
        """See ``WeightSource.apart``."""
        return self._entries.keys() - self._names

    @property
    def kinds(self) -> frozenset[str]:
        """How the matrices are stored: "Q4_K", "F16", ..."""
        infos = (self._file.tensors[part] for entry in self._entries.values() for part in entry.parts)
        return frozenset(info.kind for info in infos if len(info.shape) > 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        parts, change = self._entries[name]
        return change.shape or self._file.tensors[parts[0]].shape

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        entry = self._entries.get(name)
        return name if entry is None else entry.parts[0]

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``. Raises ModelError where the configuration expects another shape."""
        parts, change = self._entries[name]
        if tuple(out.shape) != self.shape(name):
            raise ModelError(
                f"{self._file.name}: tensor {parts[0]} has shape {self.shape(name)}; the configuration expects "
                f"{tuple(out.shape)}"
            )
        if change.undo is not None:
            held = [torch.empty(self._file.tensors[part].shape) for part in parts]
            for part, values in zip(parts, held, strict=True):
                self._fill((part,), change.order, values)
            out.copy_(change.undo(held))
        elif out.device.type == "cpu" and out.is_contiguous() and change.columns is None:
            self._fill(parts, change.order, out)
        else:
            values = torch.empty(out.shape, dtype=out.dtype)
            self._fill(parts, change.order, values)
            out.copy_(values if change.columns is None else values.index_select(-1, change.columns))

    def _fill(self, parts: tuple[str, ...], order: Tensor | None, out: Tensor) -> None:
        """Dequantise the rows of parts below each other, in order."""
        infos = [self._file.tensors[part] for part in parts]
        found = self._rows(parts, order)
        if found is not None:
            dequantise_into(found[0], found[1].reshape(-1), out)
            return
        held = [torch.empty(info.shape, dtype=out.dtype) for info in infos]
        for part, info, values in zip(parts, infos, held, strict=True):
            dequantise_into(info.kind, self._file.raw(part), values)
        joined = torch.cat([values.flatten(0, -2) for values in held])
        out.copy_((joined if order is None else joined[order]).view(out.shape))

    def _rows(
        self, parts: tuple[str, ...], order: Tensor | None, rows: tuple[int, int] | None = None
    ) -> tuple[str, NDArray[np.uint8]] | None:
        """Kind and bytes [rows, bytes] of parts below each other, in order (rows: of a range of that), the mapping itself
        where it is so; None where they are not stored alike. Each value of a vector is a row."""
        infos = [self._file.tensors[part] for part in parts]
        found = [
            self._file.raw(part).reshape(prod(info.shape[: max(1, len(info.shape) - 1)]), -1)
            for part, info in zip(parts, infos, strict=True)
        ]
        if len(parts) > 1 and rows is not None:  # where all of them are in one part, the others do not matter
            ends = np.cumsum([len(each) for each in found])
            wanted = np.arange(*rows) if order is None else order[slice(*rows)].numpy()
            first = int(np.searchsorted(ends, wanted.min(), side="right"))
            if wanted.max() < ends[first]:
                wanted = wanted - (ends[first] - len(found[first]))
                is_range = bool((np.diff(wanted) == 1).all())
                return infos[first].kind, found[first][slice(wanted[0], wanted[-1] + 1) if is_range else wanted]
        if len({(info.kind, info.shape[-1]) for info in infos}) > 1:
            return None
        joined = found[0] if len(found) == 1 else np.concatenate(found)
        span = slice(None) if rows is None else slice(*rows)
        return infos[0].kind, joined[span] if order is None else joined[order[span].numpy()]

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``: only what is asked for is ever in memory."""
        parts, change = self._entries[name]
        info = self._file.tensors[parts[0]]
        if change.columns is not None or change.undo is not None or len(info.shape) < 2:
            return super().reader(name)

        def rows(start: int, stop: int) -> Tensor:
            found = self._rows(parts, change.order, (start, stop))
            if found is None:
                return WeightSource.reader(self, name)(start, stop)
            part = torch.empty(
                stop - start, info.shape[-1], dtype=torch.bfloat16 if found[0] == "BF16" else torch.float32
            )
            dequantise_into(found[0], found[1].reshape(-1), part)
            return part

        return rows

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._file.release()

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``: the mapped bytes themselves, but where these rows stand in another order or in
        several tensors, or blocks of a row in another order: copies then.
        """
        packed, columns = self._blocks(name, rows), self._entries[name].change.columns
        if packed is None or columns is None:
            return packed
        blocks = whole_blocks(columns, BLOCK_KINDS[packed.kind].values)
        if blocks is None:
            return None
        data = packed.data.view(packed.shape[0], len(blocks), -1)[:, blocks].flatten(1)
        return Packed(packed.kind, packed.shape, data)

    def located(self, name: str, rows: tuple[int, int] | None = None) -> Located | None:
        """See ``WeightSource.located``."""
        parts, change = self._entries[name]
        info = self._file.tensors[parts[0]]
        kind = info.kind if info.kind in BLOCK_KINDS else _PLAIN.get(info.kind)
        is_changed = change.undo is not None or change.order is not None or change.columns is not None
        if kind is None or len(parts) > 1 or is_changed:
            return None
        row_bytes = info.size // prod(info.shape[:-1])
        return Located(self._file.path, info.offset + (rows[0] * row_bytes if rows else 0), kind, row_bytes)

    def _blocks(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """A quantised matrix with its rows in transformers' order and its columns in the file's."""
        parts, change = self._entries[name]
        info = self._file.tensors[parts[0]]
        if len(info.shape) < 2 or change.undo is not None:
            return None
        found = self._rows(parts, change.order, rows)
        if found is None or found[0] not in BLOCK_KINDS:
            return None
        return Packed(found[0], (len(found[1]), info.shape[-1]), torch.from_numpy(found[1]))


def whole_blocks(columns: Tensor, size: int) -> Tensor | None:
    """[columns / size] where each block of a row is, of where each column is; None where blocks are torn apart."""
    if len(columns) % size:
        return None
    blocks = columns.view(-1, size)
    is_whole = torch.equal(blocks, blocks[:, :1] + torch.arange(size))
    return blocks[:, 0] // size if is_whole else None
