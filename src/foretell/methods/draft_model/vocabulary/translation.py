"""Between the vocabularies of a target and of a draft model: which tokens they share, and a text of one in the other."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from foretell.methods.draft_model.vocabulary.spelling import Spelling, cut

WINDOW = 24
"""Most tokens before a place that are split again together with what follows it."""


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

    @property
    def share(self) -> float:
        """Of the target's tokens, how many the draft can guess by themselves."""
        return len(self.pairs[0]) / max(1, len(self.target.by_bytes) + len(self.target.special))

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

    def extend(self, text: Sequence[int], ids: Sequence[int]) -> list[int]:
        """A text of the draft's tokens with target tokens after it: its end is split again together with them, as far back
        as the last word, so that the draft reads what it would have written itself."""
        same, end = self.respelled(text, ids)
        return [*text[:same], *end]

    def respelled(self, text: Sequence[int], ids: Sequence[int]) -> tuple[int, list[int]]:
        """(number of the text's first tokens that stay, the tokens after them) of ``extend``: of the text only the last
        WINDOW tokens are read."""
        base = max(0, len(text) - WINDOW)
        out, at = list(text[base:]), 0
        while at < len(ids):
            if self._own(ids[at]) >= 0:
                out.append(self._own(ids[at]))
                at += 1
                continue
            first = at
            while at < len(ids) and self._own(ids[at]) < 0:
                at += 1
            run = b"".join(self.target.spell(token) for token in ids[first:at])
            begin = word_start(self.draft, out)
            head = b"".join(self.draft.spell(token) for token in out[begin:])
            out[begin:] = self.draft.encode(head + run)
        return base, out

    def guesses(self, ids: Sequence[int], guess: Sequence[int]) -> list[int]:
        """Target tokens of the draft's guess behind a text of target tokens: string-level exact match (SLEM, 2502.05202).

        The last tokens of the text and the guess are split together; where the text's own tokens come out changed, the
        guess alone. The last token is left out, since it may be the beginning of a longer one, unless the draft ended
        the text there.
        """
        ended = next((at for at, token in enumerate(guess) if token in self.draft.special), None)
        end = None if ended is None else self._back(guess[ended])
        said = b"".join(self.draft.spell(token) for token in guess[:ended])
        begin = word_start(self.target, ids)
        head = b"".join(self.target.spell(token) for token in ids[begin:])
        said = cut(head + said)[len(head) :]
        both = self.target.encode(head + said) if said else []
        size = len(ids) - begin
        found = both[size:] if both[:size] == list(ids[begin:]) else self.target.encode(said)
        return [*found, end] if end is not None else found[: None if ended is not None else -1]

    @cached_property
    def _specials(self) -> dict[int, int]:
        ours, theirs = self.pairs
        return {a: b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True) if a in self.target.special}

    @cached_property
    def _backwards(self) -> dict[int, int]:
        return {draft: target for target, draft in self._specials.items()}

    def _own(self, token: int) -> int:
        """The draft's token for a special one of the target's; -1 for all others."""
        return self._specials.get(token, -1)

    def _back(self, token: int) -> int | None:
        return self._backwards.get(token)


def word_start(spelling: Spelling, ids: Sequence[int]) -> int:
    """Where the last word of a text begins: the last token that begins with a space before something else, which all
    tokenizers known here split before; at most WINDOW tokens back, and never before a special token."""
    at = len(ids)
    while at > max(0, len(ids) - WINDOW):
        if ids[at - 1] in spelling.special:
            return at
        at -= 1
        spelled = spelling.spell(ids[at])
        if spelled[:1] == b" " and spelled.strip():
            return at
    return at
