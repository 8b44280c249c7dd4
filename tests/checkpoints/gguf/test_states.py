"""What llama.cpp's converter changes in hybrids, on files of one layer that are made here, and files that are damaged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from foretell.checkpoints.gguf.config import read_values
from foretell.checkpoints.gguf.file import GGUFFile, TensorInfo, open_gguf
from foretell.checkpoints.gguf.weights import GGUFWeights, whole_blocks
from foretell.core.errors import ModelError
from foretell.model.load import load_config
from tests.checkpoints.gguf.make import _add
from tests.checkpoints.gguf.oracle import case
from tests.checkpoints.gguf.test_weights import unpack

CPU = torch.device("cpu")
KEYS, VALUES = 2, 6  # heads
HIDDEN = 32
LAYER = "model.layers.0.linear_attn."
OTHERS: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen3next": {
        "blk.0.ssm_ba.weight": (2 * VALUES, HIDDEN), "blk.0.ffn_gate_inp.weight": (2, 32),
        "blk.0.ffn_gate_inp_shexp.weight": (32,),
        **{f"blk.0.ffn_{x}_exps.weight": (2, 32, 32) for x in ("gate", "up", "down")},
        **{f"blk.0.ffn_{x}_shexp.weight": (32, 32) for x in ("gate", "up", "down")},
    },
    "qwen35": {
        "blk.0.ssm_alpha.weight": (VALUES, HIDDEN), "blk.0.ssm_beta.weight": (VALUES, HIDDEN),
        "blk.0.ffn_gate.weight": (64, HIDDEN), "blk.0.ffn_up.weight": (64, HIDDEN), "blk.0.ffn_down.weight": (HIDDEN, 64),
    },
}  # fmt: skip


def drawn(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def delta_net(path: Path, arch: str, size: int, kinds: dict[str, str]) -> GGUFFile:
    """A file of one delta net, without experts, with heads of ``size`` values. kinds: of matrices, F32 where none."""
    writer = GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": 64,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16, "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6, "full_attention_interval": 2, "ssm.conv_kernel": 4,
        "ssm.state_size": size, "ssm.group_count": KEYS, "ssm.time_step_rank": VALUES, "ssm.inner_size": VALUES * size,
    }  # fmt: skip
    for key, value in values.items():
        _add(writer, f"{arch}.{key}", value)
    keys, inner = KEYS * size, VALUES * size
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (8, HIDDEN), "output_norm.weight": (HIDDEN,), "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.post_attention_norm.weight": (HIDDEN,), "blk.0.attn_qkv.weight": (2 * keys + inner, HIDDEN),
        "blk.0.attn_gate.weight": (inner, HIDDEN), "blk.0.ssm_conv1d.weight": (2 * keys + inner, 4),
        "blk.0.ssm_dt.bias": (VALUES,), "blk.0.ssm_a": (VALUES,), "blk.0.ssm_norm.weight": (size,),
        "blk.0.ssm_out.weight": (HIDDEN, inner),
    }  # fmt: skip
    for name, shape in {**shapes, **OTHERS[arch]}.items():
        values_of = -np.exp(drawn(*shape)) if name.endswith("ssm_a") else drawn(*shape)
        kind = kinds.get(name.split(".")[-2], "F32")
        if kind == "F32":
            writer.add_tensor(name, values_of)
        else:
            number = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values_of, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path, name="x")


@pytest.mark.parametrize("size", [16, 32])
def test_columns_of_a_delta_net_s_output(tmp_path: Path, size: int) -> None:
    """With three heads of v for each head of k, transformers' heads 0 to 5 lie at 0, 2, 4, 1, 3, 5; blocks of 32 stay whole
    in heads of 32 alone."""
    file = delta_net(tmp_path / "x.gguf", "qwen35", size, {"ssm_out": "Q8_0"})
    source, name = GGUFWeights(file), f"{LAYER}out_proj.weight"
    plain = GGUFWeights(delta_net(tmp_path / "plain.gguf", "qwen35", size, {}))
    theirs = torch.from_numpy(drawn(HIDDEN, VALUES * size)).view(HIDDEN, VALUES, size)
    assert torch.equal(plain.read(name, torch.float32, CPU), theirs[:, [0, 2, 4, 1, 3, 5]].reshape(HIDDEN, -1))
    found, packed = source.read(name, torch.float32, CPU), source.packed(name)
    assert torch.allclose(found, plain.read(name, torch.float32, CPU), atol=0.03)
    assert (packed is not None) == (size == 32)
    if packed is not None:
        assert torch.equal(unpack(packed), found)


def test_blocks_that_are_torn_apart_are_not_whole() -> None:
    assert whole_blocks(torch.tensor([2, 3, 0, 1]), 2).tolist() == [1, 0]  # type: ignore[union-attr]
    for columns in ([1, 2, 3, 0], [3, 2, 1, 0], [0, 1, 2]):
        assert whole_blocks(torch.tensor(columns), 2) is None


@pytest.mark.parametrize("gate", ["Q8_0", "Q4_0"])
def test_q_k_v_and_z_of_two_kinds_of_blocks(tmp_path: Path, gate: str) -> None:
    """One matrix of two tensors: q, k, v and z of each head of k. It stays packed where they have the same kind."""
    size = 16
    file = delta_net(tmp_path / "x.gguf", "qwen3next", size, {"attn_qkv": "Q8_0", "attn_gate": gate})
    source, name = GGUFWeights(file), f"{LAYER}in_proj_qkvz.weight"
    found, packed = source.read(name, torch.float32, CPU), source.packed(name)
    qkv, z = (torch.from_numpy(drawn(*file.tensors[f"blk.0.attn_{part}.weight"].shape)) for part in ("qkv", "gate"))
    heads = [
        torch.cat((qkv[16 * k : 16 * k + 16], qkv[32 + 16 * k : 48 + 16 * k],
                   qkv[64 + 48 * k : 112 + 48 * k], z[48 * k : 48 * k + 48]))
        for k in range(KEYS)
    ]  # fmt: skip
    assert torch.allclose(found, torch.cat(heads), atol=0.5)
    assert float((found - torch.cat(heads[::-1])).abs().mean()) > 0.5  # a check that can fail
    assert (packed is not None) == (gate == "Q8_0")
    assert source.shape("model.layers.0.mlp.shared_expert_gate.weight") == (1, HIDDEN)


def changed(label: str, **metadata: Any) -> GGUFFile:
    file = open_gguf(case(label).path, name="x")
    arch = file.get("general.architecture")
    named = {f"{arch}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return replace(file, metadata={**file.metadata, **named})


def without(label: str, name: str) -> GGUFFile:
    file = open_gguf(case(label).path, name="x")
    return replace(file, tensors={key: info for key, info in file.tensors.items() if key != name})


def with_tensor(file: GGUFFile, name: str) -> GGUFFile:
    info = file.tensors["output_norm.weight" if "output_norm.weight" in file.tensors else "token_embd_norm.weight"]
    return replace(file, tensors={**file.tensors, name: TensorInfo(*info)})


@pytest.mark.parametrize(
    ("label", "metadata", "message"),
    [
        ("qwen35", {"ssm__time_step_rank": 3}, "qwen35.ssm.time_step_rank = 3; expected a multiple of the 2 heads of k"),
        ("qwen35", {"ssm__inner_size": 63}, "qwen35.ssm.inner_size = 63; expected a multiple of the 4 heads of v"),
        ("qwen35", {"ssm__inner_size": 128}, r"tensor blk.0.ssm_conv1d.weight has 128 rows; .* have 192"),
        ("qwen35", {"attention__recurrent_layers": [True, False]}, "recurrent_layers = .*; expected bool, one or 3"),
        ("qwen35", {"attention__recurrent_layers": [True] * 3}, r"the first: blk.2.\w+.*\) *; expected a whole qwen35"),
        ("qwen3next", {"ssm__state_size": 8}, "tensor blk.0.attn_qkv.weight and blk.0.attn_gate.weight has 192 rows"),
        ("lfm2", {"attention__head_count_kv": [0, 2]}, "head_count_kv = .*; expected int, one or 3 of them"),
        ("lfm2", {"attention__head_count_kv": [0, 2, 1]}, "expected one number for all layers with attention"),
        ("lfm2", {"attention__head_count_kv": 2}, "the first: blk.0.attn_q.weight"),
        ("lfm2", {"block_count": 4}, "head_count_kv = .*; expected int, one or 4 of them"),
        ("nemotron_h_moe", {"feed_forward_length": 32}, "the first: blk.0.ffn_gate_inp.weight"),
        ("nemotron_h_moe", {"attention__head_count_kv": [0, 0, 3, 0]}, "blk.2.attn_k.weight has 32 rows, which are not 3"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself(label: str, metadata: dict[str, Any], message: str) -> None:
    """One line names the key or the tensor."""
    with pytest.raises(ModelError, match=message) as caught:
        GGUFWeights(changed(label, **metadata))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "metadata", "message"),
    [
        ("qwen35", {"rope__dimension_count": 17}, "expected an even number up to the 16 values of a head"),
        ("qwen35", {"attention__value_length": 8}, "value_length = 8; expected 16, as of q and k"),
        ("lfm2", {"attention__sliding_window": 8}, "layers with windows are not read"),
        ("lfm2", {"attention__key_length": 8}, "key_length = 8; expected 16: a width of 64 in 4 heads"),
        ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func = 1; expected 2, a sigmoid"),
        ("nemotron_h_moe", {"ssm__time_step_rank": 7}, "ssm.inner_size = 64; expected a multiple of the 7 heads"),
        ("nemotron_h_moe", {"attention__head_count_kv": 0}, "head_count_kv = 0; expected layers with attention"),
        ("falcon-h1", {"ssm__conv_kernel": 0}, "ssm.conv_kernel = 0; expected a positive number"),
    ],
)  # fmt: skip
def test_what_no_hybrid_does(label: str, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_values(changed(label, **metadata))


def test_half_a_file_and_a_newer_one() -> None:
    for label, name in (("qwen35", "blk.1.ssm_a"), ("lfm2", "blk.1.attn_q_norm.weight"), ("falcon-h1", "blk.0.ssm_d")):
        with pytest.raises(ModelError, match=rf"lacks 1 of its \d+ tensors \(the first: {name}\)"):
            GGUFWeights(without(label, name))
        file = open_gguf(case(label).path, name="x")
        with pytest.raises(ModelError, match=r"the first: blk.1.ssm_new.weight\): another variant"):
            GGUFWeights(with_tensor(file, "blk.1.ssm_new.weight"))


def test_a_decay_that_does_not_decay() -> None:
    file = open_gguf(case("qwen35").path, name="x")
    info, data = file.tensors["blk.0.ssm_a"], file.data.copy()
    data[info.offset : info.offset + 4] = np.float32([0.5]).view(np.uint8)
    source = GGUFWeights(replace(file, data=data))
    with pytest.raises(ModelError, match=r"is damaged: tensor blk.0.ssm_a has values that are not below 0"):
        source.read(f"{LAYER}A_log", torch.float32, CPU)


def test_falcon_s_head_has_multipliers_of_its_own() -> None:
    with pytest.raises(ModelError, match=r"lacks tensor output.weight; .* has lost the multipliers"):
        read_values(without("falcon-h1", "output.weight"))


def test_heads_in_the_file_are_left_to_drafts() -> None:
    """Tensors of blk.3, a head after the three layers, are no part of the model and nothing strange."""
    recurrent = [True, True, False, False]
    file = changed("qwen35", block_count=4, nextn_predict_layers=1, attention__recurrent_layers=recurrent)
    for name in ("blk.3.nextn.enorm.weight", "blk.3.attn_norm.weight", "blk.3.nextn.eh_proj.weight"):
        file = with_tensor(file, name)
    assert set(GGUFWeights(file).names) == set(GGUFWeights(open_gguf(case("qwen35").path, name="x")).names)
    assert read_values(file)["num_hidden_layers"] == 3
    assert len(read_values(file)["layer_types"]) == 3


def test_layers_by_their_interval() -> None:
    """Files of before the list of recurrent layers; every fourth layer has attention where a file says nothing."""
    file = changed("qwen35", full_attention_interval=3)
    del file.metadata["qwen35.attention.recurrent_layers"]
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    assert read_values(file)["layer_types"] == kinds == load_config(case("qwen35").path, name="x").layer_types
    del file.metadata["qwen35.full_attention_interval"]
    assert read_values(file)["layer_types"] == ["linear_attention"] * 3
