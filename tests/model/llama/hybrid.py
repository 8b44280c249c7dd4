"""Tiny random hybrids that the native decoder runs, with every option of their types away from its neutral value, and
oracles that know nothing of trees: the transformers module in float64, and fresh passes over the text of one node."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foretell.core.tree import Plan, layout
from foretell.model.cache import KVCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.run.states import HybridCache
from foretell.model.target import PassOptions
from tests.model.recurrent import FAMILIES
from tests.model.tiny import COMMON, VOCAB, path_to

_BIASED = {"mamba_proj_bias": True, "mamba_conv_bias": True, "attention_bias": True, "mlp_bias": True}
_MULTIPLIERS: dict[str, Any] = {
    "key_multiplier": 0.5, "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.3, "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.2, "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "mlp_multipliers": [0.7, 1.4],
    "lm_head_multiplier": 0.3, "embedding_multiplier": 2.0,
}  # fmt: skip
_NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "head_dim": 16}
_GRANITE = {"num_local_experts": 0, "hidden_size": 64, "mamba_n_heads": 8, "shared_intermediate_size": 40}
_QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_HALF = {**_QUARTER, "partial_rotary_factor": 0.5}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
}
_MOE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}

# name -> (family of ``recurrent.FAMILIES`` or configuration class, what differs)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5", {"head_dim": 16, "linear_value_head_dim": 24, "rope_parameters": _QUARTER},
    ),
    "qwen3_5-tied": (
        "qwen3_5",
        {"head_dim": 32, "linear_key_head_dim": 10, "linear_value_head_dim": 40, "linear_num_key_heads": 1,
         "linear_conv_kernel_dim": 2, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _HALF},
    ),
    "qwen3_next": (
        "qwen3_next",
        {"head_dim": 32, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
         "linear_conv_kernel_dim": 3, **_MOE, "mlp_only_layers": [2], "norm_topk_prob": False},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe", {"head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4, **_MOE},
    ),
    "lfm2": ("lfm2", {"hidden_size": 64}),
    "lfm2-bias": (
        "lfm2",
        {"hidden_size": 64, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": True,
         "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 20, "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"hidden_size": 64, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 1,
         "routed_scaling_factor": 1.7},
    ),
    "lfm2_moe-plain": (
        "lfm2_moe",
        {"hidden_size": 64, "moe_intermediate_size": 40, "num_experts": 5, "num_experts_per_tok": 3, "num_dense_layers": 0,
         "use_expert_bias": False, "norm_topk_prob": False, "tie_word_embeddings": False},
    ),
    "falcon_h1": ("falcon_h1", {"head_dim": 16, "mamba_n_groups": 2, **_MULTIPLIERS}),
    "falcon_h1-norm": (
        "falcon_h1",
        {"head_dim": 16, "mamba_d_ssm": 80, "mamba_d_head": 20, "mamba_n_groups": 2, "mamba_d_conv": 3,
         "mamba_rms_norm": True, "mamba_norm_before_gate": True, "projectors_bias": True, **_BIASED},
    ),
    "falcon_h1-gate": (
        "falcon_h1",
        {"head_dim": 16, "mamba_n_groups": 4, "mamba_d_conv": 2, "mamba_d_state": 20, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "tie_word_embeddings": True, "mamba_conv_bias": False, **_MULTIPLIERS},
    ),
    "nemotron_h": ("nemotron_h", {**_NEMOTRON, "n_groups": 2, "mamba_head_dim": 40}),
    "nemotron_h-bias": (
        "nemotron_h",
        {**_NEMOTRON, "ssm_state_size": 12, "conv_kernel": 3, "time_step_min": 0.4, "use_bias": True,
         "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": True, "layer_norm_epsilon": 1e-3},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"], **_ROUTED},
    ),
    "granite_hybrid_moe": (
        "granite_hybrid",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "residual_multiplier": 0.5,
         "mamba_n_groups": 2},
    ),
    "granite_hybrid": (
        "granite_hybrid",
        {**_GRANITE, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
         "mamba_n_groups": 2, "time_step_limit": [0.2, 1.5]},
    ),
    "granite_hybrid-rope": (
        "granite_hybrid",
        {**_GRANITE, "position_embedding_type": "rope", "mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_proj_bias": True,
         "mamba_conv_bias": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "bamba": ("bamba", {"hidden_size": 64, "mamba_n_heads": 8, "rope_parameters": _HALF}),
    "bamba-bias": (
        "bamba",
        {"hidden_size": 64, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_conv": 2, **_BIASED,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
KINDS = ("qwen3_5", "qwen3_next", "lfm2", "falcon_h1-norm", "nemotron_h", "nemotron_h_moe", "granite_hybrid")
"""One of each code of a mixer and of what stands beside it."""
_MIXTURES = {"qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeTextConfig"), "lfm2_moe": ("lfm2", "Lfm2MoeConfig")}
"""Of families that ``FAMILIES`` lacks: the one that they are a mixture of, and their own configuration."""
MOST = 12  # nodes of a row that are compared


def hybrid_config(case: str, **changes: Any) -> Any:
    """The configuration of one of CASES."""
    family, own = CASES[case]
    like, own_class = _MIXTURES.get(family, (family, ""))
    class_name, differs = FAMILIES[like]
    class_name = own_class or class_name
    return getattr(transformers, class_name)(**{**COMMON, **differs, "max_position_embeddings": 1024, **own, **changes})


def hybrid_module(case: str, *, dtype: torch.dtype = torch.float32, seed: int = 7, **changes: Any) -> PreTrainedModel:
    """A random model of one of CASES, the same at every call; no bias is zero, no norm neutral, no head like another."""
    config = hybrid_config(case, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
            for name, buffer in module.named_buffers():
                if name.endswith("bias"):  # a router's
                    buffer += 0.3 * torch.randn_like(buffer)
    return module.to(dtype).eval()


def native_hybrid(
    case: str, dtype: torch.dtype = torch.float32, weights: str = "auto", kv: str = "auto", **options: Any
) -> NativeModel:
    """The native model of ``hybrid_module``."""
    return NativeModel.from_hf(hybrid_module(case, dtype=dtype, **options), name=case, weights=weights, kv=kv)


@torch.no_grad()
def plain_logits(module: Any, text: Sequence[int]) -> Tensor:
    """[L, V] of a transformers module: one pass, no cache."""
    logits: Tensor = module(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


def draw(rng: random.Random, count: int) -> list[int]:
    """Tokens at random."""
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def line(count: int, rows: int = 1) -> Tensor:
    """[rows, count] parents of a line."""
    return torch.arange(-1, count - 1).expand(rows, count)


def random_parents(rng: random.Random, count: int, padding: int) -> list[int]:
    """A tree of count nodes, of which the last are padding."""
    real = max(1, count - padding)
    return [-1, *(rng.randrange(i) for i in range(1, real)), *[-1] * (count - real)]


class Texts:
    """Rows of text in a cache: the smallest loop that uses the seam rightly, with plain decoding as the oracle."""

    def __init__(self, model: NativeModel, texts: Sequence[Sequence[int]], capacity: int = 448) -> None:
        self.model, self.capacity = model, capacity
        self.texts = [list(text) for text in texts]
        self.length = [0] * len(texts)  # committed tokens of each
        self.cache: KVCache = model.new_cache(len(texts), capacity)

    @property
    def hybrid(self) -> HybridCache:
        """The cache."""
        return self.cache

    def read(self, chunk: int, *, head: bool = False) -> None:
        """What is not committed yet, in chunks, ragged rows padded, those that have ended too."""
        while any(done < len(text) for done, text in zip(self.length, self.texts, strict=True)):
            pieces = [text[done : done + chunk] for done, text in zip(self.length, self.texts, strict=True)]
            width = max(map(len, pieces))
            tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces])
            parent = torch.tensor([[i - 1 if i < len(piece) else -1 for i in range(width)] for piece in pieces])
            self.model.forward(tokens, self.plan(parent), self.cache, PassOptions(head=head))
            self.length = [done + len(piece) for done, piece in zip(self.length, pieces, strict=True)]

    def plan(self, parent: Tensor | Sequence[Sequence[int]]) -> Plan:
        """The layout of a tree after what is committed."""
        return layout(torch.as_tensor(parent), torch.tensor(self.length), self.capacity, pack=True)

    def logits(
        self, tokens: Sequence[Sequence[int]], parent: Sequence[Sequence[int]], cuts: Sequence[int] = ()
    ) -> Tensor:
        """[B, N, V] of a tree, read in the parts that begin at 0 and at cuts."""
        plan, ids, ends = self.plan(parent), torch.tensor(tokens), [*cuts, len(tokens[0])]
        found = []
        for start, stop in zip([0, *cuts], ends, strict=True):
            part = plan.nodes(start, stop) if cuts else plan
            out = self.model.forward(ids[:, start:stop], part, self.cache).logits
            assert out is not None
            found.append(out)
        return torch.cat(found, 1)

    def commit(self, tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> None:
        """Accept the nodes of each row's path: ragged, padded with a slot that does not move."""
        depth = max(map(len, paths))
        src = [
            [done + i for i in path] + [done] * (depth - len(path))
            for done, path in zip(self.length, paths, strict=True)
        ]
        dst = [
            [done + i for i in range(len(path))] + [done] * (depth - len(path))
            for done, path in zip(self.length, paths, strict=True)
        ]
        self.cache.move(torch.tensor(src), torch.tensor(dst))
        for row, path in enumerate(paths):
            self.texts[row] += [tokens[row][node] for node in path]
            self.length[row] += len(path)


