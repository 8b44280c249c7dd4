"""Self-speculation: the target's own lower layers guess, and are never run again to verify.

A node is read once by layers [0, exit_layer), in its final slot of the target's own cache; ``TokenTree.hidden`` holds
the result, and the step runs the other layers on it. A learned adapter turns a shallow state into a guess (Kangaroo,
2404.18911).

Every node is read where it stays, so shapes that rank their nodes afterwards, which read them in another order, are not
grown. A leaf needs no guess but must have its shallow state, so all leaves run through the lower layers in one pass at the
end.

In passes of one fixed width (``Engine.width``) the lower layers still see a few nodes at a time: the same text up to
rounding, not bit for bit.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan, TokenTree, chain_parent, layout, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Commit, Context, Drafter, PromptChunk
from foretell.draft.growing import grow
from foretell.draft.growing.frontier import pick, span_for
from foretell.draft.shapes import Shape
from foretell.heads.modules import rotary, turn
from foretell.heads.native import Memory, NativeHead, layer_of
from foretell.kernels import structures
from foretell.kernels.functions import check
from foretell.methods.head_method import HeadMethod, HeadMethodConfig
from foretell.methods.kangaroo.head import KangarooHead
from foretell.model.cache import BoundCache, KVCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel, Target


class NativeAdapter(NativeHead):
    """The adapter beside a native target."""

    def __init__(self, head: KangarooHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        super().__init__(head, model)
        config, self.memory = head.config, Memory(head, weights)
        self._out, self._vocab_size = self.memory.head_of(model), model.spec.vocab_size
        attention, norm = head.layer.self_attn, head.layer.input_layernorm.weight
        self._layers = (structures.Layer * 1)(layer_of(self.memory, attention, None, input_norm=norm))
        self.view = structures.Model(
            head.dtype == torch.bfloat16, 1, model.spec.vocab_size, config.hidden_size, 0, config.num_heads,
            config.num_kv_heads, config.head_dim, config.rms_norm_eps, model.embedding_matrix, self._out,
            self.memory.vector(head.norm.weight), self._layers,
        )  # fmt: skip
        self.address = ctypes.addressof(self.view)

    def logits(self, features: Tensor) -> Tensor:
        """[B, n, V] by the target's head of what ``step`` returned [B, n, H]."""
        return self.model.finished(self.memory.product(self._out, features, self._vocab_size))

    def remember(self, hidden: Tensor, slots: Tensor, cache: KVCache) -> None:
        """See ``KangarooHead.remember``. A sum has one order, whatever the number of threads: torch's has not."""
        config, layer = self.head.config, self.head.layer
        heads, norm = (config.num_kv_heads, config.head_dim), layer.input_layernorm
        x = F.rms_norm(hidden.float(), norm.weight.shape, norm.weight.float(), norm.eps)
        k, v = (
            self.memory.product(self.memory.matrix(linear), x, linear.out_features)
            .view(*slots.shape, *heads)
            .transpose(1, 2)
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        k = turn(k, *rotary(slots, config.head_dim, config.rope_theta, torch.float32))
        cache.write(0, slots, k, v)

    def step(self, hidden: Tensor, plan: Plan, cache: KVCache) -> Tensor:
        """See ``KangarooHead.step``; hidden [B, n, H] -> [B, n, H]."""
        assert isinstance(cache, BoundCache)
        num_rows, num_nodes = hidden.shape[:2]
        hidden, ancestry, threads = hidden.float().contiguous(), plan.ancestry, torch.get_num_threads()
        slots, positions, length = plan.slots.contiguous(), plan.positions.contiguous(), plan.length.contiguous()
        normed = torch.empty_like(hidden)
        functions = self.memory.functions
        with self.memory.lock:
            scratch = self.memory.scratch(
                functions.flash_scratch(
                    self.address, cache.address, num_rows, 0, num_nodes, num_rows * num_nodes, threads
                )
            )
            problem = functions.adapter(
                self.address, cache.address, threads, num_rows, num_nodes, ancestry.shape[2], length.data_ptr(),
                slots.data_ptr(), positions.data_ptr(), ancestry.data_ptr(), *ancestry.stride(), hidden.data_ptr(),
                normed.data_ptr(), scratch,
            )  # fmt: skip
        check(problem)
        return normed


class KangarooDrafter(Drafter):
    """The target's lower layers, on the target's cache, and an adapter, which has a cache of its own.

    While a tree grows, node i of those read lies in slot base + i of both, and ``states[:, i]`` is its shallow state. The
    engine keeps the target's cache between steps. Invariant of the adapter's: slots [0, length) hold the keys and values of
    all committed positions, but for the last one where a leaf was kept: the adapter has not read that yet (the authors'
    code has the same gap). ``lacking`` says of which rows this is so and ``last`` is then the state there; the next
    ``read_root`` reads both.
    """

    can_join = True

    def __init__(
        self, head: KangarooHead, target: Target, context: Context, capacity: int, native: NativeAdapter | None = None
    ) -> None:
        """native: the same adapter through the C kernels; None: as the torch module."""
        self.head, self.target, self.capacity, self.native = head, target, capacity, native
        self.num_states = 0  # n: nodes of the shape being grown
        self.states: Tensor | None = None  # [B, n, H] of the tree being grown
        self.leaves: list[int] = []  # nodes of all rows whose guess was not computed
        self.rows = torch.arange(context.num_rows, device=context.device)[:, None]  # [B, 1]
        self.cache: KVCache = (native or head).new_cache(context.num_rows, capacity)
        self.filled = [0] * context.num_rows  # committed positions that were read or are lacking
        self.lacking = [False] * context.num_rows
        self.last: Tensor | None = None  # [B, 1, H] shallow state at position length - 1; None where no row lacks it

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree with the shallow states of all its nodes, the root's even where no row has room for a guess."""
        limits = context.depth_limit
        self.states, self.leaves = None, []
        if any(limits):
            self.num_states = shape.max_guesses + 1
            grown = grow.grow(self, context, limits, shape, draws, noise)
            tree = grown.tree
            self.leaves = [node for node, slot in enumerate(grown.slots[0].tolist()) if slot < 0]
            self._read_leaves(tree, context)
        else:
            self.num_states = 1
            self._root(context)
            tree = root_tree(context.pending)
        assert self.states is not None
        return replace(tree, hidden=self.states[:, : tree.num_nodes], hidden_layer=self.head.config.exit_layer)

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the pending token of every row, also of those without depth_limit: the step needs its state."""
        return self.exit(self._root(context)), context.length

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after W new nodes."""
        return self.exit(self._step(self._shallow(tokens, plan), plan))

    def _root(self, context: Context) -> Tensor:
        parent = chain_parent(1, context.device).expand(context.num_rows, 1)
        plan = layout(parent, context.length, self.capacity, span=span_for(self, context, 1))
        return self.read_root(self._shallow(context.pending[:, None], plan), plan)

    def _shallow(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, H] after the lower layers; kept too, since a pass's output is valid until the next one only."""
        hidden = self.target.forward(tokens, plan, layers=(0, self.head.config.exit_layer), head=False).hidden
        if self.states is None:  # padding has the state zero: finite, and its output is never read
            self.states = hidden.new_zeros(len(hidden), self.num_states, hidden.shape[-1])
        self.states[self.rows, plan.slots - plan.length[:, None]] = hidden
        return hidden

    def _read_leaves(self, tree: TokenTree, context: Context) -> None:
        if not self.leaves:
            return
        plan = layout(tree.parent, context.length, self.capacity, span=span_for(self, context, tree.num_nodes))
        first, last = self.leaves[0], self.leaves[-1]
        if last - first + 1 == len(self.leaves):
            self._shallow(tree.tokens[:, first : last + 1], plan.nodes(first, last + 1))
        else:
            nodes = tensor_on(context.device, self.leaves)
            self._shallow(tree.tokens[:, nodes], pick(plan, nodes))

    def read_prompt(self, chunk: PromptChunk) -> None:
        """Keys and values of known text. Padding of short rows goes after them, where the root will overwrite it."""
        device = chunk.taps.device
        start = tensor_on(device, chunk.start)
        self.filled = [begun + count for begun, count in zip(chunk.start, chunk.count, strict=True)]
        slots = start[:, None] + torch.arange(chunk.taps.shape[1], device=device)
        (self.native or self.head).remember(chunk.taps, slots, self.cache)

    def read_root(self, hidden: Tensor, plan: Plan) -> Tensor:
        """[B, 1, H], with the position before where that is missing."""
        if self.last is None:
            return self._step(hidden, plan)
        parent = chain_parent(2, hidden.device).expand(len(hidden), 2)
        if all(self.lacking):
            both = layout(parent, plan.length - 1, self.capacity, span=plan.span)
            return self._step(torch.cat((self.last, hidden), 1), both)[:, 1:]
        # Other rows read the pending token first, then padding: there may be no token before it.
        lacks = tensor_on(hidden.device, self.lacking)[:, None]  # [B, 1]
        parent = torch.where(lacks, parent, -1)
        both = layout(parent, plan.length - lacks[:, 0].long(), self.capacity, span=plan.span)
        first = torch.where(lacks[:, :, None], self.last, hidden)
        out = self._step(torch.cat((first, hidden), 1), both)
        return torch.where(lacks[:, :, None], out[:, 1:], out[:, :1])

    def _step(self, hidden: Tensor, plan: Plan) -> Tensor:
        """[B, n, H] of ``KangarooHead.step``, which writes to the adapter's cache."""
        return (self.native or self.head).step(hidden, plan, self.cache)

    def exit(self, features: Tensor) -> Tensor:
        """[B, W, V] by the target's head, without its final norm."""
        if self.native is not None:
            return self.native.logits(features)
        return self.target.model.head(features.to(self.target.spec.dtype))

    def observe(self, commit: Commit) -> None:
        """Move a side branch after the text, as the engine does in the target's cache."""
        paths = commit.path
        if any(path != list(range(len(path))) for path in paths):
            width, device = max(map(len, paths)), commit.length.device
            source = tensor_on(device, [path + list(range(len(path), width)) for path in paths])
            start = commit.length[:, None]
            self.cache.move(start + source, start + torch.arange(width, device=device))
        hidden = commit.tree.hidden
        assert hidden is not None
        self.filled = [filled + len(path) for filled, path in zip(self.filled, paths, strict=True)]
        self.lacking = [path[-1] in self.leaves for path in paths]
        ends = tensor_on(hidden.device, [path[-1:] for path in paths])  # [B, 1]
        self.last = hidden[self.rows, ends] if any(self.lacking) else None

    def keep(self, rows: Sequence[int]) -> None:
        """Fewer rows. (The engine drops those of the target's cache.)"""
        self.rows = self.rows[: len(rows)]
        chosen = tensor_on(self.rows.device, rows)
        self.filled = [self.filled[row] for row in rows]
        self.lacking = [self.lacking[row] for row in rows]
        self.cache.keep(chosen, max(self.filled, default=0))
        self.last = self.last[chosen] if self.last is not None and any(self.lacking) else None

    def join(self, other: Drafter, context: Context) -> None:
        """More rows. (The engine adds those of the target's cache.) Where only some lack the last position, the states of
        the others are undefined."""
        assert isinstance(other, KangarooDrafter)
        self.rows = torch.arange(context.num_rows, device=context.device)[:, None]
        self.states, self.leaves = None, []
        self.cache.join(other.cache, max(other.filled, default=0), max(self.filled, default=0))
        if self.last is not None or other.last is not None:
            some = self.last if self.last is not None else other.last
            assert some is not None
            mine, theirs = (
                side.last if side.last is not None else some.new_zeros(len(side.filled), *some.shape[1:])
                for side in (self, other)
            )
            self.last = torch.cat((mine, theirs))
        self.filled += other.filled
        self.lacking += other.lacking


class Kangaroo(HeadMethod):
    """``--method kangaroo``: the target's lower layers and a trained adapter.

    The authors' second exit, at the token whose confidence falls, is the shape ``adaptive/rule=probability/threshold=0.6``:
    decided before that token is drawn, which is then not guessed (the authors' code guesses it and stops after it).
    """

    name = called = "kangaroo"
    buffers = False
    head: KangarooHead
    kernels = NativeAdapter
    capabilities = Capabilities(
        "the target's lower layers and a trained adapter",
        draws=True,
        needs_head=True,
        shapes=("chain", "adaptive", "static", "sequoia"),
    )

    def __init__(self, head: KangarooHead, model: CausalModel, *, weights: str = "auto") -> None:
        """See ``HeadMethod``."""
        super().__init__(head, model, weights=weights)
        self.exit_layer = head.config.exit_layer

    @property
    def taps(self) -> tuple[int, ...]:
        """None: in steps the drafter computes the shallow states itself."""
        return ()

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """The head's."""
        return self.head.taps

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """A fresh adapter cache for these rows."""
        return KangarooDrafter(self.head, target, context, capacity, self.native)


@dataclass(frozen=True)
class KangarooConfig(HeadMethodConfig):
    """The target's own lower layers and an adapter."""

    method = Kangaroo.name
    capabilities = Kangaroo.capabilities
    made, kind = Kangaroo, KangarooHead
