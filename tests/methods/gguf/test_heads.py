"""Draft heads in files of llama.cpp's: read as the directories that they were made of, written as its converter does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.write_heads import vocabulary_of
from foretell.core.errors import ConfigError, ModelError
from foretell.heads import formats
from foretell.heads.formats import load_head
from foretell.heads.modules import RopeScaling
from foretell.heads.native import Memory
from foretell.heads.repacked import blocks_kept, by_chance, with_weights
from foretell.methods.dflash.head import DFlashHead
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.model.llama.read.matrices import FORMAT_OF, FORMATS
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import CausalModel
from tests.methods.gguf.record import HEADS, HIDDEN, SIZES, TARGET, head_of, open_data, save_target
from tests.methods.gguf.rewrite import rewrite
from tests.model.tiny import VOCAB, tiny_module


@pytest.mark.parametrize("name", HEADS)
def test_a_file_of_their_converter_is_the_head_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    wanted, found = head_of(name), formats.load(open_data(name, tmp_path))
    assert found.config == wanted.config
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for key, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", HEADS)
def test_ours_holds_what_theirs_does(name: str, tmp_path: Path) -> None:
    """Tensors by name, kind, shape and bytes, and all keys that a head or its target's vocabulary has."""
    save_target(tmp_path / "target")
    vocabulary = vocabulary_of(tmp_path / "target", name="target", size=VOCAB)
    formats.save_gguf(head_of(name), tmp_path / "ours.gguf", vocabulary, target=TARGET)
    theirs, ours = open_gguf(open_data(name, tmp_path), name="a"), open_gguf(tmp_path / "ours.gguf", name="b")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, info in theirs.tensors.items():
        assert (ours.tensors[key].kind, ours.tensors[key].shape) == (info.kind, info.shape), key
        if key == "rope_freqs.weight":  # they compute in float32
            assert np.allclose(ours.raw(key).view(np.float32), theirs.raw(key).view(np.float32), rtol=1e-6)
        else:
            assert ours.raw(key).tobytes() == theirs.raw(key).tobytes(), key
    told = {"general.", "tokenizer.ggml.pre", "tokenizer.chat", "tokenizer.ggml.add_", "tokenizer.ggml.merges"}
    for key, value in theirs.metadata.items():
        if not key.startswith(tuple(told)):
            assert ours.metadata.get(key) == value, key


def test_every_scaling_of_frequencies_comes_back(tmp_path: Path) -> None:
    for scaling in (RopeScaling("linear", 4.0), RopeScaling("yarn", 4.0, 64, attention_factor=1.1386294361119891)):
        head = Eagle3Head(
            Eagle3HeadConfig(HIDDEN, VOCAB, **SIZES, draft_vocab_size=9, layer_ids=(0, 1, 2), rope_scaling=scaling)
        )
        formats.save_gguf(head, tmp_path / "head.gguf", {"tokenizer.ggml.model": "none"}, target=TARGET)
        assert formats.load(tmp_path / "head.gguf").config == head.config


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 254), ("Q4_0", 15)])
def test_rounded_matrices_are_near_and_stay_in_their_blocks(kind: str, steps: int, tmp_path: Path) -> None:
    head = head_of("eagle3")
    formats.save_gguf(
        head, tmp_path / "head.gguf", {"tokenizer.ggml.model": "none"}, target=TARGET, kind_of_matrices=kind
    )
    found = formats.load(tmp_path / "head.gguf")
    assert {matrix.kind for matrix in found.packed.values()} == {kind}
    for name, wanted in head.state_dict().items():
        given = found.state_dict()[name]
        if name not in found.packed:
            assert torch.equal(given, wanted), name
            continue
        blocks = wanted.float().view(len(wanted), -1, 32)
        step = 2 * blocks.abs().amax(-1, keepdim=True) / steps  # of 4 bits the range has one step more below than above
        assert bool(((given.float().view_as(blocks) - blocks).abs() <= 1.05 * step).all()), name
        assert not torch.equal(given.float(), wanted.float()), name


def damaged(path: Path, name: str, change: dict[str, Any]) -> Path:
    return rewrite(open_data(name, path), path / "damaged.gguf", **change)


