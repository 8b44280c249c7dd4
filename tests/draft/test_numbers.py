"""Every node of a step draws from noise of its own: no number that keys a draft is used twice, at any depth.

Numbers that collide correlate draws that acceptance takes for independent, and no other test of one step sees it.
"""

from collections import Counter
from typing import Any

import pytest
import torch

from foretell.core import noise as noise_module
from foretell.core.noise import Stream
from foretell.core.params import SamplingParams
from foretell.core.tree import DrawMode
from foretell.draft.growing.grow import grow
from foretell.draft.shapes import Adaptive, Chain, DySpec, Sequoia, Shape, Static
from tests.draft.growing.grown import TableExpander, noise_for, rows
from tests.verify.enumerate import tables

DEPTH = 4
SHAPES: dict[str, Shape] = {
    "chain": Chain(depth=DEPTH),
    "adaptive": Adaptive(depth=DEPTH, threshold=0.0),
    "static": Static(branching=(3, 2, 2, 1)),
    "late": Static(branching=(1, 3, 1, 1)),
    "sequoia": Sequoia(depth=DEPTH, size=14),
    "dyspec": DySpec(depth=DEPTH, size=14, width=3),
    "dyspec_wide": DySpec(depth=DEPTH, size=14, width=5),
}


def numbers_of(monkeypatch: pytest.MonkeyPatch, shape: Shape, draws: DrawMode) -> tuple[Counter[int], Counter[int]]:
    """How often each number keyed a draw while one tree grew: in the stream DRAFT (by node; 0, the root, is never drawn),
    and in the stream RACE (by parent)."""
    asked: dict[Stream, Counter[int]] = {Stream.DRAFT: Counter(), Stream.RACE: Counter()}
    keys_of = noise_module.stream_keys

    def spy(seeds: Any, positions: Any, stream: Stream, index: Any = 0) -> Any:
        if stream in asked:
            asked[stream].update(torch.as_tensor(index).flatten().tolist())
        return keys_of(seeds, positions, stream, index)

    monkeypatch.setattr(noise_module, "stream_keys", spy)
    context = rows([SamplingParams()], 6)
    grow(TableExpander(tables(6, DEPTH, 1).q), context, [DEPTH], shape, draws, noise_for(context))
    del asked[Stream.DRAFT][0]
    return asked[Stream.DRAFT], asked[Stream.RACE]


@pytest.mark.parametrize("draws", [DrawMode.IID, DrawMode.WITHOUT_REPLACEMENT, DrawMode.GREEDY])
@pytest.mark.parametrize("name", SHAPES)
def test_no_two_draws_of_a_step_share_a_number(monkeypatch: pytest.MonkeyPatch, name: str, draws: DrawMode) -> None:
    drawn, raced = numbers_of(monkeypatch, SHAPES[name], draws)
    assert drawn or raced
    for found in (drawn, raced):
        assert max(found.values(), default=1) == 1, [number for number, times in found.items() if times > 1]
    if draws == DrawMode.IID:
        assert len(drawn) >= DEPTH, "every depth draws"
