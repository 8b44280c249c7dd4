"""What followed the longest known suffix of the text, by its frequency (SuffixDecoding, 2411.04975).

Two sources: the row's own prompt and output, and the outputs of requests that have ended, which all batches of one loaded
method share. From the longest suffix that a source knows, guesses are added best first, each scored by the product of
the shares of its path; the score of a proposal, their sum, is the expected number of accepted guesses, and the source with
the higher one is taken. The longer the match, the more guesses are made.

Everything happens on the host: a token of text costs O(1) amortised, a guess the sorting of the tokens that followed there.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, require
from foretell.core.noise import Noise
from foretell.core.params import heat_of
from foretell.core.settings import settle
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.automaton import MAX_READ, NOWHERE, Place
from foretell.draft.base import Capabilities, Commit, Context, Method, RowDrafter
from foretell.draft.chances import Chances
from foretell.draft.config import Loader, MethodConfig
from foretell.draft.native import AnyAutomaton, NativeAutomaton, Node, depth_first, new_automaton, tree_of
from foretell.draft.shapes import OptTree, Shape
from foretell.model.target import Target

MAX_CACHED = 2**32
MAX_MATCH = 64
"""Longer matches count as this: a token of text costs at most so many operations."""
EXPECTED = 0.9
"""The chance that a token of what a grammar leaves no choice about is kept: a model may write the text by others."""
PER_TOKEN = 1.0
"""Guesses in a line for each token of the match."""


@dataclass(frozen=True)
class SuffixOptions:
    """How matches become guesses."""

    min_token_prob: float = 0.1  # least score of a guess: the product of the shares on its path
    max_cached_tokens: int = 65536  # of the outputs that are remembered; 0: rows learn from themselves alone

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        try:
            settle(self)
        except ConfigError as error:
            raise ConfigError(f"suffix_decoding_{error}") from None
        least, most = self.min_token_prob, self.max_cached_tokens
        require(0 <= least <= 1, "suffix_decoding_min_token_prob", least, "between 0 and 1")
        expected = f"0 (nothing is remembered) or between 2 and {MAX_CACHED}"
        require(most == 0 or 2 <= most <= MAX_CACHED, "suffix_decoding_max_cached_tokens", most, expected)


class Library:
    """Outputs of requests that have ended, at most max_tokens of them: first in, first out.

    Two automata: the younger takes new outputs until it has half of max_tokens, then the older is dropped, and with it
    the oldest outputs, whole. So nothing is ever rebuilt, a token costs O(1) amortised, and between a half and all of
    max_tokens is remembered. Of an output longer than a half only the end is kept.
    """

    def __init__(self, max_tokens: int, window: int) -> None:
        """window: see ``Automaton``."""
        self.half, self.window = max_tokens // 2, window
        self.automata = [new_automaton(window)]  # the younger, and the older if there is one
        self.outputs: list[list[array[int]]] = [[]]  # what each has read

    def add(self, output: Sequence[int]) -> None:
        """One whole output."""
        output = output[-self.half :] if self.half else []
        if not output:
            return
        if self.automata[0].num_tokens + len(output) > self.half:
            self.automata = [new_automaton(self.window), self.automata[0]]
            self.outputs = [[], self.outputs[0]]
        self.automata[0].begin()
        self.automata[0].extend(output)
        self.outputs[0].append(array("i", output))

    def memory(self) -> dict[str, Tensor]:
        """``tokens`` [T] int32 of all outputs, the oldest first, ``lengths`` [R] of each, and ``young`` [1]: how many of
        them the younger automaton has read."""
        young, older = self.outputs[0], self.outputs[1:]
        outputs = [*(each for outputs in older for each in outputs), *young]
        joined = array("i")
        for each in outputs:
            joined.extend(each)
        tokens = torch.frombuffer(joined, dtype=torch.int32) if joined else torch.zeros(0, dtype=torch.int32)
        lengths = torch.tensor([len(each) for each in outputs], dtype=torch.int64)
        return {"tokens": tokens, "lengths": lengths, "young": torch.tensor([len(young)])}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """Read again what ``memory`` returned: the automata become what they were. Raises ValueError where the lengths do
        not fit the tokens."""
        lengths = memory["lengths"].tolist()
        outputs = [each.tolist() for each in torch.split(memory["tokens"], lengths)]
        older = len(outputs) - int(memory["young"])
        for number, output in enumerate(outputs):
            if number == older and number:
                self.automata, self.outputs = [new_automaton(self.window), *self.automata], [[], *self.outputs]
            self.automata[0].begin()
            self.automata[0].extend(output)
            self.outputs[0].append(array("i", output))


@dataclass
class SuffixReader:
    """The place of a text in an automaton that grows by other texts."""

    automaton: AnyAutomaton
    place: Place = NOWHERE
    num_read: int = 0  # tokens of the text
    num_known: int = 0  # tokens of the automaton at that time

    def read(self, text: Sequence[int]) -> Place:
        """The longest suffix of the text, of at most window tokens, that the automaton knows."""
        if self.num_known != self.automaton.num_tokens:
            # New outputs may give a longer match: the last window of the text is searched again.
            self.num_known = self.automaton.num_tokens
            self.place, self.num_read = NOWHERE, max(0, len(text) - self.automaton.window)
        self.place = self.automaton.follow_all(self.place, text[self.num_read :])
        self.num_read = len(text)
        return self.place


@dataclass
class SuffixRow:
    """The text of one row and its places."""

    text: list[int]
    num_prompt: int
    own: AnyAutomaton
    readers: list[SuffixReader] = field(default_factory=list)  # of the library's automata
    chances: Chances = field(default_factory=Chances)  # that its guesses are kept
    line: list[int] = field(default_factory=list)  # guesses of the last lookup, made or not: to learn from ...
    match: int = 0  # ... and the tokens before them that were found

    def read(self) -> None:
        """Read at most ``MAX_READ`` further tokens of the text."""
        start = self.own.num_tokens
        self.own.extend(self.text[start : start + MAX_READ])

    def places(self, library: Library) -> list[tuple[AnyAutomaton, Place]]:
        """The longest match in each source, the row's own text first; none in a text that was not read to its end."""
        known = {id(reader.automaton): reader for reader in self.readers}
        self.readers = [known.get(id(automaton)) or SuffixReader(automaton) for automaton in library.automata]
        own = self.own.repeat() if self.own.num_tokens == len(self.text) else NOWHERE
        return [(self.own, own), *((reader.automaton, reader.read(self.text)) for reader in self.readers)]


