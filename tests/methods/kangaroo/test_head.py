"""The adapter alone: names, the early exit it starts as, and whole texts against nodes and slots."""

import pytest
import torch

from foretell.core.errors import ModelError
from foretell.core.tree import layout
from foretell.heads.modules import causal_mask
from foretell.methods.kangaroo.head import KangarooHead, KangarooHeadConfig
from foretell.model.hf.adapter import TransformersModel
from tests.model.tiny import VOCAB, tiny_module


def random_head(exit_layer: int = 2, hidden_size: int = 32, vocab_size: int = VOCAB) -> KangarooHead:
    """Grouped heads, and every weight matters."""
    head = KangarooHead(
        KangarooHeadConfig(hidden_size, vocab_size, exit_layer, num_heads=4, num_kv_heads=2, head_dim=8)
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + (weight.ndim == 1))
    return head


def test_names_are_the_authors() -> None:
    """Of AdapterModel in kangaroo/adapter.py of Equationliu/Kangaroo."""
    assert sorted(random_head().state_dict()) == [
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.v_proj.weight",
        "norm.weight",
    ]


def test_taps_are_outputs_of_layers() -> None:
    assert random_head(exit_layer=3).taps == (2,)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_fresh_head_is_the_early_exit(family: str) -> None:
    module = tiny_module(family)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name or "ln_" in name:
                weight.add_(torch.linspace(-0.3, 0.3, len(weight)) if name.endswith("weight") else 0.0)
    model = TransformersModel(module)
    head = KangarooHead.fresh(model, exit_layer=2, head_dim=8)
    assert (head.config.num_heads, head.config.num_kv_heads) == (4, 4)
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    hidden -= hidden.mean(-1, keepdim=True)  # where a layer norm is an RMS norm
    features = head(hidden, torch.arange(5)[None], causal_mask(torch.tensor([5, 5]), 5))
    torch.testing.assert_close(model.head(features), model.logits(hidden), atol=1e-4, rtol=1e-5)


def test_nodes_in_slots_are_the_text() -> None:
    """A prompt that is remembered, then a tree: every node as in the text of its own path."""
    head, generator = random_head(), torch.Generator().manual_seed(2)
    length, parent = torch.tensor([3, 6]), torch.tensor([[-1, 0, 1, 0, 3], [-1, 0, 0, 2, -1]])
    hidden = torch.randn(2, 6, 32, generator=generator)
    nodes = torch.randn(2, 5, 32, generator=generator)
    cache = head.new_cache(2, 16)
    head.remember(hidden, torch.arange(6).expand(2, -1), cache)
    plan = layout(parent, length, 16)
    found = torch.cat(
        [head.step(nodes[:, :1], plan.nodes(0, 1), cache), head.step(nodes[:, 1:], plan.nodes(1, 5), cache)], 1
    )
    for row in range(2):
        for node in range(5):
            if node and parent[row, node] < 0:
                continue
            path = plan.ancestry[row, node].nonzero()[:, 0]
            text = torch.cat([hidden[row, : length[row]], nodes[row, path]])[None]
            size = text.shape[1]
            expected = head(text, torch.arange(size)[None], causal_mask(torch.tensor([size]), size))[0, -1]
            torch.testing.assert_close(found[row, node], expected, atol=1e-5, rtol=1e-5)


def test_a_target_of_another_size_is_refused() -> None:
    spec = TransformersModel(tiny_module("llama")).spec
    random_head().check_target(spec, name="head")
    with pytest.raises(ModelError, match=r"hidden size 16, and .* has 32"):
        random_head(hidden_size=16).check_target(spec, name="head")
    with pytest.raises(ModelError, match="vocabulary 7, and"):
        random_head(vocab_size=7).check_target(spec, name="head")
    with pytest.raises(ModelError, match="at least one layer to verify"):
        random_head(exit_layer=4).check_target(spec, name="head")
    with pytest.raises(ModelError, match="output of target layer 4"):
        random_head(exit_layer=5).check_target(spec, name="head")
