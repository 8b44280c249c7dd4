"""What a pass is to the recurrent mixers of a model: which positions of each row it reads, and the cache object through
which transformers' modules ask for their states."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foretell.core.tree import Plan
from foretell.model.hf.attention import SlotCache
from foretell.model.hf.recurrent.known import Rewind
from foretell.model.recurrent import BASE, READ, Key, MixerLayout, RecurrentCache

CONV, RECURRENT = ("conv", 0), ("recurrent", 0)
Run = Callable[..., Any]
Known = dict[Key, Tensor]
Options = dict[str, Any]


class StateKeeper(ABC):
    """How one module is called. Its states are listed by the names that transformers' cache would give them.

    For modules that keep their states outside transformers' cache: RecurrentGemma's blocks in attributes, RWKV's in
    tensors of all layers that are passed along.
    """

    fill: ClassVar[dict[Key, float]] = {}
    """What a state holds before any token, where that is not zero."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @abstractmethod
    def states(self, given: Tensor) -> dict[Key, Tensor]:
        """States of one row, as the module has left them after reading given [1, n, H] in the probe, or as large."""

    @abstractmethod
    def call(self, run: Run, given: Tensor, positions: Tensor, states: Known, kwargs: Options) -> tuple[Any, Known]:
        """What run, the module's own forward, returns for given [b, n, H] at positions [b, n], and the states after it."""


class GriffinKeeper(StateKeeper):
    """RecurrentGemma: the block keeps the convolution's inputs, its RG-LRU the recurrent state."""

    def states(self, given: Tensor) -> Known:
        """See ``StateKeeper``."""
        return {key: torch.zeros_like(x) for key, x in self._take().items()}

    def call(self, run: Run, given: Tensor, positions: Tensor, states: Known, kwargs: Options) -> tuple[Any, Known]:
        """See ``StateKeeper``; position 0 begins a text."""
        self.module.conv1d_state, self.module.rg_lru.recurrent_states = states[CONV], states[RECURRENT]
        result = run(given, **{**kwargs, "position_ids": positions})
        return result, self._take()

    def _take(self) -> dict[Key, Tensor]:
        block = self.module
        found = {CONV: block.conv1d_state, RECURRENT: block.rg_lru.recurrent_states}
        block.conv1d_state = block.rg_lru.recurrent_states = None
        return found


class RwkvKeeper(StateKeeper):
    """RWKV-4: five states, of which the feed-forward part reads the first and the attention the others."""

    fill: ClassVar[dict[Key, float]] = {("recurrent", 4): -1e38}  # the greatest exponent so far
    numbers: ClassVar[dict[str, tuple[int, ...]]] = {"RwkvFeedForward": (0,), "RwkvSelfAttention": (1, 2, 3, 4)}

    def states(self, given: Tensor) -> dict[Key, Tensor]:
        """See ``StateKeeper``."""
        wide = getattr(self.module, "attention_hidden_size", given.shape[-1])
        # Number 0 and 1 hold the last input, the others sums in float32.
        return {
            ("recurrent", k): given.new_zeros(1, given.shape[-1])
            if k < 2
            else torch.zeros(1, wide, device=given.device)
            for k in self.numbers[type(self.module).__name__]
        }

    def call(self, run: Run, given: Tensor, positions: Tensor, states: Known, kwargs: Options) -> tuple[Any, Known]:
        """See ``StateKeeper``. Rows with one token are called one by one: transformers mixes them up."""
        if given.shape[1] == 1 and len(given) > 1:
            rows = [slice(row, row + 1) for row in range(len(given))]
            parts = [
                self.call(run, given[row], positions, {k: x[row] for k, x in states.items()}, kwargs) for row in rows
            ]
            joined = {key: torch.cat([after[key] for _, after in parts]) for key in states}
            return (torch.cat([result[0] for result, _ in parts]), kwargs.get("state")), joined
        layer = self.module.layer_id
        passed: list[Any] = [None] * 5
        for (_, number), state in states.items():
            passed[number] = state.new_zeros(*state.shape, layer + 1)
            passed[number][..., layer] = state
        result = run(given, **{**kwargs, "state": passed})
        return (result[0], kwargs.get("state")), {key: passed[key[1]][..., layer] for key in states}


def keeper_of(module: nn.Module) -> StateKeeper | None:
    """The keeper of a module; None where it has no states of its own."""
    if hasattr(module, "conv1d_state") and hasattr(getattr(module, "rg_lru", None), "recurrent_states"):
        return GriffinKeeper(module)
    return RwkvKeeper(module) if type(module).__name__ in RwkvKeeper.numbers else None


Ints = NDArray[Any]
HELD_LIMIT = 128
"""Tokens of a pass of which inputs or terms are held. Longer passes are prompts, of which nothing is ever rejected."""


