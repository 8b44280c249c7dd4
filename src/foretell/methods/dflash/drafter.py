"""A block drafter (``dflash/head.py``): one pass of a few layers makes all guesses of a step.

The pass gives a distribution for each depth. Without a Markov head they are marginals: siblings' children have the same
distribution, whatever their parent is (trees of them: DDTree, 2604.12989). With one, a node's own token tilts the
distribution after it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, Plan, TokenTree, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.growing import grow
from foretell.draft.shapes import SHAPES, Shape
from foretell.heads.draft_vocabulary import spread
from foretell.heads.native import Memory, NativeHead, Vocabulary, address, layer_of
from foretell.kernels import heads, structures
from foretell.kernels.functions import check
from foretell.methods.chains import can_draw, draw_block
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.features import FeatureBuffer, FeatureDrafter
from foretell.methods.head_method import HeadMethod, HeadMethodConfig, WindowedMethodConfig
from foretell.model.cache import BoundCache, KVCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.prefill import round_up
from foretell.model.target import CausalModel, Target


class NativeFlash(NativeHead):
    """A block drafter beside a native target."""

    def __init__(self, head: DFlashHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        super().__init__(head, model)
        config, self.memory = head.config, Memory(head, weights)
        self.size, self.vocab_size = config.hidden_size, model.spec.vocab_size
        self.vocabulary = Vocabulary(head.vocabulary, self.vocab_size, self.memory)
        self._fusion = self.memory.matrix(head.fc)
        self._hidden_norm = head.hidden_norm.weight.detach().float()
        self._layers = (structures.Layer * config.num_layers)()
        for index, layer in enumerate(head.layers):
            norms = [layer.get_parameter(f"{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")]
            self._layers[index] = layer_of(
                self.memory, layer.get_submodule("self_attn"), layer.get_submodule("mlp"),
                input_norm=norms[0], mlp_norm=norms[1],
            )  # fmt: skip
        out = self.memory.head_of(model) if head.lm_head is None else self.memory.matrix(head.lm_head)
        self.view = structures.Model(
            head.dtype == torch.bfloat16, config.num_layers, self.vocabulary.num_outputs, config.hidden_size,
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps,
            model.embedding_matrix, out, self.memory.vector(head.norm.weight), self._layers,
        )  # fmt: skip
        if head.lm_head is None:
            model.lend_outputs(self.view)
        self.address = ctypes.addressof(self.view)
        self.markov: heads.Markov | None = None
        if head.markov_head is not None:
            pair = head.markov_head.markov_w1, head.markov_head.markov_w2
            self.markov = heads.Markov(*(self.memory.matrix(each) for each in pair))

    def fuse(self, taps: Tensor) -> Tensor:
        """See ``DFlashHead.fuse``."""
        fused = self.memory.product(self._fusion, taps, self.size)
        return F.rms_norm(fused, self._hidden_norm.shape, self._hidden_norm, self.head.config.rms_norm_eps)

    def block(
        self, blocks: Tensor, context: Tensor, slots: Tensor, seen: Tensor, cache: BoundCache, rows: tuple[int, int],
        *, logits: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """blocks [B, Q, H] embeddings, context [B, n, H] features, slots [B, n + Q] of both, seen [layers, B, Q] the
        last slot that each row of a block sees -> of rows [start, stop) of each block the normed outputs [B, m, H] and
        logits [B, m, DV]."""
        num_rows, size = blocks.shape[:2]
        known, threads, functions = context.shape[1], torch.get_num_threads(), self.memory.functions
        blocks, context = blocks.float().contiguous(), context.float().contiguous()
        slots, seen = slots.contiguous(), seen.contiguous()
        start, count = rows[0], rows[1] - rows[0]
        normed = torch.empty(num_rows, count, self.size)
        out = torch.empty(num_rows, count, self.vocabulary.num_outputs) if logits else None
        with self.memory.lock:
            scratch = self.memory.scratch(
                functions.flash_scratch(self.address, cache.address, num_rows, known, size, num_rows * count, threads)
            )
            problem = functions.flash(
                self.address, cache.address, threads, num_rows, known, size, context.data_ptr(), blocks.data_ptr(),
                slots.data_ptr(), seen.data_ptr(), start, count, normed.data_ptr(), address(out), scratch,
            )  # fmt: skip
        check(problem)
        return normed, out

    def bias(self, before: Tensor) -> Tensor:
        """See ``DFlashHead.bias``."""
        assert self.markov is not None
        assert self.head.markov_head is not None
        rows = F.embedding(before, self.head.markov_head.markov_w1.weight)
        return self.memory.product(self.markov.second, rows, self.vocabulary.num_outputs)


class DFlashDrafter(FeatureDrafter):
    """The head with its own KV cache.

    Invariant: slot t < length[b] holds K and V of the feature of position t; slot is position. The rows of a block are
    written after them and never counted: the next features overwrite them. So nothing is ever moved or cropped.
    """

    can_join = True

    def __init__(
        self, head: DFlashHead, model: CausalModel, context: Context, capacity: int, native: NativeFlash | None = None
    ) -> None:
        """native: the same head through the C kernels; None: as the torch module."""
        config, device = head.config, model.spec.device
        self.head, self.model, self.native = head, model, native
        self.capacity = capacity
        self.spare = capacity + config.block_size  # a slot that is never attended to: padding is written there
        self.cache: KVCache = (native or head).new_cache(context.num_rows, self.spare + 1)
        self.features = FeatureBuffer(context.num_rows, (native or head).fuse)
        self.mask_row = model.embed(tensor_on(device, [[config.mask_token_id]])).to(head.dtype)  # [1, 1, H]
        self.vocabulary = head.vocabulary
        self.block_logits = self.normed = torch.empty(0)  # [B, D, DV] logits and [B, D, H]: of guess d + 1 of the block
        self.anchor = context.pending  # [B] of the last block
        self.fed: list[tuple[Tensor, Plan]] = []  # tokens [B, W] and plans of the nodes read since, for ``chance``

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows of memory."""
        self.features.keep(rows)
        self.cache.keep(tensor_on(self.mask_row.device, rows), self.features.num_taken)

    def join(self, other: Drafter, context: Context) -> None:
        """Add rows of memory, and what waits for it. The last block is forgotten."""
        assert isinstance(other, DFlashDrafter)
        self.cache.join(other.cache, other.features.num_taken, self.features.num_taken)
        self.features.join(other.features)
        self.anchor = context.pending
        self.fed.clear()

    def adopt(self, method: Method) -> None:
        """Features in the memory stay as the old weights wrote them: the target's outputs are gone."""
        assert isinstance(method, DFlash)
        self.head, self.native, self.vocabulary = method.head, method.native, method.head.vocabulary
        self.features.prepare = (method.native or method.head).fuse

    def num_unread(self, context: Context) -> list[int]:
        """Features that are not in the memory."""
        return [row.count for row in self.features.rows]

    def catch_up(self, context: Context, row: int, most: int) -> int:
        """Take features of one row into its memory. One masked row of a block goes with them, since no layer runs without;
        it is written to the spare slot."""
        start = self.features.rows[row].start
        known = self.features.take_first(row, most)
        if known is not None:
            device, alone = known.device, self.cache.rows(row, row + 1)
            slots = torch.cat((torch.arange(start, start + len(known), device=device), tensor_on(device, [self.spare])))

            if self.native is not None:
                assert isinstance(alone, BoundCache)
                seen = self.head.last_seen(slots[None, -1:])
                self.native.block(self.mask_row, known[None], slots[None], seen, alone, (0, 1), logits=False)
                return self.features.rows[row].count

            def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
                alone.write(layer, slots[None], keys, values)
                return keys, values

            # As wide as the keys: accelerators' kernels take no mask whose last axis is one value for all of them.
            seen = torch.ones(1, 1, 1, slots.numel(), dtype=torch.bool, device=device)
            masks = [seen] * self.head.config.num_layers
            self.head.rows(self.mask_row, known[None], slots[None], masks, memory)
        return self.features.rows[row].count

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """A tree no deeper than a block has guesses."""
        deepest = self.head.config.num_guesses
        limits = [min(deepest, depth_limit) for depth_limit in context.depth_limit]
        if not any(limits):
            return root_tree(context.pending)
        if self.native is not None and can_draw(self.native.vocabulary, context, shape):
            self._run(context, limits)
            return draw_block(
                self.native.memory, self.native.vocabulary, self.block_logits, context.pending, limits,
                context.processors, grow.CHAIN_LABELS[draws], noise, self.native.markov,
            )  # fmt: skip
        return grow.grow(self, context, limits, shape, draws, noise).tree

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run the block after each row's pending token, and what became known before it since the last block."""
        self._run(context, limits)
        return self._tilted(self.block_logits[:, :1], context.pending[:, None]), context.length

    def _run(self, context: Context, limits: Sequence[int]) -> None:
        head, config = self.head, self.head.config
        depth = max(limits)
        num_rows = config.num_rows(depth)
        pending = context.pending[:, None]
        known, slots = self._take(context, num_rows)
        self.anchor = context.pending
        first = self.model.embed(pending).to(head.dtype)  # [B, 1, H]
        blocks = torch.cat((first, self.mask_row.expand(len(first), num_rows - 1, -1)), 1)
        span = min(self.spare, round_up(max(context.lengths) + num_rows, 64))
        self.fed.clear()
        if self.native is not None:
            assert isinstance(self.cache, BoundCache)
            wanted = (config.first_row, config.first_row + depth)
            seen = head.last_seen(slots[:, -num_rows:])
            self.normed, logits = self.native.block(blocks, known, slots, seen, self.cache, wanted)
            assert logits is not None
            self.block_logits = logits
            return

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self.cache.write(layer, slots, keys, values)
            return self.cache.keys[layer][:, :, :span], self.cache.values[layer][:, :, :span]

        normed = head.rows(blocks, known, slots, head.masks(slots[:, -num_rows:], span), memory)
        self.normed = normed[:, config.first_row : config.first_row + depth]
        self.block_logits = head.logits(self.normed, self.model)

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        """[B, W, V] after W new nodes: taken from the block's logits at their depth, without a pass."""
        if self.head.confidence_head is not None:
            self.fed.append((tokens, plan))
        # (Some shapes also read nodes at the largest depth, whose logits are not used.)
        depth = (plan.positions - plan.length[:, None]).clamp(max=self.block_logits.shape[1] - 1)
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        return self._tilted(self.block_logits[row, depth], tokens)

    @property
    def chance(self) -> Tensor | None:
        """See ``Expander``. DSpark's head predicts from the token before the guess, without the guess's own token."""
        if self.head.confidence_head is None or not self.fed:
            return None
        _, plan = self.fed[-1]
        own = plan.slots - plan.length[:, None]  # [B, W] columns of the tree
        column = torch.arange(plan.ancestry.shape[2], device=own.device)
        # The last column seen but its own.
        parent = (plan.ancestry & (column != own[:, :, None])).long().mul(column).amax(2)
        tokens = self.anchor.new_zeros(len(own), len(column))
        tokens[:, 0] = self.anchor
        for read, at in self.fed:
            tokens.scatter_(1, at.slots - at.length[:, None], read)
        row = torch.arange(len(own), device=own.device)[:, None]
        depth = (plan.positions - plan.length[:, None] - 1).clamp(min=0)  # guess d is made by row d - 1 of ``normed``
        return self.head.confidence(self.normed[row, depth].to(self.head.dtype), tokens.gather(1, parent)).sigmoid()

    def _tilted(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, V] after nodes of these tokens [B, W], of the block's logits [B, W, DV]; -inf outside the draft
        vocabulary."""
        if self.head.markov_head is not None:
            logits = logits + (self.native or self.head).bias(tokens)
        if self.vocabulary is None:
            return logits
        return spread(logits, self.vocabulary, self.head.config.vocab_size)

    def _take(self, context: Context, num_rows: int) -> tuple[Tensor, Tensor]:
        """(context features [B, n, H] not yet in memory, slots [B, n + Q] of them and of the block after them)."""
        known, start, count = self.features.take()
        assert self.features.ends == context.lengths, "features are known of all positions before the pending token"
        if known is None:
            known = self.mask_row.new_empty(len(count), 0, self.mask_row.shape[2])
        num_known, device = known.shape[1], known.device
        behind = context.length[:, None] + torch.arange(-num_known, num_rows, device=device)
        if min(count) == num_known:
            return known, behind
        index = torch.arange(num_known, device=device)
        first, counts = tensor_on(device, (start, count))[:, :, None]
        slots = torch.where(index < counts, first + index, self.spare)
        return known, torch.cat((slots, behind[:, num_known:]), 1)


class DFlash(HeadMethod):
    """``--method dflash``: a trained block drafter."""

    name = "dflash"
    capabilities = Capabilities(
        "a head that guesses a block in one pass", draws=True, reads_target=True, needs_head=True, shapes=SHAPES.builtin
    )

    called = "dflash head"
    can_learn = True
    head: DFlashHead
    kernels = NativeFlash

    @property
    def foresees(self) -> bool:
        """Whether it can grow the shape ``specdec``: with a confidence head."""
        return self.head.config.confidence

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """An empty memory for these rows."""
        return DFlashDrafter(self.head, self.model, context, capacity, self.native)


@dataclass(frozen=True)
class DFlashConfig(WindowedMethodConfig, HeadMethodConfig):
    """A block of guesses in one pass."""

    method = DFlash.name
    capabilities = DFlash.capabilities
    made, kind = DFlash, DFlashHead

    num_speculative_tokens: int = 7
