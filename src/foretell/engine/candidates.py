"""The target's most probable tokens after each node, for drafters that learn from them."""

import torch
from torch import Tensor

_BLOCK = 64
"""Tokens whose largest logit ranks them together: see ``candidates``."""


def candidates(logits: Tensor, count: int) -> Tensor | None:
    """[..., count] int64: the tokens of the largest logits [..., V], the largest first (``Drafter.num_candidates``); None
    for a count of 0.

    By logit, not by distribution: at temperature 0 and after filters a distribution has one token or few. Which of
    equal logits comes first is left open: they are guesses. On a CPU ``topk`` takes 0.1 ms a node at V = 32,768, which
    for small models is as much as their layers; so blocks are ranked by their maximum first: the best tokens lie in the
    best blocks.
    """
    if count == 0:
        return None
    num_blocks = logits.shape[-1] // _BLOCK
    if logits.device.type != "cpu" or num_blocks < 2 * count:
        return logits.topk(count).indices
    end = num_blocks * _BLOCK
    # [..., count] indices of blocks.
    blocks = logits[..., :end].reshape(*logits.shape[:-1], num_blocks, _BLOCK).amax(-1).topk(count).indices
    tokens = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2)  # [..., count * 64]
    rest = torch.arange(end, logits.shape[-1]).expand(*logits.shape[:-1], -1)
    tokens = torch.cat([tokens, rest], -1)
    return tokens.gather(-1, logits.gather(-1, tokens).topk(count).indices)
