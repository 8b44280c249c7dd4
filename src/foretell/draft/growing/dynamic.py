"""Dynamic trees, grown by the draft's probabilities: DySpec, EAGLE-2, OPT-Tree. One pass of the drafter a depth, for
the whole frontier.

Each pass finds up to C candidates after every node that was read. A candidate has two values, both probabilities under q
given the context: ``place``, the probability that the walk reaches its position, known before its own token is drawn;
and ``own``, the probability that it reaches the candidate itself, which weights its children. In the end the ``size``
candidates of largest ``place`` form the tree.

Why a drawn candidate may be left out so: whether it is among the best depends on its own place and on larger ones. Those
of its later siblings and of its descendants are never larger, and all others do not know its token. So its admission is
decided without its token, and the tree is the one that filling the best place first, over and over, would have made
(DySpec, 2410.11744): the published heap, at one pass a depth instead of one a node. FIXED and COUPLED candidates need no
such care: their place may be their own value.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.noise import Noise, top
from foretell.core.probs import Paths, logits_to_probs
from foretell.core.tree import DrawMode, DrawnBy, Plan, TokenTree, ancestors, valid_nodes
from foretell.draft.base import Context
from foretell.draft.growing.children import Children, Drawing, Nodes
from foretell.draft.growing.frontier import Expander, Grown, limits_of, note, span_for, with_q
from foretell.draft.shapes import DySpec, Eagle2Shape, OptTree


def draw_children(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
    """``Drawing.children``: a separate function, so that a test can replace it and enumerate all outcomes."""
    return drawing.children(probs, nodes)


class TreeGrowth:
    """A tree being grown in B rows: n nodes that were fed to the drafter, M candidates found after them.

    Candidate 0 is the root, which is fed as node 0. Fed nodes lie in slots of their own order.
    """

    def __init__(self, expander: Expander, context: Context, limits: Sequence[int]) -> None:
        self.expander, self.context, device = expander, context, context.device
        num_rows = context.num_rows
        self.logits, self.base = expander.begin(context, limits)
        note(context, self.logits)
        self.limits = limits_of(context, limits)[:, None]  # [B, 1]
        zero = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        # Fed nodes.
        self.num_fed = 1
        self.ancestry = torch.ones(num_rows, 1, 1, dtype=torch.bool, device=device)  # [B, n, n]
        self.depth = zero  # [B, n]
        self.fed_tokens = context.pending[:, None]  # [B, n]
        self.frontier = zero  # [B, W] candidates that were fed last
        self.alive = self.limits > 0  # [B, W] bool: of these, the real ones
        self.probs_of_fed: list[Tensor] = []  # [B, W, V] of each pass, where drawn from
        # Candidates.
        self.tokens, self.parent, self.drawn_by = self.fed_tokens, zero - 1, zero  # [B, M]
        self.slot = zero  # [B, M] -1: not fed
        self.place = torch.full((num_rows, 1), 2.0, dtype=torch.float32, device=device)  # [B, M], the root before all
        self.own = torch.ones_like(self.place)

    @property
    def first(self) -> int:
        """Slot of the first node of the frontier."""
        return self.num_fed - self.frontier.shape[1]

    def read(self) -> Tensor:
        """[B, W, V] the distributions after the frontier's nodes."""
        seen = self.ancestry[:, self.first :]
        paths = Paths(self.fed_tokens, seen, self.alive.long() - 1)
        return logits_to_probs(self.logits, self.context.processors.softened, self.context.history, paths)

    def add(self, drawn: Children, place: Tensor, own: Tensor) -> None:
        """Take the candidates [B, W, C] after the frontier; place and own are relative to their parents."""
        count = drawn.tokens.shape[2]
        value = self.own.gather(1, self.frontier)[:, :, None]  # [B, W, 1]
        deeper = self.depth[:, self.first :] < self.limits  # [B, W]
        real = (drawn.possible & (self.alive & deeper)[:, :, None]).flatten(1)
        parent = self.frontier[:, :, None].expand(-1, -1, count).flatten(1)
        self.tokens = torch.cat([self.tokens, drawn.tokens.flatten(1)], 1)
        self.parent = torch.cat([self.parent, parent], 1)
        self.drawn_by = torch.cat([self.drawn_by, drawn.drawn_by.expand_as(drawn.tokens).flatten(1)], 1)
        self.slot = torch.nn.functional.pad(self.slot, (0, parent.shape[1]), value=-1)
        self.place = torch.cat([self.place, (value * place).flatten(1).float().masked_fill(~real, 0.0)], 1)
        self.own = torch.cat([self.own, (value * own).flatten(1).float().masked_fill(~real, 0.0)], 1)
        if drawn.q is not None:
            self.probs_of_fed.append(drawn.q)

    def feed(self, chosen: Tensor, alive: Tensor) -> None:
        """Read candidates chosen [B, W] with the drafter; where alive [B, W] is False a row has fewer."""
        device, width = chosen.device, chosen.shape[1]
        above = self.slot.gather(1, self.parent.gather(1, chosen).clamp(min=0))  # [B, W] parents' slots
        above = above.clamp(min=0)
        seen = self.ancestry.gather(1, above[:, :, None].expand(-1, -1, self.num_fed))
        itself = torch.eye(width, dtype=torch.bool, device=device).expand(len(chosen), -1, -1)
        depth = torch.where(alive, self.depth.gather(1, above) + 1, 0)  # padding stays inside the model's context
        old = torch.nn.functional.pad(self.ancestry, (0, width))
        self.ancestry = torch.cat([old, torch.cat([seen, itself], 2)], 1)
        slots = torch.arange(self.num_fed, self.num_fed + width, device=device).expand_as(chosen)
        self.slot = self.slot.scatter(1, torch.where(alive, chosen, 0), torch.where(alive, slots, 0))
        self.depth = torch.cat([self.depth, depth], 1)
        tokens = self.tokens.gather(1, chosen)
        self.fed_tokens = torch.cat([self.fed_tokens, tokens], 1)
        self.num_fed += width
        self.frontier, self.alive = chosen, alive
        positions = self.base[:, None] + self.depth
        plan = Plan(
            self.base,
            self.ancestry[:, self.first :],
            self.base[:, None] + slots,
            positions[:, self.first :],
            positions,
            span_for(self.expander, self.context, self.num_fed),
        )
        self.logits = self.expander.logits(tokens, plan)
        note(self.context, self.logits)

    def best(self, size: int, threshold: float = 0.0) -> Tensor:
        """[B, min(size + 1, M)] the root and the size candidates of largest place, best first; M where there are fewer.

        Ties go to the earlier candidate, so no node comes before its parent, nor before a drawn sibling before it.
        """
        return _largest(self.place, size + 1, threshold)

    def finish(self, size: int, threshold: float, max_children: int) -> Grown:
        """The tree of the best candidates, numbered depth first."""
        ids, num_candidates = self.best(size, threshold).sort(1).values, self.place.shape[1]
        real = ids < num_candidates  # [B, N]
        if ids.device.type == "cpu":  # a host read is free, and the target need not read padding
            num_nodes = int(real.sum(1).max())
            ids, real = ids[:, :num_nodes], real[:, :num_nodes]
        safe = ids.clamp(max=num_candidates - 1)
        index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        node_of = self.parent.new_zeros(len(ids), num_candidates + 1).scatter_(1, ids, index)
        parent = node_of.gather(1, self.parent.gather(1, safe).clamp(min=0)).masked_fill(~real, -1)
        parent[:, 0] = -1
        place = depth_first(parent)  # [B, N] where each node goes
        parent = torch.where(parent >= 0, place.gather(1, parent.clamp(min=0)), -1)
        order = place.argsort(1)
        chosen = safe.gather(1, order)  # [B, N] candidates in the tree's order
        real = real.gather(1, order)
        parent = parent.gather(1, order)
        labels = torch.where(real, self.drawn_by.gather(1, chosen), int(DrawnBy.FIXED))
        slots = torch.where(real, self.slot.gather(1, chosen), -1)
        q: Tensor | None = None
        if self.probs_of_fed:
            source = torch.cat(self.probs_of_fed, 1)  # [B, n, V] by slot
            q = source[torch.arange(len(slots), device=slots.device)[:, None], slots.clamp(min=0)]
        # How many children the widest node has is read off the tree where that costs nothing.
        widest = None if ids.device.type == "cpu" else max_children
        tree = TokenTree(self.tokens.gather(1, chosen), parent, labels, with_q(q, parent, labels), max_children=widest)
        return Grown(tree, slots)