ZEROS = np.zeros((4, 4), np.float32)
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "lost": (
        "eagle3",
        {"tensors": {"blk.0.attn_k.weight": None}},
        r"lacks 1 of its 12 tensors \(the first: blk.0.attn_k",
    ),
    "sinks": ("dflash", {"tensors": {"blk.1.attn_sinks.weight": ZEROS}}, "blk.1.attn_sinks.weight: attention sinks"),
    "selector": (
        "dflash",
        {"tensors": {"selector_hidden.weight": ZEROS}},
        "has tensor selector_hidden.weight: another",
    ),
    "strange": ("eagle3", {"tensors": {"blk.0.attn_q.scale": ZEROS}}, "has tensor blk.0.attn_q.scale: another variant"),
    "layers": ("dflash", {"keys": {"dflash.block_count": 99}}, "dflash.block_count is 99, for 2"),
    "no layers read": ("eagle3", {"keys": {"eagle3.target_layers": None}}, "target_layers = None; expected a list"),
    "flag": (
        "eagle3",
        {"keys": {"eagle3.norm_before_residual": 1}},
        "norm_before_residual = 1; expected true or false",
    ),
    "norm": ("eagle3", {"keys": {"eagle3.norm_before_fc": True}}, "norm_before_fc = True and has no tensor enc.output"),
    "head": ("eagle3", {"tensors": {"output.weight": None}}, "has no output.weight"),
    "two heads": ("eagle3", {"keys": {"eagle3.output_of_target": True}}, "without output.weight"),
    "map": ("eagle3", {"tensors": {"d2t": np.zeros(40, np.float32)}}, "d2t is F32; expected the target's ids"),
    "width": ("eagle3", {"keys": {"eagle3.target_hidden_size": 64}}, "target_hidden_size is 64 in config.json"),
    "mask": ("dflash", {"keys": {"tokenizer.ggml.mask_token_id": None}}, "mask_token_id = None; expected the id"),
    "scale": ("dflash", {"keys": {"dflash.logit_scale": 2.0}}, "dflash.logit_scale = 2.0; only 1.0 is supported"),
    "rotated": ("dflash", {"keys": {"dflash.rope.dimension_count": 8}}, "rope.dimension_count = 8; only 16"),
    "assistant": (
        "dflash",
        {"keys": {"general.architecture": "gemma4-assistant"}},
        "'gemma4-assistant': it attends to",
    ),
    "model": ("dflash", {"keys": {"general.architecture": "qwen3"}}, "holds a model of architecture 'qwen3'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_or_newer_file_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    name, change, message = FAULTS[fault]
    with pytest.raises(ModelError, match=message) as told:
        formats.load(damaged(tmp_path, name, change), name="head.gguf")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("kind", [None, "Q8_0", "Q4_0"])
@pytest.mark.parametrize("model_of", [LeanModel.from_hf, NativeModel.from_hf])
def test_an_output_head_that_is_the_target_s_is_read_from_there(
    kind: str | None, model_of: Any, tmp_path: Path
) -> None:
    """As if the file held it; without a target nobody guesses by zeros, and nobody writes them."""
    module = tiny_module("qwen3", num_hidden_layers=5, hidden_size=HIDDEN, head_dim=16)
    target, whole = model_of(module), head_of("eagle3")
    assert isinstance(whole, Eagle3Head)
    whole.lm_head.weight.data = module.lm_head.weight.detach()[whole.target_ids].clone()
    vocabulary = {"tokenizer.ggml.model": "none"}
    for name, lend in (("whole", False), ("lent", True)):
        formats.save_gguf(
            whole, tmp_path / f"{name}.gguf", vocabulary, target=TARGET, kind_of_matrices=kind, lend_output=lend
        )
    assert "output.weight" not in open_gguf(tmp_path / "lent.gguf", name="lent").tensors
    expected = load_head(str(tmp_path / "whole.gguf"), target.spec, Eagle3Head)
    found = load_head(str(tmp_path / "lent.gguf"), target.spec, Eagle3Head, target=target)
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key
    assert found.packed.keys() == expected.packed.keys()
    assert all(torch.equal(found.packed[key].data, blocks.data) for key, blocks in expected.packed.items())
    trained = load_head(str(tmp_path / "lent.gguf"), target.spec, Eagle3Head, dtype=torch.float32, target=target)
    assert torch.equal(trained.lm_head.weight, whole.lm_head.weight)
    assert not trained.packed
    formats.save(found, tmp_path / "again")
    assert torch.equal(formats.load(tmp_path / "again").state_dict()["lm_head.weight"], found.lm_head.weight)
    with pytest.raises(ModelError, match="its output head is the target's own rows"):
        load_head(str(tmp_path / "lent.gguf"), target.spec, Eagle3Head)
    alone = formats.load(tmp_path / "lent.gguf")
    assert alone.num_parameters == expected.num_parameters - whole.lm_head.weight.numel()
    for write in (formats.save, lambda head, path: formats.save_gguf(head, path, vocabulary)):
        with pytest.raises(ConfigError, match="is rows of its target"):
            write(alone, tmp_path / "zeros")


def test_rows_of_a_head_in_blocks_are_its_outputs_for_unit_vectors() -> None:
    """Read from the matrix, tied or not, in 8 and 4 bits, as every other implementation computes them."""
    ids = torch.tensor([5, 0, 5, VOCAB - 1])
    for tied in (True, False):
        module = tiny_module("qwen3", tie_word_embeddings=tied, hidden_size=64, head_dim=16, intermediate_size=64)
        for weights in ("auto", "int8", "int4"):
            native = NativeModel.from_hf(module, weights=weights)
            slow = CausalModel.head_rows(native, ids)
            assert torch.allclose(native.head_rows(ids), slow, atol=2e-2 * float(slow.abs().max())), (tied, weights)
        plain = module.get_output_embeddings().weight.detach()[ids]
        assert torch.equal(NativeModel.from_hf(module).head_rows(ids), plain)
        assert torch.allclose(LeanModel.from_hf(module).head_rows(ids), plain, atol=1e-6)
    scaled = NativeModel.from_hf(tiny_module("granite", hidden_size=64, head_dim=16))
    assert torch.allclose(scaled.head_rows(ids), CausalModel.head_rows(scaled, ids), atol=1e-5)


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    spec = LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=4)).spec
    path = open_data("eagle3", tmp_path)
    with pytest.raises(ModelError, match=r"reads the output of target layer 4, and .* has layers 0 to 3$"):
        load_head(str(path), spec, Eagle3Head)
    with pytest.raises(ModelError, match="holds an eagle3 head, and a dflash head is needed"):
        load_head(str(path), spec, DFlashHead)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_matrices_in_blocks_stay_so_in_native_heads(kind: str, tmp_path: Path) -> None:
    """Products of the packed matrix are those of its values, rows of q and k in the head's order."""
    matrices = ("fc.weight", "blk.0.attn_q.weight", "blk.0.attn_output.weight", "output.weight")
    path = damaged(tmp_path, "eagle3", {"kinds": dict.fromkeys(matrices, kind)})
    head = formats.load(path).requires_grad_(requires_grad=False)
    names = {"fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.o_proj.weight", "lm_head.weight"}
    assert head.packed.keys() == names
    memory = Memory(head)
    for name in names:
        linear: Any = head.get_submodule(name.removesuffix(".weight"))
        matrix = memory.matrix(linear)
        assert matrix.format == FORMATS[FORMAT_OF[kind]].number
        x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0))
        found = memory.product(matrix, x, linear.out_features)
        assert torch.allclose(found, linear(x), rtol=0.02, atol=0.02 * float(linear(x).abs().max())), name
    changed = with_weights(head, {key: 2 * value for key, value in head.named_parameters()})
    assert changed.packed.keys() == (names if kind == "Q4_0" else set())  # in 8 bits those of 8 bits need no blocks


