"""Looking on while production decodes: every tree that was proposed, and the laws its verifier was given.

A ``Watch`` stands at the two public seams: it wraps the drafter (which sees the text) and the verifier (which sees the
tree and p). It changes nothing and draws nothing; the step that runs is the engine's own.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.draft.base import Commit, Context, Drafter, Method, PromptChunk
from foretoken.draft.shape import Shape
from foretoken.engine.engine import Engine
from foretoken.engine.method import MethodConfig
from foretoken.model.target import Target
from foretoken.noise import Noise, derive_seed
from foretoken.sampling import SamplingParams
from foretoken.tree import Draws, TokenTree
from foretoken.verify.law import Evidence, Verifier, Walk

MAX_BYTES = 2**28
"""Most bytes of laws that a watch keeps: with a vocabulary of 150,000 tokens a tree's rows are tens of megabytes."""


@dataclass(frozen=True)
class Text:
    """One row's text when a tree was proposed for it."""

    ids: list[int]  # prompt and output, the pending token last
    num_prompt: int
    params: SamplingParams  # its seed tells which request it is

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.ids) - self.num_prompt


@dataclass(frozen=True)
class Visit:
    """One row of one production step, as its verifier saw it."""

    text: Text
    tokens: Tensor  # [N] int64
    parent: Tensor  # [N] int64
    law: Tensor  # [N] int64
    q: Tensor | None  # [N, V]
    p: Tensor  # [N, V]

    def nodes(self) -> list[int]:
        """The root and all nodes that are not padding."""
        return [0, *torch.nonzero(self.parent >= 0)[:, 0].tolist()]

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to node."""
        path: list[int] = []
        while node > 0:
            path.insert(0, node)
            node = int(self.parent[node])
        return path

    def context(self, node: int) -> list[int]:
        """The text that node ends."""
        return [*self.text.ids, *self.tokens[self.path(node)].tolist()]


@dataclass(frozen=True)
class Proposal:
    """What was proposed to one row in one step: enough to find a token's node again."""

    num_output: int
    tokens: list[int]
    parent: list[int]

    def node_before(self, emitted: Sequence[int], position: int) -> int:
        """The node after which output token ``position`` was drawn, given the output emitted."""
        node = 0
        for token in emitted[self.num_output : position]:
            children = [i for i in range(1, len(self.parent)) if self.parent[i] == node and self.tokens[i] == token]
            if not children:
                break
            node = children[0]
        return node


Observer = Callable[[Sequence[Text], Evidence], None]


