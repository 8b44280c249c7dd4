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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foretell.core.errors import ConfigError
from foretell.core.tree import Plan
from foretell.model.hf.attention import RecordingCache, SlotCache
from foretell.model.hf.held import LinearOutputs, Places, answering, forwards, linear_layers
from foretell.model.hf.keepers import Keeper, keeper_of
from foretell.model.hf.scans import short_scan
from foretell.model.recurrent import BASE, LIVE, READ, SIDE, WHOLE, Key, MixerLayout, RecurrentCache

Ints = NDArray[Any]
LAG_LIMIT = 4
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
    linears: dict[str, nn.Linear] = field(default_factory=dict)  # those whose outputs are held


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
    calls = (_Call(index, mixer, mixer.module.forward, cache, tokenwise) for index, mixer in enumerate(mixers))
    with forwards({call.mixer.module: _forward(call) for call in calls}):
        yield


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
        meta[settled, WHOLE] = 1
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
        output, exact, new = self._read(hidden, np.where(is_live, 0, offset), side, meta)
        meta[exact, LIVE] = start[exact] + self.count[exact]
        meta[:, READ] = start
        if int(self.count.max()) <= HELD_LIMIT:
            held = {"": hidden, **new}
            for name, given in held.items():
                self._hold(name, given, offset)
            meta[:, READ] += self.count
            if len(held) <= len(self.mixer.linears):
                meta[:, WHOLE] = 0
        all_meta[rows] = meta
        return output

    # -- calls -----------------------------------------------------------------------------------------------------

    def _read(self, hidden: Tensor, lag: Ints, side: Ints, meta: Ints) -> tuple[Any, Ints, dict[str, Tensor]]:
        """Read the lag of each row and its new inputs, from the states at ``side``; put the states of rows that end where
        their call does to the other side than the committed ones. What the mixer returned for the new inputs, which rows
        these are [b], and what its linear layers returned for them, by name: of all layers or of none."""
        total, num_new = lag + self.count, hidden.shape[1]
        everywhere, widest, after = np.arange(len(total)), int(total.max()), meta[:, SIDE] ^ 1
        groups = [(everywhere, widest)]
        if not self.tokenwise and widest > PAD_LIMIT:
            groups = [(np.nonzero(total == width)[0], int(width)) for width in np.unique(total)]
        exact = np.ones(len(total), dtype=bool) if self.tokenwise or len(groups) > 1 else total == widest
        output: Any = None
        outputs: LinearOutputs | None = None
        for chosen, width in groups:
            whole, rows = len(groups) == 1, self.rows[chosen]
            places = Places(lag[chosen], width, int(self.count[chosen].max()))
            held = self._held(rows, places.behind) if places.behind else None
            given = (hidden if whole else hidden[chosen])[:, : places.num_new]
            if whole and self._holds(hidden):
                outputs = LinearOutputs(places, held if meta[lag > 0, WHOLE].all() else None)
            result, states = self._run(
                places.join(None if held is None else held[""], given),
                self._pick(rows, side[chosen]),
                total[chosen],
                (self.start - lag)[chosen],
                outputs,
            )
            kept = exact[chosen]
            if not kept.all():
                at = torch.from_numpy(np.nonzero(kept)[0])
                states = {key: x[at.to(x.device)] for key, x in states.items()}
            self._put(rows[kept], after[chosen[kept]], states)
            first, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            first = places.new(first)
            if first.shape[1] < num_new:  # no row has as many: padding, which nobody reads
                first = torch.nn.functional.pad(first, (0, 0, 0, num_new - first.shape[1]))
            if output is None:
                output = first if whole else first.new_zeros(len(total), *first.shape[1:])
            if not whole:
                output[torch.from_numpy(chosen).to(first.device)] = first
        new = {} if outputs is None or len(outputs.new) < len(self.mixer.linears) else outputs.new
        return (output if rest is None else (output, *rest)), exact, new

    def _holds(self, given: Tensor) -> bool:
        """Whether what the linear layers return is held: their products are dear on a CPU alone."""
        return bool(self.mixer.linears) and not self.tokenwise and given.device.type == "cpu"

    def _advance(self, counts: Ints, meta: Ints) -> None:
        """Move the committed state of each row on by counts of its held inputs; they are 0 or equal, unless tokenwise."""
        chosen = np.nonzero(counts)[0]
        if not len(chosen):
            return
        rows, wanted = self.rows[chosen], counts[chosen]
        held, states = self._held(rows, int(wanted.max())), self._pick(rows, meta[chosen, SIDE])
        outputs = None
        if self._holds(held[""]) and meta[chosen, WHOLE].all():
            outputs = LinearOutputs(Places(0 * wanted, int(wanted.max()), int(wanted.max())), held, again=True)
        _, states = self._run(held[""], states, wanted, meta[chosen, BASE], outputs)
        meta[chosen, SIDE] ^= 1
        meta[chosen, BASE] += wanted
        self._put(rows, meta[chosen, SIDE], states)
        for kept in self.states.held[self.index].values():
            for row, count, left in zip(rows, wanted, (meta[:, READ] - meta[:, BASE])[chosen], strict=True):
                if left > 0:
                    kept[row, :left] = kept[row, count : count + left].clone()

    def _run(
        self, inputs: Tensor, states: dict[Key, Tensor], total: Ints, begin: Ints, outputs: LinearOutputs | None
    ) -> tuple[Any, dict[Key, Tensor]]:
        """The mixer over inputs [b, T, H], whose first is at positions begin [b], from states; what it returns, and the
        states after it (of rows that are shorter than T: after their own last token where it reads token by token, else
        undefined)."""
        width = inputs.shape[1]
        whole = not self.tokenwise or width == 1
        if whole or ((total == width).all() and not begin.any()):
            return self._once(inputs, states, begin, outputs)  # from nothing, every mixer can read a whole text
        pieces: list[Tensor] = []
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
            pieces.append(result[0] if isinstance(result, tuple) else result)
        joined = torch.cat(pieces, 1)
        return ((joined, *result[1:]) if isinstance(result, tuple) else joined), states

    def _once(
        self, inputs: Tensor, states: dict[Key, Tensor], begin: Ints, outputs: LinearOutputs | None = None
    ) -> tuple[Any, dict[Key, Tensor]]:
        keeper = self.mixer.keeper
        if keeper is not None:
            positions = torch.from_numpy(begin[:, None] + np.arange(inputs.shape[1])).to(inputs.device)
            return keeper.call(self.run, inputs, positions, states, self.kwargs)
        layer = self.mixer.layout.layer
        opened = self.cache.open[layer] = dict(states)
        with short_scan(self.mixer.module, inputs) as besides, answering(self.mixer.linears, outputs):
            result = self.run(inputs, *self.args, **self.kwargs, **besides)
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

    def _held(self, rows: Ints, count: int) -> dict[str, Tensor]:
        """[b, count, H] what is held since the committed state of some rows: inputs, by no name, and linear outputs."""
        held = self.states.held[self.index]
        if len(rows) == 1:
            return {name: x[int(rows[0]) : int(rows[0]) + 1, :count] for name, x in held.items()}
        at = torch.from_numpy(rows)
        return {name: x[at.to(x.device), :count] for name, x in held.items()}

    def _hold(self, name: str, given: Tensor, offset: Ints) -> None:
        """Hold the new inputs, or a layer's outputs for them, behind those that are held already."""
        width = int(self.count.max())
        held = self.states.hold(self.index, int(offset.max()) + width)[name]
        if len(offset) == 1:
            held[self.rows[0], offset[0] : offset[0] + width] = given[0, :width]
            return
        rows = torch.from_numpy(self.rows[:, None]).to(held.device)
        at = torch.from_numpy(offset[:, None] + np.arange(width)).to(held.device)  # [b, w]
        held[rows, at] = given[:, :width].to(held.dtype)


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
            linears = {} if kept is not None else linear_layers(module, given.dtype)
            layout = MixerLayout(
                layer=number,
                shapes={key: tuple(x.shape[1:]) for key, x in states.items()},
                dtypes={key: x.dtype for key, x in states.items()},
                width=given.shape[-1],
                dtype=given.dtype,
                device=given.device,
                fill={} if kept is None else kept.fill,
                linear={one: layer.out_features for one, layer in linears.items()},
            )
            found.append(Mixer(module, layout, name, kept, linears))
        return sorted(found, key=lambda mixer: mixer.layout.layer)
