"""Guess the tokens that the target found likely when it last read the same token (Token Recycling, 2408.08696).

One matrix [V, K]: after token t, the K tokens that the target found most probable when it last read t, in any text,
rejected branches included. Child number j of a node with token t is entry [t, j]. Nothing is trained; the matrix takes
V * K * 4 bytes (1 MB for 32,768 tokens and K = 8) and starts empty: an entry that was never filled is no child.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import Noise
from foretell.core.settings import value_of
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Commit, Context, Drafter, Method
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.host import Node, depth_first, tree_of
from foretell.draft.shapes import Sequoia, Shape, Static
from foretell.model.target import Target
from foretell.theory.shape import best_tree

MAX_CANDIDATES = 16
"""Most candidates of a token that are kept: most children that a node can have."""


@dataclass(frozen=True)
class CandidateTree:
    """A tree of fixed form, depth first, each node with its rank among its siblings."""

    parent: tuple[int, ...]  # parent[0] = -1
    rank: tuple[int, ...]
    depth: tuple[int, ...]

    @classmethod
    def of(cls, parent: Sequence[int]) -> "CandidateTree":
        """parent[0] = -1, parent < child."""
        ordered = (-1, *(above for above, _ in depth_first([(above, 0) for above in parent[1:]])))
        rank, depth = [0], [0]
        for node in range(1, len(ordered)):
            rank.append(ordered[:node].count(ordered[node]))
            depth.append(depth[ordered[node]] + 1)
        return cls(ordered, tuple(rank), tuple(depth))

    @cached_property
    def levels(self) -> list[list[int]]:
        """The nodes of each depth, the root's left out."""
        return [
            [node for node, depth in enumerate(self.depth) if depth == level] for level in range(1, max(self.depth) + 1)
        ]


@lru_cache(maxsize=64)
def template(shape: Shape, num_candidates: int, depth: int) -> CandidateTree:
    """The tree of a shape, at most so deep, without children beyond those that a token has candidates for."""
    if isinstance(shape, Sequoia):
        return CandidateTree.of(best_tree(shape.acceptance[:num_candidates], shape.size + 1, depth))
    branching = shape.branching if isinstance(shape, Static) else (1,) * depth
    parent, level = [-1], [0]
    for count in branching[:depth]:
        below = [above for above in level for _ in range(min(count, num_candidates))]
        level = list(range(len(parent), len(parent) + len(below)))
        parent += below
    return CandidateTree.of(parent)


@dataclass(frozen=True)
class Lookup:
    """A template as index tensors on one device."""

    levels: list[tuple[Tensor, Tensor]]  # of each depth: [W] the parents' places in the level above, [W] int32 ranks
    order: Tensor  # [N] where the nodes are among those of all levels
    parent: Tensor  # [N]
    depth: Tensor  # [N]


@lru_cache(maxsize=64)
def lookup(form: CandidateTree, device: torch.device) -> Lookup:
    """Shared between calls: never write to it."""

    def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return tensor_on(device, values, dtype)

    by_level = [[0], *form.levels]
    place = {node: index for level in by_level for index, node in enumerate(level)}
    all_nodes = [node for level in by_level for node in level]
    levels = [
        (tensor([place[form.parent[node]] for node in level]), tensor([form.rank[node] for node in level], torch.int32))
        for level in form.levels
    ]
    order = tensor([all_nodes.index(node) for node in range(len(form.parent))])
    return Lookup(levels, order, tensor(form.parent), tensor(form.depth))


