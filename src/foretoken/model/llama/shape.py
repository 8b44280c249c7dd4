"""Common parts of the Llama family: dimensions, names of weights, rope tables. Read by ``lean.py`` and ``native.py``.

Covered: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM with rope types default, linear,
llama3 and yarn. Not covered, and refused with the reason: rope that depends on the length (dynamic, longrope), partial
rope, quantised checkpoints, activations other than silu, mixtures of experts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, ModelError
from foretoken.model.source import read_config, read_generation
from foretoken.model.target import ModelSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of one model of the family, and what varies between its members."""

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]  # per layer: how many last positions it sees, itself included; None is all
    max_positions: int
    rope_frequencies: tuple[float, ...]  # head_dim / 2 of them
    rope_scale: float  # factor on cos and sin (yarn)
    eos_token_ids: tuple[int, ...]

    def spec(self, name: str, implementation: str, dtype: torch.dtype, device: torch.device) -> ModelSpec:
        """The engine's view of this model. weight_bytes counts linears and head: what every decode pass reads."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        weights = self.num_layers * layer + self.vocab_size * self.hidden_size
        return ModelSpec(
            name=name,
            architecture=self.architecture,
            implementation=implementation,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            max_positions=self.max_positions,
            dtype=dtype,
            device=device,
            weight_bytes=weights * dtype.itemsize,
            eos_token_ids=self.eos_token_ids,
        )


def unsupported(config: Any) -> str | None:
    """Why this transformers configuration is not supported; None where it is."""
    architecture = _ARCHITECTURES.get(config.model_type)
    named = getattr(config, "architectures", None) or [architecture]
    if architecture is None or architecture not in named:
        return f"architecture {named[0] or config.model_type!r}; known: {', '.join(_ARCHITECTURES.values())}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}; only 'silu' is implemented"
    if getattr(config, "quantization_config", None) is not None:
        return "the checkpoint is quantised"
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        return f"rope type {rope_type!r}; implemented: {', '.join(_ROPE_TYPES)}"
    if any(isinstance(value, dict) for value in rope.values()):
        return "rope parameters differ between layers"
    if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        return f"partial rope ({rope['partial_rotary_factor']})"
    if _head_dim(config) % 2:
        return f"odd head dimension {_head_dim(config)}"
    return None


def read_shape(config: Any, generation: Any = None) -> LlamaShape:
    """The dimensions in a transformers configuration; a generation configuration overrides its eos ids.

    Raises ModelError with the reason where the model is not covered.
    """
    reason = unsupported(config)
    if reason is not None:
        raise ModelError(f"not of the Llama family: {reason}")
    frequencies, scale = _rope(config)
    eos = getattr(generation, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    return LlamaShape(
        architecture=_ARCHITECTURES[config.model_type],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=_head_dim(config),
        norm_eps=config.rms_norm_eps,
        qk_norm=config.model_type == "qwen3",
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config),
        max_positions=config.max_position_embeddings,
        rope_frequencies=tuple(frequencies.tolist()),
        rope_scale=scale,
        eos_token_ids=_token_ids(eos),
    )


def read_local(path: Path, *, name: str) -> LlamaShape:
    """The shape of a local model: a directory, or a GGUF file."""
    return read_shape(read_config(path, name=name), read_generation(path, name=name))


def check_layers(
    num_layers: int, layers: tuple[int, int] | None, hidden: Tensor | None, taps: Sequence[int]
) -> tuple[int, int]:
    """The range of layers that a call asks for. Raises ConfigError where range, hidden and taps do not fit together."""
    first, stop = (0, num_layers) if layers is None else layers
    if not 0 <= first <= stop <= num_layers:
        raise ConfigError(f"layers {first, stop} are not a range of 0 to {num_layers}")
    if (hidden is None) != (first == 0):
        raise ConfigError(f"layers {first, stop}: hidden must be given iff the first layer is not 0")
    for tap in taps:
        if not first <= tap < stop:
            raise ConfigError(f"tap {tap} is not among the layers {first, stop} that run")
    return first, stop


def layer_names(layer: int) -> dict[str, str]:
    """Short name -> name of the weight in checkpoints, of one layer. Biases: ``bias_name``."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        "input_norm": f"{prefix}.input_layernorm.weight",
        "q": f"{attention}.q_proj.weight",
        "k": f"{attention}.k_proj.weight",
        "v": f"{attention}.v_proj.weight",
        "o": f"{attention}.o_proj.weight",
        "q_norm": f"{attention}.q_norm.weight",
        "k_norm": f"{attention}.k_norm.weight",
        "mlp_norm": f"{prefix}.post_attention_layernorm.weight",
        "gate": f"{mlp}.gate_proj.weight",
        "up": f"{mlp}.up_proj.weight",
        "down": f"{mlp}.down_proj.weight",
    }


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def bias_name(name: str, names: Collection[str]) -> str | None:
    """The name of the bias that goes with a linear's weight, None where the checkpoint has none."""
    bias = name.removesuffix("weight") + "bias"
    return bias if bias in names else None


def rope_table(shape: LlamaShape, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim / 2] float32 of positions 0, 1, ..."""
    positions = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = positions[:, None] * torch.tensor(shape.rope_frequencies, device=device)
    return angles.cos() * shape.rope_scale, angles.sin() * shape.rope_scale


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cos and sin, as transformers computes them."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        exponent = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    num_layers: int = config.num_hidden_layers
    if window is None or config.model_type == "llama":
        return (None,) * num_layers
    if config.model_type == "mistral":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
