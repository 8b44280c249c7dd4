"""Inputs of the tree search: how often the first, second, ... child is accepted, and the cost of a pass.

From both ``theory.shape.choose_size`` makes the tree that is fastest on this machine (Chen et al. 2402.12374).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from benchmarks.theory.pairs import Pairs
from benchmarks.theory.pass_costs import PassCosts
from benchmarks.theory.sizes import choose_size
from benchmarks.theory.table import distributions_at
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, layout
from foretell.draft.growing.children import Drawing, Nodes
from foretell.draft.shapes import Sequoia
from foretell.model.target import CausalModel, Target
from foretell.verify import Verifier
from foretell.verify.base import Evidence

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class TreeChoice:
    """The tree for one temperature, and what it was computed from."""

    temperature: float
    verifier: str
    draws: str
    acceptance: list[float]  # of the first, second, ... child: the probability that it is the accepted one
    cost_draft: float  # of one depth of drafting, in plain passes of the target
    cost_target: dict[int, float]  # of a pass over so many nodes, in plain passes
    num_guesses: int
    depth: int
    expected_tokens: float  # a step
    expected_speedup: float  # by the cost model
    spec: str  # as --shape takes it; "" where not speculating is fastest

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def positional_acceptance(
    pairs: Pairs, temperature: float, verifier: Verifier, draws: DrawMode, *, max_children: int = 8, seed: int = 0
) -> list[float]:
    """How often each of max_children siblings is the accepted one, by production draws and production ``stops``.

    Every context is the root of a star of max_children guesses; the mean over contexts of the probability that the walk
    stops at each child. Where the rule reads noise the probabilities are 0 or 1.
    """
    p, q = (probs.float() for probs in distributions_at(pairs, temperature))
    num_rows = p.shape[0]
    noise = Noise(torch.arange(num_rows) + seed * num_rows, torch.zeros(num_rows, dtype=torch.int64))
    drawing = Drawing(DrawMode.FIXED if temperature == 0 else draws, noise, 1)
    nodes = Nodes(0, torch.zeros(1, dtype=torch.int64), torch.arange(1, max_children + 1)[None])
    found = drawing.children(q[:, None], nodes)
    tokens = found.tokens[:, 0]
    labels, possible = found.drawn_by.expand_as(found.tokens)[:, 0], found.possible.expand_as(found.tokens)[:, 0]
    tree = TokenTree(
        _with_root(tokens, 0),
        _with_root(torch.where(possible, 0, -1), -1),
        _with_root(labels * possible, 0),
        None if found.q is None else torch.cat([found.q, torch.zeros_like(found.q).expand(-1, max_children, -1)], 1),
    )
    total = torch.zeros(max_children, dtype=torch.float64)
    for row in range(num_rows):  # a row at a time: distributions of all nodes at once would be [R, C + 1, V]
        evidence = Evidence(tree, p[:, None].expand(-1, max_children + 1, -1), noise).rows(row, row + 1)
        total += verifier.stops(evidence).stops[0, 1:].double()
    return [float(rate) for rate in total / num_rows]


def _with_root(x: Tensor, root: int) -> Tensor:
    return torch.cat([torch.full_like(x[:, :1], root), x], 1)


def pass_seconds(
    model: CausalModel, widths: Sequence[int] = WIDTHS, *, context: int = 256, rounds: int = 7
) -> dict[int, float]:
    """Median seconds of a pass over each number of nodes after ``context`` tokens, in interleaved rounds."""
    target = Target(model, 1, context + max(widths))
    times: dict[int, list[float]] = {width: [] for width in widths}
    device = model.spec.device
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for width in widths:
                tokens = torch.zeros(1, width, dtype=torch.int64, device=device)
                star = torch.zeros(1, width, dtype=torch.int64, device=device)
                star[:, 0] = -1
                plan = layout(star, torch.tensor([context], device=device), context + max(widths))
                begun = perf_counter()
                logits = target.forward(tokens, plan).logits
                assert logits is not None
                float(logits[0, 0, 0])  # waits for an accelerator
                if turn:  # the first round warms up
                    times[width].append(perf_counter() - begun)
    return {width: median(taken) for width, taken in times.items()}


def choose_tree(
    pairs: Pairs,
    temperature: float,
    verifier: Verifier,
    *,
    draws: DrawMode | None = None,
    seconds_target: dict[int, float],
    seconds_draft: dict[int, float],
    max_size: int = 64,
    max_depth: int = 16,
) -> TreeChoice:
    """The fastest Sequoia tree for these distributions and costs. A depth of drafting costs a pass over four nodes: a
    tree's depths are rarely wider, and passes so narrow cost about the same."""
    asked = draws or verifier.draws
    acceptance = positional_acceptance(pairs, temperature, verifier, asked)
    plain = seconds_target[1]
    cost_draft = seconds_draft.get(4, seconds_draft[1]) / plain
    relative = {width: seconds / plain for width, seconds in seconds_target.items()}
    best = choose_size(acceptance, cost_draft, PassCosts.of(relative), min(max_size + 1, max(relative)), max_depth)
    guesses = len(best.parent) - 1
    spec = ""
    if guesses:
        rounded = tuple(round(rate, 4) for rate in acceptance)
        while rounded and rounded[-1] == 0:
            rounded = rounded[:-1]
        spec = Sequoia(depth=best.depth, size=guesses, acceptance=rounded).spec
    return TreeChoice(
        temperature, verifier.name, asked.value, acceptance, cost_draft, relative, guesses, best.depth,
        best.expected_tokens, best.speedup, spec,
    )  # fmt: skip