def _largest(value: Tensor, count: int, threshold: float = 0.0) -> Tensor:
    """[B, min(count, M)] indices of the largest values [B, M] that are positive and at least threshold, M after them;
    ties to the lower index."""
    best, index = value.sort(dim=1, descending=True, stable=True)
    best, index = best[:, :count], index[:, :count]
    return index.masked_fill((best <= 0) | (best < threshold), value.shape[1])


def depth_first(parent: Tensor) -> Tensor:
    """[B, N] the place of each node of parent [B, N] in depth-first order, siblings in their order, padding last."""
    num_nodes, valid = parent.shape[1], valid_nodes(parent)
    lines = ancestors(parent).float() * valid[:, :, None]  # [B, N, N], none of padding
    size = lines.sum(1)  # [B, N] nodes of each subtree
    older = (parent[:, :, None] == parent[:, None, :]).tril(-1) & valid[:, :, None]  # [B, N, N] siblings before
    step = 1.0 + (older.float() @ size[:, :, None])[:, :, 0]  # [B, N] from the parent's place to the node's
    step[:, 0] = 0.0
    place = (lines @ step[:, :, None])[:, :, 0].long()
    padding = valid.sum(1, keepdim=True) + (~valid).long().cumsum(1) - 1
    return torch.where(valid, place, padding) if num_nodes > 1 else place


