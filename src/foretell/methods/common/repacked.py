"""Blocks of a head whose weights change: matrices that are as they were keep theirs."""

from typing import TYPE_CHECKING

import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from foretell.kernels.dequantise import dequantise_into
from foretell.model.packed import Packed

if TYPE_CHECKING:
    from foretell.methods.common.head import Head

OUTPUT = "lm_head.weight"


def blocks_kept(head: "Head", made: "Head") -> dict[str, Packed]:
    """Of ``head.packed``, for a copy with other weights: those of equal matrices, and the output head's where it has other
    tokens' rows beside equal ones. Such rows are rounded to its kind, also in ``made``. What was learned has no blocks: a
    step is smaller than half of a distance between two numbers of four bits, so that rounding would undo it."""
    kept = {
        name: blocks
        for name, blocks in head.packed.items()
        if torch.equal(head.get_parameter(name), made.get_parameter(name))
    }
    blocks = head.packed.get(OUTPUT)
    if blocks is not None and OUTPUT not in kept and (joined := _joined(head, made, blocks)) is not None:
        kept[OUTPUT] = joined
    return kept


def _ids(head: "Head") -> list[int]:
    offsets = head.get_buffer("d2t").cpu()
    return (offsets + torch.arange(len(offsets))).tolist()


def _joined(head: "Head", made: "Head", blocks: Packed) -> Packed | None:
    old, new = head.get_parameter(OUTPUT), made.get_parameter(OUTPUT)
    place = {token: row for row, token in enumerate(_ids(head))}
    rows = [place.get(token, -1) for token in _ids(made)]
    at = torch.tensor(rows)
    known, further = (at >= 0).nonzero()[:, 0], (at < 0).nonzero()[:, 0]
    if not torch.equal(old[at[known]], new[known]):
        return None
    data = torch.empty_like(blocks.data)
    data[known] = blocks.data[at[known]]
    if len(further):
        try:
            rounded = quantize(new[further].float().cpu().numpy(), GGMLQuantizationType[blocks.kind])
        except NotImplementedError:  # the gguf library writes the simpler kinds alone
            return None
        data[further] = torch.from_numpy(rounded)
        values: Tensor = torch.empty(len(further), new.shape[1], dtype=new.dtype)
        dequantise_into(blocks.kind, rounded.reshape(-1), values)
        new.data[further] = values.to(new.device)
    return Packed(blocks.kind, blocks.shape, data)
