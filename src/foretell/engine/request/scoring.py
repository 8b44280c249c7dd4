"""Log probabilities of a known text: what the target says of every token of a prompt, read in passes of a fixed size.

Nothing is guessed here, so a score cannot depend on how the engine speculates: the passes of a text are the same with any
method, and the same alone as beside other requests.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.tree import chain_parent, layout
from foretell.core.upload import tensor_on
from foretell.engine.event import StepEvent
from foretell.engine.request.result import StepTrace
from foretell.engine.request.row import Piece
from foretell.engine.request.text import TextStream, Tokenizer
from foretell.model.prefill import round_up
from foretell.model.target import CausalModel, Target


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


SCORE_CHUNK = 128
"""Tokens of a pass. Its logits [128, V] are all needed, in float32: 78 MB of a vocabulary of 152,000."""
CAPACITY_STEP = 512
"""Slots of a cache are a multiple of this, so that the next text mostly fits into it."""
SOURCE = "prompt"
"""``Piece.source`` of a token that was given."""


class Scoring:
    """One text being scored, in a cache of its own."""

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Tokenizer | None,
        ids: Sequence[int],
        num_logprobs: int,
        *,
        lora: str | None = None,
        after: "Scoring | None" = None,
    ) -> None:
        """ids: at least one token; all but the last are read, so at most one more than the model's context. num_logprobs:
        of the most probable tokens, listed beside each. after: a finished one of the same model, lora and num_logprobs,
        whose cache is taken over: the passes that both texts begin with are not made again."""
        self.model, self.ids, self.num_logprobs = model, list(ids), num_logprobs
        self._lora = model.lora_of(lora)
        self.pieces: list[Piece] = []  # of the tokens read so far; the first has no score, as it follows nothing
        self._text = TextStream(tokenizer)
        self._target: Target | None = None
        if after is not None:
            self._take_over(after)

    @property
    def is_done(self) -> bool:
        """Whether every token has its piece."""
        return len(self.pieces) == len(self.ids)

    def read(self) -> bool:
        """One pass; returns ``is_done``. Call it in inference mode."""
        if not self.pieces:
            self.pieces = self._with_texts(self.ids[:1])
        if not self.is_done:
            self._pass()
        if self.is_done:
            self._text.finish()
            self.pieces[-1] = replace(self.pieces[-1], text=self.pieces[-1].text + self._text.take())
        return self.is_done

    def _with_texts(self, ids: Sequence[int]) -> list[Piece]:
        made = []
        for token in ids:
            offset = len(self._text.text)
            self._text.push(token)
            made.append(Piece(token, self._text.take(), SOURCE, offset=offset))
        return made

    def _take_over(self, before: "Scoring") -> None:
        """Begin where the texts part, at the start of a pass: passes are then the same as of a text read from its
        beginning, to the last bit."""
        self._target, before._target = before._target, None
        if self._target is None or self._target.cache.capacity < len(self.ids) - 1:
            self._target = None
            return
        common = next(
            (at for at, pair in enumerate(zip(self.ids, before.ids, strict=False)) if pair[0] != pair[1]), None
        )
        common = min(len(self.ids), len(before.ids)) if common is None else common
        # The last score of a pass is of the token after it, which must be the same too.
        read = (common - 1) // SCORE_CHUNK * SCORE_CHUNK
        if read > 0:
            texts = self._with_texts(self.ids[: read + 1])
            known = before.pieces[: read + 1]
            self.pieces = [replace(one, text=new.text) for one, new in zip(known, texts, strict=True)]

    def _pass(self) -> None:
        device = self.model.spec.device
        if self._target is None:
            # The last token needs no KV: what follows it is not part of the text.
            self._target = Target(self.model, 1, round_up(len(self.ids) - 1, CAPACITY_STEP))
            self._target.cache.loras = [self._lora]
        capacity = self._target.cache.capacity
        start = len(self.pieces) - 1  # tokens whose KV is known
        stop = min(start + SCORE_CHUNK, len(self.ids) - 1)
        tokens = tensor_on(device, [self.ids[start:stop]])
        span = min(capacity, round_up(stop, 64))
        parent = chain_parent(stop - start, device)[None]
        plan = layout(parent, tensor_on(device, [start]), capacity, span=span)
        logits = self._target.forward(tokens, plan).logits
        assert logits is not None
        following = self._with_texts(self.ids[start + 1 : stop + 1])
        self.pieces += with_logprobs(following, logits[0], range(stop - start), self.num_logprobs)
