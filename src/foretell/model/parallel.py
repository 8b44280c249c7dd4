"""A target larger than one device, its weights divided over processes: transformers' tensor parallelism as a
``CausalModel``.

``torchrun --nproc-per-node N script.py`` starts N processes that all run the same script; transformers gives each of them
1/N of every matrix that its plan names and sums or gathers what they compute. No further protocol is needed: every
process drafts, verifies and commits for itself, and they agree because all of it is a function of the same numbers.
Noise is keyed by (seed, position, token), the drafter is whole in every process, and the logits are the same *bits*
everywhere: partial sums are all-reduced, so each process holds one and the same sum, and the columns of the head are
gathered, each computed once. (Measured with gloo on the CPU: equal bits on 2 processes in 14 families, and on 2 and 4
in passes of 1 to 128 tokens.) So logits are not broadcast: in a wide vocabulary that would cost more than the sums of
many layers.

Processes can still diverge because of the caller (a script that gives each its own share of the prompts, as
data-parallel scripts do) or because of devices of different kinds. Collectives of different passes would then be
combined: a hang, or wrong text. So every pass first compares a 16-byte checksum of its inputs between the processes,
and raises an error where they differ.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.distributed import DistributedConfig

from foretell.core.errors import ConfigError
from foretell.core.noise import derive_seed, mix
from foretell.core.params import fresh_seed
from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import WHOLE, Output, PassOptions, T

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Projections by whose rows a plan divides attention, and the count that must then divide by the number of processes.
QUERIES = frozenset(("q_proj", "q_b_proj", "qkv_proj", "query_key_value"))
KEYS = frozenset(("k_proj", "qkv_proj"))


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together."""

    rank: int
    local_rank: int  # among those of this machine
    num_processes: int

    @classmethod
    def find(cls) -> "Launch":
        """Read from the environment variables that torchrun sets. Raises ConfigError where they are missing."""
        absent = [name for name in VARIABLES if not os.environ.get(name)]
        if absent:
            raise ConfigError(
                "tensor_parallel=True needs several processes that were started together, and this one was started "
                f"alone ({', '.join(absent)} not set): run 'torchrun --nproc-per-node N script.py', N being the number "
                "of devices"
            )
        try:
            rank, local_rank, num_processes = (int(os.environ[name]) for name in VARIABLES[:3])
        except ValueError as error:
            raise ConfigError(
                f"RANK, LOCAL_RANK and WORLD_SIZE must be numbers, as torchrun sets them: {error}"
            ) from None
        return cls(rank, local_rank, num_processes)

    def device(self, given: str | torch.device) -> torch.device:
        """The device of this process, ``given`` being only of a kind: "cpu", or "cuda" for the one of its local rank.

        transformers puts shards on the accelerator that torch finds, so any other kind raises ConfigError, and so does a
        numbered device, which all processes would share.
        """
        found = torch.accelerator.current_accelerator()
        kind = "cpu" if found is None else found.type
        try:
            asked = torch.device(given)
        except RuntimeError:
            raise ConfigError(f"device {str(given)!r} is unknown; with tensor_parallel=True give {kind!r}") from None
        if asked.type != kind or asked.index is not None:
            raise ConfigError(
                f"device {str(given)!r}: with tensor_parallel=True each process takes the device of its own number, of "
                f"the kind that torch finds here: give device={kind!r}"
            )
        return asked if kind == "cpu" else torch.device(kind, self.local_rank)


def check_divides(config: Any, num_processes: int, *, name: str) -> None:
    """Raise ConfigError unless the model of a configuration can be divided among so many processes."""
    if num_processes == 1:
        return
    text = config.get_text_config()
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise ConfigError(
            f"{name}: transformers has no plan for dividing the layers of {config.model_type!r} among processes; use "
            "device_map='auto' in a single process instead of tensor_parallel=True"
        )
    divided = {key.rsplit(".", 1)[-1] for key, style in plan.items() if style == "colwise"}
    heads = int(text.num_attention_heads)
    counts = {"attention heads": heads} if divided & QUERIES else {}
    if divided & KEYS:
        counts["key-value heads"] = int(getattr(text, "num_key_value_heads", None) or heads)
    if any(count % num_processes for count in counts.values()):
        fitting = [str(n) for n in range(1, min(counts.values()) + 1) if not any(c % n for c in counts.values())]
        raise ConfigError(
            f"{name}: {' and '.join(f'{count} {what}' for what, count in counts.items())} do not divide among "
            f"{num_processes} processes; start {' or '.join(fitting)} (torchrun --nproc-per-node)"
        )


class ShardedModel(TransformersModel):
    """This process's shard of a model. Every process must make the same calls, in the same order.

    Cache and ``spec.weight_bytes`` are those of the shard; logits, streams and taps are whole, the same in every process.
    """

    @classmethod
    def load_shard(
        cls, path: Path, launch: Launch, *, dtype: torch.dtype, device: torch.device, name: str
    ) -> "ShardedModel":
        """Load this process's part of a checkpoint, and join the process group (``torch.distributed``, unless joined
        already).

        Under one process it is the whole model. Raises ModelError as ``TransformersModel.load``.
        """
        count = launch.num_processes
        sharding = DistributedConfig(tp_size=count, tp_plan="auto") if count > 1 else None
        return cls.load(path, dtype=dtype, device=device, sharding=sharding, name=name)

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel.forward``. Raises ConfigError, in all processes, where they were given unlike passes."""
        first, stop = self._range(options)
        self._check_agreement(tokens, plan, first, stop, int(options.head))
        return super().forward(tokens, plan, cache, options)

    @property
    def is_shared(self) -> bool:  # type: ignore[override]  # an attribute elsewhere
        """Whether there is another process."""
        return bool(torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)

    @property
    def is_leader(self) -> bool:  # type: ignore[override]
        """Process 0 leads."""
        return not self.is_shared or torch.distributed.get_rank() == 0

    def share(self, value: T) -> T:
        """The value of process 0, pickled to the others. Waits for them, however long (up to the group's time-out)."""
        if not self.is_shared:
            return value
        box: list[Any] = [value if self.is_leader else None]
        torch.distributed.broadcast_object_list(box, src=0)
        shared: T = box[0]
        return shared

    def fresh_seed(self) -> int:
        """A random seed that all processes agree on: that of process 0."""
        seed = torch.tensor(fresh_seed(), device=self._device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(seed, src=0)
        return int(seed)

    def _check_agreement(self, tokens: Tensor, plan: Plan, *numbers: int) -> None:
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return
        nodes = mix(mix(mix(tokens) ^ plan.positions) ^ plan.slots).flatten()
        order = torch.arange(nodes.numel(), device=nodes.device)
        checksum = mix(nodes ^ order).sum() + derive_seed(*tokens.shape, plan.span, *numbers)
        # The largest, and the complement of the smallest: one reduction, the same answer in every process.
        extremes = torch.stack((checksum, ~checksum))
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        largest, complement = extremes.tolist()
        if largest != ~complement:
            raise ConfigError(
                f"{self.spec.name}: the processes got different passes (here, in process "
                f"{torch.distributed.get_rank()}: {tokens.shape[0]} rows of {tokens.shape[1]} tokens); with "
                "tensor_parallel=True every process must make the same calls with the same prompts, seeds and options"
            )
