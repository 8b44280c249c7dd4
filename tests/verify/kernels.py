"""Shared by the tests of q-reading verifiers: with the C kernels and without, and the length that a rule accepts."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from foretell.core.tree import TokenTree
from foretell.kernels import residual as module
from foretell.verify import Evidence, Verifier
from tests.verify.enumerate import Drafts, Tables, emitted_joint, target_joint

KERNELS = ("c", "torch")


def use(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the C kernels, or as on a machine where they cannot be built."""
    if kernel == "torch":
        monkeypatch.setattr(module, "residual_library", lambda: None)
    elif module.residual_library() is None:
        pytest.skip("no C compiler")


def accepted(verifier: Verifier, out: Drafts) -> float:
    """Expected number of accepted drafts."""
    stops = verifier.stops(Evidence(out.tree, out.p)).stops
    return float((out.weight[:, None] * stops * torch.tensor(out.depth)).sum())


def joint_error(verifier: Verifier, out: Drafts, distributions: Tables, evidence: Evidence | None = None) -> float:
    """Largest difference of the joint distributions, with evidence that may lie."""
    return float(
        (emitted_joint(verifier, out, distributions, evidence) - target_joint(distributions, max(out.depth) + 1))
        .abs()
        .max()
    )


def all_leftovers(verifier: Verifier, evidence: Evidence) -> Iterator[Tensor]:
    """The residual of each node, normalised."""
    walk = verifier.stops(evidence)
    for node in range(evidence.tree.num_nodes):
        probs = verifier.residual(evidence, walk, torch.full((len(walk.stops),), node))
        yield probs / probs.sum(1, keepdim=True)


def inputs(evidence: Evidence) -> list[Tensor]:
    """Copies of all that a verifier reads."""
    tree: TokenTree = evidence.tree
    return [x.clone() for x in (tree.tokens, tree.parent, tree.drawn_by, tree.q, evidence.p) if x is not None]
