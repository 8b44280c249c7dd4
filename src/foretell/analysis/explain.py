"""One decode step taken apart for people: the guesses, both models' laws, the race or the coin, what was kept and why.

All figures are those of a real step, read from its ``StepEvent``; nothing is recomputed with other numbers. ``number_game``
is the smallest case of shared noise: two people who guess a number from 1 to 10.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import Stream, exponentials, stream_keys
from foretell.core.tree import DrawnBy, depths
from foretell.engine.engine import Engine
from foretell.engine.event import StepEvent

SHOWN = 5
"""Tokens of a law that are shown, beside those that matter."""
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
    winner: str  # the token that the target took here
    was_guessed: bool
    accept: float | None  # chance min(1, p / q) of the first guess, where that is the rule


@dataclass(frozen=True)
class ExplainedStep:
    """One step."""

    number: int  # from 1
    text: str  # before the step, with the pending token
    method: str
    verifier: str
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
        return exponentials(stream_keys(torch.tensor(seed + 1 + person), positions, Stream.COUPLED, index), 10)

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
    prompt: str,
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
    found: list[ExplainedStep] = []
    observed = engine.with_method(engine.speculative, method=engine.method, speculation="on")
    observed.observes_draft_logits = True
    observed.observers.append(
        lambda event: (
            found.append(_explained(event, engine, temperature, len(found) + 1))
            if len(found) < max(MOST_STEPS, step or 0)
            else None
        )
    )
    most = max(MOST_STEPS, step or 0) * (engine.speculative.num_speculative_tokens + 1)
    observed.generate(prompt, temperature=temperature, seed=seed, max_new_tokens=most, prediction=prediction)
    if step is not None:
        if not 1 <= step <= len(found):
            raise ConfigError(f"step = {step} is not there: the text ended after {len(found)} steps")
        return found[step - 1]
    mixed = [one for one in found if 0 < one.num_kept < len(one.guesses)]
    guessed = [one for one in found if one.guesses]
    return max(mixed, key=_instructive) if mixed else next(iter([*guessed, *found]))


def _instructive(step: ExplainedStep) -> float:
    """How well a step shows the rule: it was likely to go so, and a few guesses were kept."""
    kept = [guess.p for guess in step.guesses if guess.kept]
    return min(kept) + 0.2 * min(len(kept), 3)


def _explained(event: StepEvent, engine: Engine, temperature: float, number: int) -> ExplainedStep:
    """A step of one request."""
    evidence, commit, part = event.evidence, event.commit, event.parts[0]
    tree, p = evidence.tree, evidence.p[0].double()  # [N, V]
    noise = evidence.noise
    assert noise is not None
    parents, tokens, path = tree.parent[0].tolist(), tree.tokens[0].tolist(), commit.path[0]
    depth = depths(tree.parent)[0].tolist()
    laws = _drafted(event, temperature)
    walk = part.verifier.stops(evidence).stops[0]
    reach = _reach(walk, parents)
    rule = part.verifier.name
    race = rule in RACES
    keys = noise.coupled_keys(max(depth) + 1)[0]

    def text(token: int) -> str:
        return str(token) if engine.tokenizer is None else engine.tokenizer.decode([token])

    guesses = [
        Guess(
            node, parent, text(tokens[node]), DrawnBy(int(tree.drawn_by[0, node])).name.lower().replace("_", " "),
            float(p[parent, tokens[node]]), _at(laws.get(parent), tokens[node]), reach[node], node in path,
        )
        for node, parent in enumerate(parents)
        if node and parent >= 0
    ]  # fmt: skip
    places = []
    for node, taken in zip(path, commit.tokens[0], strict=False):
        children = [child for child in range(len(parents)) if child and parents[child] == node]
        law = laws.get(node)
        likely = torch.topk(p[node], SHOWN).indices.tolist()
        asked = list(dict.fromkeys([*likely, taken, *(tokens[child] for child in children)]))
        times = exponentials(keys[depth[node]], p.shape[-1]).double() if race else None
        runners = [
            Runner(
                token, text(token), float(p[node, token]), _at(law, token), _time(times, p[node], token),
                _time(times, law, token),
            )
            for token in sorted(asked, key=lambda token: -float(p[node, token]))
        ]  # fmt: skip
        first = children[0] if children else None
        chance = _at(law, tokens[first]) if first is not None else None
        coin = None
        if rule == "rejection" and first is not None:
            drawn = int(tree.drawn_by[0, first]) != DrawnBy.FIXED and chance
            target = float(p[node, tokens[first]])
            coin = min(1.0, target / chance) if drawn and chance else target
        places.append(
            Place(
                node, text(tokens[node]), runners, [text(tokens[child]) for child in children], text(taken),
                any(tokens[child] == taken for child in children), coin,
            )
        )  # fmt: skip
    known = event.text(0)
    before = "".join(map(text, known)) if engine.tokenizer is None else engine.tokenizer.decode(known)
    return ExplainedStep(
        number, before, part.method, rule, temperature, guesses, places, len(path) - 1,
        [text(token) for token in commit.tokens[0]], float(noise.stop()[0]), event.seconds_draft,
        event.seconds_target, event.seconds_rest,
    )  # fmt: skip


def _drafted(event: StepEvent, temperature: float) -> dict[int, Tensor]:
    """Node -> the drafter's law after it, [V] float64, where it is known: what the children were drawn from, or for chains
    what the drafter's logits say."""
    tree = event.evidence.tree
    parents = tree.parent[0].tolist()
    if tree.q is not None:
        rows = tree.q[0].double()
        return {node: rows[node] for node in set(parents) if node >= 0 and float(rows[node].sum()) > 0}
    logits = [row for made in event.draft_logits for row in made[0].unbind(0)]
    if not all(parent == node - 1 for node, parent in enumerate(parents)):
        return {}
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
