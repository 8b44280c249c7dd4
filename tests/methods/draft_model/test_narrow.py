"""A draft model with a part of its vocabulary: the same logits there, no chance elsewhere, and the same text."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import ConfigError, Engine, speculative_config
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, chain_tree, layout
from foretell.draft.base import Context
from foretell.draft.shapes import Shape
from foretell.kernels.native import library
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.methods.draft_model.vocabulary.narrow import NarrowModel, frequent_tokens
from foretell.model.hf.adapter import TransformersModel
from foretell.model.llama.read import matrices
from foretell.model.llama.run.native import NativeModel
from foretell.model.load import load_model
from foretell.model.target import CausalModel, Target
from tests.certify.harness import Spoilt
from tests.engine.test_rejection import ALPHA, p_value, toy
from tests.model.tiny import tiny_module

IDS = torch.tensor([0, 3, 4, 5, 17, 400, 401, 8191])


def logits(model: CausalModel) -> torch.Tensor:
    """[1, 6, V] of a text, the way a drafter reads it."""
    tokens = torch.tensor([[5, 9, 300, 17, 2, 44]])
    target = Target(model, 1, 64)
    tree = chain_tree(tokens, torch.tensor([6]))
    out = target.forward(tokens, layout(tree.parent, torch.tensor([0]), 64)).logits
    return out.float()


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        ({"implementation": "native", "dtype": "float32"}, 1e-5),
        ({"implementation": "native", "dtype": "bfloat16"}, 0.05),
        ({"implementation": "native", "dtype": "bfloat16", "weights": "int8"}, 0.05),
        ({"implementation": "lean", "dtype": "float32"}, 1e-4),
        ({"implementation": "transformers", "dtype": "bfloat16"}, 0.1),
    ],
)
def test_logits_of_the_tokens_that_are_left(keys: dict[str, Any], tolerance: float) -> None:
    if keys["implementation"] == "native" and library()[1] is not None:
        pytest.skip("no native decoder here")
    inner = load_model("bundled/draft", **keys)
    assert isinstance(inner, NativeModel) == (keys["implementation"] == "native")
    whole, narrow = logits(inner), logits(NarrowModel(inner, IDS))
    assert narrow.shape == whole.shape
    assert float((narrow[..., IDS] - whole[..., IDS]).abs().max()) <= tolerance
    rest = torch.ones(whole.shape[-1], dtype=torch.bool)
    rest[IDS] = False
    assert bool((narrow[..., rest] == -torch.inf).all())


def test_frequent_tokens_hold_the_end() -> None:
    model = load_model("bundled/draft", implementation="lean")
    ends = set(model.spec.eos_token_ids)
    assert ends
    assert frequent_tokens(model, 100).tolist() == sorted({*range(100), *ends})
    for size in (0, model.spec.vocab_size + 1):
        with pytest.raises(ConfigError, match=f"draft_vocab_size = {size} must be between 1 and 8192"):
            frequent_tokens(model, size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same(temperature: float) -> None:
    prompts = ["def add(a, b):", "The history of", "3 + 4 ="]
    texts, kept = [], []
    for config in ({"method": "none"}, {"method": "draft_model"}, {"method": "draft_model", "draft_vocab_size": 2048}):
        engine = Engine.load("bundled", speculative=config)
        found = [
            engine.generate(prompt, max_new_tokens=32, temperature=temperature, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
        texts.append([one.token_ids for one in found])
        kept.append(sum(one.num_accepted_tokens for one in found))
    assert texts[0] == texts[1] == texts[2]
    assert kept[2] > 0.5 * kept[1], "a quarter of the vocabulary holds most of what is written"
    assert max(max(ids) for ids in texts[0]) >= 2048, "else nothing was out of reach"


@pytest.mark.skipif(library()[1] is not None, reason="no native decoder here")
def test_a_large_draft_has_four_bits_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its narrow head has the very values of the whole one, in half the bytes of eight bits; the text is the same."""
    monkeypatch.setattr(matrices, "LARGE", 1 << 16)
    plain = Engine.load("bundled", speculative="none").generate("def add(a, b):", temperature=0.0, max_new_tokens=24)
    engine = Engine.load("bundled", speculative={"method": "draft_model"})
    method = engine.choice().method
    assert isinstance(method, DraftModel)
    assert method.model.spec.weights == "int4"
    written = engine.generate("def add(a, b):", temperature=0.0, max_new_tokens=24)
    assert written.token_ids == plain.token_ids
    assert written.num_accepted_tokens > 0
    whole, narrow = logits(method.model), logits(NarrowModel(method.model, IDS))
    assert torch.equal(narrow[..., IDS], whole[..., IDS])
    named = Engine.load("bundled", speculative={"method": "draft_model", "draft_weights": "auto"})
    assert "int4" not in named.choice().method.model.spec.weights  # type: ignore[attr-defined]


def few() -> CausalModel:
    """A draft model of six tokens that guesses three of them."""
    inner = TransformersModel(tiny_module("llama", vocab_size=6, eos_token_id=None))
    return NarrowModel(inner, torch.tensor([0, 2, 5]))


class Whole(ModelDrafter):
    """The fault: what is guessed has no chance under the q that is reported for a part of the guesses."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, draws, noise)
        if tree.q is None:
            return tree
        return replace(tree, q=torch.where(tree.q.sum(-1, keepdim=True) > 0, 1 / 6, 0.0).expand_as(tree.q).contiguous())


def test_under_rejection_the_law_is_the_targets() -> None:
    """Half of the target's mass lies where q has none."""
    assert p_value(toy(6, seed=3), DraftModel(few()), 2, samples=600) > ALPHA


def test_control_a_q_of_the_whole_vocabulary_is_found() -> None:
    assert p_value(toy(6, seed=3), Spoilt(Whole, few()), 2, samples=600) < ALPHA


def test_wrong_size() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size = -1 must be 0"):
        speculative_config({"method": "draft_model", "draft_vocab_size": -1})
    with pytest.raises(ConfigError, match="must be between 1 and 8192"):
        Engine.load("bundled", speculative={"method": "draft_model", "draft_vocab_size": 9000})
