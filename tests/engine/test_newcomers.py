"""What a first caller of the Python API gives: one stop text, paths, models in memory, lists, and values of wrong types."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from foretell import Engine, Request, SamplingParams, speculative_config
from foretell.bundled import path as bundled_path
from foretell.core.errors import ConfigError, ForetellError, PromptError, VocabularyMismatchError
from foretell.model.load import load_model, load_tokenizer
from foretell.server.options import ServerOptions
from foretell.service.options import ServiceOptions
from tests.engine.harness import ToyTokenizer, table


@pytest.fixture(scope="module")
def toy() -> Engine:
    return Engine(table(1), ToyTokenizer())


def test_one_stop_text_stops_at_the_whole_text(toy: Engine) -> None:
    """stop="the" was taken letter by letter: the text ended before its first "t"."""
    plain = toy.generate("ab", seed=2, max_new_tokens=60, ignore_eos=True).text
    stop = plain[20:23]
    assert stop[0] in plain[:20], "else the test shows nothing"
    wanted = plain[: plain.index(stop)]
    for given in (stop, [stop], (stop,)):
        assert toy.generate("ab", seed=2, max_new_tokens=60, ignore_eos=True, stop=given).text == wanted
        assert SamplingParams(stop=given).stop == (stop,)


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop"):
        SamplingParams(stop="")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("temperature", "0.5", "temperature = '0.5' must be a number"),
        ("max_new_tokens", 5.0, "max_new_tokens = 5.0 must be a whole number"),
        ("max_new_tokens", True, "max_new_tokens = True must be a whole number"),
        ("top_k", "3", "top_k = '3' must be a whole number"),
        ("seed", 1.5, "seed = 1.5 must be a whole number"),
        ("stop", 5, "stop = 5 must be a list of texts"),
        ("stop", [5], "must be a list of texts"),
        ("stop_token_ids", [1.5], "must be a list of whole numbers"),
        ("stop_token_ids", "12", "must be a list of whole numbers"),
        ("logit_bias", {"3": 1.0}, "must be token ids and numbers"),
        ("logit_bias", {3: "1"}, "must be token ids and numbers"),
        ("ignore_eos", "yes", "ignore_eos = 'yes' must be true or false"),
        ("logits_processor", 3, "logits_processor = 3 must be a function"),
        ("temprature", 1.0, "did you mean 'temperature'"),
    ],
)
def test_values_of_wrong_types_are_refused_and_never_cut(toy: Engine, option: str, value: Any, words: str) -> None:
    given: Any = {option: value}
    with pytest.raises(ConfigError, match="(?s)" + words.replace("(", r"\(")):
        toy.generate("ab", **given)
    if option != "temprature":
        with pytest.raises(ConfigError, match="(?s)" + words.replace("(", r"\(")):
            SamplingParams(**given)


def test_numbers_of_numpy_and_lists_are_taken() -> None:
    params = SamplingParams(
        temperature=0, max_new_tokens=np.int64(3), top_p=np.float32(0.5), stop_token_ids=[np.int64(4), 5]
    )
    assert params == SamplingParams(temperature=0.0, max_new_tokens=3, top_p=0.5, stop_token_ids=(4, 5))
    assert type(params.temperature) is float
    assert type(params.max_new_tokens) is int


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1.5], "1.5 among its token ids"),
        ([1, True], "True among its token ids"),
        (["ab", "a"], r"use generate_batch\(\[...\]\) or completions\(\[...\]\)"),
        ([[1], [2]], r"or completions\(\[...\]\)"),
        (np.array([[1], [2]]), r"or completions\(\[...\]\)"),
        ([Request("ab")], r"or completions\(\[...\]\)"),
        ({"role": "user", "content": "a"}, "use engine.chat_prompt"),
        ([{"role": "user", "content": "a"}], "use engine.chat_prompt"),
        (b"ab", "expected a text, or token ids"),
        (None, "expected a text, or token ids"),
        (7, "expected a text, or token ids"),
        (torch.tensor([1.0, 2.0]), "1.0 among its token ids"),
        ([99], "not in the vocabulary"),
    ],
)
def test_what_is_no_prompt_is_refused(toy: Engine, prompt: Any, words: str) -> None:
    """[1.5] was decoded as the token 1."""
    for call in (lambda: toy.generate(prompt), lambda: toy.generate_batch([prompt])):
        with pytest.raises(PromptError, match=words):
            call()


def test_arrays_and_tensors_are_prompts(toy: Engine) -> None:
    wanted = toy.generate([1, 2, 3], seed=1, max_new_tokens=5).token_ids
    for prompt in (torch.tensor([1, 2, 3]), np.array([1, 2, 3]), (1, 2, 3), [np.int32(1), 2, 3]):
        assert toy.generate(prompt, seed=1, max_new_tokens=5).token_ids == wanted


def test_a_batch_takes_sampling_options(toy: Engine) -> None:
    one, two = toy.generate("ab", seed=1, max_new_tokens=7), toy.generate("a", seed=1, max_new_tokens=7)
    found = toy.generate_batch(["ab", "a"], seed=1, max_new_tokens=7)
    assert [done.token_ids for done in found] == [one.token_ids, two.token_ids]
    found = toy.generate_batch(["ab", "a"], SamplingParams(seed=1), max_new_tokens=7, batch_size=1)
    assert [done.token_ids for done in found] == [one.token_ids, two.token_ids]
    with pytest.raises(ConfigError, match="a Request has its own params"):
        toy.generate_batch([Request("ab")], seed=1)
    with pytest.raises(PromptError, match="use generate, or give"):
        toy.generate_batch("ab")
    for several in (Request("ab"), {"a": 1}, 5):
        with pytest.raises(PromptError, match="a list of prompts is expected"):
            toy.generate_batch(several)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match=r"generate_batch\(\[\[...\]\]\)"):
        toy.generate_batch([1, 2])  # type: ignore[list-item]
    with pytest.raises(PromptError, match=r"or completions\("):
        toy.generate(Request("ab"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"batch_size = 2\.5 must be a whole number"):
        toy.generate_batch(["ab"], batch_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a SamplingParams"):
        toy.generate("ab", {"temperature": 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: speculative_config("ngram").__class__(num_speculative_tokens="5"), "must be a whole number"),
        (lambda: ServiceOptions(max_num_seqs="4"), "max_num_seqs = '4' must be a whole number"),  # type: ignore[arg-type]
        (lambda: ServerOptions(max_body_mib="4"), "max_body_mib = '4' must be a number"),  # type: ignore[arg-type]
        (lambda: Engine(table(1), width="8"), "width = '8' must be a whole number"),  # type: ignore[arg-type]
        (lambda: Engine("bundled"), "for a name or directory use Engine.load"),  # type: ignore[arg-type]
        (lambda: Engine.load(object()), "is no model"),  # type: ignore[arg-type]
    ],
)
def test_options_of_wrong_types_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ForetellError, match=words):
        make()


def test_one_api_key_is_one_key() -> None:
    """A text in the place of a tuple was a key for each of its letters."""
    assert ServerOptions(api_keys="secret").api_keys == ("secret",)  # type: ignore[arg-type]


def test_paths_and_models_in_memory_are_targets_and_drafts() -> None:
    target, draft = Path(bundled_path("target")), Path(bundled_path("draft"))
    asked: dict[str, Any] = {"seed": 3, "max_new_tokens": 8}
    by_name = Engine.load(str(target), speculative="draft_model", implementation="transformers")
    wanted = by_name.generate("def f(", **asked)
    by_path = Engine.load(target, speculative={"method": "draft_model", "model": draft}, implementation="transformers")
    assert by_path.generate("def f(", **asked).token_ids == wanted.token_ids
    modules = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (target, draft)]
    in_memory = Engine.load(modules[0], draft=modules[1], tokenizer=load_tokenizer(target))
    found = in_memory.generate("def f(", **asked)
    assert found.token_ids == wanted.token_ids
    assert found.num_accepted_tokens == wanted.num_accepted_tokens > 0
    assert in_memory.with_method("ngram").generate("def f(", **asked).token_ids == wanted.token_ids
    assert in_memory.choice({"method": "draft_model", "model": str(draft), "shape": "static"}).config.shape == "static"
    with pytest.raises(ConfigError, match="a target in memory stays as it is"):
        Engine.load(modules[0], dtype="bfloat16")
    with pytest.raises(ConfigError, match="load it with tokenizer"):
        Engine.load(modules[0]).generate("def f(")
    with pytest.raises(ConfigError, match="'ngram' has none"):
        Engine.load(target, speculative="ngram", draft=draft)
    with pytest.raises(ConfigError, match="given twice"):
        Engine.load(target, speculative={"model": "other"}, draft=draft)
    with pytest.raises(VocabularyMismatchError, match=r"8192 tokens .* has 24"):
        Engine(modules[0], speculative={"model": "small"}, draft=table(2, name="small"))
    assert load_model(draft).spec.vocab_size == modules[1].config.vocab_size
