"""Recurrent mixers of transformers whose convolution and scan are known: what is kept of a token, and how a state is made
of it.

A convolution's state is its last inputs: kept, they are the state at every position. A scan's state is a sum of terms of
its tokens (``scans.py``). Both functions are called by a mixer's ``forward`` by their global names, which a copy of that
function finds to be others: nothing of transformers is changed.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foretell.model.hf.recurrent.branches import Branches
from foretell.model.hf.recurrent.scans import SCANS, Scan, narrow_conv
from foretell.model.recurrent import Key, MixerLayout

CONV = "causal_conv1d_fn"
NARROW = 32
"""Tokens of a pass up to which a convolution is computed line by line."""
STATE: Key = ("recurrent", 0)


class Rewind:
    """A mixer that can be taken up at any position of the last pass, and its memory's ``rewind``."""

    def __init__(self, module: nn.Module, forward: FunctionType, layout: MixerLayout, scan: Scan | None) -> None:
        self.plain, self.scan = layout, scan
        self.width = 0  # tokens of the call that is running
        self.branches: Branches | None = None  # where they are nodes of a tree
        self.convs = [key for key in layout.shapes if key != STATE]
        others: dict[str, Callable[..., Any]] = {CONV: self._conv, **({} if scan is None else {scan.function: scan})}
        self._usual = forward.__globals__.get(CONV)
        self.run = MethodType(_rebound(forward, others), module)
        held = {name_of(key): (layout.shapes[key][0], layout.dtypes[key]) for key in self.convs}
        held |= {name: (size, torch.float32) for name, size in ({} if scan is None else scan.terms).items()}
        self.layout = replace(
            layout,
            # Convolutions read their inputs line by line: [K, C].
            shapes={key: shape if key == STATE else shape[::-1] for key, shape in layout.shapes.items()},
            dtypes={key: torch.float32 if key == STATE else dtype for key, dtype in layout.dtypes.items()},
            held=held,
            rewind=self,
        )

    def after(
        self, states: Mapping[Key, Tensor], held: Mapping[str, Tensor], count: NDArray[Any]
    ) -> Mapping[Key, Tensor]:
        """States after count [b] of the tokens whose inputs and terms held are, each [b, m, size], from states."""
        most = int(count.max())
        if not most:
            return states
        found = self.inputs_after(states, held, count)
        if self.scan is not None:
            terms = {name: held[name][:, :most] for name in self.scan.terms}
            found[STATE] = self.scan.after(states[STATE], terms, _uneven(count))
        return found

    def inputs_after(
        self, states: Mapping[Key, Tensor], held: Mapping[str, Tensor], count: NDArray[Any]
    ) -> dict[Key, Tensor]:
        """The same of convolutions alone."""
        most, counts = int(count.max()), _uneven(count)
        return {
            key: _window(states[key], held[name_of(key)][:, :most].to(states[key].dtype), counts) for key in self.convs
        }

    def _conv(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **kwargs: Any
    ) -> Tensor:
        named = isinstance(activation, str | None)
        if self.branches is None and (self.width > NARROW or not named):
            assert self._usual is not None
            whole: Tensor = self._usual(hidden_states, weight, bias, activation=activation, **kwargs)
            return whole
        if not named:
            raise TypeError(f"an activation that is no name: {activation!r}")
        inputs, size = hidden_states.transpose(1, 2), weight.shape[-1]
        if self.branches is None:
            first = inputs.shape[1] - self.width - size + 1
            wide = inputs.float() if inputs.dtype in (torch.bfloat16, torch.float16) else inputs
            lines = [wide[:, first + at : first + at + self.width] for at in range(size)]
        else:  # each node's own inputs, one after another
            lines = list(inputs.reshape(len(inputs), self.width, -1, inputs.shape[2]).unbind(2))[-size:]
        return narrow_conv(lines, weight, bias, activation, inputs.dtype).transpose(1, 2)


def rewind_of(module: nn.Module, layout: MixerLayout) -> Rewind | None:
    """What is known of a mixer; None where its scan is not, or where something (accelerate's hooks) replaces its forward.

    layout: as transformers has the states.
    """
    forward = inspect.unwrap(type(module).forward)
    hooked = "forward" in module.__dict__ or any(hasattr(x, "_hf_hook") for x in module.modules())
    if hooked or not isinstance(forward, FunctionType):
        return None
    convs = [shape for key, shape in layout.shapes.items() if key != STATE]
    if any(len(shape) != 2 for shape in convs) or any(key[0] != "conv" for key in layout.shapes if key != STATE):
        return None
    if STATE not in layout.shapes:
        return Rewind(module, forward, layout, None)
    called = [one for one in SCANS if one.function in forward.__code__.co_names]
    if len(called) != 1 or len(convs) != 1:
        return None
    scan = called[0].made(layout.shapes[STATE], convs[0][0])
    return None if scan is None else Rewind(module, forward, layout, scan)


def name_of(key: Key) -> str:
    """Under which a convolution's inputs are held."""
    return f"{key[0]}{key[1]}"


def _rebound(forward: FunctionType, others: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """The same function with other functions behind some global names."""
    names = {**forward.__globals__, **{name: one for name, one in others.items() if name in forward.__code__.co_names}}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _uneven(count: NDArray[Any]) -> Tensor | None:
    """count where rows differ; None where each has as many as are given."""
    return None if (count == count[0]).all() else torch.from_numpy(count)


def _window(before: Tensor, inputs: Tensor, count: Tensor | None) -> Tensor:
    """[b, K, C] the last K inputs after count [b] (None: all) of inputs [b, m, C], behind before [b, K, C]."""
    size, both = before.shape[1], torch.cat([before, inputs], 1)
    if count is None:
        return both[:, -size:]
    at = torch.arange(size) + count[:, None] + torch.arange(len(both))[:, None] * both.shape[1]
    return both.flatten(0, 1).index_select(0, at.flatten().to(both.device)).view(before.shape)


def contiguous(rows: NDArray[Any]) -> bool:
    """Whether rows are neighbours in their order."""
    return bool(rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all())
