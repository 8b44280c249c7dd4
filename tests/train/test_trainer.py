"""The trainer: it learns, a cut run goes on bit for bit, and whatever goes wrong leaves the last good checkpoint."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.errors import ConfigError, TrainError
from foretell.train import checkpoint
from foretell.train.config import TrainBudget, TrainConfig, rate
from foretell.train.data import Batches, epoch_batches
from foretell.train.trainer import LOG, RECORD, Report, Trainer, train
from tests.train.harness import Linear, teacher, texts

CONFIG: dict[str, Any] = {
    "steps": 6, "batch_tokens": 64, "eval_every": 0, "eval_tokens": 100, "checkpoint_every": 3, "lr": 0.02,
    "held_out": 0.2,
}  # fmt: skip


def run(
    out: Path, objective: Linear | None = None, *, resume: bool = False, progress: Any = None, **changes: Any
) -> Any:
    config = TrainConfig(**{**CONFIG, **changes})
    return train(objective or Linear(), teacher(), texts(), out, config, resume=resume, progress=progress)


def rows(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def test_the_first_checkpoint_is_early(tmp_path: Path) -> None:
    """A run that was killed before checkpoint_every steps had left nothing."""
    there = list[int]()
    out = tmp_path / "out"
    run(out, steps=32, checkpoint_every=1000, progress=lambda report: there.append(len(checkpoint.found(out))))
    assert there == [0] * 3 + [1] * 28 + [2]


def test_it_learns(tmp_path: Path) -> None:
    before, after = Linear(), Linear()
    first = run(tmp_path / "a", before, steps=1, lr=1e-9)
    last = run(tmp_path / "b", after, steps=60, weight_decay=0.0)
    assert last.loss < 0.7 * first.loss
    assert last.slots[0].acceptance > first.slots[0].acceptance + 0.1
    assert last.expected_length > first.expected_length
    # Before each step the objective is told how much of training is done.
    assert [row["told"] for row in rows(tmp_path / "b")] == pytest.approx([step / 60 for step in range(60)])


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"epochs": 2.0, "steps": None}, {"precision": "bfloat16"}])
def test_resumed_is_the_same_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole, cut = Linear(), Linear()
    at_once = run(tmp_path / "whole", whole, **changes)

    class CutError(Exception):
        pass

    def stop(report: Report) -> None:
        if report.step == 5:  # two steps after the checkpoint: they are lost, and done again
            raise CutError

    with pytest.raises(CutError):
        run(tmp_path / "cut", cut, progress=stop, **changes)
    again = Linear()
    resumed = run(tmp_path / "cut", again, resume=True, **changes)
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")
    for one, other in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(one, other)
    assert at_once == resumed


class Joined(Linear):
    """Slot 1 by itself in the first half of training, as EAGLE-3 is trained."""

    def outcome(self, *args: Any, training: bool) -> Any:
        found = super().outcome(*args, training=training)
        return replace(found, slots=found.slots[:1]) if training and self.share < 0.5 else found


def test_the_loss_of_a_slot_can_be_compared_where_slots_join(tmp_path: Path) -> None:
    """Nothing is learned here (a tiny rate), and all slots are as hard: the sum jumps, the mean of a slot does not."""
    reports: list[Report] = []
    objective = Joined(num_slots=4)
    for layer in objective.head:
        layer.weight.data.zero_()
    run(tmp_path / "out", objective, lr=1e-12, batch_tokens=10_000, progress=reports.append)
    first, last = reports[2], reports[3]
    assert [len(report.slot_losses) for report in reports] == [1, 1, 1, 4, 4, 4]
    assert last.loss > 1.5 * first.loss
    assert first.loss_per_slot == first.loss == first.slot_losses[0]
    assert last.loss_per_slot == pytest.approx(first.loss_per_slot, rel=0.1)
    assert last.slot_losses[0] == pytest.approx(first.slot_losses[0], rel=1e-3)  # every step sees all texts
    row = rows(tmp_path / "out")[3]
    assert (row["loss_per_slot"], tuple(row["slot_losses"])) == (last.loss_per_slot, last.slot_losses)
    assert row["loss"] == pytest.approx(sum(0.5**k * loss for k, loss in enumerate(row["slot_losses"])), rel=1e-5)


def test_passes_of_one_step_are_one_mean(tmp_path: Path) -> None:
    run(tmp_path / "out", steps=2, accumulate=3)
    for row in rows(tmp_path / "out"):
        assert row["loss"] == pytest.approx(1.5 * row["loss_per_slot"], rel=1e-5)  # weights 1 and 1/2


def test_seed_decides(tmp_path: Path) -> None:
    same = [run(tmp_path / name, steps=3) and rows(tmp_path / name) for name in ("a", "b")]
    assert same[0] == same[1]
    run(tmp_path / "c", steps=3, seed=1)
    assert rows(tmp_path / "c") != same[0]


def test_record_and_log(tmp_path: Path) -> None:
    saved: list[Path] = []
    calibrated: list[int] = []
    config = TrainConfig(**{**CONFIG, "eval_every": 2})
    evaluation = train(
        Linear(), teacher(), texts(), tmp_path / "out", config, identity={"method": "linear"}, save=saved.append,
        finish=lambda objective, teacher, held_out: calibrated.append(len(held_out)),
    )  # fmt: skip
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["method"] == "linear"
    assert record["config"]["lr"] == 0.02
    assert record["data"] == texts().fingerprint
    assert (record["finished"], record["steps"]) == (True, 6)
    assert record["result"]["expected_length"] == evaluation.expected_length
    assert {"torch", "accelerate", "foretell"} <= set(record["versions"])
    assert "git_revision" in record
    log = rows(tmp_path / "out")
    assert [row["step"] for row in log] == [1, 2, 3, 4, 5, 6]
    assert ["held_out" in row for row in log] == [False, True, False, True, False, False]
    assert all(row["places"] > 0 for row in log)
    assert saved == [tmp_path / "out"]
    assert calibrated == [record["held_out"]["num_texts"]]
    assert [path.name for path in checkpoint.found(tmp_path / "out")] == ["step-00000003", "step-00000006"]


def test_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("foretell.train.trainer.perf_counter", lambda: float(next(clock)))
    shares: list[float] = []
    run(tmp_path / "out", steps=None, minutes=0.1, progress=lambda report: shares.append(report.share))
    assert shares == sorted(shares)
    assert len(shares) == 6  # of a second each, of six seconds
    assert rows(tmp_path / "out")[0]["lr"] < rows(tmp_path / "out")[1]["lr"]


def poison(number: float) -> Linear:
    """Steps 1 to 4 are sound, the fifth answers with number."""
    objective = Linear()
    sound, calls = objective.outcome, [0]

    def outcome(*args: Any, training: bool) -> Any:
        found = sound(*args, training=training)
        calls[0] += training
        if calls[0] > 4:
            slot = found.slots[0]
            object.__setattr__(slot, "logits", slot.logits * number)
        return found

    objective.outcome = outcome  # type: ignore[method-assign]
    return objective


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_no_finite_loss(tmp_path: Path, number: float) -> None:
    with pytest.raises(TrainError, match=r"step 5: .*step-00000003"):
        run(tmp_path / "out", poison(number))
    assert [path.name for path in checkpoint.found(tmp_path / "out")] == ["step-00000001", "step-00000003"]
    resumed = Linear()
    run(tmp_path / "out", resumed, resume=True)
    whole = Linear()
    run(tmp_path / "whole", whole)
    assert all(map(torch.equal, whole.head.parameters(), resumed.head.parameters()))


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write_bytes

    def full(file: Path, content: bytes | memoryview) -> None:
        if "step-00000006" in str(file):
            file.write_bytes(bytes(content)[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(file, content)

    monkeypatch.setattr(checkpoint, "write_bytes", full)
    with pytest.raises(TrainError, match=r"No space left on device.*step-00000003"):
        run(tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out" / checkpoint.FOLDER).iterdir())
    assert left == ["step-00000001", "step-00000003"]
    monkeypatch.setattr(checkpoint, "write_bytes", write)
    run(tmp_path / "out", resume=True)
    assert len(rows(tmp_path / "out")) == 6


def test_interrupt(tmp_path: Path) -> None:
    def interrupt(report: Report) -> None:
        if report.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint.found(tmp_path / "out")[-1].name == "step-00000005"  # the step under way was finished
    run(tmp_path / "out", resume=True)
    run(tmp_path / "whole")
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")


def test_folder_in_use(tmp_path: Path) -> None:
    run(tmp_path / "out", steps=1)
    with pytest.raises(ConfigError, match="--resume"):
        run(tmp_path / "out", steps=1)
    with pytest.raises(ConfigError, match=r"config\.lr was 0\.02 and now is 0\.5"):
        run(tmp_path / "out", steps=1, lr=0.5, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no run"):
        run(tmp_path / "other", resume=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        run(tmp_path / "file")


def test_damaged_checkpoint(tmp_path: Path) -> None:
    run(tmp_path / "out")
    (checkpoint.found(tmp_path / "out")[-1] / checkpoint.STATE).write_bytes(b"gone")
    with pytest.raises(TrainError, match="step-00000006 cannot be read"):
        run(tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 1.0}, "one of steps, epochs and minutes"),
        ({"steps": 0}, "steps = 0"),
        ({"lr": 0.0}, "lr = 0"),
        ({"precision": "int8"}, "float32 or bfloat16"),
        ({"divergence": "kl"}, "divergence 'kl'"),
        ({"held_out": 1.0}, "held_out"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig(**{**CONFIG, **changes})


def test_texts_without_a_response(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_length = 2"):
        Trainer(Linear(), teacher(), texts(), tmp_path / "out", TrainConfig(**{**CONFIG, "max_length": 2}))


def test_batches() -> None:
    lengths = [5, 9, 3, 30, 12, 7, 7, 2, 16]
    for epoch in range(3):
        batches = epoch_batches(lengths, 24, seed=1, epoch=epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert all(max(lengths[i] for i in batch) * len(batch) <= 24 or len(batch) == 1 for batch in batches)
    in_turn = Batches(lengths, 24, seed=1)
    forward = [in_turn[number] for number in range(12)]
    assert forward == [Batches(lengths, 24, seed=1)[number] for number in range(12)]
    assert in_turn[0] == forward[0]
    assert epoch_batches(lengths, 24, seed=1, epoch=0) != epoch_batches(lengths, 24, seed=2, epoch=0)


def test_rate() -> None:
    assert rate(0.05, warmup=0.1, final=0.0) == pytest.approx(0.5)
    assert rate(0.1, warmup=0.1, final=0.2) == pytest.approx(1.0)
    assert rate(0.55, warmup=0.1, final=0.2) == pytest.approx(0.6)
    assert rate(1.0, warmup=0.1, final=0.2) == pytest.approx(0.2)
    assert TrainBudget(epochs=1.5).num_steps(10.0) == 15
    assert TrainBudget(minutes=2.0).share(0, 30.0, 10.0) == 0.25


class Dropping(Linear):
    """Draws from torch's own generator, as dropout in a draft model's layers does."""

    def outcome(self, *args: Any, **more: Any) -> Any:
        found = super().outcome(*args, **more)
        if more["training"]:
            for slot in found.slots:
                object.__setattr__(slot, "logits", torch.nn.functional.dropout(slot.logits, 0.5))
        return found


def test_dropout_is_the_same_in_every_run_and_after_a_cut(tmp_path: Path) -> None:
    """Whatever the process has drawn before."""
    run(tmp_path / "a", Dropping())
    torch.rand(7)
    run(tmp_path / "b", Dropping())
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a")[0]["loss"] != rows_of_plain(tmp_path / "c")[0]["loss"]
    whole, cut = Dropping(), Dropping()
    run(tmp_path / "whole", whole)

    def stop(report: Report) -> None:
        if report.step == 4:
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        run(tmp_path / "cut", cut, progress=stop)
    again = Dropping()
    run(tmp_path / "cut", again, resume=True)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert all(map(torch.equal, whole.head.parameters(), again.head.parameters()))


def rows_of_plain(out: Path) -> list[dict[str, Any]]:
    run(out)
    return rows(out)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(("at", "last"), [(6, "step-00000005"), (3, "step-00000002"), (1, "no checkpoint yet")])
def test_weights_that_are_not_finite_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, last: str, number: float
) -> None:
    """The loss of a step is finite, and its step leaves none: also where it is the last one."""
    step, count = torch.optim.AdamW.step, [0]

    def broken(self: torch.optim.AdamW, *args: Any) -> None:
        step(self, *args)
        count[0] += 1
        if count[0] == at:
            self.param_groups[0]["params"][0].data[0, 0] = number

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    saved: list[Path] = []
    with pytest.raises(TrainError, match=f"step {at}: 1 tensors of the head hold numbers that are not finite.*{last}"):
        train(
            Linear(), teacher(), texts(), tmp_path / "out", TrainConfig(**{**CONFIG, "checkpoint_every": 1}),
            save=saved.append,
        )  # fmt: skip
    assert not saved
    assert len(checkpoint.found(tmp_path / "out")) == min(2, at - 1)


def test_a_calibration_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    saved: list[Path] = []

    def finish(objective: Any, *rest: Any) -> None:
        next(objective.head.parameters()).data.fill_(float("nan"))

    with pytest.raises(TrainError, match="not finite"):
        train(
            Linear(), teacher(), texts(), tmp_path / "out", TrainConfig(**CONFIG), finish=finish, save=saved.append,
        )  # fmt: skip
    assert not saved


def test_what_is_saved_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    """Weights that float16 has no room for are saved by another dtype, without training again."""
    config = TrainConfig(**CONFIG)
    for dtype, resume in (("float16", False), ("float32", True)):
        options = {"num_slots": 2, "save_dtype": dtype}
        train(Linear(), teacher(), texts(), tmp_path / "out", config, identity={"options": options}, resume=resume)
    with pytest.raises(ConfigError, match=r"options\.num_slots was 2"):
        train(
            Linear(), teacher(), texts(), tmp_path / "out", config, identity={"options": {"num_slots": 3}}, resume=True
        )  # fmt: skip
