"""Give the heads of a small target the cost of a large one's, for the inflated target of ``recipes.inflate``.

The inflated target computes what the small one computes in the first h of its H channels and zeros in the others, its real
layers spread among idle ones. A head is widened in the same way, by H/h in every direction: heads of attention, MLP,
channels. What it computes stays the same (float32: within 1e-4), and so do its guesses:

* A matrix keeps its weights at the real places of its rows and columns. Rows that would write into idle channels of the
  stream are zero; columns that read idle channels are random, for they multiply zeros; added attention heads and MLP
  channels have random inputs and zero output columns.
* A norm's weight is scaled by sqrt(h/H) and its epsilon by h/H.
* The output of layer i is the output of the large model's layer ``real_layers(...)[i]``, the last one's that of its last.
  Kangaroo's exit is placed in proportion, which an exit between two real layers may be: idle layers add nothing.

A judge reads the first h columns in any case, and an acceptance head reads a draft model, which is not inflated: for
both only the configuration changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from foretell.heads.head import Head
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.judge.head import JudgeWeights
from foretell.methods.kangaroo.head import KangarooHead
from foretell.methods.medusa.head import MedusaHead
from recipes.inflate import real_heads, real_layers


@dataclass(frozen=True)
class Axis:
    """One side of a matrix: which small index stands at which of the large one's places."""

    size: int  # places
    places: tuple[int, ...]
    indices: tuple[int, ...]
    silent: bool = False  # what lies in between is zero at all times

    @classmethod
    def first(cls, count: int, size: int, *, silent: bool = False) -> Axis:
        """The small ones first."""
        return cls(size, tuple(range(count)), tuple(range(count)), silent)

    @classmethod
    def blocks(cls, pairs: list[tuple[int, int]], width: int, size: int) -> Axis:
        """(place, index) of blocks of this width, size blocks in all."""
        inside = range(width)
        return cls(
            size * width,
            tuple(place * width + i for place, _ in pairs for i in inside),
            tuple(index * width + i for _, index in pairs for i in inside),
        )

    def then(self, other: Axis, count: int) -> Axis:
        """This one, and behind it another, whose small one begins at index count."""
        return Axis(
            self.size + other.size,
            self.places + tuple(self.size + place for place in other.places),
            self.indices + tuple(count + index for index in other.indices),
            self.silent and other.silent,
        )


# Names of parameters, by their ends, to their axes: rows, then columns.
_LAYER = {
    "self_attn.q_proj.weight": ("queries", "attended"),
    "self_attn.k_proj.weight": ("keys", "attended"),
    "self_attn.v_proj.weight": ("keys", "attended"),
    "self_attn.o_proj.weight": ("stream", "queries"),
    "mlp.gate_proj.weight": ("inner", "stream"),
    "mlp.up_proj.weight": ("inner", "stream"),
    "mlp.down_proj.weight": ("stream", "inner"),
}
_OTHER = {
    "fc.weight": ("stream", "fused"),
    "fc.bias": ("stream",),
    "linear.weight": ("stream", "stream"),  # Medusa's blocks
    "linear.bias": ("stream",),
    "lm_head.weight": ("draft", "stream"),
    "embed_tokens.weight": ("vocab", "stream"),
    "markov_w1.weight": ("vocab", "rank"),
    "markov_w2.weight": ("draft", "rank"),
    "confidence_head.proj.weight": ("one", "seen"),
}
_NORM = re.compile(r"(^|\.)(?!q_norm|k_norm)\w*norm(\.\d+)?\.weight$")


