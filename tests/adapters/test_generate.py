"""``generate(custom_generate=...)``: greedy as transformers is, and the same samples with and without guesses."""

from typing import Any

import pytest
import torch

from foretell import Engine
from foretell.adapters.generate import Speculative
from foretell.core.errors import ConfigError

TEXTS = ["def add(a, b):\n    return", "import os\n\n\ndef main():\n    print(", "class Stack:"]


@pytest.fixture(scope="module")
def loaded() -> Engine:
    return Engine.load("bundled", implementation="transformers", dtype="float32")


@pytest.fixture(scope="module")
def batch(loaded: Engine) -> dict[str, Any]:
    """Three prompts of different lengths, padded on the left."""
    assert loaded.tokenizer is not None
    ids = [loaded.tokenizer.encode(text) for text in TEXTS]
    longest = max(map(len, ids))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(one)) + one for one in ids]),
        "attention_mask": torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids]),
        "pad_token_id": 0,
        "max_new_tokens": 20,
    }


def written(loaded: Engine, batch: dict[str, Any], loop: Any, **more: Any) -> torch.Tensor:
    torch.manual_seed(7)
    made: torch.Tensor = loaded.model.module.generate(**batch, custom_generate=loop, **more)  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    "more", [{}, {"repetition_penalty": 1.3}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}]
)
def test_greedy_tokens_are_those_of_transformers(loaded: Engine, batch: dict[str, Any], more: dict[str, Any]) -> None:
    loop = Speculative({"method": "suffix", "num_speculative_tokens": 4})
    wanted = loaded.model.module.generate(**batch, **more, do_sample=False)  # type: ignore[attr-defined]
    found = written(loaded, batch, loop, do_sample=False, **more)
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)
    assert loop.engine is not None
    assert sum(one.num_draft_tokens for one in loop.engine.recorder.methods.values()) > 0


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
        {"temperature": 0.8, "no_repeat_ngram_size": 2, "min_new_tokens": 4},  # by transformers' own processors
        {"num_return_sequences": 2},
    ],
)
def test_samples_are_the_same_with_and_without_guesses(
    loaded: Engine, batch: dict[str, Any], more: dict[str, Any]
) -> None:
    plain = written(loaded, batch, Speculative("none"), do_sample=True, **more)
    for loop in (Speculative("suffix"), Speculative({"method": "ngram"}, batch_size=2)):
        assert torch.equal(written(loaded, batch, loop, do_sample=True, **more), plain)
    torch.manual_seed(8)
    other = loaded.model.module.generate(  # type: ignore[attr-defined]
        **batch, custom_generate=Speculative("none"), do_sample=True, **more
    )
    assert other.shape != plain.shape or not torch.equal(other, plain)


def test_a_draft_model_of_transformers(loaded: Engine, batch: dict[str, Any]) -> None:
    draft = Engine.load("bundled", implementation="transformers", dtype="float32").model.module  # type: ignore[attr-defined]
    loop = Speculative(draft=draft)
    assert torch.equal(
        written(loaded, batch, loop, do_sample=True), written(loaded, batch, Speculative("none"), do_sample=True)
    )


def test_a_streamer_hears_every_token(loaded: Engine, batch: dict[str, Any]) -> None:
    class Heard:
        tokens: list[int] = []  # noqa: RUF012
        ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens = self.tokens + value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    heard = Heard()
    one = {**batch, "input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}
    loop = Speculative("suffix", streamer=heard)
    found = written(loaded, one, loop, do_sample=True)
    assert (heard.tokens, heard.ended) == (found[0].tolist(), True)
    with pytest.raises(ConfigError, match="one text, and 3 were given"):
        written(loaded, batch, loop)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"max_time": 1.0}, "MaxTimeCriteria"),
    ],
)
def test_what_would_be_lost_is_refused(loaded: Engine, batch: dict[str, Any], more: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        written(loaded, batch, Speculative("none"), **more)


def test_padding_on_the_right_is_refused(loaded: Engine, batch: dict[str, Any]) -> None:
    turned = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    with pytest.raises(ConfigError, match="padding_side='left'"):
        written(loaded, turned, Speculative("none"))
