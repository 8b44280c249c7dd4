"""Where passes over a few rows fetch weights to, L1 or L2: whichever is faster on this CPU, as a model's passes tell."""

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from foretell.core.measured import Keep, of_passes
from foretell.core.tree import chain_parent, layout
from foretell.kernels.build import Functions, loaded_files
from foretell.model.target import CausalModel

LEAST_BYTES = 64 << 20
"""Weights of a pass below which nothing is measured: a cache may hold them."""
NODES = 6
"""Of the passes that are measured: as many as a proposal has."""
NEVER = 1 << 20
CHOICES = (2, NEVER)
_SECONDS = 0.15
_MIN_ROUNDS, _MAX_ROUNDS = 2, 6

_lock = threading.Lock()
_measured = False


def choose(model: CausalModel, native: Functions) -> None:
    """Measure by the first model of a process that is large enough, or recall what an earlier start measured, and set the
    library to what was faster. It changes no bit of a pass, only its time."""
    global _measured  # as the library's setting is the process's
    with _lock:
        if _measured or model.spec.weight_bytes < LEAST_BYTES:
            return
        _measured = True
        length = torch.zeros(1, dtype=torch.int64)
        cache = model.new_cache(1, 2 * NODES)
        plan = layout(chain_parent(NODES, length.device)[None], length, 2 * NODES)
        tokens = torch.zeros(1, NODES, dtype=torch.int64)

        def run(rows: int) -> None:
            native.l2_rows(rows)
            model.forward(tokens, plan, cache)

        subject = {"of": "l2_rows", "nodes": NODES, "kernels": loaded_files(), "model": model.spec.described}
        native.l2_rows(faster(run, CHOICES, partial(of_passes, subject)))


def faster(run: Callable[[int], object], choices: tuple[int, int], keep: Keep) -> int:
    """The choice with which ``run`` takes less time, by the least of some interleaved rounds."""

    def check() -> dict[int, float]:
        return least_seconds(run, choices[:1], rounds=1)

    least = keep(choices, partial(least_seconds, run, choices), check)
    return min(choices, key=lambda choice: least[choice])


def least_seconds(
    run: Callable[[int], object], choices: tuple[int, ...], *, rounds: int = _MAX_ROUNDS
) -> dict[int, float]:
    """Of ``run`` by choice, in interleaved rounds: for about 0.15 s, or two of them where that takes longer."""
    least = dict.fromkeys(choices, float("inf"))
    for choice in choices:
        run(choice)  # weights and code come into memory
    began = perf_counter()
    for done in range(rounds):
        if done >= _MIN_ROUNDS and perf_counter() - began > _SECONDS:
            break
        for choice in choices:
            start = perf_counter()
            run(choice)
            least[choice] = min(least[choice], perf_counter() - start)
    return least
