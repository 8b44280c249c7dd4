"""Trees whose shape does not depend on tokens: static, Sequoia. Grown depth by depth in their final slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.probs import Paths, logits_to_probs
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, layout
from foretell.core.upload import tensor_on
from foretell.draft.base import Context
from foretell.draft.growing.children import Drawing, Nodes
from foretell.draft.growing.frontier import Expander, Grown, limits_of, note, pick, span_for, with_q
from foretell.draft.shapes import Sequoia, Static
from foretell.theory.shape import best_tree

TemplateShape = Static | Sequoia


@dataclass(frozen=True)
class TemplateLevel:
    """The nodes of one depth that have children: what one pass of the drafter reads."""

    parents: Tensor  # [W] int64 node indices
    children: Tensor  # [W * C] int64 node indices, N where there is none
    nodes: Nodes  # what their draws are keyed by


@dataclass(frozen=True)
class Template:
    """A tree of N nodes without tokens, numbered in depth-first order, first children first."""

    parent: Tensor  # [N] int64
    depth: Tensor  # [N] int64
    levels: tuple[TemplateLevel, ...]
    slots: Tensor  # [N] int64 on the host: see Grown
    max_children: int

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parent)


def grow_template(
    expander: Expander, context: Context, limits: Sequence[int], shape: TemplateShape, draws: DrawMode, noise: Noise
) -> Grown:
    """The shape's tree, cut at depth limits[b] in row b."""
    template = compiled(parent_of(shape), min(shape.depth, max(limits)), draws == DrawMode.GREEDY, context.device)
    num_rows, num_nodes, device = context.num_rows, template.num_nodes, context.device
    drawing = Drawing.of(draws, noise, context.processors, len(template.levels))
    deepest = limits_of(context, limits)[:, None]
    inside = template.depth <= deepest  # [B, N]
    parent = torch.where(inside, template.parent, -1)
    logits, base = expander.begin(context, limits)
    note(context, logits)
    plan = layout(parent, base, expander.capacity, span=span_for(expander, context, num_nodes))
    # One column more than nodes: where the index "no child" may write.
    tokens = torch.zeros(num_rows, num_nodes + 1, dtype=torch.int64, device=device)
    tokens[:, 0] = context.pending
    labels = torch.zeros_like(tokens)
    real = torch.zeros_like(tokens, dtype=torch.bool)
    real[:, 0] = True
    q: Tensor | None = None
    for level in template.levels:
        alive = real[:, level.parents]  # [B, W]
        here = pick(plan, level.parents)
        if level.nodes.depth:
            logits = expander.logits(tokens[:, level.parents], here)
            note(context, logits)
        paths = Paths(tokens[:, :num_nodes], here.ancestry, alive.long() - 1)
        probs = logits_to_probs(logits, context.processors.softened, context.history, paths)  # [B, W, V]
        drawn = drawing.children(probs, level.nodes)
        tokens[:, level.children] = drawn.tokens.flatten(1)
        real[:, level.children] = (drawn.possible & alive[:, :, None]).flatten(1)
        labels[:, level.children] = drawn.drawn_by.expand_as(drawn.tokens).flatten(1)
        if drawn.q is not None:
            if q is None:
                q = drawn.q.new_empty(num_rows, num_nodes, drawn.q.shape[-1])
            q[:, level.parents] = drawn.q
    real = real[:, :num_nodes] & inside
    parent = torch.where(real, template.parent, -1)
    labels = torch.where(real, labels[:, :num_nodes], int(DrawnBy.FIXED))
    tree = TokenTree(
        tokens[:, :num_nodes], parent, labels, with_q(q, parent, labels), max_children=template.max_children
    )
    return Grown(tree, template.slots.expand(num_rows, -1))


@lru_cache(maxsize=64)
def parent_of(shape: TemplateShape) -> tuple[int, ...]:
    """The shape's parent vector, the root's -1 first, in any legal order."""
    if isinstance(shape, Sequoia):
        return tuple(best_tree(shape.acceptance, shape.size + 1, shape.depth))
    parent, level = [-1], [0]
    for count in shape.branching:
        parent += [above for above in level for _ in range(count)]
        level = list(range(len(parent) - count * len(level), len(parent)))
    return tuple(parent)


@lru_cache(maxsize=256)
def compiled(parent: tuple[int, ...], depth: int, drawn_last: bool, device: torch.device) -> Template:
    """The template of a parent vector, without nodes deeper than depth (at least 1).

    Draws are keyed by the node's number in the whole tree: how deep the tree is cut depends on the batch, and what is drawn
    for a row must not. drawn_last is for DrawMode.GREEDY, whose first child is the one drawn from what its FIXED siblings
    leave over, likely the least probable of all: it gets the last child's subtree.
    """
    numbered = _depth_first(parent, drawn_last)  # (parent's number, depth) of each number
    numbers = [number for number, (_, at) in enumerate(numbered) if at <= depth]
    index = {number: node for node, number in enumerate(numbers)}
    num_nodes = len(numbers)
    children: list[list[int]] = [[] for _ in numbers]
    above = [-1] + [index[numbered[number][0]] for number in numbers[1:]]
    for node in range(1, num_nodes):
        children[above[node]].append(node)
    depths = [numbered[number][1] for number in numbers]

    def tensor(values: Sequence[int]) -> Tensor:
        return tensor_on(device, values)

    levels = []
    for at in range(max(depths)):
        parents = [node for node in range(num_nodes) if depths[node] == at and children[node]]
        counts = [len(children[node]) for node in parents]
        width = max(counts)
        table = [children[node] + [num_nodes] * (width - len(children[node])) for node in parents]  # [W, C]
        flat = [child for row in table for child in row]
        nodes = Nodes(
            at,
            tensor([numbers[node] for node in parents]),
            tensor([numbers[child] if child < num_nodes else 0 for child in flat]).view(-1, width),
            tensor(counts) if min(counts) < width else None,
        )
        levels.append(TemplateLevel(tensor(parents), tensor(flat), nodes))
    fed = [node if children[node] else -1 for node in range(num_nodes)]
    return Template(tensor(above), tensor(depths), tuple(levels), torch.tensor(fed), max(map(len, children)))


def _depth_first(parent: Sequence[int], drawn_last: bool) -> list[tuple[int, int]]:
    """(parent's number, depth) of each node in depth-first order, first children first: the leading path then lies in
    adjacent slots, and keeping it moves no KV."""
    children: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent[1:], start=1):
        children[above].append(node)
    out: list[tuple[int, int]] = []
    stack = [(0, -1, 0)]
    while stack:
        node, above, depth = stack.pop()
        below = children[node]
        if drawn_last:
            below = below[-1:] + below[:-1]
        stack += [(child, len(out), depth + 1) for child in reversed(below)]
        out.append((above, depth))
    return out
