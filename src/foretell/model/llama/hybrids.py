"""Hybrids: models of the Llama family some of whose layers have a recurrent mixer in place of attention, or beside it.

What transformers' configurations say of them: Qwen3-Next, Qwen3.5, LFM2, Nemotron-H and Granite 4 (dense and mixtures),
Falcon-H1 and Bamba. Their tensors: ``read/hybrid_weights.py``; their experts: ``mixture.py``.
"""

from typing import Any

from foretell.checkpoints.config_defaults import HYBRIDS
from foretell.model.llama import families
from foretell.model.llama.mixers import MAX_TAPS, Mixer


def mixers_of(config: Any) -> tuple[Mixer | None, ...]:
    """The mixer of each layer; None: it has none."""
    kind: str = config.model_type
    if kind in ("lfm2", "lfm2_moe"):
        conv = Mixer(
            "short_conv", config.hidden_size, config.conv_L_cache,
            in_bias=config.conv_bias, conv_bias=config.conv_bias, out_bias=config.conv_bias,
        )  # fmt: skip
        return tuple(conv if layer == "conv" else None for layer in config.layer_types)
    mixer = _delta_net(config) if kind.startswith("qwen3") else _state_space(config)
    if kind == "falcon_h1":
        return (mixer,) * int(config.num_hidden_layers)
    return tuple(mixer if layer in ("linear_attention", "mamba") else None for layer in layer_kinds(config))


def layer_kinds(config: Any) -> list[str]:
    """The kinds of a hybrid's layers, by transformers' names."""
    kinds = getattr(config, "layers_block_type", None)
    return list(config.layer_types if kinds is None else kinds)


def attending(config: Any) -> frozenset[int] | None:
    """The layers with attention; None: all."""
    if config.model_type not in HYBRIDS or config.model_type == "falcon_h1":
        return None
    return frozenset(
        layer for layer, kind in enumerate(layer_kinds(config)) if kind.removeprefix("full_") == "attention"
    )


def with_mlp(config: Any) -> frozenset[int] | None:
    """The layers with an MLP or experts; None: all."""
    if config.model_type != "nemotron_h":
        return None
    return frozenset(layer for layer, kind in enumerate(layer_kinds(config)) if kind in ("mlp", "moe"))


def intermediate_size(config: Any) -> int:
    """Values between an MLP's matrices."""
    if config.model_type == "granitemoehybrid":
        return int(config.shared_intermediate_size)
    size = int(getattr(config, "intermediate_size", None) or config.moe_intermediate_size)
    if config.model_type != "lfm2" or not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is not None:
        size = int(config.block_ffn_dim_multiplier * size)
        size = -(-size // config.block_multiple_of) * config.block_multiple_of
    return size


def norm_eps(config: Any) -> float:
    """What norms add to the mean of squares."""
    keys = _EPS[1:] if families.TRAITS.get(config.model_type, {}).get("is_layer_norm") else _EPS
    return float(next(getattr(config, key) for key in keys if getattr(config, key, None) is not None))


_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")


def _delta_net(config: Any) -> Mixer:
    return Mixer(
        "delta_net",
        config.hidden_size,
        config.linear_conv_kernel_dim,
        heads=config.linear_num_value_heads,
        groups=config.linear_num_key_heads,
        rows=config.linear_key_head_dim,
        columns=config.linear_value_head_dim,
        norm_size=config.linear_value_head_dim,
        norm_eps=config.rms_norm_eps,
    )


def _state_space(config: Any) -> Mixer:
    if config.model_type == "nemotron_h":
        heads, dim, groups = config.mamba_num_heads, config.mamba_head_dim, config.n_groups
        return Mixer(
            "state_space", config.hidden_size, config.conv_kernel, heads=heads, groups=groups,
            rows=config.ssm_state_size, columns=dim, norm_size=heads * dim // groups, gate_first=True,
            norm_eps=config.layer_norm_epsilon, step_limits=(config.time_step_min, float("inf")),
            in_bias=config.use_bias, conv_bias=config.use_conv_bias, out_bias=config.use_bias,
        )  # fmt: skip
    heads, dim, groups = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups
    falcon, inner = config.model_type == "falcon_h1", heads * dim
    scales: tuple[tuple[int, float], ...] = ()
    if falcon:
        sizes = (inner, inner, groups * config.mamba_d_state, groups * config.mamba_d_state, heads)
        factors = [config.ssm_in_multiplier * factor for factor in config.ssm_multipliers]
        scales = () if set(factors) == {1.0} else tuple(zip(sizes, factors, strict=True))
    normed = not falcon or config.mamba_rms_norm
    return Mixer(
        "state_space",
        config.hidden_size,
        config.mamba_d_conv,
        heads=heads,
        groups=groups,
        rows=config.mamba_d_state,
        columns=dim,
        norm_size=inner // groups if normed else 0,
        gate_first=not (falcon and config.mamba_norm_before_gate),
        norm_eps=config.rms_norm_eps,
        step_limits=(float(config.time_step_limit[0]), float(config.time_step_limit[1])),
        in_bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        out_bias=config.projectors_bias if falcon else config.mamba_proj_bias,
        in_scales=scales,
        out_scale=config.ssm_out_multiplier if falcon else 1.0,
    )


def unsupported(config: Any) -> str | None:
    """Why the mixers of a hybrid's configuration are not supported; None where they are."""
    kind: str = config.model_type
    if kind == "nemotron_h" and "moe" in layer_kinds(config):
        if config.moe_latent_size is not None:
            return f"experts between projections of their own (moe_latent_size {config.moe_latent_size})"
        if config.mlp_bias:
            return "experts beside a shared one with biases (mlp_bias)"
    if kind == "nemotron_h" and config.mlp_hidden_act != "relu2":
        return f"activation {config.mlp_hidden_act!r} of an MLP without a gate; implemented: relu2"
    acts = {getattr(config, "mamba_hidden_act", "silu"), getattr(config, "hidden_act", "silu")}
    if acts != {"silu"}:
        return f"activations {', '.join(sorted(acts))} of a mixer; implemented: silu"
    for mixer in filter(None, mixers_of(config)):
        if mixer.rows % 2:
            return f"states of {mixer.rows} rows; implemented: even numbers"
        if mixer.heads and mixer.heads % mixer.groups:
            return f"{mixer.heads} heads of a mixer in {mixer.groups} groups"
        if not 2 <= mixer.taps <= MAX_TAPS:
            return f"a convolution over {mixer.taps} inputs; implemented: 2 to {MAX_TAPS}"
    return None
