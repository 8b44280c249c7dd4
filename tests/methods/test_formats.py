"""Checkpoint layouts: what is written, what is read of others' files (made here by hand), what is refused and how."""

import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretell.core.errors import ConfigError, ModelError
from foretell.heads import directories, formats
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.formats import load_head
from foretell.heads.head import Head
from foretell.heads.layout import TargetInfo
from foretell.heads.modules import RopeScaling
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights
from foretell.methods.kangaroo.head import KangarooHead, KangarooHeadConfig
from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig
from foretell.model.target import ModelSpec

H, V, DV, LAYERS = 16, 40, 12, 8
Some = TypeVar("Some", bound=Head)
ATTENTION = {"intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
SIZES = {"hidden_size": H, "vocab_size": V}


def spec(**changes: Any) -> ModelSpec:
    values = {
        "name": "some/target", "architecture": "Qwen3ForCausalLM", "implementation": "transformers", "vocab_size": V,
        "num_layers": LAYERS, "hidden_size": H, "max_positions": 512, "dtype": torch.float32,
        "device": torch.device("cpu"), "weight_bytes": 0,
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})


def eagle3(**changes: Any) -> Eagle3Head:
    values = {**SIZES, **ATTENTION, "draft_vocab_size": DV, "layer_ids": (1, 3, 4), **changes}
    generator = torch.Generator().manual_seed(1)
    config = Eagle3HeadConfig(**values)
    counts = torch.randint(100, (V,), generator=generator)
    return Eagle3Head.fresh(config, generator, vocabulary=draft_vocabulary(counts, config.draft_vocab_size))


def eagle1(**changes: Any) -> Eagle1Head:
    config = Eagle1HeadConfig(**{**SIZES, **ATTENTION, "tap_layer": LAYERS - 1, **changes})
    return Eagle1Head.fresh(config, torch.Generator().manual_seed(2))


def medusa(**changes: Any) -> MedusaHead:
    values = {"num_heads": 3, "num_layers": 1, "tap_layer": LAYERS - 1, "draft_vocab_size": V, **changes}
    return scrambled(MedusaHead(MedusaHeadConfig(**SIZES, **values)))


def dflash(**changes: Any) -> DFlashHead:
    values = {"num_layers": 2, "block_size": 4, "layer_ids": (1, 4), "mask_token_id": 39, "rope_theta": 1e6, **changes}
    return scrambled(DFlashHead(DFlashHeadConfig(**SIZES, **ATTENTION, **values)))


def scrambled(head: Some) -> Some:
    """Every number different, so that no two tensors can be confused."""
    with torch.no_grad():
        for index, parameter in enumerate(head.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    return head


DSPARK = {"markov_rank": 3, "confidence": True, "sample_from_anchor": True}
HEADS: dict[str, Callable[[], Head]] = {
    "eagle3": eagle3,
    "eagle3 with every option": lambda: eagle3(
        norm_before_residual=True, fc_norm=True, norm_output=True, own_embedding=True, layer_ids=(0, 2, 5, 7)
    ),
    "eagle3 of speculators": lambda: eagle3(
        num_layers=3, norm_before_fc=True, qk_norm=True, attention_bias=True, output_bias=True, windows=(8, 0, 8),
        rope_scaling=RopeScaling("yarn", 4.0, 64, beta_fast=16.0, truncate=False, attention_factor=1.25),
    ),
    "eagle3 of two Llama layers": lambda: eagle3(
        num_layers=2, attention_bias=True, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 64, 1.0, 4.0)
    ),
    "eagle3 with linear rotary scaling": lambda: eagle3(rope_scaling=RopeScaling("linear", 2.5)),
    "eagle1 of two layers": lambda: eagle1(
        num_layers=2, attention_bias=True, output_bias=True, windows=(0, 4), rope_scaling=RopeScaling("linear", 2.0)
    ),
    "eagle3 of the whole vocabulary": lambda: eagle3(draft_vocab_size=V),
    "eagle1": eagle1,
    "eagle1 with an embedding, without a bias": lambda: eagle1(fc_bias=False, own_embedding=True),
    "medusa": medusa,
    "medusa of two blocks": lambda: medusa(num_layers=2),
    "medusa of a reduced vocabulary": lambda: medusa(draft_vocab_size=DV),
    "medusa with the target's head": lambda: medusa(own_lm_head=False),
    "dflash": dflash,
    "dflash, causal": lambda: dflash(causal=True),
    "dspark": lambda: dflash(**DSPARK),
    "dspark without confidence": lambda: dflash(markov_rank=3),
    "dspark without markov": lambda: dflash(confidence=True, sample_from_anchor=True),
    "kangaroo": lambda: scrambled(KangarooHead(KangarooHeadConfig(H, V, 2, num_heads=2, num_kv_heads=2, head_dim=8))),
    "acceptance": lambda: scrambled(AcceptanceHead(AcceptanceHeadConfig(H, V, num_layers=2, normalize=True,
        drafter="eagle3"))),
    "judge": lambda: scrambled(JudgeWeights(JudgeHeadConfig(**SIZES, layer=5, columns=12, training={"recall": 0.9}))),
}  # fmt: skip


def suiting(head: Head) -> list[formats.Layout]:
    """The layouts in which a head can be written."""
    return [layout for layout in formats.HEADS.values() if layout.suits(head) is None]


PAIRS = [
    (name, first, second)
    for name, make in HEADS.items()
    for first, second in itertools.product(suiting(make()), repeat=2)
]


