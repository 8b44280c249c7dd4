"""What continuous integration runs is there, on every system that wheels are built for."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import installs
from tests.installs import Install

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


def test_a_tag_is_the_one_act_of_a_release() -> None:
    """What is published was built on all systems, checked, and is of the version that the tag and the changes name."""
    jobs = workflow("wheels")["jobs"]
    assert set(jobs["check"]["needs"]) == {"compiled", "source"}
    assert (jobs["publish"]["needs"], jobs["publish"]["if"]) == ("check", "github.ref_type == 'tag'")
    assert [name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()] == ["publish"]
    assert workflow("wheels")["permissions"] == {"contents": "read"}
    assert all("secrets." not in str(job) for job in jobs.values()), "a trusted publisher needs no key"


@pytest.mark.parametrize(
    ("heading", "tag", "is_one"),
    [("0.1.0 (2026-12-01)", "v0.1.0", True), ("0.1.0 (unreleased)", "v0.1.0", False), ("0.1.0", "v0.2.0", False)],
)
def test_the_notes_of_a_release_are_its_part_of_the_changes(
    tmp_path: Path, heading: str, tag: str, is_one: bool
) -> None:
    steps = workflow("wheels")["jobs"]["check"]["steps"]
    (script,) = (step["run"] for step in steps if "CHANGELOG.md" in step.get("run", ""))
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## {heading}\n\nNew.\n\n## 0.0.9\n\nOld.\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env={**os.environ, "TAG": tag}, capture_output=True
    )
    assert (done.returncode == 0) == is_one
    if is_one:
        assert (tmp_path / "notes.md").read_text().strip() == "New."


# -- what may be installed: tests/installs.py resolves it, with the network ----------------------------------------


def test_a_user_s_first_command_is_run_by_both_before_anything_of_the_tests_is_installed() -> None:
    commands = [line.split("#")[0].strip() for line in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()]
    assert (
        commands.index("make demo") < commands.index("make test") < commands.index(".venv/bin/python tests/installs.py")
    )
    job = workflow("tests")["jobs"]["ordinary"]
    assert job["env"] == {"PIP_EXTRA_INDEX_URL": ""}  # the index's own torch
    assert set(job["strategy"]["matrix"]["system"]) == set(SYSTEMS)
    assert {"make demo"} < {step.get("run") for step in job["steps"]}


def test_every_extra_has_a_row_that_says_where_it_exists() -> None:
    assert sorted(installs.table()) == sorted(installs.extras())
    assert all(installs.table().values())
    assert installs.table()["vllm"] == ("Linux x86-64", "Linux ARM64")
    assert not installs.exists(Install(True, ("vllm",), (), False), "Windows")


def test_every_line_that_installs_is_found() -> None:
    found = installs.documented()
    for extras in ("serve", "ray", "docs", "dev", "dev,ray", "dev,docs"):
        assert Install(True, tuple(extras.split(",")), (), True) in found, extras
    assert found[Install(False, (), ("torch",), True)] == "README.md"
    assert found[Install(True, ("vllm",), (), False)] == "docs/vllm.md"
    assert Install(True, ("vllm",), (), True) not in found, "vLLM names its own versions"
    assert Install(True, (), (), True) in found
    text = "See `pip install 'foretell[docs]'`; beside torch."
    assert set(installs.read_command(text)) == {Install(True, ("docs",), (), False)}
    text = 'pip install -c constraints.txt ".[serve]"  # also [docs]; pip install "foretell[ray]"'
    assert {str(one) for one in installs.read_command(text)} == {
        "pip install -c constraints.txt .[serve]",
        "pip install -c constraints.txt .[docs]",
        "pip install -c constraints.txt .[ray]",
        "pip install .[ray]",
    }


def test_no_constraint_is_on_what_torch_chooses_by_itself() -> None:
    """On Linux the index's torch names one version of triton and of CUDA's libraries."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [re.split(r"[=<>; ]", line)[0].lower() for line in lines if line and not line.startswith("#")]
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.startswith(("nvidia", "cuda"))]
    assert [line for line in lines if line.startswith("triton")] == [
        "triton>=3.7,<=3.9.0; sys_platform == 'linux'"
    ]  # 3.7.1 is that of torch 2.13; where torch is built for CPUs alone, the tests run on 3.9.0


def test_a_resolver_that_finds_nothing_is_a_fault_and_an_index_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands alone is named, not what it was tried together with; and what resolves where it does not exist."""
    asked = {Install(True, (extra,), (), True): "pyproject.toml" for extra in ("serve", "ray", "vllm")}

    def resolve(install: Install, platform: str, *_: object) -> str | None:
        return "no solution" if "ray" in install.extras else None

    monkeypatch.setattr(installs, "resolve", resolve)
    faults = installs.Place("Windows", "3.14", tmp_path, None).faults(asked)
    where = "FAIL Windows, Python 3.14, pyproject.toml: pip install -c constraints.txt"
    assert faults == [
        f"{where} .[ray]: no solution",
        f"{where} .[vllm]: it resolves, and docs/install.md says that it does not exist there",
    ]
    monkeypatch.setattr(installs, "resolve", lambda *_: "error: Failed to fetch: dns error")
    monkeypatch.setattr(sys, "argv", ["installs.py"])
    assert installs.main() == 0
    assert capsys.readouterr().out.startswith("NOT CHECKED: the package index cannot be reached")
    monkeypatch.setattr(installs, "resolve", lambda *_: "no solution")
    assert installs.main() == 1


@pytest.mark.slow
def test_the_resolver_is_asked_for_one_platform_and_python(tmp_path: Path) -> None:
    """An index that is a folder of this machine: it has nothing, so all that is named is not found."""
    pytest.importorskip("uv")
    (tmp_path / "simple").mkdir()
    one = Install(True, ("serve",), ("torch",), True)
    said = installs.resolve(one, "macOS", "3.12", tmp_path / "cache", (tmp_path / "simple").as_uri())
    assert said is not None
    assert re.search(r"was not found|no versions|not found in the package registry", said), said
    version = [sys.executable, "-m", "uv", "--version"]
    assert subprocess.run(version, capture_output=True, check=True, text=True).stdout.startswith("uv ")
