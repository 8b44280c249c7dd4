"""Models that cannot be branched into trees are refused, each with one error that says why."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from foretell.core.errors import ModelError
from foretell.model.hf.refusals import check_config
from foretell.model.load import from_module, load_model
from tests.model.tiny import tiny_config, tiny_module

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED = [
    ("T5Config", {}, "t5.*expected a decoder-only"),
    ("BartConfig", {}, "encoder-decoder model .bart"),
    ("WhisperConfig", {}, "encoder-decoder model .whisper"),
    ("BertConfig", {}, "encoder-only model .bert"),
    ("RobertaConfig", {}, "encoder-only model .roberta"),
    ("DistilBertConfig", {}, "encoder-only model .distilbert"),
    ("ViTConfig", {}, "no causal language model of type 'vit'"),
    ("DeepseekV4Config", {}, "layers of kind compressed_sparse_attention"),
    ("GlmMoeDsaConfig", {}, "layers of kind indexed_attention"),
]


@pytest.mark.parametrize(("config", "changes", "complaint"), REFUSED, ids=[entry[0] for entry in REFUSED])
def test_architectures_that_are_refused(config: str, changes: Any, complaint: str, tmp_path: Path) -> None:
    """Refused by configuration, before any weight is read: the weights here are not even theirs."""
    tiny_module("llama").save_pretrained(tmp_path)
    getattr(transformers, config)(**changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=complaint) as caught:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(caught.value), "the message names what was given"


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "mixtral"])
def test_architectures_that_pass(name: str) -> None:
    """The negative control of the refusals: none of them catches an attention-only model."""
    check_config(tiny_config(name), name=name)


def test_shared_kv_is_refused() -> None:
    """A model whose upper layers read the K and V of lower ones has no cache of one K and V per layer."""
    config = transformers.Gemma3nTextConfig(
        **SMALL, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    config.num_kv_shared_layers = 0
    config.vocab_size_per_layer_input, config.hidden_size_per_layer_input = 61, 8
    config.activation_sparsity_pattern = [0.0, 0.0]
    with pytest.raises(ModelError, match=r"Gemma3n.*one residual stream"):
        from_module(transformers.Gemma3nForCausalLM(config))
