"""Rows of one batch with different drafters, shapes and verifiers, behind the interface of a single one for ``step``.

Rows with the same choice are adjacent in the batch and form a ``Group``. The groups' trees are concatenated along the
batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.probs import Processors
from foretell.core.tree import DrawMode, TokenTree, layout, pad_tree
from foretell.draft.base import Commit, Context, Drafter, LightStep
from foretell.draft.shapes import MAX_DEPTH, Shape
from foretell.engine.drafters.guarded import GuardedDrafter
from foretell.engine.drafters.lazy import WaitingDrafter, part
from foretell.engine.request.row import Row
from foretell.engine.state import State, Tapping
from foretell.model.target import Target
from foretell.verify.base import RowVerifiers


class Group:
    """Rows [start, stop) of the batch, guessed by one drafter and judged by one verifier."""

    def __init__(self, rows: Sequence[Row], drafter: Drafter, target: Target) -> None:
        """rows: of one key. target: its cache is rebound whenever the rows move."""
        self.rows, choice = list(rows), rows[0].choice
        self.key, self.method, self.verifier = choice.key, choice.method, choice.verifier
        self.shape: Shape = choice.shape
        self.draws: DrawMode = choice.config.proposal_draws
        self.target = target
        self.drafter = WaitingDrafter(drafter)  # which observes steps without guesses later
        self.start = 0
        self._processors: tuple[Processors, Processors] | None = None

    @property
    def stop(self) -> int:
        """The batch's row after its last one."""
        return self.start + len(self.rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        if rows and list(rows) != list(range(len(self.rows))):
            self.drafter.keep(rows)
        self.rows = [self.rows[row] for row in rows]

    @property
    def failure(self) -> str:
        """The error that closed its drafter; "" while it works, or may be told of steps that wait."""
        inner = self.drafter.inner
        return inner.failure if isinstance(inner, GuardedDrafter) else ""

    def shape_of(self, depth_limit: Sequence[int]) -> Shape:
        """The shape of a proposal whose row b is at most depth_limit[b] deep: chains of one group may differ in depth."""
        deepest = max(depth_limit)
        if self.shape.is_chain and 0 < deepest != self.shape.depth:
            self.shape = replace(self.shape, depth=min(deepest, MAX_DEPTH))
        return self.shape

    def context(self, state: State) -> Context:
        """What the drafter may read: the group's rows."""
        if self.start == 0 and self.stop == state.num_rows:
            return state
        if self._processors is None or self._processors[0] is not state.processors:
            self._processors = (state.processors, state.processors.keep(range(self.start, self.stop)))
        return part(state, self.start, self.stop, processors=self._processors[1])


class GroupedDrafter(Drafter):
    """The drafters of all groups as one. How deep each row may guess is the context's ``depth_limit``."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        verifiers = tuple(group.verifier for group in self.groups)
        self.verifier = (
            verifiers[0] if len(verifiers) == 1 else RowVerifiers(verifiers, tuple(group.stop for group in self.groups))
        )
        self.tapping = Tapping(
            tuple(dict.fromkeys(layer for group in self.groups for layer in group.method.taps)), self.verifier.taps
        )

    @property
    def light_steps(self) -> Sequence[LightStep | None]:
        """Of all rows; None for those of drafters that do not know."""
        found: list[LightStep | None] = []
        for group in self.groups:
            given, count = group.drafter.light_steps, group.stop - group.start
            found += given if given is not None and len(given) == count else [None] * count
        return found

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """Every group's proposal, concatenated along the batch. Each group uses its own shape and draws."""
        assert isinstance(context, State)
        trees = []
        for group in self.groups:
            rows = slice(group.start, group.stop)
            own = Noise(noise.seeds[rows], noise.positions[rows]) if len(self.groups) > 1 else noise
            trees.append(
                group.drafter.propose(
                    group.context(context), group.shape_of(context.depth_limit[rows]), group.draws, own
                )
            )
        return trees[0] if len(trees) == 1 else self._merge(trees, context)

    def observe(self, commit: Commit) -> None:
        """Pass each group's rows of the commit to its drafter."""
        for group in self.groups:
            group.drafter.observe(self._own(commit, group) if len(self.groups) > 1 else commit)

    def _merge(self, trees: Sequence[TokenTree], state: State) -> TokenTree:
        num_nodes = max(tree.num_nodes for tree in trees)
        trees = [pad_tree(tree, num_nodes) for tree in trees]
        layer = max(tree.hidden_layer for tree in trees)
        hidden: Tensor | None = None
        if layer:  # a self-drafter has run the lower layers for its rows: run them for the other rows too
            hidden = torch.cat(
                [self._lift(group, tree, layer, state) for group, tree in zip(self.groups, trees, strict=True)]
            )
        probs = next((tree.q for tree in trees if tree.q is not None), None)
        q = None
        if probs is not None:
            q = torch.cat(
                [probs.new_zeros(*tree.tokens.shape, probs.shape[-1]) if tree.q is None else tree.q for tree in trees]
            )
        widths = [tree.max_children for tree in trees]
        most = max((tree.notes.shape[1] for tree in trees if tree.notes is not None), default=0)
        return TokenTree(
            torch.cat([tree.tokens for tree in trees]),
            torch.cat([tree.parent for tree in trees]),
            torch.cat([tree.drawn_by for tree in trees]),
            q,
            hidden,
            layer,
            None if any(width is None for width in widths) else max(width or 1 for width in widths),
            torch.cat([_notes(tree, most) for tree in trees]) if most else None,
        )

    def _lift(self, group: Group, tree: TokenTree, layer: int, state: State) -> Tensor:
        """[b, N, H] what layer ``layer`` reads of a group's nodes."""
        if tree.hidden_layer == layer:
            assert tree.hidden is not None
            return tree.hidden
        plan = layout(
            tree.parent, state.length[group.start : group.stop], state.capacity, span=state.span(tree.num_nodes, 64)
        )
        layers = (tree.hidden_layer, layer)
        return group.target.forward(tree.tokens, plan, layers=layers, hidden=tree.hidden, head=False).hidden

    def _own(self, commit: Commit, group: Group) -> Commit:
        rows = slice(group.start, group.stop)
        taps = None if commit.taps is None or not group.method.taps else commit.taps[rows]
        if taps is not None and group.method.taps != self.tapping.drafter:
            taps = Tapping(self.tapping.drafter, ()).pick(taps, group.method.taps)
        return Commit(
            tree=commit.tree.rows(group.start, group.stop),
            length=commit.length[rows],
            path=commit.path[rows],
            tokens=commit.tokens[rows],
            taps=taps,
            ended=commit.ended[rows],
            guessed=commit.guessed[rows],
            notes=None if commit.notes is None else commit.notes[rows],
        )


def _notes(tree: TokenTree, width: int) -> Tensor:
    """[B, width] a tree's notes, -1 behind them."""
    if tree.notes is None:
        return tree.tokens.new_full((len(tree.tokens), width), -1)
    return torch.nn.functional.pad(tree.notes, (0, width - tree.notes.shape[1]), value=-1)
