"""Feeding known text: a prompt is a chain like any other tree, read in chunks, rows ragged."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.tree import chain_parent, chain_tree, layout
from foretell.core.upload import tensor_on
from foretell.model.target import Target

PREFILL_CHUNK = 512
"""Most tokens of a row that one pass reads: bounds the memory of a mask, and the delay of decode steps."""


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least x."""
    return -(-x // multiple) * multiple


FEW = 8
"""Tokens of a row at most that a drafter reads in a usual step: those that were kept, and the pending one."""


def padded_width(width: int, room: int, device: torch.device) -> int:
    """Columns of a pass over known tokens, at least width and at most room. On an accelerator few numbers of them come up
    in decoding, so that the passes of most steps are alike: then one recording of their kernels serves all."""
    return width if device.type == "cpu" or width > FEW else min(room, max(2, 1 << (width - 1).bit_length()))


def real_nodes(counts: Sequence[int], width: int) -> Tensor | None:
    """``Plan.real`` of chains of counts[b] nodes, padded to width; None where there is too little padding to matter."""
    if sum(counts) > 0.9 * len(counts) * width:
        return None
    return torch.tensor([row * width + node for row, count in enumerate(counts) for node in range(count)])


def read_few(target: Target, tokens: Tensor, counts: Tensor, starts: Tensor, span: int) -> Tensor:
    """``feed`` of few tokens that lie on the device, in one pass without the host: logits [B, 1, V] after the last one of
    each row. tokens [B, W], of which counts [B] are real, to slots starts [B], ...; span: see ``layout``."""
    parent = chain_tree(tokens, counts).parent
    plan = layout(parent, starts, target.cache.capacity, span=span, is_line=True)
    hidden = target.forward(tokens, plan, head=False).hidden
    rows = torch.arange(len(tokens), device=tokens.device)
    return target.model.logits(hidden[rows, (counts - 1).clamp(min=0)].unsqueeze(1))


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
    device = target.spec.device
    capacity = target.cache.capacity
    logits: Tensor | None = None
    done = 0
    longest = max(map(len, missing))
    while done < longest:
        start = [min(at + done, at + len(tokens)) for at, tokens in zip(filled, missing, strict=True)]
        # Padding of short rows is written after them and must find room there too.
        chunk = min(PREFILL_CHUNK, capacity - max(start))
        pieces = [list(tokens[done : done + chunk]) for tokens in missing]
        width = padded_width(max(map(len, pieces)), capacity - max(start), device)
        tokens = tensor_on(device, [piece + [0] * (width - len(piece)) for piece in pieces])
        ragged = any(len(piece) < width for piece in pieces) or (width <= FEW and device.type != "cpu")
        if ragged:
            count = tensor_on(device, [len(piece) for piece in pieces])
            parent = chain_tree(tokens, count).parent
        else:
            parent = chain_parent(width, device).expand_as(tokens)
        span = min(capacity, round_up(max(start) + width, span_multiple))
        plan = layout(parent, tensor_on(device, start), capacity, span=span, is_line=True)
        plan = replace(plan, known=torch.tensor([len(piece) for piece in pieces]))
        if ragged and device.type == "cpu":
            plan = replace(plan, real=real_nodes([len(piece) for piece in pieces], width))
        out = target.forward(tokens, plan, taps=taps, head=head and width == 1)
        if on_chunk is not None and out.taps is not None:
            on_chunk(start, [len(piece) for piece in pieces], out.taps)
        if head:
            here = out.logits
            if here is None:
                # The head reads one node a row, not the whole chunk.
                last = tensor_on(device, [max(0, len(piece) - 1) for piece in pieces])
                here = target.model.logits(out.hidden[torch.arange(len(pieces), device=device), last][:, None])
            if logits is not None:
                # A row that ended in an earlier chunk keeps the logits of that one.
                going = tensor_on(device, [bool(piece) for piece in pieces])[:, None, None]
                here = torch.where(going, here, logits)
            logits = here
        done += width
    return logits
