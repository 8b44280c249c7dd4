"""Which files are read where a directory has several: the same ones by every reader, in transformers' order."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from foretell.checkpoints.directories import check_files
from foretell.checkpoints.files import weight_files
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import chain_parent, layout
from foretell.heads.directories import read_tensors
from foretell.methods.mtp.checkpoint import read as read_mtp
from foretell.model.load import load_model
from tests.model.tiny import tiny_module

INDEX, WHOLE, PICKLE = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


def tiny() -> PreTrainedModel:
    """A model that every implementation runs."""
    return tiny_module("llama", hidden_size=64)


def weights(*, factor: float = 1.0) -> dict[str, Tensor]:
    """Its tensors, or what is wrong in their place."""
    return {key: (factor * tensor).contiguous() for key, tensor in tiny().state_dict().items()}


def put(folder: Path, tensors: dict[str, Tensor], file: str = WHOLE) -> None:
    save_file(tensors, folder / file, metadata={"format": "pt"})


def put_shards(
    folder: Path, tensors: dict[str, Tensor], *, index: str = INDEX, prefix: str = "model"
) -> dict[str, str]:
    """Three shards and their index; the first holds ``QUERY``, the last ``NORM``."""
    parts = [{}, {}, {}]  # type: list[dict[str, Tensor]]
    for place, key in enumerate(sorted(tensors)):
        parts[0 if key == QUERY else 2 if key == NORM else place % 3][key] = tensors[key]
    shard_of = {}
    for number, part in enumerate(parts, start=1):
        file = f"{prefix}-0000{number}-of-00003.safetensors"
        put(folder, part, file)
        shard_of |= dict.fromkeys(part, file)
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shard_of}))
    return shard_of


def also(folder: Path, file: str, more: dict[str, Tensor]) -> None:
    """Further tensors in a file that is there."""
    put(folder, {**load_file(folder / file), **more}, file)


def whole_beside_old_shards(folder: Path) -> None:
    put_shards(folder, weights(factor=2.0))
    put(folder, weights())


def whole_beside_an_index_alone(folder: Path) -> None:
    for file in put_shards(folder, weights(factor=2.0)).values():
        (folder / file).unlink(missing_ok=True)
    put(folder, weights())


def whole_beside_no_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    put(folder, weights())


def whole_beside_a_larger_model_s_index(folder: Path) -> None:
    put_shards(folder, {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(2, 2) for layer in range(9)})
    put(folder, weights())


def whole_beside_a_pickle(folder: Path) -> None:
    put(folder, weights())
    torch.save(weights(factor=2.0), folder / PICKLE)


def shards_beside_a_pickle(folder: Path) -> None:
    put_shards(folder, weights())
    torch.save(weights(factor=2.0), folder / PICKLE)


def shards_with_a_copy_in_the_last(folder: Path) -> None:
    shard_of = put_shards(folder, weights())
    also(folder, shard_of[NORM], {QUERY: 2 * weights()[QUERY]})


def shards_with_a_copy_in_the_first(folder: Path) -> None:
    shard_of = put_shards(folder, weights())
    also(folder, shard_of[QUERY], {NORM: 2 * weights()[NORM]})


def shards_with_copies_of_other_shapes(folder: Path) -> None:
    shard_of = put_shards(folder, weights())
    last = shard_of[NORM]
    also(folder, last, {key: torch.ones(3) for key, file in shard_of.items() if file != last})


def shards_with_more_than_the_index_says(folder: Path) -> None:
    shard_of = put_shards(folder, weights())
    del shard_of[QUERY]
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def shards_with_an_index_that_swaps_two(folder: Path) -> None:
    shard_of = put_shards(folder, weights())
    shard_of[QUERY], shard_of[NORM] = shard_of[NORM], shard_of[QUERY]
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def named_file(folder: Path) -> None:
    put(folder, weights(), "mine.safetensors")
    put(folder, weights(factor=2.0))
    say(folder, "mine.safetensors")


def named_index(folder: Path) -> None:
    put_shards(folder, weights(), index="mine.safetensors.index.json", prefix="mine")
    put(folder, weights(factor=2.0))
    say(folder, "mine.safetensors.index.json")


def say(folder: Path, named: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))


LAYOUTS = [
    whole_beside_old_shards, whole_beside_an_index_alone, whole_beside_no_index, whole_beside_a_larger_model_s_index,
    whole_beside_a_pickle, shards_beside_a_pickle, shards_with_a_copy_in_the_last, shards_with_a_copy_in_the_first,
    shards_with_copies_of_other_shapes, shards_with_more_than_the_index_says, shards_with_an_index_that_swaps_two,
    named_file, named_index,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration without weights."""
    tiny().config.save_pretrained(tmp_path)
    return tmp_path


