"""Draw the children of a whole frontier at once: every way of drawing, for all shapes.

W nodes of one depth, up to C children each. A child's token depends only on the distribution after its parent, on the
siblings before it and on its own noise. Every child is labelled with its way of drawing, and the distribution it was
drawn from is returned unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foretell.core.noise import Noise, race_top, top
from foretell.core.probs import Processors
from foretell.core.tree import DrawMode, DrawnBy
from foretell.core.upload import tensor_on


@dataclass(frozen=True)
class Children:
    """Up to C children of W nodes a row, in verification order."""

    tokens: Tensor  # [B, W, C] int64
    drawn_by: Tensor  # int64 values of DrawnBy, broadcastable to [B, W, C]
    # [B, W, C] bool; False: no token of positive mass was left; its token and distribution are then undefined
    possible: Tensor
    q: Tensor | None = None  # [B, W, V] what the drawn ones were drawn from; None: none was
    scores: Tensor | None = None  # [B, W, C] by which COUPLED ones won their race


@dataclass(frozen=True)
class Nodes:
    """W nodes whose children are to be drawn. Numbers key the noise: no two nodes of a tree share one."""

    depth: int  # steps from the root
    parents: Tensor  # [W] int64 numbers of these nodes
    numbers: Tensor  # [W, C] int64 numbers of their children
    counts: Tensor | None = None  # [W] or [B, W] int64 how many of the C each has; None: all


@dataclass(frozen=True)
class Drawing:
    """How the nodes of one tree are drawn, and from which noise.

    A row at temperature 0 has a one-hot distribution, in which no second child has any mass: such rows are always
    FIXED, ranked by ``Processors.softened``.
    """

    draws: DrawMode
    noise: Noise
    depth: int  # no node is deeper
    greedy: Tensor | None = None  # [B] bool; None where no row is

    @classmethod
    def of(cls, draws: DrawMode, noise: Noise, processors: Processors, depth: int) -> "Drawing":
        """The draws of one tree of these rows."""
        if processors.num_greedy == len(processors.params):
            draws = DrawMode.FIXED
        return cls(draws, noise, depth, processors.greedy[:, 0, 0] if processors.num_greedy else None)

    def children(self, probs: Tensor, nodes: Nodes) -> Children:
        """Children of W nodes whose distributions are probs [B, W, V]."""
        out = _WAYS[self.draws](self, probs, nodes)
        if self.greedy is None or self.draws == DrawMode.FIXED:
            return out
        ranked, fixed = _fixed(self, probs, nodes), self.greedy[:, None, None]
        return Children(
            torch.where(fixed, ranked.tokens, out.tokens),
            torch.where(fixed, ranked.drawn_by, out.drawn_by),
            torch.where(fixed, ranked.possible, out.possible),
            out.q,
            out.scores,
        )

    def coupled_keys(self, depth: int, num_nodes: int) -> Tensor:
        """[B, W] int64 key of the token after each node: nodes of one depth share it."""
        keys = self.noise.coupled_keys(self.depth + 1)  # the verifier's depths too: hashed once
        return keys[:, depth, None].expand(-1, num_nodes)


def _fixed(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
    tokens, chance = top(probs, nodes.numbers.shape[1])
    return Children(tokens, _label(DrawnBy.FIXED, probs.device), chance > 0)


def _iid(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
    tokens, possible = draw_iid(probs, drawing.noise.draft_at(nodes.numbers.flatten()).view(-1, *nodes.numbers.shape))
    return Children(tokens, _label(DrawnBy.IID, probs.device), possible, probs)


def _without_replacement(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
    tokens, scores = race_top(probs, drawing.noise.race_at(nodes.parents), nodes.numbers.shape[1])
    return Children(tokens, _label(DrawnBy.WITHOUT_REPLACEMENT, probs.device), scores > 0, probs)


def _coupled(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
    tokens, scores = race_top(probs, drawing.coupled_keys(nodes.depth, probs.shape[1]), nodes.numbers.shape[1])
    return Children(tokens, _label(DrawnBy.COUPLED, probs.device), scores > 0, scores=scores)


def _greedy(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
    """The drawn one first: drawn siblings stand before FIXED ones."""
    width = nodes.numbers.shape[1]
    if width == 1:
        return _iid(drawing, probs, nodes)
    best, chance = top(probs, width - 1)  # [B, W, C - 1]
    struck = chance > 0
    if nodes.counts is not None:  # a node of c children leaves out its c - 1 most probable tokens
        struck = struck & (_ranks(width - 1, probs.device) < nodes.counts[..., None] - 1)
    rest = probs.scatter(-1, best, probs.gather(-1, best).masked_fill(struck, 0.0))
    rest = rest / rest.sum(-1, keepdim=True)  # NaN where nothing is left: no child is possible then
    token, some = draw_iid(rest, drawing.noise.draft_at(nodes.numbers[:, 0])[:, :, None])
    tokens, possible = torch.cat([token, best], -1), torch.cat([some, chance > 0], -1)
    return Children(tokens, _greedy_labels(width, probs.device), possible, rest)


_WAYS: dict[DrawMode, Callable[[Drawing, Tensor, Nodes], Children]] = {
    DrawMode.FIXED: _fixed,
    DrawMode.IID: _iid,
    DrawMode.WITHOUT_REPLACEMENT: _without_replacement,
    DrawMode.COUPLED: _coupled,
    DrawMode.GREEDY: _greedy,
}


def draw_iid(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [..., C], possible [..., C]): C draws from each row of probs [..., V] by uniform [..., C] in (0, 1).

    ``sampling.invert_cdf`` for several draws of a row: the same sums, so the same tokens."""
    mass = probs.double().cumsum(-1)
    tokens = torch.searchsorted(mass, uniform * mass[..., -1:], right=True).clamp_(max=probs.shape[-1] - 1)
    return tokens, probs.gather(-1, tokens) > 0


@lru_cache(maxsize=64)
def _label(label: DrawnBy, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), int(label), device=device)


@lru_cache(maxsize=64)
def _ranks(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


@lru_cache(maxsize=64)
def _greedy_labels(width: int, device: torch.device) -> Tensor:
    return tensor_on(device, [int(DrawnBy.IID)] + [int(DrawnBy.FIXED)] * (width - 1)).view(1, 1, -1)