@dataclass(frozen=True)
class ModuleMixer:
    """A recurrent module of a model, and how it is called."""

    module: nn.Module
    layout: MixerLayout
    argument: str  # the name of its input
    width: int  # size of that input
    dtype: torch.dtype  # of that input
    keeper: StateKeeper | None = None  # where it does not keep its states in transformers' cache
    rewind: Rewind | None = None  # where what it keeps of a token is known

    def reading_again(self) -> "ModuleMixer":
        """The same, as any recurrent module is run: from its inputs, which are held and read again."""
        states = self.layout if self.rewind is None else self.rewind.plain
        return replace(self, layout=replace(states, held={"": (self.width, self.dtype)}, rewind=None), rewind=None)


class StateReading:
    """Where a pass begins and ends in each row, on the host.

    A row's pass is a line where its nodes lie at their positions, one after another; then slots before the first are all
    read on the way to it. Padding has the root's position.
    """

    def __init__(self, plan: Plan) -> None:
        slots, positions, length = plan.slots, plan.positions, plan.length
        real = positions == slots
        branches = ~real & (positions != length[:, None])
        if slots.shape[1] > 1:
            branches |= slots != slots[:, :1] + torch.arange(slots.shape[1], device=slots.device)
        start, count, committed, branching = torch.stack(
            [slots[:, 0], real.sum(1), length, branches.any(1).to(torch.int64)]
        ).tolist()  # one transfer
        self.committed, self.branches = np.array(committed), any(branching)
        if self.branches:
            real = (positions != length[:, None]) | (slots == length[:, None])
            first = torch.where(real, slots, torch.iinfo(torch.int64).max).amin(1)
            start, count, self.stop = torch.stack(
                [first, real.sum(1), torch.where(real, slots, -1).amax(1) + 1]
            ).tolist()
            self.stop = np.array(self.stop)
        self.start, self.count = np.array(start), np.array(count)
        self.num_nodes = slots.shape[1]


class Opened(ABC):
    """The states of one mixer while it is called."""

    @abstractmethod
    def before(self, key: Key) -> Tensor | None:
        """A state that it goes on from; None: it is to read as if from nothing."""

    @abstractmethod
    def extend(self, key: Key, given: Tensor) -> Tensor:
        """[b, C, K + n] the last inputs of a convolution, then the new ones given [b, C, n]."""

    @abstractmethod
    def replace(self, key: Key, state: Tensor) -> None:
        """Take a state after the call."""


class StateCache(SlotCache):
    """``SlotCache`` that also hands out states: what each mixer reads and writes during one call of it."""

    def __init__(self, memory: RecurrentCache, plan: Plan) -> None:
        super().__init__(memory, plan)
        self.memory, self.plan = memory, plan
        self.reading = StateReading(plan)
        self.open: dict[int, Opened] = {}
        """By layer index: what the mixer that is running now goes on from."""
        self.decided: dict[Any, Any] = {}
        """What mixers of this pass have found out that others will find out again."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[b, C, K] the last inputs of the convolution; zeros before any token."""
        return self.open[layer_idx].before(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """[b, C, K + n]: the last inputs, then the new ones; the last K are kept."""
        return self.open[layer_idx].extend(("conv", state_idx), conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[b, ...] the recurrent state; zeros before any token."""
        return self.open[layer_idx].before(("recurrent", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take the state after the tokens of this call."""
        self.open[layer_idx].replace(("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """True: the state before any token is zero."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: the convolution's inputs come through ``update_conv_state`` even where a pass has one token."""
        return True


class Call(ABC):
    """One mixer in one pass. Rows that have nothing to read in it (all of theirs is padding) are left as they are;
    ``places`` are the others, and all arrays below are of these."""

    def __init__(self, index: int, mixer: ModuleMixer, run: Callable[..., Any], cache: StateCache) -> None:
        self.index, self.mixer, self.run, self.cache = index, mixer, run, cache
        memory, reading = cache.memory, cache.reading
        self.states = memory.states
        self.tensors = self.states.tensors[index]
        self.places = np.nonzero(reading.count)[0]
        self.rows = self.places + memory.first
        self.start, self.count = reading.start[self.places], reading.count[self.places]
        self.committed = reading.committed[self.places]
        self.num_rows = len(reading.count)

    def __call__(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mixer returns for the n new inputs hidden [B, n, H]."""
        self.args, self.kwargs = args, kwargs
        if len(self.places) == self.num_rows:
            return self._go_on(hidden)
        result = self._go_on(hidden[torch.from_numpy(self.places).to(hidden.device)])
        first = result[0] if isinstance(result, tuple) else result
        output = first.new_zeros(self.num_rows, *first.shape[1:])
        output[torch.from_numpy(self.places).to(first.device)] = first
        return (output, *result[1:]) if isinstance(result, tuple) else output

    @abstractmethod
    def _go_on(self, hidden: Tensor) -> Any:
        """The same of rows that all have something to read."""

    def _lost(self, meta: Ints) -> RuntimeError:
        return RuntimeError(
            f"a pass begins at {self.start.tolist()}; states are held from {meta[:, BASE].tolist()}, inputs up to "
            f"{meta[:, READ].tolist()}"
        )
