"""Head directories with a damaged config.json or damaged maps: one clear line each, before anything is allocated."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.core.errors import ModelError
from foretell.heads import formats
from foretell.heads.formats import load_head
from foretell.heads.head import Head, HeadConfig
from foretell.heads.modules import RopeScaling
from foretell.heads.native import Memory, Vocabulary
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.eagle.eagle3 import Eagle3HeadConfig
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights
from foretell.methods.kangaroo.head import KangarooHead, KangarooHeadConfig
from foretell.methods.medusa.head import MedusaHead
from tests.methods.test_formats import ATTENTION, DSPARK, LAYERS, H, V, dflash, eagle1, eagle3, medusa, scrambled, spec

HEADS: dict[str, Callable[[], Head]] = {
    "eagle3": eagle3, "speculators": eagle3, "eagle1": eagle1, "medusa": lambda: medusa(draft_vocab_size=12),
    "medusa_vllm": medusa, "dflash": dflash, "dspark": lambda: dflash(**DSPARK), "dflash_speculators": dflash,
    "kangaroo": lambda: scrambled(KangarooHead(KangarooHeadConfig(H, V, 2, 2, 1, 8))),
    "acceptance": lambda: scrambled(AcceptanceHead(AcceptanceHeadConfig(H, V, 2, True, "draft_model"))),
    "judge": lambda: scrambled(JudgeWeights(JudgeHeadConfig(H, V, 3, 8))),
}  # fmt: skip
"""A head of each kind, by the layout that it is written in."""
BAD = (float("inf"), float("nan"), 10**12, 10**30, 1e30, -1, True, "x", [1e400])

FLAGS = {"norm_before_residual", "norm_output", "causal", "windows_causal", "sample_from_anchor"}
"""Fields for which one of them is a value."""


def numbers(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(object, key) of every number and list of numbers in a configuration, but for figures for people."""
    for key, value in config.items():
        if isinstance(value, dict) and key not in ("speculators_config", "training", "target"):
            yield from numbers(value)
        elif isinstance(value, (int, float, list)):
            yield config, key


def outcome(path: Path) -> tuple[HeadConfig | None, str]:
    """The configuration of a directory, or what is said of it."""
    try:
        return formats.load(path, num_layers=LAYERS).config, ""
    except ModelError as error:
        return None, str(error)


@pytest.mark.parametrize("layout", HEADS)
def test_a_damaged_number_is_one_line_and_no_memory(tmp_path: Path, layout: str) -> None:
    """Every number of config.json in turn infinite, huge, negative or no number: ModelError, or without effect."""
    path = tmp_path / "head"
    formats.save(HEADS[layout](), path, layout, target=spec())
    file = path / "config.json"
    config = json.loads(file.read_text())
    right = formats.load(path, num_layers=LAYERS).config
    for held, key in list(numbers(config)):
        good = held[key]
        for bad in BAD:
            held[key] = bad
            file.write_text(json.dumps(config))
            found, said = outcome(path)
            if found is None:
                assert said.startswith(str(path)), (key, bad)
                assert "\n" not in said
                continue
            changed = {name for name, value in vars(found).items() if value != getattr(right, name)}
            assert changed <= FLAGS, (key, bad, changed)
        held[key] = good


@pytest.mark.parametrize(
    ("tensor", "values", "said"),
    [
        ("token_map", torch.arange(12) + 30, "does not lead to 12 different ids of a vocabulary of 40"),
        ("token_map", torch.arange(12) - 1, "does not lead to 12 different ids"),
        ("token_map", torch.zeros(12, dtype=torch.int64), "does not lead to 12 different ids"),
        ("token_map", torch.full((12,), 2**62), "does not lead to 12 different ids"),
        ("token_map", torch.arange(11), r"token_map is \[11\] of int64, expected \[12\] whole numbers"),
        ("token_map", torch.arange(12).float() + 0.5, r"token_map is \[12\] of float32, expected"),
        ("9.0.linear.weight", torch.zeros(H, H), "hold 4 heads, and none of number 3"),
        ("99999999.0.linear.weight", torch.zeros(H, H), "hold 4 heads, and none of number 3"),
    ],
)
def test_medusa_s_damaged_tensors(tmp_path: Path, tensor: str, values: Tensor, said: str) -> None:
    """An id beyond the vocabulary was written to without a look: the process ended."""
    formats.save(medusa(draft_vocab_size=12), tmp_path / "head")
    file = tmp_path / "head/medusa_lm_head.safetensors"
    save_file({**load_file(file), tensor: values}, file)
    with pytest.raises(ModelError, match=said):
        formats.load(tmp_path / "head", num_layers=LAYERS)