def same(one: Head, other: Head) -> None:
    """Bit for bit: names, dtypes, shapes, numbers, configuration."""
    assert type(one) is type(other)
    assert one.config == other.config
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert torch.equal(tensor, second[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "first", "second"), PAIRS, ids=lambda part: getattr(part, "name", part))
def test_a_round_trip_changes_nothing(
    tmp_path: Path, name: str, first: formats.Layout, second: formats.Layout, dtype: torch.dtype
) -> None:
    head = HEADS[name]()
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    formats.save(head, tmp_path / "one", first.name, target=spec())
    assert formats.detect(tmp_path / "one") is first
    formats.save(formats.load(tmp_path / "one"), tmp_path / "two", second.name, target=spec())
    assert formats.detect(tmp_path / "two") is second
    same(head, formats.load(tmp_path / "two"))


def test_every_layout_is_reached() -> None:
    assert {first.name for _, first, _ in PAIRS} == set(formats.HEADS)
    assert {(first.name, second.name) for _, first, second in PAIRS} >= {
        ("eagle3", "speculators"), ("speculators", "eagle3"), ("medusa", "medusa_vllm"), ("medusa_vllm", "medusa"),
    }  # fmt: skip


def test_defaults() -> None:
    found = {name: formats.default_layout(make()).name for name, make in HEADS.items()}
    assert found["eagle3"] == "eagle3"
    assert found["medusa"] == "medusa"
    assert (found["dflash"], found["dspark"]) == ("dflash", "dspark")


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def stored(path: Path) -> dict[str, list[int]]:
    """Names and shapes, as the file says them."""
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118


EAGLE3_LAYER = {
    "input_layernorm.weight": [H], "hidden_norm.weight": [H], "post_attention_layernorm.weight": [H],
    "self_attn.q_proj.weight": [16, 2 * H], "self_attn.k_proj.weight": [8, 2 * H],
    "self_attn.v_proj.weight": [8, 2 * H], "self_attn.o_proj.weight": [H, 16],
    "mlp.gate_proj.weight": [24, H], "mlp.up_proj.weight": [24, H], "mlp.down_proj.weight": [H, 24],
}  # fmt: skip
EAGLE3_REST = {"fc.weight": [H, 3 * H], "norm.weight": [H], "lm_head.weight": [DV, H], "d2t": [DV], "t2d": [V]}


def test_eagle3_native_numbers_its_layers_in_both_conventions(tmp_path: Path) -> None:
    formats.save(eagle3(), tmp_path / "head", target=spec())
    config = written(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM: hidden_states[2] is the output of layer 1
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # SGLang
    }
    assert {key: config[key] for key in ("hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers")} == {
        "hidden_size": H, "vocab_size": V, "draft_vocab_size": DV, "num_hidden_layers": 1,
    }  # fmt: skip
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings"):
        assert config[flag] is False
    assert config["max_position_embeddings"] == 512
    assert stored(tmp_path / "head" / "model.safetensors") == {
        **{f"midlayer.{key}": shape for key, shape in EAGLE3_LAYER.items()}, **EAGLE3_REST,
    }  # fmt: skip


def test_speculators_keys_exactly(tmp_path: Path) -> None:
    formats.save(eagle3(norm_before_residual=True), tmp_path / "head", "speculators", target=spec())
    config = written(tmp_path / "head")
    layer = config.pop("transformer_layer_config")
    assert {key: value for key, value in config.items() if key not in ("foretell", "dtype", "torch_dtype")} == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": DV,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    assert layer["model_type"] == "llama"
    assert layer["num_hidden_layers"] == 1
    assert layer["hidden_size"] == H
    assert stored(tmp_path / "head" / "model.safetensors") == {
        **{f"layers.0.{key}": shape for key, shape in EAGLE3_LAYER.items()}, **EAGLE3_REST,
    }  # fmt: skip
    assert formats.describe_target(tmp_path / "head") == TargetInfo("some/target", "Qwen3ForCausalLM", LAYERS, 512)


def test_eagle1_is_marked(tmp_path: Path) -> None:
    formats.save(eagle1(), tmp_path / "head", target_name="t", extra={"loss": 1.5, "worst": float("nan")})
    config = written(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["foretell"] == {
        "layout": "eagle1", "method": "eagle1", "target": {"name": "t"}, "tap_layer": 7,
        "extra": {"loss": 1.5, "worst": None},
    }  # fmt: skip
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert formats.describe_extra(tmp_path / "head") == {"loss": 1.5, "worst": None}
    names = stored(tmp_path / "head" / "model.safetensors")
    assert names["fc.weight"] == [H, 2 * H]
    assert "layers.0.mlp.up_proj.weight" in names
    assert not any("input_layernorm" in name for name in names)


@pytest.mark.parametrize("fc_bias", [True, False])
def test_eagle1_never_claims_an_attention_bias(tmp_path: Path, fc_bias: bool) -> None:
    """vLLM 0.32 reads a true "bias" as the attention's, finds none in the file, and accepts nothing (1.003 tokens a step
    instead of 2.34). SGLang takes an absent one for a true one, of fc."""
    formats.save(eagle1(fc_bias=fc_bias), tmp_path / "head", target=spec())
    config = written(tmp_path / "head")
    assert config.get("bias", "absent") == ("absent" if fc_bias else False)
    assert config["attention_bias"] is False
    loaded = formats.load(tmp_path / "head")
    assert isinstance(loaded, Eagle1Head)
    assert loaded.config.fc_bias == fc_bias


def test_eagle1_of_earlier_versions_is_read_and_a_wrong_bias_refused(tmp_path: Path) -> None:
    """They wrote "bias": true for a bias of fc."""
    for fc_bias in (True, False):
        formats.save(eagle1(fc_bias=fc_bias), tmp_path / "head", target=spec())
        config = written(tmp_path / "head")
        (tmp_path / "head" / "config.json").write_text(json.dumps({**config, "bias": True}))
        if fc_bias:
            same(formats.load(tmp_path / "head"), eagle1())
        else:
            with pytest.raises(ModelError, match=r"bias is True in config.json, and the weights have no fc\.bias"):
                formats.load(tmp_path / "head")


def test_the_bundled_eagle1_runs_in_vllm() -> None:
    from foretell import bundled

    assert "bias" not in written(bundled.path("eagle1"))


def test_medusa_in_both_layouts(tmp_path: Path) -> None:
    formats.save(medusa(), tmp_path / "authors", target_name="some/target")
    config = written(tmp_path / "authors")
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert config["base_model_name_or_path"] == "some/target"
    assert "architectures" not in config
    assert stored(tmp_path / "authors" / "medusa_lm_head.safetensors") == {
        f"{head}.{rest}": shape
        for head in range(3)
        for rest, shape in {"0.linear.weight": [H, H], "0.linear.bias": [H], "1.weight": [V, H]}.items()
    }
    formats.save(medusa(), tmp_path / "vllm", "medusa_vllm")
    config = written(tmp_path / "vllm")
    assert {key: config[key] for key in ("architectures", "model_type", "num_heads", "num_hidden_layers")} == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1,
    }  # fmt: skip
    assert (config["vocab_size"], config["truncated_vocab_size"], config["medusa_fc_bias"]) == (V, V, True)
    names = stored(tmp_path / "vllm" / "model.safetensors")
    assert names["medusa_heads.2.1.weight"] == [V, H]
    assert "token_map" not in names


