"""``foretell train auto`` on tiny models: one command to a head that is used, every stage of which may be killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.cli.commands import train_auto
from foretell.cli.train_worth import best_depth, worth
from foretell.model import trained
from foretell.train.plan import Task
from tests.cli.conftest import Invoke
from tests.cli.test_errors import one_line

RESULT: dict[str, Any] = {
    "target": "T", "method": "eagle3", "head": "/h", "bytes": 18_000_000, "num_speculative_tokens": 3, "is_used": True,
    "speedup": {"0": 1.42, "1": 1.18}, "speedup_until_now": None, "tokens_per_step": 2.1,
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    words = ("the class", "def self", "import", "return the", "self", "class def")
    file.write_text("".join(json.dumps({"prompt": f"{word} {n}"}) + "\n" for n in range(4) for word in words))
    return file


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["auto", "--hours", 0], "--hours 0 must be above 0"),
        (["auto", "--lr", 0.1], "--lr is not for 'train auto', which decides that itself"),
        (["auto", "--minutes", 3], "--minutes is not for 'train auto'"),
        (["auto", "--data", "absent.jsonl"], "--data 'absent.jsonl' cannot be read"),
        (["eagle3", "--out", "x"], "--data FILE is missing: only 'train auto' does without"),
        (["eagle3", "--data", "x"], "--out DIR is missing"),
        (["eagle3", "--data", "x", "--out", "y", "--hours", 1], "--hours is for 'train auto'"),
    ],
)
def test_what_does_not_go_together(invoke: Invoke, tmp_path: Path, args: list[object], said: str) -> None:
    out = ["--out", tmp_path / "out"] if args[0] == "auto" else []
    result = invoke("train", *args, *out, "--target", "bundled")
    assert said in one_line(result.stderr)
    assert result.exit_code == 2


def test_a_folder_of_something_else_and_one_in_use_are_left_alone(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    result = invoke("train", "auto", "--target", "bundled", "--out", tmp_path)
    assert "is not empty and holds no run of 'train auto'" in one_line(result.stderr)
    free = tmp_path / "free"
    with train_auto._folder(free):
        result = invoke("train", "auto", "--target", "bundled", "--out", free)
    assert "is in use by another 'foretell train auto'" in one_line(result.stderr)
    result = invoke("train", "auto", "--target", "bundled", "--out", tmp_path / "letter.txt" / "x")
    assert "cannot be written to: Not a directory" in one_line(result.stderr)


def test_the_line_says_what_it_is_worth_and_whether_it_is_used() -> None:
    assert worth(RESULT) == (
        "worth 1.42 times plain here (T = 0), 1.18 (T = 1), 2.10 tokens a step; head in /h (18.0 MB); from now on it "
        "guesses for T where no method is named (3 a step)"
    )
    poor = {**RESULT, "is_used": False, "speedup_until_now": {"0": 1.5, "1": 1.25}}
    assert "not used where no method is named" in worth(poor)
    assert "less than what guesses until now (1.50 and 1.25)" in worth(poor)


@pytest.mark.parametrize(
    ("kept", "guess", "wide", "depth"),
    [
        ([0.9, 0.9, 0.9], 0.0, 1.0, 3),
        ([0.9, 0.9, 0.1], 0.1, 1.0, 2),
        ([0.5, 0.1, 0.1], 0.3, 1.0, 1),
        ([0.8, 0.6, 0.5], 0.05, 2.8, 1),
    ],
)
def test_it_guesses_as_deep_as_pays(kept: list[float], guess: float, wide: float, depth: int) -> None:
    """By hand: 1.9, 2.71, 3.439 tokens for nothing; then over 1.1, 1.2, 1.3; and with 0.6 more for every node."""
    figures: Any = SimpleNamespace(
        conditional_acceptance_per_pos=kept, verify_cost=wide, draft_cost=guess, overhead_cost=0.0
    )
    assert best_depth(figures) == depth


@pytest.mark.parametrize(("flag", "device", "dtype"), [
    ("avx512_bf16", "cpu", "bfloat16"), ("amx_bf16", "cpu", "bfloat16"), ("avx2", "cpu", None), ("amx_bf16", "cuda", None),
])  # fmt: skip
def test_texts_are_read_in_the_faster_dtype_of_this_cpu(
    monkeypatch: pytest.MonkeyPatch, flag: str, device: str, dtype: str | None
) -> None:
    monkeypatch.setattr(train_auto, "cpu_flags", lambda: frozenset({flag}))
    assert train_auto.fast_dtype(device) == dtype


def test_the_head_is_measured_on_prompts_that_it_never_sees(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    task = Task("nowhere", 1.0, str(data), out, 0, "cpu", None, no_color=True)
    train_auto._prompts(task, {"evaluated": 5, "plan": {"num_prompts": 17}})
    learned, held_out = ((out / name).read_text().splitlines() for name in (train_auto.PROMPTS, train_auto.HELD_OUT))
    assert (len(learned), len(held_out)) == (17, 5)
    assert len({*learned, *held_out}) == 22
    assert learned != data.read_text().splitlines()[5:22], "in the file's order one subject alone would be measured"


def start(target: Path, out: Path, data: Path, models: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "foretell.cli.main", "train", "auto", "--target", str(target), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--data", str(data), "--hours", "0.02", "--threads", "1", "--json"], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "FORETELL_MODELS": str(models)},
    )  # fmt: skip


@pytest.mark.slow
def test_killed_at_every_stage_it_goes_on_to_the_same_head(
    models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    out, home = tmp_path / "out", tmp_path / "models"
    for seen in ("plan.json", "run.responses.*", "run/checkpoints/step-*", "worth.runs.jsonl"):
        process = start(models["target"], out, data, home)
        while not list(out.glob(seen)) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        assert list(out.glob(seen)), said
    process = start(models["target"], out, data, home)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    result = json.loads(printed)
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(out / "plan.json", whole)
    process = start(models["target"], whole, data, home)
    again, said = process.communicate()
    assert process.returncode == 0, said
    for file in ("prompts.jsonl", "held_out.jsonl", "run/model.safetensors"):
        assert (out / file).read_bytes() == (whole / file).read_bytes()
    other = json.loads(again)
    assert result["first_guesses_kept_by_form"] == other["first_guesses_kept_by_form"]
    assert (result["stored"], result["num_prompts"]) == (other["stored"], other["num_prompts"])
    held_out = set((out / "held_out.jsonl").read_text().splitlines())
    assert held_out.isdisjoint((out / "prompts.jsonl").read_text().splitlines())
    assert "# eagle3 head for" in (out / "README.md").read_text()

    monkeypatch.setenv("FORETELL_MODELS", str(home))
    used = trained.trained_head(str(models["target"]))
    assert (used is not None) == (result["is_used"] or other["is_used"])
    guessed = invoke(
        "generate", "the class", "--target", models["target"], "--method", "eagle3", "--draft", result["head"]
    )
    assert guessed.exit_code == 0, guessed.stderr
    for option, value, key in (("--hours", 3, "hours"), ("--seed", 5, "seed")):
        given = {"--hours": 0.02, "--data": data, option: value}
        words = [word for pair in given.items() for word in pair]
        refused = invoke("train", "auto", "--target", models["target"], "--out", out, *words)
        assert f"holds a run with {key} = " in one_line(refused.stderr)
