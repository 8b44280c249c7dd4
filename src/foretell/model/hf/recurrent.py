"""Recurrent mixers of an unmodified transformers model (gated delta nets, Mamba, short convolutions).

A pass begins at some position of each row. Where that is the position after the last pass, the mixer goes on from the
state that it left. Otherwise guesses were rejected: it goes on from the last state that is committed for certain, and the
inputs of that mixer since then, the *lag*, are read again in front of the new ones. Only the mixers read them again: no
attention, no experts, no head. A lag of more than ``LAG_LIMIT`` is read in a call of its own, which moves that state on.

Rows of a batch have lags of different length. Shorter ones are padded at the end, and a padded row's final state is not
used (its lag grows instead); wide passes (prompts) are run in groups of equal length.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foretell.core.errors import ConfigError
from foretell.core.tree import Plan
from foretell.model.hf.attention import RecordingCache, SlotCache
from foretell.model.hf.keepers import Keeper, keeper_of
from foretell.model.recurrent import BASE, LIVE, READ, SIDE, Key, MixerLayout, RecurrentCache

Ints = NDArray[Any]
LAG_LIMIT = 8
"""Inputs read again in front of a pass; more are read in a call of their own."""
PAD_LIMIT = 32
"""Tokens of a call up to which rows are padded to one length."""
HELD_LIMIT = 128
"""Tokens of a pass whose inputs are held. Longer passes are prompts, of which nothing is ever rejected."""


@dataclass(frozen=True)
class Mixer:
    """A recurrent module of a model, and how it is called."""

    module: nn.Module
    layout: MixerLayout
    argument: str  # the name of its input
    keeper: Keeper | None = None  # where it does not keep its states in transformers' cache


class Reading:
    """Where a pass begins and ends in each row, on the host."""

    def __init__(self, plan: Plan) -> None:
        """Raises ConfigError for a plan that branches."""
        slots, positions, length = plan.slots, plan.positions, plan.length
        real = positions == slots  # in a line slot is position; padding has the root's position
        branches = ~real & (positions != length[:, None])
        counts = real.sum(1)
        start, count, committed, bad = torch.stack(
            [slots[:, 0], counts, length, branches.any(1).to(torch.int64)]
        ).tolist()  # one transfer
        if any(bad):
            raise ConfigError("a tree of guesses was given to a model with recurrent states: choose shape 'chain'")
        self.start, self.count = np.array(start), np.array(count)
        self.committed = np.array(committed)
        self.num_nodes = slots.shape[1]


class StateCache(SlotCache):
    """``SlotCache`` that also hands out states: what each mixer reads and writes during one call of it."""

    def __init__(self, memory: RecurrentCache, plan: Plan) -> None:
        super().__init__(memory, plan)
        self.memory = memory
        self.reading = Reading(plan)
        self.open: dict[int, dict[Key, Tensor]] = {}  # of the layer whose mixer is being called
        """By layer index: what the mixer that is running now goes on from."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """[b, C, K] the last inputs of the convolution; zeros before any token."""
        return self.open[layer_idx]["conv", state_idx]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """[b, C, K + n]: the last inputs, then the new ones; the last K are kept."""
        states = self.open[layer_idx]
        before = states["conv", state_idx]
        whole = torch.cat([before.to(conv_states.dtype), conv_states], -1)
        states["conv", state_idx] = whole[..., whole.shape[-1] - before.shape[-1] :]
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """[b, ...] the recurrent state; zeros before any token."""
        return self.open[layer_idx]["recurrent", state_idx]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take the state after the tokens of this call."""
        self.open[layer_idx]["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """True: the state before any token is zero."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: the convolution's inputs come through ``update_conv_state`` even where a pass has one token."""
        return True


@contextmanager
def mixing(mixers: Sequence[Mixer], cache: StateCache, *, tokenwise: bool) -> Iterator[None]:
    """Let the mixers go on from the states of a cache while the context is open: one pass. tokenwise: they read token by
    token. Changes the modules while it is open, as ``split.layer_range`` does."""
    saved: list[tuple[nn.Module, Any]] = []
    absent = object()
    try:
        for index, mixer in enumerate(mixers):
            attributes = mixer.module.__dict__
            before = attributes.get("forward", absent)
            saved.append((mixer.module, before))
            attributes["forward"] = _forward(_Call(index, mixer, mixer.module.forward, cache, tokenwise))
        yield
    finally:
        for module, before in saved:
            if before is absent:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


def _forward(call: "_Call") -> Callable[..., Any]:
    name = call.mixer.argument

    def forward(*args: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            return call(kwargs.pop(name), args, kwargs)
        return call(args[0], args[1:], kwargs)

    return forward


class _Call:
    """One mixer in one pass. Rows that have nothing to read in it (all of theirs is padding) are left as they are;
    ``places`` are the others, and all arrays below are of these."""

    def __init__(self, index: int, mixer: Mixer, run: Callable[..., Any], cache: StateCache, tokenwise: bool) -> None:
        self.index, self.mixer, self.run, self.cache, self.tokenwise = index, mixer, run, cache, tokenwise
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

    def _go_on(self, hidden: Tensor) -> Any:
        start, rows, all_meta = self.start, self.rows, self.states.meta[self.index]
        meta = all_meta[rows]  # [b, 4], a copy
        is_live = meta[:, LIVE] == start
        settled = is_live & (start <= self.committed)
        meta[settled, SIDE] ^= 1
        meta[settled, BASE] = meta[settled, READ] = start[settled]
        if ((meta[:, BASE] > start) | (~is_live & (meta[:, READ] < start))).any():
            raise RuntimeError(
                f"a pass begins at {start.tolist()}; states are held from {meta[:, BASE].tolist()}, inputs up to "
                f"{meta[:, READ].tolist()}"
            )
        # Never past what is committed: a drafter that reads its guesses one by one may have to go back there.
        known = np.where(is_live, 0, np.minimum(start, self.committed) - meta[:, BASE])
        late = (start - meta[:, BASE] > LAG_LIMIT) & (known > 0)
        if self.tokenwise:
            self._advance(known, meta)
        elif late.any():
            least = known[late].min()
            self._advance(np.where(known >= least, least, 0), meta)
        offset = start - meta[:, BASE]
        side = meta[:, SIDE] ^ (is_live & ~settled)
        meta[:, LIVE] = -1
        output, exact = self._read(hidden, np.where(is_live, 0, offset), side, meta[:, SIDE] ^ 1)
        meta[exact, LIVE] = start[exact] + self.count[exact]
        meta[:, READ] = start
        if int(self.count.max()) <= HELD_LIMIT:
            self._hold(hidden, offset)
            meta[:, READ] += self.count
        all_meta[rows] = meta
        return output

    # -- calls -----------------------------------------------------------------------------------------------------

    def _read(self, hidden: Tensor, lag: Ints, side: Ints, after: Ints) -> tuple[Any, Ints]:
        """Read the lag of each row and its new inputs, from the states at ``side``; put the states of rows that end where
        their call does to ``after``. What the mixer returned for the new inputs, and which rows these are [b]."""
        total, num_new = lag + self.count, hidden.shape[1]
        everywhere, widest = np.arange(len(total)), int(total.max())
        groups = [(everywhere, widest)]
        if not self.tokenwise and widest > PAD_LIMIT:
            groups = [(np.nonzero(total == width)[0], int(width)) for width in np.unique(total)]
        exact = np.ones(len(total), dtype=bool) if self.tokenwise or len(groups) > 1 else total == widest
        output: Any = None
        for chosen, width in groups:
            whole = len(groups) == 1
            inputs = self._inputs(hidden if whole else hidden[chosen], lag[chosen], width, self.rows[chosen])
            begin = (self.start - lag)[chosen]
            result, states = self._run(inputs, self._pick(self.rows[chosen], side[chosen]), total[chosen], begin)
            kept = exact[chosen]
            if not kept.all():
                at = torch.from_numpy(np.nonzero(kept)[0])
                states = {key: x[at.to(x.device)] for key, x in states.items()}
            self._put(self.rows[chosen[kept]], after[chosen[kept]], states)
            first, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            if width != num_new or lag[chosen].any():
                back = torch.from_numpy(lag[chosen])[:, None] + torch.arange(num_new)[None]
                back = back.clamp(max=width - 1).to(first.device)
                first = first.gather(1, back[..., None].expand(-1, -1, first.shape[-1]))
            if output is None:
                output = first if whole else first.new_zeros(len(total), *first.shape[1:])
            if not whole:
                output[torch.from_numpy(chosen).to(first.device)] = first
        return (output if rest is None else (output, *rest)), exact

    def _inputs(self, new: Tensor, lag: Ints, width: int, rows: Ints) -> Tensor:
        """[b, width, H] the held inputs of each row, then its new ones, then anything."""
        behind = int(lag.max())
        if not behind:
            return new[:, :width]
        shift, at = torch.from_numpy(lag)[:, None], torch.arange(width)[None]
        index = torch.where(at < shift, at, behind + (at - shift).clamp(max=new.shape[1] - 1)).to(new.device)
        both = torch.cat([self._held(rows, behind), new], 1)
        return both.gather(1, index[..., None].expand(-1, -1, new.shape[-1]))

    def _advance(self, counts: Ints, meta: Ints) -> None:
        """Move the committed state of each row on by counts of its held inputs; they are 0 or equal, unless tokenwise."""
        chosen = np.nonzero(counts)[0]
        if not len(chosen):
            return
        rows, wanted = self.rows[chosen], counts[chosen]
        held, states = self._held(rows, int(wanted.max())), self._pick(rows, meta[chosen, SIDE])
        _, states = self._run(held, states, wanted, meta[chosen, BASE])
        meta[chosen, SIDE] ^= 1
        meta[chosen, BASE] += wanted
        self._put(rows, meta[chosen, SIDE], states)
        inputs = self.states.inputs[self.index]
        for row, count, left in zip(rows, wanted, (meta[:, READ] - meta[:, BASE])[chosen], strict=True):
            if left > 0:
                inputs[row, :left] = inputs[row, count : count + left].clone()

    def _run(
        self, inputs: Tensor, states: dict[Key, Tensor], total: Ints, begin: Ints
    ) -> tuple[Any, dict[Key, Tensor]]:
        """The mixer over inputs [b, T, H], whose first is at positions begin [b], from states; what it returns, and the
        states after it (of rows that are shorter than T: after their own last token where it reads token by token, else
        undefined)."""
        width = inputs.shape[1]
        whole = not self.tokenwise or width == 1
        if whole or ((total == width).all() and not begin.any()):
            return self._once(inputs, states, begin)  # from nothing, every mixer can read a whole text
        outputs: list[Tensor] = []
        result: Any = None
        for at in range(width):
            going = total > at
            copies = {key: x.clone() for key, x in states.items()}
            result, after = self._once(inputs[:, at : at + 1], copies, begin + at)
            if not going.all():
                mask = torch.from_numpy(going)
                after = {
                    key: torch.where(mask.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, states[key])
                    for key, x in after.items()
                }
            states = after
            outputs.append(result[0] if isinstance(result, tuple) else result)
        joined = torch.cat(outputs, 1)
        return ((joined, *result[1:]) if isinstance(result, tuple) else joined), states

    def _once(self, inputs: Tensor, states: dict[Key, Tensor], begin: Ints) -> tuple[Any, dict[Key, Tensor]]:
        keeper = self.mixer.keeper
        if keeper is not None:
            positions = torch.from_numpy(begin[:, None] + np.arange(inputs.shape[1])).to(inputs.device)
            return keeper.call(self.run, inputs, positions, states, self.kwargs)
        layer = self.mixer.layout.layer
        opened = self.cache.open[layer] = dict(states)
        result = self.run(inputs, *self.args, **self.kwargs)
        del self.cache.open[layer]
        return result, opened

    # -- memory ----------------------------------------------------------------------------------------------------

    def _pick(self, rows: Ints, side: Ints) -> dict[Key, Tensor]:
        """Copies of the states of some rows, each at its own side: the mixers write into what they are given."""
        if len(rows) == 1:
            row, one = int(rows[0]), int(side[0])
            return {key: memory[one, row : row + 1].clone() for key, memory in self.tensors.items()}
        at, sides = torch.from_numpy(rows), torch.from_numpy(side)
        return {key: memory[sides.to(memory.device), at.to(memory.device)] for key, memory in self.tensors.items()}

    def _put(self, rows: Ints, side: Ints, states: dict[Key, Tensor]) -> None:
        if len(rows) == 1:
            for key, memory in self.tensors.items():
                memory[int(side[0]), int(rows[0])] = states[key][0]
            return
        at, sides = torch.from_numpy(rows), torch.from_numpy(side)
        for key, memory in self.tensors.items():
            memory[sides.to(memory.device), at.to(memory.device)] = states[key].to(memory.dtype)

    def _held(self, rows: Ints, count: int) -> Tensor:
        """[b, count, H] the inputs held since the committed state of some rows."""
        inputs = self.states.inputs[self.index]
        return inputs[torch.from_numpy(rows).to(inputs.device), :count]

    def _hold(self, hidden: Tensor, offset: Ints) -> None:
        """Hold the new inputs behind those that are held already."""
        width = int(self.count.max())
        inputs = self.states.hold(self.index, int(offset.max()) + width)
        if len(offset) == 1:
            inputs[self.rows[0], offset[0] : offset[0] + width] = hidden[0, :width]
            return
        rows = torch.from_numpy(self.rows[:, None]).to(inputs.device)
        at = torch.from_numpy(offset[:, None] + np.arange(width)).to(inputs.device)  # [b, w]
        inputs[rows, at] = hidden[:, :width].to(inputs.dtype)


# -- finding them ------------------------------------------------------------------------------------------------------


class StateRecorder(RecordingCache):
    """Notes which module asks for which states, as ``RecordingCache`` does for keys and values, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []  # of the layers: the modules being called now, outermost first
        self.found: dict[nn.Module, tuple[int, dict[Key, Tensor]]] = {}  # module -> layer, and its states

    def _note(self, layer: int, key: Key, state: Tensor | None) -> None:
        owner = self.found.setdefault(self.running[-1], (layer, {}))
        if state is not None:
            owner[1][key] = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: nothing has been read."""
        self._note(layer_idx, ("conv", state_idx), None)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The inputs of the convolution, which keeps conv_kernel_size of them."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._note(layer_idx, ("conv", state_idx), conv_states.new_zeros(*conv_states.shape[:-1], size))
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: nothing has been read."""
        self._note(layer_idx, ("recurrent", state_idx), None)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The state after the probe's tokens."""
        self._note(layer_idx, ("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """See ``StateCache``."""
        return True

    @contextmanager
    def watching(self, layers: nn.ModuleList) -> Iterator[dict[nn.Module, tuple[str, Tensor]]]:
        """Know which module of the layers is running while the context is open. Yields the name and value of each module's
        first argument."""
        inputs: dict[nn.Module, tuple[str, Tensor]] = {}
        handles = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(module)
            name, given = ("", args[0]) if args else next(iter(kwargs.items()), ("", None))
            if "hidden_states" in kwargs:
                name, given = "hidden_states", kwargs["hidden_states"]
            if isinstance(given, Tensor):
                inputs[module] = (name, given)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        for module in {id(module): module for layer in layers for module in layer.modules()}.values():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        try:
            yield inputs
        finally:
            for handle in handles:
                handle.remove()

    def mixers(self, layers: nn.ModuleList, inputs: dict[nn.Module, tuple[str, Tensor]]) -> list[Mixer]:
        """The recurrent modules in the order of their layers."""
        found, keepers = [], {}
        for index, layer in enumerate(layers):
            for module in layer.modules():
                keeper = keeper_of(module)
                if keeper is not None and module in inputs:
                    keepers[module] = keeper
                    self.found[module] = index, keeper.states(inputs[module][1])
        for module, (number, states) in self.found.items():
            name, given = inputs[module]
            kept = keepers.get(module)
            layout = MixerLayout(
                layer=number,
                shapes={key: tuple(x.shape[1:]) for key, x in states.items()},
                dtypes={key: x.dtype for key, x in states.items()},
                width=given.shape[-1],
                dtype=given.dtype,
                device=given.device,
                fill={} if kept is None else kept.fill,
            )
            found.append(Mixer(module, layout, name, kept))
        return sorted(found, key=lambda mixer: mixer.layout.layer)
