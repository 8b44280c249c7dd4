"""The text part of multi-modal models: loaded from their checkpoints, without what reads images, and decoded over trees."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from foretell import Engine, SamplingParams
from foretell.model.hf.adapter import TransformersModel, weight_bytes
from foretell.model.hf.one_layer import towers
from foretell.model.load import load_model
from tests.model.recurrent import DELTA
from tests.model.tiny import COMMON, Rows, largest_error

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed
TURNS: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
SIGHT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
DEEP: dict[str, Any] = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24}
WINDOWED: dict[str, Any] = {
    "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", WINDOWED, SIGHT),
    "qwen2_vl": ("Qwen2VLConfig", TURNS, {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", TURNS, DEEP),
    "qwen3_vl": ("Qwen3VLConfig", {"head_dim": 8, **TURNS}, {**DEEP, "deepstack_visual_indexes": [0]}),
    "llava": ("LlavaConfig", {"model_type": "llama"}, {"model_type": "clip_vision_model", **SIGHT}),
    "mistral3": ("Mistral3Config", {"model_type": "mistral"}, {"model_type": "pixtral", **SIGHT}),
    "qwen3_5": ("Qwen3_5Config", DELTA, DEEP),
}


def whole(name: str) -> PreTrainedModel:
    """A random multi-modal model, the same at every call."""
    kind, text, vision = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = getattr(transformers, kind)(text_config={**COMMON, **text}, vision_config=vision)
        module: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return module.eval()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3_5"])
def test_trees_of_text(name: str) -> None:
    module = whole(name)
    rows = Rows(TransformersModel(module, name=name), module)
    rows.prefill()
    for paths in ([[0, 2, 5], [0, 2, 4], [0]], [[0], [0, 1], [0, 1, 2, 3]]):
        tokens, parent = rows.tree()
        assert largest_error(rows.target.forward(tokens, rows.plan(parent)), rows.expected(tokens, parent)) < 1e-3
        rows.accept(tokens, paths)


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_loaded_without_what_reads_images(name: str, tmp_path: Path) -> None:
    module = whole(name)
    module.save_pretrained(tmp_path)
    params = SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True)
    expected = Engine(module, speculative="none").generate([5, 6, 7, 5, 6], params).token_ids
    loaded = load_model(tmp_path, implementation="transformers")
    found = Engine(loaded, speculative="ngram").generate([5, 6, 7, 5, 6], params)
    assert found.token_ids == expected
    assert isinstance(loaded, TransformersModel)
    assert towers(loaded.module, name=name) == []
    kept, of_text = sum(p.numel() for p in loaded.module.parameters()), sum(p.numel() for p in module.parameters())
    assert kept < of_text or name == "qwen3_5", "its text part is a class of its own"


def test_weights_that_read_images_are_not_counted() -> None:
    module = whole("llava")
    (tower,) = towers(module, name="llava")
    counted = weight_bytes(module)
    language: Any = module
    text = [*language.model.language_model.parameters(), language.lm_head.weight]
    assert counted < sum(4 * p.numel() for p in module.parameters()) - sum(4 * p.numel() for p in tower.parameters())
    embedding = language.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    assert counted >= sum(4 * p.numel() for p in text) - 4 * embedding.weight.numel()
