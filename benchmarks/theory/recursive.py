"""Recursive rejection: drafts tried one after the other against what is left of p (SpecInfer 2305.09781, 2402.14160).

p_0 = p, q_0 = q. Draft k is accepted with min(1, p_{k-1} / q_{k-1}); rejected, p_k is (p_{k-1} - q_{k-1})+, normalised.
Iid drafts keep q_k = q; without replacement q_k is q_{k-1} with the rejected token struck out, normalised, so that the
later chances depend on which tokens were rejected. Draft k itself has acceptance a_k = sum of min(p_{k-1}, q_{k-1}).
"""

import torch
from benchmarks.theory.rows import Estimate, check_num_drafts
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.theory.acceptance import check_distributions

MAX_ENUMERATED = 1 << 22  # entries [paths, V] that exact enumeration may build


def recursive_rejection_iid(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """[R] float64: 1 - product of 1 - a_k, a deterministic recursion: O(n V)."""
    rest, q = check_distributions(p, q)
    rejected = torch.ones_like(rest[:, 0])
    for _ in range(check_num_drafts(num_drafts)):
        rejected = rejected * (1.0 - torch.minimum(rest, q).sum(-1)).clamp(min=0.0)
        rest = _normalised((rest - q).clamp(min=0.0))
    return 1.0 - rejected


def recursive_rejection_without_replacement(
    p: Tensor, q: Tensor, num_drafts: int, *, num_samples: int = 256, generator: torch.Generator | None = None
) -> Estimate:
    """Acceptance [R] of n drafts drawn without replacement.

    n <= 2 is exact in O(V log V). Above, without a generator: exact by enumeration of the rejected tokens, V^(n - 1)
    paths at most, for small V (ConfigError where that is too many). With one: num_samples sequences of rejected tokens
    are drawn, each from its distribution given all before, and 1 - product of 1 - a_k is averaged: unbiased, every
    chance but the tokens exact. The standard error is measured, and (1 - a_1) / num_samples is added in square for what
    is rarer than one sample in num_samples and was not seen: distributions near one-hot have almost all their variance
    there. Time O(num_samples n V) and memory O(num_samples V) a row.
    """
    p, q = check_distributions(p, q)
    check_num_drafts(num_drafts)
    if num_samples < 2:
        raise ConfigError(f"num_samples is at least 2, to measure a standard error; given {num_samples}")
    zero = torch.zeros_like(p[:, 0])
    if num_drafts <= 2:
        return Estimate(_two_or_one(p, q, num_drafts), zero)
    if generator is None:
        return Estimate(torch.stack([_enumerated(*row, num_drafts) for row in zip(p, q, strict=True)]), zero)
    rows = [_sampled(*row, num_drafts, num_samples, generator) for row in zip(p, q, strict=True)]
    return Estimate(*torch.stack(rows).unbind(1))


def _two_or_one(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    """Exact for n = 1 and 2: a_2 depends on the rejected token x through the factor 1 / (1 - q(x)) alone.

    x itself has nothing left in p_1, so a_2 = sum over y of min(p_1, c q) with c = 1 / (1 - q(x)): two prefix sums over
    the tokens sorted by p_1 / q, looked up at every c.
    """
    accepted = torch.minimum(p, q).sum(-1)
    if num_drafts == 1:
        return accepted
    lost = (q - p).clamp(min=0.0)  # [R, V] chance that x is drawn and rejected
    rest = _normalised((p - q).clamp(min=0.0))
    ratio, order = torch.where(q > 0, rest / torch.where(q > 0, q, 1.0), torch.inf).sort(-1)
    below = torch.nn.functional.pad(rest.gather(1, order).cumsum(-1), (1, 0))  # [R, V + 1]
    above = torch.nn.functional.pad(q.gather(1, order).flip(-1).cumsum(-1).flip(-1), (0, 1))
    others = _without_each(q)
    factor = torch.where(others > 0, 1.0 / torch.where(others > 0, others, 1.0), 0.0)  # 0: no second draft
    split = torch.searchsorted(ratio, factor)
    second = below.gather(1, split) + factor * above.gather(1, split)
    return accepted + (lost * torch.where(factor > 0, second, 0.0)).sum(-1)


def _without_each(q: Tensor) -> Tensor:
    """[R, V] the mass of all tokens but one, without cancellation where that one has nearly all."""
    before = torch.nn.functional.pad(q.cumsum(-1)[:, :-1], (1, 0))
    after = torch.nn.functional.pad(q.flip(-1).cumsum(-1).flip(-1)[:, 1:], (0, 1))
    return before + after


def _normalised(x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    return x / torch.where(total > 0, total, 1.0)


def _try(rest: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(a_k [S], distribution of the rejected token [S, V] times its chance, p_k [S, V]) from p_{k-1} and q_{k-1}."""
    accepted = torch.minimum(rest, unseen).sum(-1)
    return accepted, (unseen - rest).clamp(min=0.0), _normalised((rest - unseen).clamp(min=0.0))


def _enumerated(p: Tensor, q: Tensor, num_drafts: int) -> Tensor:
    rest, unseen, weight = p[None], q[None], torch.ones_like(p[:1])
    total = torch.zeros_like(p[0])
    for k in range(num_drafts):
        accepted, lost, rest = _try(rest, unseen)
        total = total + (weight * accepted).sum()
        if k + 1 == num_drafts:
            break
        path, token = torch.nonzero(lost, as_tuple=True)
        if path.numel() * p.numel() > MAX_ENUMERATED:
            raise ConfigError(f"{path.numel()} paths at V = {p.numel()} are too many to enumerate: give a generator")
        weight = weight[path] * lost[path, token]
        rest, unseen = rest[path], _normalised(unseen[path].scatter(1, token[:, None], 0.0))
    return total


def _sampled(p: Tensor, q: Tensor, num_drafts: int, num_samples: int, generator: torch.Generator) -> Tensor:
    """[2] mean and standard error."""
    unseen_events = (1.0 - torch.minimum(p, q).sum()).clamp(min=0.0) / num_samples
    rest, unseen = p.expand(num_samples, -1), q.expand(num_samples, -1)
    rejected = torch.ones(num_samples, dtype=p.dtype, device=p.device)
    for k in range(num_drafts):
        accepted, lost, rest = _try(rest, unseen)
        rejected = rejected * (1.0 - accepted).clamp(min=0.0)
        if k + 1 == num_drafts or not bool((lost > 0).any()):
            break
        cumulative = lost.cumsum(-1)
        drawn = torch.rand(num_samples, 1, generator=generator, dtype=p.dtype, device=p.device) * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, drawn, right=True).clamp(max=p.numel() - 1)
        unseen = _normalised(unseen.scatter(1, token, 0.0))
    return torch.stack(((1.0 - rejected).mean(), torch.hypot(rejected.std() / num_samples**0.5, unseen_events)))
