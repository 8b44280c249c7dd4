"""Losses against numpy's sums, closed-form gradients and finite differences: no autograd on the other side."""

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.train.losses import DIVERGENCES, acceptance, lk_hybrid, parse_divergence

M, V = 5, 7


def logits(seed: int) -> Tensor:
    return torch.randn(M, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def probs(z: Tensor, temperature: float = 1.0) -> np.ndarray:
    exp = np.exp((z.detach().numpy() - z.detach().numpy().max(-1, keepdims=True)) / temperature)
    return np.asarray(exp / exp.sum(-1, keepdims=True))


def hybrid(p: np.ndarray, q: np.ndarray, eta: float = 3.0) -> np.ndarray:
    alpha = np.minimum(p, q).sum(-1)
    share = np.exp(-eta * alpha)
    return np.asarray(share * (p * np.log(p / q)).sum(-1) + (1 - share) * (1 - alpha))


FORMULAS = {
    "forward_kl": lambda p, q: (p * np.log(p / q)).sum(-1),
    "tv": lambda p, q: 0.5 * np.abs(p - q).sum(-1),
    "cross_entropy": lambda p, q: -(p * np.log(q)).sum(-1),
    "lk_hybrid": hybrid,
}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_values(name: str, temperature: float) -> None:
    p, q = logits(1), logits(2)
    found = DIVERGENCES[name](p, q, temperature=temperature)
    np.testing.assert_allclose(found.numpy(), FORMULAS[name](probs(p, temperature), probs(q, temperature)), rtol=1e-10)


def test_options() -> None:
    p, q = logits(1), logits(2)
    for found in (lk_hybrid(p, q, eta=1.0), parse_divergence("lk_hybrid/eta=1")(p, q)):
        np.testing.assert_allclose(found.numpy(), hybrid(probs(p), probs(q), 1.0), rtol=1e-10)


def gradient(name: str, p: Tensor, q: Tensor, temperature: float = 1.0) -> np.ndarray:
    leaf, teacher = q.clone().requires_grad_(), p.clone().requires_grad_()
    DIVERGENCES[name](teacher, leaf, temperature=temperature).sum().backward()
    assert teacher.grad is None, "the target is frozen"
    return leaf.grad.numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "lk_hybrid"])
def test_gradients_by_differences(name: str, temperature: float) -> None:
    p, q = logits(3), logits(4)
    found, step = gradient(name, p, q, temperature), 1e-6
    for column in range(V):
        shift = torch.zeros(V, dtype=torch.float64)
        shift[column] = step
        up, down = (DIVERGENCES[name](p, q + sign * shift, temperature=temperature) for sign in (1, -1))
        np.testing.assert_allclose(found[:, column], ((up - down) / (2 * step)).numpy(), atol=1e-7)


def test_gradients_in_closed_form() -> None:
    p, q = logits(5), logits(6)
    a, b = probs(p), probs(q)
    np.testing.assert_allclose(gradient("forward_kl", p, q), b - a, atol=1e-12)
    np.testing.assert_allclose(gradient("cross_entropy", p, q), b - a, atol=1e-12)
    # d sum min(p, q) / dz = q * ([q < p] - sum of q over those): softmax's Jacobian on the indicator.
    below = (b < a).astype(float)
    rising = b * (below - (b * below).sum(-1, keepdims=True))
    np.testing.assert_allclose(gradient("tv", p, q), -rising, atol=1e-12)
    alpha = np.minimum(a, b).sum(-1, keepdims=True)
    share = np.exp(-3 * alpha)  # a constant to the gradient
    np.testing.assert_allclose(gradient("lk_hybrid", p, q), share * (b - a) - (1 - share) * rising, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_laws_are_the_minimum(name: str) -> None:
    p = logits(7)
    if name != "cross_entropy":
        np.testing.assert_allclose(DIVERGENCES[name](p, p).numpy(), 0.0, atol=1e-12)
    assert bool((DIVERGENCES[name](p, logits(8)) > DIVERGENCES[name](p, p)).all())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_masked_tokens_and_half_precision(name: str) -> None:
    p, q = logits(9), logits(10)
    p[:, 0] = -torch.inf  # as models with a padded vocabulary have it
    found = gradient(name, p, q)
    assert np.isfinite(found).all()
    assert bool(torch.isfinite(DIVERGENCES[name](p, q)).all())
    half = DIVERGENCES[name](p.bfloat16(), q.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, DIVERGENCES[name](p.bfloat16().double(), q.bfloat16().double()).float())


def test_draft_vocabulary_renormalises() -> None:
    p, q = logits(11), logits(12)
    kept = [1, 2, 5]
    restricted = probs(p)[:, kept] / probs(p)[:, kept].sum(-1, keepdims=True)
    found = acceptance(p[:, kept], q[:, kept])
    np.testing.assert_allclose(found.numpy(), np.minimum(restricted, probs(q[:, kept])).sum(-1), rtol=1e-10)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("forward_lk", "did you mean 'forward_kl'"),
        ("lk_hybrid/eta=0", "above 0"),
        ("lk_hybrid/eta=x", "above 0"),
        ("lk_hybrid/weight=0.1", "lk_hybrid/eta="),
        ("tv/weight=0.1", "no options"),
    ],
)
def test_unknown_divergences(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_divergence(text)
