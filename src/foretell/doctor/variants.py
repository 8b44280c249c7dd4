"""A head as it would be if one thing about it had been stored or read wrongly: each variant undoes one such mistake.

A variant that accepts clearly more than the head as it is names the mistake: no correct head gets better by reading the
layer beside its own. Weights are shared with the head where nothing about them changes.
"""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ForetellError
from foretell.heads.head import Head
from foretell.heads.modules import Attention
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.kangaroo.head import KangarooHead
from foretell.methods.medusa.head import MedusaHead
from foretell.model.target import CausalModel, ModelSpec

FAULTS = {
    "layer_ids": "it reads the wrong layers of the target",
    "rope": "its rotary positions are not those it was trained with",
    "norm": "a norm stands at the wrong place",
    "dtype": "its numbers do not fit the dtype it runs in",
    "token_mapping": "its columns are mapped to the wrong tokens",
    "inputs": "its inputs are joined in the wrong order",
    "template": "the prompts have another chat template than the texts it was trained on",
    "other_target": "it was trained on another target",
    "untrained": "it is hardly trained",
}
"""The names of what a diagnosis finds, and what they say."""

THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Bases of the rotary frequencies in common use: Llama 2, Llama 3, Qwen."""


@dataclass(frozen=True)
class HeadVariant:
    """The head with one thing changed."""

    fault: str  # one of FAULTS
    change: str  # what was changed, as a remedy says it
    head: Head


class UnnormedEagle1(Eagle1Head):
    """An EAGLE-1 head that reads the last layer's output as it is, without the target's final norm."""

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """The tapped output itself."""
        return taps.to(self.dtype)


def variants(head: Head, spec: ModelSpec, *, rope_theta: float | None = None) -> Iterator[HeadVariant]:
    """All variants of a head of the built-in kinds. rope_theta: the target's own, where it is known."""
    yield from _layers(head, spec)
    yield from _rope(head, rope_theta)
    yield from _norms(head)
    yield from _tokens(head)
    yield from _inputs(head)
    if head.dtype in (torch.float16, torch.bfloat16):
        whole = copy.deepcopy(head)
        for parameter in whole.parameters():
            parameter.data = parameter.data.float()
        yield HeadVariant("dtype", f"run the head in float32, not {str(head.dtype).removeprefix('torch.')}", whole)


def changed(head: Head, **fields: Any) -> Head | None:
    """The head with other fields of its configuration and the same weights; None where they do not go together."""
    try:
        made = type(head)(dataclasses.replace(head.config, **fields))
        made.load_state_dict(head.state_dict(), assign=True)
    except (ForetellError, RuntimeError):
        return None
    return made.eval().requires_grad_(requires_grad=False)


def _of(fault: str, change: str, head: Head | None) -> Iterator[HeadVariant]:
    if head is not None:
        yield HeadVariant(fault, change, head)


def _layers(head: Head, spec: ModelSpec) -> Iterator[HeadVariant]:
    """The layers beside those it reads, and the same in reverse order."""
    for by in (1, -1):
        moved = tuple(layer + by for layer in head.taps)
        if min(moved) < 0 or max(moved) >= spec.num_layers:
            continue
        how = "later" if by > 0 else "earlier"
        for field in ("layer_ids", "tap_layer", "exit_layer"):
            if not hasattr(head.config, field):
                continue
            value: Any = moved if field == "layer_ids" else getattr(head.config, field) + by
            shown = list(value) if isinstance(value, tuple) else value
            text = f"{field} = {shown}: one layer {how}"
            yield from _of("layer_ids", text, changed(head, **{field: value}))
    if len(head.taps) > 1 and hasattr(head.config, "layer_ids"):
        yield from _of("layer_ids", "the same layers in reverse order", changed(head, layer_ids=head.taps[::-1]))


