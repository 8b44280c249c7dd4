"""What the tests of growing share: a drafter made of tables, rows to draft for, and every outcome of all draws."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.params import SamplingParams
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, Plan, TokenTree, depths
from foretell.draft.base import Context
from foretell.draft.growing import dynamic
from foretell.draft.growing.children import Children, Drawing, Nodes
from foretell.draft.growing.grow import grow
from foretell.draft.shapes import Shape
from foretell.verify.base import Verifier
from tests.verify.enumerate import Drafts, Tables, emitted_joint, target_joint


@dataclass
class TableExpander:
    """A drafter whose distribution after a path is a table's: distributions[d] is [V ** d, V] by the path's number in
    base V.

    It knows a path only from the tokens it was fed and the slots that the plan lets a node see.
    """

    distributions: Sequence[Tensor]
    capacity: int = 4096
    num_passes: int = 0
    widths: list[int] = field(default_factory=list)

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.length = context.length
        self.tokens = torch.zeros(context.num_rows, 1, dtype=torch.int64)
        self.num_passes, self.widths = 1, [1]
        return self.distributions[0].log().expand(context.num_rows, 1, -1), context.length

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        vocab_size = self.distributions[0].shape[1]
        slots = plan.slots - self.length[:, None]  # [B, W]
        need = int(slots.max()) + 1
        self.tokens = torch.nn.functional.pad(self.tokens, (0, max(0, need - self.tokens.shape[1])))
        self.tokens.scatter_(1, slots, tokens)
        self.num_passes += 1
        self.widths.append(tokens.shape[1])
        assert bool(plan.ancestry.gather(2, slots[:, :, None]).all()), "a node sees itself"
        code = torch.zeros_like(tokens)
        depth = torch.zeros_like(tokens)
        for slot in range(1, min(need, plan.ancestry.shape[2])):  # a parent's slot is below its child's
            seen = plan.ancestry[:, :, slot]
            code = torch.where(seen, code * vocab_size + self.tokens[:, slot, None], code)
            depth += seen
        inside = depth < len(self.distributions)
        out = torch.zeros(*tokens.shape, vocab_size, dtype=self.distributions[0].dtype)
        for d, probs in enumerate(self.distributions):
            here = inside & (depth == d)
            out = torch.where(here[:, :, None], probs.log()[torch.where(here, code, 0)], out)
        return out


def rows(
    params: Sequence[SamplingParams], vocab_size: int, *, depth_limit: Sequence[int] | None = None, pending: int = 0
) -> Context:
    """A context of one row for each params, whose texts are 5, 6, 7, ... tokens long."""
    ids = [[(7 * row + k) % vocab_size for k in range(4 + row)] + [pending] for row in range(len(params))]
    lengths = [len(text) - 1 for text in ids]
    return Context(
        history=History(ids, [2] * len(params)),
        processors=Processors(params, vocab_size=vocab_size, end_token_ids=(), device=torch.device("cpu")),
        length=torch.tensor(lengths),
        lengths=lengths,
        pending=torch.tensor([pending] * len(params)),
        predictions=[[] for _ in params],
        depth_limit=list(depth_limit) if depth_limit is not None else [100] * len(params),
    )


def noise_for(context: Context, seed: int = 0) -> Noise:
    """A seed a row."""
    return Noise(torch.arange(context.num_rows) + 1000 * seed, context.length)


def codes(tree: TokenTree, vocab_size: int) -> Tensor:
    """[B, N] the number in base V of the path below the root to each node; padding: anything."""
    code = torch.zeros_like(tree.tokens)
    for node in range(1, tree.num_nodes):
        above = tree.parent[:, node].clamp(min=0)
        code[:, node] = code.gather(1, above[:, None])[:, 0] * vocab_size + tree.tokens[:, node]
    return code.masked_fill(~tree.valid, 0)


# -- every outcome of all draws --------------------------------------------------------------------------------------


class _Unknown(Exception):
    """The script has no outcome for these draws yet."""


class Script:
    """Stands in for ``dynamic.draw_children``: row b's draws are outcome b; the distributions of the draws give its
    weight."""

    def __init__(self) -> None:
        self.outcomes: list[Tensor] = []  # of each pass: [R, W, C] tokens
        self.weight = torch.ones(1, dtype=torch.float64)
        self.step = 0

    def __call__(self, drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
        real = drawing.children(probs, nodes)  # labels, and what would have been possible
        if self.step == len(self.outcomes):
            raise _Unknown(probs, drawing.draws, nodes.numbers.shape[1])
        tokens = self.outcomes[self.step]
        self.step += 1
        return Children(tokens, real.drawn_by, chances(probs, tokens, drawing.draws)[1], real.q)


def chances(probs: Tensor, tokens: Tensor, draws: DrawMode) -> tuple[Tensor, Tensor]:
    """([...] probability of drawing tokens [..., C] from probs [..., V], [..., C] whether anything was left to draw;
    token 0 stands for nothing)."""
    out, possible = torch.ones_like(probs[..., 0]), []
    left = probs.clone()
    for token in tokens.unbind(-1):
        mass = left.sum(-1)
        share = left.gather(-1, token[..., None])[..., 0] / torch.where(mass > 0, mass, 1.0)
        out = out * torch.where(mass > 0, share, (token == 0).to(share.dtype))
        possible.append((mass > 0) & (share > 0))
        if draws == DrawMode.WITHOUT_REPLACEMENT:
            left = left.scatter(-1, token[..., None], 0.0)
    return out, torch.stack(possible, -1)


def enumerate_growth(
    monkeypatch: pytest.MonkeyPatch, distributions: Tables, shape: Shape, draws: DrawMode, depth_limit: int
) -> tuple[TokenTree, Tensor]:
    """All trees that growing the shape can give, a row each, and their probabilities."""
    script = Script()
    monkeypatch.setattr(dynamic, "draw_children", script)
    while True:
        num_rows = len(script.weight)
        context = rows([SamplingParams()] * num_rows, distributions.vocab_size)
        context.history = History([[0]] * num_rows, [1] * num_rows)
        context.length = torch.zeros(num_rows, dtype=torch.int64)
        context.lengths = [0] * num_rows
        script.step = 0
        try:
            grown = grow(
                TableExpander(distributions.q), context, [depth_limit] * num_rows, shape, draws, noise_for(context)
            )
        except _Unknown as unknown:
            probs, how, count = unknown.args
        else:
            return grown.tree, script.weight
        width = probs.shape[1]
        ways = torch.tensor(list(itertools.product(range(distributions.vocab_size), repeat=count)))  # [K, C]
        for node in range(width):
            # Every outcome of one more node: rows multiply, those of no probability go.
            done = script.outcomes[script.step][:, :node] if node else None
            num_rows = len(script.weight)
            row = torch.arange(num_rows).repeat_interleave(len(ways))
            tokens = ways.repeat(num_rows, 1)  # [R K, C]
            weight = script.weight[row] * chances(probs[row, node], tokens, how)[0]
            kept = weight > 0
            row, tokens = row[kept], tokens[kept]
            script.weight, probs = weight[kept], probs[row]
            script.outcomes = [outcome[row] for outcome in script.outcomes[: script.step]]
            new = tokens[:, None] if done is None else torch.cat([done[row], tokens[:, None]], 1)
            script.outcomes.append(new)


def error(verifier: Verifier, tree: TokenTree, weight: Tensor, distributions: Tables, depth: int) -> float:
    """Largest difference between the joint distribution of what one step emits and the target's own, over depth + 1
    tokens."""
    horizon, total = depth + 1, 0
    code, at = codes(tree, distributions.vocab_size), depths(tree.parent)
    shapes = {tuple(parent) for parent in tree.parent.tolist()}
    joint = torch.zeros(distributions.vocab_size**horizon, dtype=torch.float64)
    for shape in shapes:
        here = (tree.parent == torch.tensor(shape)).all(1)
        total += int(here.sum())
        deep = at[here][0].tolist()
        p = torch.stack([distributions.p[d][code[here][:, node]] for node, d in enumerate(deep)], 1)
        part = TokenTree(
            tree.tokens[here], tree.parent[here], tree.drawn_by[here], None if tree.q is None else tree.q[here]
        )
        probs = emitted_joint(verifier, Drafts(part, p, code[here], deep, weight[here]), distributions)
        for d in range(max(deep) + 1, horizon):
            probs = (probs[:, None] * distributions.p[d]).flatten()
        joint += probs
    assert total == len(weight)
    assert abs(float(weight.sum()) - 1.0) < 1e-12
    return float((joint - target_joint(distributions, horizon)).abs().max())


def record(found: list[Any]) -> Any:
    """Stands in for ``Drawing.children`` of any module: draws as ever, and keeps what was asked and answered."""

    def draw(drawing: Drawing, probs: Tensor, nodes: Nodes) -> Children:
        out = drawing.children(probs, nodes)
        found.append((probs, nodes, out))
        return out

    return draw
