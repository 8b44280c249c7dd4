"""Experts that stay in files: the same bits as with all in memory, what is held, what is read ahead, and errors."""

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import Engine, Request, SamplingParams
from foretell.checkpoints.lora import read_loras
from foretell.checkpoints.weights import SafetensorsWeights
from foretell.core.errors import ConfigError, ModelError, UnreadableError
from foretell.core.tree import layout
from foretell.model.llama.read import disk
from foretell.model.llama.read.disk import EXPERTS_SHARE
from foretell.model.llama.run.loras import merged_weights
from foretell.model.llama.run.native import NativeModel
from foretell.model.load import load_model
from foretell.model.target import DiskFigures
from foretell.service.memory import bytes_per_token, sizes_of
from foretell.service.options import ServiceOptions
from tests.checkpoints.gguf.make import write
from tests.model.adapters import write_adapter
from tests.model.llama.family import chain, make_model
from tests.model.llama.test_mixture import logits_of, needs_native, tokens_of

pytestmark = needs_native


def saved(path: Path, kind: str = "qwen3moe", **overrides: Any) -> Path:
    """A tiny mixture's checkpoint in float32."""
    make_model(kind, **overrides).save_pretrained(path)
    return path


def memory_for(model: NativeModel, frames: int) -> int:
    """Bytes with which so many experts of a layer are held; model: the same, with all in memory."""
    sizes, mixture = model.matrices.num_bytes, model.shape.mixture
    assert mixture is not None
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - experts + int(experts // mixture.num_experts * (frames + 0.5) / EXPERTS_SHARE)


def load(path: Path, dtype: torch.dtype = torch.float32, memory: int | None = None, **options: Any) -> NativeModel:
    return NativeModel.load(path, dtype=dtype, memory=memory, **options)


def pair(
    path: Path, frames: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[NativeModel, NativeModel]:
    """With all experts in memory, and with so many of a layer."""
    whole = load(path, dtype, **options)
    part = load(path, dtype, memory_for(whole, frames), **options)
    assert whole.disk is None
    assert figures_of(part).held_bytes < figures_of(part).total_bytes
    return whole, part


def figures_of(model: NativeModel) -> DiskFigures:
    assert model.disk is not None
    return model.disk


def held_in(model: NativeModel, layer: int) -> list[int]:
    """Experts of a layer that are held."""
    store = model._experts[layer].store.contents
    return sorted(e for e in (ctypes.c_int32 * store.frames).from_address(store.held) if e >= 0)


@pytest.mark.parametrize(
    "kind", ["qwen3moe", "qwen3moe-dense-between", "qwen2moe", "olmoe", "glm4moe", "granitemoeshared"]
)
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_bits_are_those_of_a_model_in_memory(tmp_path: Path, kind: str, weights: str) -> None:
    """With fewer frames than a pass needs, at several widths: waves, evictions and reads change nothing."""
    whole, part = pair(saved(tmp_path, kind), 3, weights=weights)
    tokens = tokens_of(2, 19)
    for width in (19, 1, 5):
        assert torch.equal(logits_of(part, tokens, width), logits_of(whole, tokens, width))
    figures = figures_of(part)
    assert figures.misses > 0 < figures.hits
    assert figures.bytes_read > 0


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
                                               (torch.float32, torch.float16)], ids=str)  # fmt: skip
def test_other_types_are_widened_as_they_are_read(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype) -> None:
    make_model("olmoe").to(stored).save_pretrained(tmp_path)
    whole, part = pair(tmp_path, 3, dtype)
    tokens = tokens_of(1, 9)
    assert torch.equal(logits_of(part, tokens, 2), logits_of(whole, tokens, 2))


