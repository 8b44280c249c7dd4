"""How many threads a small pass is worth: tiny models are as fast on one, and leave the other processors to others."""

from collections.abc import Callable
from time import perf_counter

from foretell.core.measured import Keep, measured_now

_SECONDS = 0.1
_MIN_ROUNDS, _MAX_ROUNDS = 2, 5
_WORTH = 0.95
"""More threads are taken where a pass then takes at most this part of its time."""
_TINY_S = 0.004
"""A pass on one thread beyond which all are taken: barriers are then too cheap to matter, and a load of other processes
at this moment would say more than the model does."""


def fewest_threads(
    run: Callable[[int], object], most: int, keep: Keep = measured_now, *, clock: Callable[[], float] = perf_counter
) -> int:
    """The fewest threads, of most, half of it and so on down to 1, with which ``run(threads)`` is about as fast as it gets.

    Only tiny passes are measured, by the least time of some interleaved rounds, twice for about 0.1 s or two rounds,
    whichever is longer; where one thread takes over 4 ms, all are taken. The result changes no bit of a pass, only its
    time.
    """
    if most == 1:
        return 1
    candidates = [most]
    while candidates[-1] > 1:
        candidates.append(candidates[-1] // 2)

    def seconds(threads: int) -> float:
        start = clock()
        run(threads)
        return clock() - start

    def measure() -> dict[int, float]:
        for threads in candidates:
            run(threads)  # threads start
        least = dict.fromkeys(candidates, float("inf"))
        begin = clock()
        for done in range(_MAX_ROUNDS):
            if done >= _MIN_ROUNDS and clock() - begin > _SECONDS:
                break
            for threads in candidates:
                least[threads] = min(least[threads], seconds(threads))
        return least

    run(1)  # weights come into memory
    alone = seconds(1)
    if alone > _TINY_S:
        return most
    least = keep(tuple(candidates), measure, lambda: {1: alone})
    chosen = candidates[-1]
    for threads in reversed(candidates):
        if least[threads] < _WORTH * least[chosen]:
            chosen = threads
    return chosen
