"""What is tried of a model's own passes, and changes no bit of them: threads, and where weights are fetched to."""

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from foretell.core.measured import Keep, measured_now, of_passes
from foretell.core.tree import chain_parent, layout
from foretell.kernels.build import Functions, loaded_files
from foretell.model.target import CausalModel

_MIN_ROUNDS = 2
_WORTH = 0.95
"""More threads are taken where a pass then takes at most this part of its time."""
_TINY_S = 0.004
"""A pass on one thread beyond which all are taken: barriers are then too cheap to matter, and a load of other processes
at this moment would say more than the model does."""


def fewest_threads(
    run: Callable[[int], object], most: int, keep: Keep = measured_now, *, clock: Callable[[], float] = perf_counter
) -> int:
    """The fewest threads, of most, half of it and so on down to 1, with which ``run(threads)`` is about as fast as it gets:
    tiny models are as fast on one, and leave the other processors to others.

    Only tiny passes are measured, by the least time of some interleaved rounds, twice for about 0.1 s or two rounds,
    whichever is longer; where one thread takes over 4 ms, all are taken. The result changes no bit of a pass, only its
    time.
    """
    if most == 1:
        return 1
    candidates = [most]
    while candidates[-1] > 1:
        candidates.append(candidates[-1] // 2)
    run(1)  # weights come into memory
    start = clock()
    run(1)
    alone = clock() - start
    if alone > _TINY_S:
        return most
    measure = partial(least_seconds, run, tuple(candidates), rounds=5, seconds=0.1, clock=clock)
    least = keep(tuple(candidates), measure, lambda: {1: alone})
    chosen = candidates[-1]
    for threads in reversed(candidates):
        if least[threads] < _WORTH * least[chosen]:
            chosen = threads
    return chosen


LEAST_BYTES = 64 << 20
"""Weights of a pass below which nothing is measured: a cache may hold them."""
NODES = 6
"""Of the passes that are measured: as many as a proposal has."""
NEVER = 1 << 20
CHOICES = (2, NEVER)

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
        return least_seconds(run, choices[:1], clock=perf_counter, rounds=1)

    least = keep(choices, partial(least_seconds, run, choices, clock=perf_counter), check)
    return min(choices, key=lambda choice: least[choice])


def least_seconds(
    run: Callable[[int], object],
    choices: tuple[int, ...],
    *,
    clock: Callable[[], float],
    rounds: int = 6,
    seconds: float = 0.15,
) -> dict[int, float]:
    """Of ``run`` by choice, in interleaved rounds: for about so many seconds, or two of them where that takes longer."""
    least = dict.fromkeys(choices, float("inf"))
    for choice in choices:
        run(choice)  # weights, code and threads come into memory
    began = clock()
    for done in range(rounds):
        if done >= _MIN_ROUNDS and clock() - began > seconds:
            break
        for choice in choices:
            start = clock()
            run(choice)
            least[choice] = min(least[choice], clock() - start)
    return least
