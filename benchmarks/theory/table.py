"""Acceptance of every multi-draft rule beside the optimum, on the distributions of a real pair of models.

The table of Hu et al. (2502.18779) on the user's own models. Nothing is sampled where a formula exists: an acceptance is
the mean over contexts of an exact conditional probability. Sampled values have a standard error.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

import torch
from benchmarks.theory import acceptance as one_step, optimum, recursive
from benchmarks.theory.pairs import Pairs
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import Stream, int64_seed, race, race_top, stream_keys
from foretell.core.tree import DrawMode
from foretell.theory.acceptance import gumbel
from foretell.verify.selection import Importance, Transport

Rule = Callable[[Tensor, Tensor, int, torch.Generator], Tensor]
"""(p, q [R, V] float64, num_drafts, generator) -> [R] acceptance of each context."""

OPTIMA: dict[DrawMode, Callable[[Tensor, Tensor, int], Tensor]] = {
    DrawMode.IID: lambda p, q, n: optimum.with_replacement(p, q, n),
    DrawMode.WITHOUT_REPLACEMENT: lambda p, q, n: optimum.without_replacement(p, q, n).middle,
    DrawMode.GREEDY: lambda p, q, n: optimum.greedy(p, q, n),
    DrawMode.FIXED: lambda p, q, n: one_step.top_n(p, q, n),
}
"""The optimum for drafts drawn so: no rule accepts more."""

RULES: dict[tuple[str, DrawMode], Rule] = {
    ("rejection", DrawMode.IID): lambda p, q, n, g: recursive.recursive_rejection_iid(p, q, n),
    ("k_seq", DrawMode.IID): lambda p, q, n, g: one_step.k_seq(p, q, n),
    ("importance", DrawMode.IID): lambda p, q, n, g: Importance().acceptance(p, q, n),
    ("transport", DrawMode.IID): lambda p, q, n, g: Transport().acceptance(p, q, n),
    ("rejection", DrawMode.WITHOUT_REPLACEMENT): (
        lambda p, q, n, g: recursive.recursive_rejection_without_replacement(p, q, n, num_samples=16, generator=g).mean
    ),
    ("rejection", DrawMode.GREEDY): lambda p, q, n, g: one_step.greedy_construction(p, q, n),
    ("exact", DrawMode.FIXED): lambda p, q, n, g: one_step.top_n(p, q, n),
    ("coupled", DrawMode.COUPLED): lambda p, q, n, g: coupled(p, q, n),
}
"""Rule and draws, in the order of the table. With one draft the rules that read q are all plain rejection."""


NUM_RACES = 512
"""Seeds of the noise by which ``coupled`` is averaged at every context."""


def coupled(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] how often the first num_drafts of the drafter's race contain the target's winner, over NUM_RACES seeds.

    By production draws: the quadrature of ``theory.coupling.gumbel_top_k`` takes up to a second a row, and agrees
    (a test compares them). One draft has a closed form.
    """
    if num_drafts == 1:
        return gumbel(p, q)
    keys = stream_keys(torch.arange(NUM_RACES), torch.zeros(NUM_RACES, dtype=torch.int64), Stream.COUPLED)
    hits = []
    for p_row, q_row in zip(p.float(), q.float(), strict=True):
        token = race(p_row.expand(NUM_RACES, -1), keys)
        drafts, scores = race_top(q_row.expand(NUM_RACES, -1), keys, num_drafts)
        hits.append(((drafts == token[:, None]) & (scores > 0)).any(1).double().mean())
    return torch.stack(hits)


@dataclass(frozen=True)
class RuleAcceptance:
    """One cell: how often at least one of n drafts is accepted, averaged over contexts."""

    temperature: float
    num_drafts: int
    rule: str  # verifier
    draws: str  # how its drafts are drawn
    acceptance: float
    standard_error: float  # over texts
    optimum: float | None  # for drafts drawn so; None for COUPLED, whose drafts depend on the target's noise
    share_of_optimum: float | None


@dataclass(frozen=True)
class OptimumTable:
    """All cells, and what they were measured on."""

    num_contexts: int
    num_texts: int
    cells: list[RuleAcceptance]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def distributions_at(pairs: Pairs, temperature: float) -> tuple[Tensor, Tensor]:
    """p and q [R, V] float64. At temperature 0 p is one-hot and q stays at temperature 1: it ranks the drafts."""
    q = torch.softmax(pairs.draft.double() / (temperature or 1.0), -1)
    if temperature == 0:
        best = pairs.target.argmax(-1, keepdim=True)
        return torch.zeros_like(q).scatter_(1, best, 1.0), q
    return torch.softmax(pairs.target.double() / temperature, -1), q


def optimum_table(
    pairs: dict[float, Pairs] | Pairs,
    *,
    temperatures: Sequence[float] = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2),
    num_drafts: Sequence[int] = (1, 2, 3, 4, 6, 8),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> OptimumTable:
    """Every rule at every temperature and number of drafts. pairs may differ by temperature: contexts are then those
    of texts written at it. Raises ConfigError."""
    if not temperatures or not num_drafts or min(temperatures) < 0 or not 1 <= min(num_drafts) <= max(num_drafts) <= 16:
        raise ConfigError(
            f"temperatures = {list(temperatures)} must be at least 0 and num_drafts = {list(num_drafts)} between 1 and 16"
        )
    generator = torch.Generator().manual_seed(int64_seed(seed))
    cells: list[RuleAcceptance] = []
    given = {t: pairs if isinstance(pairs, Pairs) else pairs[t] for t in temperatures}
    jobs = [(t, n) for t in given for n in sorted(set(num_drafts))]
    for done, (temperature, count) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs))
        p, q = distributions_at(given[temperature], temperature)
        best = {draws: _mean(probs(p, q, count), given[temperature].text)[0] for draws, probs in OPTIMA.items()}
        for (rule, draws), accept in RULES.items():
            if not applies(rule, draws, temperature, count):
                continue
            mean, error = _mean(accept(p, q, count, generator), given[temperature].text)
            limit = best.get(draws)
            share = None if limit is None else mean / limit if limit > 0 else 1.0
            cells.append(RuleAcceptance(temperature, count, rule, draws.value, mean, error, limit, share))
    if progress is not None:
        progress(len(jobs), len(jobs))
    any_pairs = next(iter(given.values()))
    return OptimumTable(any_pairs.num_contexts, len(set(any_pairs.text.tolist())), cells)


def applies(rule: str, draws: DrawMode, temperature: float, num_drafts: int) -> bool:
    """Whether a cell is not redundant: at temperature 0 all rules take the argmax iff it was drafted, and with
    one draft the rules that read q are all plain rejection."""
    if temperature == 0:
        return draws == DrawMode.FIXED
    return num_drafts > 1 or draws in (DrawMode.FIXED, DrawMode.COUPLED) or (rule, draws) == ("rejection", DrawMode.IID)


def _mean(values: Tensor, text: Tensor) -> tuple[float, float]:
    """Mean over contexts, and its standard error over texts (contexts of one text are not independent)."""
    means = torch.stack([values[text == index].double().mean() for index in sorted(set(text.tolist()))])
    error = float(means.std() / sqrt(len(means))) if len(means) > 1 else float("nan")
    return float(values.double().mean()), error
