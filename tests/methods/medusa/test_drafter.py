"""Medusa as a drafter: distributions of the training-time forward at the right place, through prompts, trees and
dropped rows, and plain decoding's text in every shape."""

from typing import Any

import pytest
import torch
from torch import nn

from foretell import Engine, Request, SamplingParams
from foretell.draft.shapes import SHAPES
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.medusa import drafter as module
from foretell.methods.medusa.drafter import Medusa, MedusaDrafter
from foretell.methods.medusa.head import MedusaHead, MedusaObjective
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import CausalModel
from tests.methods.decoding import Pass, Recording
from tests.model.tiny import tiny_module

V, K = 40, 3
SHAPE_TEXTS = [
    "chain", "adaptive/threshold=0.05", "static/branching=3x2x1x1", "sequoia/size=9",
    "dyspec/size=9/width=3", "eagle2/size=9/width=3", "opt_tree/size=9/threshold=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return TransformersModel(
        tiny_module("qwen3", hidden_size=16, num_hidden_layers=2, vocab_size=V, num_attention_heads=2)
    )


def trained(model: CausalModel, **options: Any) -> MedusaHead:
    """As if trained: no block the identity, all heads different."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = MedusaHead.fresh(model, num_heads=K, num_layers=2, **options)
        for parameter in head.parameters():
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return head


def requests(count: int = 4, max_new_tokens: int = 14) -> list[Request]:
    """Ragged prompts, the first of one token; different ends, one greedy row, one with a penalty on its own path."""
    generator = torch.Generator().manual_seed(9)
    texts = [torch.randint(3, V, (length,), generator=generator).tolist() for length in (1, 9, 4, 13)]
    params = [
        SamplingParams(max_new_tokens=max_new_tokens, seed=1, ignore_eos=True),
        SamplingParams(max_new_tokens=max_new_tokens - 5, seed=2, temperature=0.0, ignore_eos=True),
        SamplingParams(max_new_tokens=max_new_tokens - 2, seed=3, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(max_new_tokens=max_new_tokens, seed=4, temperature=0.7, top_k=7),
    ]
    return [Request(text, one) for text, one in zip(texts[:count], params[:count], strict=True)]


def engine(model: CausalModel, head: MedusaHead, shape: str, verify: str = "coupled", gamma: int = 4) -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": gamma, "verify": verify, "shape": shape}
    return Engine(model, None, speculative=config, method=Medusa(head, model))


def plain(model: CausalModel) -> list[list[int]]:
    found = Engine(model, None, speculative={"method": "none"})
    return [one.token_ids for one in found.generate_batch(requests(), batch_size=1)]


@pytest.mark.parametrize("shape", SHAPE_TEXTS)
def test_the_same_text(model: CausalModel, shape: str) -> None:
    """Under coupled draws the text is that of plain decoding, together and alone; guesses are made, some are kept."""
    expected, head = plain(model), trained(model)
    together = engine(model, head, shape).generate_batch(requests())
    alone = engine(model, head, shape).generate_batch(requests(), batch_size=1)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone] == expected
    assert sum(one.num_accepted_tokens for one in together) > 0
    assert [one.num_accepted_tokens for one in together] == [one.num_accepted_tokens for one in alone]
    assert not any(any(one.num_draft_tokens_per_pos[K:]) for one in together), "no deeper than there are heads"
    assert all(one.num_draft_tokens > 0 for one in together)


def test_all_shapes_are_tested() -> None:
    assert {text.split("/")[0] for text in SHAPE_TEXTS} == set(Medusa.capabilities.shapes) == set(SHAPES) - {"specdec"}


@pytest.mark.parametrize("options", [{"own_lm_head": False}, {"draft_vocab": torch.arange(0, V, 3)}], ids=str)
def test_other_heads(model: CausalModel, options: dict[str, Any]) -> None:
    """The target's own linear layer, and a reduced vocabulary, of which alone guesses come."""
    found = engine(model, trained(model, **options), "static/branching=2x2x1").generate_batch(requests())
    assert [one.token_ids for one in found] == plain(model)
    assert sum(one.num_accepted_tokens for one in found) > 0


def errors(model: CausalModel, head: MedusaHead, passes: list[Pass], shift: int = 0) -> float:
    """Largest distance of what was said from the training-time forward on the same tokens: the slot of head k + 1, at the
    place that is supervised by p at the position of the k-th guess's parent."""
    worst = 0.0
    for one in passes:
        depth, tokens = len(one.path), torch.tensor([one.text + [0] * K])
        batch = TeacherBatch(tokens, torch.tensor([tokens.shape[1]]), torch.tensor([1]))
        labeled = Teacher(model).label(batch, head.taps)
        outcome = MedusaObjective(head).outcome(labeled, Teacher(model), torch.Generator(), training=False)
        slot = outcome.slots[depth]
        # The pending token is the text's last; the distribution of the guess behind depth guesses stands where p does.
        place = (slot.at == len(one.text) - 1 + depth + shift).nonzero()[0, 0]
        expected = slot.logits[place].detach()
        if slot.vocab is not None:
            expected = torch.full((V,), -torch.inf).index_copy(0, slot.vocab, expected)
        finite = expected.isfinite()
        assert torch.equal(finite, one.logits.isfinite())
        worst = max(worst, float((one.logits - expected)[finite].abs().max()))
    return worst


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2x1", "dyspec/size=9/width=3"])
def test_decoding_is_the_training_forward(
    model: CausalModel, monkeypatch: pytest.MonkeyPatch, shape: str, batch_size: int
) -> None:
    """Logits of decoding, rows ragged and dropped on the way, are those of one forward over the whole text; one place
    earlier or later they are not."""
    head, passes = trained(model), list[Pass]()

    class Recorded(Recording, MedusaDrafter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.passes = passes

    monkeypatch.setattr(module, "MedusaDrafter", Recorded)
    with torch.random.fork_rng():
        engine(model, head, shape).generate_batch(requests(max_new_tokens=10), batch_size=batch_size)
    assert {len(one.path) for one in passes} == {0, 1, 2}
    chosen = passes[:: max(1, len(passes) // 24)]
    assert errors(model, head, chosen) < 1e-5
    inner = [one for one in chosen if len(one.text) > 2][:10]
    for shift in (-1, 1):
        assert errors(model, head, [one for one in inner if len(one.path) < 2], shift) > 0.1


def test_chunked_prompts(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts read in chunks of 4, of which short rows are not in the later ones: the same guesses."""
    import foretell.model.prefill as prefill

    head = trained(model)
    expected = engine(model, head, "chain").generate_batch(requests())
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 4)
    found = engine(model, head, "chain").generate_batch(requests())
    assert [one.num_accepted_tokens for one in found] == [one.num_accepted_tokens for one in expected]
    assert [one.num_draft_tokens for one in found] == [one.num_draft_tokens for one in expected]


def test_rejection_runs(model: CausalModel) -> None:
    """Drawn guesses carry their distribution: a verifier that reads it finds what it needs, greedy rows stay plain."""
    for shape in ("chain", "static/branching=2x2", "dyspec/size=6/width=3"):
        found = engine(model, trained(model), shape, verify="rejection").generate_batch(requests())
        assert found[1].token_ids == plain(model)[1]
        assert sum(one.num_accepted_tokens for one in found) > 0


def test_heads_are_not_trained_by_decoding(model: CausalModel) -> None:
    head = trained(model)
    engine(model, head, "chain").generate_batch(requests(2))
    assert all(isinstance(parameter, nn.Parameter) and parameter.grad is None for parameter in head.parameters())
