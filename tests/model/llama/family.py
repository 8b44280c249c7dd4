"""Tiny random models of the Llama family, and an oracle that knows nothing of trees: one plain pass per path."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from foretell.core.tree import Plan, layout
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel, Output, PassOptions

VOCABULARY, CAPACITY = 61, 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.3, 1.7, 2.5, 3.0, 4.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 8.0], "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

_SOFTMAX = ("qwen3moe", "qwen3moe-dense-between", "qwen2moe", "mixtral-window", "olmoe", "granitemoe")
_NEWER = ("glm4moe", "granitemoeshared")
SPARSE = (*_SOFTMAX, *_NEWER)
"""Mixtures of experts."""
FAMILY = (
    "llama", "llama-tied", "llama-mha-bias", "llama-linear-rope", "llama-llama3-rope", "llama-yarn-rope",
    "mistral-window", "qwen2", "qwen2-tied-window", "qwen3", "qwen3-tied",
    "phi3-window", "phi3-partial", "phi3-longrope",
    "gemma", "gemma2", "gemma3", "gemma3-linear-rope", "granite", "olmo2", "smollm3", "smollm3-window",
    *_SOFTMAX,
    "glm4", "olmo3", "ministral3",
    *_NEWER,
)  # fmt: skip


def make_model(kind: str, **overrides: Any) -> Any:
    """A random model in float32 with weights large enough that attention is far from uniform."""
    torch.manual_seed(FAMILY.index(kind))
    settings = _COMMON | {"tie_word_embeddings": "-tied" in kind}
    if kind.startswith("llama"):
        if "mha" in kind:
            settings |= {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
        if "linear" in kind:
            settings |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
        if "llama3" in kind:
            settings |= {"rope_parameters": _LLAMA3}
        if "yarn" in kind:
            settings |= {"rope_parameters": _YARN}
        model: Any = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
    elif kind.startswith("mistral"):
        model = MistralForCausalLM(MistralConfig(**(settings | {"sliding_window": 7} | overrides)))
    elif kind in SPARSE:
        model = _make_sparse(kind, settings, overrides)
    elif kind.startswith("qwen2"):
        if "window" in kind:
            settings |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        # Qwen2's head dimension is hidden / heads; nothing sets it apart.
        settings = {key: value for key, value in settings.items() if key != "head_dim"} | {"hidden_size": 64}
        model = Qwen2ForCausalLM(Qwen2Config(**(settings | overrides)))
    elif kind.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**(settings | overrides)))
    else:
        model = _make_other(kind, settings, overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 0.16)
            else:
                weight.normal_(0.0 if "bias" in name else 1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # a router's
                buffer.normal_(0.0, 0.2)
    return model.eval()


def _make_sparse(kind: str, settings: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Experts of sizes that no block of 16 or 32 divides."""
    settings |= {"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    if kind.startswith("qwen"):
        settings |= {"num_experts": 6, "moe_intermediate_size": 40, "norm_topk_prob": "dense" not in kind}
    if kind.startswith("qwen3"):
        settings |= {"mlp_only_layers": [1]} if "dense" in kind else {}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | overrides)))
    if kind.startswith("mixtral"):
        settings |= {"num_local_experts": 4, "sliding_window": 7}
        return MixtralForCausalLM(MixtralConfig(**(settings | overrides)))
    if kind == "glm4moe":
        partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        settings |= {
            "n_routed_experts": 8, "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
            "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
            "rope_parameters": partial,
        }  # fmt: skip
        return Glm4MoeForCausalLM(Glm4MoeConfig(**(settings | overrides)))
    # The head dimension of the others is hidden / heads; nothing sets it apart.
    settings = {key: value for key, value in settings.items() if key != "head_dim"} | {"hidden_size": 64}
    if kind.startswith("qwen2"):
        settings |= {"shared_expert_intermediate_size": 56, "norm_topk_prob": False, "decoder_sparse_step": 2}
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**(settings | overrides)))
    if kind == "olmoe":
        settings |= {"num_experts": 5, "num_experts_per_tok": 3}
        return OlmoeForCausalLM(OlmoeConfig(**(settings | overrides)))
    settings |= {
        "num_local_experts": 4, "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7,
        "logits_scaling": 5.0,
    }  # fmt: skip
    if kind == "granitemoeshared":
        settings |= {"shared_intermediate_size": 56}
        return GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**(settings | overrides)))
    return GraniteMoeForCausalLM(GraniteMoeConfig(**(settings | overrides)))


def _make_other(kind: str, settings: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """Types with traits of their own, every one of which differs from its neutral value."""
    name = kind.split("-")[0]
    classes = {
        "gemma": (GemmaConfig, GemmaForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
        "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
        "granite": (GraniteConfig, GraniteForCausalLM),
        "glm4": (Glm4Config, Glm4ForCausalLM),
        "ministral3": (Ministral3Config, Ministral3ForCausalLM),
        "olmo2": (Olmo2Config, Olmo2ForCausalLM),
        "olmo3": (Olmo3Config, Olmo3ForCausalLM),
        "phi3": (Phi3Config, Phi3ForCausalLM),
        "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    }
    if name in ("gemma2", "gemma3"):
        settings |= {
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "layer_types": _KINDS,
            "tie_word_embeddings": True,
        }
    if name == "gemma2":
        settings |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    if "linear" in kind:
        linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
        settings["rope_parameters"] = {
            "full_attention": linear,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    if name == "granite":
        settings |= {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 5.0,
        }
    if name == "glm4":
        partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        settings |= {"rope_parameters": partial, "attention_bias": True, "pad_token_id": 0}
    if name == "olmo3":
        ropes = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        settings |= {"sliding_window": 6, "layer_types": _KINDS, "rope_parameters": ropes}
    if name == "ministral3":  # queries grow every eight positions
        grows = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
        settings |= {"rope_parameters": {**_YARN, **grows, "original_max_position_embeddings": 8}}
    if name == "phi3":
        settings |= {"pad_token_id": 0, "hidden_size": 64}  # its head dimension is hidden / heads
        settings |= {"sliding_window": 7} if "window" in kind else {}
        partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        settings |= {"rope_parameters": partial} if "partial" in kind else {}
        settings |= {"rope_parameters": _LONG, "original_max_position_embeddings": 128} if "longrope" in kind else {}
    if name == "smollm3":
        settings |= {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}
        settings |= {"use_sliding_window": True, "sliding_window": 6} if "window" in kind else {}
    config, model = classes[name]
    return model(config(**(settings | overrides)))


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
