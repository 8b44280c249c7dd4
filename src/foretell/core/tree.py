"""Trees of guesses as parent vectors, and the plan by which a model reads one.

A chain, a static or dynamic tree, an n-gram trie, plain decoding (one node) and the prefill of a prompt (a chain) are
one value: ``parent [B, N]``. Mask, positions, cache slots and compaction are pure functions of it.

Shapes: B rows (sequences), N tree nodes with the root, n nodes of them read by one pass, S cache slots attended to.
"""

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from foretell.kernels.small import ancestors_and_depths


class DrawnBy(IntEnum):
    """How a node was drawn, given its context and the siblings before it: the drafter's part of the losslessness
    contract.

    FIXED: not drawn in a way that a verifier corrects for (argmax, top-k, n-gram, ranked after the draw). Always sound.
    IID: from q of its parent, independently of its siblings.
    WITHOUT_REPLACEMENT: from q of its parent without the drawn siblings before it, renormalised.
    COUPLED: from the target's own noise (stream COUPLED); FIXED to every verifier that does not read that stream.
    """

    FIXED = 0
    IID = 1
    WITHOUT_REPLACEMENT = 2
    COUPLED = 3


class DrawMode(StrEnum):
    """How a drafter draws the children of a node, chosen by the verifier or the user. Nodes then say how (``DrawnBy``).

    FIXED: the n most probable tokens of q (argmax for one). IID: n draws from q. WITHOUT_REPLACEMENT: n successive
    draws, all different. COUPLED: the first n of the race that the target's own noise runs on q. GREEDY: one draw from
    q without its n - 1 most probable tokens, then these FIXED (Hu et al. 2502.18779; it subsumes SpecHub). With one
    child GREEDY and WITHOUT_REPLACEMENT are IID.
    """

    FIXED = "fixed"
    IID = "iid"
    WITHOUT_REPLACEMENT = "without_replacement"
    COUPLED = "coupled"
    GREEDY = "greedy"