def axes_of(head: Head, big: Any) -> dict[str, Axis]:
    """The axes of a head's matrices; big is the configuration that ``widened`` made of the head's own."""
    small: Any = head.config
    stream = Axis.first(small.hidden_size, big.hidden_size, silent=True)
    axes = {
        "stream": stream,
        "attended": stream,
        "vocab": Axis.first(small.vocab_size, big.vocab_size),
        "one": Axis.first(1, 1),
    }
    if hasattr(small, "num_kv_heads"):
        places, stored = real_heads(small.num_heads, small.num_kv_heads, big.num_heads, big.num_kv_heads)
        axes["queries"] = Axis.blocks([(place, i) for i, place in enumerate(places)], small.head_dim, big.num_heads)
        axes["keys"] = Axis.blocks(
            [(place, i) for place, i in enumerate(stored) if i >= 0], small.head_dim, big.num_kv_heads
        )
    if hasattr(small, "intermediate_size"):
        axes["inner"] = Axis.first(small.intermediate_size, big.intermediate_size)
    axes["draft"] = axes["vocab"]
    if getattr(small, "draft_vocab_size", None) is not None:
        axes["draft"] = Axis.first(small.draft_vocab_size, big.draft_vocab_size)
    twice = stream.then(stream, small.hidden_size)
    if isinstance(head, Eagle1Head):
        axes["fused"] = twice
    if isinstance(head, Eagle3Head):
        axes["attended"] = twice
    if isinstance(head, Eagle3Head | DFlashHead):
        fused = stream
        for count in range(1, len(head.config.layer_ids)):
            fused = fused.then(stream, count * small.hidden_size)
        axes["fused"] = fused
    if isinstance(head, DFlashHead):
        rank = Axis.first(small.markov_rank, small.markov_rank, silent=True)  # nothing lies in between
        axes["rank"], axes["seen"] = rank, stream.then(rank, small.hidden_size)
    return axes


