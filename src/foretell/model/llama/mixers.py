"""Recurrent mixers of the native decoder: their sizes, the tensors that they read, and what they keep of a row.

Three kinds (``kernels/native/mixer.h``): gated delta nets (Qwen3-Next, Qwen3.5; 2412.06464), Mamba-2 ("state_space":
Nemotron-H, Granite 4, Falcon-H1, Bamba; 2405.21060) and short convolutions (LFM2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.checkpoints.weights import WeightSource
from foretell.kernels import structures
from foretell.model.recurrent import MixerLayout

KINDS = ("delta_net", "state_space", "short_conv")
CONV, STATE = ("conv", 0), ("recurrent", 0)
MAX_TAPS, WIDE = 8, 32  # as native/common.h has them
TERMS = "terms"


@dataclass(frozen=True)
class Mixer:
    """One mixer. States are [heads, rows, columns]; groups of heads share keys and queries [groups, rows]."""

    kind: str  # one of KINDS
    hidden_size: int
    taps: int  # inputs of the convolution
    heads: int = 0
    groups: int = 1
    rows: int = 0  # of a delta net the keys' size, of Mamba-2 the states'
    columns: int = 0  # size of a head of values
    norm_size: int = 0  # values that are normed together; 0: not normed
    gate_first: bool = False  # gated, then normed
    norm_eps: float = 0.0
    step_limits: tuple[float, float] = (0.0, float("inf"))  # of Mamba-2's dt
    in_bias: bool = False
    conv_bias: bool = False
    out_bias: bool = False
    in_scales: tuple[tuple[int, float], ...] = ()  # (columns, factor) of what is projected, one after the other
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Values that the output projection reads."""
        return self.heads * self.columns or self.hidden_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.groups * self.rows + self.inner if self.heads else self.hidden_size

    @property
    def inputs(self) -> dict[str, int]:
        """Projections of the input, by name, and the rows of each."""
        if self.kind == "delta_net":
            return {
                "in_proj_qkv": self.num_channels, "in_proj_z": self.inner, "in_proj_b": self.heads, "in_proj_a": self.heads,
            }  # fmt: skip
        if self.kind == "state_space":
            return {"in_proj": self.inner + self.num_channels + self.heads}
        return {"in_proj": 3 * self.hidden_size}

    @property
    def num_held(self) -> int:
        """Floats that are kept of a token until it is committed or rejected."""
        return self.num_channels + self.groups * self.rows + (self.heads * self.columns + self.heads)

    def matrix_names(self, layer: int) -> list[str]:
        """Names of its matrices."""
        return [name_of(layer, f"{key}.weight") for key in (*self.inputs, "out_proj")]

    def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of all its tensors."""
        for key, rows in self.inputs.items():
            yield name_of(layer, f"{key}.weight"), (rows, self.hidden_size)
            if self.in_bias:
                yield name_of(layer, f"{key}.bias"), (rows,)
        yield name_of(layer, "conv1d.weight"), (self.num_channels, 1, self.taps)
        if self.conv_bias:
            yield name_of(layer, "conv1d.bias"), (self.num_channels,)
        if self.heads:
            yield name_of(layer, "A_log"), (self.heads,)
            yield name_of(layer, "dt_bias"), (self.heads,)
        if self.kind == "state_space":
            yield name_of(layer, "D"), (self.heads,)
        if self.norm_size:
            yield name_of(layer, "norm.weight"), (self.columns if self.kind == "delta_net" else self.inner,)
        yield name_of(layer, "out_proj.weight"), (self.hidden_size, self.inner)
        if self.out_bias:
            yield name_of(layer, "out_proj.bias"), (self.hidden_size,)

    def layout(self, layer: int) -> MixerLayout:
        """What it keeps of a row, for ``states.NativeStates``."""
        shapes: dict[tuple[str, int], tuple[int, ...]] = {CONV: (self.taps - 1, self.num_channels)}
        if self.heads:
            shapes[STATE] = (self.heads, -(-self.columns // WIDE), self.rows, WIDE)
        return MixerLayout(
            layer=layer,
            shapes=shapes,
            dtypes=dict.fromkeys(shapes, torch.float32),
            held={TERMS: (self.num_held, torch.float32)},
            device=torch.device("cpu"),
        )


def name_of(layer: int, key: str) -> str:
    """The name of a mixer's tensor."""
    return f"model.layers.{layer}.mixer.{key}"