@dataclass(frozen=True)
class TokenTree:
    """Guesses for B rows. Node 0 is the root: the pending token, already emitted, its KV not yet computed.

    Invariants (``check`` verifies them): ``parent[:, 0] == -1``; every other node's parent has a smaller index, or is
    -1 and the node is padding; padding nodes have no children; siblings stand in verification order, drawn ones before
    FIXED ones; ``q`` is None iff no node was drawn from it.
    """

    tokens: Tensor  # [B, N] int64
    parent: Tensor  # [B, N] int64
    drawn_by: Tensor  # [B, N] int64, values of DrawnBy; row b's root and padding are FIXED
    q: Tensor | None = (
        None  # [B, N, V] distribution that the drawn children of node i came from; zero where it has none. Children of a
        # row that does not sum to 1 (within 1e-3) count as FIXED
    )
    hidden: Tensor | None = None  # [B, N, H] where a self-drafter has already run the lower layers ...
    hidden_layer: int = 0  # ... [0, hidden_layer) of the target
    # An upper bound, known from growing: saves a read from the device. 1: every row is a chain, padding behind it.
    max_children: int | None = None
    # [B, K] int64 on a device: what the drafter wants to know of its tree on the host, read
    notes: Tensor | None = None
    # with the verdict (``Commit.notes``)

    @property
    def num_nodes(self) -> int:
        """N, the root and padding included."""
        return self.tokens.shape[1]

    @cached_property
    def valid(self) -> Tensor:
        """[B, N] bool: the nodes that are not padding."""
        return valid_nodes(self.parent)

    def rows(self, start: int, stop: int) -> "TokenTree":
        """The trees of rows [start, stop); views, nothing is copied."""
        return replace(
            self,
            tokens=self.tokens[start:stop],
            parent=self.parent[start:stop],
            drawn_by=self.drawn_by[start:stop],
            q=None if self.q is None else self.q[start:stop],
            hidden=None if self.hidden is None else self.hidden[start:stop],
            notes=None if self.notes is None else self.notes[start:stop],
        )

    def check(self) -> None:
        """Raise RuntimeError where an invariant above is broken. Reads values on the host: for tests and debugging."""
        shape, index = self.tokens.shape, torch.arange(self.num_nodes, device=self.parent.device)
        if self.parent.shape != shape or self.drawn_by.shape != shape:
            raise RuntimeError(
                f"tokens {tuple(shape)}, parent {tuple(self.parent.shape)}, drawn_by {tuple(self.drawn_by.shape)}"
            )
        ordered = (self.parent >= -1) & (self.parent < index.clamp(min=1))
        if not bool((self.parent[:, 0] == -1).all()) or not bool(ordered.all()):
            raise RuntimeError("parents must come before their children, and node 0 must be the root")
        child_of_padding = ~self.valid.gather(1, self.parent.clamp(min=0)) & self.valid
        if bool(child_of_padding[:, 1:].any()):
            raise RuntimeError("a padding node has children")
        if self.max_children is not None and self.num_nodes > 1:
            below = (self.parent[:, :, None] == index) & self.valid[:, :, None]  # [B, N child, N parent]
            if (most := int(below.sum(1).max())) > self.max_children:
                raise RuntimeError(f"a node has {most} children, and max_children is {self.max_children}")
        if self.max_children == 1 and bool(((self.parent != index - 1) & self.valid).any()):
            raise RuntimeError("max_children is 1, and a row is no chain with padding behind it")
        drawn = (self.drawn_by == DrawnBy.IID) | (self.drawn_by == DrawnBy.WITHOUT_REPLACEMENT)
        inert = ~self.valid
        inert[:, 0] = True
        if bool((self.drawn_by != DrawnBy.FIXED)[inert].any()):
            raise RuntimeError("the root and padding nodes are FIXED")
        if bool(drawn.any()) != (self.q is not None):
            raise RuntimeError("q must be given iff a node was drawn from it")
        fixed_before = (
            (self.parent[:, :, None] == self.parent[:, None, :])
            & (self.valid & ~drawn & (self.drawn_by != DrawnBy.COUPLED))[:, :, None]
            & drawn[:, None, :]
            & (index[:, None] < index[None, :])
        )
        if bool(fixed_before[:, 1:, 1:].any()):
            raise RuntimeError("drawn siblings stand before FIXED ones")


def valid_nodes(parent: Tensor) -> Tensor:
    """[B, N] bool of parent [B, N]: the nodes that are not padding."""
    valid = parent >= 0
    valid[:, 0] = True
    return valid


def root_tree(tokens: Tensor) -> TokenTree:
    """The tree of plain decoding: one node a row. tokens [B] are the pending ones."""
    # Calls are written for caches that a pass has emptied: indexing by None takes 40 us then, unsqueeze 10.
    return TokenTree(tokens.unsqueeze(1), *_roots(len(tokens), tokens.device), max_children=1)


