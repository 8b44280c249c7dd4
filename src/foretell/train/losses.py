"""Divergences of a draft distribution q from the target's distribution p, place by place: pure functions of logits.

Each takes logits of p and of q, [M, V], and returns [M] in nats (or a share of 1). p may be given on the draft's own
columns alone (``LossSlot.vocab``): the softmax then renormalises it there. No gradient flows into p. Both distributions are
taken at ``temperature``. Half precision is computed in float32, float64 stays. Which loss when: DistillSpec
(2310.08461) and the LK losses (2602.23881) compare them; at temperature 0 they differ little; at temperature 1 losses
based on acceptance are better.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.errors import ConfigError, nearest

Divergence = Callable[..., Tensor]
"""(p logits [M, V], q logits [M, V], *, temperature) -> [M]."""
FLOOR = -1e4
"""The least log probability of p: a masked token (-inf) that q allows then has a large loss, not an infinite one."""


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return wide if temperature == 1.0 else wide / temperature


def _log_p(p: Tensor, temperature: float) -> Tensor:
    return F.log_softmax(_scaled(p.detach(), temperature), -1).clamp_min_(FLOOR)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """[M] products summed over the last axis, without the products in memory."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


class _CrossEntropy(torch.autograd.Function):
    """-sum p log q of p [M, V] and logits z [M, V] -> [M]; gradient into z alone, softmax(z) - p, made in one buffer."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, z: Tensor) -> Tensor:
        """The logarithm of the sum is kept, the distribution of z is not."""
        total = z.logsumexp(-1)
        ctx.save_for_backward(p, z, total)
        return total - _dot(p, z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        """The gradient [M] of what was returned, to that of z."""
        p, z, total = ctx.saved_tensors
        return None, (z - total[:, None]).exp_().sub_(p).mul_(gradients[0][:, None])


def _cross_entropy(log_p: Tensor, q: Tensor, temperature: float) -> Tensor:
    out: Tensor = _CrossEntropy.apply(log_p.exp(), _scaled(q, temperature))  # type: ignore[no-untyped-call]
    return out


def cross_entropy(p: Tensor, q: Tensor, *, temperature: float = 1.0) -> Tensor:
    """-sum p log q."""
    return _cross_entropy(_log_p(p, temperature), q, temperature)


def forward_kl(p: Tensor, q: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(p || q) = sum p log(p / q). Its gradient in q's logits is (q - p) / temperature."""
    log_p = _log_p(p, temperature)
    return _dot(log_p.exp(), log_p) + _cross_entropy(log_p, q, temperature)


def acceptance(p: Tensor, q: Tensor, *, temperature: float = 1.0) -> Tensor:
    """sum min(p, q): the chance that a token drawn from q is kept (1 - TV). Gradient flows into q."""
    return torch.minimum(_log_p(p, temperature).exp(), F.softmax(_scaled(q, temperature), -1)).sum(-1)


def tv(p: Tensor, q: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Total variation, 1 - sum min(p, q)."""
    return 1.0 - acceptance(p, q, temperature=temperature)


def lk_hybrid(p: Tensor, q: Tensor, *, temperature: float = 1.0, eta: float = 3.0) -> Tensor:
    """w KL(p || q) + (1 - w) (1 - a), a = sum min(p, q), w = exp(-eta a) without gradient (2602.23881).

    KL has a gradient far from p, where TV has almost none; near p, TV is the acceptance itself.
    """
    alpha = acceptance(p, q, temperature=temperature)
    share = (-eta * alpha.detach()).exp()
    return share * forward_kl(p, q, temperature=temperature) + (1.0 - share) * (1.0 - alpha)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "tv": tv,
    "cross_entropy": cross_entropy,
    "lk_hybrid": lk_hybrid,
}
"""By name. ``lk_hybrid`` takes an option: "lk_hybrid/eta=2"."""


def parse_divergence(text: str) -> Divergence:
    """The function of "name" or "name/option=value". Raises ConfigError."""
    name, slash, option = text.partition("/")
    if name not in DIVERGENCES:
        raise ConfigError(f"divergence {name!r} is unknown{nearest(name, DIVERGENCES)}")
    if not slash:
        return DIVERGENCES[name]
    if name != "lk_hybrid":
        raise ConfigError(f"divergence {text!r}: expected {name}, which has no options")
    key, _, number = option.partition("=")
    try:
        eta = float(number)
    except ValueError:
        eta = math.nan
    if key != "eta" or not 0.0 < eta < math.inf:
        raise ConfigError(f"divergence {text!r}: expected lk_hybrid/eta=NUMBER above 0")
    return partial(lk_hybrid, eta=eta)
