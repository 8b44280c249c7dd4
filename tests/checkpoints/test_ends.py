"""The tokens that end an answer are those of all sources: no source replaces another, and none is trusted alone."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from foretell import Engine, SamplingParams
from foretell.checkpoints import ends
from foretell.core.errors import ConfigError
from foretell.model.load import load_model, unsupported
from tests.checkpoints.gguf.make import _tokens, write
from tests.cli import checkpoint
from tests.model.table import TableLM
from tests.model.tiny import tiny_module

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def speaking(*tokens: str, special: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    """The small tokenizer with further added tokens; its own end is ``<end>``."""
    made = checkpoint.tokenizer(chat=False)
    made.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens], special_tokens=special)
    made.chat_template = template
    return made


def ends_of(tokenizer: Any, *model: int, size: int = 1000) -> list[str]:
    """The tokens that end an answer of an engine whose model itself names some."""
    table = TableLM(size, num_layers=1, context=1, seed=0, eos_token_ids=model)
    ids = ends.with_tokenizer(table.spec.eos_token_ids, table.spec.vocab_size, tokenizer)
    names: list[str] = tokenizer.convert_ids_to_tokens(list(ids))
    return names


def test_sources_are_joined_in_their_order() -> None:
    assert ends.joined(None, [5, 6], 2, (6, 7), [], -1, None) == (5, 6, 2, 7)
    assert ends.joined([True, "3", 2.0, None, [9], 4]) == (4,)
    assert ends.joined("23", "") == ()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("marker", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "[EOT]"])
def test_markers_of_a_vocabulary_end_an_answer_whatever_the_model_says(marker: str, special: bool) -> None:
    tokenizer = speaking("<tool>", marker, special=special)
    assert ends_of(tokenizer) == ["<end>", marker]
    assert ends_of(tokenizer, 7) == [tokenizer.convert_ids_to_tokens(7), "<end>", marker]
    assert ends_of(tokenizer, size=len(tokenizer) - 1) == ["<end>"]  # of no row of the model's logits


def test_a_word_of_html_is_no_end_and_a_message_is_no_answer() -> None:
    assert ends_of(speaking("</s>", "<eos>")) == ["<end>", "</s>", "<eos>"]
    assert ends_of(speaking("</s>", "<eos>", special=False)) == ["<end>"]
    assert ends_of(speaking("<|end|>", "<|return|>")) == ["<end>", "<|end|>", "<|return|>"]
    assert ends_of(speaking("<|end|>", "<|call|>", "<|return|>")) == ["<end>", "<|return|>", "<|call|>"]


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (CHATML, ["<end>", "<|im_end|>"]),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n<bye>\n{% endfor %}", ["<end>", "<bye>"]),
        ("{% for m in messages %}{{ m.content }}<bye><next>{% endfor %}", ["<end>", "<bye>"]),
        (
            "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}<bye>{% endfor %}",
            ["<end>", "<bye>"],
        ),
        ("{% for m in messages %}{{ m.content }}<next><end>{% endfor %}", ["<end>"]),  # one of them is known
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ["<end>"]),
        ("{% for m in messages %}{{ m.content }} bye<bye>{% endfor %}", ["<end>"]),
        ("{% for m in messages %}{{ m.content | upper }}<bye>{% endfor %}", ["<end>"]),
        ("{{ raise_exception('never') }}", ["<end>"]),
        ("{{ nothing.at.all }}", ["<end>"]),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_what_a_template_closes_an_answer_with_ends_it(template: str, found: list[str], special: bool) -> None:
    names = ["<bye>", "<next>", *(["<|im_end|>"] if template == CHATML else [])]
    assert ends_of(speaking(*names, special=special, template=template)) == found


def test_tokenizers_that_say_nothing_change_nothing() -> None:
    unknown = PreTrainedTokenizerFast(tokenizer_object=checkpoint.tokenizer().backend_tokenizer, unk_token="a")
    for tokenizer in (None, object(), unknown):
        assert ends.with_tokenizer((4,), 30, tokenizer) == (4,)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        (3, [5, 6], (5, 6, 3)),
        ([3, 4], 5, (5, 3, 4)),
        (3, None, (3,)),
        (None, 5, (5,)),  # what a class says where config.json is silent is no word of the model's
        (2, 5, (5, 2)),  # and where config.json says the same, it is
    ],
)
def test_every_implementation_joins_a_directory_s_ends(
    tmp_path: Path, kind: str, config: Any, generation: Any, found: tuple[int, ...]
) -> None:
    module = tiny_module(kind)
    module.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    stated = json.loads(file.read_text())
    stated.pop("eos_token_id", None)
    file.write_text(json.dumps(stated if config is None else {**stated, "eos_token_id": config}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        GenerationConfig(eos_token_id=generation).save_pretrained(tmp_path)
    for implementation in ("transformers", "lean", "native"):
        try:
            model = load_model(str(tmp_path), implementation=implementation)
        except ConfigError:
            assert implementation == "native"  # no compiler here
            continue
        assert model.spec.eos_token_ids == found


@pytest.mark.parametrize(
    ("outer", "inner", "generation", "found"),
    [
        ({"eos_token_id": 7}, {}, None, (7,)),  # the text model's class would say 1
        ({}, {"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [8]}, 9, (9, 8, 7)),
        ({}, {}, 9, (9,)),
    ],
)
def test_a_model_of_several_parts(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], generation: int | None, found: tuple[int, ...]
) -> None:
    stated = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **inner}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    config = ends.drop_default(AutoConfig.from_pretrained(tmp_path), tmp_path)
    named = SimpleNamespace(eos_token_id=generation)
    assert ends.of_configs(named, config.get_text_config(), config) == found


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
def test_a_gguf_file_s_marker_ends_the_text_whatever_its_type(tmp_path: Path, kind: int) -> None:
    """The file's own end is another: the text ends at the marker, never shows it, and a prompt's is one token."""
    speaks = speaking("<|im_end|>", template=CHATML)
    marker = speaks.convert_tokens_to_ids("<|im_end|>")
    module = tiny_module("qwen3", vocab_size=len(speaks))
    types = _tokens(speaks, len(speaks))["tokenizer.ggml.token_type"]
    types[marker] = kind
    file = write(tmp_path / "x.gguf", module, speaks, metadata={"tokenizer.ggml.token_type": types})
    engine = Engine.load(file, implementation="lean" if unsupported_natively(module.config) else "auto")
    assert set(engine.model.spec.eos_token_ids) == {speaks.eos_token_id, marker}
    assert engine.tokenizer is not None
    assert engine.tokenizer.encode("the<|im_end|>the")[1] == marker
    params = SamplingParams(temperature=0.0, max_new_tokens=6, logit_bias={marker: 1e4})
    for method in ("none", "ngram", "suffix"):
        found = engine.with_method(method).generate("the the", params)
        assert (found.token_ids, found.text, found.finish_reason) == ([marker], "", "stop")
        late = engine.with_method(method).generate("the the", params, min_new_tokens=4)
        assert (late.num_tokens, late.token_ids[-1], late.finish_reason) == (5, marker, "stop")
    on = engine.generate("the the", params, ignore_eos=True)
    assert (on.token_ids, on.text, on.finish_reason) == ([marker] * 6, "", "length")


def unsupported_natively(config: Any) -> bool:
    import torch

    return unsupported("native", config, torch.float32, torch.device("cpu")) is not None


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_a_directory_that_closes_its_turns_with_another_token(tmp_path: Path, method: str) -> None:
    """A fine-tune that kept its base model's end in both configurations: only tokenizer and template know the other."""
    speaks = speaking("<|im_start|>", "<bye>", template=CHATML.replace("<|im_end|>", "<bye>"))
    module = tiny_module("qwen3", vocab_size=len(speaks), eos_token_id=speaks.eos_token_id)
    module.save_pretrained(tmp_path)
    speaks.save_pretrained(tmp_path)
    bye = speaks.convert_tokens_to_ids("<bye>")
    engine = Engine.load(tmp_path, speculative=method)
    assert engine.model.spec.eos_token_ids == (speaks.eos_token_id, bye)
    found = engine.generate("the the", temperature=0.0, max_new_tokens=6, logit_bias={bye: 1e4})
    assert (found.token_ids, found.text, found.finish_reason) == ([bye], "", "stop")


def test_the_target_s_ends_count_not_the_draft_s(tmp_path: Path) -> None:
    """A draft that ends at another token than its target: neither its ends nor its tokenizer's end a text."""
    target, draft = (TableLM(24, num_layers=1, context=2, seed=1, eos_token_ids=(id,)) for id in (22, 3))
    plain = Engine(TableLM(24, num_layers=1, context=2, seed=1, eos_token_ids=(22,)))
    engine = Engine(target, draft=draft)
    for seed in range(6):
        wanted = plain.generate([1, 2], seed=seed, max_new_tokens=30)
        found = engine.generate([1, 2], seed=seed, max_new_tokens=30)
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    assert engine.model.spec.eos_token_ids == (22,)