def test_dflash_and_dspark_keys(tmp_path: Path) -> None:
    formats.save(dflash(causal=True), tmp_path / "dflash", target=spec())
    config = written(tmp_path / "dflash")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["model_type"], config["block_size"], config["num_target_layers"]) == ("qwen3", 4, LAYERS)
    assert config["dflash_config"] == {
        "mask_token_id": 39, "target_layer_ids": [1, 4], "causal_head": True, "sample_from_anchor": False,
    }  # fmt: skip
    assert config["is_causal"]  # vLLM's key
    formats.save(dflash(**DSPARK), tmp_path / "dspark")
    config = written(tmp_path / "dspark")
    assert config["architectures"] == ["DSparkDraftModel"]
    inner = config["dflash_config"]
    for key, value in {
        "markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "mask_token_id": 39, "target_layer_ids": [1, 4],
    }.items():  # fmt: skip
        assert inner[key] == config[key] == value
    assert inner["projector_type"] == "dspark"
    names = stored(tmp_path / "dspark" / "model.safetensors")
    assert names["markov_head.markov_w1.weight"] == names["markov_head.markov_w2.weight"] == [V, 3]
    assert names["confidence_head.proj.weight"] == [1, H + 3]


# -- files of others, written by hand -------------------------------------------------------------------------------


