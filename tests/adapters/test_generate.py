"""``generate(custom_generate=...)``: greedy as transformers is, and the same samples with and without guesses."""

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, SynthIDTextWatermarkingConfig, TopKLogitsWarper, WatermarkingConfig

from foretell import Engine
from foretell.adapters.generate import KNOWN_PROCESSORS, Speculative, _sampling
from foretell.core.errors import ConfigError

ENCODERS = ({"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2})
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
        ({"guidance_scale": 1.5}, "guidance_scale needs a second pass"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)}, "SynthID watermark"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 3}, r"Speculative\('ngram'\)"),
        ({"assistant_early_exit": 2}, r"Speculative\('kangaroo'\)"),
        ({"use_mtp": True}, r"Speculative\('mtp'\)"),
        ({"force_words_ids": [[5]]}, "force_words_ids"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"position_ids": torch.arange(9)[None].expand(3, 9) + 5}, "position_ids"),
        ({"max_new_tokens": 9000}, r"9000 new ones are more than the context .* 4096: give max_new_tokens = 40\d\d"),
    ],
)
def test_what_would_be_lost_is_refused(loaded: Engine, batch: dict[str, Any], more: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        written(loaded, {**batch, **more}, Speculative("none"))


def test_a_models_other_inputs_are_refused(loaded: Engine, batch: dict[str, Any]) -> None:
    config = copy.deepcopy(loaded.model.module.generation_config)  # type: ignore[attr-defined]
    config.max_length = 20
    given: dict[str, Any] = {"generation_config": config, "attention_mask": batch["attention_mask"]}
    filled = DynamicCache()
    filled.update(torch.zeros(3, 1, 2, 4), torch.zeros(3, 1, 2, 4), 0)
    for name, value in (
        ("pixel_values", torch.zeros(3, 4)),
        ("adapter_names", ["a", "b", "c"]),
        ("token_type_ids", torch.ones(3, 9)),
        ("past_key_values", filled),
    ):
        with pytest.raises(ConfigError, match=name):
            Speculative("none")(loaded.model.module, batch["input_ids"], **given, **{name: value})  # type: ignore[attr-defined]
    plain = Speculative("none")(loaded.model.module, batch["input_ids"], **given)  # type: ignore[attr-defined]
    kinds = {"token_type_ids": torch.zeros(3, 9, dtype=torch.int64)}
    assert torch.equal(plain, Speculative("none")(loaded.model.module, batch["input_ids"], **given, **kinds))  # type: ignore[attr-defined]


def test_every_row_has_its_own_constraint(loaded: Engine, batch: dict[str, Any]) -> None:
    """``prefix_allowed_tokens_fn`` is told which text it is asked about, ``num_return_sequences`` counted."""
    allowed = [range(100 * row, 100 * row + 50) for row in range(6)]

    def of(row: int, text: torch.Tensor) -> list[int]:
        return list(allowed[row])

    more = {"prefix_allowed_tokens_fn": of, "do_sample": True, "num_return_sequences": 2}
    found = written(loaded, batch, Speculative("suffix"), **more)
    assert torch.equal(found, written(loaded, batch, Speculative("none"), **more))
    for row, ids in enumerate(found[:, batch["input_ids"].shape[1] :].tolist()):
        assert set(ids) <= {*allowed[row], 0}


@pytest.mark.parametrize(
    "more",
    [
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
        *(
            {**one, "num_return_sequences": 2, "do_sample": True, "top_k": 1} for one in ENCODERS
        ),  # each text for two rows
        {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
        {"exponential_decay_length_penalty": (3, 1.5), "sequence_bias": [[[5], 3.0]], "bad_words_ids": [[7, 8]]},
    ],
)
def test_what_is_made_for_a_batch_is_asked_for_each_row(
    loaded: Engine, batch: dict[str, Any], more: dict[str, Any]
) -> None:
    more = {"do_sample": False, **more}
    wanted = loaded.model.module.generate(**batch, **more)  # type: ignore[attr-defined]
    found = written(loaded, batch, Speculative("suffix"), **more)
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


def test_every_option_of_a_known_processor_keeps_transformers_own() -> None:
    """Whatever a processor takes beside what a field here has: known by its signature."""
    plain = {"penalty": 1.3, "temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1}
    others: dict[str, Any] = {"prompt_ignore_length": 2, "min_tokens_to_keep": 50, "filter_value": -1e4}
    seen = set()
    for name, (attribute, field) in KNOWN_PROCESSORS.items():
        kind = getattr(transformers, name)
        given = {attribute: plain[attribute]}
        assert _sampling([kind(**given)], does_sample=True) == {field: plain[attribute]}
        for option in set(inspect.signature(kind).parameters) - {attribute, "device"}:
            assert _sampling([kind(**given, **{option: others[option]})], does_sample=True) is None, (name, option)
            seen.add(option)
    assert seen == set(others)


def test_options_of_a_known_processor_are_kept(loaded: Engine, batch: dict[str, Any]) -> None:
    """Top-k that keeps 50 tokens whatever k is, as transformers has it: k = 1 alone would be greedy."""
    keeps = TopKLogitsWarper(top_k=1, min_tokens_to_keep=50)
    greedy = written(loaded, batch, Speculative("none"), do_sample=False)
    found = written(loaded, batch, Speculative("none"), do_sample=True, logits_processor=[keeps], top_k=0)
    assert found.shape != greedy.shape or not torch.equal(found, greedy)


def test_a_model_in_training_stays_so_and_decodes_without_dropout(loaded: Engine, batch: dict[str, Any]) -> None:
    module = copy.deepcopy(loaded.model.module)  # type: ignore[attr-defined]
    loop = Speculative("suffix")

    def decoded() -> torch.Tensor:
        torch.manual_seed(7)
        made: torch.Tensor = module.generate(**batch, custom_generate=loop, do_sample=True)
        return made

    wanted = decoded()
    module.train()
    frozen = module.model.layers[1].eval()  # a part that its owner has put in eval mode
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(decoded(), wanted)
    assert module.training
    assert module.model.layers[0].mlp.training
    assert not frozen.training
    assert not frozen.mlp.training
    assert torch.equal(module.generate(**batch, custom_generate=Speculative("none"), do_sample=False),
                       module.eval().generate(**batch, do_sample=False))  # fmt: skip


def test_a_model_that_is_let_go_of_is_gone(loaded: Engine, batch: dict[str, Any]) -> None:
    module = copy.deepcopy(loaded.model.module)  # type: ignore[attr-defined]
    loop = Speculative("suffix")
    module.generate(**batch, custom_generate=loop)
    engine = loop.engine
    module.generate(**batch, custom_generate=loop)
    assert engine is not None
    assert loop.engine is engine
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    twin.generate(**batch, custom_generate=loop)
    assert loop.engine is not engine  # a copy has an engine of its own
    gone = weakref.ref(module), weakref.ref(engine), weakref.ref(twin)
    del module, engine, twin
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert loop.engine is None


def test_padding_on_the_right_is_refused(loaded: Engine, batch: dict[str, Any]) -> None:
    turned = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    with pytest.raises(ConfigError, match="padding_side='left'"):
        written(loaded, turned, Speculative("none"))