def _worth(drawing: Drawing, probs: Tensor, drawn: Children) -> tuple[Tensor, Tensor]:
    """(place, own) [B, W, C], relative to the parent: see the module's docstring. Both are zero where nothing is."""
    chance = torch.where(drawn.possible, probs.gather(-1, drawn.tokens).clamp(max=1.0), 0.0)
    place, own = _WORTH[drawing.draws](drawn, chance)
    if drawing.greedy is not None:
        greedy, share = drawing.greedy[:, None, None], _share(chance**_GREEDY_SHARPNESS)
        place, own = torch.where(greedy, share, place), torch.where(greedy, share, own)
    return place, torch.minimum(own, place)


def _worth_iid(drawn: Children, chance: Tensor) -> tuple[Tensor, Tensor]:
    missed = (1.0 - chance).cumprod(-1)
    place = torch.cat([torch.ones_like(missed[..., :1]), missed[..., :-1]], -1)
    return place, place * chance


def _worth_without_replacement(drawn: Children, chance: Tensor) -> tuple[Tensor, Tensor]:
    """The chance that none of those before is the one: what they leave of q; then its own share of the whole."""
    left = (1.0 - chance.cumsum(-1)).clamp(min=0.0)
    return torch.cat([torch.ones_like(left[..., :1]), left[..., :-1]], -1), chance


def _worth_coupled(drawn: Children, chance: Tensor) -> tuple[Tensor, Tensor]:
    """The share of a token's race score q / E among the candidates: target and drafter run the race with the same E, so
    the score tells who wins the target's better than q does. On the bundled pair at temperature 1 (12 guesses, 6 deep,
    8 texts) trees ranked so emit 2.70 to 2.71 tokens a step, ranked by q 1.98 (opt_tree, dyspec) and 2.23 (eagle2);
    scores to the power 0.7, 1.5, 2 and 3 gave 2.53 to 2.64, 2.68 to 2.71, 2.62 to 2.64 and 2.49 to 2.50."""
    assert drawn.scores is not None
    share = _share(drawn.scores.clamp(min=0.0))
    return share, share


