"""How likely guesses are kept, learned while serving: by method, by how text is drawn, by request, by position.

The rate of position k is conditional: drafted and kept, given that it was allowed and all before it were kept. (The
product of a rate of drafting and one of keeping is too small: lines that go on are those that are right.) A second rate
says how often a proposal that was allowed k positions and had all before k has one at k at all (n-gram drafters often find
none). A third figure is how many nodes a tree has beyond one a position, by how deep it was allowed to be: trees of a
given size have more of them the shallower they are. All are counts that fade. A request's rates are shrunk towards those
of its pool (beta-binomial), and a position's towards the one before it, so that a depth never tried is neither assumed
nor ruled out. A pool is of one method at one heat (``SamplingParams.heat``), since greedy text is guessed far more often
than text that is drawn; it begins with what the method's other pools say, as a few proposals' worth.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PRIOR_RATE, PRIOR_WEIGHT = 0.7, 2.0  # of a method without data: tried first, dropped after a few misses
PRIOR_FOUND, PRIOR_FOUND_WEIGHT = 0.9, 1.0
CHAIN_WEIGHT = 3.0  # weight of the position before, in proposals
POOL_WEIGHT = 4.0  # weight of the pool's rate in a request's, in proposals
LENT_WEIGHT = 4.0  # at most, of what a method's other pools say in a pool, in proposals
ROW_MEMORY, POOL_MEMORY = 40.0, 200.0  # proposals after which evidence has faded to 1 / e
STALE_STEPS = 500.0  # steps without a proposal after which evidence counts for 1 / e in the optimistic curve
QUANTILE = 1.3  # standard deviations: about nine in ten
HALF_WEIGHT_PROPOSALS = 10.0  # of a request, after which one more weighs half as much in its pool as the first
MIN_ROW_WEIGHT = 0.1
NEIGHBOUR_SHARE = 0.125  # of a tree that may be one deeper or less deep, in what is known of a tree's nodes


@dataclass(frozen=True)
class Curves:
    """What to expect of proposals, [B, L]: column k - 1 is about the k-th position."""

    kept: Array  # P(the k-th position is drafted and kept with all before it): their sum is the expected guesses kept
    drafted: Array  # P(the proposal has a k-th position)
    optimistic: Array  # kept, at an upper quantile of what is still possible
    nodes: Array  # expected tree nodes that the k-th position adds to the pass; negative where deeper trees are smaller


def private(heat: int) -> int:
    """The heat at which requests that are not to be stored are counted: their pools are apart, so that what is kept holds
    nothing of them."""
    return -1 - heat


class _Counts:
    """Faded counts. ``table`` [R, 6 L + 1]: of each position the times it was reached, kept, allowed, found; of each depth
    the proposals that were allowed to be so deep and had a guess, and their nodes beyond one a position; last all
    proposals. ``last`` [R]: the step of the latest one."""

    def __init__(self, num_rows: int, max_depth: int) -> None:
        self.table = np.zeros((num_rows, 6 * max_depth + 1))
        self.last = np.zeros(num_rows)

    def grow(self, num_rows: int) -> None:
        more = num_rows - len(self.last)
        self.table = np.concatenate([self.table, np.zeros((more, self.table.shape[1]))])
        self.last = np.concatenate([self.last, np.zeros(more)])


class Acceptance:
    """Online estimates up to ``max_depth`` positions. Observations are queued, and counted together when estimates are
    read."""

    def __init__(
        self, max_depth: int, priors: Mapping[str, float] | None = None, weighed: Collection[str] = ()
    ) -> None:
        """priors: of methods whose first guesses are kept more or less often than ``PRIOR_RATE``. weighed: see
        ``Capabilities.weighs``."""
        self.weighed = frozenset(weighed)
        self._priors: dict[int, float] = {}
        self._given = dict(priors or {})
        self.max_depth = depth = max(max_depth, 1)
        self._slots: dict[tuple[str, str], int] = {}  # by request and method: of one step it may have guesses by two
        self._free: list[int] = []
        self._rows = _Counts(8, depth)
        self._pool_places: dict[tuple[str, int], int] = {}
        self._families: dict[str, list[int]] = {}  # the pools of a method
        self._family: list[list[int]] = []  # of each pool: all of its method, itself included
        self._pools = _Counts(0, depth)
        self._lent: dict[int, Array | None] = {}  # to each pool, by the others of its family; None: there are none
        self._pool_rates: dict[int, tuple[list[list[float]], list[list[float]], list[float]]] = {}
        self._queue: list[tuple[int, int, int, int, int, int]] = []
        self._step = 0
        self._near = NEIGHBOUR_SHARE ** np.abs(np.arange(depth)[:, None] - np.arange(depth))
        # What a proposal adds to counts of either kind, by how deep it was allowed, and how deep it was kept or drafted.
        at, allowed, came = np.arange(depth), np.arange(depth + 1)[:, None, None], np.arange(depth + 1)[None, :, None]
        adds = np.concatenate([(came >= at) & (allowed > at), (came > at) & (allowed > at)], axis=2)
        self._adds = adds.reshape(-1, 2 * depth).astype(np.float64)

    def tick(self, count: int = 1) -> None:
        """To be called after every step, or so many, with or without guesses."""
        self._step += count

    def observe(
        self,
        request_id: str,
        method: str,
        cap: int,
        drafted: int,
        accepted: int,
        nodes: int | None = None,
        heat: int = 0,
    ) -> None:
        """One row's proposal: allowed ``cap`` deep, ``drafted`` deep with ``nodes`` nodes (None: a chain), and
        ``accepted`` kept. A cap of 0 says nothing and is skipped. heat: ``SamplingParams.heat`` of the request."""
        if cap < 1:
            return
        most = self.max_depth
        seen = (min(cap, most), min(drafted, most), min(accepted, most), drafted if nodes is None else nodes)
        self._queue.append((self._slot(request_id, method), self._pool_of(method, heat), *seen))
        if len(self._queue) > 16 * len(self._slots):  # fading counts proposals, not turns: they must not pile up
            self._count()

    def forget(self, request_id: str) -> None:
        """Drop a request. Its contribution to its pool's rates stays."""
        for method in self._families:
            slot = self._slots.pop((request_id, method), None)
            if slot is not None:
                self._count()
                self._free.append(slot)
                self._rows.table[slot] = 0.0

    def memory(self) -> tuple[list[tuple[str, int]], Array]:
        """(method, heat) of each pool, and their counts [R, 6 L + 2]: a row of ``_Counts.table``, then how many steps ago
        the latest proposal was. Pools of requests that are not to be stored (``private``) are left out."""
        self._count()
        kept = {pool: place for pool, place in self._pool_places.items() if pool[1] >= 0}
        places = list(kept.values())
        ages = self._step - self._pools.last[places]
        return list(kept), np.concatenate([self._pools.table[places], ages[:, None]], axis=1)

    def recall(self, pools: Sequence[tuple[str, int]], counts: Array) -> None:
        """Go on with what ``memory`` returned, before anything was observed. Raises ValueError where it is of another
        ``max_depth``."""
        if counts.shape != (len(pools), 6 * self.max_depth + 2):
            raise ValueError(f"it has the shape {counts.shape}, not {(len(pools), 6 * self.max_depth + 2)}")
        for (method, heat), row in zip(pools, counts, strict=True):
            place = self._pool_of(method, heat)
            self._pools.table[place], self._pools.last[place] = row[:-1], self._step - row[-1]
        self._pool_rates.clear()
        self._lent.clear()

    def seen(self, method: str, heat: int = 0) -> float:
        """Proposals at this heat that a method's rates rest on, faded."""
        self._count()
        place = self._pool_places.get((method, heat))
        return 0.0 if place is None else float(self._pools.table[place, -1])

    def knows(self, method: str) -> bool:
        """Whether anything was seen of a method's guesses, at any heat."""
        self._count()
        return any(self._pools.table[place, -1] for place in self._families.get(method, ()))

    def has_seen(self, request_id: str) -> bool:
        """Whether anything was seen of a request's guesses, by any method."""
        self._count()
        slots = [self._slots.get((request_id, method)) for method in self._families]
        return any(self._rows.table[slot, -1] for slot in slots if slot is not None)

    def expected(self, method: str) -> tuple[list[float], list[float]] | None:
        """kept and expected nodes of a new request by this method, at the heat of which most is known; None where nothing
        is. It changes nothing, so that any thread may ask; what is queued is not counted."""
        known = {place: float(self._pools.table[place, -1]) for place in self._families.get(method, ())}
        if not any(known.values()):
            return None
        (kept, found), _, extra = self._pool(max(known, key=lambda place: known[place]))
        nodes = _nodes(np.array([np.cumprod(found)]), np.array([extra]))[0].tolist()
        return np.cumprod(kept).tolist(), nodes

    def curve(
        self, method: str, request_id: str, depth: int, heat: int = 0
    ) -> tuple[list[float], list[float], list[float]]:
        """kept, expected nodes and optimistic, each up to ``depth``, of one request."""
        kept, _, optimistic, nodes = self.curves_of_one(request_id, method, heat)
        return kept[:depth], nodes[:depth], optimistic[:depth]

    def curves(self, request_ids: Sequence[str], methods: Sequence[str], heats: Sequence[int] | None = None) -> Curves:
        """What to expect of these requests, one row each; heats None: all are greedy."""
        heats = heats or [0] * len(methods)
        pools = [self._pool_of(method, heat) for method, heat in zip(methods, heats, strict=True)]
        slots = [self._slot(*row) for row in zip(request_ids, methods, strict=True)]
        self._count()
        for pool in set(pools) - self._pool_rates.keys():
            self._pool_rates[pool] = self._pool(pool)
        rates, known, extra = zip(*[self._pool_rates[pool] for pool in pools], strict=True)
        rate = np.array(rates)  # [B, 2, L]: kept, found
        counts = self._rows.table[slots, : 4 * self.max_depth].reshape(len(slots), 2, 2, self.max_depth)
        tries = counts[:, :, 0]
        rate = (counts[:, :, 1] + POOL_WEIGHT * rate) / (tries + POOL_WEIGHT)
        kept, drafted = np.cumprod(rate, axis=2).swapaxes(0, 1)
        age = np.exp((self._rows.last[slots] - self._step) / STALE_STEPS)[:, None, None]
        pool_age = np.exp((self._pools.last[pools] - self._step) / STALE_STEPS)[:, None, None]
        weight = tries * age + np.minimum(POOL_WEIGHT, PRIOR_WEIGHT + np.array(known) * pool_age)
        optimistic = np.cumprod(_upper(rate[:, 0], weight[:, 0]), axis=1).astype(np.float64, copy=False)
        return Curves(kept, drafted, optimistic, _nodes(drafted, np.array(extra)))

    def curves_of_one(
        self, request_id: str, method: str, heat: int
    ) -> tuple[list[float], list[float], list[float], list[float]]:
        """The same for one row, in plain Python: see ``single.py``. In the order of ``Curves``."""
        pool, slot = self._pool_of(method, heat), self._slot(request_id, method)
        self._count()
        if pool not in self._pool_rates:
            self._pool_rates[pool] = self._pool(pool)
        rates, known, extra = self._pool_rates[pool]
        depth = self.max_depth
        counts = self._rows.table[slot, : 4 * depth].tolist()
        age = math.exp((self._rows.last[slot] - self._step) / STALE_STEPS)
        pool_age = math.exp((self._pools.last[pool] - self._step) / STALE_STEPS)
        by_kind, hopes = [], []
        for kind in (0, 1):
            product = hope = 1.0
            line = []
            tried = counts[2 * kind * depth : (2 * kind + 1) * depth]
            hits = counts[(2 * kind + 1) * depth : (2 * kind + 2) * depth]
            for tries, hit, mean, rests in zip(tried, hits, rates[kind], known[kind], strict=True):
                rate = (hit + POOL_WEIGHT * mean) / (tries + POOL_WEIGHT)
                product *= rate
                line.append(product)
                if kind:
                    continue
                z = QUANTILE * QUANTILE / (tries * age + min(POOL_WEIGHT, PRIOR_WEIGHT + rests * pool_age))
                hope *= (rate + z / 2 + math.sqrt(z * (rate * (1 - rate) + z / 4))) / (1 + z)
                hopes.append(hope)
            by_kind.append(line)
        kept, drafted = by_kind
        nodes, before = [], 0.0
        for found, more in zip(drafted, extra, strict=True):
            nodes.append(found + drafted[0] * (more - before))
            before = more
        return kept, drafted, hopes, nodes

    def _slot(self, request_id: str, method: str) -> int:
        key = request_id, method
        slot = self._slots.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[key] = slot
            if slot >= len(self._rows.last):
                self._rows.grow(2 * slot)
            self._rows.last[slot] = self._step
        return slot

    def _pool_of(self, method: str, heat: int) -> int:
        place = self._pool_places.get((method, heat))
        if place is None:
            place = self._pool_places[method, heat] = len(self._pool_places)
            self._priors[place] = self._given.get(method, PRIOR_RATE)
            family = self._families.setdefault(method, [])
            family.append(place)
            self._family.append(family)
            self._lent.clear()
            self._pools.grow(place + 1)
            self._pools.last[place] = self._step
        return place

    def _count(self) -> None:
        """Count what is queued: a row's counts fade with its own proposals, a pool's with the proposals of all its
        rows."""
        if not self._queue:
            return
        if len(self._queue) == 1:
            self._count_one(*self._queue[0])
        else:
            self._count_many(np.array(self._queue))
        self._queue.clear()
        self._pool_rates.clear()

    def _count_many(self, queue: NDArray[np.int64]) -> None:
        """queue [Q, 6]: slot, pool, cap, drafted, accepted, nodes."""
        slots, pools, cap, drafted, accepted, nodes = queue.T
        base, rows, each = self.max_depth + 1, self._rows, np.arange(len(queue))
        trees = np.zeros((len(queue), 2 * self.max_depth + 1))
        trees[each, cap - 1] = drafted > 0
        trees[each, self.max_depth + cap - 1] = np.where(drafted > 0, nodes - drafted, 0)
        trees[:, -1] = 1.0
        new = np.concatenate([self._adds[cap * base + accepted], self._adds[cap * base + drafted], trees], axis=1)
        # A long request counts less per proposal than short ones: the pool is for requests that have just begun.
        weight = np.maximum(1.0 / (1.0 + rows.table[slots, -1] / HALF_WEIGHT_PROPOSALS), MIN_ROW_WEIGHT)
        rows.table *= np.exp(np.bincount(slots, minlength=len(rows.last)) / -ROW_MEMORY)[:, None]
        np.add.at(rows.table, slots, new)
        rows.last[slots] = self._step
        for pool in set(pools.tolist()):
            share = np.where(pools == pool, weight, 0.0)
            faded = self._pools.table[pool] * np.exp(share.sum() / -POOL_MEMORY)
            self._pools.table[pool] = faded + share @ new
            self._pools.last[pool] = self._step
            self._lend_anew(pool)

    def _count_one(self, slot: int, pool: int, cap: int, drafted: int, accepted: int, nodes: int) -> None:
        """``_count_many`` of a queue of one, with a third of the calls."""
        base, row, pools = self.max_depth + 1, self._rows.table[slot], self._pools.table
        trees = [0.0] * (2 * self.max_depth + 1)
        if drafted:
            trees[cap - 1], trees[self.max_depth + cap - 1] = 1.0, nodes - drafted
        trees[-1] = 1.0
        new = np.concatenate([self._adds[cap * base + accepted], self._adds[cap * base + drafted], trees])
        weight = max(1.0 / (1.0 + float(row[-1]) / HALF_WEIGHT_PROPOSALS), MIN_ROW_WEIGHT)
        row *= math.exp(-1.0 / ROW_MEMORY)
        row += new
        pools[pool] = pools[pool] * math.exp(-weight / POOL_MEMORY) + weight * new
        self._rows.last[slot] = self._pools.last[pool] = self._step
        self._lend_anew(pool)

    def _lend_anew(self, pool: int) -> None:
        """A pool's counts have changed: what it lends to the others of its family has, too."""
        for other in self._family[pool]:
            if other != pool:
                self._lent.pop(other, None)

    def _lent_to(self, pool: int) -> Array | None:
        """Counts as in ``table``: those of the other pools of its method, as if no position had been tried more than
        ``LENT_WEIGHT`` times."""
        if pool not in self._lent:
            others = [other for other in self._family[pool] if other != pool]
            self._lent[pool] = _at_most(self._pools.table[others].sum(axis=0)) if others else None
        return self._lent[pool]

    def _pool(self, pool: int) -> tuple[list[list[float]], list[list[float]], list[float]]:
        """Rates of a pool [2, L] (kept, found), how many of its own tries they rest on [2, L], and the nodes beyond one a
        position of a proposal that may be so deep [L]."""
        counts, lent, most = self._pools.table[pool], self._lent_to(pool), self.max_depth
        own: list[float] = counts.tolist()
        table: list[float] = own if lent is None else (counts + lent).tolist()
        rates = []
        priors = ((self._priors[pool], PRIOR_WEIGHT), (PRIOR_FOUND, PRIOR_FOUND_WEIGHT))
        for start, (rate, weight) in zip((0, 2 * most), priors, strict=True):
            line = []
            middle = start + most
            for tried, hit in zip(table[start:middle], table[middle : middle + most], strict=True):
                rate = (hit + weight * rate) / (tried + weight)
                line.append(rate)
                weight = CHAIN_WEIGHT
            rates.append(line)
        extra = [0.0] * most
        if any(table[5 * most : 6 * most]):  # depths that were not tried are like those beside them
            tried, nodes = np.array(table[4 * most : 6 * most]).reshape(2, most) @ self._near
            extra = (nodes / np.maximum(tried, 1e-30)).tolist()
        return rates, [own[:most], own[2 * most : 3 * most]], extra


def _at_most(table: Array) -> Array:
    """Counts of one row of ``_Counts.table``, each position's scaled so that it was tried ``LENT_WEIGHT`` times at most."""
    counts = table[:-1].reshape(3, 2, -1)
    scaled = counts * (LENT_WEIGHT / np.maximum(counts[:, :1], LENT_WEIGHT))
    return np.append(scaled.ravel(), min(float(table[-1]), LENT_WEIGHT))


def _nodes(drafted: Array, extra: Array) -> Array:
    """[B, L] nodes that each position adds: its own, and by how many more than those less deep trees have that are so
    deep."""
    more: Array = drafted + drafted[:, :1] * np.diff(extra, axis=1, prepend=0.0)
    return more


def _upper(rate: Array, weight: Array) -> Array:
    """Wilson's upper bound of a rate that rests on ``weight`` trials."""
    z = QUANTILE * QUANTILE / weight
    out: Array = (rate + z / 2 + np.sqrt(z * (rate * (1 - rate) + z / 4))) / (1 + z)
    return out
