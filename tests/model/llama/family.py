"""Tiny random models of the Llama family, and an oracle that knows nothing of trees: one plain pass per path."""

from typing import Any

import torch
import transformers
from torch import Tensor

from foretell.core.tree import Plan, layout
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel, Output, PassOptions

VOCABULARY, CAPACITY = 61, 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16, "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.3, 1.7, 2.5, 3.0, 4.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 8.0], "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128,
}  # fmt: skip
_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SLIDING = {"rope_type": "default", "rope_theta": 1e4}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_WIDE = {"hidden_size": 64, "head_dim": ...}  # of types whose head dimension is hidden / heads; nothing sets it apart
_GEMMA3 = {"query_pre_attn_scalar": 24, "sliding_window": 6, "layer_types": _LAYERS, "tie_word_embeddings": True}
_SCALED = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 5.0,
}  # fmt: skip
_SPARSE = {"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
_DEEPSEEK = {
    **_SPARSE, **_LATENT, "n_routed_experts": 8, "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1,
    "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.4},
}  # fmt: skip
_QWEN = {**_SPARSE, "num_experts": 6, "moe_intermediate_size": 40}  # sizes that no block of 16 or 32 divides

# kind -> how transformers names its classes, and in what its configuration differs from _COMMON: no trait is neutral
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": (
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-llama3-rope": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": _YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", _WIDE),
    "qwen2-tied-window": (
        "Qwen2", {**_WIDE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", {}),
    "phi3-window": ("Phi3", {**_WIDE, "pad_token_id": 0, "head_dim": 16, "sliding_window": 7}),
    "phi3-partial": ("Phi3", {**_WIDE, "pad_token_id": 0, "head_dim": 16, "rope_parameters": _PART}),
    "phi3-longrope": (
        "Phi3",
        {**_WIDE, "pad_token_id": 0, "head_dim": 16, "rope_parameters": _LONG, "original_max_position_embeddings": 128},
    ),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {**_GEMMA3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", _GEMMA3),
    "gemma3-linear-rope": (
        "Gemma3",
        {**_GEMMA3, "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                                        "sliding_attention": _SLIDING}},
    ),
    "granite": ("Granite", _SCALED),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0, "use_sliding_window": True, "sliding_window": 6},
    ),
    "qwen3moe": ("Qwen3Moe", {**_QWEN, "norm_topk_prob": True}),
    "qwen3moe-dense-between": ("Qwen3Moe", {**_QWEN, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen2moe": (
        "Qwen2Moe",
        {**_QWEN, **_WIDE, "shared_expert_intermediate_size": 56, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "mixtral-window": ("Mixtral", {**_SPARSE, "num_local_experts": 4, "sliding_window": 7}),
    "olmoe": ("Olmoe", {**_SPARSE, **_WIDE, "num_experts": 5, "num_experts_per_tok": 3}),
    "granitemoe": ("GraniteMoe", {**_SPARSE, **_WIDE, **_SCALED, "num_local_experts": 4}),
    "glm4": ("Glm4", {"rope_parameters": _PART, "attention_bias": True, "pad_token_id": 0}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 6, "layer_types": _LAYERS,
         "rope_parameters": {"full_attention": _YARN, "sliding_attention": _SLIDING}},
    ),
    "ministral3": (  # queries grow every eight positions
        "Ministral3",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
                             "original_max_position_embeddings": 8}},
    ),
    "glm4moe": (
        "Glm4Moe",
        {**_SPARSE, "n_routed_experts": 8, "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 4,
         "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "use_qk_norm": True,
         "attention_bias": True, "rope_parameters": _PART},
    ),
    "granitemoeshared": (
        "GraniteMoeShared", {**_SPARSE, **_WIDE, **_SCALED, "num_local_experts": 4, "shared_intermediate_size": 56},
    ),
    "gptoss": (  # most of what gate and up are is clamped
        "GptOss",
        {**_SPARSE, "num_local_experts": 5, "sliding_window": 6, "layer_types": _LAYERS, "swiglu_alpha": 1.3,
         "swiglu_limit": 0.5, "rope_parameters": {**_YARN, "truncate": False}},
    ),
    "arcee": ("Arcee", {"mlp_bias": True, "attention_bias": True}),
    "cohere": ("Cohere", {**_WIDE, "layer_norm_eps": 1e-3, "logit_scale": 0.3}),
    "cohere2": ("Cohere2", {**_WIDE, "sliding_window": 6, "layer_types": _LAYERS, "attention_bias": True}),
    "cwm": ("Cwm", {"sliding_window": 6, "layer_types": _LAYERS, "rope_parameters": _LLAMA3}),
    "ernie4_5-bias": ("Ernie4_5", {"use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**_SPARSE, **_WIDE, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 40,
         "moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 6, "layer_types": _LAYERS}),
    "exaone4-no-window": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone_moe": (
        "ExaoneMoe",
        {**_QWEN, "sliding_window": 6, "layer_types": _LAYERS, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "n_group": 2, "topk_group": 1, "num_shared_experts": 2, "routed_scaling_factor": 1.7},
    ),
    "flex_olmo": ("FlexOlmo", {**_SPARSE, **_WIDE, "num_experts": 5, "norm_topk_prob": False}),
    "glm": ("Glm", {"rope_parameters": _PART, "attention_bias": True, "pad_token_id": 0}),
    "granite_swa": (
        "GraniteSWA",
        {**_SCALED, **_WIDE, "sliding_window": 6, "layer_types": _LAYERS, "layer_rope_theta": [1e4, 0, 5e5],
         "mlp_bias": True},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {**_SPARSE, **_WIDE, **_SCALED, "num_local_experts": 4, "shared_intermediate_size": 56, "sliding_window": 6,
         "layer_types": _LAYERS, "layer_rope_theta": [1e4, 0, 5e5]},
    ),
    "helium": ("Helium", {"hidden_size": 64, "attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2, **_SPARSE, "num_experts_per_tok": ...}),
    "hy_v3": (
        "HYV3",
        {**_QWEN, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_shared_experts": 2,
         "router_scaling_factor": 1.7, "attention_bias": True},
    ),
    "hyperclovax": ("HyperCLOVAX", {**_SCALED, "use_post_norm": True, "attention_bias": True}),
    "hyperclovax-no-post": ("HyperCLOVAX", {"use_post_norm": False, "logits_scaling": 0.3, "mlp_bias": True}),
    "internlm3": ("InternLM3", {"attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2", {"layer_norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": ...}),
    "mellum": (
        "Mellum",
        {**_QWEN, "sliding_window": 6, "layer_types": _LAYERS, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "rope_parameters": {"full_attention": _YARN, "sliding_attention": _SLIDING}},
    ),
    "minimax_m2": ("MiniMaxM2", {**_SPARSE, "num_local_experts": 6, "rope_parameters": _PART}),
    "ministral": ("Ministral", {"sliding_window": 6, "layer_types": _LAYERS}),
    "nemotron": ("Nemotron", {"norm_eps": 1e-3, "rope_parameters": _PART, "mlp_bias": True}),
    "seed_oss": ("SeedOss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "stablelm": (
        "StableLm",
        {**_WIDE, "layer_norm_eps": 1e-3, "rope_parameters": _PART, "use_qkv_bias": True, "use_parallel_residual": True},
    ),
    "stablelm-in-turn": ("StableLm", {**_WIDE, "layer_norm_eps": 1e-3, "rope_parameters": _PART}),
    "starcoder2-window": ("Starcoder2", {**_WIDE, "norm_epsilon": 1e-3, "sliding_window": 7}),
    "vaultgemma": ("VaultGemma", {**_GEMMA3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "bitnet": ("BitNet", {**_WIDE, "bos_token_id": 0, "eos_token_id": 0}),
    "deepseek2": ("DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek3": ("DeepseekV3", {**_DEEPSEEK, "q_lora_rank": 32, "attention_bias": True}),
    "minicpm3": (
        "MiniCPM3",
        {**_LATENT, "q_lora_rank": 32, "scale_emb": 3.0, "scale_depth": 2.4, "dim_model_base": 16, "pad_token_id": 0},
    ),
}  # fmt: skip
FAMILY = tuple(_KINDS)
SPARSE = tuple(kind for kind, (_, traits) in _KINDS.items() if {"num_experts_per_tok", "moe_topk"} & {*traits})
"""Mixtures of experts."""


def make_model(kind: str, **overrides: Any) -> Any:
    """A random model in float32 with weights large enough that attention is far from uniform."""
    torch.manual_seed(FAMILY.index(kind))
    name, traits = _KINDS[kind]
    settings = {**_COMMON, "tie_word_embeddings": "-tied" in kind, **traits, **overrides}
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    cls = getattr(transformers, f"{name}ForCausalLM", transformers.LlamaForCausalLM)
    model = cls(config(**{k: v for k, v in settings.items() if v is not ...}))
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 0.16)
            else:
                weight.normal_(0.0 if "bias" in part else 1.0, 0.2)
        for part, buffer in model.named_buffers():
            if part.endswith("bias"):  # a router's
                buffer.normal_(0.0, 0.2)
    return model.eval()


BUSHY = torch.tensor(
    [  # two rows of different shape, padding in the second
        [-1, 0, 0, 1, 1, 2, 4, 4, 0],
        [-1, 0, 1, 2, 0, 4, 2, -1, -1],
    ]
)


def path_tokens(tokens: Tensor, parent: Tensor, node: int) -> list[int]:
    """Tokens of one row from the root to node."""
    path = []
    while node >= 0:
        path.append(int(tokens[node]))
        node = int(parent[node])
    return path[::-1]


@torch.no_grad()
def oracle_logits(model: Any, prefix: list[int], tokens: Tensor, parent: Tensor) -> Tensor:
    """[N, V] of one row: the module's last logits on prefix + path, node by node; zeros on padding."""
    rows = []
    for node in range(len(parent)):
        if node and parent[node] < 0:
            rows.append(torch.zeros(model.config.vocab_size))
        else:
            ids = torch.tensor([prefix + path_tokens(tokens, parent, node)])
            rows.append(model(ids, use_cache=False).logits[0, -1].float())
    return torch.stack(rows)


def valid(parent: Tensor) -> Tensor:
    """[B, N] bool: real nodes."""
    mask = parent >= 0
    mask[:, 0] = True
    return mask


def chain(num_rows: int, num_nodes: int) -> Tensor:
    """[B, N] parents of chains."""
    return torch.arange(-1, num_nodes - 1).expand(num_rows, num_nodes)


def prefill(model: CausalModel, cache: KVCache, prompts: list[list[int]], chunk: int) -> Tensor:
    """Run the prompts in chunks, shorter rows padded with nodes behind their end; returns length [B]."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    length = torch.zeros_like(lengths)
    while bool((length < lengths).any()):
        count = (lengths - length).clamp(max=chunk)
        width = int(count.max())
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            part = prompt[int(length[row]) : int(length[row] + count[row])]
            tokens[row, : len(part)] = torch.tensor(part, dtype=torch.int64)
        model.forward(tokens, layout(chain(len(prompts), width), length, CAPACITY), cache, PassOptions(head=False))
        length = length + count
    return length


def run_tree(
    model: CausalModel, cache: KVCache, tokens: Tensor, parent: Tensor, length: Tensor, span: int = CAPACITY
) -> tuple[Output, Plan]:
    """One pass over a tree."""
    plan = layout(parent, length, CAPACITY, span=span)
    return model.forward(tokens, plan, cache), plan


def tokens_of(*shape: int, seed: int = 0) -> Tensor:
    """Random tokens."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts of these lengths."""
    return [tokens_of(length, seed=row + 1).tolist() for row, length in enumerate(lengths)]
