"""Medusa heads: what each computes, by hand; weights of their own; all heads at once as one by one; names; beginnings."""

import pytest
import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError
from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig, head_weight, norm_weight
from foretell.model.hf.adapter import TransformersModel
from tests.engine.harness import table
from tests.model.tiny import tiny_module

H, V = 16, 24


def random_head(*, num_heads: int = 3, num_layers: int = 2, columns: int = V, own: bool = True) -> MedusaHead:
    """Random weights everywhere, the identity nowhere."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        head = MedusaHead(MedusaHeadConfig(H, V, num_heads, num_layers, 1, columns, own))
        for parameter in head.parameters():
            nn.init.normal_(parameter, std=0.3)
    return head


def by_hand(head: MedusaHead, x: Tensor, index: int) -> Tensor:
    """Head ``index`` from its named weights alone."""
    state, num_layers = head.state_dict(), head.config.num_layers
    for layer in range(num_layers):
        z = x @ state[f"{index}.{layer}.linear.weight"].t() + state[f"{index}.{layer}.linear.bias"]
        x = x + z / (1 + torch.exp(-z))
    return x @ state[f"{index}.{num_layers}.weight"].t() if head.config.own_lm_head else x


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_by_hand(num_layers: int, own: bool) -> None:
    """One by one as training does it, and all at once as decoding does, before and after the weights were put together."""
    head = random_head(num_layers=num_layers, own=own)
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([by_hand(head, x, index) for index in range(3)], 1)  # [B, K, DV]
    torch.testing.assert_close(torch.stack([head(x, index) for index in range(3)], 1), expected, atol=1e-5, rtol=0)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    stacked = head.stacked()
    for num_heads in (1, 2, 3):
        for rows in (1, 4):
            found = stacked(x[:rows], num_heads)
            torch.testing.assert_close(found, expected[:rows, :num_heads], atol=1e-5, rtol=0)
    for name, value in head.state_dict().items():
        assert torch.equal(value, before[name]), name
    torch.testing.assert_close(torch.stack([head(x, index) for index in range(3)], 1), expected, atol=1e-5, rtol=0)


def test_stacked_weights_are_not_held_twice() -> None:
    head = random_head()
    stacked = head.stacked()
    with torch.no_grad():
        stacked.out[2] += 1.0
        stacked.blocks[1][0][0] += 1.0
    assert torch.equal(head.one(2).get_parameter("2.weight"), stacked.out[2])
    assert torch.equal(head.one(0).get_parameter("1.linear.weight"), stacked.blocks[1][0][0])


def spread(head: MedusaHead) -> set[tuple[int, int]]:
    """(head, block) of all blocks that change when block 0 of head 0 is trained."""
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with torch.no_grad():
        head.one(0).get_parameter("0.linear.weight").add_(1.0)
    names = [name for name, value in head.state_dict().items() if not torch.equal(value, before[name])]
    return {(int(name.split(".")[0]), int(name.split(".")[1])) for name in names}


def test_every_block_has_its_own_weights() -> None:
    """Changing one block changes no other; a mutant that lists one block several times is caught by the same measure."""
    assert spread(random_head()) == {(0, 0)}
    mutant = random_head()
    for index in range(3):
        block = mutant.one(index)[0]
        mutant.add_module(str(index), nn.Sequential(block, block, mutant.one(index)[2]))
    assert spread(mutant) == {(0, 0), (0, 1)}


def test_names() -> None:
    """Those of the authors' checkpoints, and the map of a reduced vocabulary."""
    expected = {f"{k}.{j}.linear.{part}" for k in range(3) for j in range(2) for part in ("weight", "bias")}
    assert set(random_head().state_dict()) == expected | {f"{k}.2.weight" for k in range(3)}
    assert set(random_head(own=False).state_dict()) == expected
    assert set(random_head(columns=9).state_dict()) - expected == {*(f"{k}.2.weight" for k in range(3)), "token_map"}


def test_a_fresh_head_repeats_the_target() -> None:
    """Blocks are the identity and linear layers the target's own: each head says what the target says of the next token."""
    model = TransformersModel(tiny_module("qwen3", hidden_size=H, num_hidden_layers=2, vocab_size=V))
    x = torch.randn(1, 5, H, generator=torch.Generator().manual_seed(2))
    expected = model.head(x).detach()
    torch.testing.assert_close(head_weight(model), model.module.get_output_embeddings().weight.detach())
    chosen = torch.tensor([0, 3, 4, 11, 23])
    head = MedusaHead.fresh(model, num_heads=2, num_layers=2)
    small = MedusaHead.fresh(model, num_heads=2, draft_vocab=chosen)
    assert (head.taps, head.config.num_layers, small.config.draft_vocab_size) == ((1,), 2, 5)
    assert torch.equal(small.token_map, chosen)
    for index in range(2):
        torch.testing.assert_close(head(x, index), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(small(x, index), expected[..., chosen], atol=1e-5, rtol=1e-5)
    assert torch.equal(MedusaHead.fresh(model, num_heads=2, own_lm_head=False)(x, 1), x)
    assert head.num_parameters == 2 * (2 * (H * H + H) + V * H)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
def test_the_weight_of_a_final_norm(name: str) -> None:
    """Whatever the norm is: weight of an RMS norm, one more than that (Gemma), weight of a layer norm with a shift."""
    module = tiny_module(name)
    norm: nn.Module = module.transformer.ln_f if name == "gpt2" else module.model.norm  # type: ignore[union-attr,assignment]
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    expected = norm.get_parameter("weight").detach() + (1.0 if name == "gemma2" else 0.0)
    torch.testing.assert_close(norm_weight(TransformersModel(module)), expected, atol=1e-5, rtol=1e-4)


def test_refusals() -> None:
    with pytest.raises(ModelError, match="own_lm_head"):
        random_head(columns=9, own=False)
    with pytest.raises(ModelError, match="hidden size 16"):
        random_head().check_target(table().spec, name="here")
