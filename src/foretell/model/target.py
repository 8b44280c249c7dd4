"""The interface between the engine and causal language models.

A ``CausalModel`` is weights; a ``KVCache`` is the memory of some rows; a ``Target`` is the pair that the engine and
the drafters call. Three modules implement ``CausalModel``: ``model/hf/adapter.py`` (the unmodified transformers model, the
reference), ``run/lean.py`` (a fast implementation of the Llama family) and ``run/native.py`` (the same as one C
operator).
"""

import os.path
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretell.checkpoints.lora import Lora
from foretell.core.errors import ConfigError, ModelError
from foretell.core.params import fresh_seed
from foretell.core.probs import Processors
from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.windows import DraftWindow

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSpec:
    """The properties of a model that the engine reads, for every implementation."""

    name: str  # hub id, directory, GGUF file, or "bundled/target"
    architecture: str  # e.g. "Qwen3ForCausalLM"
    implementation: str  # "transformers", "lean" or "native"
    vocab_size: int  # V: columns of the logits, padding included
    num_layers: int
    hidden_size: int
    max_positions: int  # context length
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int  # bytes that one decode pass must read
    eos_token_ids: tuple[int, ...] = ()
    chains_only: str = ""  # why it reads lines of guesses alone and no trees; "" where it reads both
    reads_again: str = ""  # why its recurrent layers read accepted guesses again, which costs time; "" where none does
    cuda_graphs: bool = True  # whether steps may be launched as captured graphs, on a device that has them
    weights: str = ""  # how the matrices are held where that is not in dtype: "int8", "Q4_K+Q6_K"
    kv: str = "auto"  # how keys and values are held: one of ``names.KV``
    cut: str = ""  # why max_positions are fewer than its configuration states; "" where they are not
    merged: str = ""  # the directory of the adapter that is merged into the weights; "" where none is
    held_bytes: int | None = None  # of a mixture's experts that are held, where the others are read as they are needed

    @property
    def display_name(self) -> str:
        """What clients may see: of a directory or file its name alone, since its path is this machine's; else ``name``."""
        path = os.path.abspath(os.path.expanduser(self.name))
        is_path = self.name.startswith((".", "/", "~")) or os.path.exists(path)
        return (os.path.basename(path) if is_path else "") or self.name

    def context(self, most: int | None = None) -> str:
        """How many tokens a text may have, for messages: ``max_positions`` or what somebody has set, and why they are fewer
        than a configuration states."""
        length = self.max_positions if most is None else most
        return f"{length} ({self.cut})" if self.cut and length == self.max_positions else f"{length}"

    @property
    def described(self) -> dict[str, Any]:
        """What decides how long its passes take: the identity for which measured times are kept."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "implementation": self.implementation,
            "weights": self.weights,
            "dtype": str(self.dtype),
            "device": str(self.device),
            "weight_bytes": self.weight_bytes,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            **({} if self.cuda_graphs else {"cuda_graphs": "off"}),
            **({} if self.kv == "auto" else {"kv": self.kv}),
            **({} if self.held_bytes is None else {"held_bytes": self.held_bytes}),
        }

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the cache's memory."""
        return torch.int8 if self.kv == "int8" else self.dtype

    @property
    def is_quantised(self) -> bool:
        """Whether the matrices are rounded further than dtype: the distribution is then the rounded model's."""
        return self.weights not in ("", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class PassOptions:
    """Which layers of a pass run, and what is asked of them beside their keys and values."""

    layers: tuple[int, int] | None = None
    """(first, stop); None: all. With first > 0, ``hidden`` must be given, so a self-drafter's lower layers never run
    twice."""
    hidden: Tensor | None = None  # [B, n, H] the residual stream that layer ``first`` reads
    taps: Sequence[int] = ()  # layers whose outputs are returned
    head: bool = True  # whether there are logits, where the last layer runs: a prefill needs none

    def range(self, num_layers: int) -> tuple[int, int]:
        """(first, stop). Raises ConfigError where range, hidden and taps do not fit together, or the model."""
        first, stop = self.layers or (0, num_layers)
        if not 0 <= first <= stop <= num_layers:
            raise ConfigError(f"layers {first, stop} are not a range of 0 to {num_layers}")
        if (self.hidden is None) != (first == 0):
            raise ConfigError(f"layers {first, stop}: hidden must be given iff the first layer is not 0")
        for tap in self.taps:
            if not first <= tap < stop:
                raise ConfigError(f"tap {tap} is not among the layers {first, stop} that run")
        return first, stop


WHOLE = PassOptions()
"""All layers and logits."""


@dataclass(frozen=True)
class Output:
    """What one pass returns. Valid until the next pass of the same model (a captured graph reuses its buffers)."""

    logits: Tensor | None  # [B, n, V] in the model's dtype or float32; None unless the last layer ran and head is True
    hidden: Tensor  # [B, n, H] the residual stream after the last layer that ran, before the final norm
    taps: Tensor | None  # [B, n, T * H] outputs of the tapped layers, concatenated in the requested order


@dataclass(frozen=True)
class Decoded:
    """What ``CausalModel.decode`` returns of n passes over one token of each of B rows."""

    output: Output  # of the last pass
    tokens: Tensor  # [n, B] what the passes read
    lengths: Tensor  # [n, B] committed slots before each
    taps: Tensor | None  # [n, B, 1, T * H]
    drawn: list[int] | None  # what each row draws after the last pass, where the logits alone decide all of that


@dataclass(frozen=True)
class DiskFigures:
    """Experts that stay in files, and what was read of them so far."""

    total_bytes: int  # of all experts, as they lie in memory
    held_bytes: int  # of those that are held, at most
    bytes_read: int  # of files, because a layer needed them
    bytes_ahead: int  # of which the system was asked before a layer needed them
    hits: int  # experts that a layer needed and that were held ...
    misses: int  # ... and that were read
    named: int  # experts that were not held and that the look ahead named ...
    used: int  # ... and of them, those that the layer then needed
    seconds_waited: float  # of passes, for what they read

    @property
    def hit_rate(self) -> float:
        """Share of the experts that layers needed which were held; 0 before any was."""
        return self.hits / max(1, self.hits + self.misses)


class CausalModel(ABC):
    """A decoder-only language model that can run any range of its layers over any tree."""

    spec: ModelSpec
    memory_left: int | None = None
    """Of the memory that the model was given, bytes for keys, values and passes; None: it was given no limit."""

    @property
    def disk(self) -> DiskFigures | None:
        """Of a mixture whose experts are read as they are needed; None: all weights are in memory."""
        return None

    loras: tuple[str, ...] = ()
    """Names of the adapters that rows can have (``KVCache.loras``), beside none."""
    is_shared: bool = False
    """Whether several processes run one model, so that all must make the same passes."""
    is_leader: bool = True
    """Whether this process makes the decisions that depend on a clock or on arrivals."""

    def share(self, value: T) -> T:
        """The leader's value, in every process that runs the model. All must call it, in the same order."""
        return value

    def fresh_seed(self) -> int:
        """A seed for a request that gives none; where several processes run one model, the same on all of them."""
        return fresh_seed()

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> "CausalModel":
        """The same model with other weights, named and shaped as its checkpoint has them; this one stays as it is. Raises
        ModelError where an implementation cannot."""
        raise ModelError(
            f"{self.spec.name}: implementation {self.spec.implementation!r} cannot take other weights; load it as "
            "'native', 'lean' or 'transformers'"
        )

    def limited(self, limit: DraftWindow) -> "CausalModel":
        """The same model, as a draft that reads so much of a text alone; it shares the weights. Raises ConfigError where it
        cannot be."""
        raise ConfigError(
            f"draft_window = {limit.size}: implementation {self.spec.implementation!r} of {self.spec.name} has no windows "
            "for drafts; load it as 'native' or drop it"
        )

    def add_loras(self, loras: Mapping[str, Lora]) -> None:
        """Hold adapters, by their names, in the order of ``loras``; at most once. Raises LoraError where one does not fit,
        ModelError where an implementation runs none."""
        raise ModelError(
            f"{self.spec.name}: implementation {self.spec.implementation!r} runs no adapters (--lora); load the model as "
            "'native' or 'lean', or merge the adapter into it with peft"
        )

    def lora_of(self, name: str | None) -> int:
        """The number of an adapter, as ``KVCache.loras`` has it; 0 for None. Raises ConfigError where there is none."""
        if name is None:
            return 0
        if name not in self.loras:
            known = ", ".join(map(repr, self.loras)) or "none: load them with lora={name: directory}"
            raise ConfigError(f"lora = {name!r} is no adapter that is loaded; there are {known}")
        return self.loras.index(name) + 1

    @abstractmethod
    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache for num_rows sequences of at most capacity slots each."""

    has_blocks: bool = False
    """Whether rows of ``new_pool`` take blocks of its memory as their texts grow; else each has its capacity."""

    def new_pool(self, num_rows: int, capacity: int, slots: int | None) -> KVCache:
        """The same for the rows of a batch, which use ``slots`` slots at most together (``KVCache.fit``); None: any."""
        return self.new_cache(num_rows, capacity)

    @abstractmethod
    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """Run n nodes a row and write their K and V into ``plan.slots`` of the layers that run.

        tokens [B, n] int64 (read only where layers start at 0). Logits of padding nodes are finite and undefined.
        """

    most_passes: int = 1
    """Passes of plain decoding that one call of ``decode`` is worth; 1: it has none."""

    def decode(
        self, pending: Tensor, length: Tensor, cache: KVCache, processors: Processors, seeds: Tensor, most: int,
        taps: Sequence[int] = (),
    ) -> "Decoded":  # fmt: skip
        """Plain decoding of B rows, at most ``most`` passes: each reads the tokens that the stream COUPLED draws, with
        processors and seeds [B], from the logits of the one before, the first the pending ones [B]. The pass behind which a
        row ends, or whose logits alone do not decide a draw, is the last.

        taps: layers, as for ``forward``. For processors that read no history and have no bias.
        """
        raise NotImplementedError

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[B, n, V]: final norm and head on a residual stream [B, n, H]: the exit of ``forward``, and early exits."""

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """[B, n, H]: the embeddings that layer 0 reads for tokens [B, n], for drafters that share them."""

    @abstractmethod
    def normed(self, hidden: Tensor) -> Tensor:
        """[B, n, H]: the final norm alone of a residual stream [B, n, H]."""

    @abstractmethod
    def head(self, normed: Tensor) -> Tensor:
        """[B, n, V]: the head alone, on what ``normed`` returned or a drafter predicts of it."""

    def head_rows(self, ids: Tensor) -> Tensor:
        """[N, H] float32: the head's rows of tokens ids [N]. For every implementation: its outputs for all unit vectors,
        some at a time; of a head with a bias, or that caps its logits, the linear part at zero."""
        size, spec = self.spec.hidden_size, self.spec
        none = self.head(torch.zeros(1, 1, size, dtype=spec.dtype, device=spec.device))[0, :, ids].float()
        units = torch.eye(size, dtype=spec.dtype, device=spec.device)
        parts = (units[start : start + 256] for start in range(0, size, 256))
        columns = [self.head(part[None])[0][:, ids].float() - none for part in parts]
        return torch.cat(columns).t().contiguous()


class WrappedModel(CausalModel):
    """A model with something changed: what a subclass does not say is the inner one's."""

    def __init__(self, inner: CausalModel) -> None:
        self.inner, self.spec, self.loras = inner, inner.spec, inner.loras
        self.is_shared, self.is_leader = inner.is_shared, inner.is_leader

    def share(self, value: T) -> T:
        """See ``CausalModel.share``."""
        return self.inner.share(value)

    def fresh_seed(self) -> int:
        """See ``CausalModel.fresh_seed``."""
        return self.inner.fresh_seed()

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """See ``CausalModel.new_cache``."""
        return self.inner.new_cache(num_rows, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``CausalModel.embed``."""
        return self.inner.embed(tokens)

    def head_rows(self, ids: Tensor) -> Tensor:
        """See ``CausalModel.head_rows``."""
        return self.inner.head_rows(ids)

    def normed(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.normed``."""
        return self.inner.normed(hidden)


class Target:
    """One causal LM with the KV cache of the rows being decoded. (The draft model's pair is one of these too.)"""

    def __init__(self, model: CausalModel, num_rows: int, capacity: int) -> None:
        self.model = model
        self.cache = model.new_cache(num_rows, capacity)
        self.seconds = 0.0  # of all passes so far, on the host clock

    @classmethod
    def of(cls, model: CausalModel, cache: KVCache) -> "Target":
        """The pair of a model and an existing cache."""
        made = object.__new__(cls)
        made.model, made.cache, made.seconds = model, cache, 0.0
        return made

    @property
    def spec(self) -> ModelSpec:
        """The model's specification."""
        return self.model.spec

    @property
    def bytes_read(self) -> int:
        """What the model's passes have read of files so far."""
        disk = self.model.disk
        return 0 if disk is None else disk.bytes_read

    def forward(
        self,
        tokens: Tensor,
        plan: Plan,
        *,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        taps: Sequence[int] = (),
        head: bool = True,
    ) -> Output:
        """See ``CausalModel.forward`` and ``PassOptions``; the cache is this target's own."""
        begun = perf_counter()
        output = self.model.forward(tokens, plan, self.cache, PassOptions(layers, hidden, taps, head))
        self.seconds += perf_counter() - begun
        return output

    def decode(
        self,
        pending: Tensor,
        length: Tensor,
        processors: Processors,
        seeds: Tensor,
        most: int,
        taps: Sequence[int] = (),
    ) -> "Decoded":
        """See ``CausalModel.decode``; the cache is this target's own."""
        begun = perf_counter()
        made = self.model.decode(pending, length, self.cache, processors, seeds, most, taps)
        self.seconds += perf_counter() - begun
        return made

    def commit(self, src: Tensor, dst: Tensor) -> None:
        """Move K and V of each row from slots src [B, D] to slots dst [B, D] (pad with src == dst)."""
        self.cache.move(src, dst)

    def keep(self, rows: Tensor, used: int | None = None) -> None:
        """Drop all rows but rows [B'] (their order becomes the new one); slots at or after ``used`` need not survive."""
        self.cache.keep(rows, used)
