"""DFlash and DSpark as the speculators library writes them: key for key, tensor for tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.core.errors import ConfigError, ModelError
from foretell.heads import formats
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.methods.dflash.head import DFlashHead
from tests.methods.test_formats import dflash, lay

LAYER: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 16, "vocab_size": 40, "intermediate_size": 24, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "layer_types": ["full_attention"] * 2,
    "sliding_window": None, "use_sliding_window": False, "attention_bias": False, "max_position_embeddings": 512,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
    "block_size": 4, "draft_vocab_size": 40, "mask_token_id": 39, "aux_hidden_state_layer_ids": [2, 5],
    "target_hidden_size": None, "sliding_window_non_causal": False, "sample_from_anchor": False,
    "projector_type": "dflash", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024,
    "lambda_base_start": 1.0, "lambda_base_decay_ratio": 1.0, "auf": False, "shift_label": False, "dtype": "bfloat16",
    "transformer_layer_config": LAYER,
    "speculators_config": {
        "algorithm": "dflash", "verifier": {"name_or_path": "a/b", "architectures": ["Qwen3ForCausalLM"]},
    },
}  # fmt: skip
SPARK = {
    **COMMON, "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "sample_from_anchor": True,
    "markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "num_anchors": 256, "ce_loss_alpha": 1.0, "l1_loss_alpha": 0.0, "confidence_head_alpha": 0.0, "loss_decay_gamma": None,
}  # fmt: skip
SPARK_HEAD = {"markov_rank": 3, "confidence": True, "sample_from_anchor": True}


@pytest.mark.parametrize(("config", "changes"), [(COMMON, {}), (SPARK, SPARK_HEAD)], ids=["dflash", "dspark"])
def test_a_checkpoint_is_read(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    """With the copies and vocabulary maps that lie beside the weights; layers are numbered by hidden states there."""
    wanted = dflash(**changes)
    copies = {
        "embed_tokens.weight": torch.zeros(40, 16), "lm_head.weight": torch.zeros(40, 16),
        "verifier_norm.weight": torch.ones(16), "d2t": torch.zeros(40, dtype=torch.int64),
        "t2d": torch.ones(40, dtype=torch.bool),
    }  # fmt: skip
    path = lay(tmp_path / "x", config, {**wanted.state_dict(), **copies})
    found = formats.load(path)
    assert found.config == wanted.config
    assert found.taps == (1, 4)
    assert all(torch.equal(tensor, wanted.state_dict()[key]) for key, tensor in found.state_dict().items())
    assert formats.describe_target(path).name == "a/b"
    assert formats.detect(path).name == f"{config['speculators_model_type']}_speculators"


@pytest.mark.parametrize(("config", "changes"), [(COMMON, {}), (SPARK, SPARK_HEAD)], ids=["dflash", "dspark"])
def test_a_draft_vocabulary(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    """The output head beside it is the drafter's own then; t2d follows from d2t."""
    wanted = dflash(**changes, draft_vocab_size=12)
    offsets, known = draft_vocabulary(torch.arange(40) % 9, 12)
    wanted.d2t.copy_(offsets)
    wanted.t2d.copy_(known)
    path = lay(tmp_path / "x", {**config, "draft_vocab_size": 12}, wanted.state_dict())
    kept = load_file(path / "model.safetensors")
    del kept["t2d"]
    save_file(kept, path / "model.safetensors")
    found = formats.load(path)
    assert isinstance(found, DFlashHead)
    assert found.config == wanted.config
    assert all(torch.equal(tensor, wanted.state_dict()[key]) for key, tensor in found.state_dict().items())
    assert found.vocabulary.tolist() == known.nonzero()[:, 0].tolist()
    formats.save(found, tmp_path / "again")
    assert formats.detect(tmp_path / "again").name == f"{config['speculators_model_type']}_speculators"
    again = formats.load(tmp_path / "again")
    assert again.config == wanted.config
    assert all(torch.equal(tensor, wanted.state_dict()[key]) for key, tensor in again.state_dict().items())
    own = config["speculators_model_type"]
    with pytest.raises(ConfigError, match=f"no place for a draft vocabulary; use {own}_speculators"):
        formats.save(found, tmp_path / "other", own)
    kept["d2t"] += 40
    save_file(kept, path / "model.safetensors")
    with pytest.raises(ModelError, match="d2t does not lead to 12 different ids"):
        formats.load(path)


