"""Eval mode for as long as a pass lasts: a model in memory may be one that its owner is training."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Every part of a module in training mode is in eval mode inside, and as it was afterwards. Whether it is in
    training mode is asked of the module itself, not of its parts: that is done once a pass."""
    if not module.training:
        yield
        return
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True
