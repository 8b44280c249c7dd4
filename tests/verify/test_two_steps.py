"""Two steps in a row under the production keying of noise, enumerated exactly.

Every key that production code asks for is one independent uniform, held as an interval. A pass runs the whole program
on the midpoints; wherever a draw's cumulative distribution cuts an interval, that outcome splits in two or three, until
no cut is left. A key that comes back, in this step or the next, is the same variable: reuse shows as a wrong joint
distribution.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.core import noise as noise_module
from foretell.core.noise import Noise, Stream, stream_keys, uniforms
from foretell.core.tree import DrawnBy, TokenTree
from foretell.draft import base as draft_module
from foretell.draft.base import choose
from foretell.kernels.small import invert_cdf
from foretell.verify import VERIFIERS, Block, Coupled, Evidence, Rejection, Traversal, Verifier, draw, drawing
from tests.verify.enumerate import Case, Tables, draw_probs, tables, target_joint
from tests.verify.test_exact import cells

F, I, W, C = DrawnBy.FIXED, DrawnBy.IID, DrawnBy.WITHOUT_REPLACEMENT, DrawnBy.COUPLED  # noqa: E741
ROOT = 10  # position of the first step's root
EMPTY = 1e-14  # shorter intervals are rounding


class KeyedTensor(Tensor):
    """A tensor that remembers which keys it was made from."""

    keys: Tensor


@dataclass
class Call:
    """One draw by inverse CDF: the keys of its uniforms [R], where its distribution cuts [R, V] the unit interval."""

    keys: list[int]
    cuts: np.ndarray


@dataclass
class Watch:
    """What production code asked for during one run."""

    intervals: list[dict[int, tuple[float, float]]]  # of each row, by key
    calls: list[Call] = field(default_factory=list)
    asked: list[tuple[Stream, list[int]]] = field(default_factory=list)  # in order: stream, keys [R]

    def uniforms(self, keys: Tensor) -> Tensor:
        """Midpoints of what is left of each key's interval."""
        held = [row.get(key, (0.0, 1.0)) for row, key in zip(self.intervals, keys.tolist(), strict=True)]
        out = torch.tensor([(low + high) / 2 for low, high in held], dtype=torch.float64).as_subclass(KeyedTensor)
        out.keys = keys
        return out

    def invert_cdf(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """The production draw, watched."""
        mass = probs.double().cumsum(1)
        self.calls.append(Call(uniform.keys.tolist(), (mass / mass[:, -1:]).numpy()))
        return invert_cdf(probs, uniform.as_subclass(Tensor))

    def stream_keys(self, seeds: Tensor, positions: Tensor, stream: Stream, index: Tensor | int = 0) -> Tensor:
        """The production keys, watched."""
        keys = stream_keys(seeds, positions, stream, index)
        if stream != Stream.COUPLED:
            self.asked.append((stream, keys.tolist()))
        return keys


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Let production code run on the watch's intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_module, "uniforms", watch.uniforms)
        patch.setattr(noise_module, "stream_keys", watch.stream_keys)
        patch.setattr(drawing, "invert_cdf", watch.invert_cdf)
        patch.setattr(draft_module, "invert_cdf", watch.invert_cdf)
        yield


@dataclass
class State:
    """R rows of emitted text: how many tokens, and which, as a number in base V."""

    count: Tensor
    code: Tensor


def step(case: Case, distributions: Tables, verifier: Verifier, state: State, make_noise: type[Noise]) -> State:
    """One step by production functions: draw, verify, draw from what is left."""
    size, num_rows = distributions.vocab_size, len(state.count)
    flat_p, flat_q = torch.cat(distributions.p), torch.cat(distributions.q)
    first = torch.tensor([(size**d - 1) // (size - 1) for d in range(len(distributions.p))])  # contexts shorter than d
    noise = make_noise(torch.zeros(num_rows, dtype=torch.int64), ROOT + state.count)
    depth, code = case.depths, [state.code]
    tokens = [torch.zeros(num_rows, dtype=torch.int64)]
    q = torch.zeros(num_rows, len(case.parent), size, dtype=torch.float64)
    for node in range(1, len(case.parent)):
        parent, how = case.parent[node], case.labels[node]
        given = flat_q[first[state.count + depth[parent]] + code[parent]]
        probs = draw_probs(case, node, how, given, torch.stack(tokens, 1))
        drawn_as = F if how == F else (C if how == C else I)
        tokens.append(choose(probs, drawn_as, noise, depth=depth[parent], node=node))
        code.append(code[parent] * size + tokens[-1])
        if how in (I, W):
            q[:, parent] = given
    p = torch.stack([flat_p[first[state.count + depth[node]] + code[node]] for node in range(len(case.parent))], 1)
    tree = TokenTree(
        torch.stack(tokens, 1),
        torch.tensor(case.parent).expand(num_rows, -1),
        torch.tensor([int(label) for label in case.labels]).expand(num_rows, -1),
        q if any(label in (I, W) for label in case.labels) else None,
    )
    verdict = draw(verifier, Evidence(tree, p, noise))
    assert bool(verdict.sound.all())
    last = verdict.path.gather(1, verdict.count[:, None] - 1)
    ended = torch.stack(code, 1).gather(1, last)[:, 0]
    return State(state.count + verdict.count, ended * size + verdict.bonus)


def joint_of(states: list[tuple[State, Tensor]], distributions: Tables, horizon: int) -> Tensor:
    """[V ** horizon] the distribution of the first tokens, continued by p where two steps gave fewer."""
    size = distributions.vocab_size
    sums = [torch.zeros(size**d, dtype=torch.float64) for d in range(horizon + 1)]
    for state, weight in states:
        for count, code, mass in zip(state.count.tolist(), state.code.tolist(), weight.tolist(), strict=True):
            sums[min(count, horizon)][code // size ** max(count - horizon, 0)] += mass
    joint = sums[0]
    for d in range(1, horizon + 1):
        joint = (joint[:, None] * distributions.p[d - 1]).flatten() + sums[d]
    return joint


@dataclass
class Result:
    """What an enumeration found."""

    error: float
    num_outcomes: int
    reused: bool  # whether a key of DRAFT, STOP or BONUS came twice along some outcome


def enumerate_two_steps(
    case: Case, distributions: Tables, verifier: Verifier, make_noise: type[Noise] = Noise, *, horizon: int = 3
) -> Result:
    """Every outcome of two consecutive steps."""
    rows: list[dict[int, tuple[float, float]]] = [{}]
    done: list[tuple[State, Tensor]] = []
    total, num_outcomes, reused = 0.0, 0, False
    while rows:
        watch = Watch(rows)
        with watched(watch):
            state = State(torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))
            for _ in range(2):
                state = step(case, distributions, verifier, state, make_noise)
        finished, split = [], []
        for row, held in enumerate(rows):
            for call in watch.calls:
                low, high = held.get(call.keys[row], (0.0, 1.0))
                inside = [cut for cut in call.cuts[row] if low + EMPTY < cut < high - EMPTY]
                if inside:
                    edges = [low, *sorted(set(inside)), high]
                    split += [{**held, call.keys[row]: pair} for pair in itertools.pairwise(edges)]
                    break
            else:
                finished.append(row)
                keys = [asked[row] for _, asked in watch.asked]
                reused |= len(set(keys)) < len(keys)
        if finished:
            weight = [float(np.prod([high - low for low, high in rows[row].values()])) for row in finished]
            done.append((State(state.count[finished], state.code[finished]), torch.tensor(weight, dtype=torch.float64)))
            total, num_outcomes = total + sum(weight), num_outcomes + len(weight)
        rows = split
    assert abs(total - 1.0) < 1e-9, "the outcomes are all there are"
    joint = joint_of(done, distributions, horizon)
    return Result(float((joint - target_joint(distributions, horizon)).abs().max()), num_outcomes, reused)


CASES = {
    "iid chain": (3, Case((-1, 0, 1), (F, I, I))),
    "fixed then iid": (3, Case((-1, 0, 1), (F, F, I))),
    "iid then fixed": (3, Case((-1, 0, 1), (F, I, F))),
    "iid pair": (3, Case((-1, 0, 0), (F, I, I))),
    "pair without replacement": (3, Case((-1, 0, 0), (F, W, W))),
    "mixed pair": (3, Case((-1, 0, 0), (F, I, F))),
    "fixed pair": (3, Case((-1, 0, 0), (F, F, F))),
    "tree": (2, Case((-1, 0, 0, 1), (F, I, I, I))),
    "wor tree": (2, Case((-1, 0, 0, 2), (F, W, W, I))),
    "plain": (3, Case((-1,), (F,))),
}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_have_the_targets_law_and_share_no_key(name: str) -> None:
    vocab_size, case = CASES[name]
    probs = tables(vocab_size, 7, 11)
    found = enumerate_two_steps(case, probs, Rejection())
    assert found.error < 1e-11
    assert not found.reused
    assert found.num_outcomes >= vocab_size**2


READERS = [rule.name for rule in VERIFIERS.values() if rule.exact and "noise" not in rule.reads]


@pytest.mark.parametrize("name", ["iid chain", "iid pair", "mixed pair", "tree"])
@pytest.mark.parametrize("rule", [rule for rule in READERS if rule != "rejection"])
def test_two_steps_of_every_rule(rule: str, name: str) -> None:
    vocab_size, case = CASES[name]
    verifier = VERIFIERS[rule]
    if verifier.chains_only and max(case.parent.count(node) for node in range(len(case.parent))) > 1:
        with pytest.raises(RuntimeError, match="chain"):
            enumerate_two_steps(case, tables(vocab_size, 7, 11), verifier)
        return
    found = enumerate_two_steps(case, tables(vocab_size, 7, 11), verifier)
    assert found.error < 1e-11
    assert not found.reused


def test_keys_asked_for_in_one_step_are_those_documented() -> None:
    """One DRAFT key a drawn node, one STOP, one BONUS: no more, and all different between roots."""
    probs, case = tables(3, 7, 11), CASES["tree"][1]
    seen: dict[int, int] = {}
    for position in range(12):
        watch = Watch([{}])
        with watched(watch):
            noise_start = torch.tensor([position])
            step(case, probs, Rejection(), State(noise_start * 0, noise_start * 0), shifted(position))
        streams = [stream for stream, _ in watch.asked]
        assert streams == [Stream.DRAFT] * 3 + [Stream.STOP, Stream.BONUS]
        for _, (key,) in watch.asked:
            assert seen.setdefault(key, position) == position
    assert len(seen) == 12 * 5


# Mutants: keys that production could have asked for, each caught


def keyed(name: str, **methods: Callable[..., Any]) -> type[Noise]:
    return type(name, (Noise,), methods)


def shifted(position: int) -> type[Noise]:
    return keyed("Shifted", __init__=lambda self, seeds, at: Noise.__init__(self, seeds, at + position))


def number(noise: Noise, positions: Tensor, *parts: int) -> Tensor:
    return noise_module.uniforms(noise_module.stream_keys(noise.seeds, positions, *parts))


# Draft noise keyed by the drafted token's own position (chains): it comes back in the next step.
PositionOnly = keyed("PositionOnly", draft=lambda self, node: number(self, self.positions + node, Stream.DRAFT))
# Siblings share their draw.
DepthMates = keyed("DepthMates", draft=lambda self, node: Noise.draft(self, 1 if node <= 2 else node))
# The acceptance uniform, or the extra token's, is the first draft's (item 6.1).
AcceptIsDraft = keyed("AcceptIsDraft", stop=lambda self: self.draft(1))
ResidualIsDraft = keyed("ResidualIsDraft", bonus=lambda self: self.draft(1))
# One uniform decides where to stop and what to emit.
BonusIsStop = keyed("BonusIsStop", bonus=lambda self: self.stop())
# The position is not known: the same uniform in every step.
FrozenBonus = keyed("FrozenBonus", bonus=lambda self: number(self, self.positions * 0, Stream.BONUS))
FrozenDraft = keyed("FrozenDraft", draft=lambda self, node: number(self, self.positions * 0, Stream.DRAFT, node))


def test_depth_mates_sharing_noise_bias_traversal() -> None:
    """Cousins, one of them looked at and refused before the other: their draws must be independent."""
    cousins = keyed("Cousins", draft=lambda self, node: Noise.draft(self, min(node, 3)))  # nodes 3 and 4
    case = Case((-1, 0, 0, 1, 2), (F, I, I, I, I))
    sound = enumerate_two_steps(case, tables(2, 8, 11), Traversal(), horizon=3)
    assert sound.error < 1e-11
    assert not sound.reused
    found = [enumerate_two_steps(case, tables(2, 8, seed), Traversal(), cousins, horizon=3) for seed in range(11, 14)]
    assert max(result.error for result in found) > 3e-4  # sound keys: 1e-11
    assert all(result.reused for result in found)


@pytest.mark.parametrize(
    ("mutant", "name", "least"),
    [
        (DepthMates, "iid pair", 0.01),
        (AcceptIsDraft, "iid chain", 0.01),
        (ResidualIsDraft, "iid chain", 0.01),
        (BonusIsStop, "iid chain", 0.01),
        (FrozenBonus, "iid chain", 1e-3),
        (FrozenDraft, "iid chain", 1e-3),
    ],
)
def test_mutant_keys_bias_the_text(mutant: type[Noise], name: str, least: float) -> None:
    vocab_size, case = CASES[name]
    found = [enumerate_two_steps(case, tables(vocab_size, 7, seed), Rejection(), mutant) for seed in range(11, 16)]
    assert max(result.error for result in found) > least  # not every table shows every bias
    assert all(result.reused for result in found)


def test_mutant_draft_noise_by_position_alone() -> None:
    """It comes back in the next step, which the keys show under any rule. Rejection happens to be unhurt, since it
    never looked behind the rejected token; block verification has looked, and errs."""
    probs = tables(3, 7, 11)
    case = CASES["iid chain"][1]
    sound = enumerate_two_steps(case, probs, Block())
    assert sound.error < 1e-11
    assert not sound.reused
    assert enumerate_two_steps(case, probs, Rejection(), PositionOnly).reused
    worst = 0.0
    for seed in (11, 12, 13):
        found = enumerate_two_steps(case, tables(3, 7, seed), Block(), PositionOnly)
        assert found.reused
        worst = max(worst, found.error)
    assert worst > 1e-3


# Coupled: the same over two steps; its keys do come back, and may


def coupled_two_steps(case: Case, distributions: Tables, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """(error, number of distinct step patterns). Position ROOT + k has exponentials of its own, enumerated by cells."""
    first_q = distributions.q[0][0]  # one draft distribution for every context, so that the triangle is cut less
    spread_p = [distributions.p[0], *[distributions.p[1].repeat(3 ** (d - 1), 1) for d in range(1, 7)]]
    distributions = Tables(3, spread_p, [first_q.expand(3**d, 3) for d in range(7)])
    parts = [cells([*distributions.p[min(d, 1)], first_q]) for d in range(3)]
    index = torch.cartesian_prod(*[torch.arange(len(weight)) for _, weight in parts])
    points = torch.stack([part[0][index[:, d]] for d, part in enumerate(parts)], 1)  # [R, 3, V]
    weight = torch.stack([part[1][index[:, d]] for d, part in enumerate(parts)], 1).prod(1)
    num_rows = len(weight)
    # Later positions do not reach the first three tokens: any exponentials will do.
    beyond = torch.rand(num_rows, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_position = torch.cat([points, beyond], 1)
    seeds = torch.arange(num_rows)
    known = stream_keys(seeds[:, None], ROOT + 1 + torch.arange(9), Stream.COUPLED).flatten()
    order = known.argsort()
    rows = by_position.flatten(0, 1)[order]

    def given(keys: Tensor, vocab_size: int) -> Tensor:
        at = torch.searchsorted(known[order], keys.contiguous())
        assert torch.equal(known[order][at], keys), "only keys of (seed, position, COUPLED) are asked for"
        return rows[at]

    class Seeded(Noise):
        def __init__(self, zeros: Tensor, positions: Tensor) -> None:
            super().__init__(seeds, positions)

    monkeypatch.setattr(noise_module, "exponentials", given)
    state = State(torch.zeros_like(seeds), torch.zeros_like(seeds))
    patterns = []
    for _ in range(2):
        state = step(case, distributions, Coupled(), state, Seeded)
        patterns.append(state.count)
    joint = joint_of([(state, weight)], distributions, 3)
    # Two steps may have given two tokens only; p continues, as the next step's own noise would.
    return float((joint - target_joint(distributions, 3)).abs().max()), len(torch.stack(patterns, 1).unique(dim=0))


@pytest.mark.parametrize("case", [Case((-1, 0), (F, C)), Case((-1, 0, 1), (F, C, C)), Case((-1, 0), (F, F))])
def test_two_coupled_steps(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    error, num_patterns = coupled_two_steps(case, tables(3, 2, 5), monkeypatch)
    assert error < 1e-11
    assert num_patterns >= 4  # accepted or not, in either step


def test_the_watch_changes_nothing() -> None:
    """Production values flow through unpatched code: uniforms by key are what Noise gives."""
    noise = Noise(torch.tensor([3]), torch.tensor([ROOT]))
    assert torch.equal(noise.stop(), uniforms(stream_keys(torch.tensor([3]), torch.tensor([ROOT]), Stream.STOP)))
    with watched(Watch([{}])):
        assert float(noise.stop()) == 0.5
