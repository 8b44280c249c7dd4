"""How a model is loaded, as a value: what was asked for (``Wish``) and what the files are (``Found``) make what will be run
(``Loading``), or a refusal. Nothing is read or run here; ``load.py`` does that before and after.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from foretell.checkpoints.lora import LoraError
from foretell.checkpoints.names import FAST, check_implementation, check_kv, check_memory, check_weights
from foretell.core.errors import ConfigError

PACKING = ("auto", "native")
"""Implementations that can be asked for where quantised weights are to run."""
WRAPPED, OWN_CODE, SHARDED = "transformers", "own code", "shard"
"""Ways to run a model beside those of ``FAST``: as transformers' module, by the code that it comes with, and as this
process's shard of such a module."""


@dataclass(frozen=True)
class Wish:
    """The options of ``load_model``, each valid by itself."""

    name: str
    dtype: torch.dtype | None = None  # None: as ``is_auto_dtype`` says, or where that is False by the device
    is_auto_dtype: bool = False  # the checkpoint's own
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_map: str | dict[str, Any] | None = None
    implementation: str = "auto"
    tensor_parallel: bool = False
    weights: str = "auto"
    kv: str = "auto"
    num_loras: int = 0
    merges: bool = False  # one adapter is given without a name: it goes into weights that are floats
    memory_gib: float | None = None

    @property
    def rounds(self) -> str:
        """The option that the native implementation alone can fulfil; "" where there is none."""
        if self.weights in ("int8", "int4"):
            return f"weights={self.weights!r}"
        if self.memory_gib is not None:
            return f"memory_gib={self.memory_gib:g}"
        return f"kv={self.kv!r}" if self.kv == "int8" else ""

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other, whatever the files are."""
        check_implementation(self.implementation)
        is_fast = self.implementation in FAST
        if self.device_map is not None and is_fast:
            raise ConfigError(f"device_map needs implementation='transformers', not {self.implementation!r}")
        if self.num_loras and (self.tensor_parallel or self.device_map is not None or self.implementation == WRAPPED):
            raise ConfigError(
                "lora needs implementation 'native' or 'lean': drop implementation='transformers', device_map and "
                "tensor_parallel, or merge the adapter into the model with peft"
            )
        if self.tensor_parallel and self.device_map is not None:
            raise ConfigError("device_map and tensor_parallel=True exclude each other: give one of them")
        if self.tensor_parallel and is_fast:
            raise ConfigError(f"tensor_parallel=True needs implementation='transformers', not {self.implementation!r}")
        check_weights(self.weights)
        asked = _DTYPES.get(self.weights, self.dtype)
        if self.dtype not in (None, asked):
            raise ConfigError(
                f"weights={self.weights!r} contradicts dtype {str(self.dtype).removeprefix('torch.')!r}: "
                "drop one of the two"
            )
        check_kv(self.kv)
        check_memory(self.memory_gib)
        if self.rounds and (self.tensor_parallel or self.device_map is not None or self.implementation not in PACKING):
            raise ConfigError(f"{self.rounds} needs the native implementation, on one CPU: drop one of the options")


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Found:
    """What the files are."""

    has_code: bool = False  # Python code that is to be run; then nothing else is known
    is_gguf: bool = False
    stored: torch.dtype | None = None  # of the matrices, where the configuration or the tensors say it
    is_quantised: bool = False  # the matrices lie in blocks
    unsupported: Callable[[str, torch.dtype], str | None] = lambda _kind, _dtype: None
    """Why an implementation of ``FAST`` cannot run the model here with that dtype; None where it can."""


@dataclass(frozen=True)
class Loading:
    """What will be run."""

    ways: tuple[str, ...]  # implementations in the order in which they are tried, or one of the other ways
    dtype: torch.dtype | None  # None: by the model's own code
    merges: bool = False  # the adapter goes into the weights; others stand beside them
    is_widened: bool = False  # it runs in float32, and is stored in fewer bits
    reasons: Mapping[str, str] = field(default_factory=dict)  # why faster implementations are not tried


def plan_loading(wish: Wish, found: Found) -> Loading:
    """See the module's docstring; ``wish.check`` has passed. Raises ConfigError, of adapters LoraError."""
    if found.has_code:
        if wish.rounds:
            raise ConfigError(f"{wish.rounds} needs the native implementation; {wish.name} runs its own code")
        if wish.num_loras:
            raise ConfigError(f"lora needs the native or the lean implementation; {wish.name} runs its own code")
        if wish.tensor_parallel:
            raise ConfigError(f"tensor_parallel=True divides models of transformers; {wish.name} runs its own code")
        return Loading((OWN_CODE,), wish.dtype)
    dtype, is_widened = _dtype(wish, found)
    if wish.tensor_parallel:
        if found.is_gguf:
            raise ConfigError(f"tensor_parallel=True reads directories of safetensors, and {wish.name} is a GGUF file")
        return Loading((SHARDED,), dtype)
    merges = wish.merges and (wish.weights in _DTYPES or not found.is_quantised)
    if wish.rounds or wish.implementation in FAST:
        kind = wish.implementation if wish.implementation in FAST else "native"
        reason = found.unsupported(kind, dtype)
        if reason is None:
            return Loading((kind,), dtype, merges, is_widened)
        if wish.implementation in FAST:
            raise ConfigError(f"implementation {kind!r} does not support {wish.name}: {reason}; use 'auto'")
        raise ConfigError(f"{wish.rounds} needs the native implementation, which {wish.name} has not here: {reason}")
    if wish.implementation == WRAPPED or wish.device_map is not None:
        return Loading((WRAPPED,), dtype)
    reasons = {kind: reason for kind in FAST if (reason := found.unsupported(kind, dtype)) is not None}
    ways = tuple(kind for kind in FAST if kind not in reasons)
    if wish.num_loras:
        if not ways:
            raise no_loras(wish.name, reasons)
        return Loading(ways, dtype, merges, is_widened, reasons)
    return Loading((*ways, WRAPPED), dtype, merges, is_widened, reasons)


def _dtype(wish: Wish, found: Found) -> tuple[torch.dtype, bool]:
    """The dtype of what is not quantised, and whether that is wider than it is stored."""
    wanted = _DTYPES.get(wish.weights, wish.dtype)
    packs = wish.implementation in PACKING
    quantised = wish.weights in ("int8", "int4") or (wish.weights in ("auto", "least") and found.is_quantised)
    if quantised and packs and wanted is None and not wish.is_auto_dtype:
        # Keys and values in bfloat16 are read in half the time.
        wanted = torch.bfloat16 if found.unsupported("native", torch.bfloat16) is None else torch.float32
    if wanted is not None:
        return wanted, False
    stored = found.stored or torch.float32
    on_cpu = wish.device.type == "cpu" and wish.device_map is None
    dtype = torch.float32 if on_cpu and not wish.is_auto_dtype else stored
    return dtype, dtype != stored and packs and not wish.tensor_parallel


def no_loras(name: str, reasons: Mapping[str, str]) -> LoraError:
    """The error where adapters are given and no implementation that runs them can be had."""
    why = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    return LoraError(f"{name} runs by transformers alone here, where adapters (--lora) do not run ({why})")
