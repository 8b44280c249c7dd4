"""Adapters beside the weights: the sums of the merged weights, and of a row the same bits in any company."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretell.checkpoints.lora import Lora, LoraError, read_lora
from foretell.checkpoints.weights import ModuleWeights, TensorWeights
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import layout
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.loras import MergedWeights
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import read_shape
from foretell.model.load import load_model
from foretell.model.target import CausalModel, Target
from tests.model.adapters import ALL, write_adapter
from tests.model.tiny import VOCAB, tiny_module

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FAMILIES: dict[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "llama": ("llama", {"head_dim": 16}, ALL),
    "biases, and two linears": ("qwen2", {"num_attention_heads": 2}, ("q_proj", "down_proj")),
    "fused": ("phi3", {"num_attention_heads": 2}, FUSED),
    "fused, half turned": (
        "phi3",
        {"num_attention_heads": 1, "num_key_value_heads": 1, "partial_rotary_factor": 0.5},
        FUSED,
    ),
    "norms after": ("gemma2", {"head_dim": 16}, ALL),
    "scaled": ("granite", {"num_attention_heads": 2}, ALL),
    "norms within": ("bitnet", {}, ALL),
    "an MLP beside attention": ("cohere", {"num_attention_heads": 2}, ALL),
    "no gate": ("starcoder2", {"num_attention_heads": 2}, ("q_proj", "o_proj", "c_fc", "c_proj")),
    "beside experts": ("qwen3_moe", {"head_dim": 16}, ALL[:4]),
    "of latent vectors": (
        "deepseek_v3",
        {"q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
        ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    ),
}
TREE = torch.tensor([-1, 0, 0, 1, 1])


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, list[Lora]]:
    """A random model and two adapters of different ranks."""
    name, changes, targets = FAMILIES[request.param]
    module = tiny_module(name, **changes)
    paths = [
        write_adapter(tmp_path_factory.mktemp("adapter"), module.state_dict(), targets=targets, seed=seed, rank=rank)
        for seed, rank in ((1, 3), (2, 5))
    ]
    return module, [read_lora(path) for path in paths]


def built(
    kind: Any, module: PreTrainedModel, loras: Sequence[Lora] = (), merged: Lora | None = None, **options: Any
) -> Any:
    source = ModuleWeights(module)
    if kind is LeanModel:
        options["device"] = torch.device("cpu")
    shape, dtype = read_shape(module.config, module.generation_config), module.dtype
    model = kind(
        shape, source if merged is None else MergedWeights(source, merged), dtype=dtype, name="tiny", **options
    )
    if loras:
        model.add_loras({f"lora{at}": lora for at, lora in enumerate(loras)})
    return model


def passed(model: CausalModel, rows: Sequence[int], loras: Sequence[int], num_nodes: int = 5) -> Tensor:
    """[B, n, V] of a pass over some of eight rows, each with its adapter: a tree, or a line of more nodes."""
    tokens = torch.randint(3, VOCAB, (8, 64), generator=torch.Generator().manual_seed(4))[list(rows), :num_nodes]
    target = Target(model, len(rows), 64)
    target.cache.loras = list(loras)
    parent = TREE if num_nodes == len(TREE) else torch.arange(num_nodes) - 1
    logits = target.forward(
        tokens, layout(parent.expand(len(rows), -1), torch.zeros(len(rows), dtype=torch.int64), 64)
    ).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("kind", [NativeModel, LeanModel])
def test_the_sums_of_the_merged_weights(kind: type[CausalModel], family: tuple[PreTrainedModel, list[Lora]]) -> None:
    """And a row without an adapter has the very bits of a model that knows none."""
    module, loras = family
    model, base = built(kind, module, loras), built(kind, module)
    mixed = passed(model, [0, 1, 2], [0, 1, 2])
    assert torch.equal(mixed[0], passed(base, [0, 1, 2], [0, 0, 0])[0])
    for row, lora in enumerate(loras, start=1):
        expected = passed(built(kind, module, merged=lora), [0, 1, 2], [0, 0, 0])[row]
        size = expected.abs().max()
        assert (mixed[row] - expected).abs().max() <= 1e-5 * size
        assert (mixed[row] - passed(base, [row], [0])[0]).abs().max() > 0.05 * size, "the adapter must matter"


def test_a_row_has_the_same_bits_in_any_company(family: tuple[PreTrainedModel, list[Lora]]) -> None:
    """Alone, beside others, as a part of many rows, by one thread or two."""
    module, loras = family
    model = built(NativeModel, module, loras)
    alone = {lora: passed(model, [3], [lora])[0] for lora in (0, 1, 2)}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for others in ([0, 0, 0], [1, 2, 0], [2, 2, 1], [2, 0, 1, 1, 0, 2, 1]):
            for lora, expected in alone.items():
                rows = [0, 3, 1, 2, 4, 5, 6, 7][: 1 + len(others)]
                found = passed(model, rows, [others[0], lora, *others[1:]])
                assert torch.equal(found[1], expected)
    torch.set_num_threads(1)
    whole = passed(model, [3, 4], [2, 1], num_nodes=40)
    assert torch.equal(whole[0, 0], alone[2][0])
    assert torch.equal(whole[:, :17], passed(model, [3, 4], [2, 1], num_nodes=17))


def test_native_and_lean_agree_in_bfloat16(family: tuple[PreTrainedModel, list[Lora]]) -> None:
    module, loras = family
    halved = type(module)(module.config).to(torch.bfloat16)
    halved.load_state_dict(module.state_dict())
    native, lean = (
        passed(built(kind, halved, loras), [0, 1, 2], [0, 1, 2]).float() for kind in (NativeModel, LeanModel)
    )
    for row in range(3):
        assert (native[row] - lean[row]).abs().max() <= 0.08 * lean[row].abs().max()


def test_beside_rounded_weights(family: tuple[PreTrainedModel, list[Lora]]) -> None:
    """What an adapter adds is not rounded: logits are as near to those of merged weights as the base's to the base's."""
    module, loras = family
    model = built(NativeModel, module, loras, weights="int8")
    mixed = passed(model, [0, 1, 2], [0, 1, 2])
    assert torch.equal(mixed[0], passed(built(NativeModel, module, weights="int8"), [0], [0])[0])
    assert torch.equal(mixed[2], passed(model, [2], [2])[0])
    for row, lora in enumerate(loras, start=1):
        expected, base = (passed(built(NativeModel, module, merged=one), [row], [0])[0] for one in (lora, None))
        error, effect = ((each - expected).norm() / expected.norm() for each in (mixed[row], base))
        assert error < 0.12
        assert error < 0.3 * effect


def test_a_cache_keeps_each_rows_adapter() -> None:
    cache = built(NativeModel, tiny_module("llama", head_dim=16)).new_cache(3, 16)
    cache.loras = [1, 0, 2]
    assert cache.rows(1, 3).loras == [0, 2]
    cache.open_rows(1)
    cache.keep(torch.tensor([2, 3, 0]))
    assert cache.loras == [2, 0, 1]
    other = built(NativeModel, tiny_module("llama", head_dim=16)).new_cache(1, 16)
    other.loras = [1]
    cache.join(other, 4)
    assert cache.loras == [2, 0, 1, 1]
    cache.clear()
    assert cache.loras == []


def adapter(tmp_path: Path, weights: Any, **options: Any) -> Lora:
    return read_lora(write_adapter(tmp_path / "adapter", weights, **options))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    module = tiny_module("llama", head_dim=16)
    wide = adapter(tmp_path, {"model.layers.0.mlp.up_proj.weight": torch.zeros(48, 40)}, targets=("up_proj",))
    deep = adapter(tmp_path, {"model.layers.9.mlp.up_proj.weight": torch.zeros(48, 32)}, targets=("up_proj",))
    long = adapter(tmp_path, {"model.layers.0.mlp.up_proj.weight": torch.zeros(49, 32)}, targets=("up_proj",))
    fused = adapter(tmp_path, {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(9, 32)}, targets=("qkv_proj",))
    model = built(NativeModel, module)
    for lora, told in (
        (wide, r"up_proj.lora_A.weight has shape \(4, 40\), expected \(4, 32\)"),
        (long, r"up_proj.lora_B.weight has shape \(49, 4\), expected \(48, 4\)"),
        (deep, "model.layers.9.mlp.up_proj, which is no linear of the model"),
        (fused, "model.layers.0.self_attn.qkv_proj, which is no linear of the model"),
    ):
        for attach in (lambda one: model.add_loras({"a": one}), lambda one: MergedWeights(ModuleWeights(module), one)):
            with pytest.raises(LoraError, match=told):
                attach(lora)
    phi = built(NativeModel, tiny_module("phi3", num_attention_heads=2))
    with pytest.raises(ModelError, match=r"qkv_proj.*has shape \(9, 4\), expected \(96, any\)"):
        phi.add_loras({"a": fused})
    moe = built(NativeModel, tiny_module("qwen3_moe", head_dim=16))
    expert = adapter(
        tmp_path, {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(16, 32)}, targets=("up_proj",)
    )
    with pytest.raises(LoraError, match="expected those of attention and of an MLP without experts"):
        moe.add_loras({"a": expert})


def test_merged_weights_are_sums_rounded_once(tmp_path: Path) -> None:
    name, other = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    weight, norm = torch.randn(6, 8), torch.randn(8)
    lora = adapter(tmp_path, {name: weight}, targets=("up_proj",))
    term = lora.modules["model.layers.0.mlp.up_proj"]
    source = MergedWeights(TensorWeights({name: weight, other: norm}), lora)
    whole = (weight + term.scale * (term.b @ term.a)).bfloat16()
    assert torch.equal(source.read(name, torch.bfloat16, torch.device("cpu")), whole)
    assert torch.equal(source.reader(name)(2, 5).bfloat16(), whole[2:5])
    assert source.shared(name) is None
    assert source.shared(other) is norm or torch.equal(source.read(other, torch.float32, torch.device("cpu")), norm)
    apart = type("Apart", (TensorWeights,), {"apart": (other,), "names": (name,)})({name: weight, other: norm})
    assert MergedWeights(apart, lora).apart == (other,)
    assert torch.equal(MergedWeights(apart, lora).read(other, torch.float32, torch.device("cpu")), norm)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories of a model and of an adapter."""
    module, path = tiny_module("llama", head_dim=16), tmp_path_factory.mktemp("model")
    module.save_pretrained(path)
    return str(path), str(write_adapter(tmp_path_factory.mktemp("adapter"), module.state_dict()))


