"""One decode step taken apart for people: the guesses, both models' laws, the race or the coin, what was kept and why.

All figures are those of a real step, read from its ``StepEvent``; nothing is recomputed with other numbers. ``number_game``
is the smallest case of shared noise: two people who guess a number from 1 to 10. ``analysis/words.py`` says it in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import Stream, exponentials, int64_seed, stream_keys
from foretell.core.tree import DrawnBy, TokenTree, depths
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent

SHOWN = 5
"""Tokens of a law that are shown, beside those that matter."""
TAIL = 256
MOST_STEPS = 24
RACES = ("coupled", "exact")
"""Rules by which the target draws its own token in a race."""


@dataclass(frozen=True)
class Runner:
    """A token after a place of the text."""

    token: int
    text: str
    p: float  # the target's probability
    q: float | None  # the drafter's; None where it has no probabilities
    time_p: float | None  # in the target's race: E / p, the least wins; None where there is no race or p = 0
    time_q: float | None  # in the drafter's race under the same noise


@dataclass(frozen=True)
class Guess:
    """One node of the tree of guesses."""

    node: int
    parent: int
    text: str
    how: str  # how it was drawn: "fixed", "iid", "coupled", ...
    p: float  # of this token after the parent, by the target
    q: float | None
    reach: float  # the chance that the rule keeps it, before anything is drawn
    kept: bool


@dataclass(frozen=True)
class Place:
    """A place of the text where the walk came to: what could follow, and what did."""

    node: int
    after: str  # the text of the node
    runners: list[Runner]  # by p, the most probable first
    guesses: list[str]
    guess_tokens: list[int]  # theirs: several tokens can have one text, such as the bytes of what is no character
    winner: str  # the token that the target took here
    winner_token: int
    was_guessed: bool
    accept: float | None  # chance min(1, p / q) of the first guess, where that is the rule


@dataclass(frozen=True)
class ExplainedStep:
    """One step."""

    number: int  # from 1
    text: str  # before the step, with the pending token: its last TAIL tokens
    method: str
    verifier: str
    exact: bool  # whether the rule keeps the target's law
    temperature: float
    guesses: list[Guess]
    places: list[Place]
    num_kept: int
    emitted: list[str]
    stop_uniform: float  # the one random number by which rules with a coin choose where to stop
    seconds_draft: float
    seconds_target: float
    seconds_rest: float

    @property
    def is_race(self) -> bool:
        """Whether the rule lets the target draw its own token at every place."""
        return self.verifier in RACES


@dataclass(frozen=True)
class Game:
    """Rounds of guessing a number from 1 to 10."""

    rounds: int
    shared: float  # share of rounds in which both have one number, by one noise
    independent: float  # ... each by its own
    times: list[float]  # of the first round: when each number arrives
    winner: int


def number_game(rounds: int = 100_000, seed: int = 0) -> Game:
    """Two people draw a number from 1 to 10, each equally likely: by one noise, and each by their own."""
    law = torch.full((10,), 0.1)
    positions, index = torch.arange(rounds), torch.tensor(0)

    def noise(person: int) -> Tensor:
        return exponentials(
            stream_keys(torch.tensor(int64_seed(seed + 1 + person)), positions, Stream.COUPLED, index), 10
        )

    first, second = noise(0), noise(1)
    times = first / law
    mine, its, other = times.argmin(-1), (first / law).argmin(-1), (second / law).argmin(-1)
    return Game(
        rounds,
        float((mine == its).double().mean()),
        float((mine == other).double().mean()),
        [float(time) for time in times[0]],
        int(mine[0]) + 1,
    )


def explain(
    engine: Engine,
    prompt: str | Sequence[int],
    *,
    temperature: float = 0.7,
    seed: int = 0,
    step: int | None = None,
    prediction: str | None = None,
) -> ExplainedStep:
    """Decode with the engine's method and take one step apart.

    step: its number, from 1; None takes of the first MOST_STEPS a likely one in which some guesses were kept and some were
    not, or else one with guesses. Raises ConfigError where the method is "none" or the text ends before that step.
    """
    if not engine.speculative.guesses:
        raise ConfigError(
            "method 'none' guesses nothing, so there is nothing to explain: name a method, e.g. draft_model"
        )
    most = max(MOST_STEPS, step or 0)
    watch = Watch(engine.tokenizer, temperature, most=most)
    observed = engine.with_method(engine.speculative, method=engine.method, speculation="on", drafter_errors="raise")
    observed.observes_draft_logits = True
    observed.observers.append(lambda event: watch(event, 0))
    longest = most * (engine.speculative.num_speculative_tokens + 1)
    observed.generate(prompt, temperature=temperature, seed=seed, max_new_tokens=longest, prediction=prediction)
    if step is not None:
        if not 1 <= step <= len(watch.steps):
            raise ConfigError(f"step = {step} is not there: the text ended after {len(watch.steps)} steps")
        return watch.steps[step - 1]
    return watch.steps[chosen(watch.steps)]


class Watch:
    """Takes the first steps of one request apart while it is decoded: an observer, with the request's row.

    A step costs the thread that decodes 2 to 8 ms with a vocabulary of 49,152 and five guesses: the laws at the kept places
    are sorted, raced and put into texts.
    """

    def __init__(self, tokenizer: Any, temperature: float, *, most: int) -> None:
        """most: steps that are taken apart; later ones cost nothing."""
        self.steps: list[ExplainedStep] = []
        self._tokenizer, self._temperature, self._most = tokenizer, temperature, most

    def __call__(self, event: StepEvent, index: int) -> None:
        """A step of row ``index``. A row that failed in it is left out."""
        if len(self.steps) < self._most and event.rows[index].error is None:
            self.steps.append(_explained(event, index, self._tokenizer, self._temperature, len(self.steps) + 1))


def chosen(steps: Sequence[ExplainedStep]) -> int:
    """Of some steps, at least one, the index of the one to show first: a likely and early one in which some guesses were
    kept and some were not, else the first with guesses, else the first."""
    mixed = [index for index, one in enumerate(steps) if 0 < one.num_kept < len(one.guesses)]
    if mixed:
        return max(mixed, key=lambda index: _instructive(steps[index]))
    return next((index for index, one in enumerate(steps) if one.guesses), 0)


def _instructive(step: ExplainedStep) -> float:
    """How well a step shows the rule: it was likely to go so, a few guesses were kept, and little text is before it."""
    kept = [guess.p for guess in step.guesses if guess.kept]
    return min(kept) + 0.2 * min(len(kept), 3) - 0.05 * step.number


def _explained(event: StepEvent, index: int, tokenizer: Any, temperature: float, number: int) -> ExplainedStep:
    """A step of one row."""
    evidence, commit = event.evidence.rows(index, index + 1), event.commit
    part = next(one for one in event.parts if one.start <= index < one.stop)
    tree, p = evidence.tree, evidence.p[0]  # [N, V]
    noise = evidence.noise
    assert noise is not None
    parents, tokens, path = tree.parent[0].tolist(), tree.tokens[0].tolist(), commit.path[index]
    depth = depths(tree.parent)[0].tolist()
    kept = _kept(path, commit.tokens[index], parents, tokens, ended=bool(commit.ended and commit.ended[index]))
    laws = _drafted(event, index, tree.q, parents, temperature)
    rule = part.verifier.name
    keys = noise.coupled_keys(max(depth) + 1)[0]

    def text(token: int) -> str:
        return str(token) if tokenizer is None else tokenizer.decode([token])

    reach = _reach(part.verifier.stops(evidence).stops[0], parents)
    guesses = [
        Guess(
            node, parent, text(tokens[node]), DrawnBy(int(tree.drawn_by[0, node])).name.lower().replace("_", " "),
            float(p[parent, tokens[node]]), _at(laws.get(parent), tokens[node]), reach[node], node in kept,
        )
        for node, parent in enumerate(parents)
        if node and parent >= 0
    ]  # fmt: skip
    places = []
    for number_of, (node, taken) in enumerate(zip(path, commit.tokens[index], strict=False), start=1):
        children = [child for child in range(len(parents)) if child and parents[child] == node]
        law, target = laws.get(node), p[node].double()
        likely = [token for token in torch.topk(target, min(SHOWN, len(target))).indices.tolist() if target[token] > 0]
        asked = list(dict.fromkeys([*likely, taken, *(tokens[child] for child in children)]))
        times = exponentials(keys[depth[node]], len(target)).double() if rule in RACES else None
        runners = [
            Runner(
                token, text(token), float(target[token]), _at(law, token), _time(times, target, token),
                _time(times, law, token),
            )
            for token in sorted(asked, key=lambda token: -float(target[token]))
        ]  # fmt: skip
        places.append(
            Place(
                node, text(tokens[node]), runners, [text(tokens[child]) for child in children],
                [tokens[child] for child in children], text(taken), taken,
                number_of < len(kept),
                _coin(tree, children[0], target, law) if rule == "rejection" and children else None,
            )
        )  # fmt: skip
    known = event.text(index)[-TAIL:]
    before = "".join(map(text, known)) if tokenizer is None else tokenizer.decode(known)
    return ExplainedStep(
        number, before, part.method, rule, part.verifier.exact, temperature, guesses, places, len(kept) - 1,
        [text(token) for token in commit.tokens[index]], float(noise.stop()[0]), event.seconds_draft,
        event.seconds_target, event.seconds_rest,
    )  # fmt: skip


def _kept(
    path: Sequence[int], taken: Sequence[int], parents: Sequence[int], tokens: Sequence[int], *, ended: bool
) -> list[int]:
    """The kept nodes: the path, and behind it a guess with which the text ended, which a commit leaves out."""
    last = path[-1]
    same = [node for node, parent in enumerate(parents) if node and parent == last and tokens[node] == taken[-1]]
    return [*path, *(same[:1] if ended and len(taken) == len(path) else [])]


def _coin(tree: TokenTree, child: int, p: Tensor, q: Tensor | None) -> float:
    """The chance that rejection accepts a first child."""
    token = int(tree.tokens[0, child])
    chance = None if int(tree.drawn_by[0, child]) == DrawnBy.FIXED else _at(q, token)
    return min(1.0, float(p[token]) / chance) if chance else float(p[token])


def _drafted(
    event: StepEvent, index: int, q: Tensor | None, parents: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Node -> the drafter's law after it, [V] float64, where it is known: what the children were drawn from, or for chains
    of a row that no other kind of row shares the step with, what the drafter's logits say."""
    if q is not None:
        inner = sorted({parent for parent in parents if parent >= 0})
        return {node: q[0, node].double() for node in inner if float(q[0, node].sum()) > 0}
    if len(event.parts) != 1 or any(parent not in (node - 1, -1) for node, parent in enumerate(parents)):
        return {}
    logits = [row for made in event.draft_logits for row in made[index].unbind(0)]
    size = event.evidence.p.shape[-1]
    scale = temperature if temperature > 0 else 1.0
    return {node: torch.softmax(row[:size].double() / scale, -1) for node, row in enumerate(logits)}


def _at(law: Tensor | None, token: int) -> float | None:
    return None if law is None or token >= len(law) else float(law[token])


def _time(times: Tensor | None, law: Tensor | None, token: int) -> float | None:
    if times is None or law is None or token >= len(law) or float(law[token]) <= 0:
        return None
    return float(times[token] / law[token])


def _reach(stops: Tensor, parents: list[int]) -> list[float]:
    """Of each node the chance that the walk comes to it: that it stops there or beyond."""
    reach = [float(share) for share in stops]
    for node in range(len(parents) - 1, 0, -1):
        if parents[node] >= 0:
            reach[parents[node]] += reach[node]
    return reach
