"""Looking on while an engine decodes: of every guess behind kept text, whether it was kept and how likely that was.

``look_on`` listens at the public seams, by standing in for a few methods of one engine's drafter and verifier: nothing is
drawn and nothing is changed, the step that runs is the engine's own.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.draft.base import Commit, Context, Drafter, Method
from foretoken.draft.shape import Shape
from foretoken.engine.engine import Engine
from foretoken.engine.method import MethodConfig
from foretoken.theory.acceptance import single_draft
from foretoken.theory.coupling import gumbel
from foretoken.verify.law import Evidence


@dataclass(frozen=True)
class Laws:
    """What p and q say of one guess before it is drawn. q: at temperature 0 the drafter's law at temperature 1."""

    confidence: float  # the largest probability of q
    agrees: bool  # whether both have their largest probability at one token
    first: float  # p of the drafter's most probable token: at temperature 0 that is ``agrees``
    rejection: float  # sum of min(p, q) = 1 - TV; at temperature 0 ``agrees``
    coupled: float  # under shared noise; at temperature 0 ``agrees``


@dataclass(frozen=True)
class Slot:
    """One place for a guess whose path was kept."""

    made: bool  # whether the drafter made a guess
    accepted: bool
    laws: Laws | None  # None where nothing was guessed, or q is not known


@dataclass(frozen=True)
class Step:
    """One row of one step. ``slots`` ends with the first guess that was not kept, or with the row's room."""

    text: int  # which prompt
    position: int  # output tokens before the step
    num_tokens: int  # emitted
    num_guesses: int
    room: int  # guesses in a line that the shape and the row's limit allowed
    slots: list[Slot]


@dataclass
class Record:
    """All steps that were looked at; prompts must be decoded one at a time, ``text`` set before each."""

    steps: list[Step] = field(default_factory=list)
    text: int = 0
    _room: int = 0
    _position: int = 0
    _evidence: Evidence | None = None
    _logits: list[Tensor] = field(default_factory=list)  # [1, V'] after the root and each node fed, as they were grown

    def opened(self, drafter: Drafter, *_: Any) -> None:
        """Listen to a fresh drafter. An expander's logits are the only trace of q at temperature 0."""
        self._logits = []
        if drafter.expands:
            _listen(drafter, "begin", lambda out, *_: self._grew(out[0]))
            _listen(drafter, "logits", lambda out, *_: self._grew(out))
        _listen(drafter, "propose", self._proposed)
        _listen(drafter, "observe", self._observed)

    def verified(self, _: object, evidence: Evidence) -> None:
        """Keep the laws until the commit says which nodes were kept."""
        self._evidence = evidence

    def _grew(self, logits: Tensor) -> None:
        self._logits += logits.detach().clone().unbind(1)  # a copy: buffers may be used again

    def _proposed(self, _: object, context: Context, shape: Shape, *rest: object) -> None:
        assert context.num_rows == 1, "prompts are looked at one at a time"
        self._room = min(shape.depth, context.room[0])
        self._position = len(context.history.ids[0]) - context.history.num_prompt[0]

    def _observed(self, _: object, commit: Commit) -> None:
        evidence, logits = self._evidence, self._logits
        self._evidence, self._logits = None, []
        assert evidence is not None
        parent, guesses = commit.tree.parent[0].tolist(), commit.tree.tokens[0].tolist()
        slots = []
        for node, token in list(zip(commit.path[0], commit.tokens[0], strict=True))[: self._room]:
            children = [child for child in range(node + 1, len(parent)) if parent[child] == node]
            # A rule that rejects a guess never emits its token in its place, so the token tells what was kept.
            kept = any(guesses[child] == token for child in children)
            laws = _laws(evidence, node, guesses[children[0]], logits) if children else None
            slots.append(Slot(bool(children), kept, laws))
        num_guesses = sum(above >= 0 for above in parent)
        num_tokens = len(commit.tokens[0])
        self.steps.append(Step(self.text, self._position, num_tokens, num_guesses, self._room, slots))


def _laws(evidence: Evidence, node: int, guess: int, logits: Sequence[Tensor]) -> Laws | None:
    """Of the guess behind a node of a chain."""
    p = evidence.p[:, node]  # [1, V]
    if evidence.tree.q is not None:
        q = evidence.tree.q[:, node]
        rejection, coupled = float(single_draft(p, q)), float(gumbel(p, q))
    elif node < len(logits) and int(logits[node][0, : p.shape[1]].argmax()) == guess:
        q = torch.softmax(logits[node][:, : p.shape[1]].float(), -1)
        rejection = coupled = float(p[0, guess])
    else:  # no law, or one that cannot be told from what the drafter computed
        return None
    confidence, first = (float(x) for x in q[0].max(0))
    token = int(first)
    return Laws(confidence, int(p[0].argmax()) == token, float(p[0, token]), rejection, coupled)


def look_on(engine: Engine, config: MethodConfig, method: Method) -> tuple[Engine, Record]:
    """engine's target decoding by config and method, and the record of what it will do."""
    record = Record()
    watched = copy.copy(method)
    _listen(watched, "open", record.opened)
    made = Engine(engine.model, engine.tokenizer, speculative=config, method=watched, width=engine.width)
    made.verifier = copy.copy(made.verifier)
    for question in ("settle", "stops"):
        _listen(made.verifier, question, record.verified)
    return made, record


def _listen(thing: object, name: str, hear: Callable[..., None]) -> None:
    """Have hear(result, *arguments) called after every call of one method of this one object."""
    method = getattr(thing, name)

    def heard(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        hear(result, *args)
        return result

    object.__setattr__(thing, name, heard)  # verifiers are frozen
