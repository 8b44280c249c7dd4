"""Reading a checkpoint's tensors one at a time, so that no model is ever in memory twice.

The safetensors library maps a whole file, whose pages then stay resident while the packed copies are made. Here each
tensor is read straight into the memory it will live in: loading peaks at the weights plus one tensor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints.files import weight_files
from foretell.checkpoints.packed import Located, Packed
from foretell.core.errors import ModelError

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_BLOCKS = ("_blocks", "_scales")  # what ends the names of tensors of bytes that are read: MXFP4's; and BitNet's weights


class WeightSource(ABC):
    """Named tensors of one model, under the names that transformers saves them by."""

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """All names that can be read."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, known without reading it."""

    @property
    def apart(self) -> Collection[str]:
        """Further names: parts of tensors that transformers joins, as the file holds them."""
        return ()

    def called(self, name: str) -> str:
        """What the file itself calls a tensor, for messages; the name where there is no such tensor."""
        return name

    @abstractmethod
    def read_into(self, name: str, out: Tensor) -> None:
        """Fill out (contiguous, of the right shape, any float dtype) with one tensor, converted where dtypes differ."""

    def shared(self, name: str) -> Tensor | None:
        """The tensor itself where it is already in memory and may be kept, else None."""
        return None

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """A quantised matrix as the file holds it, or a range of its rows (of a stack's, all below each other); None where
        they are not quantised, or not alike."""
        return None

    def located(self, name: str, rows: tuple[int, int] | None = None) -> Located | None:
        """Where a file has a matrix, or a range of a stack's rows, as it is; None where no file has it so."""
        return None

    def release(self) -> None:
        """What was read so far will not be needed soon: memory that only repeats a file may be given back."""
        return

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """A function that reads rows [start, stop) of a matrix, or of a stack of them below each other, contiguous on the
        CPU in a float dtype of its choice. May be called by several threads."""
        own = self.shared(name)
        whole = self.read(name, torch.float32, torch.device("cpu")) if own is None else own
        whole = whole.flatten(0, -2) if whole.dim() > 2 else whole
        return lambda start, stop: whole[start:stop].cpu().contiguous()

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor in dtype on device; the source's own memory where that is already so."""
        own = self.shared(name)
        if own is not None and own.dtype == dtype and own.device == device and own.is_contiguous():
            return own
        out = torch.empty(self.shape(name), dtype=dtype, device=device)
        self.read_into(name, out)
        return out


class ShapeError(ModelError):
    """Tensors of another size than the configuration's: no implementation can run such a model."""


def expect_shape(source: WeightSource, name: str, expected: tuple[int | None, ...], of: str) -> None:
    """Raise ShapeError, which names model ``of``, where a tensor has another shape; None stands for any size."""
    found = source.shape(name)
    if len(found) != len(expected) or any(
        size not in (None, given) for given, size in zip(found, expected, strict=True)
    ):
        sizes = ", ".join("any" if size is None else str(size) for size in expected)
        raise ShapeError(
            f"{of}: the weights do not match the configuration ({source.called(name)} has shape {found}, expected "
            f"({sizes})); expected both of one checkpoint"
        )


class TensorWeights(WeightSource):
    """Tensors in memory, shared and not copied wherever that is possible."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        return tuple(self._tensors[name].shape)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        out.copy_(self._tensors[name])

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``."""
        return self._tensors[name]


class ModuleWeights(TensorWeights):
    """The parameters of a loaded transformers module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.state_dict(keep_vars=True))


class SafetensorsWeights(WeightSource):
    """The safetensors of a directory: one file, or shards and their index."""

    def __init__(self, directory: Path, *, name: str | None = None) -> None:
        """Raises ModelError where there are none, or they are damaged or of a dtype that is not known."""
        name = name or str(directory)
        stored = weight_files(directory, name=name)
        if not stored.is_safetensors:
            raise ModelError(
                f"{name}: its weights are in {stored.files[0].name}; expected safetensors: save the model with "
                'save_pretrained, or load it with implementation="transformers"'
            )
        starts = {path: _start(path) for path in stored.files}
        self._entries: dict[str, tuple[Path, torch.dtype, tuple[int, ...], int]] = {}
        tensors = stored.tensors(name=name)
        for key, (path, entry) in tensors.items():
            is_blocks = entry["dtype"] == "U8" and (key.endswith(_BLOCKS) or f"{key}_scale" in tensors)
            dtype = torch.uint8 if is_blocks else _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ModelError(f"{path}: tensor {key} is {entry['dtype']}; expected one of {', '.join(_DTYPES)}")
            self._entries[key] = (path, dtype, tuple(entry["shape"]), starts[path] + entry["data_offsets"][0])

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        return self._entries[name][2]

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``. Raises ModelError where the file has another shape, or ends too soon."""
        path, dtype, shape, offset = self._entries[name]
        if tuple(out.shape) != shape:
            raise ModelError(f"{path}: tensor {name} has shape {shape}; the configuration expects {tuple(out.shape)}")
        direct = dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out if direct else torch.empty(shape, dtype=dtype)
        self._fill(name, target, offset)
        if not direct:
            out.copy_(target)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``: only what is asked for is ever in memory."""
        _, dtype, shape, offset = self._entries[name]
        row = shape[1:][-1:]  # () of a vector
        row_bytes = prod(row) * dtype.itemsize

        def rows(start: int, stop: int) -> Tensor:
            part = torch.empty(stop - start, *row, dtype=dtype)
            self._fill(name, part, offset + start * row_bytes)
            return part

        return rows

    def located(self, name: str, rows: tuple[int, int] | None = None) -> Located | None:
        """See ``WeightSource.located``."""
        path, dtype, shape, offset = self._entries[name]
        row_bytes = shape[-1] * dtype.itemsize
        return Located(path, offset + (rows[0] * row_bytes if rows else 0), dtype, row_bytes)

    def _fill(self, name: str, target: Tensor, offset: int) -> None:
        path, _, shape, _ = self._entries[name]
        flat: Any = target.view(-1).view(torch.uint8).numpy()
        raw = memoryview(flat)
        with path.open("rb", buffering=0) as stream:
            stream.seek(offset)
            filled = 0
            while filled < len(raw):
                count = stream.readinto(raw[filled:])
                if not count:
                    raise ModelError(f"{path} ends inside tensor {name}: {prod(shape)} values expected")
                filled += count


def _start(path: Path) -> int:
    """Where the tensors of a safetensors file begin: after the header, whose length its first 8 bytes give."""
    with path.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")