def best_first(
    automaton: AnyAutomaton, place: Place, *, depth: int, size: int, width: int, least_score: float, least_match: int
) -> tuple[list[Node], float]:
    """At most ``size`` guesses after a place, the best scores first, and their sum.

    depth: most in a line; width: most children of a node (1: a greedy chain). A guess of a score below least_score is
    not made, nor one whose context has fewer than least_match tokens.
    """
    if isinstance(automaton, NativeAutomaton):
        return automaton.best_first(
            place, depth=depth, size=size, width=width, least_score=least_score, least_match=least_match
        )
    nodes: list[Node] = []
    total, pushed = 0.0, 0
    heap: list[tuple[float, int, int, int, int, Place]] = []  # -score, order, depth, parent, token, place
    node, level, score = 0, 0, 1.0
    while True:
        ways = automaton.followers(place, least_match, least_score / score)[:width] if level < depth else []
        for way in ways:
            pushed += 1
            heappush(heap, (-score * way.share, pushed, level + 1, node, way.token, way.place))
        if not heap or len(nodes) == size:
            return nodes, total
        negative, _, level, parent, token, place = heappop(heap)
        score = -negative
        nodes.append((parent, token))
        node, total = len(nodes), total + score


def best_of_sources(
    row: SuffixRow, library: Library, options: SuffixOptions, *, depth: int, size: int, width: int, least: float = 0.0
) -> tuple[list[Node], float]:
    """The guesses after a row's text, the best first, from the source that expects most of them, and their score.

    depth, size, width: see ``best_first``. least: chance to be kept below which none is made. One of each source is looked
    up in any case, so that it is seen what it would have been worth.
    """
    best: list[Node] = []
    highest = 0.0
    paying = 0  # how deep guesses of the best source pay
    row.line.clear()
    for automaton, place in row.places(library):
        deepest = min(depth, int(PER_TOKEN * place[1]))
        if deepest < 1:
            continue
        pays = row.chances.depth(place[1], deepest, least) if least > 0.0 else deepest
        deepest = max(pays, 1)
        nodes, score = best_first(
            automaton, place, depth=deepest, size=size, width=width, least_score=options.min_token_prob, least_match=1
        )
        if (pays > 0, score) > (paying > 0, highest):
            best, highest, paying, row.match = nodes, score, pays, place[1]
    for at, (parent, token) in enumerate(best):
        if parent != at:  # the line of the best guesses ends
            break
        row.line.append(token)
    return (best, highest) if paying else ([], 0.0)