def lay(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def random(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    return {key: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for key, shape in shapes.items()}


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_files(prefix: str = "midlayer.") -> dict[str, Tensor]:
    tensors = random({prefix + key: shape for key, shape in EAGLE3_LAYER.items()})
    tensors |= random({key: shape for key, shape in EAGLE3_REST.items() if key not in ("d2t", "t2d")})
    chosen = torch.arange(DV) * 3
    tensors["d2t"] = chosen - torch.arange(DV)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def native(**changes: Any) -> dict[str, Any]:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DV, "rope_theta": 5e5}
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def speculators(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": DV,
        "norm_before_residual": False, IDS: [2, 4, 5], "target_hidden_size": None, "transformer_layer_config": LLAMA,
        "speculators_config": {"verifier": {"name_or_path": "a/b", "architectures": ["LlamaForCausalLM"]}},
    }  # fmt: skip
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
def test_reads_eagle3_of_others(tmp_path: Path, prefix: str) -> None:
    tensors = eagle3_files(prefix)
    head = formats.load(lay(tmp_path / "x", native(**{IDS: [2, 4, 5]}), tensors))
    assert isinstance(head, Eagle3Head)
    assert head.config.layer_ids == head.taps == (1, 3, 4)
    assert (head.config.rope_theta, head.config.rms_norm_eps, head.config.head_dim) == (5e5, 1e-5, 8)
    assert not head.config.norm_before_residual
    assert torch.equal(head.midlayer.hidden_norm.weight, tensors[prefix + "hidden_norm.weight"])
    assert torch.equal(head.target_ids, torch.arange(DV) * 3)


def test_reads_the_authors_own_eagle3_with_an_embedding_in_a_pickle(tmp_path: Path) -> None:
    tensors = {**eagle3_files(), "embed_tokens.weight": torch.randn(V, H)}
    config = native(architectures=["LlamaForCausalLM"], **{IDS: [2, 4, 5]})
    head = formats.load(lay(tmp_path / "x", config, tensors, "pytorch_model.bin"))
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_reads_shards(tmp_path: Path) -> None:
    tensors = eagle3_files()
    half = dict(itertools.islice(tensors.items(), 5))
    path = lay(tmp_path / "x", native(**{IDS: [2, 4, 5]}), half, "model-1.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if key not in half}, path / "model-2.safetensors")
    shards = {key: "model-1.safetensors" if key in half else "model-2.safetensors" for key in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert formats.load(path).num_parameters > 0
    (path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing .*model-2\.safetensors"):
        formats.load(path)


@pytest.mark.parametrize("layout", ["medusa", "medusa_vllm"])
def test_a_head_that_replaces_another_is_the_one_that_is_read(tmp_path: Path, layout: str) -> None:
    """Files of other layouts, and indices of shards, do not outlive what they described."""
    formats.save(medusa(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.linear.weight": "model-1.safetensors"}}))
    head = medusa()
    formats.save(head, tmp_path, layout)
    assert not index.exists()
    found = formats.load(tmp_path).state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in head.state_dict().items())


def test_the_three_numberings_agree(tmp_path: Path) -> None:
    tensors = eagle3_files()
    by = {
        "vllm": native(**{IDS: [2, 4, 5]}),
        "sglang": native(eagle_config={"use_aux_hidden_state": True, IDS: [1, 3, 4]}),
        "both": native(**{IDS: [2, 4, 5]}, eagle_config={IDS: [1, 3, 4]}),
        "speculators": speculators(),
    }
    for name, config in by.items():
        assert formats.load(lay(tmp_path / name, config, tensors)).taps == (1, 3, 4), name
    with pytest.raises(ModelError, match=r"makes eagle_config\.\S+ \[1, 3, 4\] .* and it is \[2, 4, 5\]"):
        formats.load(lay(tmp_path / "x", native(**{IDS: [2, 4, 5]}, eagle_config={IDS: [2, 4, 5]}), tensors))


@pytest.mark.parametrize(("num_layers", "taps"), [(12, (1, 5, 8)), (8, (1, 3, 4))])
def test_absent_layer_ids_are_the_default_where_it_is_sound(
    tmp_path: Path, num_layers: int, taps: tuple[int, ...]
) -> None:
    path = lay(tmp_path / "x", native(), eagle3_files())
    assert formats.load(path, num_layers=num_layers).taps == taps


@pytest.mark.parametrize("num_layers", [6, 4, 3])
def test_absent_layer_ids_are_refused_where_engines_would_read_other_layers(tmp_path: Path, num_layers: int) -> None:
    path = lay(tmp_path / "x", native(), eagle3_files())
    with pytest.raises(ModelError, match=rf"target of {num_layers} layers the default is .* not 3 different layers"):
        formats.load(path, num_layers=num_layers)
    with pytest.raises(ModelError, match="needs the number of the target's layers"):
        formats.load(path)


OLD = {
    "_name_or_path": "x", "add_cross_attention": False, "bad_words_ids": None, "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "id2label": {"0": "LABEL_0"},
    "is_decoder": False, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20, "num_beams": 1,
    "pruned_heads": {}, "repetition_penalty": 1.0, "return_dict": True, "temperature": 1.0, "tf_legacy_loss": False,
    "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_cache": True, "pretraining_tp": 1,
}  # fmt: skip
QWEN = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
    "initializer_range": 0.02, "max_position_embeddings": 40960, "max_window_layers": 36, "rope_scaling": None,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_sliding_window": False, "target_model_type": "qwen3_vl_moe",
}  # fmt: skip
MODELOPT = {
    "eagle_config": {
        IDS: [1, 3, 4], "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    },
    "position_embedding_type": "rope", "mlp_bias": False,
}  # fmt: skip


@pytest.mark.parametrize("extra", [OLD, QWEN, MODELOPT], ids=["transformers 4", "SpecForge", "modelopt"])
def test_keys_that_change_nothing_are_read_over(tmp_path: Path, extra: dict[str, Any]) -> None:
    plain = formats.load(lay(tmp_path / "x", native(**{IDS: [2, 4, 5]}), eagle3_files()))
    same(plain, formats.load(lay(tmp_path / "y", {**native(**{IDS: [2, 4, 5]}), **extra}, eagle3_files())))
    inside = {"transformer_layer_config": {**LLAMA, **{key: extra[key] for key in extra if key != "eagle_config"}}}
    files = eagle3_files("layers.0.")
    outer = formats.load(lay(tmp_path / "u", speculators(), files))
    same(outer, formats.load(lay(tmp_path / "z", speculators(**inside), files)))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": ["full_attention"]}, ()),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, ()),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, (8,)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}, (8,)),
        ({"sliding_window": 8, "use_sliding_window": False}, ()),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 36}, ()),
    ],
)  # fmt: skip
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    for name, config in (
        ("native", native(**{IDS: [2, 4, 5], **changes})),
        ("speculators", speculators(transformer_layer_config={**LLAMA, **changes})),
    ):
        head = formats.load(lay(tmp_path / name, config, eagle3_files()))
        assert isinstance(head, Eagle3Head)
        assert head.config.windows == windows


def test_a_reduced_vocabulary_by_its_other_name(tmp_path: Path) -> None:
    config = native(draft_vocab_size=..., truncated_vocab_size=DV, **{IDS: [2, 4, 5]})
    head = formats.load(lay(tmp_path / "x", config, eagle3_files()))
    assert isinstance(head, Eagle3Head)
    assert head.config.draft_vocab_size == DV


def test_frozen_copies_of_the_target_are_left_out(tmp_path: Path) -> None:
    extra = random({"verifier_lm_head.weight": [DV, H], "verifier_norm.weight": [H]})
    files = eagle3_files("layers.0.")
    plain = formats.load(lay(tmp_path / "x", speculators(), files))
    same(plain, formats.load(lay(tmp_path / "y", speculators(), {**files, **extra})))


def test_speculators_without_norm_before_residual_is_refused(tmp_path: Path) -> None:
    path = lay(tmp_path / "x", speculators(norm_before_residual=...), eagle3_files("layers.0."))
    with pytest.raises(ModelError, match="vLLM takes that for true and the speculators library for false"):
        formats.load(path)


def test_vocabulary_maps_that_follow_are_completed(tmp_path: Path) -> None:
    tensors = eagle3_files()
    t2d = tensors.pop("t2d")
    head = formats.load(lay(tmp_path / "x", native(**{IDS: [2, 4, 5]}), tensors))
    assert torch.equal(head.get_buffer("t2d"), t2d)
    tensors["lm_head.weight"] = torch.randn(V, H)
    del tensors["d2t"]
    whole = formats.load(lay(tmp_path / "y", native(draft_vocab_size=..., **{IDS: [2, 4, 5]}), tensors))
    assert isinstance(whole, Eagle3Head)
    assert torch.equal(whole.target_ids, torch.arange(V))
    assert bool(whole.t2d.all())


def test_reads_eagle1_of_others(tmp_path: Path) -> None:
    shapes = {f"layers.0.{key}": shape for key, shape in EAGLE3_LAYER.items() if "norm" not in key}
    shapes |= {f"layers.0.self_attn.{part}_proj.weight": [rows, H] for part, rows in (("q", 16), ("k", 8), ("v", 8))}
    shapes |= {"layers.0.post_attention_layernorm.weight": [H], "fc.weight": [H, 2 * H], "fc.bias": [H]}
    tensors = random({**shapes, "embed_tokens.weight": [V, H], "lm_head.weight": [V, H]})
    path = lay(tmp_path / "x", {**LLAMA, "architectures": ["LlamaForCausalLM"]}, tensors)
    head = formats.load(path, num_layers=LAYERS)
    assert isinstance(head, Eagle1Head)
    assert (head.taps, head.config.fc_bias, head.config.own_embedding) == ((LAYERS - 1,), True, True)
    assert torch.equal(head.fc.bias, tensors["fc.bias"])
    with pytest.raises(ModelError, match="reads the target's last layer, and its files do not say which"):
        formats.load(path)
    del tensors["fc.bias"]
    bare = formats.load(lay(tmp_path / "y", {**LLAMA, "architectures": ["LlamaForCausalLM"]}, tensors), num_layers=3)
    assert isinstance(bare, Eagle1Head)
    assert not bare.config.fc_bias


def medusa_files(num_heads: int, prefix: str = "") -> dict[str, Tensor]:
    shapes = {"0.linear.weight": [H, H], "0.linear.bias": [H], "1.weight": [V, H]}
    return random({f"{prefix}{head}.{key}": shape for head in range(num_heads) for key, shape in shapes.items()})


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_reads_medusa_of_its_authors_and_counts_the_heads_itself(tmp_path: Path, file: str) -> None:
    config = {"base_model_name_or_path": "some/target", "medusa_num_heads": 2, "medusa_num_layers": 1}
    path = lay(tmp_path / "x", config, medusa_files(5), file)
    head = formats.load(path, num_layers=LAYERS)
    assert head.config == MedusaHeadConfig(**SIZES, num_heads=5, num_layers=1, tap_layer=7, draft_vocab_size=V)
    with pytest.raises(ModelError, match=r"medusa_num_heads is 6 in config.json, and the weights hold 5"):
        formats.load(lay(path, {**config, "medusa_num_heads": 6}, medusa_files(5), file), num_layers=LAYERS)


def test_reads_medusa_of_vllm(tmp_path: Path) -> None:
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": 2,
              "num_hidden_layers": 1}  # fmt: skip
    theirs = medusa_files(2)
    own = {"0.linear": "layers.0"}
    blocks = {
        f"blocks.{key[0]}.{own['0.linear']}{key[10:]}": tensor for key, tensor in theirs.items() if "linear" in key
    }
    blocks |= {f"lm_heads.{key[0]}.weight": tensor for key, tensor in theirs.items() if "linear" not in key}
    one = formats.load(lay(tmp_path / "x", config, medusa_files(2, "medusa_heads.")), num_layers=LAYERS)
    two = formats.load(lay(tmp_path / "y", config, blocks), num_layers=LAYERS)
    same(one, two)


