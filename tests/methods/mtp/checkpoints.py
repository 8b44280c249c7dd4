"""Tiny random checkpoints with MTP tensors under the names that their authors publish."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.methods.mtp.reference import FAMILIES
from tests.model.tiny import COMMON, tiny_config

COMMON_MTP: dict[str, Any] = {**COMMON, "num_hidden_layers": 3, "hidden_act": "silu"}
LAYERS = 3
PREFIX = {
    "deepseek_v3": f"model.layers.{LAYERS}.",
    "glm4_moe": f"model.layers.{LAYERS}.",
    "qwen3_next": "mtp.",
    "qwen3_5": "mtp.",
    "mimo": "model.mtp_layers.0.",
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip


def config_of(family: str) -> Any:
    """The text configuration of one of FAMILIES, whose attention and experts all have something to do."""
    if family == "deepseek_v3":
        return tiny_config(
            "deepseek_v3", num_hidden_layers=LAYERS, routed_scaling_factor=2.5, **{**EXPERTS, "n_routed_experts": 8}
        )
    if family == "glm4_moe":
        return transformers.Glm4MoeConfig(
            **COMMON_MTP, head_dim=16, use_qk_norm=True, attention_bias=True, first_k_dense_replace=1,
            routed_scaling_factor=1.5, n_shared_experts=1, **EXPERTS,
        )  # fmt: skip
    if family == "qwen3_next":
        return transformers.Qwen3NextConfig(
            **COMMON_MTP, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=24, norm_topk_prob=True, **LINEAR,
        )  # fmt: skip
    if family == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**COMMON_MTP, head_dim=16, **LINEAR)
    return transformers.Qwen2Config(**COMMON_MTP | {"num_attention_heads": 2, "num_key_value_heads": 1})


def block_of(family: str, config: Any) -> dict[str, Tensor]:
    """A random decoder layer, experts one by one."""
    generator = torch.Generator().manual_seed(3)
    one: Any = type(config)(**{**config.to_dict(), "num_hidden_layers": LAYERS})
    known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(one)]
    module = known[0](one) if isinstance(known, tuple) else known(one)
    layer = module.get_decoder().layers[-1]
    out: dict[str, Tensor] = {}
    for key, tensor in layer.state_dict().items():
        scale = 0.1 if key.endswith(("norm.weight", "bias")) else 0.25
        random = torch.randn(tensor.shape, generator=generator) * scale
        if key.endswith("norm.weight") and not family.startswith("qwen"):
            random = random + 1.0
        if key.endswith("experts.gate_up_proj"):
            for e, both in enumerate(random):
                for part, weight in zip(("gate", "up"), both.chunk(2), strict=True):
                    out[f"mlp.experts.{e}.{part}_proj.weight"] = weight.contiguous()
        elif key.endswith("experts.down_proj"):
            out |= {f"mlp.experts.{e}.down_proj.weight": weight.contiguous() for e, weight in enumerate(random)}
        else:
            out[key] = random
    return out


def own_of(family: str, hidden: int) -> dict[str, Tensor]:
    """Random norms and projection."""
    generator = torch.Generator().manual_seed(4)
    *norms, last = (name for name in FAMILIES[family][2] if name != FAMILIES[family][2][2])
    base = 0.0 if family.startswith("qwen") else 1.0
    out = {f"{name}.weight": base + 0.2 * torch.randn(hidden, generator=generator) for name in (*norms, last)}
    return {**out, f"{FAMILIES[family][2][2]}.weight": 0.25 * torch.randn(hidden, 2 * hidden, generator=generator)}


def save(path: Path, family: str, config: Any, *, more: dict[str, Tensor] | None = None) -> tuple[Any, Any]:
    """Write a checkpoint's directory; returns (own, block) tensors. more: others that lie beside them."""
    own, block = own_of(family, config.hidden_size), block_of(family, config)
    prefix = PREFIX[family]
    inner = "layers.0." if prefix == "mtp." else ""
    tensors = {prefix + key: tensor for key, tensor in own.items()}
    tensors |= {prefix + inner + key: tensor for key, tensor in block.items()}
    if family in ("deepseek_v3", "glm4_moe"):  # copies of the target's own
        copy = torch.zeros(config.vocab_size, config.hidden_size)
        tensors |= {f"{prefix}embed_tokens.weight": copy, f"{prefix}shared_head.head.weight": copy.clone()}
    path.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **(more or {})}, path / "model.safetensors", metadata={"format": "pt"})
    said = config.to_dict()
    if family == "mimo":
        said |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(said))
    return own, block
