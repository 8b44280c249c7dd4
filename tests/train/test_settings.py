"""Settings of training that make no sense: one clear error each, before anything is loaded."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core import builtin
from foretell.core.errors import ConfigError, ModelError
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.model.load import from_module
from foretell.train import methods
from foretell.train.config import TrainConfig
from foretell.train.judge import train_judge
from foretell.train.responses import Responses, pack
from tests.model.tiny import VOCAB, tiny_module

NONSENSE: tuple[Any, ...] = (math.nan, math.inf, -math.inf, -1, 10**30, 1e30, True, "x", ["x"], {})
SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps")
OPTIONS = {
    "eagle3": (*SIZES, "num_slots", "decay", "alone", "draft_vocab_size", "layer_ids"),
    "eagle1": (*SIZES, "num_slots", "weight_feature", "weight_law", "noise"),
    "medusa": ("num_heads", "num_layers", "draft_vocab_size", "decay"),
    "dflash": (
        *SIZES, "num_layers", "block_size", "num_features", "layer_ids", "mask_token_id", "markov_rank", "num_anchors",
        "gamma", "draft_vocab_size",
    ),
    "kangaroo": (*SIZES[1:], "exit_layer"),
    "acceptance": ("num_layers", "target_share", "weight_accepted", "weight_rejected", "temperatures"),
    "draft_model": (),
}  # fmt: skip
FIELDS = (
    "steps", "epochs", "minutes", "lr", "warmup", "final_lr", "beta1", "beta2", "weight_decay", "clip", "batch_tokens",
    "accumulate", "max_length", "temperature", "keep_gib", "held_out", "eval_every", "eval_tokens", "checkpoint_every",
)  # fmt: skip


@pytest.mark.parametrize("method", OPTIONS)
def test_a_method_s_own_settings(method: str) -> None:
    for key in OPTIONS[method]:
        for value in NONSENSE:
            with pytest.raises(ConfigError, match=key):
                methods.check(method, {key: value}, init="any")
    numbers = {key for key, value in methods.recipe_of(method).options.items() if not isinstance(value, (bool, str))}
    assert numbers == set(OPTIONS[method])


def test_every_method_is_tested() -> None:
    assert OPTIONS.keys() == builtin.TRAINING.keys() - {"judge"}


@pytest.mark.parametrize("key", FIELDS)
def test_settings_of_all_methods(key: str) -> None:
    """Of the command's JSON, and in Python."""
    for value in NONSENSE:
        with pytest.raises(ConfigError, match=key):
            methods.check("medusa", {key: value})
        with pytest.raises(ConfigError, match=key):
            TrainConfig(**{key: value})


@pytest.mark.parametrize(
    "settings",
    [{"recall": math.nan}, {"recall": 1.5}, {"recall": True}, {"columns": 0}, {"columns": 10**6}, {"batch_size": 0},
     {"batch_size": 2.5}, {"layer": True}, {"layer": 99}, {"seed": "x"}],
    ids=str,
)  # fmt: skip
def test_a_judge_s_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = from_module(tiny_module("qwen3"))
    with pytest.raises(ConfigError, match=next(iter(settings))):
        train_judge(model, tmp_path / "labels.jsonl", tmp_path / "out", **settings)


def answers(number: int = 40) -> Responses:
    """Every answer has a token that no other has."""
    return pack([([3, 4, 5, 10 + index % 50, 10 + index], 3) for index in range(number)], {"target": "tiny"})


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_what_is_held_out_chooses_no_vocabulary(method: str) -> None:
    """A draft vocabulary counted over all answers knew which rare tokens the evaluation holds."""
    texts = pack([([3, 4 + n, 5, 20 + n, 20 + n], 3) for n in range(40)], {"target": "tiny"})
    learned, held_out = texts.split(0.3)
    model = from_module(tiny_module("qwen3", vocab_size=64))
    given = {"held_out": 0.3, "draft_vocab_size": len(learned)}
    objective = methods.prepare(method, model, texts, given).objective
    head = objective.head
    ids = head.target_ids if isinstance(head, Eagle3Head) else head.get_buffer("token_map")
    assert set(ids.tolist()) == {learned.text(index)[-1] for index in range(len(learned))}
    assert not {held_out.text(index)[-1] for index in range(len(held_out))} & set(ids.tolist())