def test_long_prompts_come_in_waves(tmp_path: Path) -> None:
    """More rows than are grouped at a time, which need every expert of a layer in two frames."""
    whole, part = pair(saved(tmp_path, max_position_embeddings=1024), 2)
    tokens = tokens_of(1, 600)
    plan = layout(chain(1, 600), torch.zeros(1, dtype=torch.int64), 640)
    texts = [model.forward(tokens, plan, model.new_cache(1, 640)).logits for model in (whole, part)]
    assert texts[0] is not None
    assert torch.equal(*texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_what_is_read(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_AT_ONCE", 1)  # a tile at a time: many pieces of each matrix
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole, part = pair(saved(tmp_path), 2)
        tokens = tokens_of(3, 12)
        assert torch.equal(logits_of(part, tokens, 4), logits_of(whole, tokens, 4))
    finally:
        torch.set_num_threads(before)


def test_texts_are_equal_with_every_method_and_in_batches(tmp_path: Path) -> None:
    """At temperatures 0 and 1; what steps read is told to observers, and adds up to what was read."""
    whole, part = pair(saved(tmp_path), 2)
    prompts = [tokens_of(1, 12, seed=seed)[0].tolist() * 2 for seed in range(3)]
    for method in (None, "suffix", "ngram"):
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=14, temperature=temperature, seed=5, ignore_eos=True)
            texts = []
            for model in (whole, part):
                engine, read = Engine(model, speculative=method), list[int]()
                engine.observers.append(lambda event, read=read: read.append(event.bytes_read))
                before = 0 if model.disk is None else model.disk.bytes_read
                found = engine.generate_batch([Request(prompt, params) for prompt in prompts], batch_size=2)
                texts.append([completion.token_ids for completion in found])
                assert sum(read) <= (0 if model.disk is None else model.disk.bytes_read - before)
                assert any(read) == (model.disk is not None)
            assert texts[0] == texts[1], (method, temperature)


@pytest.mark.parametrize(
    "kinds",
    [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_0", "Q5_K"), ("MXFP4", "IQ4_NL", "F16"), ("Q2_K", "Q3_K", "BF16")],
    ids=str,
)
def test_blocks_of_a_file_are_read_as_they_are(tmp_path: Path, kinds: tuple[str, str, str]) -> None:
    """Of several kinds in one expert, in float32 where they are plain."""
    module = make_model("qwen3moe", hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2)
    parts = dict(zip(("gate_exps", "up_exps", "down_exps"), kinds, strict=True))
    path = write(
        tmp_path / "m.gguf",
        module,
        kind=lambda name: next((kind for part, kind in parts.items() if part in name), "F32"),
    )
    whole, part = pair(path, 3)
    tokens = tokens_of(1, 7)
    assert torch.equal(logits_of(part, tokens, 3), logits_of(whole, tokens, 3))
    assert part.spec.weights == whole.spec.weights
    assert part.spec.weight_bytes == whole.spec.weight_bytes


def one_layer(path: Path) -> tuple[NativeModel, dict[int, int]]:
    """A model of one layer whose tokens choose one expert each, with all in memory, and tokens by their expert."""
    whole = load(saved(path, num_hidden_layers=1, num_experts_per_tok=1, mlp_only_layers=[]))
    alone, found = load(path, memory=memory_for(whole, 1)), dict[int, int]()
    for token in range(60):
        logits_of(alone, torch.tensor([[token]]))
        (expert,) = held_in(alone, 0)
        found.setdefault(expert, token)
    assert len(found) >= 4
    return whole, found


def test_who_is_used_often_stays_and_gives_way_at_last(tmp_path: Path) -> None:
    whole, tokens = one_layer(tmp_path)
    (a, b, c, d), model = list(tokens)[:4], load(tmp_path, memory=memory_for(whole, 2))
    for expert in [a] * 6 + [b, c, d]:
        logits_of(model, torch.tensor([[tokens[expert]]]))
    assert held_in(model, 0) == sorted([a, d])  # not the latest two
    for expert in [b, c] * 40:
        logits_of(model, torch.tensor([[tokens[expert]]]))
    assert held_in(model, 0) == sorted([b, c])
    before = figures_of(model)
    for expert in (b, c):
        logits_of(model, torch.tensor([[tokens[expert]]]))
    after = figures_of(model)
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 0)
    assert after.bytes_read == before.bytes_read


def empty(model: NativeModel) -> None:
    """Hold no expert."""
    for store in (experts.store.contents for experts in model._experts):
        ctypes.memset(store.held, 255, 4 * store.frames)
        ctypes.memset(store.frame, 255, 4 * 6)


@pytest.mark.parametrize("count", [1, 4])
def test_the_look_ahead_is_the_next_router_on_this_ones_rows(tmp_path: Path, count: int) -> None:
    """Against torch: whom it names of an empty memory, how many of them come to be needed, and what it asks for."""
    module = make_model("qwen3moe", num_hidden_layers=2, mlp_only_layers=[])
    module.save_pretrained(tmp_path)
    whole = load(tmp_path)
    memory, tokens = memory_for(whole, 3), tokens_of(1, count)
    seen: list[Tensor] = []
    for layer in module.model.layers:
        layer.mlp.register_forward_hook(lambda _, args, out: seen.append(args[0][0]))
    with torch.no_grad():
        module(tokens, use_cache=False)
    router = module.model.layers[1].mlp.gate.weight
    named, needed = (set((rows @ router.T).topk(2).indices.flatten().tolist()) for rows in seen)
    model = load(tmp_path, memory=memory)
    before = figures_of(model)
    empty(model)  # of what loading has read
    logits_of(model, tokens)
    after = figures_of(model)
    assert after.named - before.named == len(named)
    assert after.used - before.used == len(named & needed)
    size = sum(
        whole.matrices.num_bytes[f"model.layers.1.mlp.experts.0.{key}_proj.weight"] for key in ("gate", "up", "down")
    )
    assert after.bytes_ahead - before.bytes_ahead == len(named) * size
    view = model._disk.view.contents  # type: ignore[union-attr]
    view.named, view.used = 1000, 499  # too often wrong: named, and not asked for
    empty(model)
    logits_of(model, tokens)
    assert figures_of(model).named > 1000
    assert figures_of(model).bytes_ahead == after.bytes_ahead


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 5000), os.utime], ids=["cut", "touched"])
def test_a_file_that_changes_is_an_error_of_the_pass(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Whether or not a read fails, and in each pass that reads; a request gets the error as it is."""
    _, model = pair(saved(tmp_path), 2)
    change(tmp_path / "model.safetensors")
    for _ in range(2):
        with pytest.raises(
            UnreadableError, match=r"model.safetensors was changed after the model was loaded.*load the model"
        ):
            logits_of(model, tokens_of(1, 9))
    with pytest.raises(UnreadableError, match="was changed"):
        Engine(model).generate(tokens_of(1, 9)[0].tolist(), max_new_tokens=3)


def test_a_read_that_fails_is_said_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the system, and an end that comes too early; afterwards the bits are as before."""
    whole, model = pair(saved(tmp_path), 2)
    monkeypatch.setattr(disk, "_state", lambda number: (0, 0))
    model._disk._states = dict.fromkeys(model._disk._states, (0, 0))  # type: ignore[union-attr]
    ((_, number),) = model._disk._files.items()  # type: ignore[union-attr]
    kept, folder, empty = os.dup(number), os.open(tmp_path, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
    for other, said in ((folder, os.strerror(errno.EISDIR)), (empty, "it ends too early")):
        os.dup2(other, number)
        with pytest.raises(UnreadableError, match=f"could not be read from model.safetensors .{said}"):
            logits_of(model, tokens_of(1, 9))
        os.dup2(kept, number)
        assert torch.equal(logits_of(model, tokens_of(1, 9)), logits_of(whole, tokens_of(1, 9)))
    for each in (kept, folder, empty):
        os.close(each)


def test_a_file_that_is_removed_is_still_read(tmp_path: Path) -> None:
    whole, model = pair(saved(tmp_path), 2)
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(logits_of(model, tokens_of(1, 9)), logits_of(whole, tokens_of(1, 9)))


def test_what_is_free_decides_where_nothing_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load(saved(tmp_path))
    monkeypatch.setattr(disk, "free_memory", lambda: memory_for(whole, 3))
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert figures_of(model).held_bytes > 0
    assert "stay on disk" in caplog.text
    assert model.memory_left is None
    with pytest.raises(ModelError, match=r"memory_gib.*expected at least 0\.\d+ GiB"):
        load(tmp_path, memory=memory_for(whole, 0))


def test_what_cannot_stay_on_disk_is_loaded_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed experts, weights that are no mixture's, and a sum with an adapter."""
    monkeypatch.setattr(disk, "free_memory", lambda: 1)
    for kind, said in (("gptoss", "cannot be read from its file"), ("qwen3", "only a mixture's experts")):
        path = saved(tmp_path / kind, kind)
        assert load(path).disk is None
        with pytest.raises(ModelError, match=said):
            load(path, memory=1 << 14)
    path = saved(tmp_path / "olmoe", "olmoe")
    source = SafetensorsWeights(path)
    weights = {name: source.read(name, torch.float32, torch.device("cpu")) for name in source.names}
    write_adapter(tmp_path / "a", weights, targets=("q_proj",))
    (lora,) = read_loras({"a": str(tmp_path / "a")}).values()
    merged = merged_weights(source, lora)
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert merged.located(name.format("q")) is None
    assert merged.located(name.format("k")) is not None


def test_options(tmp_path: Path) -> None:
    whole = load(saved(tmp_path))
    model = load_model(tmp_path, memory_gib=memory_for(whole, 2) / 2**30)
    assert model.disk is not None
    assert model.memory_left is not None
    assert model.spec.described != whole.spec.described  # costs are measured for so many that are held
    engine = Engine(model)
    sizes = [
        sizes_of(engine, [], ServiceOptions(max_model_len=64, kv_memory_gib=given)).kv_tokens for given in (None, 1e-4)
    ]
    slot = bytes_per_token(model, [])
    assert sizes == [int(model.memory_left / 2) // slot, int(1e-4 * 2**30) // slot]
    assert load_model(tmp_path, memory_gib=1).disk is None
    for bad in (0, -1, float("nan"), float("inf"), "much"):
        with pytest.raises(ConfigError, match="memory_gib"):
            load_model(tmp_path, memory_gib=bad)  # type: ignore[arg-type]
    for other in ("lean", "transformers"):
        with pytest.raises(ConfigError, match="memory_gib=1 needs the native"):
            load_model(tmp_path, memory_gib=1, implementation=other)
