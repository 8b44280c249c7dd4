"""Method ``hybrid`` enumerated exactly: the distribution of the text, by the production engine, without a single sample.

Every key of noise that the engine asks for is one uniform, held as an interval; wherever a draw's cumulative distribution
cuts it, the outcome splits (tests/verify/test_two_steps.py). Suffix and draft take turns by what the text so far says, so
outcomes differ in which of them guessed. A second row of another kind is in the batch, with noise of its own.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.core.noise import Stream, derive_seed
from foretell.core.tree import DrawnBy
from foretell.draft.base import Method
from foretell.draft.chances import Mean
from foretell.draft.growing import children
from foretell.draft.growing.children import draw_iid
from foretell.draft.ngram import Ngram
from foretell.draft.shapes import Chain
from foretell.draft.suffix import Suffix
from foretell.methods.draft_model.drafter import DraftModel
from foretell.methods.hybrid.drafter import Hybrid, Worth
from tests.model.table import TableLM
from tests.verify.test_two_steps import EMPTY, Call, KeyedTensor, Watch, watched

SIZE = 3
SEED, OTHER = 5, 6
REPEATS, FRESH = [0, 1, 0, 1], [2, 0]  # suffix knows how the first goes on unless a 2 comes, and nothing of the second


def random_rows(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    """A distribution for each last token, in float64."""
    rows = -torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log()
    return lambda context: rows[context[-1]] / rows[context[-1]].sum()


def model(seed: int) -> TableLM:
    return TableLM(SIZE, probs=random_rows(seed), context=1, dtype=torch.float64, num_layers=1)


@dataclass
class ByKey(Watch):
    """A watch of one row of a batch: its keys are told from the others' by their seed."""

    mine: set[int] = field(default_factory=set)
    latest: Tensor = field(default_factory=lambda: torch.zeros(0))

    def uniforms(self, keys: Tensor) -> Tensor:
        """Midpoints of what is left of each key's interval, whatever its row."""
        held = [self.intervals[0].get(key, (0.0, 1.0)) for key in keys.flatten().tolist()]
        middles = torch.tensor([(low + high) / 2 for low, high in held], dtype=torch.float64).view(keys.shape)
        out = middles.as_subclass(KeyedTensor)
        out.keys = self.latest = keys
        return out

    def stream_keys(self, seeds: Tensor, positions: Tensor, stream: Stream, index: Tensor | int = 0) -> Tensor:
        """The production keys; those of the watched row are noted."""
        keys = super().stream_keys(seeds, positions, stream, index)
        own = torch.broadcast_to(seeds, keys.shape) == derive_seed(SEED)
        self.mine.update(keys[own].tolist())
        return keys

    def draw_iid(self, probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The draws of a growing draft, watched."""
        mass = probs.double().cumsum(-1)
        cuts = (mass / mass[..., -1:])[..., None, :].expand(*uniform.shape, -1)
        keys = self.latest.view(uniform.shape)  # those that the uniforms, reshaped since, were made from
        self.calls.append(Call(keys.flatten().tolist(), cuts.flatten(0, -2).numpy()))
        return draw_iid(probs, uniform.as_subclass(Tensor))


@dataclass
class Found:
    """What an enumeration found."""

    error: float
    kinds: set[frozenset[int]]  # labels of the guesses of a step, by row
    num_outcomes: int


def enumerate_text(
    prompts: list[list[int]], *, horizon: int, seeds: tuple[int, int] = (11, 12),
    further: Sequence[Method] = (), **keys: Any,
) -> Found:  # fmt: skip
    """The joint distribution of the first tokens of the first prompt, beside the target's. further: members behind the
    draft model."""
    distribution = random_rows(seeds[0])
    target, draft = model(seeds[0]), model(seeds[1])
    joint = torch.zeros(SIZE**horizon, dtype=torch.float64)
    waiting: list[dict[int, tuple[float, float]]] = [{}]
    kinds: set[frozenset[int]] = set()
    count = 0
    while waiting:
        held = waiting.pop()
        watch = ByKey([held])
        discount = keys.get("discount", 0.85)
        method = Hybrid(Suffix(), DraftModel(draft), shape=Chain(2), discount=discount, others=further)
        speculative = {
            "method": "hybrid",
            "second": "draft_model",
            "second_tokens": 2,
            "num_speculative_tokens": 2,
            **keys,
        }
        engine = Engine(target, None, speculative=speculative, method=method)
        engine.observers.append(lambda event: kinds.update(_labels(event.commit.tree)))
        requests = [
            Request(ids, SamplingParams(temperature=1.0, seed=seed, max_new_tokens=horizon, ignore_eos=True))
            for ids, seed in zip(prompts, (SEED, OTHER), strict=False)
        ]
        with watched(watch), pytest.MonkeyPatch.context() as patch:
            patch.setattr(children, "draw_iid", watch.draw_iid)
            tokens = engine.generate_batch(requests)[0].token_ids
        for call in watch.calls:
            splits = [
                _split(held, key, cuts) for key, cuts in zip(call.keys, call.cuts, strict=True) if key in watch.mine
            ]
            found = next((parts for parts in splits if parts), None)
            if found:
                waiting += found
                break
        else:
            weight = float(np.prod([high - low for low, high in held.values()]))
            joint[int("".join(map(str, tokens)), SIZE)] += weight
            count += 1
    assert abs(float(joint.sum()) - 1.0) < 1e-9, "the outcomes are all there are"
    rows = torch.stack([distribution((token,)) for token in range(SIZE)])
    law = rows[prompts[0][-1]]
    for _ in range(horizon - 1):
        law = (law.view(-1, SIZE, 1) * rows).flatten()
    return Found(float((joint - law).abs().max()), kinds, count)


def _labels(tree: Any) -> list[frozenset[int]]:
    rows = [set(tree.drawn_by[row, 1:][tree.valid[row, 1:]].tolist()) for row in range(len(tree.tokens))]
    return [frozenset(found) for found in rows if found]


def _split(held: dict[int, tuple[float, float]], key: int, cuts: np.ndarray) -> list[dict[int, tuple[float, float]]]:
    low, high = held.get(key, (0.0, 1.0))
    inside = sorted({cut for cut in cuts if low + EMPTY < cut < high - EMPTY})
    return [{**held, key: pair} for pair in itertools.pairwise([low, *inside, high])] if inside else []


FIXED, IID = frozenset({int(DrawnBy.FIXED)}), frozenset({int(DrawnBy.IID)})


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_one_row(verify: str) -> None:
    """Suffix wherever it has a match, else the draft: both occur along the outcomes."""
    found = enumerate_text([REPEATS], horizon=3, verify=verify, discount=0.0)
    assert found.error < 1e-11
    assert found.kinds == {FIXED, IID}
    assert found.num_outcomes >= SIZE**3


@pytest.mark.parametrize("prompts", [[REPEATS, FRESH], [FRESH, REPEATS]])
def test_rows_of_both_kinds_in_one_batch(prompts: list[list[int]]) -> None:
    found = enumerate_text(prompts, horizon=2, verify="rejection", discount=0.0)
    assert found.error < 1e-11
    assert found.kinds == {FIXED, IID}


def test_the_draft_where_suffix_has_a_match_too() -> None:
    """Which of them guesses is decided before anything is drawn."""
    found = enumerate_text([REPEATS], horizon=2, verify="rejection", discount=2.0)
    assert found.error < 1e-11
    assert IID in found.kinds


@pytest.mark.parametrize(
    ("prompts", "order", "promised"),
    [([REPEATS], [2, 1], 1.9), ([REPEATS, FRESH], [2, 0, 0, 2], 9.0), ([FRESH, REPEATS], [2, 1], 9.0)],
)
def test_three_members_behind_suffix(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], order: list[int], promised: float
) -> None:
    """Two draft models and ngram take turns, row by row: rows of one step have q of either model, or none."""
    chosen: set[int] = set()

    class Turns(Worth):
        turn = -1

        def best(self, found: Sequence[bool | None]) -> tuple[int, float]:
            self.turn += 1
            member = order[self.turn % len(order)]
            chosen.add(member if found[member] is not False else 0)
            return member if found[member] is not False else 0, promised

    monkeypatch.setattr(Hybrid, "_worth", lambda self: Turns(self.discount, others=[Mean(1.0), Mean(1.0)]))
    horizon = 3 if len(prompts) == 1 else 2
    found = enumerate_text(prompts, horizon=horizon, further=[Ngram(), DraftModel(model(13))], verify="rejection")
    assert found.error < 1e-11
    assert IID in found.kinds
    assert chosen >= set(order)