def logits_of(folder: Path, implementation: str) -> Tensor:
    model = load_model(str(folder), implementation=implementation)
    assert implementation in ("auto", model.spec.implementation)
    plan = layout(chain_parent(6, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 7)
    out = model.forward(torch.arange(6)[None] * 5, plan, model.new_cache(1, 7)).logits
    assert out is not None
    return out[0]


def expected() -> Tensor:
    module = tiny()
    with torch.no_grad():
        return module(torch.arange(6)[None] * 5).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("implementation", ["auto", "transformers", "lean", "native"])
@pytest.mark.parametrize("lay", LAYOUTS)
def test_every_implementation_reads_the_same_files(
    folder: Path, lay: Callable[[Path], None], implementation: str
) -> None:
    lay(folder)
    try:
        found = logits_of(folder, implementation)
    except ConfigError:
        assert implementation == "native"  # no compiler here
        return
    assert torch.allclose(found, expected(), atol=1e-4)
    assert check_files(folder, name="x").layer_counts == {4}


@pytest.mark.parametrize("implementation", ["transformers", "lean"])
def test_copies_in_shards_change_nothing_but_their_tensors(folder: Path, implementation: str) -> None:
    """The generation configuration beside them is read as ever."""
    shards_with_a_copy_in_the_last(folder)
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(folder)
    assert load_model(str(folder), implementation=implementation).spec.eos_token_ids == (5, 6, 2)


@pytest.mark.parametrize("lay", [lay for lay in LAYOUTS if "copies" not in lay.__name__ and "last" not in lay.__name__])
def test_the_order_is_that_of_transformers(folder: Path, lay: Callable[[Path], None]) -> None:
    """All but copies that a later shard holds, which transformers takes."""
    lay(folder)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(6)[None] * 5).logits[0]
    assert torch.allclose(found, expected(), atol=1e-4)


@pytest.mark.parametrize("lay", [lay for lay in LAYOUTS if "named" not in lay.__name__])
def test_heads_and_mtp_modules_are_read_by_the_same_rule(folder: Path, lay: Callable[[Path], None]) -> None:
    lay(folder)
    found, wanted = read_tensors(folder, name="x"), weights()
    assert found.keys() >= wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("stale", [True, False])
def test_an_mtp_module_beside_a_stale_index(tmp_path: Path, stale: bool) -> None:
    """The one of the file that is read, or of the shard that the index names."""
    module = {f"mtp.{key}": torch.full((4,), 1.0) for key in ("pre_fc_norm_embedding.weight", "norm.weight")}
    module |= {"mtp.pre_fc_norm_hidden.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4, 8)}
    wrong = {key: 2 * tensor for key, tensor in module.items()}
    if stale:
        put(tmp_path, wrong, "old.safetensors")
        put(tmp_path, module)
    else:
        put(tmp_path, module, "a.safetensors")
        put(tmp_path, {**wrong, "other": torch.ones(1)}, "b.safetensors")
    shard_of = {"other": "b.safetensors"} | dict.fromkeys(module, "a.safetensors")
    old = dict.fromkeys(module, "old.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": old if stale else shard_of}))
    assert all(bool((tensor == 1).all()) for tensor in read_mtp(tmp_path, name="x").own.values())


@pytest.mark.parametrize("implementation", ["auto", "transformers", "native", "lean"])
def test_missing_shards_are_not_replaced_by_what_lies_beside_them(folder: Path, implementation: str) -> None:
    torch.save(weights(), folder / PICKLE)
    shard_of = put_shards(folder, weights())
    (folder / shard_of[QUERY]).unlink()
    with pytest.raises(ModelError, match=rf"1 of 3 weight files are missing .*{shard_of[QUERY]}"):
        load_model(str(folder), implementation=implementation)
    with pytest.raises(ModelError, match=r"1 of 3 weight files are missing"):
        read_tensors(folder, name="x")


@pytest.mark.parametrize("implementation", ["auto", "transformers", "lean"])
def test_pickles_are_read_by_transformers_alone(folder: Path, implementation: str) -> None:
    torch.save(weights(), folder / PICKLE)
    if implementation == "lean":
        with pytest.raises(ModelError, match=r"weights are in pytorch_model\.bin; expected safetensors"):
            load_model(str(folder), implementation=implementation)
    else:
        assert torch.allclose(logits_of(folder, implementation), expected(), atol=1e-4)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (
            lambda folder: put(folder, weights(), "model.fp16.safetensors"),
            r"holds model\.fp16\.safetensors, which is no",
        ),
        (
            lambda folder: put(folder, weights(), "shard-00001-model-00001-of-00002.safetensors"),
            "distributed checkpoint",
        ),
        (lambda folder: say(folder, "gone.safetensors"), r"names gone\.safetensors .*missing"),
        (lambda folder: say(folder, "../model.safetensors"), "transformers_weights; expected the name"),
        (lambda folder: say(folder, "pytorch_model.bin"), "transformers_weights; expected the name"),
        (lambda folder: say(folder, 3), "transformers_weights; expected the name"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "transformers", "native"])
def test_what_no_reader_takes_is_said(
    folder: Path, prepare: Callable[[Path], None], said: str, implementation: str
) -> None:
    prepare(folder)
    with pytest.raises(ModelError, match=said) as raised:
        load_model(str(folder), implementation=implementation)
    assert "\n" not in str(raised.value)


def test_an_index_may_name_files_for_other_readers(tmp_path: Path) -> None:
    """A tensor that no file holds, and an index that gives one file to all."""
    put(tmp_path, {"a": torch.ones(1)}, "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    stored = weight_files(tmp_path, name="x")
    assert [file.name for file in stored.files] == ["x.safetensors"]
    assert list(stored.tensors(name="x")) == ["a"]
    assert not stored.strays(name="x")