def widened(head: Head, small: PretrainedConfig, big: PretrainedConfig) -> Any:
    """The configuration of a head of proportional size, for the inflated target. Raises ValueError where it is none of
    this head's."""
    config: Any = head.config
    if config.vocab_size != small.vocab_size:
        raise ValueError(
            f"the head has a vocabulary of {config.vocab_size}, the small target one of {small.vocab_size}"
        )
    if isinstance(head, AcceptanceHead):
        if config.drafter != "draft_model":
            raise ValueError(f"an acceptance head on hidden states of {config.drafter!r} cannot be inflated")
        return dataclasses.replace(config, vocab_size=big.vocab_size)
    if config.hidden_size != small.hidden_size or big.hidden_size < small.hidden_size:
        raise ValueError(
            f"a head of hidden size {config.hidden_size}, a target of {small.hidden_size} and an inflated one of "
            f"{big.hidden_size} do not fit"
        )
    ratio = -(-big.hidden_size // small.hidden_size)
    place = real_layers(small.num_hidden_layers, big.num_hidden_layers)
    changes: dict[str, Any] = {"hidden_size": big.hidden_size, "vocab_size": big.vocab_size}
    if hasattr(config, "rms_norm_eps"):
        changes["rms_norm_eps"] = config.rms_norm_eps * small.hidden_size / big.hidden_size
    if hasattr(config, "num_kv_heads"):
        changes |= {"num_heads": config.num_heads * ratio, "num_kv_heads": config.num_kv_heads * ratio}
    if hasattr(config, "intermediate_size"):
        changes["intermediate_size"] = config.intermediate_size * ratio
    if isinstance(head, MedusaHead) and config.draft_vocab_size == config.vocab_size:
        changes["draft_vocab_size"] = big.vocab_size
    # Idle layers behind the last real one add nothing, and who reads the last layer must still do so.
    taps = [*place[:-1], big.num_hidden_layers - 1]
    for key in ("tap_layer", "layer"):
        if hasattr(config, key):
            changes[key] = taps[getattr(config, key)]
    if hasattr(config, "layer_ids"):
        changes["layer_ids"] = tuple(taps[layer] for layer in config.layer_ids)
    if isinstance(head, KangarooHead):
        # Between the real layer before the exit and the one after it.
        exit_layer, share = config.exit_layer, big.num_hidden_layers / small.num_hidden_layers
        changes["exit_layer"] = min(max(round(exit_layer * share), place[exit_layer - 1] + 1), place[exit_layer])
    return dataclasses.replace(config, **changes)


@torch.no_grad()
def inflate_head(head: Head, small: PretrainedConfig, big: PretrainedConfig, *, seed: int = 0) -> Head:
    """The head of the inflated target big (configurations of ``transformers``) that guesses as head does on small."""
    config = widened(head, small, big)
    kind: Any = type(head)
    large: Head = kind(config)
    axes = {} if isinstance(head, AcceptanceHead | JudgeWeights) else axes_of(head, config)
    generator = torch.Generator().manual_seed(seed)
    state, source = large.state_dict(), head.state_dict()  # views: writing here writes the head
    for name, weight in state.items():
        was = source[name].to(weight.dtype) if weight.dtype.is_floating_point else source[name]
        named = _axes_of_parameter(name, head)
        if named and axes:
            _fill(
                weight, was, [axes[axis] for axis in named], generator, embedding=name.endswith("embed_tokens.weight")
            )
        elif axes and _NORM.search(name):
            weight.copy_(1 + 0.02 * torch.randn(weight.shape, generator=generator))
            weight[: len(was)] = was * (len(was) / len(weight)) ** 0.5
        elif weight.shape == was.shape:
            weight.copy_(was)
        else:  # t2d: which tokens of the vocabulary the draft has: none of the added ones
            weight.zero_()[: len(was)] = was
    return large.to(head.dtype).eval()


def _axes_of_parameter(name: str, head: Head) -> tuple[str, ...]:
    """Names of the axes of one parameter; none for vectors that are copied, norms and buffers."""
    if isinstance(head, MedusaHead) and name.split(".")[1:] == [str(head.config.num_layers), "weight"]:
        return ("draft", "stream")
    for end, axes in {**_LAYER, **_OTHER}.items():
        if name == end or name.endswith("." + end):
            return axes
    return ()


def _fill(weight: Tensor, was: Tensor, axes: list[Axis], generator: torch.Generator, *, embedding: bool) -> None:
    """Random, zero where something would come of it, and the small weights in their places."""
    weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    rows, columns = axes[0], axes[-1]
    outside = torch.ones(len(weight), dtype=torch.bool)
    outside[list(rows.places)] = False
    if rows.silent:
        weight[outside] = 0.0
    if len(axes) == 1:
        weight[list(rows.places)] = was[list(rows.indices)]
        return
    beyond = torch.ones(weight.shape[1], dtype=torch.bool)
    beyond[list(columns.places)] = False
    # An embedding's columns are what it writes, all other matrices' what they read.
    if columns.silent == embedding:
        weight[:, beyond] = 0.0
    here = torch.tensor(rows.places)[:, None], torch.tensor(columns.places)
    weight[here] = was[list(rows.indices)][:, list(columns.indices)]


def main() -> None:
    """Command line: head directories of the small target in, directories of the same names for the inflated one out."""
    from foretell import bundled
    from foretell.heads import formats
    from foretell.model.load import load_model

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="directories of heads")
    parser.add_argument("--target", default="bundled", help='what they were trained on: "bundled" or a directory')
    parser.add_argument("--inflated", type=Path, required=True, help="what recipes.inflate wrote")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    source = bundled.path("target") if args.target == "bundled" else args.target
    small, big = AutoConfig.from_pretrained(source), AutoConfig.from_pretrained(args.inflated)
    spec = load_model(str(args.inflated), implementation="transformers").spec
    for path in args.heads:
        head = formats.load(path, num_layers=small.num_hidden_layers)
        large = inflate_head(head, small, big)
        large.check_target(spec, name=str(path))
        out = args.out / path.name
        formats.save(large, out, target=spec)
        print(
            json.dumps(
                {"method": head.method, "parameters": [head.num_parameters, large.num_parameters], "out": str(out)}
            )
        )


if __name__ == "__main__":
    main()