class SuffixDrafter(RowDrafter):
    """One automaton a row, and the method's library.

    A row's output enters the library once, in the step that ends the row (``Commit.ended``). One that is dropped before
    its end never does.
    """

    can_wait = True
    rows: list[SuffixRow]

    def __init__(
        self,
        context: Context,
        options: SuffixOptions,
        library: Library,
        chances: Sequence[Chances] | None = None,
        *,
        fills: bool = False,
    ) -> None:
        """chances: of each row, one object for all that share it; None: each has its own. fills: see
        ``Suffix.measured``."""
        self.options, self.library, self.fills = options, library, fills
        self.rows = [
            SuffixRow(list(ids), num_prompt, new_automaton(MAX_MATCH), chances=chance)
            for ids, num_prompt, chance in zip(
                context.history.ids,
                context.history.num_prompt,
                chances or [Chances() for _ in context.lengths],
                strict=True,
            )
        ]
        for row in self.rows:
            row.read()

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        """FIXED trees, depth first, the best child first; a row without a match gets the root alone."""
        return tree_of(context, [nodes for nodes, _ in self.guesses(context, shape)])

    def guesses(self, context: Context, shape: Shape) -> list[tuple[list[Node], float]]:
        """Of each row the nodes that ``propose`` makes a tree of, and their score."""
        made = [
            self._guess(row, shape, depth_limit, context.least_chance)
            for row, depth_limit in zip(self.rows, context.depth_limit, strict=True)
        ]
        if not context.processors.reads_history or context.least_chance > EXPECTED:
            return made
        expected = context.processors.expected(context.history, context.depth_limit)
        return list(map(_with, made, expected, [min(shape.depth, most) for most in context.depth_limit]))

    def _guess(self, row: SuffixRow, shape: Shape, depth_limit: int, least: float = 0.0) -> tuple[list[Node], float]:
        size, width = (shape.size, shape.width) if isinstance(shape, OptTree) else (shape.depth, 1)
        if depth_limit < 1:  # places are looked up where they are wanted: the texts that came meanwhile are read then
            return [], 0.0
        nodes, score = best_of_sources(
            row, self.library, self.options, depth=depth_limit, size=size, width=width, least=least
        )
        if self.fills:
            return [(place, 0) for place in range(min(size, depth_limit))], float(size)
        return depth_first(nodes), score

    def observe(self, commit: Commit) -> None:
        """Append the emitted tokens to the text; the output of a row that ends is added to the library."""
        for row, tokens, ended in zip(self.rows, commit.tokens, commit.ended, strict=True):
            if row.line:
                row.chances.observe(row.match, row.line, tokens)
                row.line.clear()
            row.text.extend(tokens)
            if ended:
                self.library.add(row.text[row.num_prompt :])
            else:
                row.read()

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """All texts but the last step's first: automata are read to their ends once."""
        *before, last = commits
        for commit in before:
            for row, tokens in zip(self.rows, commit.tokens, strict=True):
                row.text.extend(tokens)
        self.observe(last)


