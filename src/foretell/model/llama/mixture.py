"""Mixtures of experts: their sizes and their names, and checkpoints' several layouts under one set of names.

In place of a layer's MLP, a router chooses some experts (MLPs) for each token, whose outputs are added with weights, in
most models beside a shared expert that every token reads. What routers differ in is data (``Mixture``); DeepSeek-V3's
(arXiv 2412.19437, section 2.1.2), whose bias is of the choice alone, is GLM-4.5's, LFM2's and Nemotron-H's too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoints.weights import WeightSource, expect_shape
from foretell.kernels import structures
from foretell.model.llama.read.interleaved import InterleavedExperts
from foretell.model.llama.read.parts import Part, PartWeights

MAX_EXPERTS = 1024  # of a layer: MAX_EXPERTS of kernels/native/common.h
_DEEPSEEK = ("glm4_moe", "dots1", "solar_open", "deepseek_v3", "glm4_moe_lite", "exaone_moe", "hy_v3")
_SIGMOID = ("lfm2_moe", "nemotron_h", "minimax_m2", *_DEEPSEEK)
_FURTHER = ("deepseek_v2", "ernie4_5_moe", *_DEEPSEEK)  # n_shared_experts beside each other make one
_GATED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")  # their shared expert has a gate
_GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa")
_ONE_SIZE = (
    *_GRANITES,
    "mixtral",
    "olmoe",
    "gpt_oss",
    "minimax_m2",
    "flex_olmo",
    "hunyuan_v1_moe",
)  # of all their MLPs
TYPES = (*_ONE_SIZE, *_GATED, *_SIGMOID, "qwen3_moe", "mellum", "ernie4_5_moe", "deepseek_v2")
"""The types with experts that are covered."""
_METHODS = ("greedy", "group_limited_greedy")  # DeepSeek-V2's topk_method: groups are ranked by their best expert
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SCALE = ("routed_scaling_factor", "router_scaling_factor")
_FIRST = ("num_dense_layers", "first_k_dense_replace", "moe_layer_start_index")  # the first layer that may have experts
_STEP = ("decoder_sparse_step", "moe_layer_interval")
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")


@dataclass(frozen=True)
class Mixture:
    """Experts of the sparse layers of one model, and their router; the defaults are Qwen2-MoE's."""

    num_experts: int
    num_chosen: int  # experts that a token reads, without the shared one
    inner: int  # rows of an expert's up
    shared_inner: int  # of the shared one's; 0: there is none
    sums_over_chosen: bool  # weights of the chosen sum to 1; else weights of all do (of a sigmoid: none do)
    layers: frozenset[int]  # those that have experts
    is_sigmoid: bool = False  # scores are each logit's sigmoid; else the softmax of all
    has_bias: bool = False  # what is added to scores for the choice alone
    groups: tuple[int, int] = (1, 1)  # how many of one size experts stand in, and in how many of them one can be chosen
    group_best: int = 2  # of its experts that rank a group
    epsilon: float = 0.0  # added to the sum of the chosen's scores
    scale: float = 1.0  # on the weights of the chosen
    is_shared_gated: bool = True  # the shared one's weight is a sigmoid; else 1
    is_gated: bool = True  # experts are down(activation(gate) * up); else down(relu(up)^2)
    # Of router, gate, up and down: gpt-oss's, whose checkpoints are those of ``read/interleaved.py``.
    has_biases: bool = False

    @property
    def experts(self) -> list[int | None]:
        """All of a layer, as C has them; None: the shared one."""
        return [*range(self.num_experts), *([None] if self.shared_inner else [])]

    @property
    def parts(self) -> tuple[str, ...]:
        """Short names of an expert's matrices."""
        return ("gate", "up", "down") if self.is_gated else ("up", "down")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The last fields of ``structures.Model``."""
        shared = 1 if self.shared_inner else 0
        return self.num_experts + shared, self.num_chosen + shared, max(self.inner, self.shared_inner)

    def weights_of(self, hidden_size: int) -> int:
        """Weights that one token reads in one layer."""
        rows = self.num_experts + (1 if self.shared_inner and self.is_shared_gated else 0)  # of router and shared gate
        return hidden_size * (rows + len(self.parts) * (self.num_chosen * self.inner + self.shared_inner))


def unsupported(config: Any) -> str | None:
    """Why the experts of a configuration of TYPES are not supported; None where they are, or where there are none."""
    if getattr(config, "clip_qkv", None) is not None:
        return f"queries, keys and values are clipped (clip_qkv {config.clip_qkv})"
    counts = {key: getattr(config, key, 0) for key in (*_COUNTS, *_CHOSEN)}
    if (varied := next((key for key, count in counts.items() if isinstance(count, list)), None)) is not None:
        return f"layers with different numbers of experts ({varied})"
    found = mixture_of(config)
    if found is None:
        return None
    if getattr(config, "moe_norm_min", 0.0) > 1e-6:  # below it no sum of probabilities comes
        return f"moe_norm_min {config.moe_norm_min}; implemented: at most 1e-06"
    if found.num_experts > MAX_EXPERTS:
        return f"{found.num_experts} experts a layer; at most {MAX_EXPERTS}"
    if config.model_type == "deepseek_v2" and config.topk_method not in _METHODS:
        return f"experts are chosen by {config.topk_method!r}; implemented: {', '.join(_METHODS)}"
    groups, chosen = found.groups
    is_divided = 0 < chosen <= groups and found.num_experts % groups == 0
    if not is_divided or (groups > 1 and found.num_experts < found.group_best * groups):  # too few rank a group
        return f"{found.num_experts} experts in {groups} groups, of which {chosen} can be chosen from"
    if not 0 < found.num_chosen <= found.num_experts // groups * chosen:
        return f"a token reads {found.num_chosen} of {found.num_experts // groups * chosen} experts"
    return None


def mixture_of(config: Any) -> Mixture | None:
    """The experts in a transformers configuration; None where no layer has any."""
    kind = config.model_type
    if kind not in TYPES:
        return None
    num_experts, layers = _first(config, _COUNTS, 0), _layers(config)
    if not num_experts or not layers:
        return None
    inner = config.intermediate_size if kind in _ONE_SIZE else config.moe_intermediate_size
    num_shared = 1 if kind == "hunyuan_v1_moe" else _first(config, _NUM_SHARED, 0) if kind in _FURTHER else 0
    router: dict[str, Any] = {"has_bias": kind == "ernie4_5_moe"}
    if kind == "deepseek_v2":  # its norm_topk_prob is read by nothing
        limited = config.topk_method == "group_limited_greedy"
        router = {
            "groups": (config.n_group or 1, config.topk_group or 1) if limited else (1, 1),
            "group_best": 1,
            "scale": float(config.routed_scaling_factor),
        }
    if kind in _SIGMOID:
        router = {
            "is_sigmoid": True,
            "has_bias": bool(getattr(config, "use_expert_bias", True)),
            "groups": (_first(config, ("n_group",), 1), _first(config, ("topk_group",), 1)),
            "epsilon": {"lfm2_moe": 1e-6, "minimax_m2": 0.0}.get(kind, 1e-20),
            "scale": float(_first(config, _SCALE, 1.0)),
        }
    return Mixture(
        num_experts=num_experts,
        num_chosen=_first(config, _CHOSEN, 0),
        inner=inner,
        shared_inner=inner * num_shared or _first(config, _SHARED, 0),
        sums_over_chosen=kind != "deepseek_v2" and bool(getattr(config, "norm_topk_prob", True)),
        layers=layers,
        is_shared_gated=kind in _GATED,
        is_gated=kind != "nemotron_h",
        has_biases=kind == "gpt_oss",
        **router,
    )


def _first(config: Any, keys: Sequence[str], default: Any) -> Any:
    """The first of these fields that a configuration has."""
    return next((getattr(config, key) for key in keys if getattr(config, key, None) is not None), default)


def _layers(config: Any) -> frozenset[int]:
    """Those that have experts."""
    if config.model_type == "nemotron_h":
        return frozenset(layer for layer, kind in enumerate(config.layers_block_type) if kind == "moe")
    if kinds := getattr(config, "mlp_layer_types", None):
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    first, step = _first(config, _FIRST, 0), _first(config, _STEP, 1)
    dense = getattr(config, "mlp_only_layers", None) or ()
    layers = range(first, _first(config, ("moe_layer_end_index",), config.num_hidden_layers - 1) + 1)
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def expert_names(layer: int, expert: int | None, mixture: Mixture) -> dict[str, str]:
    """Short name -> name of an expert's weights; None: of the shared one."""
    part = "shared_expert" if expert is None else f"experts.{expert}"
    return {key: f"model.layers.{layer}.mlp.{part}.{key}_proj.weight" for key in mixture.parts}


