"""Wheels: one that brings compiled kernels, used where there is no compiler; and what is left out of all of them."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import setuptools

from foretell.kernels import build
from foretell.kernels.cpu import machine
from tests.processes import quick_compiler

ROOT = Path(__file__).parents[2]
NEW_SETUPTOOLS = pytest.mark.skipif(int(setuptools.__version__.split(".")[0]) < 77, reason="needs setuptools 77")
USE = """
from foretell.kernels import build, heads, native
for name, kernel in build.KERNELS.items():
    if "baseline" in kernel.variants:
        build.load_library(name)
lib, reason = native.library()
assert (lib is None) == (not {runs_native}), reason
if lib is not None:
    native.need(range(len(build.PRODUCTS)))
    assert heads.library()[0] is not None
"""


def built_in(directory: Path, environment: Mapping[str, str], ignore: Callable[..., set[str]]) -> Path:
    """A wheel of this tree, built in a copy."""
    tree = directory / "tree"
    shutil.copytree(ROOT / "src" / "foretell", tree / "src" / "foretell", ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*pip, str(directory), str(tree)], env=environment, check=True, capture_output=True, timeout=500)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.mark.slow
@NEW_SETUPTOOLS
@pytest.mark.parametrize(
    ("method", "said"), [("draft_model", "tokens/s"), ("eagle3", "wheels leave bundled/eagle3 out")]
)
def test_a_wheel_holds_what_the_first_run_needs(method: str, said: str, unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foretell", "generate", "def f(", "--target", "bundled", "--max-new-tokens", "4"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    run = subprocess.run(
        [*command, "--method", method], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert said in run.stderr
    assert (run.returncode == 0) == (method == "draft_model")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a pure wheel installs."""
    directory = tmp_path_factory.mktemp("wheel")
    wheel = built_in(directory, os.environ, ignore=shutil.ignore_patterns("__pycache__"))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 45e6, (
        "heads of Qwen take 23 MB, that of SmolLM2 5, the bundled target and its draft 13"
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


@pytest.mark.slow
@NEW_SETUPTOOLS
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    # What is built, packed and loaded is asked here, not how fast it is.
    environment = {**os.environ, "FORETELL_PREBUILD": "1", "CC": str(quick_compiler(tmp_path))}
    wheel = built_in(tmp_path, environment, ignore=shutil.ignore_patterns("bundled"))
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        built = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    here = build.variants_for(machine())
    assert len(built) == sum(len({*kernel.variants} & {*here}) for kernel in build.KERNELS.values())
    try:
        runs_native = build.variant_of("native") != ""
    except build.BuildError:
        runs_native = False
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "FORETELL_CACHE": str(tmp_path / "none")}
    code = USE.format(runs_native=runs_native)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)
    assert not (tmp_path / "none").exists()