def view_of(
    mixer: Mixer, layer: int, source: WeightSource, held: Mapping[str, structures.Matrix], kept: list[Tensor]
) -> structures.Mixer:
    """A mixer as C sees it, of matrices by name; its vectors are appended to ``kept``, which must outlive it."""

    def vector(values: Tensor) -> int:
        kept.append(values.float().contiguous())
        return kept[-1].data_ptr()

    def read(key: str) -> Tensor:
        return source.read(name_of(layer, key), torch.float32, torch.device("cpu"))

    view, sizes = structures.Mixer(), mixer.inputs
    view.kind, view.parts, view.width = KINDS.index(mixer.kind) + 1, len(sizes), sum(sizes.values())
    for index, (key, rows) in enumerate(sizes.items()):
        getattr(view, "in")[index] = held[name_of(layer, f"{key}.weight")]
        view.sizes[index] = rows
    if mixer.in_bias:
        view.in_bias = vector(torch.cat([read(f"{key}.bias") for key in sizes]))
    if mixer.in_scales:
        view.in_scale = vector(torch.cat([torch.full((size,), factor) for size, factor in mixer.in_scales]))
    view.out, view.out_scale = (
        held[name_of(layer, "out_proj.weight")],
        0.0 if mixer.out_scale == 1.0 else mixer.out_scale,
    )
    if mixer.out_bias:
        view.out_bias = vector(read("out_proj.bias"))
    view.taps, view.channels, view.held = mixer.taps, mixer.num_channels, mixer.num_held
    view.conv = vector(read("conv1d.weight")[:, 0].T)
    if mixer.conv_bias:
        view.conv_bias = vector(read("conv1d.bias"))
    if not mixer.heads:
        return view
    view.heads, view.groups, view.rows, view.columns = mixer.heads, mixer.groups, mixer.rows, mixer.columns
    keys = mixer.groups * mixer.rows
    if mixer.kind == "delta_net":  # columns: q, k, v; z; b; a
        view.q_at, view.k_at, view.v_at = 0, keys, 2 * keys
        view.gate_at = mixer.num_channels
        view.beta_at, view.step_at = view.gate_at + mixer.inner, view.gate_at + mixer.inner + mixer.heads
    else:  # columns: z; x, B, C; dt
        view.conv_at, view.step_at = mixer.inner, mixer.inner + mixer.num_channels
        view.v_at, view.k_at, view.q_at = 0, mixer.inner, mixer.inner + keys
        view.skip = vector(read("D"))
        view.low, view.high = mixer.step_limits
    view.rate, view.shift = vector(-read("A_log").exp()), vector(read("dt_bias"))
    if mixer.norm_size:
        norm = read("norm.weight")
        view.norm = vector(norm.repeat(mixer.heads) if mixer.kind == "delta_net" else norm)
        view.norm_size, view.gate_first, view.eps = mixer.norm_size, mixer.gate_first, mixer.norm_eps
    return view


def sizes_of(mixers: Sequence[Mixer | None]) -> tuple[int, int, int, int]:
    """The greatest width, channels, output and rows of a state, as ``structures.Model`` has them."""
    each = [
        (sum(mixer.inputs.values()), mixer.num_channels, mixer.inner, mixer.rows)
        for mixer in mixers
        if mixer is not None
    ]
    width, channels, inner, rows = (max(sizes) for sizes in zip(*each, strict=True)) if each else (0, 0, 0, 0)
    return width, channels, inner, rows