@pytest.mark.parametrize(("config", "changes"), [(COMMON, {}), (SPARK, SPARK_HEAD)], ids=["dflash", "dspark"])
def test_what_is_written_has_their_keys(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    name = f"{config['speculators_model_type']}_speculators"
    formats.save(dflash(**changes), tmp_path, name, target_name="a/b")
    written = json.loads((tmp_path / "config.json").read_text())
    for key in (
        "speculators_model_type", "block_size", "draft_vocab_size", "mask_token_id", "aux_hidden_state_layer_ids",
        "sample_from_anchor", "architectures", "markov_rank", "enable_confidence_head",
    ):  # fmt: skip
        assert written.get(key) == config.get(key), key
    assert written["sliding_window_non_causal"]  # to vLLM, false says that every layer is causal
    assert {"num_hidden_layers", "head_dim", "rope_theta"} <= written["transformer_layer_config"].keys()
    assert "dflash_config" not in written
    assert set(load_file(tmp_path / "model.safetensors")) == set(dflash(**changes).state_dict())


@pytest.mark.parametrize("whole", [False, True])
def test_layers_with_windows(tmp_path: Path, whole: bool) -> None:
    """Blocks are causal in them, unless the key says otherwise: the shape of RedHatAI's heads."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
    config = {**COMMON, "sliding_window_non_causal": whole, "transformer_layer_config": {**LAYER, **kinds}}
    wanted = dflash(windows=(8, 0), windows_causal=not whole)
    found = formats.load(lay(tmp_path / "x", config, wanted.state_dict()))
    assert found.config == wanted.config
    for layout in ("dflash", "dflash_speculators"):
        formats.save(found, tmp_path / layout, layout)
        assert formats.load(tmp_path / layout).config == wanted.config
    assert (
        json.loads((tmp_path / "dflash_speculators" / "config.json").read_text())["sliding_window_non_causal"] is whole
    )
    assert wanted.last_seen(torch.tensor([[4, 5]])).tolist() == [[[5, 5] if whole else [4, 5]], [[5, 5]]]


@pytest.mark.parametrize(
    ("changes", "layer", "match"),
    [
        ({"draft_vocab_size": 12}, {}, r"missing: d2t, lm_head\.weight, t2d"),
        ({"draft_vocab_size": 41}, {}, r"draft_vocab_size = 41 of a dflash head must be below vocab_size = 40"),
        ({"projector_type": "domino"}, {}, "projector_type is 'domino' in config.json; only 'dflash' is supported"),
        ({"shift_label": True}, {}, "shift_label is True"),
        ({"mask_token_id": None}, {}, "mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, {}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, {}, "name the embeddings"),
        ({"spin": 1}, {}, "spin is 1 in config.json, which is not known here"),
        ({}, {"model_type": "glm5"}, r"transformer_layer_config\.model_type is 'glm5'"),
        ({}, {"layer_types": ["sliding_attention"] * 2}, r"transformer_layer_config\.layer_types.*'sliding_attention'"),
        (
            {},
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True},
            "block_size = 4",
        ),
        ({}, {"softcap": 3.0}, r"transformer_layer_config\.softcap is 3\.0"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], layer: dict[str, Any], match: str
) -> None:
    config = {**COMMON, **changes, "transformer_layer_config": {**LAYER, **layer}}
    with pytest.raises(ModelError, match=match):
        formats.load(lay(tmp_path / "x", config, dflash().state_dict()))


def test_markov_heads_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"markov_head_type is 'gated' in config\.json; only 'vanilla' is supported"):
        formats.load(lay(tmp_path / "x", {**SPARK, "markov_head_type": "gated"}, dflash(**SPARK_HEAD).state_dict()))
