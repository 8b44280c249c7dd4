"""Every shape, every way of drawing, through the engine: the same text as plain decoding, and a cache that is the text."""

import itertools
from typing import Any

import pytest
import torch

from foretell import Completion, Engine, Request, SamplingParams
from foretell.core.tree import DrawMode
from foretell.draft.config import refusal
from foretell.draft.shapes import SHAPES, parse_shape
from foretell.engine.batch import Batch
from foretell.methods.draft_model.drafter import DraftModel
from foretell.verify import parse_verifier
from tests.engine.harness import EOS, VOCAB, ToyTokenizer, foresight, mixed_requests, outcomes, plain, prompts, table
from tests.model.table import TableLM

TARGET, NEAR = table(), table(blur=0.3)
CONFIGS = [
    "chain", "adaptive", "adaptive/rule=probability/threshold=0.4",
    "specdec", "specdec/threshold=0.6/min=2", "static",
    "static/branching=2x2x2x2x1", "sequoia", "dyspec", "dyspec/threshold=0.05",
    "eagle2", "eagle2/size=24/width=6", "opt_tree", "opt_tree/size=7/threshold=0.3",
]  # fmt: skip
LEGAL = [
    (shape, draws)
    for shape, draws in itertools.product(CONFIGS, DrawMode)
    if refusal("draft_model", DraftModel.capabilities, parse_verifier("coupled"), parse_shape(shape, 4), draws) is None
]


def engine(
    shape: str, draws: str = "auto", *, verify: str = "coupled", gamma: int = 4, draft: Any = NEAR, target: Any = TARGET
) -> Engine:
    config = {
        "method": "draft_model",
        "num_speculative_tokens": gamma,
        "verify": verify,
        "shape": shape,
        "draws": draws,
    }
    return Engine(target, ToyTokenizer(), speculative=config, method=DraftModel(draft, foresight(draft)))


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return plain(TARGET, mixed_requests())


def test_all_shapes_are_tested() -> None:
    assert {config.split("/")[0] for config in CONFIGS} == set(SHAPES)
    assert set(DraftModel.capabilities.shapes) == set(SHAPES)


@pytest.mark.parametrize(("shape", "draws"), LEGAL)
def test_the_same_text(shape: str, draws: DrawMode, expected: list[Completion]) -> None:
    """Eight requests that differ in everything, together and some of them alone; what was accepted does not differ."""
    found = engine(shape, draws.value).generate_batch(mixed_requests())
    assert outcomes(found) == outcomes(expected)
    assert sum(one.num_accepted_tokens for one in found) > 0
    chosen = slice(len(shape) % 4, None, 4)
    alone = engine(shape, draws.value).generate_batch(mixed_requests()[chosen], batch_size=1)
    assert outcomes(alone) == outcomes(expected[chosen])
    assert [one.num_accepted_tokens for one in alone] == [one.num_accepted_tokens for one in found[chosen]]


@pytest.mark.parametrize("shape", ["static", "sequoia", "dyspec"])
@pytest.mark.parametrize("draws", ["iid", "without_replacement", "greedy"])
def test_company_does_not_change_a_rejected_text(shape: str, draws: str) -> None:
    """Under rejection the text depends on what was drawn: that must not depend on the other rows of the batch."""
    together = engine(shape, draws, verify="rejection").generate_batch(mixed_requests())
    alone = engine(shape, draws, verify="rejection").generate_batch(mixed_requests()[::3], batch_size=1)
    assert outcomes(alone) == outcomes(together[::3])


def test_side_branches_are_kept(audited: list[Any]) -> None:
    """Kept paths that are not the leading one, behind which the draft model's own cache must be moved too."""
    moved: list[str] = []

    def watch(state: Any, target: Any, drafter: Any, report: Any) -> None:
        assert drafter.slots is not None
        for row, (path, limit) in enumerate(zip(report.commit.path, drafter.limits, strict=True)):
            slots = [int(drafter.slots[row, node]) for node in path]
            if limit and [slot for slot in slots if slot >= 0] != list(range(sum(slot >= 0 for slot in slots))):
                moved.append(shape)

    audited.append(watch)
    shapes = ("static", "sequoia", "dyspec", "eagle2", "opt_tree")
    for shape in shapes:
        engine(shape, "fixed").generate_batch(mixed_requests())
    assert set(moved) == set(shapes)


