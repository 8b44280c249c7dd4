"""Acceptance heads through the C kernels: a decode step asks one after each guess."""

import torch
from torch import Tensor

from foretell.heads.native import Memory
from foretell.heads.native_blocks import NativeBlocks
from foretell.kernels import heads
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.medusa.head import ResBlock
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel


def speed_up(head: AcceptanceHead, model: CausalModel) -> AcceptanceHead:
    """The head in eval mode, its products by the C kernels where model, which it decodes beside, is a native one."""
    plain = {parameter.dtype for parameter in head.parameters()} <= {torch.float32, torch.bfloat16}
    if (
        head.native is None
        and isinstance(model, NativeModel)
        and head.blocks
        and plain
        and heads.library()[0] is not None
    ):
        linears = [block.linear for block in head.blocks if isinstance(block, ResBlock)]
        blocks = NativeBlocks(Memory(head), [linears], [head.out], head.config.width)
        head.native = lambda x: _apply(blocks, x)
    return head.eval()


def _apply(blocks: NativeBlocks, x: Tensor) -> Tensor:
    """x [..., W] -> [..., 1]."""
    return blocks(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)