def test_rounding_by_chance_keeps_what_is_a_small_part_of_a_step() -> None:
    """The control: to the nearest nothing of it is left. On the grid both are exact, and no value moves by a whole step."""
    r = torch.Generator().manual_seed(0)
    grid = torch.randint(-7, 8, (64, 256), generator=r).float()
    grid[:, ::32] = -8.0  # each block's largest, so a step is 1
    learned = grid + torch.where(grid == -8.0, 0.0, 0.1)
    kept, nearest = (
        torch.from_numpy(dequantize(data, GGMLQuantizationType.Q4_0))
        for data in (by_chance(learned).data.numpy(), quantize(learned.numpy(), GGMLQuantizationType.Q4_0))
    )
    assert torch.equal(nearest, grid)
    moved = (kept - grid)[grid != -8.0]
    assert abs(float(moved[grid[grid != -8.0] < 7].mean()) - 0.1) < 5 * 0.3 / 14000**0.5
    assert float((kept - learned).abs().max()) < 1.0
    exact = torch.from_numpy(dequantize(by_chance(grid).data.numpy(), GGMLQuantizationType.Q4_0))
    assert torch.equal(exact, grid)
    assert not by_chance(torch.zeros(1, 32)).data[0, 2:].sub(0x88).any()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_rows_of_other_tokens_join_the_blocks_of_those_that_stay(kind: str, tmp_path: Path) -> None:
    """A version of a head that learns: other tokens, and a fusion that was learned, which leaves blocks of 8 bits."""
    path = damaged(tmp_path, "eagle3", {"kinds": dict.fromkeys(("fc.weight", "output.weight"), kind)})
    head: Any = formats.load(path).requires_grad_(requires_grad=False)
    before = head.target_ids.tolist()
    comes = max(token for token in range(VOCAB) if token not in before)
    after = sorted([*before[1:], comes])
    assert after[0] == before[1]  # rows move up
    weights = {name: value.clone() for name, value in head.state_dict().items()}
    weights["fc.weight"] *= 1.5
    row = torch.randn(head.lm_head.in_features, generator=torch.Generator().manual_seed(1))
    weights["lm_head.weight"] = torch.stack(
        [row if token == comes else head.lm_head.weight[before.index(token)] for token in after]
    )
    weights["d2t"] = torch.tensor(after) - torch.arange(len(after))
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(after), value=True)
    made: Any = with_weights(head, weights)
    assert made.packed.keys() == {"lm_head.weight", *(["fc.weight"] if kind == "Q4_0" else [])}
    assert made.target_ids.tolist() == after
    blocks = made.packed["lm_head.weight"]
    for column, token in enumerate(after):
        if token != comes:
            assert torch.equal(blocks.data[column], head.packed["lm_head.weight"].data[before.index(token)])
    memory, x = Memory(made), torch.randn(3, len(row), generator=torch.Generator().manual_seed(0))
    found = memory.product(memory.matrix(made.lm_head), x, len(after))
    assert memory.matrix(made.lm_head).format == FORMATS[FORMAT_OF[kind]].number
    assert torch.allclose(found, made.lm_head(x), rtol=0.02, atol=0.02 * float(found.abs().max()))
    assert torch.allclose(made.lm_head.weight[after.index(comes)], row, atol=float(row.abs().max()) / 7)