def dflash_files() -> dict[str, Tensor]:
    narrow = {f"self_attn.{part}_proj.weight": [rows, H] for part, rows in (("q", 16), ("k", 8), ("v", 8))}
    layer = {key: shape for key, shape in {**EAGLE3_LAYER, **narrow}.items() if key != "hidden_norm.weight"}
    layer |= {"self_attn.q_norm.weight": [8], "self_attn.k_norm.weight": [8]}
    return random(
        {
            **{f"layers.{index}.{key}": shape for index in range(2) for key, shape in layer.items()},
            "fc.weight": [H, 2 * H], "hidden_norm.weight": [H], "norm.weight": [H],
        }
    )  # fmt: skip


def dflash_config(**changes: Any) -> dict[str, Any]:
    config = {
        **LLAMA, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 8,
        "block_size": 4, "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 4]},
    }  # fmt: skip
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def test_reads_dflash_of_others(tmp_path: Path) -> None:
    extra = random({"embed_tokens.weight": [V, H]})  # a copy of the target's, as some trainers leave it
    head = formats.load(lay(tmp_path / "x", dflash_config(), {**dflash_files(), **extra}))
    assert isinstance(head, DFlashHead)
    assert (head.taps, head.config.block_size, head.config.rope_theta) == ((1, 4), 4, 1e6)
    assert not head.config.sample_from_anchor
    inside = dflash_config(block_size=..., dflash_config={"mask_token_id": 39, "block_size": 5, "causal_head": True})
    other = formats.load(lay(tmp_path / "y", inside, dflash_files()))
    assert isinstance(other, DFlashHead)
    assert (other.taps, other.config.block_size, other.config.causal) == ((1, 5), 5, True)  # the authors' default ids
    with pytest.raises(ModelError, match=r"no dflash_config.target_layer_ids"):
        formats.load(lay(tmp_path / "y", {**inside, "num_target_layers": None}, dflash_files()))


