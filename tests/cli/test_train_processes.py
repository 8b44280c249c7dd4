"""Training on several processes is training on one: the same batches, the same losses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.test_process import environment
from tests.cli.test_train import CONFIG
from tests.processes import run_group, torchrun


def test_two_processes_are_one_with_two_passes_a_step(models: dict[str, Path], tmp_path: Path) -> None:
    """Two processes of one pass each take the batches of one process that accumulates two, and end with its weights."""
    data = tmp_path / "prompts.txt"
    data.write_text("".join(f"the class {n}\n\nreturn self {n}\n\n" for n in range(8)))
    given = {**CONFIG, "num_slots": 2, "lr": 0.01, "checkpoint_every": 100, "eval_every": 0}

    def run(name: str, launcher: list[str], accumulate: int) -> subprocess.CompletedProcess[str]:
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps({**given, "accumulate": accumulate}))
        command = ["train", "eagle3", "--target", models["target"], "--data", data, "--out", tmp_path / name]
        command += ["--config", config, "--steps", 4, "--max-new-tokens", 8, "--json", "--threads", 1]
        return run_group(
            [*launcher, "-m", "foretell.cli.main", *map(str, command)],
            env={**environment(), "OMP_NUM_THREADS": "1"}, timeout_s=240,
        )  # fmt: skip

    one = run("one", [sys.executable], accumulate=2)
    assert one.returncode == 0, one.stderr
    # torch's own launcher; accelerate's sets the same variables.
    two = run("two", torchrun(2), accumulate=1)
    assert two.returncode == 0, two.stderr
    assert len(two.stdout.strip().splitlines()) == len(one.stdout.strip().splitlines())  # one of the two speaks
    found = [
        [json.loads(x) for x in (tmp_path / name / "log.jsonl").read_text().splitlines()] for name in ("one", "two")
    ]
    losses = [[line["loss"] for line in log] for log in found]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-3), "nothing was learned, so nothing was compared"
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-5)
    record = json.loads((tmp_path / "two" / "record.json").read_text())
    assert record["num_processes"] == 2