_GREEDY_SHARPNESS = 1.5
"""At temperature 0 the target takes its most probable token, more often the drafter's own than q says at temperature 1.
Shares of q ** 1.5 emit 4.80 to 4.85 tokens a step on the same texts, of q 4.75 to 4.85, q itself 4.49 to 4.62."""


def _share(score: Tensor) -> Tensor:
    """[B, W, C] of each node's candidates; zero where none has a score."""
    total = score.sum(-1, keepdim=True)
    return score / torch.where(total > 0, total, 1.0)


def _worth_greedy(drawn: Children, chance: Tensor) -> tuple[Tensor, Tensor]:
    """The drawn child, which comes first, is kept with what its FIXED siblings leave over."""
    left = (1.0 - chance[..., 1:].sum(-1, keepdim=True)).clamp(min=0.0)
    value = torch.cat([left, chance[..., 1:]], -1) * drawn.possible
    return value, value


_WORTH: dict[DrawMode, Callable[[Children, Tensor], tuple[Tensor, Tensor]]] = {
    DrawMode.FIXED: lambda drawn, chance: (chance, chance),
    DrawMode.IID: _worth_iid,
    DrawMode.WITHOUT_REPLACEMENT: _worth_without_replacement,
    DrawMode.COUPLED: _worth_coupled,
    DrawMode.GREEDY: _worth_greedy,
}


def _expand(growth: TreeGrowth, drawing: Drawing, width: int, first_number: int, depth: int, least: float) -> None:
    """Draw up to width candidates after each node of the frontier. least is for DrawMode.GREEDY alone: a FIXED child is
    one of the most probable tokens that the walk comes to with at least this probability, decided before the draw."""
    probs = growth.read()
    num_nodes, device = probs.shape[1], probs.device
    parents = torch.arange(first_number, first_number + num_nodes, device=device)
    numbers = 1 + parents[:, None] * width + torch.arange(width, device=device)
    nodes = Nodes(depth, parents, numbers)
    if drawing.draws == DrawMode.GREEDY and width > 1:
        value = growth.own.gather(1, growth.frontier)[:, :, None]
        counts = 1 + (value * top(probs, width - 1)[1] >= least).sum(-1)  # [B, W]
        nodes = replace(nodes, counts=counts)
        drawn = draw_children(drawing, probs, nodes)
        inside = torch.arange(width, device=device) < counts[:, :, None]
        if drawing.greedy is not None:
            inside = inside | drawing.greedy[:, None, None]
        drawn = replace(drawn, possible=drawn.possible & inside)
    else:
        drawn = draw_children(drawing, probs, nodes)
    growth.add(drawn, *_worth(drawing, probs, drawn))


def grow_dyspec(
    expander: Expander, context: Context, limits: Sequence[int], shape: DySpec, draws: DrawMode, noise: Noise
) -> Grown:
    """The ``size`` best places (see the module's docstring), each at least ``threshold``."""
    deepest, size = max(limits), shape.size
    drawing = Drawing.of(draws, noise, context.processors, deepest)
    growth = TreeGrowth(expander, context, limits)
    least = max(shape.threshold, 1.0 / size)
    for depth in range(deepest):
        _expand(growth, drawing, shape.width, depth * size, depth, least)
        if depth + 1 == deepest or not _descend(
            growth, _needed(growth, drawing, shape), depth + 1, max(1, size - depth)
        ):
            break
    return growth.finish(size, shape.threshold, shape.width)


