"""Tiny random models of the Llama family, and an oracle that knows nothing of trees: one plain pass per path."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from foretoken.core.tree import Plan, layout
from foretoken.model.cache import KVCache
from foretoken.model.target import CausalModel, Output

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

FAMILY = (
    "llama", "llama-tied", "llama-mha-bias", "llama-linear-rope", "llama-llama3-rope", "llama-yarn-rope",
    "mistral-window", "qwen2", "qwen2-tied-window", "qwen3", "qwen3-tied",
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
    elif kind.startswith("qwen2"):
        if "window" in kind:
            settings |= {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        # Qwen2's head dimension is hidden / heads; nothing sets it apart.
        settings = {key: value for key, value in settings.items() if key != "head_dim"} | {"hidden_size": 64}
        model = Qwen2ForCausalLM(Qwen2Config(**(settings | overrides)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**(settings | overrides)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.16)
            else:
                weight.normal_(0.0 if "bias" in name else 1.0, 0.2)
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
        model.forward(tokens, layout(chain(len(prompts), width), length, CAPACITY), cache, head=False)
        length = length + count
    return length


def run_tree(
    model: CausalModel, cache: KVCache, tokens: Tensor, parent: Tensor, length: Tensor, span: int = CAPACITY
) -> tuple[Output, Plan]:
    """One pass over a tree."""
    plan = layout(parent, length, CAPACITY, span=span)
    return model.forward(tokens, plan, cache), plan
