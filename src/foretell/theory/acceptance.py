"""The chance that one guess is kept, from the distributions alone.

p is the target's distribution, q the draft's: never swapped. Both are [R, V], any floating type, rows summing to 1; all
that follows is float64. Rows are rescaled to sum to 1 in float64, since float32 distributions miss it by 1e-6.
"""

import torch
from torch import Tensor

from foretell.core.errors import ConfigError

LEAST_MASS = 1e-200
SUM_TOLERANCE = 1e-3


def check_distributions(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """p and q [R, V] as float64 rows that sum to 1. Raises ConfigError where they are no probabilities."""
    if p.dim() != 2 or p.shape != q.shape or p.shape[-1] == 0:
        raise ConfigError(
            f"p and q are rows of distributions of one shape [R, V]; given {list(p.shape)} and {list(q.shape)}"
        )
    distributions = []
    for name, probs in (("p", p), ("q", q)):
        if not probs.is_floating_point():
            raise ConfigError(f"{name} is a distribution in floating point; given {probs.dtype}")
        probs = probs.detach().double()
        if not bool(torch.isfinite(probs).all()) or bool((probs < 0).any()):
            raise ConfigError(f"{name} is a distribution: finite and not negative; given a row with {_worst(probs)}")
        total = probs.sum(-1, keepdim=True)
        if bool(((total - 1.0).abs() > SUM_TOLERANCE).any()):
            raise ConfigError(
                f"the rows of {name} sum to 1; given sums from {float(total.min())} to {float(total.max())}"
            )
        probs = torch.where(probs >= LEAST_MASS, probs, 0.0)
        distributions.append(probs / total)
    return distributions[0], distributions[1]


def by_ratio(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Checked p and q [R, V] with the tokens of each row sorted by p / q ascending; q = 0 last."""
    ratio = torch.where(q > 0, p / torch.where(q > 0, q, 1.0), torch.inf)  # p = q = 0 counts as inf: it has no weight
    order = ratio.argsort(-1)
    return p.gather(1, order), q.gather(1, order)


def _worst(probs: Tensor) -> str:
    return "NaN or infinity" if not bool(torch.isfinite(probs).all()) else f"a minimum of {float(probs.min())}"


def single_draft(p: Tensor, q: Tensor) -> Tensor:
    """[R] float64: sum of min(p, q) = 1 - TV, rejection of one draft (2211.17192): the optimum for one draft."""
    p, q = check_distributions(p, q)
    return torch.minimum(p, q).sum(-1)


def gumbel(p: Tensor, q: Tensor) -> Tensor:
    """[R] float64: sum over j of 1 / (sum over i of max(p_i / p_j, q_i / q_j)), one draft: O(V log V).

    Between (1 - TV) / (1 + TV) and 1 - TV.
    """
    p, q = by_ratio(*check_distributions(p, q))
    # For j in order of p / q: tokens before it have the larger q_i / q_j, itself and those after the larger p_i / p_j.
    behind = p.flip(-1).cumsum(-1).flip(-1)
    before = q.cumsum(-1) - q
    both = (p > 0) & (q > 0)
    one = torch.ones_like(p)
    p_j, q_j = torch.where(both, p, one), torch.where(both, q, one)
    total = behind / p_j + before.clamp(min=0.0) / q_j
    return torch.where(both, 1 / torch.where(both, total, one), 0.0).sum(-1).clamp(max=1.0)