class Matrix:
    """Candidates after each of V tokens, most probable first. V itself stands for no token, and nothing follows it."""

    def __init__(self, vocab_size: int, num_candidates: int, device: torch.device) -> None:
        """An empty matrix."""
        self.nothing = vocab_size
        # Two more rows: one for "no token", one as target of writes that are to be dropped.
        shape = (vocab_size + 2, num_candidates)
        self.entries = torch.full(shape, self.nothing, dtype=torch.int32, device=device)

    def grow(self, pending: Tensor, form: CandidateTree, depth_limit: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(tokens, parent) [B, N] int64 of a template filled from the root on; nodes deeper than depth_limit[b] are
        padding."""
        at, flat = lookup(form, pending.device), self.entries.view(-1)
        num_candidates = self.entries.shape[1]
        level = pending[:, None].to(torch.int32)  # [B, W]
        levels = [level]
        for above, rank in at.levels:
            index = level.index_select(1, above) * num_candidates + rank
            level = flat.index_select(0, index.view(-1)).view(index.shape)
            levels.append(level)
        tokens = torch.cat(levels, 1).index_select(1, at.order).long()
        unknown = tokens == self.nothing
        if min(depth_limit) < max(form.depth):
            unknown |= at.depth > tensor_on(pending.device, depth_limit).clamp(min=0)[:, None]
        return tokens.masked_fill(unknown, 0), at.parent.masked_fill(unknown, -1)

    def update(self, tree: TokenTree, candidates: Tensor) -> None:
        """Remember candidates [B, N, K] after the tokens of a tree; of equal tokens the last, row by row, counts."""
        nowhere = self.nothing + 1
        tokens = torch.where(tree.valid, tree.tokens, nowhere).flatten()
        ordered, order = torch.sort(tokens, stable=True)
        last = torch.ones_like(ordered, dtype=torch.bool)
        torch.ne(ordered[1:], ordered[:-1], out=last[:-1])
        ordered = torch.where(last, ordered, nowhere)
        self.entries[ordered] = candidates.flatten(0, 1)[order].to(torch.int32)


class RecyclingDrafter(Drafter):
    """Has no state per row: the matrix belongs to the method."""

    can_join = True

    def __init__(self, matrix: Matrix, num_candidates: int) -> None:
        self.matrix, self.num_candidates = matrix, num_candidates

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED trees of the shape, depth first, with gaps where nothing is known."""
        depth_limit = max(0, *context.depth_limit)
        if depth_limit == 0:
            return root_tree(context.pending)
        form = template(shape, self.num_candidates, depth_limit)
        tokens, parent = self.matrix.grow(context.pending, form, context.depth_limit)
        if context.device.type == "cpu":  # a look at the last known node is free here and saves the target's work
            known = (parent >= 0).any(0).nonzero()
            end = int(known[-1]) + 1 if len(known) else 1
            tokens, parent = tokens[:, :end], parent[:, :end]
        return TokenTree(tokens, parent, torch.full_like(tokens, int(DrawnBy.FIXED)), max_children=max(form.rank) + 1)

    def observe(self, commit: Commit) -> None:
        """Learn from every node that the target read, those rejected included."""
        assert commit.candidates is not None, "the engine passes num_candidates candidates"
        self.matrix.update(commit.tree, commit.candidates)

    def join(self, other: Drafter, context: Context) -> None:
        """Nothing to add: rows have no state, and the matrix belongs to the method."""


class RowDrafter(Drafter):
    """One table a row, on the host: a row learns from its own text alone, and its table is as large as its text.

    Its guesses are those of a matrix that only this row has used.
    """

    can_join = True

    def __init__(self, num_rows: int, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        self.tables: list[dict[int, list[int]]] = [{} for _ in range(num_rows)]  # token -> what is likely after it

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED trees of the shape, depth first, as far as they are known."""
        rows = zip(self.tables, context.history.ids, context.depth_limit, strict=True)
        return tree_of(context, [self._guess(table, ids[-1], shape, depth_limit) for table, ids, depth_limit in rows])

    def _guess(self, table: dict[int, list[int]], pending: int, shape: Shape, depth_limit: int) -> list[Node]:
        if depth_limit < 1 or pending not in table:
            return []
        form = template(shape, self.num_candidates, depth_limit)
        nodes: list[Node] = []
        known = {0: (0, pending)}  # node of the template -> (its number among the guesses, its token)
        for node in range(1, len(form.parent)):
            above = known.get(form.parent[node])
            if above is None or above[1] not in table:
                continue
            token = table[above[1]][form.rank[node]]
            nodes.append((above[0], token))
            known[node] = (len(nodes), token)
        return nodes

    def observe(self, commit: Commit) -> None:
        """Learn from every node that the target read, those rejected included."""
        assert commit.candidates is not None, "the engine passes num_candidates candidates"
        valid, tokens = commit.tree.valid.tolist(), commit.tree.tokens.tolist()
        for table, *rows in zip(self.tables, valid, tokens, commit.candidates.tolist(), strict=True):
            for is_node, token, candidates in zip(*rows, strict=True):
                if is_node:
                    table[token] = candidates

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows."""
        self.tables = [self.tables[row] for row in rows]

    def join(self, other: Drafter, context: Context) -> None:
        """Add the tables of other rows."""
        assert isinstance(other, RowDrafter)
        self.tables += other.tables


class Recycling(Method):
    """``--method recycling``. All batches of one loaded method share the matrix, so a second request starts warm;
    ``isolated`` gives every row a table of its own."""

    name = "recycling"
    capabilities = Capabilities(
        "what the target found likely after the same token before",
        draws=False,
        shapes=("chain", "static", "sequoia"),
        candidates=8,
        learns=True,
        by_request=True,
    )

    def __init__(self, *, num_candidates: int = 8, by_row: bool = False) -> None:
        """num_candidates: K, the most children of a node. by_row: nothing is shared between rows."""
        num_candidates = value_of(num_candidates, int, "num_candidates")
        if not 1 <= num_candidates <= MAX_CANDIDATES:
            raise ConfigError(f"num_candidates = {num_candidates} must be between 1 and {MAX_CANDIDATES}")
        self.capabilities = replace(type(self).capabilities, candidates=num_candidates)
        self.by_row = by_row
        self._matrix: Matrix | None = None

    @property
    def learned_bytes(self) -> int:
        """Of the matrix."""
        held = self._matrix
        return 0 if held is None else held.entries.numel() * held.entries.element_size()

    def memory(self) -> dict[str, Tensor]:
        """``tokens`` [R] int32 that are known, ``entries`` [R, K] int32, their candidates, and ``nothing`` [1]."""
        held = self._matrix
        if held is None:
            return {}
        entries = held.entries[: held.nothing].cpu()
        tokens = (entries[:, 0] != held.nothing).nonzero()[:, 0]
        return {"tokens": tokens.to(torch.int32), "entries": entries[tokens], "nothing": torch.tensor([held.nothing])}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Fill a matrix with what ``memory`` returned; it moves to the requests' device with the first."""
        if not memory:
            return
        nothing, entries = int(memory["nothing"]), memory["entries"]
        self._matrix = Matrix(nothing, entries.shape[1], torch.device("cpu"))
        self._matrix.entries[memory["tokens"].long()] = entries

    def fresh(self) -> "Recycling":
        """With an empty matrix."""
        return Recycling(num_candidates=self.capabilities.candidates, by_row=self.by_row)

    def isolated(self) -> "Recycling":
        """A method with a table per row: one object for all rows that share nothing."""
        return self._isolated

    @cached_property
    def _isolated(self) -> "Recycling":
        return Recycling(num_candidates=self.capabilities.candidates, by_row=True)

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """The matrix. Allocated at the first batch, and again if the vocabulary changes."""
        vocab_size, device = context.processors.vocab_size, context.device
        num_candidates = min(self.capabilities.candidates, vocab_size)
        if self.by_row:
            return RowDrafter(context.num_rows, num_candidates)
        held = self._matrix
        if held is None or held.entries.shape != (vocab_size + 2, num_candidates):
            self._matrix = held = Matrix(vocab_size, num_candidates, device)
        held.entries = held.entries.to(device)
        return RecyclingDrafter(held, num_candidates)


@dataclass(frozen=True)
class RecyclingConfig(MethodConfig):
    """The target's own candidates of earlier passes."""

    method = Recycling.name
    capabilities = Recycling.capabilities

    num_candidates: int = Recycling.capabilities.candidates

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Recycling(num_candidates=self.num_candidates)

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        super().__post_init__()
        Recycling(num_candidates=self.num_candidates)
