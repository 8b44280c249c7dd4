"""What the members of the Llama family have that Llama has not: one value a family, which ``run/lean.py``
and ``run/native.py`` read.

Llama's layer is x + attention(norm x), x + mlp(norm x). Gemma 2 and 3 norm what attention and MLP return too, OLMo 2 only
that, GLM-4 all four. Granite scales embeddings, scores, residuals and logits; Gemma scales embeddings and caps with tanh.
SmolLM3 rotates only some layers, Gemma 3 and OLMo 3 by two rotations, Phi-3 and GLM-4 rotate a part of each head,
GLM-4 in pairs of neighbours; Ministral 3's queries grow with their positions. Mixtures of experts: ``mixture.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.config_defaults import ARCHITECTURES, HYBRIDS
from foretell.model.llama import families, hybrids, latent as latents, mixture as mixtures
from foretell.model.llama.latent import Latent


@dataclass(frozen=True)
class Rope:
    """Rotation of one layer's queries and keys."""

    frequencies: tuple[float, ...]  # head_dim / 2 of them; 0 leaves a pair as it is
    scale: float = 1.0  # factor on cos and sin of the pairs that are rotated
    growth: tuple[float, int] | None = None  # (b, n): queries at position p are times 1 + b ln(1 + floor(p / n))

    @property
    def scales(self) -> tuple[float, ...]:
        """head_dim / 2 factors on cos and sin."""
        return tuple(self.scale if frequency else 1.0 for frequency in self.frequencies)


