"""The acceptance head: what it computes, by hand; blocks of its own; whom it fits."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from foretell.core.errors import ModelError
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig, distribution_inputs, predicted
from tests.engine.harness import foresight, table

H = 12


def random_head(num_layers: int = 2, *, normalize: bool = True, reads_law: bool = False) -> AcceptanceHead:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        head = AcceptanceHead(AcceptanceHeadConfig(H, 20, num_layers, normalize, "draft_model", reads_law))
        for parameter in head.parameters():
            nn.init.normal_(parameter, std=0.4)
    return head


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_by_hand(num_layers: int, normalize: bool) -> None:
    head = random_head(num_layers, normalize=normalize)
    head.scale.fill_(0.5)
    head.shift.fill_(1.25)
    hidden = 3 * torch.randn(4, 5, H, generator=torch.Generator().manual_seed(1))
    state, x = head.state_dict(), hidden.double()
    if normalize:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for layer in range(num_layers):
        z = x @ state[f"blocks.{layer}.linear.weight"].double().t() + state[f"blocks.{layer}.linear.bias"]
        x = x + z / (1 + torch.exp(-z))
    expected = x @ state["out.weight"][0].double() + state["out.bias"]
    found = head(hidden)
    assert found.shape == (4, 5)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    chance = predicted(head, hidden)
    torch.testing.assert_close(chance.double(), 1 / (1 + torch.exp(-(0.5 * expected + 1.25))), atol=1e-5, rtol=1e-5)


def test_law_inputs() -> None:
    """By hand: the distribution is that of the raw logits, whatever the temperature; an impossible token has -20; and
    the head reads them behind the normalized hidden state."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 2.0, 2.0]])
    found = distribution_inputs(logits, torch.tensor([0, 1]), torch.tensor([0.0, 0.7]))
    q = math.exp(1) / (1 + math.exp(1))
    entropy = -q * math.log(q) - (1 - q) * math.log(1 - q)
    assert found[0].tolist() == pytest.approx([math.log(1 - q), math.log(q), entropy, 0.0])
    assert found[1].tolist() == pytest.approx([-math.log(3), -math.log(3), math.log(3), 0.7])
    assert distribution_inputs(logits[0], torch.tensor(2), torch.tensor(1.0))[0] == -20.0
    assert distribution_inputs(logits[0], torch.tensor(7), torch.tensor(1.0))[0] == -20.0, "the draft has no such token"
    head = random_head(0, reads_law=True)
    hidden = torch.randn(2, H, generator=torch.Generator().manual_seed(2))
    weight = head.state_dict()["out.weight"][0]
    assert weight.shape == (H + 4,)
    x = torch.cat((hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt(), found), 1)
    torch.testing.assert_close(head(hidden, found), x @ weight + head.state_dict()["out.bias"])


def test_every_block_has_its_own_weights() -> None:
    head = random_head(3)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with torch.no_grad():
        head.get_parameter("blocks.1.linear.weight").add_(1.0)
    changed = [name for name, value in head.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["blocks.1.linear.weight"]


def test_dtypes() -> None:
    """A head in bfloat16 reads float32 and answers in float32; its calibration stays as it is."""
    head = random_head().to(torch.bfloat16)
    chance = predicted(head, torch.randn(2, 1, H))
    assert chance.dtype == torch.float32
    assert head.dtype == torch.bfloat16


def test_whom_it_fits() -> None:
    model = table()
    head = foresight(model)
    assert head.taps == ()
    head.check_target(table(context=5).spec, name="here")  # another width of the target: not what it reads
    head.check_drafter("draft_model", model.spec.hidden_size, name="here")
    with pytest.raises(ModelError, match="vocabulary 20"):
        random_head().check_target(model.spec, name="here")
    with pytest.raises(ModelError, match="12 wide"):
        random_head().check_drafter("draft_model", 13, name="here")
    with pytest.raises(ModelError, match="'draft_model'"):
        random_head().check_drafter("eagle3", H, name="here")


def test_padding_of_vocabularies_is_no_other_vocabulary() -> None:
    """Trained on a target of 1,000 columns, a head was refused beside its own draft model of 995, for which it was made."""
    head = AcceptanceHead(AcceptanceHeadConfig(H, 1000, 0, True, "draft_model"))
    for size in (1000, 995):
        head.check_target(replace(table(1).spec, vocab_size=size), name="head")
    with pytest.raises(ModelError, match=r"trained for a target of vocabulary 1000, and .* has 900"):
        head.check_target(replace(table(1).spec, vocab_size=900), name="head")
