"""Linear layers of a mixer that is read again: held outputs stand where computed ones would."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import foretell.model.hf.recurrent as recurrent
from foretell.core.tree import chain_tree, layout
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.held import LinearOutputs, Places, answering, linear_layers
from foretell.model.hf.scans import short_scan
from foretell.model.recurrent import WHOLE, RecurrentCache
from tests.model.hf.test_recurrent import CAPACITY, TOLERANCE, Walk
from tests.model.recurrent import family_module

WARNINGS = pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed


@pytest.mark.parametrize("lag", [[0, 0], [2, 2], [3, 0], [1, 4], [0, 2]])
@pytest.mark.parametrize("count", [[3, 3], [1, 3], [3, 2]])
def test_places_join_and_part(lag: list[int], count: list[int]) -> None:
    """Every input of a row is where a plain concatenation has it."""
    total = [a + b for a, b in zip(lag, count, strict=True)]
    places = Places(np.array(lag), max(total), max(count))
    held = torch.arange(2 * max(lag)).view(2, -1, 1) + 100
    new = torch.arange(2 * max(count)).view(2, -1, 1)
    joined = places.join(held if max(lag) else None, new)
    assert joined.shape == (2, max(total), 1)
    for row in range(2):
        expected = [*held[row, : lag[row], 0].tolist(), *new[row, : count[row], 0].tolist()]
        assert joined[row, : total[row], 0].tolist() == expected
        assert places.new(joined)[row, : count[row], 0].tolist() == new[row, : count[row], 0].tolist()


class Twice(nn.Module):
    """Two layers, of which the first is called a second time, over something that is no line of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.second(self.first(x)) + self.second(self.first(x[:, :1])).sum()
        return kept


@torch.no_grad()
def test_outputs_of_old_inputs_are_not_computed_again() -> None:
    module, counted = Twice(), list[tuple[int, ...]]()
    layers = linear_layers(module, torch.float32)
    assert list(layers) == ["first", "second"]
    old, new = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    places = Places(np.array([3, 1]), 5, 2)
    whole = places.join(old, new)
    expected = module(whole)
    computed = LinearOutputs(places, None)
    with answering(layers, computed):
        assert torch.equal(module(whole), expected)
    assert torch.equal(computed.new["first"], places.new(layers["first"](whole)))
    held = {"first": layers["first"](old), "second": layers["second"](layers["first"](old))}
    run = nn.functional.linear
    answers = LinearOutputs(places, held)
    with answering(layers, answers), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda x, *rest: (counted.append(tuple(x.shape[:2])), run(x, *rest))[1])
        torch.testing.assert_close(module(whole), expected)
    assert counted == [(2, 2), (2, 2), (2, 1), (2, 1)]
    assert "forward" not in module.first.__dict__, "the layers are as they were"
    again = LinearOutputs(Places(np.array([0, 0]), 3, 3), held, again=True)
    with answering(layers, again):
        assert torch.equal(layers["first"](old), held["first"])
    assert not again.new


def test_other_dtypes_are_computed() -> None:
    assert not linear_layers(Twice().to(torch.bfloat16), torch.float32)


@WARNINGS
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_reading_again_computes_new_tokens_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a walk's linear layers compute: its new tokens, though others are read again."""
    walk = Walk(TransformersModel(family_module(family)), (6,))
    walk.prefill()
    mixer, cache = walk.model._mixers[0], walk.target.cache
    computed, scanned = [], []
    run_once, compute = recurrent._Call._once, LinearOutputs.of

    def once(call: Any, inputs: torch.Tensor, *rest: Any) -> Any:
        if call.mixer is mixer:
            scanned.append(inputs.shape[1])
        return run_once(call, inputs, *rest)

    def of(call: LinearOutputs, name: str, run: Any, given: torch.Tensor) -> torch.Tensor:
        return compute(call, name, lambda x: (computed.append(x.shape[1]), run(x))[1], given)

    monkeypatch.setattr(recurrent._Call, "_once", once)
    monkeypatch.setattr(LinearOutputs, "of", of)
    for kept in (0, 2, 1):
        line = [walk.texts[0][-1], *walk.draw(4)]
        plan = layout(chain_tree(torch.tensor([line])).parent, torch.tensor([len(walk.texts[0]) - 1]), CAPACITY)
        walk.target.forward(torch.tensor([line]), plan)
        walk.texts[0] += [*line[1 : 1 + kept], *walk.draw(1)]
    assert isinstance(cache, RecurrentCache)
    assert cache.states.meta[:, 0, WHOLE].all()
    assert scanned == [5, 6, 9], "what was kept is read again"
    assert set(computed) == {5}


@WARNINGS
def test_without_held_outputs_everything_is_computed() -> None:
    """A row whose outputs are not known (as after a pass that was read in groups) is read as before."""
    walk = Walk(TransformersModel(family_module("qwen3_5")), (6, 3))
    walk.prefill()
    cache = walk.target.cache
    assert isinstance(cache, RecurrentCache)
    for at in range(6):
        walk.step()
        if at % 2:
            cache.states.meta[:, 0, WHOLE] = 0
            for held in cache.states.held:
                for name, given in held.items():
                    if name:
                        given[0] = 1e3
    assert walk.worst < TOLERANCE


def test_a_short_text_is_one_chunk() -> None:
    module = family_module("mamba2").backbone.layers[0].mixer
    with short_scan(module, torch.zeros(1, 3, 32)) as besides:
        assert (module.chunk_size, besides) == (3, {})
    assert module.chunk_size == 8
    with short_scan(module, torch.zeros(1, 30, 32)):
        assert module.chunk_size == 8
    delta = family_module("qwen3_5").model.layers[0].linear_attn
    for width, given in ((1, {}), (5, {"chunk_size": 5}), (64, {}), (200, {})):
        with short_scan(delta, torch.zeros(1, width, 32)) as besides:
            assert besides == given
