"""Outputs of chosen decoder layers, by forward hooks that exist for one pass.

Hooks, and not ``output_hidden_states``: that keeps every layer's output of every row, and its last entry comes *after*
the final norm. Tap i is the output of layer i: ``hidden_states[i + 1]`` of transformers, except for the last layer.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def residual_of(output: Any) -> Tensor:
    """The residual stream in what a decoder layer returned: older models return tuples that begin with it."""
    stream = output[0] if isinstance(output, tuple) else output
    assert isinstance(stream, Tensor)
    return stream


@contextmanager
def capture(layers: nn.ModuleList, wanted: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Fill the yielded dict with the outputs [B, n, H] of layers ``wanted`` during a pass; no hook is left behind."""
    outputs: dict[int, Tensor] = {}

    def note(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[index] = residual_of(output)

        return hook

    handles = [layers[index].register_forward_hook(note(index)) for index in sorted(set(wanted))]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
