"""Logits of target and draft at the same contexts: the input of all figures about a pair of models."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.platform import memory_bytes
from foretell.core.tree import chain_parent, layout
from foretell.model.prefill import PREFILL_CHUNK
from foretell.model.target import CausalModel, Target


@dataclass(frozen=True)
class PairText:
    """One text by its tokens; contexts are those that end in the output."""

    ids: list[int]
    num_prompt: int


@dataclass(frozen=True)
class Pairs:
    """R contexts: both models' logits of the next token."""

    target: Tensor  # [R, V] float32 logits
    draft: Tensor  # [R, V] float32, -inf where the draft knows no such token
    text: Tensor  # [R] int64: which text a context is of, for errors over texts

    @property
    def num_contexts(self) -> int:
        """R."""
        return self.target.shape[0]


def check_room(num_contexts: int, vocab_size: int, *, copies: int = 1) -> None:
    """Raises ConfigError where the logits of both models at so many contexts, held ``copies`` times, are more than the
    machine's memory."""
    needed, has = 8 * num_contexts * vocab_size * copies, memory_bytes()
    if has is not None and needed > has:
        raise ConfigError(
            f"{num_contexts} contexts of {vocab_size} tokens take {needed / 2**30:.0f} GiB of logits, and this machine has "
            f"{has / 2**30:.0f}: give fewer contexts of each text, or fewer texts"
        )


def collect(target: CausalModel, draft: CausalModel, texts: Sequence[PairText], *, per_text: int = 32) -> Pairs:
    """Logits at up to per_text contexts of each text's output, evenly spread, by teacher forcing.

    Raises ConfigError where no text has an output.
    """
    vocab_size = target.spec.vocab_size
    check_room(sum(min(per_text, len(text.ids) - text.num_prompt) for text in texts), vocab_size)
    ours, theirs, owner = [], [], []
    for index, text in enumerate(texts):
        places = _places(text, per_text, min(target.spec.max_positions, draft.spec.max_positions))
        if not places:
            continue
        ours.append(logits_at(target, text.ids, places))
        logits = logits_at(draft, [min(token, draft.spec.vocab_size - 1) for token in text.ids], places)[:, :vocab_size]
        missing = vocab_size - logits.shape[1]
        theirs.append(torch.nn.functional.pad(logits, (0, missing), value=-torch.inf))
        owner.append(torch.full((len(places),), index))
    if not ours:
        raise ConfigError("no text has an output: there is no context to compare the models at")
    return Pairs(torch.cat(ours), torch.cat(theirs), torch.cat(owner))


def _places(text: PairText, per_text: int, max_positions: int) -> list[int]:
    """Indices of the last token of each context."""
    first, last = text.num_prompt - 1, min(len(text.ids), max_positions) - 1
    count = min(per_text, max(0, last - first))
    return [first + (last - first) * k // count for k in range(count)]


def logits_at(model: CausalModel, ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """[len(places), V] float32 logits after the tokens at these indices (ascending) of one text."""
    length = places[-1] + 1
    cache = Target(model, 1, length)
    device = model.spec.device
    tokens = torch.tensor([list(ids[:length])], device=device)
    rows: list[Tensor] = []
    with torch.inference_mode():
        for start in range(0, length, PREFILL_CHUNK):
            stop = min(length, start + PREFILL_CHUNK)
            parent = chain_parent(stop - start, device)[None]
            plan = layout(parent, torch.tensor([start], device=device), length)
            hidden = cache.forward(tokens[:, start:stop], plan, head=False).hidden
            wanted = [place - start for place in places if start <= place < stop]
            if wanted:
                rows.append(model.logits(hidden[:, wanted])[0].float().cpu())
    return torch.cat(rows).clone()
