"""Medusa heads as a drafter (Cai et al. 2401.10774): one hidden state, one guess for each of the next K places.

The heads do not read guesses: head k's distribution does not depend on the guesses before it. So one pass of all heads
serves a whole tree, and the only state of a row is the hidden state of its last committed token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan, TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Commit, Context, Drafter, Method, PromptChunk
from foretell.draft.growing import grow
from foretell.draft.shapes import Shape
from foretell.heads.draft_vocabulary import spread
from foretell.heads.native import Memory, NativeBlocks, Vocabulary
from foretell.methods.chains import can_draw, draw_block
from foretell.methods.head_method import GROWN, HeadMethod, HeadMethodConfig
from foretell.methods.medusa.head import MedusaHead, ResBlock, Stacked
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel, Target


class NativeMedusa:
    """All heads in one call."""

    def __init__(self, head: MedusaHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        config, self.model = head.config, model
        self.memory = Memory(head, weights)
        heads = [list(head.one(index)) for index in range(config.num_heads)]
        blocks = [[block.linear for block in layers if isinstance(block, ResBlock)] for layers in heads]
        outs = [layers[-1] for layers in heads if isinstance(layers[-1], nn.Linear)]
        self._out = self.memory.head_of(model) if not outs else None
        own = Vocabulary(head.token_map, config.vocab_size, self.memory) if outs else None
        self.blocks = NativeBlocks(self.memory, blocks, outs, config.hidden_size, own)
        self.vocabulary = Vocabulary(None, config.vocab_size, self.memory)  # of the logits that come out

    def __call__(self, x: Tensor, num_heads: int) -> Tensor:
        """Final-norm hidden states x [B, H] -> logits [B, num_heads, V] of the first heads, float32."""
        out = self.blocks(x, num_heads)
        if self._out is None:
            return out
        return self.model.finished(self.memory.product(self._out, out, self.vocabulary.size))


MOST_HEADS = 64  # MAX_HEADS of kernels/native/blocks.h


class MedusaDrafter(Drafter):
    """Invariant: ``feature[b]`` is the tapped hidden state of row b's last committed token, where ``known[b]``."""

    can_join = True

    def __init__(
        self, head: MedusaHead, stacked: Stacked | None, model: CausalModel, context: Context, capacity: int,
        native: NativeMedusa | None = None,
    ) -> None:  # fmt: skip
        """native: the same heads through the C kernels; else stacked."""
        assert stacked is not None or native is not None
        self.capacity = capacity
        self.head, self.stacked, self.model, self.native = head, stacked, model, native
        size = model.spec.hidden_size
        self.feature = torch.zeros(context.num_rows, size, dtype=model.spec.dtype, device=context.device)  # [B, H]
        self.known = [False] * context.num_rows  # a prompt of one token has no committed token yet
        self.block_logits = self.feature.new_zeros(0)  # [B, n, V] logits of the next n places, of the last proposal

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree at most as deep as there are heads."""
        deepest = self.head.config.num_heads
        limits = [
            min(deepest, depth_limit) if known else 0
            for depth_limit, known in zip(context.depth_limit, self.known, strict=True)
        ]
        if not any(limits):
            return root_tree(context.pending)
        if self.native is not None and can_draw(self.native.vocabulary, context, shape):
            self.begin(context, limits)
            return draw_block(
                self.native.memory, self.native.vocabulary, self.block_logits, context.pending, limits,
                context.processors, grow.CHAIN_LABELS[draws], noise,
            )  # fmt: skip
        return grow.grow(self, context, limits, shape, draws, noise).tree

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run as many heads as the deepest row needs; the first predicts the token after the pending one."""
        x = self.model.normed(self.feature[:, None])[:, 0]
        if self.native is not None:
            self.block_logits = self.native(x, max(limits))
            return self.block_logits[:, :1], context.length
        assert self.stacked is not None
        out = self.stacked(x.to(self.head.dtype), max(limits))  # [B, n, DV]
        token_map = self.head.token_map
        if self.stacked.out is None:
            out = self.model.head(out.to(self.model.spec.dtype))
        elif token_map is not None:
            out = spread(out, token_map, self.head.config.vocab_size)
        self.block_logits = out
        return out[:, :1], context.length

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V]: a node's depth selects the head for its children."""
        depth = plan.positions - plan.length[:, None]  # [B, W]
        return self.block_logits[torch.arange(len(depth), device=depth.device)[:, None], depth]

    def read_prompt(self, chunk: PromptChunk) -> None:
        """Keep the last hidden state of each row that the chunk holds tokens of."""
        self._keep_last([count - 1 for count in chunk.count], chunk.taps)

    def observe(self, commit: Commit) -> None:
        """Keep the hidden state of each row's last kept node."""
        assert commit.taps is not None
        self._keep_last([path[-1] for path in commit.path], commit.taps)

    def _keep_last(self, at: list[int], taps: Tensor) -> None:
        """Row b's feature becomes taps[b, at[b]]; -1: there is none."""
        if all(index >= 0 for index in at):
            self.feature = taps[torch.arange(len(at), device=taps.device), tensor_on(taps.device, at)]
            self.known = [True] * len(at)
            return
        rows = [row for row, index in enumerate(at) if index >= 0]
        feature = self.feature.to(taps.dtype, copy=True)
        here, nodes = tensor_on(taps.device, [rows, [at[row] for row in rows]])
        feature[here] = taps[here, nodes]
        self.feature = feature
        self.known = [known or index >= 0 for known, index in zip(self.known, at, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows."""
        self.feature = self.feature[list(rows)]
        self.known = [self.known[row] for row in rows]

    def adopt(self, method: Method) -> None:
        """The hidden states are the target's own."""
        assert isinstance(method, Medusa)
        self.head, self.stacked, self.native = method.head, method.stacked, method.native

    def join(self, other: Drafter, context: Context) -> None:
        """Add the hidden states of other rows."""
        assert isinstance(other, MedusaDrafter)
        self.feature = torch.cat([self.feature, other.feature])
        self.known += other.known


class Medusa(HeadMethod):
    """``--method medusa``: heads on the target's last hidden state."""

    name = "medusa"
    capabilities = Capabilities(
        "heads on the target's last hidden state, one for each place ahead",
        draws=True,
        reads_target=True,
        needs_head=True,
        shapes=GROWN,
    )

    called = "medusa"
    can_learn, buffers = True, False
    head: MedusaHead
    kernels = NativeMedusa

    def _natively(self) -> tuple[NativeMedusa | None, str | None]:
        count = self.head.config.num_heads
        many = f"it has {count} heads, and the native kernels run at most {MOST_HEADS}"
        native, reason = super()._natively() if count <= MOST_HEADS else (None, many)
        self.stacked = self.head.stacked() if native is None else None
        return native, reason

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """No cache: a hidden state a row."""
        return MedusaDrafter(self.head, self.stacked, self.model, context, capacity, self.native)


@dataclass(frozen=True)
class MedusaConfig(HeadMethodConfig):
    """Heads on the last hidden state."""

    method = Medusa.name
    capabilities = Medusa.capabilities
    made, kind = Medusa, MedusaHead

    num_speculative_tokens: int = 4  # the bundled head has 4; larger values are cut to the number of heads
