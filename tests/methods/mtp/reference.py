"""MTP modules as the papers have them, in plain torch over whole texts: the reference of the heads read from checkpoints.

DeepSeek-V3 (2412.19437: MLA, routed experts with a correction bias, section 2.2 for the module), GLM-4.5 (2508.06471),
Qwen3-Next (gated attention, norms of weight 1 + w, a gated shared expert), MiMo (2505.07608; Qwen2's layer). Tensors by
their names in the checkpoints.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, *, eps: float, plus_one: bool = False) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + 1.0 if plus_one else weight)


def rotated(x: Tensor, theta: float, size: int, *, interleaved: bool = False) -> Tensor:
    """x [heads, T, d]: the first ``size`` numbers of each head turn with the position, in halves or in neighbours."""
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, size, 2) / size)  # [T, size / 2]
    turned, rest = x[..., :size], x[..., size:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
    return torch.cat([turned, rest], -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, heads * dv] of q [heads, T, d], k and v of as many heads or fewer; causal."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return (scores.masked_fill(mask, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def heads(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(-1, (-1, dim)).transpose(0, 1)


def mlp(t: Tensors, name: str, x: Tensor) -> Tensor:
    gate, up, down = (t[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(t: Tensors, x: Tensor, weights: Tensor) -> Tensor:
    """weights [T, E], zero where an expert is not chosen."""
    return sum(weights[:, e, None] * mlp(t, f"mlp.experts.{e}.", x) for e in range(weights.shape[1]))  # type: ignore[return-value]


def deepseek_experts(t: Tensors, c: Any, x: Tensor) -> Tensor:
    """Sigmoid scores; the correction bias chooses, and does not weigh; groups by the sum of their two best."""
    scores = (x @ t["mlp.gate.weight"].T).sigmoid()
    choice = scores + t["mlp.gate.e_score_correction_bias"]
    groups = choice.unflatten(1, (c.n_group, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
    allowed = torch.zeros(len(x), c.n_group).scatter(1, best, 1.0).bool()[:, :, None].expand_as(groups).flatten(1)
    chosen = choice.masked_fill(~allowed, -torch.inf).topk(c.num_experts_per_tok, -1).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    weights = weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor
    return experts(t, x, weights) + mlp(t, "mlp.shared_experts.", x)


def deepseek_attention(t: Tensors, c: Any, x: Tensor) -> Tensor:
    """Multi-head latent attention: keys and values from one low-rank latent, the rotary key shared by all heads."""
    nope, rope, theta = c.qk_nope_head_dim, c.qk_rope_head_dim, c.rope_parameters["rope_theta"]
    latent = rms(x @ t["self_attn.q_a_proj.weight"].T, t["self_attn.q_a_layernorm.weight"], eps=1e-6)
    q = heads(latent @ t["self_attn.q_b_proj.weight"].T, nope + rope)
    both = x @ t["self_attn.kv_a_proj_with_mqa.weight"].T
    low, key = both[:, : c.kv_lora_rank], both[None, :, c.kv_lora_rank :]
    low = rms(low, t["self_attn.kv_a_layernorm.weight"], eps=1e-6)
    kv = heads(low @ t["self_attn.kv_b_proj.weight"].T, nope + c.v_head_dim)
    key = rotated(key, theta, rope, interleaved=True).expand(q.shape[0], -1, -1)
    q = torch.cat([q[..., :nope], rotated(q[..., nope:], theta, rope, interleaved=True)], -1)
    mixed = attended(q, torch.cat([kv[..., :nope], key], -1), kv[..., nope:])
    return mixed @ t["self_attn.o_proj.weight"].T


def projected(t: Tensors, name: str, x: Tensor) -> Tensor:
    out = x @ t[f"self_attn.{name}_proj.weight"].T
    bias = t.get(f"self_attn.{name}_proj.bias")
    return out if bias is None else out + bias


def glm_attention(t: Tensors, c: Any, x: Tensor) -> Tensor:
    """Grouped queries, norms of queries and keys, half of each head turns."""
    dim, theta = c.head_dim, c.rope_parameters["rope_theta"]
    size = int(dim * c.rope_parameters["partial_rotary_factor"])
    q, k, v = (heads(projected(t, name, x), dim) for name in "qkv")
    if c.use_qk_norm:
        q = rms(q, t["self_attn.q_norm.weight"], eps=c.rms_norm_eps)
        k = rms(k, t["self_attn.k_norm.weight"], eps=c.rms_norm_eps)
    return attended(rotated(q, theta, size), rotated(k, theta, size), v) @ t["self_attn.o_proj.weight"].T


def qwen_attention(t: Tensors, c: Any, x: Tensor) -> Tensor:
    """Each head has a query and a gate for what it puts out; a quarter of it turns; norms of weight 1 + w."""
    dim, theta = c.head_dim, c.rope_parameters["rope_theta"]
    size = int(dim * c.rope_parameters["partial_rotary_factor"])
    q, gate = heads(projected(t, "q", x), 2 * dim).chunk(2, -1)
    k, v = (heads(projected(t, name, x), dim) for name in "kv")
    q = rms(q, t["self_attn.q_norm.weight"], eps=c.rms_norm_eps, plus_one=True)
    k = rms(k, t["self_attn.k_norm.weight"], eps=c.rms_norm_eps, plus_one=True)
    mixed = attended(rotated(q, theta, size), rotated(k, theta, size), v)
    return (mixed * gate.transpose(0, 1).flatten(1).sigmoid()) @ t["self_attn.o_proj.weight"].T


def qwen_experts(t: Tensors, c: Any, x: Tensor) -> Tensor:
    if "mlp.gate.weight" not in t:
        return mlp(t, "mlp.", x)
    scores = (x @ t["mlp.gate.weight"].T).softmax(-1)
    chosen = scores.topk(c.num_experts_per_tok, -1).indices
    weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    if getattr(c, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    shared = (x @ t["mlp.shared_expert_gate.weight"].T).sigmoid() * mlp(t, "mlp.shared_expert.", x)
    return experts(t, x, weights) + shared


def mimo_attention(t: Tensors, c: Any, x: Tensor) -> Tensor:
    dim, theta = c.hidden_size // c.num_attention_heads, c.rope_parameters["rope_theta"]
    q, k, v = (heads(projected(t, name, x), dim) for name in "qkv")
    return attended(rotated(q, theta, dim), rotated(k, theta, dim), v) @ t["self_attn.o_proj.weight"].T


FAMILIES: dict[str, Any] = {
    "deepseek_v3": (deepseek_attention, deepseek_experts, ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "glm4_moe": (glm_attention, deepseek_experts, ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen3_next": (qwen_attention, qwen_experts, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "qwen3_5": (qwen_attention, qwen_experts, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "mimo": (
        mimo_attention,
        lambda t, c, x: mlp(t, "mlp.", x),
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
}


def module(family: str, c: Any, own: Tensors, block: Tensors, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] twice: what the next guess feeds on and what the output head reads, of pairs (hidden state of position t,
    embedding of token t + 1), [T, H] each."""
    attention, second, (embedding_norm, hidden_norm, projection, last) = FAMILIES[family]
    norm = {"eps": c.rms_norm_eps, "plus_one": family.startswith("qwen")}
    pair = [rms(embeds, own[f"{embedding_norm}.weight"], **norm), rms(hidden, own[f"{hidden_norm}.weight"], **norm)]
    x = torch.cat(pair[::-1] if family == "mimo" else pair, -1) @ own[f"{projection}.weight"].T
    x = x + attention(block, c, rms(x, block["input_layernorm.weight"], **norm))
    x = x + second(block, c, rms(x, block["post_attention_layernorm.weight"], **norm))
    read = rms(x, own[f"{last}.weight"], **norm)
    return (x if last == "shared_head.norm" else read), read