def _with(made: tuple[list[Node], float], expected: Sequence[int], most: int) -> tuple[list[Node], float]:
    """Guesses of a lookup, or what is expected where they do not say all of that; and the score. most: tokens of it."""
    nodes, score = made
    line = list(enumerate(expected[:most]))
    if not line or nodes[: len(line)] == line:
        return made
    return line, max(score, EXPECTED * len(line))


class Suffix(Method):
    """``--method suffix``. The shape "opt_tree" reads size, width and depth; its threshold weighs a drafter's pass,
    and here a deeper guess costs none, so ``min_token_prob`` alone limits the nodes.

    Holds the outputs of requests that have ended. They shape the guesses of later ones, never their text (FIXED nodes
    are sound), but displayed guesses and timing reveal earlier outputs: ``isolated`` keeps rows
    apart, and a service gives every tenant a ``fresh`` one.
    """

    name = "suffix"
    capabilities = Capabilities(
        "what most often followed the longest known suffix, in this text and in earlier outputs",
        draws=False,
        shapes=("chain", "opt_tree"),
        learns=True,
        by_request=True,
        weighs=True,
        expects=True,
    )

    def __init__(self, options: SuffixOptions | None = None, *, fills: bool = False) -> None:
        """With an empty library. fills: see ``measured``."""
        self.options, self.fills = options or SuffixOptions(), fills
        self._chances: dict[int, Chances] = {}  # by ``heat_of``; what is not remembered is learned by each row alone
        self.library = Library(self.options.max_cached_tokens, MAX_MATCH)

    @property
    def learned_bytes(self) -> int:
        """Of the automata of the library, and of what they have read."""
        return sum(automaton.num_bytes + 4 * automaton.num_tokens for automaton in self.library.automata)

    def memory(self) -> dict[str, Tensor]:
        """See ``Library``."""
        return self.library.memory()

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        """See ``Library``."""
        self.library.recall(memory)

    def fresh(self) -> "Suffix":
        """With an empty library."""
        return Suffix(self.options)

    def measured(self) -> "Suffix":
        """One whose rows guess as deep as they may, whatever is known: so the passes that it asks for are measured."""
        return Suffix(self.options, fills=True)

    def isolated(self) -> "Suffix":
        """A method without a library: one object for all rows that share nothing."""
        return self._isolated

    @cached_property
    def _isolated(self) -> "Suffix":
        return Suffix(replace(self.options, max_cached_tokens=0))

    def open(self, context: Context, capacity: int, target: Target) -> SuffixDrafter:
        """Read the prompts."""
        chances = None
        if self.options.max_cached_tokens:
            heats = [heat_of(params.temperature) for params in context.processors.params]
            chances = [self._chances.setdefault(heat, Chances()) for heat in heats]
        return SuffixDrafter(context, self.options, self.library, chances, fills=self.fills)


@dataclass(frozen=True)
class SuffixConfig(MethodConfig):
    """Suffix automata of the text and of earlier outputs."""

    method = Suffix.name
    capabilities = Suffix.capabilities

    num_speculative_tokens: int = 15  # few matches are long enough to use them all, and those are nearly certain
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = 65536

    @property
    def options(self) -> SuffixOptions:
        """What the method reads. Raises ConfigError."""
        prefix = "suffix_decoding_"
        given = {name: getattr(self, prefix + name) for name in SuffixOptions.__dataclass_fields__}
        return SuffixOptions(**given)

    def load(self, loader: Loader) -> Method:
        """Nothing to load."""
        return Suffix(self.options)

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        super().__post_init__()
        _ = self.options
