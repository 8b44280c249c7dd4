"""The block drafter's mask, layout, names and start."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.core.errors import ConfigError
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig, block_mask, block_positions, spread_layers
from foretell.model.hf.adapter import TransformersModel
from tests.model.tiny import VOCAB, tiny_module

CONFIG = DFlashHeadConfig(
    hidden_size=16, vocab_size=VOCAB, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8, num_layers=2,
    block_size=4, layer_ids=(0, 2), mask_token_id=3,
)  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_sees_features_before_its_anchor_and_its_own_block(causal: bool) -> None:
    anchors = torch.tensor([[0, 2, 5], [4, 4, 1]])
    mask = block_mask(anchors, 6, 4, causal=causal)
    assert mask.shape == (2, 1, 12, 18)
    for row in range(2):
        for query in range(12):
            block, offset = divmod(query, 4)
            text = [t < int(anchors[row, block]) for t in range(6)]
            own = [k // 4 == block and (k % 4 <= offset or not causal) for k in range(12)]
            assert mask[row, 0, query].tolist() == text + own
    assert block_positions(anchors, 4)[1, 2].tolist() == [1, 2, 3, 4]
    near = block_mask(anchors, 6, 4, causal=causal, window=4)
    for row in range(2):
        for query in range(12):
            position = int(anchors[row, query // 4]) + query % 4
            seen = [bool(mask[row, 0, query, t]) and position - t < 4 for t in range(6)]
            assert near[row, 0, query].tolist() == seen + mask[row, 0, query, 6:].tolist()


def run(head: DFlashHead, taps: torch.Tensor, blocks: torch.Tensor, anchors: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return head(taps, blocks, torch.tensor([anchors]))


def test_what_a_block_must_not_see_does_not_change_it() -> None:
    """By value: features from the anchor on, other blocks, and with the causal option later rows."""
    random = torch.Generator().manual_seed(1)
    taps = torch.randn(1, 6, 32, generator=random)
    blocks = torch.randn(1, 2, 4, 16, generator=random)
    for causal in (False, True):
        head = DFlashHead.fresh(replace(CONFIG, causal=causal), seed=2)
        expected = run(head, taps, blocks, [3, 1])
        hidden_later = taps.clone()
        hidden_later[:, 3:] += 1.0
        torch.testing.assert_close(run(head, hidden_later, blocks, [3, 1]), expected)
        other = blocks.clone()
        other[:, 1] += 1.0
        torch.testing.assert_close(run(head, taps, other, [3, 1])[:, 0], expected[:, 0])
        torch.testing.assert_close(run(head, taps, blocks[:, :1], [3])[:, 0], expected[:, 0])
        seen = taps.clone()
        seen[:, 2] += 1.0  # the feature right before the anchor
        assert float((run(head, seen, blocks, [3, 1])[:, 0] - expected[:, 0]).abs().min(-1).values.max()) > 1e-4
        last = blocks.clone()
        last[:, 0, 3] += 1.0
        change = (run(head, taps, last, [3, 1]) - expected)[0, 0].abs().amax(-1)
        assert (change[:3] > 1e-4).tolist() == [not causal] * 3
        assert float(change[3]) > 1e-2


def test_names_are_those_of_the_authors() -> None:
    head = DFlashHead(replace(CONFIG, markov_rank=5, confidence=True))
    layer = {
        "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    }  # fmt: skip
    extra = {
        "markov_head.markov_w1.weight": (VOCAB, 5), "markov_head.markov_w2.weight": (VOCAB, 5),
        "confidence_head.proj.weight": (1, 21), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    expected = {f"layers.{i}.{name}" for i in range(2) for name in layer} | {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
    assert set(shapes) == expected | set(extra)
    assert shapes["fc.weight"] == (16, 32)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert {name: shapes[name] for name in extra} == extra
    assert set(DFlashHead(CONFIG).state_dict()) == expected


def test_rows_and_guesses() -> None:
    assert (CONFIG.first_row, CONFIG.num_guesses, CONFIG.num_rows(2)) == (1, 3, 4)
    spark = replace(CONFIG, sample_from_anchor=True)
    assert (spark.first_row, spark.num_guesses, spark.num_rows(2)) == (0, 4, 4)
    assert replace(CONFIG, causal=True).num_rows(2) == 3
    assert replace(spark, causal=True).num_rows(2) == 2
    assert replace(spark, windows=(4, 9)).num_rows(2) == 2
    assert replace(spark, windows=(4, 0)).num_rows(2) == 4


def test_a_fresh_head_is_a_function_of_its_seed_and_starts_with_the_targets_norm() -> None:
    module: Any = tiny_module("qwen3", hidden_size=16)
    with torch.no_grad():
        module.model.norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    config = replace(CONFIG, markov_rank=5, confidence=True)
    one, same, other = (DFlashHead.fresh(config, seed=seed, model=TransformersModel(module)) for seed in (1, 1, 2))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, same.state_dict()[name], rtol=0, atol=0)
    assert float((one.fc.weight - other.fc.weight).detach().abs().max()) > 0.1
    torch.testing.assert_close(one.norm.weight.detach(), torch.linspace(0.5, 2.0, 16), rtol=1e-5, atol=1e-5)
    assert float(one.bias(torch.arange(VOCAB)).detach().abs().max()) == 0
    assert float(one.confidence(torch.ones(3, 16), torch.arange(3)).detach().abs().max()) == 0


def test_the_authors_layers() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(12, 1) == (6,)
    for num_layers in range(2, 12):
        layers = spread_layers(num_layers, 3)
        assert layers == tuple(sorted(set(layers)))
        assert len(layers) == min(3, num_layers)
        assert layers[-1] < num_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size = 1 of a dflash head must be at least 2"),
        ({"mask_token_id": VOCAB}, "mask_token_id = 61 of a dflash head must be between 0 and 60"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 .* a divisor of num_heads = 2"),
        ({"layer_ids": ()}, "layer_ids"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)
    replace(CONFIG, block_size=1, sample_from_anchor=True)  # one guess from the anchor is a block
