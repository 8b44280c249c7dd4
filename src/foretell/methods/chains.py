"""Proposals drawn by the C kernels: chains (``kernels/native/draw.h``), which make the same draws as ``grow.chain``, and
trees by path probability (``kernels/native/grow.h``), the same as those of ``draft/growing/dynamic.py``."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.probs import Processors
from foretell.core.tree import DrawMode, DrawnBy, TokenTree, chain_tree
from foretell.draft.base import Context
from foretell.draft.shapes import Chain, DySpec, Eagle2Shape, OptTree, Shape
from foretell.heads.native import Memory, Vocabulary
from foretell.kernels import heads
from foretell.kernels.functions import check

_HOW = {DrawnBy.FIXED: 0, DrawnBy.COUPLED: 1, DrawnBy.IID: 2}


def can_draw(vocabulary: Vocabulary, context: Context, shape: Shape) -> bool:
    """Whether C can draw a whole proposal of this shape: a chain, of distributions that no penalty, bias or processor of
    the user's changes, and nobody asks for their logits."""
    return type(shape) is Chain and _is_plain(vocabulary, context)


def _is_plain(vocabulary: Vocabulary, context: Context) -> bool:
    processors = context.processors
    return (
        context.draft_logits is None
        and vocabulary.ascending
        and processors.vocab_size == vocabulary.size
        and not processors.reads_history
        and processors.bias is None
    )


GROWN = DySpec | Eagle2Shape | OptTree
"""Shapes that C can grow."""
MOST_FED = 1024
"""Nodes of a tree that C reads through the drafter at most: it keeps who sees whom of all of them."""


def growth_of(
    vocabulary: Vocabulary, context: Context, shape: Shape, draws: DrawMode, depth: int
) -> tuple[heads.Growth, DrawnBy] | None:
    """How C grows a tree of this shape, at most depth deep, and how its nodes are drawn; None: it cannot. Ways of drawing
    in which a node's place is not its own probability stay with the slow twin."""
    if not isinstance(shape, GROWN) or type(shape) not in GROWN.__args__:
        return None
    if not _is_plain(vocabulary, context):
        return None
    if context.processors.num_greedy == len(context.processors.params):
        draws = DrawMode.FIXED
    elif isinstance(shape, DySpec) and draws not in (DrawMode.FIXED, DrawMode.COUPLED):
        return None
    beam = isinstance(shape, Eagle2Shape)
    widest = shape.width if beam else shape.size
    level = fed = 1
    for _ in range(1, depth):
        level = min(level * shape.width, widest)
        fed += level
    if fed > MOST_FED:
        return None
    least = shape.threshold if isinstance(shape, DySpec) else 0.0
    gain = shape.threshold if isinstance(shape, OptTree) else -math.inf
    growth = heads.Growth(int(beam), shape.size, shape.width, depth, least, gain)
    return growth, DrawnBy.COUPLED if draws == DrawMode.COUPLED else DrawnBy.FIXED


@dataclass(frozen=True)
class Draws:
    """How the tokens of a proposal are drawn, as C sees it, and the tensors that hold it."""

    view: heads.Draw
    q: Tensor | None  # [B, depth + 1, V] float32, filled by the draws; None where no verifier reads it
    held: Sequence[Tensor | None]

    @classmethod
    def of(cls, vocabulary: Vocabulary, processors: Processors, label: DrawnBy, noise: Noise, depth: int) -> "Draws":
        """The draws of up to depth guesses in a line of each row."""
        inverse, top_k = processors.scales, processors.top_ks
        keys = uniforms = q = None
        if label == DrawnBy.COUPLED:  # the verifier's depths too: hashed once
            keys = noise.coupled_keys(depth + 1)[:, :depth].contiguous()
        elif label == DrawnBy.IID:
            uniforms = noise.draft_nodes(1, depth)
            q = torch.zeros(len(inverse), depth + 1, vocabulary.size)
        top_p, min_p = processors.top_p, processors.min_p  # [B, 1, 1], or None
        held = (inverse, keys, vocabulary.table, uniforms, top_k, top_p, min_p, q)
        places = (None if tensor is None else tensor.data_ptr() for tensor in held)
        return cls(heads.Draw(_HOW[label], depth, vocabulary.size, *places), q, held)


def draw_block(
    memory: Memory, vocabulary: Vocabulary, logits: Tensor, pending: Tensor, limits: Sequence[int],
    processors: Processors, label: DrawnBy, noise: Noise, markov: heads.Markov | None = None,
) -> TokenTree:  # fmt: skip
    """The chain ``grow.chain`` would draw, limits[b] guesses of row b after pending [B], in one call.

    logits [B, D, V], float32, or [B, D, DV] of a draft vocabulary: of guess d + 1 whatever the guesses before it are, but
    for what markov adds for the token before it."""
    depth = max(limits)
    given = logits[:, :depth].contiguous().clone()  # drawing overwrites it
    draws = Draws.of(vocabulary, processors, label, noise, depth)
    guesses, limit = torch.empty(len(given), depth, dtype=torch.int64), torch.tensor(list(limits))
    view = ctypes.addressof(draws.view)
    bigram = None if markov is None else ctypes.addressof(markov)
    threads, pending = torch.get_num_threads(), pending.contiguous()
    with memory.lock:
        scratch = memory.scratch(memory.functions.draw_scratch(bigram, len(given), given.shape[2], threads))
        problem = memory.functions.draw(
            view, bigram, len(given), given.shape[2], threads, vocabulary.address, limit.data_ptr(),
            pending.data_ptr(), given.data_ptr(), guesses.data_ptr(), scratch,
        )  # fmt: skip
    check(problem)
    tokens = torch.cat([pending[:, None], guesses], 1)
    return chain_tree(tokens, row_counts(limits), drawn_by=label, q=draws.q)


def row_counts(limits: Sequence[int]) -> Tensor | None:
    """[B] nodes of each row of a chain, the root included; None where all have the same."""
    return None if min(limits) == max(limits) else torch.tensor(limits) + 1
