"""Mixtures of experts: their sizes and their names, and checkpoints' several layouts under one set of names.

In place of a layer's MLP, a router's largest logits choose some experts (gated MLPs) for each token, whose outputs are
added with weights: Qwen3-MoE, Qwen2-MoE (beside a shared expert that every token reads), Mixtral, OLMoE and Granite-MoE.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretell.kernels import structures
from foretell.model.llama.weights import WeightSource, expect_shape
from foretell.model.packed import Packed

MAX_EXPERTS = 1024  # of a layer: MAX_EXPERTS of kernels/native/common.h
PARTS = ("gate", "up", "down")
_QWEN = ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
_BESIDE = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")  # a shared expert with a gate
TYPES = (*_QWEN, "mixtral", "olmoe", "granitemoe")
"""The types with experts that are covered."""


@dataclass(frozen=True)
class Mixture:
    """Experts of the sparse layers of one model."""

    num_experts: int
    num_chosen: int  # experts that a token reads, without the shared one
    inner: int  # rows of an expert's gate
    shared_inner: int  # of the shared one's; 0: there is none
    sums_over_chosen: bool  # weights of the chosen sum to 1; else weights of all do
    layers: frozenset[int]  # those that have experts

    @property
    def experts(self) -> list[int | None]:
        """All of a layer, as C has them; None: the shared one."""
        return [*range(self.num_experts), *([None] if self.shared_inner else [])]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The last fields of ``structures.Model``."""
        shared = 1 if self.shared_inner else 0
        return self.num_experts + shared, self.num_chosen + shared, max(self.inner, self.shared_inner)

    def weights_of(self, hidden_size: int) -> int:
        """Weights that one token reads in one layer."""
        rows = self.num_experts + (1 if self.shared_inner else 0)  # of the router and of the shared one's gate
        return hidden_size * (rows + 3 * (self.num_chosen * self.inner + self.shared_inner))


def unsupported(config: Any) -> str | None:
    """Why the experts of a configuration of TYPES are not supported; None where they are, or where there are none."""
    if getattr(config, "clip_qkv", None) is not None:
        return f"queries, keys and values are clipped (clip_qkv {config.clip_qkv})"
    found = mixture_of(config)
    if found is None:
        return None
    if found.num_experts > MAX_EXPERTS:
        return f"{found.num_experts} experts a layer; at most {MAX_EXPERTS}"
    if not 0 < found.num_chosen <= found.num_experts:
        return f"a token reads {found.num_chosen} of {found.num_experts} experts"
    return None


def mixture_of(config: Any) -> Mixture | None:
    """The experts in a transformers configuration; None where no layer has any."""
    kind = config.model_type
    if kind not in TYPES:
        return None
    is_qwen = kind in _QWEN
    layers = range(config.num_hidden_layers)
    if is_qwen and hasattr(config, "decoder_sparse_step"):
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        layers = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]  # type: ignore[assignment]
    num_experts = config.num_experts if kind == "olmoe" or is_qwen else config.num_local_experts
    if not num_experts or not layers:
        return None
    return Mixture(
        num_experts=num_experts,
        num_chosen=config.num_experts_per_tok,
        inner=config.moe_intermediate_size if is_qwen else config.intermediate_size,
        shared_inner=config.shared_expert_intermediate_size if kind in _BESIDE else 0,
        sums_over_chosen=bool(getattr(config, "norm_topk_prob", True)),
        layers=frozenset(layers),
    )


def expert_names(layer: int, expert: int | None) -> dict[str, str]:
    """Short name -> name of an expert's weights; None: of the shared one."""
    part = "shared_expert" if expert is None else f"experts.{expert}"
    return {key: f"model.layers.{layer}.mlp.{part}.{key}_proj.weight" for key in PARTS}


def router_names(layer: int, mixture: Mixture) -> list[str]:
    """The router, and the shared expert's gate where there is one: never quantised."""
    prefix = f"model.layers.{layer}.mlp"
    return [f"{prefix}.gate.weight", *([f"{prefix}.shared_expert_gate.weight"] if mixture.shared_inner else [])]


