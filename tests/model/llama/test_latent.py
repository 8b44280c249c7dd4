"""Latent attention: how its tensors are read, from every layout and kind of blocks, texts, and what is refused.
test_implementations.py has passes beside transformers, test_native.py bits, gguf/test_architectures.py llama.cpp's files.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.weights import GGUFWeights
from foretell.checkpoints.lora import LoraError, read_lora
from foretell.checkpoints.weights import ModuleWeights, ShapeError, TensorWeights
from foretell.core.errors import ModelError
from foretell.model.llama.read.split import split_weights
from foretell.model.llama.run import native
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.loras import MergedWeights
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import layer_names, read_shape
from foretell.model.load import load_model
from tests.checkpoints.gguf.change import change
from tests.checkpoints.gguf.make import random_blocks
from tests.checkpoints.gguf.oracle import case, checkpoint
from tests.checkpoints.gguf.test_load import logits
from tests.model.adapters import write_adapter
from tests.model.llama.family import make_model, tokens_of
from tests.model.llama.test_gptoss import check_texts

CPU = torch.device("cpu")
REASON = native.supports(make_model("deepseek3").config, torch.float32, CPU)
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def parts(module: Any, source: Any = None) -> Any:
    shape = read_shape(module.config)
    return split_weights(source or ModuleWeights(module), shape, name="x"), layer_names(1, shape.traits)


def whole_matrix(path: Path, to: Path, **options: Any) -> Path:
    """The file with what makes keys and values in one matrix, as before April 2025."""
    own = checkpoint("deepseek2").state_dict()
    names = [f"blk.{layer}.attn_k_b.weight" for layer in range(3)]
    joined = [own[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy() for layer in range(3)]
    renamed = {name: name.replace("k_b", "kv_b") for name in names}
    dropped = [name.replace("k_b", "v_b") for name in names]
    return change(path, to, replaced=dict(zip(names, joined, strict=True)), dropped=dropped, renamed=renamed, **options)


def test_keys_are_transposed_values_are_rows_and_rotated_numbers_are_halves() -> None:
    module = make_model("deepseek3")  # 4 heads, of vectors of 32; 32 numbers of a head stand still, 16 are rotated
    source, names = parts(module)
    attention = module.model.layers[1].self_attn
    both = attention.kv_b_proj.weight.detach().view(4, 48, 32)
    assert source.shape(names["k_b"]) == (128, 32)
    keys = source.read(names["k_b"], torch.float32, CPU)
    assert torch.equal(keys.view(4, 32, 32), both[:, :32].mT)
    assert torch.equal(source.reader(names["k_b"])(40, 50), keys[40:50])
    assert torch.equal(source.read(names["v_b"], torch.float32, CPU).view(4, 16, 32), both[:, 32:])
    halves = [*range(0, 16, 2), *range(1, 16, 2)]
    rotated = attention.kv_a_proj_with_mqa.weight.detach()[32:]
    assert torch.equal(source.read(names["k"], torch.float32, CPU)[32:], rotated[halves])
    query = attention.q_b_proj.weight.detach().view(4, 48, 32)
    assert torch.equal(source.read(names["q_b"], torch.float32, CPU).view(4, 48, 32)[:, 32:], query[:, 32:][:, halves])
    plain, names = parts(make_model("minicpm3"))
    own = make_model("minicpm3").model.layers[1].self_attn.kv_a_proj_with_mqa.weight
    assert torch.equal(plain.read(names["k"], torch.float32, CPU), own), "no pairs of neighbours"


def test_a_matrix_of_another_size_is_refused() -> None:
    module = make_model("deepseek2")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors = {**module.state_dict(), name: torch.zeros(191, 32)}
    missing = {each: tensor for each, tensor in tensors.items() if each != name}
    with pytest.raises(ModelError, match=r"\(model\.layers\.1\.self_attn\.kv_b_proj\.weight is missing\)"):
        LeanModel(read_shape(module.config), TensorWeights(missing), dtype=torch.float32, device=CPU, name="x")
    with pytest.raises(ShapeError, match=r"x: .*kv_b_proj\.weight has shape \(191, 32\), expected \(192, 32\)"):
        parts(module, TensorWeights(tensors))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("whole", [False, True])
def test_blocks_of_a_file_are_kept(kind: str, whole: bool, tmp_path: Path) -> None:
    """Of both layouts, against transformers' module of the dequantised values."""
    make = whole_matrix if whole else change
    path = make(case("deepseek2").path, tmp_path / "x.gguf", kind=kind)
    tokens = torch.tensor(max(case("deepseek2").sequences, key=len))
    expected = logits(load_model(str(path), implementation="transformers", dtype="float32"), tokens)
    size = float(expected.abs().max())
    lean = load_model(str(path), implementation="lean", dtype="float32")
    assert float((logits(lean, tokens) - expected).abs().max()) < 1e-4 * size
    if REASON is not None:
        return
    model = load_model(str(path), implementation="native", dtype="float32")
    assert isinstance(model, NativeModel)
    names = layer_names(1, model.shape.traits)
    packed = kind if kind != "F16" else "float32"
    assert model.matrices.kinds[names["v_b"]] == model.matrices.kinds[names["q_b"]] == packed
    found = logits(model, tokens)
    assert float((found - expected).abs().mean()) < (1e-5 if kind == "F16" else 0.05) * size
    exact = load_model(str(path), implementation="native", dtype="float32", weights="fp32")
    assert float((logits(exact, tokens) - expected).abs().max()) < 1e-4 * size


