"""The weights of one layer of the lean decoder, read as its products want them: fused and packed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.weights import WeightSource
from foretell.model.cache import spread_of
from foretell.model.llama import shape as llama
from foretell.model.llama.mixture import bias_name, expert_names, read_biases, router_names
from foretell.model.llama.read.latent import latent_spread
from foretell.model.llama.run.pack import Activated, Experts, GatedMLP, Linear, make_linear
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import Traits, clamped_swiglu
from foretell.model.windows import DraftWindow


@dataclass(frozen=True)
class LatentParts:
    """What latent attention has beside a layer's matrices of the stream: see ``Latent``."""

    query: Linear | None  # query_rank -> heads * (nope + rope)
    query_norm: Tensor | None  # [query_rank]
    key_norm: Tensor  # [rank]
    keys: Tensor  # [heads, rank, nope]
    values: Tensor  # [heads, value, rank]


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; H is the width of the stream."""

    input_norm: Tensor | None  # [H]
    qkv: Linear  # H -> (heads + 2 kv heads) * head_dim; of latent attention what queries are made of, and key
    qk_norm: Tensor | None  # [heads + kv heads, head_dim]; of all heads together the same, flat
    out: Linear  # heads * head_dim -> H
    attention_after: Tensor | None  # [H]
    mlp_norm: Tensor | None  # [H]
    mlp: GatedMLP | Experts
    mlp_after: Tensor | None  # [H]
    rope: int  # which of the model's rotations
    window: int | None
    spread: Tensor | None = None  # [kv heads, head_dim] of keys that are rounded: see ``codes.spread_of``
    limit: DraftWindow | None = None  # of a draft
    sinks: Tensor | None = None  # [heads] float32: see ``Traits.has_sinks``
    mixed_norm: Tensor | None = None  # [heads * head_dim]: see ``Traits.sub_norms``
    latent: LatentParts | None = None


@dataclass(frozen=True)
class LayerReader:
    """Reads layers from a source of weights."""

    shape: LlamaShape
    source: WeightSource
    biases: Collection[str]  # see ``contents.Contents``
    dtype: torch.dtype
    device: torch.device
    packed: bool
    kv: str = "auto"

    def norm(self, name: str) -> Tensor:
        """The factors of a norm, of a layer norm [2, H] with its biases; in float32 where an offset would be rounded."""
        traits, dtype = self.shape.traits, self.dtype
        if traits.norm_offset or traits.is_layer_norm:
            dtype = dtype if dtype == torch.float64 else torch.float32
        weight = self.source.read(name, dtype, self.device)
        weight = weight + traits.norm_offset if traits.norm_offset else weight
        if not traits.is_layer_norm or "_norm." in name:  # of heads
            return weight
        bias = self.source.read(llama.bias_name(name), dtype, self.device) if traits.norm_biases else None
        return torch.stack((weight, torch.zeros_like(weight) if bias is None else bias))

    def layer(self, index: int) -> Layer:
        """One layer of the model."""
        shape, traits = self.shape, self.shape.traits
        names, ropes = llama.layer_names(index, traits), list(dict.fromkeys(shape.ropes))
        dtype, device = self.dtype, self.device

        def norm(key: str, wanted: bool) -> Tensor | None:
            return self.norm(names[key]) if wanted else None

        def linear(*keys: str) -> Linear:
            weight = _read_fused(self.source, [names[key] for key in keys], dtype, device)
            return make_linear(weight, self._bias(keys, names), packed=self.packed)

        qk_norm = None
        if traits.qk_norm:
            query, key = self.norm(names["q_norm"]), self.norm(names["k_norm"])
            if traits.qk_norm == "heads":
                query, key = query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)
            qk_norm = torch.cat((query, key))
        if shape.is_sparse(index):
            mlp: GatedMLP | Experts = self._experts(index)
        else:
            parts = ("gate", "up") if traits.has_gate else ("up",)
            activated = _activated(traits)
            if (inner := norm("inner_norm", traits.sub_norms)) is not None:
                activated = _normed(activated, inner, shape.norm_eps)
            mlp = GatedMLP(linear(*parts), linear("down"), activated, len(parts))
        has_second = traits.norms_before and not traits.is_parallel
        return Layer(
            norm("input_norm", traits.norms_before), linear(*("q", "k", "v")[: 2 if traits.latent else 3]), qk_norm,
            linear("o"),
            norm("attention_after", traits.norms_after), norm("mlp_norm", has_second), mlp,
            norm("mlp_after", traits.norms_after), ropes.index(shape.ropes[index]), shape.windows[index],
            self._spread(names), shape.limits(index),
            self.source.read(names["sinks"], torch.float32, device) if traits.has_sinks else None,
            norm("mixed_norm", traits.sub_norms),
            self._latent(names),
        )  # fmt: skip

    def _latent(self, names: Mapping[str, str]) -> LatentParts | None:
        latent, heads = self.shape.traits.latent, self.shape.num_heads
        if latent is None:
            return None
        keys, values = (self.source.read(names[key], self.dtype, self.device) for key in ("k_b", "v_b"))
        keys, values = keys.view(heads, latent.rank, -1), values.view(heads, latent.value, -1)
        query, query_norm = None, None
        if latent.query_rank:
            weight = self.source.read(names["q_b"], self.dtype, self.device)
            query, query_norm = make_linear(weight, None, packed=self.packed), self.norm(names["q_norm"])
        return LatentParts(query, query_norm, self.norm(names["k_norm"]), keys, values)

    def _spread(self, names: Mapping[str, str]) -> Tensor | None:
        latent = self.shape.traits.latent
        if self.kv == "int8" and latent is not None:
            return latent_spread(self.source, names, latent).to(self.device)[None]
        if self.kv != "int8" or "k" not in self.biases:
            return None
        bias = self.source.read(llama.bias_name(names["k"]), torch.float32, self.device)
        return spread_of(bias, self.shape.num_kv_heads)

    def _bias(self, keys: Sequence[str], names: Mapping[str, str]) -> Tensor | None:
        """Of linears below each other; zero for those that have none, None where no one has."""
        if not any(key in self.biases for key in keys):
            return None
        parts = []
        for key in keys:
            if key in self.biases:
                parts.append(self.source.read(llama.bias_name(names[key]), self.dtype, self.device))
            else:
                parts.append(torch.zeros(self.source.shape(names[key])[0], dtype=self.dtype, device=self.device))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _experts(self, index: int) -> Experts:
        mixture, dtype, device = self.shape.mixture, self.dtype, self.device
        assert mixture is not None

        biases: list[Tensor] = []
        if mixture.has_biases:
            biases = read_biases(self.source, index, self.shape.hidden_size, mixture, dtype)

        def expert(number: int | None) -> GatedMLP:
            names = expert_names(index, number, mixture)
            fused = _read_fused(self.source, [names["gate"], names["up"]], dtype, device)
            down = self.source.read(names["down"], dtype, device)
            of_both, of_down = (
                (torch.cat([part[number] for part in biases[1:3]]), biases[3][number]) if biases else (None, None)
            )
            gate_up = make_linear(fused, of_both, packed=self.packed)
            return GatedMLP(gate_up, make_linear(down, of_down, packed=self.packed), _activated(self.shape.traits))

        wide = torch.promote_types(dtype, torch.float32) if mixture.is_sigmoid else dtype
        router_name, *gate_name = router_names(index, mixture)
        router = self.source.read(router_name, wide, device)
        gate = self.source.read(gate_name[0], dtype, device) if gate_name else None
        bias = self.source.read(bias_name(index), torch.float32, device) if mixture.has_bias else None
        each = tuple(expert(number) for number in range(mixture.num_experts))
        shared = expert(None) if mixture.shared_inner else None
        return Experts(mixture, router, each, bias, shared, gate, biases[0] if biases else None)


def _activated(traits: Traits) -> Activated:
    if not traits.has_gate:
        if traits.activation == "relu2":
            return lambda up: F.relu(up).square()
        return lambda up: F.gelu(up, approximate="tanh")
    if (swiglu := traits.swiglu) is not None:
        return lambda gate, up: clamped_swiglu(gate, up, *swiglu)
    if traits.activation == "silu":
        return lambda gate, up: F.silu(gate).mul_(up)
    if traits.activation == "gated_relu2":
        return lambda gate, up: F.relu(gate).square_().mul_(up)
    return lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up)


def _normed(activated: Activated, weight: Tensor, eps: float) -> Activated:
    return lambda gate, up: F.rms_norm(activated(gate, up), weight.shape, weight, eps)


def _read_fused(source: WeightSource, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Several tensors below each other, each read into its place."""
    if len(names) == 1:
        return source.read(names[0], dtype, device)
    sizes = [source.shape(name)[0] for name in names]
    out = torch.empty(sum(sizes), *source.shape(names[0])[1:], dtype=dtype, device=device)
    for name, part in zip(names, torch.split(out, sizes), strict=True):
        source.read_into(name, part)
    return out
