"""Trees of EAGLE heads grown in one native call against those of ``growing.dynamic``."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import SamplingParams
from foretell.core.noise import Noise
from foretell.core.probs import Processors
from foretell.core.tree import DrawMode, DrawnBy
from foretell.draft.shapes import parse_shape
from foretell.methods import chains
from foretell.methods.eagle import drafter as eagle_drafter
from tests.methods.decoding import Decoding, prompts
from tests.methods.eagle.eagles import random_head, same_trees
from tests.methods.eagle.test_drafter import Recorded
from tests.methods.eagle.test_native import CPU, LENGTHS, SIZES, TEMPERATURES, Levels, Whole, grown, pytestmark, target
from tests.model.tiny import VOCAB

__all__ = ["pytestmark"]

SHAPES = (
    "opt_tree/size=12/depth=4", "opt_tree/size=7/depth=3/threshold=0.3", "opt_tree/size=30/depth=6/width=3",
    "dyspec/size=9/depth=5/threshold=0.04", "dyspec/size=16/depth=4/width=2", "eagle2/size=10/depth=4",
    "eagle2/size=4/depth=5/width=3", "opt_tree/size=1/depth=4",
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draws", [DrawMode.FIXED, DrawMode.COUPLED])
@LENGTHS
def test_a_tree_of_one_call_is_the_twins(shape: str, draws: DrawMode, lengths: tuple[int, ...]) -> None:
    for temperatures in TEMPERATURES:
        twins, slow = grown(Recorded, shape, draws, temperatures, lengths)
        trees, fast = grown(Whole, shape, draws, temperatures, lengths)
        assert slow.native is None
        assert fast.num_trees >= 5
        same_trees(trees, twins)


@pytest.mark.parametrize("name", ["eagle1", "eagle3-layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_types_by_one_call_a_depth(name: str, dtype: torch.dtype) -> None:
    """The logits of both are the same bits, in bfloat16, too."""
    for shape in SHAPES[:4]:
        arguments = shape, DrawMode.COUPLED, (0.0, 1.0, 0.6, 1.7), (5, 1, 12, 2), dtype, name
        twins, _ = grown(Levels, *arguments)
        trees, fast = grown(Whole, *arguments)
        assert fast.num_trees >= 5
        same_trees(trees, twins)


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.9}], ids=str
)
def test_filters(options: dict[str, Any]) -> None:
    for shape in ("opt_tree/size=12", "dyspec/size=8"):
        for draws in (DrawMode.FIXED, DrawMode.COUPLED):
            rows = tuple(SamplingParams(temperature=each, **options) for each in (0.9, 0.0, 1.3, 0.7))
            twins, _ = grown(Recorded, shape, draws, rows, (5, 1, 12, 2))
            trees, fast = grown(Whole, shape, draws, rows, (5, 1, 12, 2))
            assert fast.num_trees >= 5
            same_trees(trees, twins)


def test_threads_do_not_change_a_tree() -> None:
    arguments = "opt_tree/size=24/depth=5", DrawMode.COUPLED, (1.0,), (12,)
    alone, _ = grown(Whole, *arguments)
    torch.set_num_threads(3)
    same_trees(grown(Whole, *arguments)[0], alone)


def test_what_c_cannot_grow_is_grown_level_by_level() -> None:
    cases = [
        ("dyspec/size=8", DrawMode.IID, 1.0, {}, False), ("dyspec/size=8", DrawMode.WITHOUT_REPLACEMENT, 1.0, {}, False),
        ("dyspec/size=8", DrawMode.IID, 0.0, {}, True),
        ("static", DrawMode.COUPLED, 1.0, {}, False),
        ("opt_tree/size=8", DrawMode.COUPLED, 1.0, {"repetition_penalty": 1.2}, False),
        ("opt_tree/size=8", DrawMode.COUPLED, 1.0, {"logit_bias": {3: 1.0}}, False),
        ("opt_tree/size=512/depth=12/width=64", DrawMode.COUPLED, 1.0, {}, False),
    ]  # fmt: skip
    for shape, draws, temperature, options, whole in cases:
        decoding = Decoding(target(), random_head(SIZES["eagle3"]), prompts((7,)), drafter_class=Whole)
        params = SamplingParams(temperature=temperature, **options)
        decoding.context.processors = Processors([params], vocab_size=VOCAB, end_token_ids=(), device=CPU)
        shaped = parse_shape(shape, 4)
        noise = Noise(torch.arange(1), decoding.context.length)
        if "512" in shape:  # it would not fit this cache either way
            vocabulary = decoding.drafter.native.vocabulary
            assert chains.growth_of(vocabulary, decoding.context, shaped, draws, shaped.depth) is None
            continue
        with torch.inference_mode():
            tree = decoding.drafter.propose(decoding.context, shaped, draws, noise)
        assert tree.num_nodes > 1
        assert decoding.drafter.num_trees == int(whole), shape


def test_a_tree_that_does_not_fit_the_cache_is_refused() -> None:
    decoding = Decoding(target(), random_head(SIZES["eagle3"]), prompts((86,)), drafter_class=Whole)
    shape = parse_shape("opt_tree/size=40/threshold=0", 5)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="slot"):
        decoding.drafter.propose(
            decoding.context, shape, DrawMode.FIXED, Noise(torch.arange(1), decoding.context.length)
        )


def test_a_flat_draft_has_ties_and_the_earlier_ones_win() -> None:
    """Every token is as probable as every other: all places of a depth are equal."""
    trees = []
    for kind in (Recorded, Whole):
        head = random_head(SIZES["eagle3"])
        with torch.no_grad():
            head.lm_head.weight.zero_()  # type: ignore[union-attr]
        decoding = Decoding(target(), head, prompts((7,)), drafter_class=kind)
        with torch.inference_mode():
            trees.append([decoding.step("opt_tree/size=11/depth=3", DrawMode.FIXED) for _ in range(2)])
    same_trees(trees[1], trees[0])
    assert int(trees[1][0].valid.sum()) > 2


def test_another_sharpness_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above all: trees of another rule differ."""
    twins, _ = grown(Recorded, SHAPES[0], DrawMode.FIXED, (0.0,), (7,))
    found = eagle_drafter.growth_of

    def smaller(*arguments: Any) -> Any:
        growth, label = found(*arguments)  # type: ignore[misc]
        growth.width = 2
        return growth, label

    monkeypatch.setattr(eagle_drafter, "growth_of", smaller)
    with pytest.raises(AssertionError):
        same_trees(grown(Whole, SHAPES[0], DrawMode.FIXED, (0.0,), (7,))[0], twins)


def test_labels_by_row() -> None:
    trees, _ = grown(Whole, SHAPES[0], DrawMode.COUPLED, (0.0, 1.0, 0.6, 1.7), (5, 1, 12, 2))
    tree = replace(trees[0])
    assert (tree.drawn_by[0] == DrawnBy.FIXED).all()
    assert (tree.drawn_by[2][tree.parent[2] >= 0] == DrawnBy.COUPLED).all()
    assert (tree.drawn_by[:, 0] == DrawnBy.FIXED).all()
