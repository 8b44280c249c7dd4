"""Tensors under transformers' names: the values that were written, and the library's of quantised ones, packed or not."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import dequantize

from foretell.checkpoints.gguf.families.architectures import ARCHITECTURES
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.weights import GGUFWeights
from foretell.checkpoints.packed import BLOCK_KINDS, Packed
from foretell.core.errors import ModelError
from foretell.model.llama.mixture import ExpertWeights, expert_names, mixture_of, router_names
from tests.checkpoints.gguf.make import BLOCKS, K_BLOCKS, random_model, write
from tests.model.tiny import tiny_module

CPU = torch.device("cpu")
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def unpack(packed: Packed) -> torch.Tensor:
    """The library's values of packed rows."""
    return torch.from_numpy(dequantize(packed.data.numpy(), GGMLQuantizationType[packed.kind]).copy())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_are_the_library_s(arch: str) -> None:
    """Our table agrees with the gguf library's, name by name."""
    known = "bitnet" if arch == "bitnet-b1.58" else arch  # Microsoft's, with the same names
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == known)
    names = get_tensor_name_map(kind, 2)
    architecture = ARCHITECTURES[arch]
    parts = Counter(ours for _, ours in architecture.required(2))  # several tensors there may be one here
    for theirs, ours in [*architecture.required(2), *architecture.optional(2)]:
        stem, _, suffix = ours.rpartition(".")
        found = names.get_name(stem)
        if found is None:
            listed = names.get_name(ours) in (theirs, theirs.removesuffix(".weight"))
            assert (
                listed or parts[ours] > 1 or theirs.endswith((".bias", "_sub_norm.weight")) or theirs == "output.weight"
            )  # not all list these
        else:
            assert f"{found}.{suffix}" == theirs


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unquantised_tensors_come_back(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    """Every parameter of the module, bit for bit; the rows of Llama's q and k in their places."""
    module = random_model(tiny_module(arch))
    source = GGUFWeights(open_gguf(write(tmp_path / "x.gguf", module), name="x"))
    state = module.state_dict()
    assert set(source.names) == {
        name for name in state if not (module.config.tie_word_embeddings and "lm_head" in name)
    }
    for name in source.names:
        assert source.shape(name) == tuple(state[name].shape)
        expected = state[name]
        if arch == "gemma3" and name.endswith("norm.weight"):
            expected = (state[name].float() + 1) - 1  # as the file's float32 holds it
        assert torch.equal(source.read(name, dtype, CPU), expected.to(dtype))
        assert source.packed(name) is None


@pytest.mark.parametrize("kind", [*BLOCKS, *K_BLOCKS, "F16", "BF16"])
def test_quantised_tensors_are_the_library_s(tmp_path: Path, kind: str) -> None:
    """read, read_into part of a larger tensor, and packed: all the library's values, q and k in transformers' order."""
    module = tiny_module("llama", **WIDE)
    path = write(tmp_path / "x.gguf", module, kind=kind)
    source = GGUFWeights(open_gguf(path, name="x"))
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for theirs, ours in ARCHITECTURES["llama"].required(module.config.num_hidden_layers):
        tensor = tensors[theirs]
        expected = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
        if ".attn_q." in theirs or ".attn_k." in theirs:
            heads = 4 if ".attn_q." in theirs else 2
            expected = expected.view(heads, 32, 2, 256).transpose(1, 2).reshape(expected.shape)
        assert torch.equal(source.read(ours, torch.float32, CPU), expected)
        larger = torch.zeros(expected.shape[0] + 2, *expected.shape[1:], dtype=torch.bfloat16)
        source.read_into(ours, larger[1:-1])
        assert torch.equal(larger[1:-1], expected.bfloat16())
        assert not larger[0].any()
        packed = source.packed(ours)
        if tensor.tensor_type.name in BLOCK_KINDS:
            assert packed is not None
            assert packed.kind == kind
            assert packed.shape == expected.shape
            assert torch.equal(unpack(packed), expected)
        else:
            assert packed is None
    assert source.kinds == {kind}


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe"])
def test_experts_of_a_stack_come_one_by_one(tmp_path: Path, arch: str, kind: str) -> None:
    """Each by its own name: its slice of the stack, as values, by rows and packed; the router stays float32."""
    wide = WIDE if arch == "qwen3_moe" else WIDE | {"shared_expert_intermediate_size": 256}
    module = tiny_module(arch, **{**wide, "moe_intermediate_size": 256})
    path = write(tmp_path / "x.gguf", module, kind=kind)
    mixture = mixture_of(module.config)
    assert mixture is not None
    source = ExpertWeights(GGUFWeights(open_gguf(path, name="x")), mixture)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for key, name in (("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
        tensor = tensors[f"blk.1.{name}.weight"]
        whole = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
        for expert in range(4):
            ours, expected = expert_names(1, expert, mixture)[key], whole[expert]
            assert source.shape(ours) == tuple(expected.shape)
            assert torch.equal(source.read(ours, torch.float32, CPU), expected)
            assert torch.equal(source.reader(ours)(3, 7).float(), expected[3:7])
            packed = source.packed(ours)
            assert (packed is None) == (kind not in BLOCK_KINDS)
            assert packed is None or torch.equal(unpack(packed), expected)
    for ours in router_names(1, mixture):
        assert torch.equal(source.read(ours, torch.float32, CPU), module.state_dict()[ours])
        assert source.packed(ours) is None


def test_packed_rows_are_mapped(tmp_path: Path) -> None:
    """Blocks stay in the file's pages; q and k of Llama alone are copied."""
    path = write(tmp_path / "x.gguf", tiny_module("llama", **WIDE), kind="Q8_0")
    file = open_gguf(path, name="x")
    source = GGUFWeights(file)
    for name, mapped in (("mlp.gate_proj", True), ("self_attn.v_proj", True), ("self_attn.q_proj", False)):
        packed = source.packed(f"model.layers.0.{name}.weight")
        assert packed is not None
        assert np.shares_memory(packed.data.numpy(), file.data) == mapped


def test_control_the_order_of_q_matters(tmp_path: Path) -> None:
    """Without the reordering the comparison above would fail."""
    module = tiny_module("llama")
    file = open_gguf(write(tmp_path / "x.gguf", module), name="x")
    stored = torch.from_numpy(file.raw("blk.0.attn_q.weight").view(np.float32).copy()).view(32, 32)
    own = module.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(stored, own)
    assert torch.equal(stored.sort(0).values, own.sort(0).values)


def test_biases_of_llama_are_reordered(tmp_path: Path) -> None:
    module = random_model(tiny_module("llama", attention_bias=True, mlp_bias=True))
    source = GGUFWeights(open_gguf(write(tmp_path / "x.gguf", module), name="x"))
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.bias"
        assert torch.equal(source.read(name, torch.float32, CPU), module.state_dict()[name])


def test_another_shape_than_the_configuration_s(tmp_path: Path) -> None:
    source = GGUFWeights(open_gguf(write(tmp_path / "x.gguf", tiny_module("llama")), name="x"))
    with pytest.raises(
        ModelError, match=r"token_embd.weight has shape \(61, 32\); the configuration expects \(60, 32\)"
    ):
        source.read_into("model.embed_tokens.weight", torch.empty(60, 32))


@pytest.mark.parametrize("count", [0, -1, 10_000_000])
def test_absurd_layer_counts(tmp_path: Path, count: int) -> None:
    value = {"llama.block_count": float(count)} if count < 0 else {"llama.block_count": count}
    path = write(tmp_path / "x.gguf", tiny_module("llama"), metadata=value)
    with pytest.raises(ModelError, match="block_count is"):
        GGUFWeights(open_gguf(path, name="x"))
