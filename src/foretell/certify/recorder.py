"""Record production decoding: every proposed tree, and the distributions that its verifier read.

A ``VisitRecorder`` is an observer of the engine's steps (``StepEvent``): it changes nothing and draws nothing.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.errors import DrafterError
from foretell.core.noise import derive_seed
from foretell.core.params import SamplingParams
from foretell.core.tree import DrawnBy, TokenTree
from foretell.draft.config import MethodConfig
from foretell.engine.config import METHODS
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent
from foretell.verify.base import Evidence
from foretell.verify.contract import NEAR

MAX_BYTES = 2**28
"""Most bytes of distributions that a recorder keeps: with a vocabulary of 150,000 tokens a tree's rows are tens of
megabytes."""


@dataclass(frozen=True)
class Text:
    """One row's text when a tree was proposed for it."""

    ids: list[int]  # prompt and output, the pending token last
    num_prompt: int
    params: SamplingParams  # its seed identifies the request

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.ids) - self.num_prompt

    @property
    def where(self) -> str:
        """The place that it has come to, for people."""
        return f"prompt of {self.num_prompt} tokens, output position {self.num_output}"


@dataclass(frozen=True)
class Visit:
    """One row of one production step, as its verifier saw it."""

    text: Text
    tokens: Tensor  # [N] int64
    parent: Tensor  # [N] int64
    drawn_by: Tensor  # [N] int64
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

    def where(self, node: int) -> str:
        """A node, for people."""
        text, path = self.text, self.tokens[self.path(node)].tolist()
        return f"{text.where}, node {node} (path {path}), temperature {text.params.temperature:g}"

    def context(self, node: int) -> list[int]:
        """The text that node ends."""
        return [*self.text.ids, *self.tokens[self.path(node)].tolist()]


def problem_of(tree: TokenTree) -> str:
    """What a proposal is that it must not be; "": nothing. A verifier takes draws from what is no distribution for fixed
    guesses, so the text stays right, and the drafter's fault unseen."""
    try:
        tree.check()
    except RuntimeError as error:
        return str(error)
    if tree.q is None:
        return ""
    drawn = (tree.drawn_by == DrawnBy.IID) | (tree.drawn_by == DrawnBy.WITHOUT_REPLACEMENT)
    row, node = drawn.nonzero(as_tuple=True)
    q = tree.q[row, tree.parent[row, node]]  # [n, V] what each drawn node came from
    least, sums = float(q.min()), q.sum(-1)
    if not least >= 0:
        return f"q, from which a guess was drawn, holds {'NaN' if least != least else f'{least:.6g}'}"
    if bool(((sums - 1).abs() > NEAR).any()):
        return f"q, from which a guess was drawn, sums to {float(sums[(sums - 1).abs().argmax()]):.6g}; expected 1"
    if bool((q.gather(1, tree.tokens[row, node][:, None]) == 0).any()):
        return "q gives a guess that was drawn from it no chance"
    return ""


def unwatched(engine: Engine, config: MethodConfig) -> Engine:
    """engine's target and method under another configuration."""
    return engine.with_method(config, method=engine.method, speculation="on", drafter_errors="raise")


Listener = Callable[[Sequence[Text], Evidence], None]
"""Called with the texts before a step, and the verifier's input."""


class VisitRecorder:
    """Keeps some visits of every request, and passes every step to the listeners."""

    def __init__(self, max_visits: int, seed: int, listeners: Sequence[Listener] = ()) -> None:
        """max_visits of each request are kept: the last with guesses in a line, which sees what all steps before it left
        in the cache, then a uniform sample. seed is the certificate's own, apart from the noise of production."""
        self.max_visits = max_visits
        self._num_steps = Counter[int]()  # by seed of the request
        self.method = "none"  # that is watched
        self._last: dict[int, Visit] = {}  # by seed too
        self._sample: dict[int, list[Visit]] = {}
        self._random = random.Random(derive_seed(seed, 1))
        self._listeners = listeners

    @property
    def visits(self) -> list[Visit]:
        """All that was kept, request by request."""
        return [
            visit
            for key, last in self._last.items()
            for visit in (last, *(other for other in self._sample.get(key, []) if other is not last))
        ]

    def __call__(self, event: StepEvent) -> None:
        """Look at one step."""
        evidence = event.evidence
        tree, p = evidence.tree, evidence.p
        if problem := problem_of(tree):
            raise DrafterError(
                f"the drafter of {METHODS.called(self.method)} breaks the contract of drafters: {problem}"
            )
        texts = [Text(event.text(index), len(row.prompt_ids), row.params) for index, row in enumerate(event.rows)]
        room = max(1, MAX_BYTES // max(1, 2 * p[0].numel() * p.element_size()))
        parents = tree.parent.tolist()
        for row, text in enumerate(texts):
            key = int(text.params.seed or 0)
            self._num_steps[key] += 1
            late = key not in self._last or any(above > 0 for above in parents[row])
            sample = self._sample.setdefault(key, [])
            num_sampled = min(self.max_visits - 1, room // max(1, len(self._sample)) - 1)
            place = len(sample) if len(sample) < num_sampled else self._random.randrange(self._num_steps[key])
            if not late and place >= num_sampled:
                continue
            q = None if tree.q is None else tree.q[row].clone()
            guesses, parent, label = (x[row].clone() for x in (tree.tokens, tree.parent, tree.drawn_by))
            visit = Visit(text, guesses, parent, label, q, p[row].clone())
            if late and (key in self._last or len(self._last) < room):
                self._last[key] = visit
            if place < num_sampled:
                sample[place : place + 1] = [visit]
        for listen in self._listeners:
            listen(texts, evidence)

    def engine(self, engine: Engine, config: MethodConfig) -> Engine:
        """engine's target and method under another configuration, watched."""
        self.method = config.method
        recorded = unwatched(engine, config)
        recorded.observers.append(self)
        return recorded
