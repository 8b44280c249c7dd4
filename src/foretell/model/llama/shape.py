"""Common parts of the Llama family: dimensions, names of weights, rope tables. ``run/lean.py`` and
``run/native.py`` read them.

Covered: the types of ``types.ARCHITECTURES`` with rope types default, linear, llama3, yarn and (up to its switch)
longrope. Not covered, and refused with the reason: rope that depends on the length (dynamic), quantised checkpoints, other
activations than silu and gelu, other mixtures of experts than those of ``mixture.TYPES``.
"""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints import ends
from foretell.checkpoints.config_defaults import ARCHITECTURES, HYBRIDS
from foretell.checkpoints.source import is_file, read_config, read_generation, read_plain
from foretell.core.errors import ConfigError, ModelError
from foretell.model.llama import hybrids, traits as families
from foretell.model.llama.mixers import Mixer
from foretell.model.llama.mixture import Mixture, mixture_of
from foretell.model.llama.traits import LLAMA, Rope, Traits
from foretell.model.target import ModelSpec
from foretell.model.windows import UNBOUNDED, DraftWindow


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
    tied: bool
    windows: tuple[int | None, ...]  # per layer: how many last positions it sees, itself included; None is all
    max_positions: int
    cut: str  # as ``ModelSpec.cut``
    ropes: tuple[Rope, ...]  # of each layer
    eos_token_ids: tuple[int, ...]
    traits: Traits = LLAMA
    mixture: Mixture | None = None  # experts of some layers, or of all
    biases: frozenset[str] | None = None  # keys of ``layer_names``: linears that have one; None: as the first layer's
    hybrid: str = ""  # the type of one whose layers differ in kind, a key of ``types.HYBRIDS``; "": they do not
    mixers: tuple[Mixer | None, ...] = ()  # of each layer of a hybrid
    attending: frozenset[int] | None = None  # layers with attention; None: all
    with_mlp: frozenset[int] | None = None  # layers with an MLP or experts; None: all
    limit: DraftWindow | None = None  # what layers see less than their own windows by, as a draft's

    def limited(self, limit: DraftWindow, *, name: str) -> "LlamaShape":
        """The same as a draft that reads so much of a text alone. Raises ConfigError where it cannot be."""
        if self.traits.norms_last or any(rope.growth is not None for rope in self.ropes):
            what = "are normed behind their rotation" if self.traits.norms_last else "grow with their positions"
            raise ConfigError(
                f"draft_window = {limit.size}: queries of draft {name!r} {what}, for which there are no windows; drop it"
            )
        endless = limit.most <= self.max_positions
        most, cut = (UNBOUNDED, "") if endless else (self.max_positions, self.cut)
        return replace(self, limit=limit, max_positions=most, cut=cut)

    def limits(self, layer: int) -> DraftWindow | None:
        """``limit``, where the layer sees less by it."""
        return self.limit if self.limit is not None and self.limit.narrows(self.windows[layer]) else None

    def mixer(self, layer: int) -> Mixer | None:
        """The recurrent mixer of a layer."""
        return self.mixers[layer] if self.mixers else None

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return self.attending is None or layer in self.attending

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts."""
        return self.with_mlp is None or layer in self.with_mlp

    def linears(self, layer: int) -> tuple[str, ...]:
        """Keys of ``layer_names``: the matrices of a layer, without its experts' and its mixer's."""
        found: tuple[str, ...] = ()
        if self.attends(layer):
            found = ("q", "k", "v", "o", *(("gates",) if self.traits.is_gated else ()))
            if self.traits.latent is not None:
                found = tuple(self.traits.latent.sizes(self.hidden_size, self.num_heads))
        if self.has_mlp(layer) and not self.is_sparse(layer):
            found += ("gate", "up", "down") if self.traits.has_gate else ("up", "down")
        return found

    def norms(self, layer: int) -> tuple[str, ...]:
        """Keys of ``layer_names``: the norms of a layer."""
        has_branch, has_mlp = self.attends(layer) or self.mixer(layer) is not None, self.has_mlp(layer)
        before, after = self.traits.norms_before, self.traits.norms_after
        heads: tuple[str, ...] = ("q_norm", "k_norm") if self.traits.qk_norm and self.attends(layer) else ()
        if (latent := self.traits.latent) is not None:
            heads = ("q_norm", "k_norm") if latent.query_rank else ("k_norm",)
        within = ("mixed_norm", "inner_norm") if self.traits.sub_norms else ()
        first = ("input_norm",) if before and has_branch else ()
        second = ("mlp_norm",) if before and has_mlp and not self.traits.is_parallel else ()
        return (*heads, *within, *first, *second, *(("attention_after", "mlp_after") if after else ()))

    @property
    def value_dims(self) -> list[int] | None:
        """As ``KVCache`` takes it: of latent attention a value is a part of its key."""
        return None if self.traits.latent is None else [0] * self.num_layers

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of an MLP."""
        return self.mixture is not None and layer in self.mixture.layers

    def spec(
        self,
        name: str,
        implementation: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight_bytes: int | None = None,
        weights: str = "",
        kv: str = "auto",
    ) -> ModelSpec:
        """The engine's view of this model. weight_bytes counts linears and head: what every decode pass reads, of experts
        those of one token; by default in dtype."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_heads)
        if (latent := self.traits.latent) is not None:
            attention = sum(prod(size) for size in latent.sizes(self.hidden_size, self.num_heads).values())
        sparse = len(self.mixture.layers) if self.mixture else 0
        mlps = (self.num_layers - sparse) * 3 * self.hidden_size * self.intermediate_size
        mlps += sparse * self.mixture.weights_of(self.hidden_size) if self.mixture else 0
        num_weights = self.num_layers * attention + mlps + self.vocab_size * self.hidden_size
        return ModelSpec(
            name=name,
            architecture=self.architecture,
            implementation=implementation,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            max_positions=self.max_positions,
            cut=self.cut,
            dtype=dtype,
            device=device,
            weight_bytes=num_weights * dtype.itemsize if weight_bytes is None else weight_bytes,
            weights=weights,
            kv=kv,
            eos_token_ids=self.eos_token_ids,
        )


def unsupported(config: Any) -> str | None:
    """Why this transformers configuration is not supported; None where it is."""
    return families.unsupported(config)


def read_shape(config: Any, generation: Any = None) -> LlamaShape:
    """The dimensions in a transformers configuration; a generation configuration may name more end tokens.

    Raises ModelError with the reason where the model is not covered.
    """
    reason = unsupported(config)
    if reason is not None:
        raise ModelError(f"not of the Llama family: {reason}")
    is_hybrid, traits = config.model_type in HYBRIDS, families.traits_of(config)
    most, cut = families.longrope_positions(config, config.max_position_embeddings)
    return LlamaShape(
        architecture=ARCHITECTURES[config.model_type],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=hybrids.intermediate_size(config),
        num_heads=config.num_attention_heads,
        num_kv_heads=1 if traits.latent else config.num_key_value_heads or config.num_attention_heads,
        head_dim=traits.latent.key if traits.latent else families.head_dim(config),
        norm_eps=hybrids.norm_eps(config),
        tied=bool(config.tie_word_embeddings),
        windows=families.windows_of(config),
        max_positions=most,
        cut=cut,
        ropes=families.ropes_of(config),
        eos_token_ids=ends.of_configs(generation, config),
        traits=traits,
        mixture=mixture_of(config),
        biases=families.biases_of(config),
        hybrid=config.model_type if is_hybrid else "",
        mixers=hybrids.mixers_of(config) if is_hybrid else (),
        attending=hybrids.attending(config),
        with_mlp=hybrids.with_mlp(config),
    )


def read_local(path: Path, *, name: str) -> LlamaShape:
    """The shape of a local model: a directory, or a GGUF file."""
    found = read_plain(path, name=name) or (read_config(path, name=name), read_generation(path, name=name))
    shape = read_shape(*found)
    # Of biases a GGUF file's tensors are all that it says.
    return replace(shape, biases=None) if is_file(path) and not shape.hybrid else shape


def layer_names(layer: int, traits: Traits = LLAMA) -> dict[str, str]:
    """Short name -> name of the weight in checkpoints, of one layer. Biases: ``bias_name``."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    norms = {
        "input_norm": f"{prefix}.input_layernorm.weight",
        "mlp_norm": f"{prefix}.post_attention_layernorm.weight",
    }
    if traits.norms_after:  # the name that Llama uses in front of the MLP is in most of them what it says
        keys = ("attention_after", "mlp_norm", "mlp_after")
        norms |= {key: f"{prefix}.{name}.weight" for key, name in zip(keys, traits.norm_names, strict=True)}
    if (latent := traits.latent) is not None:
        query = "q_a_proj" if latent.query_rank else "q_proj"
        ours = {"q": query, "k": "kv_a_proj_with_mqa", "q_norm": "q_a_layernorm", "k_norm": "kv_a_layernorm"}
        ours |= {key: f"{key}_proj" for key in ("q_b", "k_b", "v_b")}
        norms |= {key: f"{attention}.{name}.weight" for key, name in ours.items()}
    return {
        "q": f"{attention}.q_proj.weight",
        "k": f"{attention}.k_proj.weight",
        "v": f"{attention}.v_proj.weight",
        "o": f"{attention}.o_proj.weight",
        "q_norm": f"{attention}.q_norm.weight",
        "k_norm": f"{attention}.k_norm.weight",
        "mixed_norm": f"{attention}.attn_sub_norm.weight",
        "inner_norm": f"{mlp}.ffn_sub_norm.weight",
        "sinks": f"{attention}.sinks",
        "gates": f"{attention}.gates_proj.weight",
        "gate": f"{mlp}.gate_proj.weight",
        "up": f"{mlp}.up_proj.weight",
        "down": f"{mlp}.down_proj.weight",
        **norms,
    }


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def bias_name(name: str) -> str:
    """The name of the bias that goes with a linear's weight."""
    return name.removesuffix("weight") + "bias"


def rope_table(
    rope: Rope, num_positions: int, device: torch.device, *, of_queries: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim / 2] float32 of positions 0, 1, ...; of_queries: with what those grow by."""
    positions = torch.arange(num_positions, device=device, dtype=torch.float32)
    angles = positions[:, None] * torch.tensor(rope.frequencies, device=device)
    scales = torch.tensor(rope.scales, device=device)
    if of_queries and rope.growth is not None:
        scales = scales * growth_of(positions, rope.growth)[:, None]
    return angles.cos() * scales, angles.sin() * scales


def growth_of(positions: Tensor, growth: tuple[float, int]) -> Tensor:
    """What queries at these positions are multiplied by, float32 of any shape (``Rope.growth``)."""
    beta, length = growth
    return 1 + beta * torch.log(1 + torch.floor(positions.float() / length))
