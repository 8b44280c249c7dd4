"""EAGLE-3 heads as others write them, from their files to every logit of a decoded tree, against transformers' modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.heads import formats
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.eagle.eagle3 import Eagle3Head
from tests.heads.reference import LAYER_IDS, Options, Reference
from tests.methods.decoding import Decoding
from tests.methods.eagle.test_drafter import MODULE, ORACLE, decoded

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4}
OTHERS: dict[str, Options] = {
    "llama": Options("llama", {"num_hidden_layers": 1}),
    "norm_before_fc": Options("llama", {"num_hidden_layers": 1}, norm_before_fc=True, norm_before_residual=True),
    "fc_norm": Options("llama", {"num_hidden_layers": 1}, fc_norm=True, norm_output=True),
    "llama3": Options("llama", {"num_hidden_layers": 1, "rope_parameters": LLAMA3}),
    "yarn": Options("llama", {"num_hidden_layers": 1, "rope_parameters": YARN}),
    "yarn of a long text": Options(
        "llama",
        {"num_hidden_layers": 1, "rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.25, "beta_fast": 8.0}},
    ),
    "linear": Options("llama", {"num_hidden_layers": 1, "rope_parameters": LINEAR}),
    "sliding": Options("llama", {"num_hidden_layers": 1, **SLIDING}),
    "biases": Options("llama", {"num_hidden_layers": 1, "attention_bias": True}),
    "qwen3": Options("qwen3", {"num_hidden_layers": 1}),
    "qwen3 with biases": Options("qwen3", {"num_hidden_layers": 1, "attention_bias": True}),
    "qwen3, windows by number": Options(
        "qwen3", {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "three layers": Options(
        "llama",
        {
            "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 3,
        },
        norm_before_residual=True,
    ),
    "everything": Options(
        "qwen3",
        {
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
            "use_sliding_window": True, "attention_bias": True, "rope_parameters": YARN,
        },
        norm_before_fc=True, norm_output=True,
    ),
}  # fmt: skip


def loaded(tmp_path: Path, options: Options) -> tuple[Reference, Eagle3Head]:
    reference = Reference(options)
    reference.save(tmp_path / "head")
    head = formats.load(tmp_path / "head")
    return reference, head.eval()


def largest_error(decoding: Decoding, reference: Reference) -> float:
    """Of any logit of any pass; tokens outside the draft vocabulary must be the same ones."""
    embed, worst = MODULE.get_input_embeddings(), 0.0
    with torch.no_grad():
        for one in decoding.drafter.passes:
            tokens = torch.tensor(one.text)
            batch = TeacherBatch(tokens[None], torch.tensor([len(tokens)]), torch.ones(1, dtype=torch.int64))
            taps = Teacher(ORACLE).label(batch, LAYER_IDS).taps[0, : len(tokens) - 1]
            expected = reference.guess(embed(torch.tensor(one.text[1:] + one.path)), taps)
            known = expected > -torch.inf
            assert torch.equal(one.logits > -torch.inf, known)
            worst = max(worst, float((one.logits - expected)[known].abs().max()))
    return worst


@pytest.mark.parametrize(
    ("name", "lengths"),
    [*((name, (9,)) for name in OTHERS), ("three layers", (6, 1, 12, 2)), ("everything", (6, 1, 12, 2))],
)
def test_heads_of_others_compute_what_transformers_modules_do(
    tmp_path: Path, name: str, lengths: tuple[int, ...]
) -> None:
    reference, head = loaded(tmp_path, OTHERS[name])
    decoding = decoded(head, ORACLE, lengths)
    passes = decoding.drafter.passes
    assert max(len(one.path) for one in passes) >= 3
    assert max(len(one.text) for one in passes) >= 14  # windows of up to 5 have bitten
    assert largest_error(decoding, reference) < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sliding", {"windows": ()}),
        ("sliding", {"windows": (5,)}),
        ("three layers", {"windows": ()}),
        ("three layers", {"norm_before_residual": False}),
        ("llama3", {"rope_scaling": None}),
        ("yarn", {"rope_scaling": None}),
        ("linear", {"rope_scaling": None}),
        ("everything", {"norm_output": False}),
        ("everything", {"windows": ()}),
    ],
)
def test_an_option_that_is_not_read_is_seen(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """The negative control: each of these runs without a word, on wrong numbers."""
    reference, head = loaded(tmp_path, OTHERS[name])
    wrong = Eagle3Head(replace(head.config, **change))
    wrong.load_state_dict(head.state_dict())
    assert largest_error(decoded(wrong.eval(), ORACLE, (9,)), reference) > 1e-3


def test_a_cache_has_keys_and_values_of_every_layer(tmp_path: Path) -> None:
    _, head = loaded(tmp_path, OTHERS["three layers"])
    cache = head.new_cache(2, 16)
    assert len(cache.keys) == head.config.num_layers == 3
    assert cache.bytes_per_slot == 3 * 2 * head.config.num_kv_heads * head.config.head_dim * 4
