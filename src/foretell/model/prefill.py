"""Feeding known text: a prompt is a chain like any other tree, read in chunks, rows ragged."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.tree import chain_parent, chain_tree, layout
from foretell.model.target import Target

PREFILL_CHUNK = 512
"""Most tokens of a row that one pass reads: bounds the memory of a mask, and the delay of decode steps."""
READ_ALONE = 128
"""Tokens of a row from which on the last ones, where their logits are wanted, have a pass of their own."""


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least x."""
    return -(-x // multiple) * multiple


def real_nodes(counts: Sequence[int], width: int) -> Tensor | None:
    """``Plan.real`` of chains of counts[b] nodes, padded to width; None where there is too little padding to matter."""
    if sum(counts) > 0.9 * len(counts) * width:
        return None
    return torch.tensor([row * width + node for row, count in enumerate(counts) for node in range(count)])


def feed(
    target: Target,
    missing: Sequence[Sequence[int]],
    filled: Sequence[int],
    *,
    head: bool,
    span_multiple: int = 64,
    taps: Sequence[int] = (),
    on_chunk: Callable[[list[int], list[int], Tensor], None] | None = None,
) -> Tensor | None:
    """Compute KV of known tokens: missing[b] go to slots filled[b], filled[b] + 1, ... of row b.

    Returns the logits [B, 1, V] after each row's last token (None with head=False; undefined for a row that had nothing
    to feed). With taps, on_chunk is called for each chunk: positions of the rows' first tokens, how many each row has,
    and the outputs [B, n, T * H] of those layers. Chunks start at the same places whatever the batch, as long as the
    cache has a chunk of room.
    """
    longest = max(map(len, missing))
    if head and longest > READ_ALONE:  # last tokens together, so that none is committed for good: guesses follow it
        most = [max(0, len(tokens) - 1) for tokens in missing]
        rest = [tokens[:count] for tokens, count in zip(missing, most, strict=True)]
        feed(target, rest, filled, head=False, span_multiple=span_multiple, taps=taps, on_chunk=on_chunk)
        missing = [tokens[count:] for tokens, count in zip(missing, most, strict=True)]
        filled, longest = [at + count for at, count in zip(filled, most, strict=True)], 1
    device = target.spec.device
    capacity = target.cache.capacity
    logits: Tensor | None = None
    done = 0
    while done < longest:
        start = [min(at + done, at + len(tokens)) for at, tokens in zip(filled, missing, strict=True)]
        # Padding of short rows is written after them and must find room there too.
        chunk = min(PREFILL_CHUNK, capacity - max(start))
        pieces = [list(tokens[done : done + chunk]) for tokens in missing]
        width = max(map(len, pieces))
        tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=device)
        ragged = any(len(piece) < width for piece in pieces)
        if ragged:
            count = torch.tensor([len(piece) for piece in pieces], device=device)
            parent = chain_tree(tokens, count).parent
        else:
            parent = chain_parent(width, device).expand_as(tokens)
        span = min(capacity, round_up(max(start) + width, span_multiple))
        plan = layout(parent, torch.tensor(start, device=device), capacity, span=span)
        if ragged and device.type == "cpu":
            plan = replace(plan, real=real_nodes([len(piece) for piece in pieces], width))
        out = target.forward(tokens, plan, taps=taps, head=head and width == 1)
        if on_chunk is not None and out.taps is not None:
            on_chunk(start, [len(piece) for piece in pieces], out.taps)
        if head:
            here = out.logits
            if here is None:
                # The head reads one node a row, not the whole chunk.
                last = torch.tensor([max(0, len(piece) - 1) for piece in pieces], device=device)
                here = target.model.logits(out.hidden[torch.arange(len(pieces), device=device), last][:, None])
            if logits is not None:
                # A row that ended in an earlier chunk keeps the logits of that one.
                going = torch.tensor([bool(piece) for piece in pieces], device=device)[:, None, None]
                here = torch.where(going, here, logits)
            logits = here
        done += width
    return logits
