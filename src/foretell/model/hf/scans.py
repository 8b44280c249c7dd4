"""Chunked scans over few tokens.

transformers computes a recurrence over several tokens in chunks of 64 (gated delta nets, Kimi's) or 256 (Mamba-2), and
fills a shorter text up with zeros: a pass over five tokens costs as much as one over a whole chunk, on a CPU more than the
rest of the layer. A chunk of any size gives the same result up to rounding, so a short text is made one chunk of its own
length. Only on the CPU, where the functions are transformers' own: kernels for accelerators know some sizes alone.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Functions of a model's own file that take ``chunk_size``, and to which its mixer hands what else it is given."""


@contextmanager
def short_scan(module: nn.Module, inputs: Tensor) -> Iterator[dict[str, Any]]:
    """Let a mixer on the CPU scan inputs [b, n, H] as one chunk, where its own chunks are longer. Yields what is to be
    given to its forward besides; changes the module while it is open."""
    width = inputs.shape[1]
    if inputs.device.type != "cpu" or width == 1:
        yield {}
        return
    own = getattr(module, "chunk_size", None)
    if isinstance(own, int):
        module.chunk_size = min(own, width)  # type: ignore[assignment]
        try:
            yield {}
        finally:
            module.chunk_size = own  # type: ignore[assignment]
        return
    default = _default(type(module))
    yield {"chunk_size": width} if width < default else {}


def _default(kind: type[nn.Module]) -> int:
    """Tokens of a chunk of the function that a class of mixers calls; 0 where there is none, or none of its business."""
    if kind not in _DEFAULTS:
        source = sys.modules[kind.__module__]
        found = [getattr(source, name) for name in _FUNCTIONS if hasattr(source, name)]
        sizes = [inspect.signature(one).parameters["chunk_size"].default for one in found]
        hands_on = any(
            one.kind is inspect.Parameter.VAR_KEYWORD for one in inspect.signature(kind.forward).parameters.values()
        )
        _DEFAULTS[kind] = sizes[0] if sizes and hands_on else 0
    return _DEFAULTS[kind]


_DEFAULTS: dict[type[nn.Module], int] = {}