class Watch:
    """Keeps some visits of every request, and hands every step to the observers."""

    def __init__(self, max_visits: int, seed: int, observers: Sequence[Observer] = ()) -> None:
        """max_visits of each request are kept: the last with guesses in a line, which sees what all steps before it left
        in the cache, then a uniform sample. seed is the certificate's own, apart from the noise of production."""
        self.max_visits = max_visits
        self.proposals: dict[int, list[Proposal]] = {}  # by seed of the request
        self._last: dict[int, Visit] = {}  # by seed too
        self._sample: dict[int, list[Visit]] = {}
        self._random = random.Random(derive_seed(seed, 1))
        self._observers = observers
        self._texts: list[Text] = []  # of the step's rows that were not verified yet
        self._seen: Evidence | None = None

    @property
    def visits(self) -> list[Visit]:
        """All that was kept, request by request."""
        return [
            visit
            for key, last in self._last.items()
            for visit in (last, *(other for other in self._sample.get(key, []) if other is not last))
        ]

    def proposed(self, context: Context) -> None:
        """Remember the texts of the step that begins."""
        history, params = context.history, context.processors.params
        self._texts = [
            Text(list(ids), start, row) for ids, start, row in zip(history.ids, history.num_prompt, params, strict=True)
        ]

    def verified(self, evidence: Evidence) -> None:
        """Look at what the verifier was given: once, however often it is asked. Large batches come in parts, in order."""
        if evidence is self._seen:
            return
        self._seen = evidence
        tree, p = evidence.tree, evidence.p
        texts, self._texts = self._texts[: len(p)], self._texts[len(p) :]
        room = max(1, MAX_BYTES // max(1, 2 * p[0].numel() * p.element_size()))
        tokens, parents = tree.tokens.tolist(), tree.parent.tolist()
        for row, text in enumerate(texts):
            key = int(text.params.seed or 0)
            known = self.proposals.setdefault(key, [])
            known.append(Proposal(text.num_output, tokens[row], parents[row]))
            late = key not in self._last or any(above > 0 for above in parents[row])
            sample = self._sample.setdefault(key, [])
            num_sampled = min(self.max_visits - 1, room // max(1, len(self._sample)) - 1)
            place = len(sample) if len(sample) < num_sampled else self._random.randrange(len(known))
            if not late and place >= num_sampled:
                continue
            q = None if tree.q is None else tree.q[row].clone()
            guesses, parent, law = (x[row].clone() for x in (tree.tokens, tree.parent, tree.law))
            visit = Visit(text, guesses, parent, law, q, p[row].clone())
            if late and (key in self._last or len(self._last) < room):
                self._last[key] = visit
            if place < num_sampled:
                sample[place : place + 1] = [visit]
        for observe in self._observers:
            observe(texts, evidence)

    def engine(self, engine: Engine, config: MethodConfig) -> Engine:
        """engine's target and method under another configuration, watched."""
        watched = dataclasses.replace(config)
        # ``verifier`` is a cached property: what stands here is what the engine asks for.
        watched.__dict__["verifier"] = Witness(config.load_verifier(engine.model), self)
        method = Watched(engine.method, self)
        return Engine(engine.model, engine.tokenizer, speculative=watched, method=method, width=engine.width)


class Watched(Method):
    """A method whose drafters tell a watch what text they were given."""

    def __init__(self, inner: Method, watch: Watch) -> None:
        self.name, self.capabilities = inner.name, inner.capabilities
        self.draft, self.exit_layer = inner.draft, inner.exit_layer
        self.inner, self.watch = inner, watch

    @property
    def taps(self) -> tuple[int, ...]:
        """The inner method's."""
        return self.inner.taps

    @property
    def foresees(self) -> bool:
        """The inner method's."""
        return self.inner.foresees

    @property
    def prompt_taps(self) -> tuple[int, ...]:
        """The inner method's."""
        return self.inner.prompt_taps

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        """The inner method's drafter, wrapped."""
        return WatchedDrafter(self.inner.open(context, capacity, target), self.watch)


class WatchedDrafter(Drafter):
    """Passes everything on."""

    def __init__(self, inner: Drafter, watch: Watch) -> None:
        self.inner, self.watch = inner, watch
        self.num_candidates = inner.num_candidates

    @property
    def chance(self) -> Tensor | None:
        """The inner drafter's."""
        return self.inner.chance

    def propose(self, context: Context, shape: Shape, draws: Draws, noise: Noise) -> TokenTree:
        """The inner drafter's tree."""
        self.watch.proposed(context)
        return self.inner.propose(context, shape, draws, noise)

    def read_prompt(self, chunk: PromptChunk) -> None:
        """Told on."""
        self.inner.read_prompt(chunk)

    def observe(self, commit: Commit) -> None:
        """Told on."""
        self.inner.observe(commit)

    def keep(self, rows: Sequence[int]) -> None:
        """Told on."""
        self.inner.keep(rows)


DECLARED = (
    "name", "exact", "reads", "draws", "summary", "invariant", "chains_only", "counts_children", "distance",
)  # fmt: skip
"""What a verifier says of itself."""


class Witness(Verifier):
    """A verifier that shows a watch what it is given, and answers as the inner one does."""

    def __init__(self, inner: Verifier, watch: Watch) -> None:
        self.inner, self.watch = inner, watch
        for declared in DECLARED:
            setattr(self, declared, getattr(inner, declared))

    @property
    def taps(self) -> tuple[int, ...]:
        """The inner rule's."""
        return self.inner.taps

    def settle(self, evidence: Evidence) -> tuple[Tensor, Tensor] | None:
        """The inner rule's."""
        self.watch.verified(evidence)
        return self.inner.settle(evidence)

    def stops(self, evidence: Evidence) -> Walk:
        """The inner rule's."""
        self.watch.verified(evidence)
        return self.inner.stops(evidence)

    def leftover(self, evidence: Evidence, walk: Walk, at: Tensor) -> Tensor:
        """The inner rule's."""
        return self.inner.leftover(evidence, walk, at)
