"""An inflated model computes what the small one computes, and nothing in it is free."""

from __future__ import annotations

import pytest
import torch
from recipes.inflate import TIME_ONLY, inflate, real_heads, real_layers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from foretell import bundled


def tiny(*, heads: int = 4, kv_heads: int = 2, tied: bool = True) -> Qwen3ForCausalLM:
    """A random Qwen3 model in which every weight matters, norms included."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, intermediate_size=48, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.3)
    return model


def largest_difference(small: torch.nn.Module, big: torch.nn.Module, vocab: int) -> float:
    """Largest difference of float32 logits on random tokens, in a full pass and in a pass over a cache."""
    tokens = torch.randint(4, vocab, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full = (big(tokens).logits[..., :vocab] - small(tokens).logits).abs().max()
        past = big(tokens[:, :20], use_cache=True).past_key_values
        cached = (
            (big(tokens[:, 20:], past_key_values=past).logits[..., :vocab] - small(tokens).logits[:, 20:]).abs().max()
        )
    return max(full.item(), cached.item())


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (4, 4), (2, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_same_logits_for_every_grouping(heads: int, kv_heads: int, tied: bool) -> None:
    small = tiny(heads=heads, kv_heads=kv_heads, tied=tied)
    big = inflate(small, hidden=96, layers=7, intermediate=80, heads=8, kv_heads=4)
    assert largest_difference(small, big, 61) < 1e-4


def test_same_logits_of_the_bundled_target() -> None:
    small = AutoModelForCausalLM.from_pretrained(bundled.path("target"), dtype=torch.float32)
    big = inflate(small, hidden=512, layers=8, intermediate=1024, heads=8, kv_heads=4)
    assert largest_difference(small, big, small.config.vocab_size) < 1e-4


def test_a_wrong_epsilon_is_seen() -> None:
    """Negative control: the bound is tight enough to notice a norm that is scaled wrongly."""
    small = tiny()
    big = inflate(small, hidden=96, layers=7, intermediate=80, heads=8, kv_heads=4)
    with torch.no_grad():
        big.model.norm.weight *= 1.001
    assert largest_difference(small, big, 61) > 1e-4


def test_extra_vocabulary_is_marked_and_keeps_the_real_logits() -> None:
    small = tiny()
    big = inflate(small, hidden=64, layers=4, intermediate=64, heads=8, kv_heads=4, vocab=100)
    assert getattr(big.config, TIME_ONLY)
    assert big.lm_head.weight.shape[0] == 100
    assert largest_difference(small, big, 61) < 1e-4


def test_what_cannot_contribute_is_random_not_zero() -> None:
    big = inflate(tiny(), hidden=96, layers=7, intermediate=80, heads=8, kv_heads=4)
    for name, weight in big.named_parameters():
        if not name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            assert (weight == 0).float().mean() < 0.01, name


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="smaller"):
        inflate(tiny(), hidden=16)
    with pytest.raises(ValueError, match="do not fit"):
        real_heads(4, 4, 8, 2)


def test_layers_are_spread_evenly() -> None:
    assert real_layers(6, 26) == [2, 6, 10, 15, 19, 23]
    assert real_layers(3, 3) == [0, 1, 2]
