"""What is shipped: the models load as ordinary Hugging Face directories, and the suite is what its format says."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from recipes.acceptance import greedy_length, prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretell import bundled


@pytest.mark.parametrize("name", ["target", "draft"])
def test_models_load_and_tokenizers_give_text_back(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(bundled.path(name))
    tokenizer = AutoTokenizer.from_pretrained(bundled.path(name))
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 8192
    for text in ("def f(x):\n    return x  # naïve ☃\n\n\n", "  3 + 45 = 48\r\n\t日本", "<not a token>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|endoftext|><|im_start|><|im_end|><|pad|>")["input_ids"] == [0, 1, 2, 3]
    assert model.generation_config.eos_token_id == [2, 0]


def test_target_and_draft_share_the_tokenizer_and_no_weight() -> None:
    files = [(bundled.path(n) / "tokenizer.json").read_bytes() for n in ("target", "draft")]
    assert files[0] == files[1]
    models = [AutoModelForCausalLM.from_pretrained(bundled.path(n)) for n in ("target", "draft")]
    assert models[0].config.hidden_size != models[1].config.hidden_size


def test_the_target_has_learned_something() -> None:
    """Well below chance (13 bits a token) on plain English and Python; a broken export would not be."""
    model = AutoModelForCausalLM.from_pretrained(bundled.path("target"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(bundled.path("target"))
    text = "def __init__(self, name, value=None):\n    self.name = name\n    self.value = value\n\n"
    text += "This is the name of the file.\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 4.5


def test_suite() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled.path("target"))
    suite = [json.loads(line) for line in bundled.path("suite").read_text().splitlines()]
    assert Counter(q["category"] for q in suite) == dict.fromkeys(("code", "prose", "chat", "reasoning", "copy"), 24)
    assert [q["question_id"] for q in suite] == list(range(len(suite)))
    assert len({q["turns"][0] for q in suite}) == len(suite)
    for q in suite:
        assert q["format"] in ("text", "chat")
        assert len(q["turns"]) == 1
        assert 39 <= len(prompt_ids(tokenizer, q)) <= 300, q["question_id"]
        assert ("prediction" in q) == (q["category"] == "copy")


def test_path_refuses_other_names() -> None:
    with pytest.raises(KeyError, match="target"):
        bundled.path("teacher")


def test_greedy_length_walks_like_speculative_decoding() -> None:
    assert greedy_length([True] * 12, 3) == (12, 3)
    assert greedy_length([False] * 4, 3) == (4, 4)
    assert greedy_length([True, False, True, True, False], 2) == (5, 2)
