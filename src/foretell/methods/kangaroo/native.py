"""Kangaroo's adapter through the C kernels (``kernels/native/flash.h``). ``KangarooHead.step`` is the slow twin."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.tree import Plan
from foretell.heads.modules import rotary, rotations, turn
from foretell.heads.native import Memory, layer_of, refusal, rounding
from foretell.kernels import structures
from foretell.kernels.functions import check
from foretell.methods.kangaroo.head import KangarooHead
from foretell.model.bound import BoundCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel


class NativeAdapter:
    """The adapter beside a native target. Its outputs are float32 whatever the weights are."""

    def __init__(self, head: KangarooHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        config = head.config
        self.head, self.memory = head, Memory(head, weights)
        self.model, self._out, self._vocab_size = model, self.memory.head_of(model), model.spec.vocab_size
        attention, norm = head.layer.self_attn, head.layer.input_layernorm.weight
        self._layers = (structures.Layer * 1)(layer_of(self.memory, attention, None, input_norm=norm))
        self.view = structures.Model(
            head.dtype == torch.bfloat16, 1, model.spec.vocab_size, config.hidden_size, 0, config.num_heads,
            config.num_kv_heads, config.head_dim, config.rms_norm_eps, model.embedding_matrix, self._out,
            self.memory.vector(head.norm.weight), self._layers,
        )  # fmt: skip
        self.address = ctypes.addressof(self.view)

    def new_cache(self, num_rows: int, capacity: int) -> BoundCache:
        """See ``KangarooHead.new_cache``."""
        config = self.head.config
        rope = rotations(capacity, config.head_dim, config.rope_theta)
        return BoundCache(num_rows, capacity, [(config.num_kv_heads, config.head_dim)], self.head.dtype, rope)

    def logits(self, features: Tensor) -> Tensor:
        """[B, n, V] by the target's head of what ``step`` returned [B, n, H]."""
        return self.model.finished(self.memory.product(self._out, features, self._vocab_size))

    def remember(self, hidden: Tensor, slots: Tensor, cache: BoundCache) -> None:
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

    def step(self, hidden: Tensor, plan: Plan, cache: BoundCache) -> Tensor:
        """See ``KangarooHead.step``; hidden [B, n, H] -> [B, n, H]."""
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


def native_adapter(
    head: KangarooHead, model: CausalModel, weights: str = "auto"
) -> tuple[NativeAdapter | None, str | None]:
    """The adapter through the native kernels, or None and why not. weights: ``heads.native.WEIGHTS``."""
    reason = refusal(head, model)
    if reason is not None:
        return None, reason
    assert isinstance(model, NativeModel)
    return NativeAdapter(head, model, rounding(weights, model)), None
