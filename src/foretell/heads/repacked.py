"""A head whose weights change, and its blocks, so that a guess reads no more bytes than before."""

import copy
from collections.abc import Mapping
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from foretell.checkpoints.packed import Packed
from foretell.heads.draft_vocabulary import ReducedHead
from foretell.heads.head import AnyHead, Head
from foretell.kernels.dequantise import dequantise_into

OUTPUT = "lm_head.weight"


def with_weights(head: AnyHead, weights: Mapping[str, Tensor]) -> AnyHead:
    """A copy of a head, frozen, with other values of its parameters, in the head's dtype, and of the maps of its draft
    vocabulary, where they are given. Other buffers (calibration) are the head's own; see ``blocks_kept`` for ``packed``."""
    made = copy.deepcopy(head).eval().requires_grad_(requires_grad=False)
    for name, parameter in made.named_parameters():
        parameter.data = weights[name].to(parameter.device, parameter.dtype, copy=True)
    for name in weights.keys() & {"d2t", "t2d"}:
        made.get_buffer(name).copy_(weights[name])
    made.packed = MappingProxyType(blocks_kept(head, made))
    return made


def blocks_kept(head: Head, made: Head) -> dict[str, Packed]:
    """Of ``head.packed``, for a copy with other weights: those of equal matrices; the output head's where it has other
    tokens' rows beside equal ones; and Q4_0 of what was learned, rounded by chance (``by_chance``). Values of ``made``
    become those of its blocks. Other kinds have none: they run in 8 bits."""
    kept = {
        name: blocks
        for name, blocks in head.packed.items()
        if torch.equal(head.get_parameter(name), made.get_parameter(name))
    }
    blocks = head.packed.get(OUTPUT)
    if blocks is not None and OUTPUT not in kept and (joined := _joined(head, made, blocks)) is not None:
        kept[OUTPUT] = joined
    for name in head.packed.keys() - kept.keys():
        if head.packed[name].kind == "Q4_0":
            parameter = made.get_parameter(name)
            kept[name] = by_chance(parameter)
            parameter.data = values_of(kept[name], parameter.dtype).to(parameter.device)
    return kept


def by_chance(values: Tensor) -> Packed:
    """A matrix [R, C] in Q4_0, each value rounded up with the chance that keeps its mean.

    Values from four bits lie on their grid, and what is learned is a small part of a step of it: rounding to the nearest
    undoes that. The draws are a function of the shape alone."""
    rows, columns = values.shape
    blocks = values.detach().float().cpu().reshape(rows, columns // 32, 32)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    step = (largest / -8).half()
    chance = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0))
    places = (blocks / torch.where(step == 0, 1.0, step.float()) + 8 + chance).floor().clamp(0, 15).to(torch.uint8)
    halves = places[..., :16] | places[..., 16:] << 4
    data = torch.cat((step.view(torch.uint8), halves), -1).reshape(rows, -1)
    return Packed("Q4_0", (rows, columns), data)


def in_blocks(values: Tensor, kind: str) -> Packed:
    """A matrix [R, C] rounded to the nearest. Raises NotImplementedError for kinds that the gguf library does not write."""
    rounded = quantize(values.detach().float().cpu().numpy(), GGMLQuantizationType[kind])
    return Packed(kind, (len(values), values.shape[1]), torch.from_numpy(rounded))


def values_of(blocks: Packed, dtype: torch.dtype) -> Tensor:
    """What blocks hold, [R, C]."""
    out = torch.empty(blocks.shape, dtype=dtype)
    dequantise_into(blocks.kind, blocks.data.reshape(-1).numpy(), out)
    return out


def _joined(head: Head, made: Head, blocks: Packed) -> Packed | None:
    if not isinstance(head, ReducedHead) or not isinstance(made, ReducedHead):
        return None
    old, new = head.get_parameter(OUTPUT), made.get_parameter(OUTPUT)
    place = {token: row for row, token in enumerate(head.target_ids.tolist())}
    rows = [place.get(token, -1) for token in made.target_ids.tolist()]
    at = torch.tensor(rows)
    known, further = (at >= 0).nonzero()[:, 0], (at < 0).nonzero()[:, 0]
    if not torch.equal(old[at[known]], new[known]):
        return None
    data = torch.empty_like(blocks.data)
    data[known] = blocks.data[at[known]]
    if len(further):
        try:
            part = in_blocks(new[further], blocks.kind)
        except NotImplementedError:  # the gguf library writes the simpler kinds alone
            return None
        data[further] = part.data
        new.data[further] = values_of(part, new.dtype).to(new.device)
    return Packed(blocks.kind, blocks.shape, data)