@needs_native
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_256(kind: str, tmp_path: Path) -> None:
    """Random blocks in ``attn_v_b`` of vectors of 256, Q8_0 in ``attn_k_b``, beside floats that make these."""
    config, random = checkpoint("deepseek2").config, torch.Generator().manual_seed(0)
    replaced: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        sizes = {"kv_a_mqa": (272, config.hidden_size), "kv_a_norm": (256,), "q_b": (4 * 48, 32)}
        for name, size in sizes.items():
            replaced[f"blk.{layer}.attn_{name}.weight"] = (torch.randn(size, generator=random) * 0.2).numpy()
        blocks = random_blocks(kind, 4 * 16, 256, seed=layer).reshape(4, 16, -1)
        replaced[f"blk.{layer}.attn_v_b.weight"] = (blocks, kind)
        blocks = random_blocks("Q8_0", 4 * 256, 32, seed=layer).reshape(4, 256, -1)
        replaced[f"blk.{layer}.attn_k_b.weight"] = (blocks, "Q8_0")
    lengths = {"kv_lora_rank": 256, "key_length": 272, "value_length": 256, "key_length_mla": 48}
    metadata = {f"deepseek2.attention.{key}": value for key, value in lengths.items()}
    path = change(case("deepseek2").path, tmp_path / "x.gguf", replaced=replaced, metadata=metadata)
    tokens = tokens_of(1, 30)[0]
    model, lean, module = (
        load_model(str(path), implementation=name, dtype="float32") for name in ("native", "lean", "transformers")
    )
    assert isinstance(model, NativeModel)
    kinds, names = model.matrices.kinds, layer_names(1, model.shape.traits)
    assert (kinds[names["v_b"]], kinds[names["k_b"]]) == (kind, "Q8_0")
    expected = logits(module, tokens)
    size = float(expected.abs().max())
    assert float((logits(lean, tokens) - expected).abs().max()) < 1e-4 * size
    assert float((logits(model, tokens) - expected).abs().mean()) < 0.01 * size


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "kv", "weights"), [("deepseek2", "auto", "auto"), ("deepseek3", "int8", "int4")])
def test_texts_with_guesses_are_those_without(kind: str, kv: str, weights: str, temperature: float) -> None:
    module = make_model(kind)
    model = NativeModel.from_hf(module, kv=kv, weights=weights)
    check_texts(model, NativeModel.from_hf(module), temperature)


def test_texts_of_the_twin_with_guesses_are_those_without() -> None:
    module = make_model("deepseek3")
    check_texts(LeanModel.from_hf(module), LeanModel.from_hf(make_model("deepseek3", num_hidden_layers=2)), 0.0)


def test_an_adapter_of_the_joined_matrix_is_merged_or_refused(tmp_path: Path) -> None:
    """A file's own keys and values, apart, would be those without the adapter."""
    module, shape = checkpoint("deepseek2"), read_shape(checkpoint("deepseek2").config)
    lora = read_lora(write_adapter(tmp_path, module.state_dict(), targets=("kv_b_proj",)))
    found = []
    for source in (ModuleWeights(module), GGUFWeights(open_gguf(case("deepseek2").path, name="x"))):
        changed = split_weights(MergedWeights(source, lora), shape, name="x")
        found.append([changed.read(layer_names(1, shape.traits)[key], torch.float32, CPU) for key in ("k_b", "v_b")])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    plain = split_weights(source, shape, name="x").read(layer_names(1, shape.traits)["v_b"], torch.float32, CPU)
    assert not torch.equal(plain, found[1][1])
    with pytest.raises(LoraError, match=r"kv_b_proj, which can have no adapter of its own: merge it into the model"):
        LeanModel.from_hf(module).add_loras({"a": lora})


@needs_native
def test_what_native_does_not_run_is_said() -> None:
    sizes = {"kv_lora_rank": 40, "qk_nope_head_dim": 24}
    said = native.supports(make_model("deepseek3", **sizes).config, torch.float32, CPU)
    assert said is not None
    assert said.startswith(
        "latent attention of kv_lora_rank 40, qk_rope_head_dim 16, qk_nope_head_dim 24, v_head_dim 16"
    )
    module = make_model("deepseek2", kv_lora_rank=640)
    assert "at most 640 together" in str(native.supports(module.config, torch.float32, CPU))
    tokens = tokens_of(1, 9)
    found = LeanModel.from_hf(make_model("deepseek3", **sizes))
    with torch.no_grad():
        expected = make_model("deepseek3", **sizes)(tokens).logits[0]
    torch.testing.assert_close(logits(found, tokens[0]), expected, atol=1e-4, rtol=1e-4)
