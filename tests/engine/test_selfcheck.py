"""The check at load: no fault in sound models of every kind, and faults of kernels and caches found, with their layer."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from foretell import Engine, ServiceOptions
from foretell.checkpoints.lora import read_loras
from foretell.cli.app import app
from foretell.cli.commands.serve import _one_by_one
from foretell.core.errors import ConfigError
from foretell.core.tree import Plan
from foretell.engine import selfcheck
from foretell.engine.prefix import Prefix
from foretell.engine.selfcheck import SelfCheck, check_passes, self_check
from foretell.model.cache import KVCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.run.states import NativeCache
from foretell.model.load import load_model
from foretell.model.target import WHOLE, Output, PassOptions, WrappedModel
from tests.model.adapters import write_adapter
from tests.model.llama.family import make_model
from tests.model.llama.hybrid import native_hybrid

RUNNER = CliRunner()
LAYERS = 4


class Faulty(WrappedModel):
    """A sound model of which one kind of pass is not: its plan, or what it returns, is changed."""

    def __init__(
        self,
        inner: Any,
        plan: Callable[[Plan], Plan] | None = None,
        outcome: Callable[[Plan, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(inner)
        self.plan, self.outcome = plan, outcome

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        given = plan if self.plan is None or not options.head else self.plan(plan)
        out = self.inner.forward(tokens, given, cache, options)
        if self.outcome is not None and out.logits is not None:
            out = replace(out, logits=self.outcome(plan, out.logits))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def head(self, normed: Tensor) -> Tensor:
        return self.inner.head(normed)


@pytest.fixture(scope="module")
def sound() -> Any:
    return NativeModel.from_hf(make_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=512))


def all_visible(plan: Plan) -> Plan:
    return replace(plan, ancestry=torch.ones_like(plan.ancestry).tril(), real=None)


def positions_are_slots(plan: Plan) -> Plan:
    return replace(plan, positions=plan.slots.clone(), tree_positions=plan.slots.clone())


def one_length_for_all(plan: Plan) -> Plan:
    return replace(plan, length=plan.length.min().expand_as(plan.length).contiguous())


def cut(plan: Plan) -> Plan:
    """Trees after long texts do not see the last slot before them."""
    return replace(plan, length=plan.length - ((plan.length > 256) & (plan.num_nodes > 1)).long())


def wide_product(plan: Plan, logits: Tensor) -> Tensor:
    return logits * 1.001 if plan.num_nodes >= 16 else logits


def second_row(plan: Plan, logits: Tensor) -> Tensor:
    return logits.roll(1, 0) if len(logits) == 2 else logits


def last_of_three(plan: Plan, logits: Tensor) -> Tensor:
    return torch.cat([logits[:, :2], logits[:, :1]], 1) if plan.num_nodes == 3 and len(logits) == 1 else logits


FAULTS = {
    "siblings see each other": (all_visible, None, "a tree"),
    "a node's position is its slot": (positions_are_slots, None, "a tree"),
    "all rows have one length": (one_length_for_all, None, "a batch"),
    "a long text is cut": (cut, None, "after 288 tokens"),
    "wide products are rounded otherwise": (None, wide_product, "blocks of 16"),
    "rows are exchanged": (None, second_row, "rows that move"),
    "the rest of a tile": (None, last_of_three, "a kept branch"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_passes_are_found(name: str, sound: Any) -> None:
    plan, outcome, path = FAULTS[name]
    found = check_passes(Faulty(sound, plan, outcome))
    assert found.fault.startswith(f"{path}: "), found
    assert "guesses do not keep the text here" in str(found)


def moves_nothing(self: KVCache, src: Tensor, dst: Tensor) -> None:
    return


def moves_one_by_one(self: KVCache, src: Tensor, dst: Tensor) -> None:
    """What is read later was overwritten before."""
    for row, at in itertools.product(range(src.shape[0]), reversed(range(src.shape[1]))):
        for memory in (*self.keys, *self.values):
            memory[row, :, dst[row, at]] = memory[row, :, src[row, at] - int(at == 2)]


def keeps_in_order(self: KVCache, rows: Tensor, used: int | None = None, *, was: Any = KVCache.keep) -> None:
    was(self, rows.sort().values, used)


def copies_too_few(self: Prefix, row: KVCache, count: int) -> None:
    whole = self.whole()
    for memory, mine in zip((*row.keys, *row.values), (*whole.keys, *whole.values), strict=True):
        memory[0, :, : count - 1] = mine[:, : count - 1]


@pytest.mark.parametrize(
    ("kind", "name", "fault", "path"),
    [
        (NativeCache, "move", moves_nothing, "a kept branch"),
        (NativeCache, "move", moves_one_by_one, "a kept branch"),
        (KVCache, "keep", keeps_in_order, "rows that move"),
        (Prefix, "copy_into", copies_too_few, "a kept prefix"),
    ],
)
def test_faults_of_memory_are_found(
    kind: Any, name: str, fault: Any, path: str, sound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, name, fault)
    found = check_passes(sound)
    assert found.fault.startswith(f"{path}: "), found


def test_the_first_wrong_layer_is_named(sound: Any) -> None:
    class Layer(Faulty):
        """Layer 2 adds something where a pass has many nodes."""

        def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
            if plan.num_nodes == 1 or plan.known is not None:
                return self.inner.forward(tokens, plan, cache, options)
            found = [self.inner.forward(tokens, plan, cache, PassOptions((0, 2), taps=(0, 1), head=False))]
            hidden = found[0].hidden + 0.5
            found.append(self.inner.forward(tokens, plan, cache, PassOptions((2, LAYERS), hidden, (2, 3))))
            tapped = torch.cat([found[0].taps, found[1].taps], -1) if options.taps else None
            return replace(found[1], taps=tapped)

    fault = check_passes(Layer(sound)).fault
    assert fault.endswith(f", first in layer 2 of {LAYERS}"), fault


def test_a_head_that_differs_is_told_from_layers(sound: Any) -> None:
    assert check_passes(Faulty(sound, None, wide_product)).fault.endswith(", in the head")


MODELS: dict[str, Callable[[], Any]] = {
    "llama-int8": lambda: NativeModel.from_hf(make_model("llama"), weights="int8"),
    "llama-bf16": lambda: NativeModel.from_hf(make_model("llama").to(torch.bfloat16)),
    "mistral-window": lambda: NativeModel.from_hf(make_model("mistral-window")),
    "qwen3moe-int4": lambda: NativeModel.from_hf(make_model("qwen3moe"), weights="int4"),
    "lfm2": lambda: native_hybrid("lfm2"),
    "qwen3_5": lambda: native_hybrid("qwen3_5"),
    "falcon_h1": lambda: native_hybrid("falcon_h1"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_native_models_are_bit_identical(kind: str) -> None:
    found = check_passes(MODELS[kind]())
    assert (found.fault, found.largest) == ("", 0.0)
    assert {"a batch", "rows that move", "rejected guesses", "blocks of 16"} <= set(found.paths)
    assert str(found) == f"guesses keep the text: checked here, {len(found.paths)} paths, bit-identical"


class Adapted(Faulty):
    """Passes over several nodes forget the rows' adapters."""

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        held = list(cache.loras)
        if plan.num_nodes > 1 and options.head:
            cache.loras = [0] * len(held)
        out = self.inner.forward(tokens, plan, cache, options)
        cache.loras = held
        return out