_SANDWICH = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_HYPERCLOVA_SANDWICH = ("post_norm1", "post_attention_layernorm", "post_norm2")
_GLM4_SANDWICH = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True)
class Traits:
    """Differences from Llama; the default is Llama."""

    # "gelu": its tanh form; "relu2": relu(x)^2 without a gate; "gated_relu2": relu(gate)^2 * up
    activation: str = "silu"
    has_gate: bool = True  # MLPs are down(activation(gate) * up), else down(activation(up))
    swiglu: tuple[float, float] | None = None  # (alpha, limit) of gpt-oss's activation: see ``clamped_swiglu``
    has_sinks: bool = False  # each head has a score beside those of keys, with no value
    norm_offset: float = 0.0  # added to the weights of norms
    is_layer_norm: bool = False  # norms of the stream subtract its mean
    norm_biases: bool = False  # ... and add a bias
    is_parallel: bool = False  # attention and MLP read one norm, and both are added
    norms_before: bool = True  # attention and MLP read normed streams
    norms_after: bool = False  # what they return is normed
    qk_norm: str = ""  # "heads": each head of queries and keys by itself; "all": all queries together, all keys
    norms_last: bool = False  # queries and keys are normed behind their rotation
    embedding_scale: float = 1.0
    score_scale: float | None = None  # None: 1 / sqrt(head_dim)
    score_cap: float | None = None  # scores s become cap * tanh(s / cap)
    residual_scale: float = 1.0  # on what attention and MLP return
    logit_scale: float = 1.0
    logit_cap: float | None = None
    is_fused: bool = False  # the checkpoint has qkv_proj, or gate_up_proj of MLPs
    rotated: int | None = None  # values of a head that are rotated, None: all
    is_gated: bool = False  # what attention mixed is multiplied by the sigmoid of a projection of its input
    attention_scale: float = 1.0  # on what attention returns
    gate_scale: float = 1.0  # on the MLP's gate
    mlp_scale: float = 1.0  # on what the MLP returns

    sub_norms: bool = False  # what attention mixed, and what the MLP's output matrix reads, is normed
    ternary: str = (
        ""  # "times", "over" or "online": how linears' weights are -1, 0, 1 with a scale (``read/ternary.py``)
    )
    interleaved: bool = False  # values (2i, 2i + 1) of a head are a pair, and not (i, i + half)
    latent: Latent | None = None  # keys and values are made of one vector, which is what is kept
    norm_names: tuple[str, str, str] = _SANDWICH  # after attention, before and after the MLP, where ``norms_after``
    renames: tuple[tuple[str, str], ...] = ()  # (text of the checkpoint's names, what ``shape.layer_names`` has for it)

    def finished(self, products: Tensor) -> Tensor:
        """Products of the output head as logits: scaled and capped."""
        logits = products if self.logit_scale == 1.0 else products * self.logit_scale
        return logits if self.logit_cap is None else capped(logits, self.logit_cap)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """What gpt-oss makes of gate and up: gate * sigmoid(alpha * gate) * (up + 1), gate at most limit and up within it."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] divided by its root mean square, times weight [n]; or its layer norm by weights and biases [2, n]."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape[1:], weight[0], weight[1], eps)


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


LLAMA = Traits()
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"}
_WITHOUT_O = ("glm4", "glm4_moe", "solar_open")  # whose attention_bias is of queries, keys and values
_MLP_BIASED = ("llama", "granite", "smollm3", "falcon_h1", "nemotron_h", "bamba", "minicpm3")  # where they say so
_WINDOWED = ("mistral", "ministral3", "phi3", "mixtral", "starcoder2")  # every layer has the window
_TWO_ROPES = ("gemma3_text", "olmo3", "mellum")  # by kind of layer
_WINDOWLESS = (
    "llama", "gemma", "granite", "olmo2", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe", "solar_open",
    *HYBRIDS,
)  # fmt: skip


def unsupported(config: Any) -> str | None:
    """Why this transformers configuration is not supported; None where it is."""
    kind = config.model_type
    architecture = ARCHITECTURES.get(kind)
    named = getattr(config, "architectures", None) or [architecture]
    if architecture is None or not {architecture, families.BUILT_BY.get(kind)} & {*named}:
        return f"architecture {named[0] or kind!r}; known: {', '.join(ARCHITECTURES.values())}"
    wanted = "silu" if families.TRAITS.get(kind, {}).get("has_gate", True) else "relu2"
    if activation_of(config) not in (wanted, "gelu_pytorch_tanh", *(("relu2",) if kind == "bitnet" else ())):
        return f"activation {activation_of(config)!r}; implemented: {wanted}, gelu_pytorch_tanh"
    method = _stored(config, "quant_method")
    if method == "bitnet" and kind in ("bitnet", "llama"):
        if _stored(config, "use_rms_norm"):
            return "norms of their own in front of linears (use_rms_norm of quantization_config)"
    elif getattr(config, "quantization_config", None) is not None and not (kind == "gpt_oss" and method == "mxfp4"):
        return "the checkpoint is quantised"
    if getattr(config, "use_bidirectional_attention", None):
        return "attention in both directions"
    for rope in _rope_entries(config):
        dynamic = ("dynamic",) if kind.startswith("hunyuan_v1") and rope.get("alpha") else ()
        if rope.get("rope_type", "default") not in (*ROPE_TYPES, *dynamic):
            return f"rope type {rope['rope_type']!r}; implemented: {', '.join(ROPE_TYPES)}"
        if (rope.get("partial_rotary_factor") or 1.0) != 1.0 and kind not in families.PARTLY_TURNED:
            return f"partial rope ({rope['partial_rotary_factor']})"
    if len(_rope_entries(config)) > 1 and kind not in _TWO_ROPES:
        return "rope parameters differ between layers"
    if head_dim(config) % 2:
        return f"odd head dimension {head_dim(config)}"
    if (_rotated(config) or 0) % 2:
        return f"{_rotated(config)} of {head_dim(config)} values of a head are rotated, an odd number"
    reason = hybrids.unsupported(config) if kind in HYBRIDS else families.refused(config)
    reason = latents.unsupported(config) if kind in latents.TYPES else reason
    return reason or mixtures.unsupported(config)


def _stored(config: Any, key: str) -> Any:
    """A value of its quantization_config, an object of JSON or transformers'; None where there is none."""
    stored = getattr(config, "quantization_config", None)
    return stored.get(key) if isinstance(stored, dict) else getattr(stored, key, None)


