"""Record an engine's guesses: for every guess after kept text, whether it was kept and its probability of being kept.

``observe`` observes an engine's steps (``StepEvent``): nothing is drawn and nothing is changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.draft.base import Method
from foretell.draft.config import MethodConfig
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent
from foretell.theory.acceptance import gumbel, single_draft
from foretell.verify.base import Evidence


@dataclass(frozen=True)
class Agreement:
    """Statistics of p and q for one guess before it is drawn. q: at temperature 0 the drafter's distribution at temperature
    1."""

    confidence: float  # the largest probability of q
    agrees: bool  # whether both have their largest probability at one token
    first: float  # p of the drafter's most probable token: at temperature 0 that is ``agrees``
    rejection: float  # sum of min(p, q) = 1 - TV; at temperature 0 ``agrees``
    coupled: float  # under shared noise; at temperature 0 ``agrees``


RULES: dict[str, Callable[[Agreement], float]] = {
    "rejection": lambda probs: probs.rejection,
    "coupled": lambda probs: probs.coupled,
    "exact": lambda probs: probs.first,
}
"""Rules whose chance to accept a guess, before it is drawn, is known from p and q; ``exact`` for the argmax of q."""


@dataclass(frozen=True)
class GuessSlot:
    """One place for a guess whose path was kept."""

    made: bool  # whether the drafter made a guess
    accepted: bool
    agreement: Agreement | None  # None where nothing was guessed, or q is not known


@dataclass(frozen=True)
class ObservedStep:
    """One row of one step. ``slots`` ends with the first guess that was not kept, or with the row's room."""

    text: int  # which prompt
    position: int  # output tokens before the step
    num_tokens: int  # emitted
    num_guesses: int
    depth_limit: int  # guesses in a line that the shape and the row's limit allowed
    slots: list[GuessSlot]
    is_light: bool = False  # see ``StepEvent``


@dataclass
class GuessRecord:
    """All recorded steps; prompts must be decoded one at a time, ``text`` set before each."""

    steps: list[ObservedStep] = field(default_factory=list)
    text: int = 0

    def __call__(self, event: StepEvent) -> None:
        """Look at one step."""
        assert len(event.rows) == 1, "prompts must be decoded one at a time"
        commit, (part,) = event.commit, event.parts
        depth_limit = min(part.shape.depth, event.depth_limit[0])
        # An expander's logits are the only trace of q at temperature 0: one [1, V'] after the root and each node it read.
        logits = [node for made in event.draft_logits for node in made.unbind(1)]
        parent, guesses = commit.tree.parent[0].tolist(), commit.tree.tokens[0].tolist()
        slots = []
        for node, token in list(zip(commit.path[0], commit.tokens[0], strict=True))[:depth_limit]:
            children = [child for child in range(node + 1, len(parent)) if parent[child] == node]
            # A rule that rejects a guess never emits its token in its place, so the token shows what was kept.
            kept = any(guesses[child] == token for child in children)
            probs = _agreement(event.evidence, node, guesses[children[0]], logits) if children else None
            slots.append(GuessSlot(bool(children), kept, probs))
        position = len(event.rows[0].token_ids) - len(commit.tokens[0])
        num_guesses = sum(above >= 0 for above in parent)
        self.steps.append(
            ObservedStep(self.text, position, len(commit.tokens[0]), num_guesses, depth_limit, slots, event.is_light)
        )


def _agreement(evidence: Evidence, node: int, guess: int, logits: Sequence[Tensor]) -> Agreement | None:
    """Of the guess after a node of a chain."""
    p = evidence.p[:, node]  # [1, V]
    if evidence.tree.q is not None:
        q = evidence.tree.q[:, node]
        rejection, coupled = float(single_draft(p, q)), float(gumbel(p, q))
    elif node < len(logits) and int(logits[node][0, : p.shape[1]].argmax()) == guess:
        q = torch.softmax(logits[node][:, : p.shape[1]].float(), -1)
        rejection = coupled = float(p[0, guess])
    else:  # no distribution, or one that cannot be derived from the drafter's logits
        return None
    confidence, first = (float(x) for x in q[0].max(0))
    token = int(first)
    return Agreement(confidence, int(p[0].argmax()) == token, float(p[0, token]), rejection, coupled)


def observe(engine: Engine, config: MethodConfig, method: Method) -> tuple[Engine, GuessRecord]:
    """The engine's target decoding by config and method, and the record that its steps will fill."""
    record = GuessRecord()
    made = Engine(
        engine.model, engine.tokenizer, speculative=config, method=method, width=engine.width, drafter_errors="raise"
    )
    made.observers.append(record)
    made.observes_draft_logits = True
    return made, record
