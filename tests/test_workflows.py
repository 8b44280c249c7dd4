"""What continuous integration runs is there, on every system that wheels are built for."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SYSTEMS = {
    "ubuntu-24.04": "manylinux_x86_64",
    "ubuntu-24.04-arm": "manylinux_aarch64",
    "macos-15": "macosx_arm64",
    "windows-2025": "win_amd64",
}


def workflow(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize(("name", "job"), [("tests", "test"), ("wheels", "compiled")])
def test_all_four_systems_are_asked(name: str, job: str) -> None:
    assert workflow(name)["jobs"][job]["strategy"]["matrix"]["system"] == list(SYSTEMS)


def test_a_wheel_is_built_for_each() -> None:
    recipe = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    assert recipe["build"].split() == [f"cp311-{platform}" for platform in SYSTEMS.values()]


@pytest.mark.parametrize("name", ["tests", "wheels"])
def test_steps_name_what_is_there(name: str) -> None:
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = "\n".join(step.get("run", "") for step in steps)
    assert set(re.findall(r"^make (\S+)", text, flags=re.MULTILINE)) <= rules
    assert all((ROOT / file).is_file() for file in re.findall(r"-c (\S+)", text))
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"]) for step in steps if "uses" in step)
    assert len(steps) >= 5


def test_windows_runs_the_tests_as_make_does() -> None:
    (found,) = re.findall(
        r"^PYTEST = \$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE
    )
    commands = [step["run"] for step in workflow("tests")["jobs"]["test"]["steps"] if "run" in step]
    assert "python " + found.replace("$(PROCESSES)", "2") in commands[-1].splitlines()
