"""Prompt lookup: the text so far is its own draft (Saxena 2023; transformers' prompt_lookup_num_tokens).

The longest suffix of the text that occurred before, at its most recent occurrence, is taken to continue as it did then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.core.errors import ConfigError
from foretell.core.noise import Noise
from foretell.core.settings import value_of
from foretell.core.tree import DrawMode, TokenTree, chain_tree
from foretell.core.upload import tensor_on
from foretell.draft.automaton import MAX_READ
from foretell.draft.base import Capabilities, Context, Method, RowDrafter
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.native import new_automaton
from foretell.draft.shapes import Shape
from foretell.model.target import Target

MAX_NGRAM = 64
"""Longest suffix that may be looked up, in tokens: a token of text costs at most so many operations."""


class NgramIndex:
    """All n-grams of a growing text by their most recent ends, as a suffix automaton: memory is linear in the text,
    whatever ``max_ngram``, and a token costs O(max_ngram) work at most."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram = min_ngram
        self.ids: list[int] = []
        self.automaton = new_automaton(max_ngram)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text, and read at most ``MAX_READ`` of those that have not been read."""
        self.ids += tokens
        start = self.automaton.num_tokens
        self.automaton.extend(self.ids[start : start + MAX_READ])

    def lookup(self, num_tokens: int) -> list[int]:
        """At most num_tokens guesses; none while the text has not been read to its end. Past the end of the text they go on
        with the guesses themselves (a period)."""
        state, size = self.automaton.repeat()
        if size < self.min_ngram or self.automaton.num_tokens < len(self.ids):
            return []
        end, at = len(self.ids), self.automaton.end_before(state)
        return [self.ids[at + k % (end - at)] for k in range(num_tokens)]


def chain_of(context: Context, guesses: Sequence[Sequence[int]]) -> TokenTree:
    """FIXED chains, one a row, of the given guesses: rows may have none."""
    width = max(map(len, guesses)) + 1
    tokens = [[0, *guess, *[0] * (width - 1 - len(guess))] for guess in guesses]
    tensor = tensor_on(context.device, tokens, torch.int64)
    tensor[:, 0] = context.pending
    ragged = any(len(guess) + 1 < width for guess in guesses)
    count = tensor_on(context.device, [len(guess) + 1 for guess in guesses]) if ragged else None
    return chain_tree(tensor, count)


class NgramDrafter(RowDrafter):
    """One index a row."""

    rows: list[NgramIndex]
    can_wait = True

    def __init__(self, context: Context, min_ngram: int, max_ngram: int) -> None:
        self.rows = [NgramIndex(min_ngram, max_ngram) for _ in range(context.num_rows)]
        for index, ids in zip(self.rows, context.history.ids, strict=True):
            index.extend(ids)

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED chains; a row without a match gets the root alone."""
        limits = context.depth_limit
        return chain_of(context, [index.lookup(most) for index, most in zip(self.rows, limits, strict=True)])


class Ngram(Method):
    """``--method ngram``."""

    name = "ngram"
    capabilities = Capabilities(
        "what followed the last tokens earlier in prompt and output", draws=False, by_request=True
    )

    def __init__(self, *, min_ngram: int = 1, max_ngram: int = 4) -> None:
        """Bounds of the suffix that is looked up, in tokens."""
        min_ngram = value_of(min_ngram, int, "prompt_lookup_min")
        max_ngram = value_of(max_ngram, int, "prompt_lookup_max")
        if not 1 <= min_ngram <= max_ngram <= MAX_NGRAM:
            raise ConfigError(
                f"prompt_lookup_min = {min_ngram} and prompt_lookup_max = {max_ngram}: expected 1 <= min <= max <= "
                f"{MAX_NGRAM}"
            )
        self.min_ngram, self.max_ngram = min_ngram, max_ngram

    def open(self, context: Context, capacity: int, target: Target) -> NgramDrafter:
        """Index the prompts."""
        return NgramDrafter(context, self.min_ngram, self.max_ngram)


@dataclass(frozen=True)
class NgramConfig(MethodConfig):
    """Prompt lookup."""

    method = Ngram.name
    capabilities = Ngram.capabilities
    ranges = (("prompt_lookup_min", "prompt_lookup_max"),)

    prompt_lookup_min: int = 2  # one matching token is chance: it costs a wider pass and rarely hits
    prompt_lookup_max: int = 5

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Ngram(min_ngram=self.prompt_lookup_min, max_ngram=self.prompt_lookup_max)

    def __post_init__(self) -> None:
        """Refuse invalid bounds."""
        super().__post_init__()
        Ngram(min_ngram=self.prompt_lookup_min, max_ngram=self.prompt_lookup_max)