@lru_cache(maxsize=256)
def _roots(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(parent, drawn_by) [B, 1] of roots alone. Shared between calls: never write to it."""
    shape = num_rows, 1
    return chain_parent(1, device).expand(shape), _chain_labels(1, DrawnBy.FIXED, device).expand(shape)


def chain_tree(
    tokens: Tensor, count: Tensor | None = None, *, drawn_by: DrawnBy = DrawnBy.FIXED, q: Tensor | None = None
) -> TokenTree:
    """A chain a row: tokens [B, N] with the pending one first; row b has count[b] real nodes (all N by default)."""
    num_rows, num_nodes = tokens.shape
    parent = chain_parent(num_nodes, tokens.device).expand(num_rows, num_nodes)
    labels = _chain_labels(num_nodes, drawn_by, tokens.device).expand_as(tokens)
    if count is not None:
        padding = torch.arange(num_nodes, device=tokens.device) >= count[:, None]  # [B, N]
        parent = parent.masked_fill(padding, -1)
        labels = labels.masked_fill(padding, int(DrawnBy.FIXED))
    return TokenTree(tokens, parent, labels, q, max_children=1)


def pad_tree(tree: TokenTree, num_nodes: int) -> TokenTree:
    """The same tree with padding nodes up to num_nodes (unchanged where it already has as many)."""
    extra = num_nodes - tree.num_nodes
    if extra <= 0:
        return tree
    pad = torch.nn.functional.pad
    return replace(
        tree,
        tokens=pad(tree.tokens, (0, extra)),
        parent=pad(tree.parent, (0, extra), value=-1),
        drawn_by=pad(tree.drawn_by, (0, extra)),
        q=None if tree.q is None else pad(tree.q, (0, 0, 0, extra)),
        hidden=None if tree.hidden is None else pad(tree.hidden, (0, 0, 0, extra)),
    )


@lru_cache(maxsize=256)
def chain_parent(num_nodes: int, device: torch.device) -> Tensor:
    """[N] the parent vector of a chain. Shared between calls: never write to it."""
    return torch.arange(-1, num_nodes - 1, device=device)


@lru_cache(maxsize=256)
def _chain_labels(num_nodes: int, label: DrawnBy, device: torch.device) -> Tensor:
    labels = torch.full((num_nodes,), int(label), dtype=torch.int64, device=device)
    labels[0] = DrawnBy.FIXED
    return labels


@lru_cache(maxsize=64)
def _chain_ancestors(num_nodes: int, device: torch.device) -> Tensor:
    return torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=device).tril()


def is_chain(parent: Tensor) -> bool:
    """Whether every row is a full chain, where that can be known without waiting for a device.

    A host read is free on the CPU, and a long chain (a prompt) must not pay for N x N products.
    """
    if parent.shape[1] == 1:
        return True
    return parent.device.type == "cpu" and torch.equal(
        parent, chain_parent(parent.shape[1], parent.device).expand_as(parent)
    )


def ancestors(parent: Tensor) -> Tensor:
    """[B, N, N] bool: entry [b, i, j] says that node j is node i or an ancestor of it. Padding has only itself."""
    num_rows, num_nodes = parent.shape
    if is_chain(parent):
        return _chain_ancestors(num_nodes, parent.device).expand(num_rows, num_nodes, num_nodes)
    found = ancestors_and_depths(parent)
    return ancestors_by_squaring(parent) if found is None else found[0]


def ancestors_by_squaring(parent: Tensor) -> Tensor:
    """``ancestors`` by repeated squaring of the one-step relation: log2(N) small products and no host loop over nodes, for
    accelerators; and the slow twin of ``kernels/tree.c``."""
    num_nodes = parent.shape[1]
    index = torch.arange(num_nodes, device=parent.device)
    step = (parent[:, :, None] == index) | (index[:, None] == index)  # [B, N, N] self or parent
    reach = step.float()
    for _ in range(max(1, num_nodes - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def depths(parent: Tensor) -> Tensor:
    """[B, N] int64: the number of steps from the root; 0 for the root and for padding."""
    if is_chain(parent):
        return torch.arange(parent.shape[1], device=parent.device).expand_as(parent)
    found = ancestors_and_depths(parent)
    return ancestors_by_squaring(parent).sum(-1) - 1 if found is None else found[1]


@dataclass(frozen=True)
class Plan:
    """The slots, positions and visible nodes of n nodes of a tree: a model's input besides the tokens.

    Row b's committed tokens lie in slots [0, length[b]), slot equal to position. Node j of the tree has slot
    ``length[b] + j``, final when assigned, and position ``length[b] + depth``: slot is not position. A plan may cover
    only some nodes (``nodes``), so that a drafter can run a tree node by node, or only its lower layers.
    """

    length: Tensor  # [B] int64 committed slots of each row
    ancestry: Tensor  # [B, n, N] bool: which of the tree's N node slots each of the n nodes sees, itself included
    slots: Tensor  # [B, n] int64 where K and V of each node are written
    positions: Tensor  # [B, n] int64
    tree_positions: Tensor  # [B, N] int64 positions of all nodes, whose slots follow length[b]
    span: int  # S: slots attended to; every used slot is below it
    real: Tensor | None = None  # [T] int64 b * n + j of the nodes that are not padding; None: all are worth running
    known: Tensor | None = None  # [B] int64 nodes of each row, a line, that are text and no guesses: all are kept

    @property
    def num_nodes(self) -> int:
        """n, the nodes that this plan covers."""
        return self.slots.shape[1]

    def nodes(self, start: int, stop: int) -> "Plan":
        """The plan of nodes [start, stop) of those covered: the same slots, positions and sight."""
        return replace(
            self,
            ancestry=self.ancestry[:, start:stop],
            slots=self.slots[:, start:stop],
            positions=self.positions[:, start:stop],
            real=None,
            known=None,
        )

    @cached_property
    def mask(self) -> Tensor:
        """[B, 1, n, S] bool, True where a node sees a slot: all committed slots, its ancestors and itself."""
        offset = self._offset[:, None, :]  # [B, 1, S] slot relative to the root's
        num_tree_nodes = self.ancestry.shape[2]
        inside = (offset >= 0) & (offset < num_tree_nodes)
        index = offset.clamp(0, num_tree_nodes - 1).expand(-1, self.num_nodes, -1)
        return ((offset < 0) | (self.ancestry.gather(2, index) & inside))[:, None]

    @cached_property
    def key_positions(self) -> Tensor:
        """[B, S] int64: the position of what each slot holds, -1 for unused slots. Sliding windows mask by it."""
        offset = self._offset
        num_tree_nodes = self.tree_positions.shape[1]
        slot = torch.arange(self.span, device=offset.device).expand_as(offset)
        in_tree = self.tree_positions.gather(1, offset.clamp(0, num_tree_nodes - 1))
        return torch.where(offset < 0, slot, torch.where(offset < num_tree_nodes, in_tree, -1))

    @cached_property
    def _offset(self) -> Tensor:
        return torch.arange(self.span, device=self.length.device) - self.length[:, None]  # [B, S]


def layout(
    parent: Tensor, length: Tensor, capacity: int, *, span: int | None = None, pack: bool = False, is_line: bool = False
) -> Plan:
    """Lay a tree after the committed tokens of each row. Pure: a function of its arguments alone.

    parent [B, N], length [B] committed slots; capacity is the number of slots a row has. span (default capacity) is how
    many of them attention reads: any value >= max(length) + N gives the same mathematical result.
    pack says which nodes are real, so that a model can leave the padding of ragged rows out of its products (a host read:
    for the CPU, where it is free).
    is_line: every row is a chain, maybe with padding behind it; an accelerator then needs no products to see who descends
    from whom.
    The caller must keep the bound length + N <= capacity (and raises CapacityError): it is not checked here, to avoid a
    host read.
    """
    num_nodes = parent.shape[1]
    slots = length.unsqueeze(1)
    if num_nodes == 1:  # in every plain step
        return Plan(length, ancestors(parent), slots, slots, slots, capacity if span is None else span)
    slots = slots + (chain_parent(num_nodes, parent.device) + 1)
    if is_chain(parent):  # a chain's depth is its index: no sum over a prompt's N x N matrix
        ancestry, positions = ancestors(parent), slots
    elif is_line and not parent.is_cpu:  # where a kernel does it
        ancestry, depth = _lines(parent)
        positions = length.unsqueeze(1) + depth
    else:
        found = ancestors_and_depths(parent)
        if found is None:
            ancestry = ancestors_by_squaring(parent)
            positions = length.unsqueeze(1) + (ancestry.sum(-1) - 1)
        else:
            ancestry, positions = found[0], found[1].add_(length.unsqueeze(1))
    real = None
    if pack and parent.shape[0] > 1:
        real = valid_nodes(parent).flatten().nonzero()[:, 0]
        real = real if len(real) <= 0.9 * parent.numel() else None  # too little padding to be worth it
    return Plan(length, ancestry, slots, positions, positions, capacity if span is None else span, real)


def _lines(parent: Tensor) -> tuple[Tensor, Tensor]:
    """(ancestry, depth) of rows that are each a chain with padding behind it: no products, for accelerators."""
    num_nodes, device = parent.shape[1], parent.device
    valid = valid_nodes(parent)
    chain = _chain_ancestors(num_nodes, device)
    itself = chain & chain.t()
    return torch.where(valid[:, :, None], chain, itself), (chain_parent(num_nodes, device) + 1) * valid