@pytest.mark.parametrize("implementation", ["auto", "native", "lean"])
def test_loading_merges_one_and_holds_several(saved: tuple[str, str], implementation: str) -> None:
    path, lora = saved
    merged = load_model(path, implementation=implementation, lora=lora)
    several = load_model(path, implementation=implementation, lora={"one": lora, "two": lora})
    assert (merged.loras, several.loras) == ((), ("one", "two"))
    expected = passed(merged, [0], [0])
    assert (passed(several, [0], [2]) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_loading_rounds_what_was_merged(saved: tuple[str, str]) -> None:
    path, lora = saved
    found, exact = (load_model(path, lora=lora, weights=weights) for weights in ("int8", "auto"))
    assert found.loras == ()
    assert found.spec.weights == "int8"
    expected = passed(exact, [0], [0])
    assert (passed(found, [0], [0]) - expected).norm() <= 0.1 * expected.norm()


def test_what_runs_no_adapters_says_so(saved: tuple[str, str], tmp_path: Path) -> None:
    path, lora = saved
    for options in ({"implementation": "transformers"}, {"device_map": "cpu"}, {"tensor_parallel": True}):
        for given in (lora, {"a": lora}):
            with pytest.raises(ConfigError, match="lora needs implementation 'native' or 'lean'"):
                load_model(path, lora=given, **options)
    module = tiny_module("gpt_neox")
    module.save_pretrained(tmp_path / "neox")
    with pytest.raises(LoraError, match=r"runs by transformers alone here, where adapters .* do not run"):
        load_model(str(tmp_path / "neox"), lora=lora)
    from foretell.model.load import from_module

    with pytest.raises(ModelError, match="implementation 'transformers' runs no adapters"):
        from_module(tiny_module("llama")).add_loras({"a": read_lora(lora)})
    with pytest.raises(ConfigError, match="'b' is no adapter that is loaded; there are 'a'"):
        load_model(path, lora={"a": lora}).lora_of("b")
    with pytest.raises(LoraError, match=r"no adapter_config.json"):
        load_model(path, lora={"a": path})