def test_llama_cpp_has_no_place_for_it(tmp_path: Path) -> None:
    base: dict[str, Any] = {**SIZES, "draft_vocab_size": 9, "layer_ids": (0, 1, 2)}
    out = tmp_path / "head.gguf"
    for change, told in (
        ({"layer_ids": (0, 1)}, "2 tapped layers"), ({"fc_norm": True}, "norm of each tapped layer"),
        ({"norm_output": True}, "norm_output"), ({"num_layers": 2}, "2 layers"), ({"qk_norm": True}, "norms of queries"),
        ({"attention_bias": True}, "attention_bias"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            formats.save_gguf(Eagle3Head(Eagle3HeadConfig(HIDDEN, VOCAB, **{**base, **change})), out, {}, target=TARGET)
        assert not out.exists()


def test_no_other_file_is_written_over(tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    out.write_bytes(b"something")
    with pytest.raises(ConfigError, match="holds no draft head"):
        formats.save_gguf(head_of("eagle3"), out, {}, target=TARGET)
    assert out.read_bytes() == b"something"
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def test_an_output_head_without_a_draft_vocabulary_may_be_learned() -> None:
    """Its rows have no tokens of their own to be told apart by: it is rounded as a whole, as other matrices are."""
    heads: list[Any] = [torch.nn.ModuleDict({"lm_head": torch.nn.Linear(32, 8, bias=False)}) for _ in range(2)]
    head, made = (each.requires_grad_(requires_grad=False) for each in heads)
    head.packed = {"lm_head.weight": by_chance(head["lm_head"].weight)}
    kept = blocks_kept(head, made)["lm_head.weight"]
    assert torch.equal(kept.data, by_chance(heads[1]["lm_head"].weight).data)
