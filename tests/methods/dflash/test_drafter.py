"""The block drafter in decoding: its logits are those of training on the same text, and its memory holds features alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import DrawMode, TokenTree
from foretell.draft.base import Commit, Context, PromptChunk
from foretell.draft.config import check_stop
from foretell.draft.shapes import parse_shape
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.dflash.drafter import DFlash, DFlashDrafter
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.model import prefill
from foretell.model.hf.adapter import TransformersModel
from tests.draft.growing.grown import noise_for
from tests.methods.decoding import Decoding, Recording
from tests.model.tiny import VOCAB, tiny_module

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "markov": {"markov_rank": 6},
    "anchor": {"sample_from_anchor": True},
    "all": {"causal": True, "markov_rank": 6, "sample_from_anchor": True, "confidence": True},
    "confidence": {"confidence": True},
    "reduced": {"draft_vocab_size": 23, "markov_rank": 6, "confidence": True},
    "windows": {"windows": (6, 0)},
    "windows-whole": {"windows": (5, 7), "windows_causal": False},
}
CONFIG = DFlashHeadConfig(
    hidden_size=32, vocab_size=VOCAB, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2,
    block_size=5, layer_ids=(0, 2, 3), mask_token_id=VOCAB - 1,
)  # fmt: skip
TEXTS = [[7], [5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [11, 12, 13, 14, 15]]  # one is a prompt of a single token


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return TransformersModel(tiny_module("qwen3"))


def random_head(model: TransformersModel, **changes: Any) -> DFlashHead:
    """Weights of which none is 0 or 1, so that each matters."""
    config = replace(CONFIG, **changes)
    some = config.draft_vocab_size and draft_vocabulary((torch.arange(VOCAB) * 7) % 11, config.draft_vocab_size)
    head = DFlashHead.fresh(config, seed=5, model=model, vocabulary=some or None)
    random = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return head.eval()


class Recorded(Recording, DFlashDrafter):
    """Keeps every answer."""


def in_training(head: DFlashHead, model: TransformersModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """(normed [Q, H], logits [Q, V] without Markov term) of the block at a text's last token, by the training forward."""
    batch = TeacherBatch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([1]))
    taps = Teacher(model).label(batch, head.taps).taps
    row = [ids[-1]] + [head.config.mask_token_id] * (head.config.block_size - 1)
    with torch.no_grad():
        normed = head(taps, model.embed(torch.tensor([[row]])), torch.tensor([[len(ids) - 1]]))[0]
        return normed[0], head.logits(normed, model)[0]


def check(decoding: Decoding) -> float:
    """The largest difference between what was told and the training forward, logits and chances."""
    head: Any = decoding.head
    known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    worst = 0.0
    for one in decoding.drafter.passes:
        key = tuple(one.text)
        if key not in known:
            known[key] = in_training(head, decoding.model, one.text)
        normed, logits = known[key]
        row, tokens = len(one.path) + head.config.first_row, [*one.text, *one.path]
        with torch.no_grad():
            expected = logits[row]
            if head.markov_head is not None:
                expected = expected + head.bias(torch.tensor(tokens[-1]))
            told = one.logits
            if head.vocabulary is not None:
                outside = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, head.vocabulary, False)
                assert bool((told[outside] == -torch.inf).all())
                told = told[head.vocabulary]
            worst = max(worst, float((told - expected).abs().max()))
            if one.chance is not None:  # the guess that the node is was made by the row before
                foreseen = head.confidence(normed[row - 1], torch.tensor(tokens[-2])).sigmoid()
                worst = max(worst, abs(one.chance - float(foreseen)))
    return worst


