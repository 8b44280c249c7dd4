"""Drafters that are told of steps without guesses later, several together: they guess what they would have guessed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, layout, root_tree
from foretell.draft.base import Commit, Drafter, Method
from foretell.draft.shapes import Chain
from foretell.draft.suffix import Suffix
from foretell.engine.drafters import lazy as waiting
from foretell.engine.drafters.lazy import WaitingDrafter
from foretell.methods import features
from foretell.methods.eagle.drafter import Eagle3
from foretell.methods.features import FeatureBuffer
from foretell.methods.hybrid.drafter import Hybrid
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel, supports
from foretell.model.target import CausalModel, PassOptions
from tests.draft.test_join import CAPACITY, METHODS, MODELS, Guesses, Lane, guesses, row, target, tiny
from tests.methods.eagle.eagles import EAGLE3, random_head
from tests.model.tiny import tiny_module

WAITING: dict[str, Callable[[], Method]] = {
    **METHODS,
    "hybrid": lambda: Hybrid(Suffix(), Eagle3(random_head(EAGLE3), tiny()), shape=Chain(3), discount=1.0),  # type: ignore[arg-type]
}
CAN = {
    "ngram", "suffix", "draft_model", "draft_model, short", "eagle1", "eagle3", "dflash", "dflash, all", "hybrid",
}  # fmt: skip
OWN_MODEL = {"hybrid": tiny, **MODELS}


def seen(name: str, *, waits: bool, together: int = 64) -> tuple[list[list[Guesses]], int]:
    """What is guessed in a script of rests and guesses, rows dropped among them; and how often the drafter was told."""
    calls = [0]
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(waiting, "MOST_COMMITS", together)
        lane = Lane(OWN_MODEL.get(name, target)(), WAITING[name](), [row(one, 0) for one in "ace"], CAPACITY)
        drafter, found = lane.drafter, []
        one_by_one, all_at_once = drafter.observe, drafter.observe_all

        def counted(given: Commit) -> None:
            calls[0] += 1
            one_by_one(given)

        def counted_all(given: Sequence[Commit]) -> None:
            before = calls[0]
            all_at_once(given)
            calls[0] = before + 1

        patched.setattr(drafter, "observe", counted)
        patched.setattr(drafter, "observe_all", counted_all)
        if waits:
            lane.drafter = WaitingDrafter(drafter)
        for step in range(40):
            rests = step % 8 >= 2
            for one in lane.rows:
                one.depth_limit = 0 if rests else 9
            if step == 13:
                lane.keep([2, 0])
            tree = lane.propose("chain", DrawMode.FIXED)
            assert not rests or tree.num_nodes == 1
            if not rests:
                found.append(guesses(tree))
            lane.observe(tree, ())
    return found, calls[0]


@pytest.mark.parametrize("name", sorted(CAN))
@pytest.mark.parametrize("together", [64, 4])
def test_what_is_told_late_is_guessed_from_as_if_told_at_once(name: str, together: int) -> None:
    """Rests of six steps, told in one piece or in two."""
    (late, few), (once, many) = seen(name, waits=True, together=together), seen(name, waits=False)
    assert late == once
    assert sum(len(found) - 1 for step in once for found in step) > 15, "control: there were guesses"
    assert few < many / 2


def test_those_that_can_wait_say_so() -> None:
    with torch.inference_mode():
        able = {
            name for name, make in WAITING.items()
            if Lane(OWN_MODEL.get(name, target)(), make(), [row("a", 0)], CAPACITY).drafter.can_wait
        }  # fmt: skip
    assert able == {*CAN, "none"}


def test_features_of_many_positions_are_made_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same guesses, however many taps may wait."""
    expected = seen("eagle3", waits=False)[0]
    for most in (0, 3000):
        monkeypatch.setattr(features, "TOGETHER", 2)
        monkeypatch.setattr(features, "MOST_BYTES", most)
        made = [0]
        make = FeatureBuffer._make

        def counted(self: FeatureBuffer, rows: Any, make: Any = make, made: list[int] = made, **options: bool) -> None:
            made[0] += 1
            make(self, rows, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FeatureBuffer, "_make", counted)
            assert seen("eagle3", waits=True)[0] == expected
        assert made[0] > 3


def commit(step: int, *, ended: bool = False) -> Commit:
    pending = torch.tensor([step])
    return Commit(root_tree(pending), torch.tensor([step]), [[0]], [[step + 1]], torch.ones(1, 1, 256), [ended])


def propose(drafter: Drafter, lane: Lane) -> None:
    drafter.propose(lane.context, Chain(4), DrawMode.FIXED, Noise(torch.tensor([1]), lane.context.length))


def test_a_row_that_ends_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    method = Suffix()
    with torch.inference_mode():
        lane = Lane(target(), method, [row("a", 0)], CAPACITY)
    lane.rows[0].depth_limit = 0
    stand_in = WaitingDrafter(lane.drafter)
    for step in range(4):
        propose(stand_in, lane)
        stand_in.observe(commit(step, ended=step == 3))
        told.append(method.library.automata[0].num_tokens)
    assert told == [0, 0, 0, 4], "its whole output, for the next request"
    monkeypatch.setattr(waiting, "MOST_TAP_BYTES", 3 * 1024)
    stand_in = WaitingDrafter(lane.drafter)
    before = len(lane.drafter.rows[0].text)
    lengths = []
    for step in range(7):
        propose(stand_in, lane)
        stand_in.observe(commit(step))
        lengths.append(len(lane.drafter.rows[0].text) - before)
    assert lengths == [0, 0, 3, 3, 3, 6, 6], "three steps have as many bytes of taps as may wait"


@pytest.mark.parametrize("kind", ["transformers", "lean", "native"])
def test_a_pass_on_the_cpu_leaves_the_taps_of_the_one_before_alone(kind: str) -> None:
    """What waits is no copy."""
    module = tiny_module("llama").to(torch.float32)
    made: dict[str, Callable[[], CausalModel]] = {
        "transformers": lambda: TransformersModel(module), "lean": lambda: LeanModel.from_hf(module),
        "native": lambda: NativeModel.from_hf(module),
    }  # fmt: skip
    if kind == "native" and supports(module.config, torch.float32, torch.device("cpu")):
        pytest.skip("the native decoder is not available here")
    model = made[kind]()
    cache, kept = model.new_cache(1, 64), []
    with torch.inference_mode():
        for step in range(4):
            tree = root_tree(torch.tensor([step + 1]))
            plan = layout(tree.parent, torch.tensor([step]), 64)
            taps = model.forward(tree.tokens, plan, cache, PassOptions(taps=(0, 2))).taps
            kept.append((taps, taps.clone()))
    assert all(torch.equal(taps, copy) for taps, copy in kept)
    assert not torch.equal(kept[0][0], kept[1][0])