def router_names(layer: int, mixture: Mixture) -> list[str]:
    """The router, and the shared expert's gate where there is one: never quantised."""
    prefix, has_gate = f"model.layers.{layer}.mlp", mixture.shared_inner and mixture.is_shared_gated
    return [f"{prefix}.gate.weight", *([f"{prefix}.shared_expert_gate.weight"] if has_gate else [])]


def bias_name(layer: int) -> str:
    """What is added to the router's scores for the choice, where it has such a bias."""
    return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"


def bias_sizes(layer: int, hidden_size: int, mixture: Mixture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the biases of router, gate and up (interleaved) and down, where a mixture ``has_biases``."""
    prefix, count = f"model.layers.{layer}.mlp", mixture.num_experts
    return {
        f"{prefix}.gate.bias": (count,),
        f"{prefix}.experts.gate_up_proj_bias": (count, 2 * mixture.inner),
        f"{prefix}.experts.down_proj_bias": (count, hidden_size),
    }


def read_biases(
    source: WeightSource, layer: int, hidden_size: int, mixture: Mixture, dtype: torch.dtype
) -> list[Tensor]:
    """The router's [experts], and gate's, up's and down's [experts, rows], contiguous."""
    device = torch.device("cpu")
    router, both, down = (source.read(name, dtype, device) for name in bias_sizes(layer, hidden_size, mixture))
    return [router, both[:, ::2].contiguous(), both[:, 1::2].contiguous(), down]


def view_of(
    mixture: Mixture,
    layer: int,
    held: Mapping[str, structures.Matrix],
    bias: int | None = None,
    biases: Sequence[Tensor] = (),
) -> structures.Experts:
    """The experts of a sparse layer as C sees them, of matrices by name, the address of the router's bias, and
    ``read_biases`` in float32, which must outlive it."""
    router, *gate = router_names(layer, mixture)
    each = (structures.Expert * len(mixture.experts))()
    for view, expert in zip(each, mixture.experts, strict=True):
        for key, name in expert_names(layer, expert, mixture).items():
            setattr(view, key, held[name])
        view.inner = mixture.shared_inner if expert is None else mixture.inner
        for key, rows in zip(mixture.parts, biases[1:], strict=False):
            setattr(view, f"{key}_bias", rows[expert].data_ptr())
    return structures.Experts(
        mixture.num_experts, mixture.num_chosen, bool(mixture.shared_inner), mixture.sums_over_chosen, mixture.is_sigmoid,
        *mixture.groups, mixture.group_best, mixture.epsilon, mixture.scale, bias,
        biases[0].data_ptr() if biases else None, held[router],
        held[gate[0]] if gate else structures.Matrix(), each,
    )  # fmt: skip


_RENAMED = (
    (re.compile(r"\.block_sparse_moe\.router(?:\.layer)?\."), ".mlp.gate."),  # Granite
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.shared_expert.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.shared_expert.down_proj."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),  # Mixtral
    (re.compile(r"(\.experts(?:\.\d+)?)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts(?:\.\d+)?)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts(?:\.\d+)?)\.w3\."), r"\1.up_proj."),
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp.shared_expert."),  # GLM-4.5
    (re.compile(r"\.mlp\.router\.gate\."), ".mlp.gate."),  # Hy3
    (re.compile(r"\.mlp\.router\."), ".mlp.gate."),  # gpt-oss
    (re.compile(r"\.mlp\.gate\.wg\."), ".mlp.gate."),  # Hunyuan
    (re.compile(r"\.mlp\.shared_mlp\."), ".mlp.shared_expert."),
    (re.compile(r"\.mlp\.(gate\.)?moe_statics\."), ".mlp.gate."),  # ERNIE
    (re.compile(r"\.mlp\.(e_score_correction_bias|expert_bias)$"), ".mlp.gate.e_score_correction_bias"),
)


class ExpertWeights(PartWeights):
    """Another source's tensors under the names of ``expert_names`` and ``router_names``, whatever their layout: each expert
    by itself, or all of a layer in one stack [experts, rows, columns], gate and up together or apart."""

    def __init__(self, source: WeightSource, mixture: Mixture, *, name: str = "the checkpoint") -> None:
        """Raises ShapeError, which names the model, for a stack of another number or size of experts."""
        places: dict[str, Part] = {}
        apart = source.apart
        if mixture.has_biases and not apart:
            source = InterleavedExperts(source, (mixture.num_experts, mixture.inner), name=name)
        joined = {
            f"{each.partition('.experts.')[0]}.experts.{key}_proj" for each in apart for key in ("gate_up", "down")
        }
        for theirs in (*(each for each in source.names if each not in joined), *apart):
            ours = theirs
            for pattern, new in _RENAMED:
                ours = pattern.sub(new, ours)
            prefix, found, part = ours.partition(".experts.")
            if ours.endswith(".shared_expert.gate_up_proj.weight"):
                inner = mixture.shared_inner
                expect_shape(source, theirs, (2 * inner, None), name)
                for key, rows in (("gate", (0, inner)), ("up", (inner, 2 * inner))):
                    places[ours.replace("gate_up", key)] = Part(theirs, rows)
                continue
            if not found or part[0].isdigit() or part.endswith("_bias"):
                places[ours] = Part(theirs)
                continue
            part = part.removesuffix(".weight").removesuffix("_proj")  # gate_up, gate, up or down
            stacked = part.split("_")
            num_rows = None if stacked == ["down"] else len(stacked) * mixture.inner
            expect_shape(source, theirs, (mixture.num_experts, num_rows, None), name)
            size = source.shape(theirs)[1] // len(stacked)
            for expert in range(mixture.num_experts):
                for at, key in enumerate(stacked):
                    start = (expert * len(stacked) + at) * size
                    places[f"{prefix}.experts.{expert}.{key}_proj.weight"] = Part(theirs, (start, start + size))
        super().__init__(source, places)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``. llama.cpp keeps the shared expert's gate as a vector, ERNIE the router's bias as a
        row."""
        shape = super().shape(name)
        if name.endswith("e_score_correction_bias"):
            return shape[-1:]
        return (1, *shape) if name.endswith("shared_expert_gate.weight") and len(shape) == 1 else shape


def route(logits: Tensor, mixture: Mixture, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts that rows [n, experts] of logits choose, int64 [n, k], and their weights, float32 [n, k]. bias: the
    router's [experts], where it has one.

    Largest first, of equal ones the lower number, as ``native/experts.h`` has it.
    """
    wide = logits.float()
    scores = wide.sigmoid() if mixture.is_sigmoid else torch.softmax(wide, -1)
    # Of logits without a bias softmax has the order, and would round.
    ranks = wide if bias is None and not mixture.is_sigmoid else scores
    ranks = ranks if bias is None else ranks + bias
    groups, num_left = mixture.groups
    if groups > 1:  # those of the groups whose best have the largest sums
        best = ranks.view(len(ranks), groups, -1).topk(mixture.group_best).values.sum(-1)
        left = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, num_left:]
        out = torch.zeros_like(best, dtype=torch.bool).scatter(-1, left, value=True)
        ranks = ranks.masked_fill(out.repeat_interleave(mixture.num_experts // groups, -1), float("-inf"))
    chosen = torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, : mixture.num_chosen]
    if mixture.sums_over_chosen and not mixture.is_sigmoid:
        return chosen, torch.softmax(wide.gather(-1, chosen), -1) * mixture.scale
    weights = scores.gather(-1, chosen)
    if mixture.sums_over_chosen:
        weights = weights / (weights.sum(-1, keepdim=True) + mixture.epsilon)
    return chosen, weights * mixture.scale
