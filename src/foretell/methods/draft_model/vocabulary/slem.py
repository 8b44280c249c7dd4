"""A draft model of another vocabulary whose text is split again by the target's tokenizer: string-level exact match (SLEM,
2502.05202). Its guesses are FIXED nodes, so they are checked exactly at any temperature and by every verifier."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, chain_parent, layout, root_tree
from foretell.core.upload import tensor_on
from foretell.draft.base import Commit, Context
from foretell.draft.growing.frontier import span_for
from foretell.draft.ngram import chain_of
from foretell.draft.shapes import Shape
from foretell.methods.draft_model.vocabulary.tli import TranslatedDrafter
from foretell.model.prefill import real_nodes

BEYOND = 1
"""Tokens that the draft writes beyond the depth of a chain: the last one of the text is dropped."""


class SLEMDrafter(TranslatedDrafter):
    """Greedy chains in the draft model's own tokens.

    After a step the end of the text is split anew together with what was emitted, so tokens that are already in the cache
    may change: ``read`` holds what is there, and what differs is written over.
    """

    can_join = True

    def follow(self, row: int, ids: Sequence[int]) -> None:
        """Split the text's last word again, with all that came after it: the text before it is not looked at, so a step
        takes the same time behind a long one."""
        known, own = self.num_known[row], self.own[row]
        if not known:
            self.own[row] = own = self.translation.text(ids)
            same = 0
        else:
            same, end = self.translation.respelled(own, ids[known:])
            old = own[same : self.filled[row]]
            own[same:] = end
            for mine, new in zip(old, end, strict=False):
                if mine != new:
                    break
                same += 1
        # The pending place's logits are needed: its token is always read again.
        self.filled[row] = min(self.filled[row], same, len(own) - 1)

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED chains, of a row without room for it the root alone."""
        own = self.translated(context, shape)
        last = self.target.spec.max_positions - 1
        limits = [
            max(0, min(shape.depth + BEYOND, last - length)) if limit > 0 else 0
            for limit, length in zip(own.depth_limit, own.lengths, strict=True)
        ]
        if not any(limits):
            return root_tree(context.pending)
        guesses = self._write(own, limits)
        chains = []
        for row, guess in enumerate(guesses):
            room = context.depth_limit[row]
            found = self.translation.guesses(context.history.ids[row], guess) if guess else []
            chains.append([token for token in found[: max(0, room)] if token < context.processors.vocab_size])
        if not any(chains):
            return root_tree(context.pending)
        return chain_of(context, chains)

    def _write(self, context: Context, limits: Sequence[int]) -> list[list[int]]:
        """What the draft model would write greedily after each row's text, limits[b] of its own tokens at most."""
        num_rows, device, count = context.num_rows, context.device, max(limits)
        logits, base = self.begin(context, limits)
        parent = chain_parent(count + 1, device).expand(num_rows, -1)
        if min(limits) < count:  # no node stands beyond its row's limit: a model with learned positions has none there
            room = tensor_on(device, limits)[:, None]
            parent = parent.masked_fill(torch.arange(count + 1, device=device) > room, -1)
        plan = layout(parent, base, self.capacity, span=span_for(self, context, count + 1))
        special = self.translation.draft.special
        written = []
        for node in range(1, count + 1):
            tokens = logits[:, -1].argmax(-1)
            written.append(tokens.tolist())
            ended = all(
                limit < node or any(step[row] in special for step in written) for row, limit in enumerate(limits)
            )
            if node == count or ended:
                break
            here = plan.nodes(node, node + 1)
            if device.type == "cpu":
                here = replace(here, real=real_nodes([int(limit >= node) for limit in limits], 1))
            logits = self.logits(tokens[:, None], here)
        return [[step[row] for step in written][:limit] for row, limit in enumerate(limits)]

    def observe(self, commit: Commit) -> None:
        """Nothing: the texts are compared with what was read when the next guess is asked for. What was written after them
        is not counted as read."""
