"""MTP modules inside GGUF files, against the safetensors that llama.cpp's converter made them of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell import Engine
from foretell.core.errors import ModelError
from foretell.core.tree import chain_parent, layout
from foretell.methods.mtp import checkpoint
from foretell.methods.mtp.drafter import MTP
from foretell.methods.mtp.head import CheckpointMTPHead
from foretell.model.hf.one_layer import text_config
from foretell.model.llama.run.lean import LeanModel
from tests.methods.gguf.record import MODULES, WHOLE, open_data, save_module, save_whole
from tests.methods.gguf.rewrite import rewrite
from tests.model.tiny import tiny_module

TARGET = LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=2))
LENGTH = 100


def pair(arch: str, path: Path) -> tuple[CheckpointMTPHead, CheckpointMTPHead]:
    """The module of the directory and that of the file, which holds nothing else: the directory's configuration."""
    save_module(path / "dir", MODULES[arch][0])
    config = text_config(path / "dir", name="dir")
    tensors = checkpoint.read(path / "dir", name="dir"), checkpoint.read(open_data(arch, path), name="file")
    first, second = (CheckpointMTPHead(each, config, TARGET.spec, name="it") for each in tensors)
    return first, second


@pytest.mark.parametrize("arch", MODULES)
@torch.no_grad()
def test_proposals_are_those_of_the_safetensors(arch: str, tmp_path: Path) -> None:
    """A guess after each of 100 positions, and one more fed on the module's own output: the same numbers."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TARGET.spec.vocab_size, (1, LENGTH), generator=generator)
    features = torch.randn(1, LENGTH, TARGET.spec.hidden_size, generator=generator)
    found: list[list[torch.Tensor]] = []
    for head in pair(arch, tmp_path):
        plan = layout(chain_parent(LENGTH, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), LENGTH)
        feed, read = head.advance(TARGET.embed(tokens), features, plan, head.new_cache(1, LENGTH))
        again, _ = head.enter(TARGET.embed(head.logits(read, TARGET).argmax(-1)), feed)
        found.append([head.logits(read, TARGET), again])
    assert len(found[0][0][0].argmax(-1).unique()) > 5  # it does not guess one token always
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def steps(model: Path, shape: str, temperature: float) -> tuple[list[int], list[list[int]]]:
    """The text by guesses of the model's own module, which is plain decoding's; and every tree of guesses, flat."""
    config = {"method": "mtp", "num_speculative_tokens": 3, "shape": shape}
    engine, trees = Engine.load(str(model), speculative=config, dtype="float32"), []
    engine.observers.append(lambda event: trees.append(event.commit.tree.tokens.flatten().tolist()))
    asked = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "ignore_eos": True}
    text = engine.generate([5, 9, 33, 7], **asked).token_ids
    drafted = list(trees)
    assert text == engine.with_method("none").generate([5, 9, 33, 7], **asked).token_ids
    return text, drafted


@pytest.mark.parametrize("shape", ["chain", "static/branching=3x2"])
def test_a_whole_file_decodes_as_its_directory(shape: str, tmp_path: Path) -> None:
    """Target, module, tokenizer and configuration out of one file of llama.cpp's converter: nothing is named but it."""
    save_whole(tmp_path / "dir")
    for temperature in (0.0, 1.0):
        found = [steps(path, shape, temperature) for path in (tmp_path / "dir", open_data(WHOLE, tmp_path))]
        assert found[0] == found[1]
        assert max(map(len, found[0][1])) > 3  # it guesses


def test_quantised_matrices_are_dequantised_and_it_is_said(tmp_path: Path) -> None:
    kinds = {"blk.3.nextn.eh_proj.weight": "Q8_0", "blk.3.attn_q.weight": "Q4_0"}
    path = rewrite(open_data("qwen35", tmp_path), tmp_path / "q.gguf", kinds=kinds)
    save_module(tmp_path / "dir", "qwen3_5")
    plain, blocks = (checkpoint.read(each, name="it") for each in (open_data("qwen35", tmp_path), path))
    assert (plain.dequantised, blocks.dequantised) == ("", "Q4_0+Q8_0")
    assert torch.allclose(blocks.own["fc"], plain.own["fc"], atol=0.02)
    assert not torch.equal(blocks.own["fc"], plain.own["fc"])
    config = text_config(tmp_path / "dir", name="dir")
    head = CheckpointMTPHead(blocks, config, TARGET.spec, name="it")
    head._last = TARGET.spec.num_layers - 1
    assert MTP(head, TARGET).runs_as.endswith("; its Q4_0+Q8_0 matrices are dequantised")


def test_without_a_norm_of_its_own_it_has_the_final_one(tmp_path: Path) -> None:
    change = {"blk.3.nextn.shared_head_norm.weight": None, "output_norm.weight": np.full(32, 3.0, np.float32)}
    path = rewrite(open_data("glm4moe", tmp_path), tmp_path / "n.gguf", tensors=change)
    assert checkpoint.read(path, name="it").own["shared_head.norm"].eq(3.0).all()


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"keys": {"qwen35.nextn_predict_layers": 0}}, "has no MTP head: qwen35.nextn_predict_layers"),
    "lost": (
        {"tensors": {"blk.3.nextn.eh_proj.weight": None}},
        "lacks tensor blk.3.nextn.eh_proj.weight of its MTP head",
    ),
    "lost of the layer": ({"tensors": {"blk.3.ffn_up.weight": None}}, "lacks tensor blk.3.ffn_up.weight"),
    "strange": (
        {"tensors": {"blk.3.nextn.gate.weight": np.zeros(4, np.float32)}},
        "has tensor blk.3.nextn.gate.weight",
    ),
    "whole numbers": ({"tensors": {"blk.3.nextn.enorm.weight": np.zeros(32, np.int32)}}, "enorm.weight of its MTP"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    path = rewrite(open_data("qwen35", tmp_path), tmp_path / "damaged.gguf", **change)
    with pytest.raises(ModelError, match=message) as told:
        checkpoint.read(path, name="it")
    assert "\n" not in str(told.value)
