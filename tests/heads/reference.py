"""EAGLE-3 heads made of transformers' own modules, as the speculators library makes them: the oracle of heads that others
trained. Nothing here calls what it checks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from tests.model.tiny import VOCAB

H, DRAFT_VOCAB, LAYER_IDS = 32, 40, (0, 1, 3)
PARTS: dict[str, tuple[type[PreTrainedConfig], Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


@dataclass(frozen=True)
class Options:
    """What varies between heads. layer: keys of the decoder layers' configuration."""

    kind: str
    layer: dict[str, Any]
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class Reference(nn.Module):
    """State-dict names are those of the speculators library."""

    def __init__(self, options: Options, seed: int = 0) -> None:
        super().__init__()
        make, layer, norm, rotary = PARTS[options.kind]
        self.options = options
        self.layer_config = make(
            hidden_size=H, vocab_size=VOCAB, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            **{"max_position_embeddings": 64, **options.layer},
        )  # fmt: skip
        self.layer_config._attn_implementation = "eager"
        config, count = self.layer_config, len(LAYER_IDS)
        self.fc = nn.Linear(count * H, H, bias=False)
        self.layers = nn.ModuleList([layer(config, index) for index in range(config.num_hidden_layers)])
        first = self.layers[0]
        for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
            setattr(first.self_attn, name, nn.Linear(2 * H, heads * 8, bias=config.attention_bias))
        first.hidden_norm = norm(H, eps=config.rms_norm_eps)
        self.norm = norm(H, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(H, DRAFT_VOCAB, bias=False)
        if options.norm_before_fc:
            self.input_norm = norm(count * H, eps=config.rms_norm_eps)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList([norm(H, eps=config.rms_norm_eps) for _ in range(count)])
        self.rotary = rotary(config)
        self.types = getattr(config, "layer_types", None) or ["full_attention"] * len(self.layers)
        self.window: int = getattr(config, "sliding_window", None) or 0
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        self.register_buffer("d2t", ids - torch.arange(DRAFT_VOCAB))
        self.register_buffer("t2d", torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, value=True))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(".bias"):
                    parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
                elif parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * parameter.shape[1] ** -0.5)

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps [T, n * H] to features [T, H]."""
        if self.options.norm_before_fc:
            taps = self.input_norm(taps)
        if self.options.fc_norm:
            parts = taps.chunk(len(LAYER_IDS), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(taps)
        return fused

    def forward(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """A whole line of pairs, [T, H] each, to (what the next pair feeds on, logits [T, DV])."""
        length = len(embeds)
        positions = torch.arange(length)[None]
        angles = self.rotary(embeds[None], positions)
        hidden, first = features[None], self.layers[0]
        for index, (layer, kind) in enumerate(zip(self.layers, self.types, strict=True)):
            distance = positions[0][:, None] - positions[0][None, :]
            seen = (distance >= 0) & ((kind == "full_attention") | (distance < self.window))
            mask = torch.zeros(length, length).masked_fill(~seen, -torch.inf)[None, None]
            if index:
                hidden = layer(hidden, attention_mask=mask, position_embeddings=angles)
                continue
            normed = first.hidden_norm(hidden)
            residual = normed if self.options.norm_before_residual else hidden
            x = torch.cat([first.input_layernorm(embeds[None]), normed], -1)
            attended, _ = first.self_attn(hidden_states=x, attention_mask=mask, position_embeddings=angles)
            hidden = residual + attended
            hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return (normed if self.options.norm_output else hidden)[0], self.lm_head(normed)[0]

    def guess(self, embeds: Tensor, taps: Tensor) -> Tensor:
        """[VOCAB] logits at the end of a line: embeds [T, H] of its tokens from the second on, taps [n, ...] of the pairs
        that the target has read; the others feed on what the head put out, pair after pair, each from scratch."""
        features = self.fuse(taps)
        while len(features) < len(embeds):
            fed_on, _ = self(embeds[: len(features)], features)
            features = torch.cat([features, fed_on[-1:]])
        _, logits = self(embeds, features)
        ids = torch.arange(DRAFT_VOCAB) + self.get_buffer("d2t")
        return torch.full((VOCAB,), -torch.inf).index_copy(0, ids, logits[-1])

    def save(self, path: Path) -> None:
        """As the speculators library writes it."""
        flags = {
            name: getattr(self.options, name)
            for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
        }
        config = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
            "draft_vocab_size": DRAFT_VOCAB, **flags, "target_hidden_size": None, "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYER_IDS],
            "transformer_layer_config": self.layer_config.to_diff_dict(), "transformers_version": "5.0.0",
        }  # fmt: skip
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        save_file(self.state_dict(), path / "model.safetensors")