def view_of(mixture: Mixture, layer: int, held: Mapping[str, structures.Matrix]) -> structures.Experts:
    """The experts of a sparse layer as C sees them, of matrices by name."""
    router, *gate = router_names(layer, mixture)
    each = (structures.Expert * len(mixture.experts))()
    for view, expert in zip(each, mixture.experts, strict=True):
        for key, name in expert_names(layer, expert).items():
            setattr(view, key, held[name])
        view.inner = mixture.shared_inner if expert is None else mixture.inner
    return structures.Experts(
        mixture.num_experts, mixture.num_chosen, len(gate), mixture.sums_over_chosen, held[router],
        held[gate[0]] if gate else structures.Matrix(), each,
    )  # fmt: skip


class _Place(NamedTuple):
    theirs: str
    rows: tuple[int, int] | None  # of a stack of matrices below each other; None: the whole tensor


_RENAMED = (
    (re.compile(r"\.block_sparse_moe\.router(?:\.layer)?\."), ".mlp.gate."),  # Granite
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),  # Mixtral
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
)


class ExpertWeights(WeightSource):
    """Another source's tensors under the names of ``expert_names`` and ``router_names``, whatever their layout: each expert
    by itself, or all of a layer in one stack [experts, rows, columns], gate and up together or apart."""

    def __init__(self, source: WeightSource, mixture: Mixture, *, name: str = "the checkpoint") -> None:
        """Raises ShapeError, which names the model, for a stack of another number or size of experts."""
        self._source = source
        self._places: dict[str, _Place] = {}
        for theirs in source.names:
            ours = theirs
            for pattern, new in _RENAMED:
                ours = pattern.sub(new, ours)
            prefix, found, part = ours.partition(".experts.")
            if not found or part[0].isdigit():
                self._places[ours] = _Place(theirs, None)
                continue
            part = part.removesuffix(".weight").removesuffix("_proj")  # gate_up, gate, up or down
            stacked = part.split("_")
            rows = None if stacked == ["down"] else len(stacked) * mixture.inner
            expect_shape(source, theirs, (mixture.num_experts, rows, None), name)
            size = source.shape(theirs)[1] // len(stacked)
            for expert in range(mixture.num_experts):
                for at, key in enumerate(stacked):
                    start = (expert * len(stacked) + at) * size
                    self._places[f"{prefix}.experts.{expert}.{key}_proj.weight"] = _Place(theirs, (start, start + size))

    @property
    def names(self) -> Collection[str]:
        """See ``WeightSource.names``."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        theirs, rows = self._places[name]
        shape = self._source.shape(theirs)
        if rows is None:  # llama.cpp keeps the shared expert's gate as a vector
            return (1, *shape) if name.endswith("shared_expert_gate.weight") and len(shape) == 1 else shape
        return rows[1] - rows[0], shape[-1]

    def called(self, name: str) -> str:
        """See ``WeightSource.called``."""
        place = self._places.get(name)
        return name if place is None else self._source.called(place.theirs)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        theirs, rows = self._places[name]
        if rows is None:
            self._source.read_into(theirs, out.view(self._source.shape(theirs)))
        else:
            out.copy_(self._source.reader(theirs)(*rows))

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``."""
        theirs, rows = self._places[name]
        own = self._source.shared(theirs)
        return own if own is None or rows is None else own.flatten(0, -2)[rows[0] : rows[1]]

    def packed(self, name: str) -> Packed | None:
        """See ``WeightSource.packed``."""
        theirs, rows = self._places[name]
        packed = self._source.packed(theirs)
        if packed is None or rows is None:
            return packed
        return Packed(packed.kind, (rows[1] - rows[0], packed.shape[1]), packed.data[rows[0] : rows[1]])

    def release(self) -> None:
        """See ``WeightSource.release``."""
        self._source.release()

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``."""
        theirs, rows = self._places[name]
        read, begin = self._source.reader(theirs), 0 if rows is None else rows[0]
        return lambda start, stop: read(begin + start, begin + stop)


def route(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The experts that rows [n, experts] of logits choose, int64 [n, k], and their weights, float32 [n, k].

    Largest first, of equal ones the lower number, as ``experts.h`` has it.
    """
    wide = logits.float()
    chosen = torch.sort(wide, dim=-1, descending=True, stable=True).indices[:, : mixture.num_chosen]
    if mixture.sums_over_chosen:
        return chosen, torch.softmax(wide.gather(-1, chosen), -1)
    return chosen, torch.softmax(wide, -1).gather(-1, chosen)