@pytest.mark.parametrize("shape", CONFIGS)
def test_the_end_of_the_context(shape: str) -> None:
    """Contexts of target and draft model that end in the middle of a tree: each alone, and both."""
    for target_context, draft_context in ((24, 4096), (40, 21)):
        target, draft = table(max_positions=target_context), table(max_positions=draft_context, blur=0.3)
        params = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True)
        requests = [Request(ids, params) for ids in prompts() if 3 <= len(ids) < 20]
        expected = plain(target, requests)
        for draws in ("coupled", "fixed"):
            found = engine(shape, draws, draft=draft, target=target).generate_batch(requests)
            assert outcomes(found) == outcomes(expected)


@pytest.mark.parametrize("shape", CONFIGS)
def test_a_smaller_draft_vocabulary(shape: str, expected: list[Completion]) -> None:
    """Tokens that the draft model does not have are never guessed, and fed as its last one."""
    draft = TableLM(VOCAB - 4, seed=2, sharpness=2.0, dtype=torch.float64, num_layers=1)
    for draws in ("auto", "fixed"):
        found = engine(shape, draws, draft=draft).generate_batch(mixed_requests())
        assert outcomes(found) == outcomes(expected)


@pytest.mark.parametrize("shape", CONFIGS)
def test_float32(shape: str) -> None:
    """The compiled race where it was built: the same text."""
    target, draft = table(dtype=torch.float32), table(dtype=torch.float32, blur=0.3)
    requests = mixed_requests(13)
    found = engine(shape, draft=draft, target=target).generate_batch(requests)
    assert outcomes(found) == outcomes(plain(target, requests))


@pytest.mark.parametrize("shape", ["static", "sequoia", "eagle2/size=32/width=6"])
def test_a_greedy_row_has_branches(shape: str) -> None:
    """At temperature 0 second-best guesses are ranked at temperature 1: trees accept more than their leading path."""
    params = SamplingParams(max_new_tokens=40, temperature=0.0, top_k=1, ignore_eos=True)
    requests = [Request(ids, params) for ids in prompts()]
    branching = engine(shape, gamma=4).generate_batch(requests)
    line = engine("chain", gamma=4).generate_batch(requests)
    assert [one.token_ids for one in branching] == [one.token_ids for one in line]
    assert sum(one.num_steps for one in branching) < 0.95 * sum(one.num_steps for one in line)


def test_short_outputs_waste_nothing() -> None:
    """No guess beyond the limit of a row: its trees are cut, and with one token left nothing is drafted."""
    for shape in CONFIGS:
        for depth_limit in (1, 2, 3):
            params = SamplingParams(max_new_tokens=depth_limit, seed=depth_limit, ignore_eos=True)
            one = engine(shape).generate([1, 2, 3], params)
            assert one.num_tokens == depth_limit
            assert one.num_draft_tokens == 0 or depth_limit > 1
            assert one.num_steps >= 1
    assert EOS < VOCAB


def test_a_row_is_no_deeper_than_its_shape() -> None:
    """Whatever a plan allows: a drafter needs to look at ``depth_limit`` alone."""
    engine = Engine(table(1), ToyTokenizer(), speculative={"method": "ngram", "num_speculative_tokens": 3})
    batch = Batch(engine.model, max_rows=2, capacity=200)
    rows = [engine.make_row(k, Request([1, 2, 3], SamplingParams(max_new_tokens=2 + 40 * k, seed=k))) for k in range(2)]
    for one in rows:
        batch.arrive(one)
    batch.read(64, catch_up=True, whole=True)
    assert batch.step([9, 9]).depth_limit == [1, 3], "one by its room, one by its shape"
