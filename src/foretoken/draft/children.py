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

from foretoken.noise import Noise, race, race_top, top
from foretoken.sampling import Processors
from foretoken.tree import Draws, Law


@dataclass(frozen=True)
class Children:
    """Up to C children of W nodes a row, in verification order."""

    tokens: Tensor  # [B, W, C] int64
    laws: Tensor  # int64 values of Law, broadcastable to [B, W, C]
    possible: Tensor  # [B, W, C] bool; False: no token of positive mass was left; its token and law are then undefined
    q: Tensor | None = None  # [B, W, V] what the drawn ones were drawn from; None: none was
    scores: Tensor | None = None  # [B, W, C] by which COUPLED ones won their race


@dataclass(frozen=True)
class Nodes:
    """W nodes whose children are to be drawn. Numbers key the noise: no two nodes of a tree share one."""

    depth: int | Tensor  # steps from the root; [B, W] where they differ
    parents: Tensor  # [W] int64 numbers of these nodes
    numbers: Tensor  # [W, C] int64 numbers of their children
    counts: Tensor | None = None  # [W] or [B, W] int64 how many of the C each has; None: all


@dataclass(frozen=True)
class Drawing:
    """How the nodes of one tree are drawn, and from which noise.

    A row at temperature 0 has a one-hot law, in which no second child has any mass: such rows are always FIXED, ranked
    by ``Processors.softened``.
    """

    draws: Draws
    noise: Noise
    depth: int  # no node is deeper
    greedy: Tensor | None = None  # [B] bool; None where no row is

    @classmethod
    def of(cls, draws: Draws, noise: Noise, processors: Processors, depth: int) -> "Drawing":
        """The draws of one tree of these rows."""
        if processors.num_greedy == len(processors.params):
            draws = Draws.FIXED
        return cls(draws, noise, depth, processors.greedy[:, 0, 0] if processors.num_greedy else None)

    def children(self, law: Tensor, nodes: Nodes) -> Children:
        """Children of W nodes whose laws are law [B, W, V]."""
        out = _WAYS[self.draws](self, law, nodes)
        if self.greedy is None or self.draws == Draws.FIXED:
            return out
        ranked, fixed = _fixed(self, law, nodes), self.greedy[:, None, None]
        return Children(
            torch.where(fixed, ranked.tokens, out.tokens),
            torch.where(fixed, ranked.laws, out.laws),
            torch.where(fixed, ranked.possible, out.possible),
            out.q,
            out.scores,
        )

    def coupled_keys(self, depth: int | Tensor, num_nodes: int) -> Tensor:
        """[B, W] int64 key of the token after each node: nodes of one depth share it."""
        keys = self.noise.coupled_keys(self.depth + 1)  # the verifier's depths too: hashed once
        return keys.gather(1, depth) if isinstance(depth, Tensor) else keys[:, depth, None].expand(-1, num_nodes)

    def list_keys(self, depth: int | Tensor, num_nodes: int, count: int) -> Tensor:
        """[B, W, C] int64 keys of the list after each node."""
        if not isinstance(depth, Tensor):
            return self.noise.list_keys(depth, count)[:, None].expand(-1, num_nodes, -1)
        keys = torch.stack([self.noise.list_keys(at, count) for at in range(self.depth)], 1)  # [B, D, C]
        return keys.gather(1, depth[:, :, None].expand(-1, -1, count))


def _fixed(drawing: Drawing, law: Tensor, nodes: Nodes) -> Children:
    tokens, chance = top(law, nodes.numbers.shape[1])
    return Children(tokens, _label(Law.FIXED, law.device), chance > 0)


def _iid(drawing: Drawing, law: Tensor, nodes: Nodes) -> Children:
    tokens, possible = draw_iid(law, drawing.noise.draft_at(nodes.numbers.flatten()).view(-1, *nodes.numbers.shape))
    return Children(tokens, _label(Law.IID, law.device), possible, law)


def _without_replacement(drawing: Drawing, law: Tensor, nodes: Nodes) -> Children:
    tokens, scores = race_top(law, drawing.noise.race_at(nodes.parents), nodes.numbers.shape[1])
    return Children(tokens, _label(Law.WITHOUT_REPLACEMENT, law.device), scores > 0, law)


def _coupled(drawing: Drawing, law: Tensor, nodes: Nodes) -> Children:
    tokens, scores = race_top(law, drawing.coupled_keys(nodes.depth, law.shape[1]), nodes.numbers.shape[1])
    return Children(tokens, _label(Law.COUPLED, law.device), scores > 0, scores=scores)


def _list(drawing: Drawing, law: Tensor, nodes: Nodes) -> Children:
    keys = drawing.list_keys(nodes.depth, law.shape[1], nodes.numbers.shape[1])
    tokens = torch.stack([race(law, key) for key in keys.unbind(-1)], -1)
    return Children(tokens, _label(Law.COUPLED, law.device), law.gather(-1, tokens) > 0)


def _greedy(drawing: Drawing, law: Tensor, nodes: Nodes) -> Children:
    """The drawn one first: drawn siblings stand before FIXED ones."""
    width = nodes.numbers.shape[1]
    if width == 1:
        return _iid(drawing, law, nodes)
    best, chance = top(law, width - 1)  # [B, W, C - 1]
    struck = chance > 0
    if nodes.counts is not None:  # a node of c children leaves out its c - 1 most probable tokens
        struck = struck & (_ranks(width - 1, law.device) < nodes.counts[..., None] - 1)
    rest = law.scatter(-1, best, law.gather(-1, best).masked_fill(struck, 0.0))
    rest = rest / rest.sum(-1, keepdim=True)  # NaN where nothing is left: no child is possible then
    token, some = draw_iid(rest, drawing.noise.draft_at(nodes.numbers[:, 0])[:, :, None])
    tokens, possible = torch.cat([token, best], -1), torch.cat([some, chance > 0], -1)
    return Children(tokens, _greedy_labels(width, law.device), possible, rest)


_WAYS: dict[Draws, Callable[[Drawing, Tensor, Nodes], Children]] = {
    Draws.FIXED: _fixed,
    Draws.IID: _iid,
    Draws.WITHOUT_REPLACEMENT: _without_replacement,
    Draws.COUPLED: _coupled,
    Draws.GREEDY: _greedy,
    Draws.LIST: _list,
}


def draw_iid(law: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [..., C], possible [..., C]): C draws from each row of law [..., V] by uniform [..., C] in (0, 1).

    ``sampling.invert_cdf`` for several draws of a row: the same sums, so the same tokens."""
    mass = law.double().cumsum(-1)
    tokens = torch.searchsorted(mass, uniform * mass[..., -1:], right=True).clamp_(max=law.shape[-1] - 1)
    return tokens, law.gather(-1, tokens) > 0


@lru_cache(maxsize=64)
def _label(law: Law, device: torch.device) -> Tensor:
    return torch.full((1, 1, 1), int(law), device=device)


@lru_cache(maxsize=64)
def _ranks(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


@lru_cache(maxsize=64)
def _greedy_labels(width: int, device: torch.device) -> Tensor:
    return torch.tensor([int(Law.IID)] + [int(Law.FIXED)] * (width - 1), device=device).view(1, 1, -1)