def test_rows_with_adapters_are_read_too(tmp_path: Path) -> None:
    module = make_model("llama")
    model = NativeModel.from_hf(module, weights="int8")
    write_adapter(tmp_path, module.state_dict(), rank=9)
    model.add_loras(read_loras({"one": tmp_path, "two": tmp_path}))
    found = check_passes(model)
    assert (found.fault, found.largest) == ("", 0.0)
    assert "an adapter in a batch" in found.paths
    assert check_passes(Adapted(model)).fault.startswith("an adapter in a batch: ")


@pytest.mark.parametrize("implementation", ["lean", "transformers"])
def test_what_torch_runs_is_within_rounding(implementation: str) -> None:
    found = check_passes(load_model("bundled/draft", implementation=implementation))
    assert found.fault == ""
    assert found.largest < 1e-4
    assert "a tree" in found.paths


def test_what_cannot_be_checked_changes_nothing(sound: Any) -> None:
    def refuse(plan: Plan) -> Plan:
        raise RuntimeError("no trees of three rows")

    found = check_passes(Faulty(sound, refuse))
    assert str(found) == "whether guesses keep the text could not be checked here: RuntimeError: no trees of three rows"
    assert found.fault == ""
    assert (
        str(SelfCheck((), 0.0)) == "whether guesses keep the text could not be checked here: nothing could be compared"
    )


def test_what_was_seen_is_kept_and_faults_are_not(sound: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    made: list[str] = []

    def counted(model: Any, check: Any = check_passes) -> Any:
        made.append(model.spec.name)
        return check(model)

    monkeypatch.setattr(selfcheck, "check_passes", counted)
    assert self_check(Faulty(sound, all_visible)).fault
    first, second = self_check(sound), self_check(sound)
    assert first == second
    assert len(made) == 2
    (kept,) = (tmp_path / "costs").glob("*.json")
    kept.write_text(kept.read_text()[:-9])  # cut off
    assert self_check(sound) == first
    assert len(made) == 3


def test_a_command_goes_on_without_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    options = ["generate", "def f(", "--target", "bundled", "--max-new-tokens", "24", "--temperature", "0", "--json"]
    right = RUNNER.invoke(app, options)
    assert right.exit_code == 0
    assert '"method":"draft_model"' in right.stdout.replace(" ", "")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(NativeCache, "move", moves_nothing)
    found = RUNNER.invoke(app, options)
    assert found.exit_code == 0
    assert '"method":"none"' in found.stdout.replace(" ", "")
    assert "a kept branch: logits differ" in found.stderr


def test_a_server_goes_on_one_by_one_whatever_it_was_to_keep() -> None:
    asked = ServiceOptions(state_dir="a", prefix_dir="b", prefix_max_gib=2.0, max_queue=7)
    left = _one_by_one(asked)
    assert (left.speculation, left.max_num_seqs, left.prefix_reuse, left.max_queue) == ("off", 1, False, 7)
    assert (left.state_dir, left.prefix_dir) == (None, None)


def test_a_target_in_memory_takes_adapters_once(tmp_path: Path) -> None:
    model = NativeModel.from_hf(make_model("llama"))
    model.loras = ("first",)
    with pytest.raises(ConfigError, match=r"has adapters already \(first\)"):
        Engine.load(model, lora={"second": tmp_path})
