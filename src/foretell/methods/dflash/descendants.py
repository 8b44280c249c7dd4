"""The parts of a block drafter that descendants of DFlash add: DSpark's Markov head and confidence head (2607.05147),
DFlash2's convolutions and its choice among candidates."""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """A bigram of low rank: logits of a token given the one before it (DSpark, section 3; the "vanilla" kind)."""

    def __init__(self, vocab_size: int, rank: int, num_outputs: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a guess's acceptance, from its row and the Markov head's vector of the token before it."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class BlockConv(nn.Module):
    """DFlash2's convolution over the rows of a block, whose kernels depend on the row: one before a part of a layer (side
    0) and one after it (side 1). Taps reach back from a row to those before it, and end at the block's first."""

    def __init__(self, size: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.group = kernel, group
        self.base_kernel = nn.Parameter(torch.cat((torch.ones(2, 1, size), torch.zeros(2, kernel - 1, size)), 1))
        self.kernel_projection = nn.Linear(size, 2 * kernel * (size // group), bias=False)

    def kernels(self, rows: Tensor) -> Tensor:
        """rows [B, n, H] -> [B, n, 2, kernel, H] of both sides."""
        projected: Tensor = self.kernel_projection(rows)
        dynamic = projected.view(*rows.shape[:2], 2, self.kernel, -1)
        return self.base_kernel + dynamic.repeat_interleave(self.group, -1)

    def forward(self, rows: Tensor, kernels: Tensor, side: int, size: int) -> Tensor:
        """rows [B, n, H] of blocks of ``size`` rows each, mixed."""
        blocks = rows.view(len(rows), -1, size, rows.shape[-1])
        mixed = torch.zeros_like(blocks)
        for tap in range(min(self.kernel, size)):
            weight = kernels[:, :, side, tap].view_as(blocks)
            mixed = mixed + weight * nn.functional.pad(blocks[:, :, : size - tap], (0, 0, tap, 0))
        return mixed.flatten(1, 2)


class CandidateSelector(nn.Module):
    """DFlash2's choice among a row's best tokens by the token before: <predecessor * gate of the row, successor>."""

    def __init__(self, size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, logits: Tensor, normed: Tensor, before: Tensor, top_k: int) -> Tensor:
        """logits [..., V] of rows normed [..., H], after the tokens before [...] -> [..., V]: -inf but at the ``top_k``."""
        candidates, scores = self.scores(logits, normed, before, top_k)
        return torch.full_like(logits, -torch.inf).scatter_(-1, candidates, scores)

    def scores(self, logits: Tensor, normed: Tensor, before: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """(the ``top_k`` best tokens of each row [..., K], best first, and logits of the choice among them [..., K])."""
        best, candidates = logits.topk(top_k, -1)
        condition = self.predecessor_codebook[before] * self.hidden_projection(normed)
        edges = (self.successor_codebook[candidates] @ condition[..., None])[..., 0]
        return candidates, best + edges.to(best.dtype)


def start_without_effect(head: nn.Module) -> None:
    """Set zeros in these parts of a head, by which an untrained part changes no guess, and each has an even chance."""
    for module in head.modules():
        if isinstance(module, MarkovHead):
            nn.init.zeros_(module.markov_w2.weight)
        elif isinstance(module, ConfidenceHead):
            nn.init.zeros_(module.proj.weight)
            nn.init.zeros_(module.proj.bias)
        elif isinstance(module, BlockConv):
            nn.init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):
            nn.init.zeros_(module.successor_codebook)
