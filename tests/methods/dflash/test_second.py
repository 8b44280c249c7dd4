"""DFlash2: convolutions over the rows of a block, and the choice among a row's best tokens, against plain loops."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import Engine
from foretell.heads.load import load_head
from foretell.heads.teacher import Teacher
from foretell.methods.dflash.descendants import BlockConv, CandidateSelector
from foretell.methods.dflash.drafter import DFlash
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.load import from_module
from foretell.train.methods import prepare
from foretell.train.trainer import train
from tests.model.tiny import tiny_module
from tests.train.harness import texts

TARGET = LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=2))


def filled(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@torch.no_grad()
def test_taps_reach_back_within_the_block() -> None:
    size, kernel, group, block = 6, 3, 2, 4
    conv = BlockConv(size, kernel, group)
    filled(conv)
    rows = torch.randn(2, 2 * block, size, generator=torch.Generator().manual_seed(0))
    kernels = conv.kernels(rows)
    projected = (rows @ conv.kernel_projection.weight.T).view(2, 2 * block, 2, kernel, size // group)
    for side in (0, 1):
        found, wanted = conv(rows, kernels, side, block), torch.zeros_like(rows)
        for b, r, tap, h in product(range(2), range(2 * block), range(kernel), range(size)):
            if r % block >= tap:
                weight = conv.base_kernel[side, tap, h] + projected[b, r, side, tap, h // group]
                wanted[b, r, h] += weight * rows[b, r - tap, h]
        assert torch.allclose(found, wanted, atol=1e-5)


@torch.no_grad()
def test_the_token_before_chooses_among_the_best() -> None:
    selector = CandidateSelector(5, 9, 3)
    filled(selector)
    generator = torch.Generator().manual_seed(1)
    logits, normed = torch.randn(2, 9, generator=generator), torch.randn(2, 5, generator=generator)
    before = torch.tensor([4, 7])
    found = selector(logits, normed, before, 3)
    for row in range(2):
        best = logits[row].topk(3).indices.tolist()
        condition = selector.predecessor_codebook[before[row]] * (selector.hidden_projection.weight @ normed[row])
        for token in range(9):
            wanted = logits[row, token] + condition @ selector.successor_codebook[token]
            assert (found[row, token] == -torch.inf) if token not in best else torch.isclose(found[row, token], wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_plain_decodings(temperature: float) -> None:
    spec = TARGET.spec
    config = DFlashHeadConfig(
        spec.hidden_size, spec.vocab_size, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=8, num_layers=1,
        block_size=4, layer_ids=(0, 1), mask_token_id=3, conv_kernel_size=2, conv_group_size=8, selector_rank=4,
        selector_top_k=5,
    )  # fmt: skip
    head = DFlashHead(config)
    filled(head)
    method = DFlash(head.requires_grad_(requires_grad=False), TARGET)
    engine = Engine(TARGET, None, speculative={"method": "dflash", "num_speculative_tokens": 3}, method=method)
    asked = {"max_new_tokens": 14, "temperature": temperature, "seed": 4, "ignore_eos": True}
    found = engine.generate([5, 9, 33], **asked)
    assert found.num_draft_tokens > 8
    assert found.token_ids == engine.with_method("none").generate([5, 9, 33], **asked).token_ids


def test_what_was_trained_is_written_read_and_decoded(tmp_path: Path) -> None:
    """By the settings of ``foretell train dflash``: the head's file decodes through the kernels as by torch, and a selector
    that learned tilts what the rows alone would draw."""
    module: Any = tiny_module("llama", head_dim=16)
    model, native = from_module(module), NativeModel.from_hf(module)
    given = {
        "block_size": 4, "num_layers": 1, "num_features": 2, "intermediate_size": 16, "conv_kernel_size": 2,
        "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6, "steps": 8, "lr": 0.02, "batch_tokens": 256,
        "eval_every": 0,
    }  # fmt: skip
    prepared = prepare("dflash", model, texts(), given)
    before = {name: value.clone() for name, value in prepared.objective.head.state_dict().items()}
    train(prepared.objective, Teacher(model), texts(), tmp_path / "head", prepared.config, save=prepared.save)
    head = load_head(str(tmp_path / "head"), native.spec, DFlashHead)
    assert (head.config.selector_top_k, head.config.conv_kernel_size) == (6, 2)
    learned = [name for name, value in head.state_dict().items() if "conv" in name or "selector" in name]
    assert len(learned) == 2 * 2 + 3
    for name in learned:
        assert not torch.equal(head.state_dict()[name], before[name]), name
    made = []
    for fast in (True, False):
        method = DFlash(head, native)
        assert method.native is not None
        if not fast:
            method.native = None
        engine = Engine(native, None, speculative={"method": "dflash", "verify": "rejection"}, method=method)
        asked = {"max_new_tokens": 16, "temperature": 1.0, "seed": 4, "ignore_eos": True}
        drawn = []
        engine.observers.append(lambda event, drawn=drawn: drawn.append(event.evidence.tree))
        text = engine.generate([5, 9, 33], **asked).token_ids
        made.append((text, [tree.tokens.tolist() for tree in drawn], drawn[0].q))
    assert made[0][:2] == made[1][:2]
    torch.testing.assert_close(made[0][2], made[1][2], rtol=0, atol=1e-5)
    assert int((made[0][2][0, 0] > 0).sum()) == 6
