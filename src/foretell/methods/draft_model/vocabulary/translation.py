"""Between the vocabularies of a target and of a draft model: which tokens they share, and a text of one in the other."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from foretell.methods.draft_model.vocabulary.spelling import Spelling


class Translation:
    """Two vocabularies, Vt tokens of the target and Vd of the draft model."""

    def __init__(self, target: Spelling, draft: Spelling) -> None:
        self.target, self.draft = target, draft

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """([n], [n]) int64 ids, target's and draft's, of the tokens that both have: each spells the same bytes, is the same
        special token, or ends a text. By ascending target id; no id stands twice."""
        pairs: dict[int, int] = {}
        theirs = self.draft.by_bytes
        for spelled, token in self.target.by_bytes.items():
            if spelled in theirs:
                pairs[token] = theirs[spelled]
        named = {name: token for token, name in self.draft.special.items()}
        for token, name in self.target.special.items():
            if name in named:
                pairs[token] = named[name]
        taken = set(pairs.values())
        ends = [token for token in self.draft.ends if token not in taken]
        pairs |= zip([end for end in self.target.ends if end not in pairs], ends, strict=False)
        chosen = sorted(pairs)
        return torch.tensor(chosen, dtype=torch.int64), torch.tensor([pairs[token] for token in chosen]).long()

    @cached_property
    def draft_of(self) -> list[int]:
        """[Vt] the draft's id of each target token; -1: it has none."""
        table = torch.full((len(self.target.bytes),), -1, dtype=torch.int64)
        ours, theirs = self.pairs
        table[ours] = theirs
        ids: list[int] = table.tolist()
        return ids

    def text(self, ids: Sequence[int]) -> list[int]:
        """A whole text of target tokens in the draft's: what the draft's tokenizer would make of it. Special tokens stand
        for themselves, or are spelled out where the draft has none of the name."""
        out, rest = list(self.draft.start), list(ids)
        if rest[: len(self.target.start)] == self.target.start:
            rest = rest[len(self.target.start) :]
        run: list[bytes] = []
        begins = True
        for token in [*rest, -1]:
            if token >= 0 and self._own(token) < 0:
                run.append(self.target.spell(token))
                continue
            said = b"".join(run)
            if begins and said.startswith(b" ") and self.target.adds_space:
                said = said[1:]
            out += self.draft.encode(said, begins=begins)
            run, begins = [], False
            if token >= 0:
                out.append(self._own(token))
        return out or self.draft.encode(b"\n")  # a draft model needs something to read

    def one(self, token: int) -> list[int]:
        """A target token by itself in the draft's tokens: one where both have it, else several; none where its bytes are
        not in the draft's vocabulary."""
        known = self.draft_of[token] if token < len(self.draft_of) else -1
        return [known] if known >= 0 else self.draft.encode(self.target.spell(token))

    @cached_property
    def _specials(self) -> dict[int, int]:
        ours, theirs = self.pairs
        return {a: b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True) if a in self.target.special}

    def _own(self, token: int) -> int:
        """The draft's token for a special one of the target's; -1 for all others."""
        return self._specials.get(token, -1)
