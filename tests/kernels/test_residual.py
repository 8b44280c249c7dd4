"""The C kernels of the q-reading verifiers against their twins in torch, at sizes that no vector width divides."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.core.tree import DrawnBy, TokenTree
from foretell.kernels import residual as module, small as sampling
from foretell.verify import Evidence, Rejection, Verifier
from foretell.verify.block import Block
from foretell.verify.traversal import Traversal
from tests.verify.kernels import use

F, I, W = int(DrawnBy.FIXED), int(DrawnBy.IID), int(DrawnBy.WITHOUT_REPLACEMENT)  # noqa: E741
SIZES = (1, 15, 16, 17, 1023, 1024, 1025, 5003)


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if module.residual_library() is None:
        pytest.skip("no C compiler")


def rows(num_rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(num_rows, size, generator=generator, dtype=torch.float64) * 3, -1).to(dtype)


def test_the_order_of_below() -> None:
    """Mass of q at the tokens before each, by p / q, ties to the lower id; tokens without q come first."""
    tied = torch.full((1, 4), 0.25)
    assert module.below(tied, tied).tolist() == [[0.0, 0.25, 0.5, 0.75]]
    p, q = torch.tensor([[0.5, 0.1, 0.2, 0.2]]), torch.tensor([[0.25, 0.5, 0.0, 0.25]])
    assert module.below(p, q).tolist() == [[0.75, 0.0, 0.0, 0.5]]


def sampled_tree(size: int, seed: int, dtype: torch.dtype) -> Evidence:
    """Two rows of 10 nodes: siblings of every distribution, equal ones too, a chain below, and padding in the second
    row."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 4, 7, 8], [-1, 0, 0, 1, 1, 1, 2, 2, -1, -1]])
    probs = torch.tensor([[F, I, W, F, W, W, I, I, I, F], [F, W, W, I, I, W, F, F, F, F]])
    p, q = rows(20, size, dtype, seed).view(2, 10, size), rows(20, size, dtype, seed + 1).view(2, 10, size)
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    for row in range(2):
        for node in range(1, 10):
            above = int(parent[row, node].clamp(min=0))
            tokens[row, node] = torch.multinomial(q[row, above].double(), 1, generator=generator)[0]
    return Evidence(TokenTree(tokens, parent, probs, q), p)


@pytest.mark.parametrize("verifier", [Rejection(), Traversal()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_walks_equal_torch(verifier: Verifier, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops and normalised residuals of trees too large to enumerate: within 1e-5 in float32, 1e-11 in float64."""
    bound = 1e-5 if dtype == torch.float32 else 1e-11
    for size in (17, 1025, 5003):
        for seed in range(4):
            evidence = sampled_tree(size, seed, dtype)
            fast, slow = both(verifier, evidence, monkeypatch)
            assert torch.allclose(fast[0], slow[0], atol=bound, rtol=0)
            for node in range(10):
                reached = fast[0][:, node] > 1e-3
                one, two = fast[1 + node][reached], slow[1 + node][reached]
                assert torch.allclose(one, two, atol=10 * bound, rtol=0), (size, seed, node)


@pytest.mark.parametrize("size", [17, 1025, 5003])
def test_long_chains_equal_torch(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_evidence = sampled_tree(size, 3, torch.float64)
    chain = torch.arange(-1, 9).expand(2, -1)
    probs = torch.tensor([[F, *[I] * 9], [F, I, F, I, F, W, I, I, I, I]])
    evidence = Evidence(replace(tree_evidence.tree, parent=chain, drawn_by=probs), tree_evidence.p)
    for verifier in (Rejection(), Block(), Traversal()):
        fast, slow = both(verifier, evidence, monkeypatch)
        assert all(torch.allclose(x, y, atol=1e-11, rtol=0) for x, y in zip(fast, slow, strict=True))


def both(verifier: Verifier, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
    """Stops and normalised residuals, with the kernels and without."""
    found = []
    for kernel in ("c", "torch"):
        use(kernel, monkeypatch)
        walk = verifier.stops(evidence)
        distributions = [verifier.residual(evidence, walk, torch.full((2,), node)) for node in range(10)]
        found.append([walk.stops, *(probs / probs.sum(-1, keepdim=True) for probs in distributions)])
        monkeypatch.undo()
    return found[0], found[1]


def test_a_rest_that_cancels_is_summed_again() -> None:
    """FIXED, then drawn, where p is all but one-hot: the rest is 1e-9 of the mass, and must not be rounding."""
    p = torch.tensor([[[1.0 - 1e-9, 3e-10, 7e-10], [0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    q = torch.tensor([[[0.2, 0.4, 0.4], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    tree = TokenTree(torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]]), torch.tensor([[F, F, I]]), q)
    for verifier in (Rejection(), Traversal()):
        walk = verifier.stops(Evidence(tree, p))
        assert abs(float(walk.stops[0, 2]) / 1e-9 - 0.75) < 1e-6  # min(1, 0.3 / 0.4) of what is left
        probs = verifier.residual(Evidence(tree, p), walk, torch.tensor([0]))[0]
        assert probs[:2].tolist() == [0.0, 0.0]


def test_invert_cdf_gives_the_same_token_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = sampling._cdf_library()
    if kernel is None:
        pytest.skip("no C compiler")
    for dtype in (torch.float32, torch.float64):
        for size in (1, 3, 511, 512, 513, 5003):
            probs = torch.rand(64, size, generator=generator, dtype=dtype) ** 6
            probs[torch.rand(64, size, generator=generator) < 0.3] = 0.0
            probs[0], probs[1, 0] = float("nan"), float("inf")
            uniform = torch.rand(64, generator=generator, dtype=torch.float64)
            fast = sampling.invert_cdf(probs, uniform)
            monkeypatch.setattr(sampling, "_cdf_library", lambda: None)
            assert torch.equal(fast, sampling.invert_cdf(probs, uniform))
            monkeypatch.undo()
