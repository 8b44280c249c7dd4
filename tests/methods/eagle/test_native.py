"""EAGLE heads through the native kernels against their torch modules: the same logits, guesses and distributions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, SamplingParams
from foretell.core.noise import Noise
from foretell.core.probs import Processors
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Context
from foretell.draft.shapes import Chain, parse_shape
from foretell.heads.native import beside, rounding
from foretell.heads.pair_head import PairHead
from foretell.methods.eagle.drafter import Eagle3, EagleDrafter
from foretell.methods.eagle.native import NativePair
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.run import native
from foretell.model.llama.run.native import NativeModel
from tests.methods.decoding import Decoding, Pass, prompts
from tests.methods.eagle.eagles import random_head, same_trees
from tests.methods.eagle.test_drafter import CONFIGS, Recorded, decoded
from tests.model.tiny import VOCAB, tiny_module

CPU = torch.device("cpu")
MODULE = tiny_module("llama", head_dim=16)
REASON = native.supports(MODULE.config, torch.bfloat16, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SIZES = {name: replace(config, head_dim=16) for name, config in CONFIGS.items()}
LENGTHS = pytest.mark.parametrize("lengths", [(7,), (5, 1, 12, 2)], ids=["one", "ragged"])


def target(dtype: torch.dtype = torch.float32) -> NativeModel:
    return NativeModel.from_hf(tiny_module("llama", head_dim=16, dtype=dtype))


class Levels(Recorded):
    """Native, one call a level: what is asked and answered is recorded."""

    weights = "same"

    def __init__(self, head: PairHead, model: Any, context: Context, capacity: int) -> None:
        super().__init__(head, model, context, capacity, NativePair(head, model, self.weights))

    def _whole(self, *args: Any) -> None:
        return None


class Rounded(Levels):
    weights = "int8"


class Whole(EagleDrafter):
    """Native, a chain in one call."""

    def __init__(self, head: PairHead, model: Any, context: Context, capacity: int) -> None:
        super().__init__(head, model, context, capacity, NativePair(head, model))
        self.passes: list[Pass] = []
        self.widest = self.num_chains = self.num_trees = 0

    def _whole(self, *args: Any) -> TokenTree | None:
        tree = super()._whole(*args)
        self.num_chains += tree is not None and isinstance(args[2], Chain)
        self.num_trees += tree is not None and not isinstance(args[2], Chain)
        return tree


def distance(one: Decoding, other: Decoding) -> float:
    """Largest difference of any logit; what was asked must be the same, and tokens without a column too."""
    assert [(each.text, each.path) for each in one.drafter.passes] == [
        (each.text, each.path) for each in other.drafter.passes
    ]
    a, b = (torch.stack([each.logits.float() for each in side.drafter.passes]) for side in (one, other))
    known = a > -torch.inf
    assert torch.equal(known, b > -torch.inf)
    return float((a - b)[known].abs().max())


@pytest.mark.parametrize("name", SIZES)
@LENGTHS
def test_passes_of_chains_and_trees_are_the_twins(name: str, lengths: tuple[int, ...]) -> None:
    model, head = target(), random_head(SIZES[name])
    twin = decoded(head, model, lengths)
    assert twin.drafter.native is None
    assert distance(decoded(head, model, lengths, drafter_class=Levels), twin) < 2e-5


def test_threads_and_batches_do_not_change_a_bit() -> None:
    model, head = target(torch.bfloat16), random_head(SIZES["eagle3-layers"]).to(torch.bfloat16)
    alone = decoded(head, model, (12,), drafter_class=Levels)
    torch.set_num_threads(3)
    assert distance(decoded(head, model, (12,), drafter_class=Levels), alone) == 0


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_node_fed_on_the_wrong_output_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = target(), random_head(SIZES[name])
    twin = decoded(head, model, (7,))
    level = NativePair.level

    def grandparent(self: NativePair, tokens: Tensor, plan: Any, cache: Any, outputs: Tensor) -> Any:
        return level(self, tokens, plan, cache, outputs[:, :1].expand_as(outputs).contiguous())

    monkeypatch.setattr(NativePair, "level", grandparent)
    wrong = decoded(head, model, (7,), drafter_class=Levels).drafter.passes
    known = twin.drafter.passes[0].logits > -torch.inf
    asked = zip(wrong, twin.drafter.passes, strict=False)
    same = [(one, other) for one, other in asked if (one.text, one.path) == (other.text, other.path)]
    assert max(float((one.logits - other.logits)[known].abs().max()) for one, other in same) > 1e-2


# -- a chain in one call ---------------------------------------------------------------------------------------------

DRAWS = [DrawMode.FIXED, DrawMode.COUPLED, DrawMode.IID]
TEMPERATURES = [(0.9, 0.9, 0.9, 0.9), (0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.6, 1.7)]


def grown(
    kind: Any, shape: str, draws: DrawMode, rows: tuple[float | SamplingParams, ...], lengths: tuple[int, ...],
    dtype: torch.dtype = torch.float32, name: str = "eagle3",
) -> tuple[list[TokenTree], Any]:  # fmt: skip
    """Six steps at the temperatures of rows; with several rows some have no room, and one is dropped on the way."""
    decoding = Decoding(target(dtype), random_head(SIZES[name]).to(dtype), prompts(lengths), drafter_class=kind)
    params = [SamplingParams(temperature=row) if isinstance(row, float) else row for row in rows[: len(lengths)]]
    decoding.context.processors = Processors(params, vocab_size=VOCAB, end_token_ids=(), device=CPU)
    trees = []
    with torch.inference_mode():
        for number in range(6):
            limits = None
            if len(lengths) > 1 and number in (1, 2, 4):
                limits = [(0, 2, 100, 1)[(row + number) % 4] for row in range(decoding.context.num_rows)]
            trees.append(decoding.step(shape, draws, depth_limit=limits))
            if len(lengths) > 1 and number == 3:
                decoding.keep([3, 0, 1])
    return trees, decoding.drafter


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("temperatures", TEMPERATURES)
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3-layers"])
@LENGTHS
def test_a_whole_chain_is_the_twins(
    name: str, draws: DrawMode, temperatures: tuple[float, ...], lengths: tuple[int, ...]
) -> None:
    expected, _ = grown(Recorded, "chain", draws, temperatures, lengths, name=name)
    trees, fast = grown(Whole, "chain", draws, temperatures, lengths, name=name)
    assert fast.num_chains >= 5
    same_trees(trees, expected)


@pytest.mark.parametrize("draws", DRAWS)
def test_temperatures_whose_inverse_float32_does_not_hold(draws: DrawMode) -> None:
    """As the rows that are drawn level by level: cold ones took any token, hot ones the best alone."""
    temperatures = (1e-39, 1e300, 1e-320, 1e46)
    arguments = "chain", draws, temperatures, (5, 1, 12, 2)
    same_trees(grown(Whole, *arguments)[0], grown(Recorded, *arguments)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_chain_computes_the_bits_of_single_levels(dtype: torch.dtype) -> None:
    """q of each draw is the softmax of the logits that a call for each level returns."""
    arguments = "chain", DrawMode.IID, (1.0, 1.0, 1.0, 1.0), (5, 1, 12, 2), dtype
    levels, slow = grown(Levels, *arguments)
    assert slow.passes
    same_trees(grown(Whole, *arguments)[0], levels, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5}, {"top_k": 1}, {"top_p": 0.8}, {"top_p": 0.05}, {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_a_whole_chain_after_top_k_top_p_and_min_p_is_the_twins(options: dict[str, Any], draws: DrawMode) -> None:
    """Of each row its own: the second row is as temperature leaves it, the third greedy."""
    rows = SamplingParams(temperature=1.3, **options), 0.8, 0.0, SamplingParams(temperature=0.6, **options)
    twins, _ = grown(Recorded, "chain", draws, rows, (7, 5, 9, 2))
    trees, fast = grown(Whole, "chain", draws, rows, (7, 5, 9, 2))
    assert fast.num_chains >= 5
    same_trees(trees, twins)
    for twin, tree in zip(twins, trees, strict=True):
        if tree.q is not None:
            assert torch.equal(tree.q > 1e-7, twin.q > 1e-7), "the same tokens are left"


def test_penalties_and_biases_are_drawn_level_by_level() -> None:
    for params, whole in (
        (SamplingParams(temperature=0.7), True), (SamplingParams(top_p=0.9, top_k=3, min_p=0.1), True),
        (SamplingParams(repetition_penalty=1.2), False), (SamplingParams(min_new_tokens=3), False),
        (SamplingParams(logit_bias={3: 1.0}), False), (SamplingParams(banned_token_ids=(4,)), False),
    ):  # fmt: skip
        decoding = Decoding(target(), random_head(SIZES["eagle3"]), prompts((7,)), drafter_class=Whole)
        decoding.context.processors = Processors([params], vocab_size=VOCAB, end_token_ids=(), device=CPU)
        with torch.inference_mode():
            tree = decoding.step("chain", DrawMode.IID)
        assert tree.num_nodes == 5
        assert decoding.drafter.num_chains == int(whole)


def test_logits_that_are_not_numbers_have_no_mass() -> None:
    """A NaN column is never drawn, and its row stays a distribution; where all are NaN the row has no mass."""
    head = random_head(SIZES["eagle3"])
    with torch.no_grad():
        head.lm_head.weight[:20] = torch.nan
    decoding = Decoding(target(), head, prompts((7,)), drafter_class=Whole)
    with torch.inference_mode():
        tree = decoding.step("chain", DrawMode.IID)
    lost = head.target_ids[:20]
    assert (tree.q[0, :4][:, lost] == 0).all()
    torch.testing.assert_close(tree.q[0, :4].sum(-1), torch.ones(4))
    assert not set(tree.tokens[0, 1:].tolist()) & set(lost.tolist())
    with torch.no_grad():
        head.lm_head.weight.fill_(torch.nan)
    decoding = Decoding(target(), head, prompts((7,)), drafter_class=Whole)
    with torch.inference_mode():
        tree = decoding.step("chain", DrawMode.IID)
    assert tree.q is not None
    assert (tree.q == 0).all()


# -- other types -----------------------------------------------------------------------------------------------------


def test_bfloat16_differs_from_the_twin_by_its_rounding() -> None:
    """The twin rounds every number between two matrices to 8 bits; the float32 twin of the same weights tells how much
    that is."""
    model, head = target(torch.bfloat16), random_head(SIZES["eagle3"]).to(torch.bfloat16)
    exact = decoded(random_head(SIZES["eagle3"]).to(torch.bfloat16).float(), target(), (7,))
    first = [decoded(head, model, (7,), drafter_class=kind).drafter.passes[0].logits for kind in (Levels, Recorded)]
    expected = exact.drafter.passes[0].logits
    known = expected > -torch.inf
    errors = [float((logits.float() - expected)[known].abs().max()) for logits in first]
    assert errors[0] < 1.5 * errors[1]
    assert errors[0] < 0.1 * float(expected[known].abs().max())


def test_rounded_weights_are_near_and_their_distribution_is_the_one_drawn_from() -> None:
    model, head = target(torch.bfloat16), random_head(SIZES["eagle3"]).to(torch.bfloat16)
    first = [decoded(head, model, (7,), drafter_class=kind).drafter.passes[0].logits for kind in (Rounded, Levels)]
    known = first[0] > -torch.inf
    error = (first[0] - first[1])[known]
    assert 0 < error.abs().max() < 0.1 * first[1][known].abs().max()
    decoding = Decoding(model, head, prompts((7,)), drafter_class=Rounded)
    with torch.inference_mode():
        tree = decoding.step("chain", DrawMode.IID)
    softmax = torch.stack([(one.logits / 0.9).softmax(-1) for one in decoding.drafter.passes])
    torch.testing.assert_close(tree.q[0, :4], softmax, rtol=1e-5, atol=1e-8)


def test_auto_rounds_but_in_float32() -> None:
    assert rounding("auto", target()) == "same"
    assert rounding("auto", target(torch.bfloat16)) == "int8"
    assert rounding("same", target(torch.bfloat16)) == "same"


# -- when -------------------------------------------------------------------------------------------------------------


def test_the_native_path_is_taken_where_it_can_be_and_the_reason_is_told_elsewhere() -> None:
    head = random_head(SIZES["eagle3"])
    assert beside(NativePair, head, target())[1] is None
    assert beside(NativePair, head, TransformersModel(MODULE)) == (
        None, "the target runs as 'transformers', and native heads need a native one",
    )  # fmt: skip
    assert "torch.float64" in str(beside(NativePair, random_head(SIZES["eagle3"]).double(), target())[1])
    assert "head dimension 8" in str(beside(NativePair, random_head(CONFIGS["eagle3"]), target())[1])
    method = Eagle3(head, target())
    assert method.native is not None
    decoding = Decoding(target(), head, prompts((7,)), Recorded)
    drafter = method.open(decoding.context, 96, decoding.target)
    assert drafter.native is method.native
    assert method.runs_as == "native"
    slow = Eagle3(head, TransformersModel(MODULE))
    assert slow.runs_as == "torch: the target runs as 'transformers', and native heads need a native one"
    engine = Engine(target(), None, speculative={"method": "draft_model"}, method=method)
    assert engine.resolved()["head"] == "native"
    assert "head" not in Engine(target(), None, speculative={"method": "none"}).resolved()


def test_a_chain_that_does_not_fit_the_cache_is_refused() -> None:
    decoding = Decoding(target(), random_head(SIZES["eagle3"]), prompts((90,)), drafter_class=Whole)
    decoding.context.depth_limit = [100]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="slot"):
        decoding.drafter.propose(
            decoding.context, parse_shape("chain", 12), DrawMode.FIXED, Noise(torch.arange(1), decoding.context.length)
        )