@pytest.mark.parametrize("nested", ["dflash_config", "dspark_config", ""])
def test_reads_dspark_of_others(tmp_path: Path, nested: str) -> None:
    heads = {"markov_head.markov_w1.weight": [V, 3], "markov_head.markov_w2.weight": [V, 3]}
    tensors = {**dflash_files(), **random({**heads, "confidence_head.proj.weight": [1, H + 3]})}
    keys = {"markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True}
    ids = {"mask_token_id": 39, "target_layer_ids": [1, 4]}
    places: dict[str, dict[str, Any]] = {"dflash_config": {**ids, "projector_type": "dspark"}}
    if nested:
        places[nested] = {**places.get(nested, {}), **keys}
        config = dflash_config(architectures=["DSparkDraftModel"], **places)
    else:
        config = dflash_config(architectures=["Qwen3DSparkModel"], dflash_config=..., **ids, **keys)
    head = formats.load(lay(tmp_path / "x", config, tensors))
    assert isinstance(head, DFlashHead)
    assert (head.config.markov_rank, head.config.confidence, head.config.sample_from_anchor) == (3, True, True)
    assert float(head.confidence_head.proj.bias.detach()) == 0.0


# -- what is refused ------------------------------------------------------------------------------------------------

GOOD = native(**{IDS: [2, 4, 5]})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**GOOD, "architectures": ["Qwen2ForCausalLM"]}, r"architecture 'Qwen2ForCausalLM'.*known: DFlashDraftModel,"),
        ({**GOOD, "architectures": ["DFlash2DraftModel"]}, "architecture 'DFlash2DraftModel', which is no head known"),
        ({**GOOD, "architectures": []}, "architecture None, which is no head"),
        (speculators(speculators_model_type="hydra"), "speculators_model_type 'hydra', which is no head known"),
        ({**GOOD, "hidden_size": ...}, "has no 'hidden_size', which this kind"),
        ({**GOOD, "hidden_size": "x"}, "hidden_size is 'x' in config.json, expected a whole number"),
        ({**GOOD, "num_attention_heads": 0}, "num_attention_heads is 0 in config.json, expected at least 1"),
        ({**GOOD, "rms_norm_eps": "x"}, "rms_norm_eps is 'x' in config.json, expected a number"),
        ({**GOOD, "fc_norm": 1}, "fc_norm is 1 in config.json, expected true or false"),
        ({**GOOD, IDS: [2, "x", 5]}, "expected a list of whole numbers"),
        ({**GOOD, "eagle_config": 3}, "eagle_config is 3 in config.json, expected an object"),
        ({**GOOD, IDS: [2, 5, 4]}, r"must be distinct and ascend"),
        ({**GOOD, IDS: [2, 4, 4]}, r"\[1, 3, 3\].*must be distinct and ascend"),
        ({**GOOD, IDS: [0, 4, 5]}, "name the embeddings"),
        ({**GOOD, "hidden_act": "gelu"}, "hidden_act is 'gelu' in config.json; only 'silu' is supported"),
        ({**GOOD, "num_hidden_layers": 2}, r"missing: layers\.1\.input_layernorm\.weight, layers\.1\.mlp"),
        ({**GOOD, "norm_before_fc": True}, r"missing: input_norm\.weight$"),
        ({**GOOD, "norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({**GOOD, "norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, "False in its eagle_config: mend"),
        ({**GOOD, "attention_bias": True}, r"missing: midlayer\.self_attn\.k_proj\.bias"),
        ({**GOOD, "architectures": ["Eagle3Qwen3ForCausalLM"], "head_dim": 8}, r"missing: midlayer\.self_attn\.k_norm"),
        ({**GOOD, "rope_scaling": {"rope_type": "llama3"}}, r"no 'rope_scaling\.factor'"),
        ({**GOOD, "rope_scaling": {"type": "linear"}}, r"no 'rope_scaling\.factor'"),
        ({**GOOD, "rope_scaling": {"type": "linear", "factor": 0}}, r"factor = 0\.0 of the rotary scaling"),
        ({**GOOD, "rope_scaling": {"type": "dynamic", "factor": 2}}, r"rope_scaling\.rope_type is 'dynamic'"),
        ({**GOOD, "rope_parameters": {"rope_type": "longrope"}}, r"rope_parameters\.rope_type is 'longrope'"),
        ({**GOOD, "rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_type is 'mrope' in config.json; only"),
        ({**GOOD, "rope_scaling": {"type": "linear", "factor": 2, "twist": 3}}, r"rope_scaling\.twist is 3"),
        (
            {**GOOD, "rope_scaling": {"type": "yarn", "factor": 2, "attn_factor": 3}, "max_position_embeddings": 64},
            r"rope_scaling\.attn_factor is 3 in config.json, which is not known here",
        ),
        ({**GOOD, "rope_scaling": {"type": "yarn", "factor": 2}}, "no 'max_position_embeddings'"),
        ({**GOOD, "rope_parameters": {"sliding_attention": {}}}, r"rope_parameters\.sliding_attention in .* holds"),
        (
            {**GOOD, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "yarn"}},
            "rope_scaling is of type 'linear' and rope_parameters of type 'yarn'",
        ),
        ({**GOOD, "partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5 in config.json; only 1\.0"),
        ({**GOOD, "layer_types": ["sliding_attention"]}, r"sliding_window is None and use_sliding_window None"),
        ({**GOOD, "layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": False}, "8 and use_s"),
        ({**GOOD, "layer_types": ["chunked_attention"]}, "layer_types has 'chunked_attention'"),
        ({**GOOD, "layer_types": []}, "expected a list of 1 types or more"),
        ({**GOOD, "sliding_window": 8}, "sliding_window is 8 in config.json, and nothing says which layers"),
        ({**GOOD, "use_sliding_window": True}, "sliding_window is None in config.json, and nothing says which"),
        ({**GOOD, "mlp_bias": True}, "mlp_bias is True in config.json; only False"),
        ({**GOOD, "qkv_bias": True}, "qkv_bias is True in config.json; only False"),
        ({**GOOD, "bias": True}, "bias is True in config.json; only False"),
        ({**GOOD, "logit_scale": 0.5}, r"logit_scale is 0\.5 in config.json; only 1\.0"),
        ({**GOOD, "is_causal": False}, "is_causal is False in config.json; only True"),
        ({**GOOD, "target_hidden_size": 32}, "target_hidden_size is 32 in config.json; only 16"),
        ({**GOOD, "num_aux_hidden_states": 4}, "num_aux_hidden_states is 4 in config.json; only 3"),
        ({**GOOD, "quantization_config": {"bits": 4}}, "quantization_config is .* in config.json; only None"),
        ({**GOOD, "eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config\.use_aux_hidden_state is False"),
        ({**GOOD, "eagle_config": {"use_mtp_layernorm": True}}, r"eagle_config\.use_mtp_layernorm is True"),
        ({**GOOD, "eagle_config": {"spin": 1}}, r"eagle_config\.spin is 1 in config.json, which is not known here"),
        ({**GOOD, "residual_multiplier": 0.22}, r"residual_multiplier is 0\.22 in config.json, which is not known here"),
        (
            speculators(transformer_layer_config={**LLAMA, "attn_logit_softcapping": 50.0}),
            r"transformer_layer_config\.attn_logit_softcapping is 50\.0 in config.json, which is not known here",
        ),
        (
            speculators(transformer_layer_config={**LLAMA, "model_type": "gpt_oss"}),
            "transformer_layer_config.model_type is 'gpt_oss' in config.json; only layers of 'llama' and 'qwen3'",
        ),
        (
            speculators(speculators_model_type="hydra", architectures=["DFlashDraftModel"]),
            "speculators_model_type 'hydra', which is no head known .*heads of type 'dflash', 'dspark', 'eagle3'",
        ),
        ({**GOOD, "draft_vocab_size": 99}, "draft_vocab_size = 99 must be between 1 and vocab_size = 40"),
        ({**GOOD, "draft_vocab_size": 13}, r"lm_head\.weight is \[12, 16\], expected \[13, 16\]"),
        ({**GOOD, "intermediate_size": 25}, r"mlp\.down_proj\.weight is \[16, 24\], expected \[16, 25\]"),
        ({**GOOD, "fc_norm": True}, r"missing: fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight$"),
        ({**GOOD, IDS: [2, 4]}, r"fc\.weight is \[16, 48\], expected \[16, 32\]"),
        ([], "config.json holds list, expected one JSON object"),
    ],
)  # fmt: skip
def test_wrong_configurations(tmp_path: Path, config: Any, said: str) -> None:
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if value is not ...}
    path = lay(tmp_path / "x", config, eagle3_files())
    with pytest.raises(ModelError, match=said) as caught:
        formats.load(path, name="my/head")
    assert str(caught.value).startswith("my/head: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("norm.weight"), r"missing: norm\.weight$"),
        (lambda t: t.pop("fc.weight"), r"missing: fc\.weight$"),
        (lambda t: t.update({"fc.bias": torch.zeros(H)}), r"unexpected: fc\.bias$"),
        (lambda t: t.update({"d2t": torch.arange(DV) + V}), "d2t does not lead to 12 different ids"),
        (lambda t: t.update({"d2t": -torch.arange(DV)}), "d2t does not lead to 12 different ids"),
        (lambda t: t.update({"d2t": torch.zeros(DV + 1, dtype=torch.int64)}), r"d2t is \[13\], expected \[12\]"),
        (lambda t: t.update({"t2d": torch.arange(V) < DV}), "t2d and d2t name different draft vocabularies"),
        (lambda t: t.pop("d2t"), "missing: d2t"),
        (lambda t: t["norm.weight"].fill_(torch.nan), r"not finite: norm\.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(H, dtype=torch.int8)}), r"norm\.weight holds int8 numbers"),
        (lambda t: t.update({f"x{i}": torch.zeros(1) for i in range(9)}), "unexpected: x0, x1, x2, x3 and 5 more$"),
    ],
)  # fmt: skip
def test_wrong_tensors(tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], said: str) -> None:
    tensors = eagle3_files()
    change(tensors)
    with pytest.raises(ModelError, match=said):
        formats.load(lay(tmp_path / "x", GOOD, tensors))