class Plain:
    """Logits after a text, by one pass over the whole in a cache of its own; each text once."""

    def __init__(self, model: NativeModel, capacity: int = 448) -> None:
        self.model, self.capacity = model, capacity
        self.known: dict[tuple[int, ...], Tensor] = {}

    def after(self, text: Sequence[int]) -> Tensor:
        """[V] after the last token of a text."""
        key = tuple(text)
        if key not in self.known:
            rows = Texts(self.model, [[]], self.capacity)
            self.known[key] = rows.logits([text], line(len(text)).tolist())[0, -1]
        return self.known[key]


def step(rows: Texts, plain: Plain, rng: random.Random, *, nodes: int, cuts: Sequence[int] = ()) -> int:
    """A random ragged tree: every node's bits (of many, some nodes') are those of a pass over its path alone; then a random
    path of each row is committed. Returns how many nodes were compared."""
    count = len(rows.texts)
    parents = [random_parents(rng, nodes, rng.randrange(nodes // 2 + 1)) for _ in range(count)]
    tokens = [draw(rng, nodes) for _ in range(count)]
    logits = rows.logits(tokens, parents, cuts)
    assert torch.isfinite(logits).all()
    compared, paths = 0, []
    for row, parent in enumerate(parents):
        real = [node for node in range(nodes) if node == 0 or parent[node] >= 0]
        for node in rng.sample(real, min(len(real), MOST)):
            path = [tokens[row][i] for i in path_to(parent, node)]
            assert torch.equal(logits[row, node], plain.after(rows.texts[row] + path)), (row, node, parent)
        compared += min(len(real), MOST)
        paths.append(path_to(parent, rng.choice(real)))
    rows.commit(tokens, paths)
    return compared