def saved(tmp_path: Path, kind: str = "gpt2", **changes: Any) -> str:
    """A model without a tokenizer."""
    tiny_module(kind, **changes).save_pretrained(tmp_path / "draft")
    return str(tmp_path / "draft")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_draft_without_a_tokenizer_is_saved(tmp_path: Path, kind: str) -> None:
    """It was trained to the end, and then lost; or saved beside a tokenizer of no words. The target's is right as well."""
    init, model = saved(tmp_path, kind), from_module(tiny_module("qwen3"))
    methods.prepare("draft_model", model, answers(), {}, init=init).save(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()
    assert not (tmp_path / "out/tokenizer.json").exists()
    prepared = methods.prepare("draft_model", model, answers(), {}, init=init, target_name="bundled")
    prepared.save(tmp_path / "other")
    assert (tmp_path / "other/tokenizer.json").is_file()


@pytest.mark.parametrize("method", ["draft_model", "acceptance"])
def test_texts_that_a_draft_cannot_read(tmp_path: Path, method: str) -> None:
    """Positions beyond GPT-2's, and another vocabulary, were an IndexError of its layers, or training on other words."""
    model = from_module(tiny_module("qwen3"))
    short = pack([([3] * 30, 3)] * 4, {})
    with pytest.raises(
        ConfigError, match="reads texts of at most 20 tokens, and the longest has 30: give max_length = 20"
    ):
        methods.prepare(method, model, short, {}, init=saved(tmp_path, n_positions=20))
    methods.prepare(method, model, short, {"max_length": 20}, init=saved(tmp_path, n_positions=20))
    with pytest.raises(ConfigError, match=f"a vocabulary of 40 tokens, and target .* one of {VOCAB}"):
        methods.prepare(method, model, short, {}, init=saved(tmp_path, "llama", vocab_size=40))


def test_a_draft_of_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = {"target": {"a": 0, "b": 1}, "draft": {"b": 0, "a": 1}}
    monkeypatch.setattr(
        methods, "load_tokenizer", lambda name: type("Some", (), {"get_vocab": lambda self: tokenizers[name]})()
    )
    with pytest.raises(
        ConfigError, match=r"--init draft has another vocabulary than target target .*id 0: 'a' and 'b'"
    ):
        methods.check_vocabularies("draft", "target")
    methods.check_vocabularies("target", "target")
    methods.check_vocabularies("draft", None)


def test_numbers_that_do_not_fit_what_is_saved(tmp_path: Path) -> None:
    prepared = methods.prepare("medusa", from_module(tiny_module("qwen3")), answers(), {"save_dtype": "float16"})
    with torch.no_grad():
        next(prepared.objective.head.parameters())[0] = 1e5
    with pytest.raises(Exception, match="save_dtype = 'float16' has no room for the largest weights") as caught:
        prepared.save(tmp_path / "out")
    assert not isinstance(caught.value, ModelError)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("eagle3", {"layer_ids": [2, 1]}, r"must be\s+distinct and ascend"),
        ("dflash", {"layer_ids": [2, 1]}, r"must be\s+distinct and ascend"),
        ("dflash", {"layer_ids": [99]}, "reads the output of target layer 99"),
        ("medusa", {"own_lm_head": False, "num_layers": 0}, "has no weights to learn"),
    ],
)
def test_a_head_that_could_not_be_written_is_not_trained(method: str, given: dict[str, Any], said: str) -> None:
    """It was trained to the end, and then refused."""
    with pytest.raises((ConfigError, ModelError), match=said):
        methods.prepare(method, from_module(tiny_module("qwen3")), answers(), given)