def test_eagle_s_map_of_other_numbers(tmp_path: Path) -> None:
    formats.save(eagle3(), tmp_path / "head")
    file = tmp_path / "head/model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "d2t": tensors["d2t"] + 0.5}, file)
    with pytest.raises(ModelError, match="d2t holds float32 numbers, expected whole ones"):
        formats.load(tmp_path / "head", num_layers=LAYERS)


def test_a_map_of_dflash_s_that_is_not_the_identity(tmp_path: Path) -> None:
    """It was thrown away, and the head's columns taken for other tokens."""
    formats.save(dflash(), tmp_path / "head", "dflash_speculators")
    file = tmp_path / "head/model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}, file)
    formats.load(tmp_path / "head", num_layers=LAYERS)
    swapped = torch.zeros(V, dtype=torch.int64)
    swapped[0], swapped[1] = 1, -1
    save_file({**tensors, "d2t": swapped}, file)
    with pytest.raises(ModelError, match="do not map the whole vocabulary to itself"):
        formats.load(tmp_path / "head", num_layers=LAYERS)


@pytest.mark.parametrize("ids", [[0, 1, 40], [-1, 2, 3], [5, 5, 6]])
def test_native_code_is_given_tokens_alone(ids: list[int]) -> None:
    """A head in memory has passed no reader."""
    memory = Memory(torch.nn.Linear(4, 4))
    with pytest.raises(ModelError, match="does not lead to 3 different ids of a vocabulary of 40"):
        Vocabulary(torch.tensor(ids), 40, memory)


@pytest.mark.parametrize(
    "change",
    [{"num_heads": 0}, {"num_kv_heads": 0}, {"head_dim": -2}, {"hidden_size": 2.5}, {"vocab_size": True},
     {"rope_theta": float("nan")}, {"rope_theta": 0.0}, {"rms_norm_eps": -1e-6}, {"rms_norm_eps": float("inf")},
     {"num_layers": 10**6}, {"layer_ids": ("1",)}, {"layer_ids": (True,)}, {"norm_output": 3}, {"windows": (2**60,)}],
    ids=str,
)  # fmt: skip
def test_sizes_in_memory_are_checked_as_those_of_files(change: dict[str, Any]) -> None:
    values = {"hidden_size": H, "vocab_size": V, **ATTENTION, "draft_vocab_size": V, "layer_ids": (1,), **change}
    with pytest.raises(ModelError, match=next(iter(change))):
        Eagle3HeadConfig(**values)


@pytest.mark.parametrize("change", [{"beta_fast": -1.0}, {"factor": float("inf")}, {"attention_factor": 0.0}], ids=str)
def test_scalings_of_angles_are_finite(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(change))} = .* must be a finite number above 0"):
        RopeScaling(**{"kind": "yarn", "factor": 2.0, "original_max_positions": 64, **change})


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    formats.save(eagle3(), tmp_path / "head")
    (tmp_path / "head/model.safetensors").unlink()
    (tmp_path / "head/model.safetensors.index.json").write_text(index)
    with pytest.raises(
        ModelError, match=r"has no 'weight_map' of tensors and the names of files beside it|expected one JSON object"
    ):
        formats.load(tmp_path / "head", num_layers=LAYERS)


def test_weights_that_the_target_s_numbers_have_no_room_for(tmp_path: Path) -> None:
    """They became infinite beside a target in float16, and every guess a NaN."""
    head = medusa()
    with torch.no_grad():
        next(head.parameters())[0, 0] = 1e6
    formats.save(head, tmp_path / "head")
    load_head(str(tmp_path / "head"), spec(), MedusaHead)
    load_head(str(tmp_path / "head"), spec(dtype=torch.bfloat16), MedusaHead)
    with pytest.raises(ModelError, match="float16 has no room for the largest of its weights"):
        load_head(str(tmp_path / "head"), spec(dtype=torch.float16), MedusaHead)