def test_wrong_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no directory"):
        formats.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config.json"):
        formats.load(tmp_path)
    path = lay(tmp_path / "x", GOOD, eagle3_files())
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    with pytest.raises(ModelError, match="download it again"):
        formats.load(path)
    weights.unlink()
    with pytest.raises(ModelError, match="no weights in"):
        formats.load(path)
    (path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        formats.load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not JSON"):
        formats.load(path)


def test_an_error_of_torch_s_may_have_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lay(tmp_path / "x", GOOD, eagle3_files())
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"")

    def silent(*args: Any, **options: Any) -> None:
        raise EOFError

    monkeypatch.setattr(torch, "load", silent)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read \(EOFError\)"):
        formats.load(path)


def test_a_whole_model_is_told_so(tmp_path: Path) -> None:
    tensors = random({"model.embed_tokens.weight": [V, H], "lm_head.weight": [V, H]})
    with pytest.raises(ModelError, match="looks like a whole model: use method 'draft_model'"):
        formats.load(lay(tmp_path / "x", {**LLAMA, "architectures": ["LlamaForCausalLM"]}, tensors))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dflash_config(layer_types=["sliding_attention"] * 2), "layer_types in config.json has 'sliding_attention', sl"),
        (dflash_config(is_causal=True, causal=False), "causal_head, is_causal and causal in config.json contradict"),
        (dflash_config(layer_types=..., sliding_window=8, max_window_layers=1), "nothing says which layers"),
        (dflash_config(residual_multiplier=0.5), "residual_multiplier is 0.5 in config.json, which is not known"),
        (
            dflash_config(dflash_config={"target_layer_ids": [1, 4], "mask_token_id": 3, "attention_mode": "mla"}),
            r"dflash_config\.attention_mode is 'mla' in config.json; only 'gqa'",
        ),
        (dflash_config(block_size=...), "has no 'block_size'"),
        (dflash_config(block_size=1), "block_size = 1 of a dflash head must be at least 2"),
        (dflash_config(dflash_config={"target_layer_ids": [1, 4]}), "has no 'mask_token_id'"),
        (dflash_config(dflash_config={"target_layer_ids": [4, 1], "mask_token_id": 3}), "distinct and ascend"),
        (dflash_config(architectures=["DSparkDraftModel"], markov_head_type="rnn"), "markov_head_type is 'rnn'"),
        (
            dflash_config(
                architectures=["DSparkDraftModel"], markov_rank=3, enable_confidence_head=True,
                confidence_head_with_markov=False,
            ),
            "confidence_head_with_markov is False in config.json; only True",
        ),
    ],
)  # fmt: skip
def test_wrong_block_drafters(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        formats.load(lay(tmp_path / "x", config, dflash_files()))


def test_own_layouts_refuse_keys_they_do_not_know(tmp_path: Path) -> None:
    formats.save(HEADS["kangaroo"](), tmp_path / "x")
    config = written(tmp_path / "x")
    for change, said in (
        ({"depth": 3}, "config.json has depth, which no kangaroo head knows"),
        ({"exit_layer": None}, "has no 'exit_layer'"),
        ({"exit_layer": 1.5}, "exit_layer is 1.5 in config.json, expected a whole number"),
    ):
        (tmp_path / "x" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=said):
            formats.load(tmp_path / "x")


def test_heads_that_a_layout_cannot_hold(tmp_path: Path) -> None:
    for head, layout, said in (
        (eagle3(), "speculatros", "did you mean 'speculators'"),
        (eagle3(), "eagle1", "it holds eagle1 heads, and this is an eagle3 head"),
        (dflash(**DSPARK), "dflash", "no place for a Markov head"),
        (dflash(), "dspark", "neither a Markov head nor"),
        (medusa(own_lm_head=False), "medusa_vllm", "end in the target's own head"),
        (
            medusa(draft_vocab_size=DV),
            "medusa_vllm",
            "guess 12 of 40 tokens, and vLLM 0.32 stops .*'draft_vocab_size' 40",
        ),
        (eagle1(qk_norm=True), "eagle1", "its layers are Qwen3's"),
    ):
        with pytest.raises(ConfigError, match=said):
            formats.save(head, tmp_path / "x", layout)
    with pytest.raises(ModelError, match=r"\[4, 1, 3\].*must be distinct and ascend"):
        formats.save(eagle3(layer_ids=(4, 1, 3)), tmp_path / "x")
    assert not (tmp_path / "x").exists()


# -- files on disk --------------------------------------------------------------------------------------------------


def test_a_model_of_others_is_not_written_over(tmp_path: Path) -> None:
    path = lay(tmp_path / "x", GOOD, eagle3_files())
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ConfigError, match="holds a model that foretell did not write"):
        formats.save(eagle3(), path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; expected a directory"):
        formats.save(eagle3(), tmp_path / "file")


def test_saving_again_replaces_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x"
    formats.save(medusa(), path)
    (path / "run.json").write_text("{}")
    formats.save(medusa(num_heads=2), path, "medusa_vllm")
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "run.json"]
    same(medusa(num_heads=2), formats.load(path))


