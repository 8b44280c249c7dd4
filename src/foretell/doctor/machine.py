"""What runs here: the machine, the implementation that was chosen and why no faster one, and how near a pass is to the
limit that memory sets."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.checkpoints.directories import resolve
from foretell.checkpoints.names import FAST
from foretell.core.errors import ForetellError
from foretell.core.provenance import provenance
from foretell.engine.engine import Engine
from foretell.kernels.native import variant
from foretell.model.load import load_config, unsupported

CACHE_BYTES = 64 << 20
"""Weights up to this may stay in the CPU's caches: memory is then no limit."""


@dataclass(frozen=True)
class Machine:
    """The machine and how the target runs on it."""

    processor: str
    cores: int | None  # that this process may use
    threads: int  # of torch
    load_average: float | None  # of the last minute, when the doctor began
    accelerator: str | None
    implementation: str
    kernels: str | None  # what native passes are compiled for, as FORETELL_ISA names it; None where they do not run
    why_not: dict[str, str]  # faster implementation -> why it does not run this target
    reads_again: str  # see ``ModelSpec``
    dtype: str
    weights: str
    kv: str  # how keys and values are held
    weight_bytes: int  # that a pass reads
    bytes_per_second: float | None  # that memory gives, measured; None where it was not

    @property
    def least_pass_seconds(self) -> float | None:
        """A pass cannot take less, unless the weights stay in the caches."""
        return self.weight_bytes / self.bytes_per_second if self.bytes_per_second else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "least_pass_seconds": self.least_pass_seconds}


def look(engine: Engine) -> Machine:
    """The machine and the engine's target; its memory is not measured."""
    spec = engine.model.spec
    origin = provenance()["machine"]
    load = origin["load_average"]
    dtype = str(spec.dtype).removeprefix("torch.")
    return Machine(
        processor=origin["processor"],
        cores=origin["cores"],
        threads=torch.get_num_threads(),
        load_average=load[0] if load else None,
        accelerator=origin["accelerator"],
        implementation=spec.implementation,
        kernels=variant() if spec.implementation == "native" else None,
        why_not=_why_not(engine),
        reads_again=spec.reads_again,
        dtype=dtype,
        weights=spec.weights or dtype,
        kv=dtype if spec.kv == "auto" else spec.kv,
        weight_bytes=spec.weight_bytes,
        bytes_per_second=None,
    )


def _why_not(engine: Engine) -> dict[str, str]:
    """Of each implementation that is preferred to the one that runs, why it does not run this target."""
    spec = engine.model.spec
    preferred = list(FAST)
    faster = preferred[: preferred.index(spec.implementation)] if spec.implementation in preferred else preferred
    if not faster:
        return {}
    try:
        config = load_config(Path(resolve(spec.name)), name=spec.name)
    except ForetellError:
        return dict.fromkeys(faster, "the target is in memory, where only transformers runs it")
    return {
        kind: unsupported(kind, config, spec.dtype, spec.device) or "it was not asked for, or failed to load"
        for kind in faster
    }