def _ternary(config: Any) -> str:
    if _stored(config, "quant_method") != "bitnet":
        return ""
    if _stored(config, "linear_class") != "autobitlinear":  # transformers' default is the other
        return "over"
    return "online" if _stored(config, "quantization_mode") == "online" else "times"


def traits_of(config: Any) -> Traits:
    """The traits of a supported configuration."""
    kind, activation = config.model_type, _ACTIVATIONS[activation_of(config)]
    if kind == "bitnet":
        activation = "gated_relu2" if activation == "relu2" else activation
        return Traits(activation=activation, sub_norms=True, ternary=_ternary(config))
    if "gemma" in kind:
        newer, after = kind != "gemma", kind not in ("gemma", "vaultgemma")
        scalar = getattr(config, "query_pre_attn_scalar", None)
        return Traits(
            activation=activation,
            norm_offset=1.0,
            norms_after=after,
            renames=families.VAULT if kind == "vaultgemma" else (),
            qk_norm="heads" if kind == "gemma3_text" else "",
            embedding_scale=config.hidden_size**0.5,
            score_scale=scalar**-0.5 if newer and scalar else None,
            score_cap=getattr(config, "attn_logit_softcapping", None) if kind in ("gemma2", "vaultgemma") else None,
            logit_cap=getattr(config, "final_logit_softcapping", None) if newer else None,
        )
    if kind.startswith("granite") or kind == "hyperclovax":
        is_granite, scaling = kind != "hyperclovax", float(config.logits_scaling)
        return Traits(
            activation=activation,
            embedding_scale=float(config.embedding_multiplier),
            score_scale=float(config.attention_multiplier),
            residual_scale=float(config.residual_multiplier),
            logit_scale=1.0 / scaling if is_granite else scaling,
            is_fused=kind == "granitemoehybrid",
            has_sinks=kind.endswith("_swa"),
            norms_after=not is_granite and config.use_post_norm,
            norm_names=_HYPERCLOVA_SANDWICH,
        )
    if kind in ("olmo2", "olmo3"):
        return Traits(activation=activation, norms_before=False, norms_after=True, qk_norm="all")
    if kind == "falcon_h1":  # the factor on attention's input is on queries, keys and values
        scale, inward = config.key_multiplier * head_dim(config) ** -0.5, config.attention_in_multiplier
        return Traits(
            activation=activation,
            embedding_scale=config.embedding_multiplier,
            score_scale=scale * inward**2,
            attention_scale=config.attention_out_multiplier * inward,
            gate_scale=config.mlp_multipliers[0],
            mlp_scale=config.mlp_multipliers[1],
            logit_scale=config.lm_head_multiplier,
        )
    if kind == "gpt_oss":
        return Traits(swiglu=(float(config.swiglu_alpha), float(config.swiglu_limit)), has_sinks=True)
    if kind == "glm4":
        return Traits(
            activation=activation,
            norms_after=True,
            norm_names=_GLM4_SANDWICH,
            is_fused=True,
            rotated=_rotated(config),
            interleaved=True,
        )
    latent = latents.latent_of(config)
    if latent is not None:
        rope, small = config.rope_parameters, kind == "minicpm3"
        stretched = rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim")
        scale = default_attention_factor(rope["factor"], rope["mscale_all_dim"]) ** 2 if stretched else 1.0
        return Traits(
            activation=activation,
            latent=latent,
            interleaved=kind == "deepseek_v2" or bool(getattr(config, "rope_interleave", False)),
            score_scale=(latent.nope + latent.rope) ** -0.5 * scale,
            embedding_scale=float(config.scale_emb) if small else 1.0,
            residual_scale=config.scale_depth / config.num_hidden_layers**0.5 if small else 1.0,
            logit_scale=1.0 / config.logits_scaling if small else 1.0,
        )
    is_qwen = kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    by_heads = (
        is_qwen
        or kind in ("qwen3", "qwen3_moe", "dots1", "lfm2", "lfm2_moe")
        or (kind == "glm4_moe" and config.use_qk_norm)
    )
    qk_norm = "heads" if by_heads else "all" if kind == "olmoe" else ""
    usual = Traits(
        activation=activation,
        norm_offset=1.0 if is_qwen else 0.0,
        qk_norm=qk_norm,
        is_parallel=bool(getattr(config, "use_parallel_residual", False)),
        logit_scale=getattr(config, "logit_scale", 1.0),
        is_fused=kind == "phi3",
        rotated=_rotated(config),
        is_gated=is_qwen,
        ternary=_ternary(config),
    )
    return replace(usual, **families.TRAITS.get(kind, {}))


