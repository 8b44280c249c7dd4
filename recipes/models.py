"""Shapes of the bundled models, and saving them as ordinary Hugging Face directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCABULARY_SIZE = 8192
CONTEXT = 4096

# name: (hidden, layers, intermediate, heads, key-value heads); head dimension is 64 throughout.
SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "draft": (128, 2, 384, 2, 1),  # 1.4M parameters
    "7m": (256, 6, 768, 4, 2),  # 6.8M: the bundled target
    "30m": (512, 8, 1536, 8, 4),  # 30M
    "110m": (768, 14, 2304, 12, 6),  # 110M
}


def build(size: str, *, seed: int = 0) -> Qwen3ForCausalLM:
    """A fresh Qwen3-type model in float32: tied embeddings, normalised queries and keys."""
    hidden, layers, intermediate, heads, kv_heads = SIZES[size]
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=[2, 0],  # <|im_end|>, <|endoftext|>
        pad_token_id=3,
    )
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        # Residual branches start at zero, so that a fresh model is its embedding and depth is switched on by training.
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    return model


def save(model: Qwen3ForCausalLM, tokenizer_files: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model and tokenizer to `out`, replacing what is there in one rename; the README there is kept."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    copy = Qwen3ForCausalLM(model.config).to(dtype)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = dtype
    copy.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=3)
    copy.save_pretrained(new)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_files / file, new / file)
    (new / "model.safetensors").chmod(0o644)  # the writer makes it private
    if (out / "README.md").exists():
        shutil.copy(out / "README.md", new / "README.md")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)