def _needed(growth: TreeGrowth, drawing: Drawing, shape: DySpec) -> Tensor:
    """[B, L] bool: which of the L candidates found last may have a child in the tree.

    Drawn from their own distribution, its first place is worth what the candidate is: it must be among the best. Else the
    candidate itself must be.
    """
    num_last = growth.frontier.shape[1] * shape.width
    num_candidates = growth.place.shape[1]
    if drawing.draws in (DrawMode.IID, DrawMode.WITHOUT_REPLACEMENT):
        prospects = torch.cat([growth.place, growth.own[:, -num_last:]], 1)
        best = _largest(prospects, shape.size + 1, shape.threshold)
        mask = _mask(best, prospects.shape[1])[:, num_candidates:]
        if drawing.greedy is None:
            return mask
        return torch.where(drawing.greedy[:, None], _admitted(growth, shape.size, num_last, shape.threshold), mask)
    return _admitted(growth, shape.size, num_last, shape.threshold)


def _admitted(growth: TreeGrowth, size: int, num_last: int, threshold: float = 0.0) -> Tensor:
    """[B, L] bool: which of the last L candidates are among the best so far."""
    return _mask(growth.best(size, threshold), growth.place.shape[1])[:, -num_last:]


def _mask(index: Tensor, count: int) -> Tensor:
    """[B, count] bool, True at index [B, K]; index ``count`` marks no entry."""
    mask = torch.zeros(len(index), count + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, index, True)[:, :count]


def _descend(growth: TreeGrowth, wanted: Tensor, depth: int, most: int) -> bool:
    """Feed the wanted [B, L] of the last L candidates, at most ``most`` a row, which lie at this depth; False where no row
    wants any."""
    wanted = wanted & (growth.limits > depth)
    if wanted.device.type == "cpu":
        width = int(wanted.sum(1).max())
        if not width:
            return False
    else:
        width = min(most, wanted.shape[1])
    chosen = wanted.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
    first = growth.place.shape[1] - wanted.shape[1]
    growth.feed(first + chosen, wanted.gather(1, chosen))
    return True


def grow_eagle2(
    expander: Expander, context: Context, limits: Sequence[int], shape: Eagle2Shape, draws: DrawMode, noise: Noise
) -> Grown:
    """A beam of ``width`` nodes a depth; in the end the ``size`` best of all that were found."""
    deepest, width = max(limits), shape.width
    drawing = Drawing.of(_ranked(draws), noise, context.processors, deepest)
    growth = TreeGrowth(expander, context, limits)
    for depth in range(deepest):
        num_last = growth.frontier.shape[1] * width
        _expand(growth, drawing, width, depth * width, depth, 0.0)
        beam = _mask(_largest(growth.own[:, -num_last:], width), num_last)
        if depth + 1 == deepest or not _descend(growth, beam, depth + 1, width):
            break
    return growth.finish(shape.size, 0.0, width)


def grow_opt_tree(
    expander: Expander, context: Context, limits: Sequence[int], shape: OptTree, draws: DrawMode, noise: Noise
) -> Grown:
    """The ``size`` best nodes, deepened while the last depth has added at least ``threshold`` to their sum."""
    deepest, width = max(limits), shape.width
    drawing = Drawing.of(_ranked(draws), noise, context.processors, deepest)
    growth = TreeGrowth(expander, context, limits)
    total = torch.zeros_like(growth.own)  # [B, 1]
    for depth in range(deepest):
        num_last = growth.frontier.shape[1] * width
        _expand(growth, drawing, width, depth * shape.size, depth, 0.0)
        best = growth.place[:, 1:].sort(1, descending=True).values[:, : shape.size].sum(1, keepdim=True)
        pays, total = best - total >= shape.threshold, best
        wanted = _admitted(growth, shape.size, num_last) & pays
        if depth + 1 == deepest or not _descend(growth, wanted, depth + 1, max(1, shape.size - depth)):
            break
    return growth.finish(shape.size, 0.0, width)


def _ranked(draws: DrawMode) -> DrawMode:
    """Nodes ranked after they were drawn are no draws that a verifier can correct for: FIXED or COUPLED."""
    return draws if draws == DrawMode.COUPLED else DrawMode.FIXED