@pytest.mark.skipif(os.name != "posix", reason="asks for a process by its id")
def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for name in (
        f".head.{process.pid}.part",
        f".head.{os.getppid()}.part",
        ".head.notes.part",
        f".other.{process.pid}.part",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    directories.replace(tmp_path / "head", {"a": b"1"})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"head", f".head.{os.getppid()}.part", ".head.notes.part", f".other.{process.pid}.part"}


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("full_at", [1, 2])
def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int, exists: bool
) -> None:
    path = tmp_path / "x"
    if exists:
        formats.save(eagle3(), path)
    real, calls = os.fsync, itertools.count(1)

    def full(descriptor: int) -> None:
        if next(calls) == full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(directories.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        formats.save(eagle3(norm_output=True), path)
    assert caught.value.errno == errno.ENOSPC
    assert ["model.safetensors", "config.json"][full_at - 1] in str(caught.value.filename)
    monkeypatch.undo()
    if exists:
        same(eagle3(), formats.load(path))
        assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    else:
        assert list(tmp_path.iterdir()) == []


# -- heads by name --------------------------------------------------------------------------------------------------


def test_load_head_is_ready_to_decode(tmp_path: Path) -> None:
    formats.save(eagle3(), tmp_path / "x")
    head = load_head(str(tmp_path / "x"), spec(dtype=torch.bfloat16), Eagle3Head)
    assert not head.training
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert head.d2t.dtype == torch.int64
    formats.save(HEADS["acceptance"](), tmp_path / "y")
    assert load_head(str(tmp_path / "y"), spec(dtype=torch.bfloat16), AcceptanceHead).scale.dtype == torch.float32


def test_load_head_refuses_what_does_not_fit(tmp_path: Path) -> None:
    formats.save(medusa(), tmp_path / "m")
    name = str(tmp_path / "m")
    with pytest.raises(
        ModelError, match="holds a medusa head, and an eagle3 head is needed here: choose method 'medusa'"
    ):
        load_head(name, spec(), Eagle3Head)
    with pytest.raises(ModelError, match="target of hidden size 16, and 'some/target' has 32"):
        load_head(name, spec(hidden_size=32), MedusaHead)
    with pytest.raises(ModelError, match="reads the output of target layer 7"):
        load_head(name, spec(num_layers=4), MedusaHead)
    with pytest.raises(ModelError, match="no bundled 'eagle9'; there are"):
        load_head("bundled/eagle9", spec(), Eagle3Head)


def test_bundled_heads_are_found_by_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell import bundled

    formats.save(eagle1(), tmp_path / "eagle1")
    monkeypatch.setitem(bundled._PATHS, "eagle2", tmp_path / "eagle1")
    same(load_head("bundled/eagle2", spec(), Eagle1Head), eagle1().requires_grad_(requires_grad=False))
    monkeypatch.setitem(bundled._PATHS, "eagle3", tmp_path / "absent")
    with pytest.raises(ModelError, match=r"bundled/eagle3: wheels leave bundled/eagle3 out, .* train one"):
        load_head("bundled/eagle3", spec(), Eagle3Head)
