"""Per-token details of a step: log probabilities, and the tree that the tokens came from."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.engine.event import StepEvent
from foretell.engine.request.result import StepTrace
from foretell.engine.request.row import Piece


def with_logprobs(pieces: Sequence[Piece], logits: Tensor, path: Sequence[int], count: int) -> list[Piece]:
    """Pieces of one step with the log probabilities of the model's own distribution, before temperature and processors.

    logits [N, V] of the row's nodes; the k-th piece's token follows node path[k]. count: how many of the most probable
    tokens are listed beside it.
    """
    probs = torch.log_softmax(logits[list(path[: len(pieces)])].float(), -1)  # [n, V]
    best = probs.topk(min(count, probs.shape[-1]), -1) if count else None
    out = []
    for index, piece in enumerate(pieces):
        top: tuple[tuple[int, float], ...] = ()
        if best is not None:
            top = tuple(zip(best.indices[index].tolist(), best.values[index].tolist(), strict=True))
        out.append(replace(piece, logprob=float(probs[index, piece.token_id]), top_logprobs=top))
    return out


def trace_of(event: StepEvent, row: int) -> StepTrace:
    """The tree of one row of a step without padding, with the path that was kept."""
    tree = event.commit.tree
    parent = tree.parent[row].tolist()
    nodes = [node for node, above in enumerate(parent) if node == 0 or above >= 0]
    number = {node: index for index, node in enumerate(nodes)}
    tokens = tree.tokens[row].tolist()
    chances = [1.0] + [float(event.evidence.p[row, parent[node], tokens[node]]) for node in nodes[1:]]
    emitted = event.commit.tokens[row]
    kept = event.verdict.path[row, : int(event.verdict.count[row])].tolist()
    if len(emitted) < len(kept):  # the text ended with a guess: no bonus was emitted
        kept, emitted = kept[: len(emitted) + 1], []
    return StepTrace(
        tokens=[tokens[node] for node in nodes],
        parent=[-1] + [number[parent[node]] for node in nodes[1:]],
        probability=chances,
        path=[number[node] for node in kept],
        bonus=emitted[-1] if emitted else None,
    )
