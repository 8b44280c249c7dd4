"""Block drafters through the C kernels (``kernels/native/flash.h``): a block is one call, and its draws another.
``DFlashHead.rows`` is the slow twin."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.noise import Noise
from foretell.core.probs import Processors
from foretell.core.tree import DrawnBy, TokenTree
from foretell.heads.modules import rotations
from foretell.heads.native import Memory, Vocabulary, address, layer_of, refusal, rounding
from foretell.kernels import heads, structures
from foretell.kernels.functions import check
from foretell.methods.chains import draw_block
from foretell.methods.dflash.head import DFlashHead
from foretell.model.bound import BoundCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel


class NativeFlash:
    """A block drafter beside a native target. Features, outputs and logits are float32 whatever the weights are."""

    def __init__(self, head: DFlashHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        self.head, self.model, self.memory = head, model, Memory(head, weights)
        config = head.config
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

    def new_cache(self, num_rows: int, capacity: int) -> BoundCache:
        """See ``DFlashHead.new_cache``."""
        config = self.head.config
        shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
        rope = rotations(capacity, config.head_dim, config.rope_theta)
        return BoundCache(num_rows, capacity, shapes, self.head.dtype, rope)

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

    def draw(
        self,
        logits: Tensor,
        pending: Tensor,
        limits: Sequence[int],
        processors: Processors,
        label: DrawnBy,
        noise: Noise,
    ) -> TokenTree:
        """The chain that these logits [B, D, DV] of a block make."""
        return draw_block(self.memory, self.vocabulary, logits, pending, limits, processors, label, noise, self.markov)


def native_flash(head: DFlashHead, model: CausalModel, weights: str = "auto") -> tuple[NativeFlash | None, str | None]:
    """The head through the native kernels, or None and why not. weights: one of ``heads.native.WEIGHTS``."""
    reason = refusal(head, model)
    if reason is not None:
        return None, reason
    assert isinstance(model, NativeModel)
    return NativeFlash(head, model, rounding(weights, model)), None