def _rotated(config: Any) -> int | None:
    """Values of a head that are rotated; None: all."""
    if config.model_type not in families.PARTLY_TURNED:
        return None
    rotated = int(head_dim(config) * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    return rotated if rotated < head_dim(config) else None


def biases_of(config: Any) -> frozenset[str]:
    """Which linears have a bias, as transformers builds them: keys of ``shape.layer_names``."""
    kind = config.model_type
    if kind in families.BIASES:
        return frozenset(
            key for field, keys in families.BIASES[kind].items() if getattr(config, field, False) for key in keys
        )
    if kind == "qwen2" or (kind == "qwen2_moe" and config.qkv_bias):
        return frozenset(("q", "k", "v"))
    if kind in ("mistral", "ministral3", "mixtral", "phi3", "qwen2_moe"):
        return frozenset()
    # GLM-4 has none at the output, and transformers gives Nemotron-H's attention none at all.
    biased = kind != "nemotron_h" and getattr(config, "attention_bias", False)
    attention = ("q", "k", "v", *(("o", "gates") if kind not in _WITHOUT_O else ())) if biased else ()
    if biased and kind in latents.TYPES:
        attention = (*(("q",) if config.q_lora_rank else ()), "k", "o")
    has_biases = kind in _MLP_BIASED and config.mlp_bias
    mlp = ("gate", "up", "down") if has_biases else ()
    return frozenset((*attention, *mlp))


def ropes_of(config: Any) -> tuple[Rope, ...]:
    """The rotation of each layer, as transformers computes it."""
    num_layers: int = config.num_hidden_layers
    if config.model_type in _TWO_ROPES:
        by_kind = {kind: _rope(config, config.rope_parameters[kind]) for kind in set(config.layer_types)}
        return tuple(by_kind[kind] for kind in config.layer_types)
    still = Rope((0.0,) * (head_dim(config) // 2))
    if config.model_type == "nemotron_h" or getattr(config, "position_embedding_type", "rope") != "rope":
        return (still,) * num_layers
    if thetas := getattr(config, "layer_rope_theta", None):
        usual = config.rope_parameters
        return tuple(_rope(config, {**usual, "rope_theta": theta}) if theta else still for theta in thetas)
    rope = _rope(config, config.rope_parameters)
    rotating = config.no_rope_layers if config.model_type == "smollm3" else [True] * num_layers
    if config.model_type in families.SLIDING_TURNED and (config.sliding_window or config.model_type == "cohere2"):
        rotating = [config.sliding_window and kind == "sliding_attention" for kind in config.layer_types]
    return tuple(rope if rotates else still for rotates in rotating)


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Of each layer, how many last positions it sees, itself included; None is all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    num_layers: int = config.num_hidden_layers
    if window is None or config.model_type in _WINDOWLESS:
        return (None,) * num_layers
    if config.model_type in _WINDOWED or kinds is None:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def longrope_positions(config: Any, length: int) -> tuple[int, str]:
    """(positions that a model takes, of LongRoPE those before its switch, and why they are fewer than length), as
    ``hf/refusals.py`` explains."""
    switch = min(
        (rope.get("original_max_position_embeddings") or length
         for rope in _rope_entries(config) if rope.get("rope_type") == "longrope"), default=length,
    )  # fmt: skip
    if switch >= length:
        return length, ""
    why = (
        "a longer text has LongRoPE's other frequencies from its first token on, which would change keys that were read"
    )
    return switch, f"of the {length} that it states: {why}"


def rotation_order(dim: int, rotated: int, *, interleaved: bool = False) -> Tensor:
    """[dim] int64: the values of a head in an order in which partial rope is a whole one whose other frequencies are 0.

    Pairs (i, i + rotated / 2), or (2i, 2i + 1) where they are interleaved, become (i, i + dim / 2), as rotations of whole
    heads have them. Queries and keys are reordered alike, so that their products stay.
    """
    half, rest = rotated // 2, (dim - rotated) // 2
    first, second = (range(0, rotated, 2), range(1, rotated, 2)) if interleaved else (range(half), range(half, rotated))
    parts = (first, range(rotated, rotated + rest), second, range(rotated + rest, dim))
    return torch.tensor([index for part in parts for index in part])


def head_dim(config: Any) -> int:
    """Values of one head; of latent attention those that are rotated."""
    if config.model_type in latents.TYPES:
        return int(config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def activation_of(config: Any) -> str:
    """The name of the activation between gate and up."""
    keys = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    return str(next((getattr(config, key) for key in keys if getattr(config, key, None)), "silu"))


def _rope_entries(config: Any) -> list[dict[str, Any]]:
    """The rope parameters: one entry, or one of each kind of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_type" in value]
    return nested or [rope]


def _rope(config: Any, rope: dict[str, Any]) -> Rope:
    """The rotation by an entry of ``rope_parameters``."""
    dim = head_dim(config)
    if rope.get("rope_type") == "dynamic":  # Hunyuan's, by a fixed factor
        base = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        rope = {"rope_type": "default", "rope_theta": base}
    rotated = int(dim * (rope.get("partial_rotary_factor") or 1.0))
    if rope.get("rope_type", "default") == "default":
        exponent = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        frequencies, scale = 1.0 / (rope["rope_theta"] ** exponent), 1.0
    else:
        truncate = bool(config.rope_parameters.get("truncate", True))
        frequencies, scale = scaled_frequencies(rope, rotated, config.max_position_embeddings, truncate=truncate)
    still = [0.0] * (dim // 2 - len(frequencies))
    beta, growth = rope.get("llama_4_scaling_beta"), None
    if beta and config.model_type == "ministral3":
        growth = (float(beta), int(rope["original_max_position_embeddings"]))
    return Rope((*frequencies.tolist(), *still), float(scale), growth)


def scaled_frequencies(
    rope: dict[str, Any], rotated: int, max_positions: int, *, truncate: bool = True
) -> tuple[Tensor, float]:
    """[rotated / 2] float32 frequencies, and the factor on cos and sin. rope: an entry of ``rope_parameters`` of any of
    these types; rotated: values of a head; truncate: YaRN's bounds are whole dimensions."""
    kind, base, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor")
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if kind == "linear":
        return 1.0 / (base**exponent) / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        return _llama3(1.0 / (base**exponent), rope, original), 1.0
    factor = max_positions / original if factor is None else factor
    scale = rope.get("attention_factor")
    if kind == "longrope":
        if scale is None:
            scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * base**exponent), scale
    if scale is None:
        one, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = (
            default_attention_factor(factor, one) / default_attention_factor(factor, all_dim)
            if one and all_dim
            else default_attention_factor(factor)
        )
    bounds = [_dimension(rope.get(key) or usual, rotated, base, original) for key, usual in _TURNS]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if truncate else bounds
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rotated // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods = base**exponent
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, float(scale)


_TURNS = (("beta_fast", 32), ("beta_slow", 1))
"""YaRN: dimensions of more turns over the original context are kept, those of fewer are interpolated."""


def default_attention_factor(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cosines and sines: 0.1 * scale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _dimension(turns: float, rotated: int, base: float, original: int) -> float:
    """The dimension that makes so many turns over the original context."""
    return (rotated * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))


def _llama3(frequencies: Tensor, rope: dict[str, Any], original: int) -> Tensor:
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * math.pi / frequencies
    found = torch.where(lengths > original / low, frequencies / factor, frequencies)
    smooth = (original / lengths - low) / (high - low)
    between = ~(lengths < original / high) & ~(lengths > original / low)
    return torch.where(between, (1 - smooth) * found / factor + smooth * found, found)