def audit(decoding: Decoding) -> None:
    """The memory is what the features of each row's text project to, and nothing of any block."""
    head: Any = decoding.head
    for row, text in enumerate(decoding.context.history.ids):
        ids = text[: decoding.drafter.features.rows[row].start]  # what was taken is in memory
        if not ids:
            continue
        batch = TeacherBatch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([1]))
        with torch.no_grad():
            context = head.fuse(Teacher(decoding.model).label(batch, head.taps).taps)
            positions = torch.arange(len(ids))[None]
            for layer, block in enumerate(head.layers):
                cache, attention = decoding.drafter.cache, block.self_attn
                keys, values = (held[layer][row, :, : len(ids)] for held in (cache.keys, cache.values))
                torch.testing.assert_close(keys, attention.keys(context, positions)[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(values, attention.values(context)[0], rtol=1e-5, atol=1e-5)


TREE = "static/branching=2x2x1x1"


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_training_in_a_ragged_batch(
    kind: str, model: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 4)  # prompts of several chunks
    decoding = Decoding(model, random_head(model, **KINDS[kind]), TEXTS, Recorded)
    decoding.step(TREE)
    decoding.step(TREE)
    audit(decoding)
    decoding.step("dyspec/size=8", depth_limit=[4, 0, 2, 1])
    audit(decoding)
    decoding.keep([0, 2, 3])
    decoding.step("eagle2")
    decoding.step("chain", depth_limit=[0, 0, 0])  # nothing is proposed: what became known waits
    decoding.step("chain")
    audit(decoding)
    passes = decoding.drafter.passes
    assert {len(one.path) for one in passes} == {0, 1, 2, 3}
    assert len(passes) > 40
    assert any(one.chance is not None for one in passes) == KINDS[kind].get("confidence", False)
    told = torch.stack([one.logits for one in passes])
    assert check(decoding) < 1e-5 * max(1.0, float(told[told.isfinite()].std()))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_are_those_of_training_alone(kind: str, model: TransformersModel) -> None:
    for text in (TEXTS[0], TEXTS[2]):
        decoding = Decoding(model, random_head(model, **KINDS[kind]), [text], Recorded)
        for shape in ("chain", "static/branching=3x2", "dyspec/size=5"):
            decoding.step(shape)
        audit(decoding)
        assert check(decoding) < 1e-5


class LatePrompt(Recorded):
    """A mutant: features of the prompt one place too late."""

    def read_prompt(self, chunk: PromptChunk) -> None:
        super().read_prompt(replace(chunk, taps=chunk.taps.roll(1, 1)))


class LateStep(Recorded):
    """A mutant: features of kept nodes are those of the nodes before them."""

    def observe(self, commit: Commit) -> None:
        assert commit.taps is not None
        super().observe(replace(commit, taps=commit.taps.roll(1, 1)))


class LeftBehind(Recorded):
    """A mutant: rows of the block are taken for text."""

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        moved = replace(context, length=context.length + 1, lengths=[length + 1 for length in context.lengths])
        for row in self.features.rows:
            row.start += 1
        try:
            return super().begin(moved, limits)
        finally:
            for row in self.features.rows:
                row.start -= 1


@pytest.mark.parametrize("mutant", [LatePrompt, LateStep, LeftBehind])
@torch.inference_mode()
def test_features_in_the_wrong_place_are_caught(mutant: type[Recorded], model: TransformersModel) -> None:
    decoding = Decoding(model, random_head(model), [TEXTS[2]], mutant)
    decoding.step(TREE, choose=lambda row, parents: 3)
    decoding.step(TREE)
    assert check(decoding) > 1e-2


def proposed(decoding: Decoding, shape: str, depth: int = 4) -> TokenTree:
    """A tree that is not decoded further."""
    context = decoding.context
    tree: TokenTree = decoding.drafter.propose(context, parse_shape(shape, depth), DrawMode.COUPLED, noise_for(context))
    return tree


@torch.inference_mode()
def test_a_block_bounds_the_depth(model: TransformersModel) -> None:
    for changes, guesses in (({}, 4), ({"sample_from_anchor": True}, 5), ({"causal": True}, 4)):
        decoding = Decoding(model, random_head(model, **changes), [TEXTS[2]], Recorded)
        decoding.context.depth_limit = [9]
        assert proposed(decoding, "chain", 8).num_nodes == 1 + guesses


@torch.inference_mode()
def test_a_causal_block_runs_only_the_rows_it_needs(model: TransformersModel) -> None:
    head = random_head(model, causal=True)
    widths: list[int] = []
    rows = head.rows
    head.rows = lambda blocks, *rest: (widths.append(blocks.shape[1]), rows(blocks, *rest))[1]  # type: ignore[method-assign]
    Decoding(model, head, [TEXTS[2]], Recorded).step("chain/depth=2")
    assert widths == [3]


def test_a_head_of_another_target_is_refused(model: TransformersModel) -> None:
    with pytest.raises(ModelError, match="trained for a target of vocabulary 7"):
        DFlash(DFlashHead(replace(CONFIG, vocab_size=7, mask_token_id=0)), model)
    with pytest.raises(ModelError, match="output of target layer 4"):
        DFlash(DFlashHead(replace(CONFIG, layer_ids=(1, 4))), model)


@torch.inference_mode()
def test_the_confidence_head_can_stop_a_chain(model: TransformersModel) -> None:
    decoding = Decoding(model, random_head(model, markov_rank=6, confidence=True), TEXTS, Recorded)
    for threshold, nodes in ((0.0, 2), (1.0, 5)):  # at once; never
        shape = f"specdec/threshold={threshold}"
        assert proposed(decoding, shape).num_nodes == nodes
    check_stop(DFlash(decoding.head, model), parse_shape(shape, 4))
    chance = decoding.drafter.chance
    assert bool(((chance > 0) & (chance < 1)).all())
    without = Decoding(model, random_head(model, markov_rank=6), TEXTS, Recorded)
    with pytest.raises(ConfigError, match="none is loaded"):
        proposed(without, shape)
    with pytest.raises(ConfigError, match="none is loaded"):
        check_stop(DFlash(without.head, model), parse_shape(shape, 4))


@pytest.mark.parametrize("of_head", [torch.float32, torch.bfloat16])
def test_a_target_in_bfloat16(of_head: torch.dtype) -> None:
    small = TransformersModel(tiny_module("qwen3", dtype=torch.bfloat16))
    head = random_head(small, **KINDS["all"]).to(of_head)
    found = Engine(small, speculative=ENGINE, method=DFlash(head, small)).generate_batch(REQUESTS)
    assert [len(completion.token_ids) for completion in found] == [12, 13, 14, 15]
    assert sum(completion.num_accepted_tokens for completion in found) > 0


# -- through the engine ----------------------------------------------------------------------------------------------

ENGINE = {"method": "draft_model", "num_speculative_tokens": 4, "verify": "coupled"}
REQUESTS = [
    Request(
        text, SamplingParams(max_new_tokens=12 + row, temperature=(0.0, 0.7, 1.0, 1.0)[row], seed=row, ignore_eos=True)
    )
    for row, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def expected(model: TransformersModel) -> list[list[int]]:
    engine = Engine(model, speculative={"method": "none"})
    return [completion.token_ids for completion in engine.generate_batch(REQUESTS)]


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("shape", ["chain", "static/branching=3x2x1", "dyspec/size=6"])
def test_the_same_text_as_plain(kind: str, shape: str, model: TransformersModel, expected: list[list[int]]) -> None:
    method = DFlash(random_head(model, **KINDS[kind]), model)
    found = Engine(model, speculative={**ENGINE, "shape": shape}, method=method).generate_batch(REQUESTS)
    assert [completion.token_ids for completion in found] == expected
    assert all(completion.num_draft_tokens > 0 for completion in found)


def test_drawn_blocks_carry_their_law(model: TransformersModel) -> None:
    """Rejection sampling over draws of the block's marginals runs, trees being legal at every step."""
    method = DFlash(random_head(model, **KINDS["markov"]), model)
    found = Engine(model, speculative={**ENGINE, "verify": "rejection"}, method=method).generate_batch(REQUESTS)
    assert [len(completion.token_ids) for completion in found] == [12, 13, 14, 15]