def _rope(head: Head, target: float | None) -> Iterator[HeadVariant]:
    """Other bases, no scaling, and the two orders in which a head's dimensions are paired."""
    config: Any = head.config
    if not hasattr(config, "rope_theta"):
        return
    for theta in dict.fromkeys((*([target] if target else []), *THETAS)):
        if theta != config.rope_theta:
            yield from _of("rope", f"rope_theta = {theta:g}", changed(head, rope_theta=theta))
    if getattr(config, "rope_scaling", None) is not None:
        yield from _of("rope", "no rope_scaling", changed(head, rope_scaling=None))
    for text, backwards in (("halves", False), ("pairs", True)):
        made = copy.deepcopy(head)
        for module in made.modules():
            if isinstance(module, Attention):
                size = module.shape.head_dim
                order = torch.arange(size).view(2, size // 2).t().reshape(-1)
                order = order.argsort() if backwards else order
                for linear in (module.q_proj, module.k_proj):
                    rows = torch.arange(linear.weight.shape[0]).view(-1, size)[:, order].reshape(-1)
                    linear.weight.data = linear.weight.data[rows]
                    if linear.bias is not None:
                        linear.bias.data = linear.bias.data[rows]
        yield HeadVariant("rope", f"rotary dimensions stored as {text}: reorder q_proj and k_proj", made)


def _norms(head: Head) -> Iterator[HeadVariant]:
    """Norms toggled, exchanged or left out."""
    for field in ("norm_before_residual", "norm_output"):
        if hasattr(head.config, field):
            value = not getattr(head.config, field)
            yield from _of("norm", f"{field} = {str(value).lower()}", changed(head, **{field: value}))
    if isinstance(head, Eagle3Head):
        made = copy.deepcopy(head)
        layer = made.midlayer
        layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm
        yield HeadVariant("norm", "exchange input_layernorm and hidden_norm of the first layer", made)
        made = copy.deepcopy(head)
        layer = made.midlayer
        layer.hidden_norm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.hidden_norm
        yield HeadVariant("norm", "exchange hidden_norm and post_attention_layernorm of the first layer", made)
    if isinstance(head, Eagle1Head) and not isinstance(head, UnnormedEagle1):
        bare = UnnormedEagle1(head.config)
        bare.load_state_dict(head.state_dict(), assign=True)
        text = "it was trained on the last layer's output before the target's final norm"
        yield HeadVariant("norm", text, bare.eval().requires_grad_(requires_grad=False))


def _tokens(head: Head) -> Iterator[HeadVariant]:
    """Draft vocabularies that are one off, or were stored as ids where offsets are read."""
    if isinstance(head, Eagle3Head | DFlashHead) and head.vocabulary is not None:
        index = torch.arange(len(head.d2t), device=head.d2t.device)
        given = {
            "d2t holds ids where offsets are read: subtract the index": head.d2t - index,
            "d2t one lower": head.d2t - 1,
            "d2t one higher": head.d2t + 1,
        }
        for text, offsets in given.items():
            ids = offsets + index
            if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size:
                continue
            made = copy.deepcopy(head)
            made.d2t.copy_(offsets)
            yield HeadVariant("token_mapping", text, made)
    if isinstance(head, MedusaHead) and head.token_map is not None:
        for by in (-1, 1):
            made_medusa = copy.deepcopy(head)
            assert made_medusa.token_map is not None
            made_medusa.token_map.add_(by).clamp_(0, head.config.vocab_size - 1)
            yield HeadVariant("token_mapping", f"token_map {'one higher' if by > 0 else 'one lower'}", made_medusa)


def _inputs(head: Head) -> Iterator[HeadVariant]:
    """The token's embedding and the feature, in the other order."""
    if isinstance(head, Eagle3Head):
        made = copy.deepcopy(head)
        attention = made.midlayer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight.data = torch.cat(linear.weight.data.chunk(2, 1)[::-1], 1)
        yield HeadVariant("inputs", "join the feature before the embedding", made)
    if isinstance(head, Eagle1Head):
        first = copy.deepcopy(head)
        first.fc.weight.data = torch.cat(first.fc.weight.data.chunk(2, 1)[::-1], 1)
        yield HeadVariant("inputs", "join the feature before the embedding", first)
    if isinstance(head, DFlashHead):
        for field in ("causal", "sample_from_anchor"):
            value = not getattr(head.config, field)
            yield from _of("inputs", f"{field} = {str(value).lower()}", changed(head, **{field: value}))


KINDS = (Eagle3Head, Eagle1Head, MedusaHead, DFlashHead, KangarooHead)
"""Heads that can be diagnosed."""
