"""Tiny random models with recurrent layers, of the families that transformers has."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import foretell.model.hf.recurrent.mixers as recurrent
from foretell.model.hf.adapter import TransformersModel
from foretell.model.recurrent import Saved
from tests.model.tiny import COMMON, EXPERTS, VOCAB, WINDOW

MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# name -> (configuration class, what differs from COMMON; "only" replaces COMMON altogether)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "mamba2": (
        "Mamba2Config",
        {"only": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 16,
                  "state_size": 8, "n_groups": 1, "chunk_size": 8, "initializer_range": 0.2, **IDS}},
    ),
    "mamba": (
        "MambaConfig",
        {"only": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8,
                  "initializer_range": 0.2, **IDS}},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"head_dim": 8, "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
         "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "moe_shared_expert_intermediate_size": 16, "moe_latent_size": None, "n_group": 1, "topk_group": 1},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}),
    "falcon_h1": ("FalconH1Config", {"head_dim": 8, "mamba_d_ssm": 64, **MAMBA2}),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
         "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False},
    ),
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "zamba2": (
        "Zamba2Config",
        {"mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8,
         "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": True,
         "adapter_rank": 4, "use_shared_attention_adapter": False},
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA2, "layer_types": ["mamba", "attention", "mamba", "attention"], "num_local_experts": 4,
         "num_experts_per_tok": 2, "shared_intermediate_size": 16, "logits_scaling": 4.0},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {"block_types": ["recurrent", "recurrent", "attention"], "lru_width": 32, "attention_window_size": WINDOW},
    ),
    "rwkv": (
        "RwkvConfig",
        {"only": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 128, **IDS}},
    ),
}  # fmt: skip
AGAIN = ("qwen3_5/again", "mamba2/again", "jamba/again")
"""Families as a mixer of unknown scan is run: its accepted inputs are read again."""
UNKNOWN = frozenset(("recurrent_gemma", "rwkv", *AGAIN))
"""Those whose inputs are read again."""
TOKENWISE = frozenset(("jamba/again", "recurrent_gemma"))
"""Of them, those whose scan or convolution in transformers begins at nothing wherever a pass has several tokens."""


def family_model(name: str) -> TransformersModel:
    """A random model of a family, or of ``AGAIN``."""
    if not name.endswith("/again"):
        return TransformersModel(family_module(name), name=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "rewind_of", lambda *_: None)
        return TransformersModel(family_module(name.removesuffix("/again")), name=name)


def family_module(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model of a family, the same at every call."""
    class_name, differs = FAMILIES[name]
    options = dict(differs["only"]) if "only" in differs else {**COMMON, **differs}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = getattr(transformers, class_name)(**{**options, **changes})
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return module.eval()


def assert_states(mine: Saved, slow: Saved) -> None:
    """States are those of a slow twin that read the text token by token, to a ten-thousandth of the largest number: sums of
    another order differ by 4e-5 of it after three mixers of delta rules, by 2e-6 in other families (float32)."""
    for states, expected in zip(mine.tensors, slow.tensors, strict=True):
        for key, state in states.items():
            wanted = expected[key].T if key[0] == "conv" else expected[key]
            torch.testing.assert_close(state, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
