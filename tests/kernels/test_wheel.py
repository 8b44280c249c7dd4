"""A wheel that brings compiled kernels: built, unpacked and used where there is no compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

from foretell.kernels import build
from foretell.kernels.cpu import machine
from tests.processes import quick_compiler

ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
@pytest.mark.skipif(int(setuptools.__version__.split(".")[0]) < 77, reason="needs setuptools 77")
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src" / "foretell", tree / "src" / "foretell", ignore=shutil.ignore_patterns("bundled"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    # What is built, packed and loaded is asked here, not how fast it is.
    environment = {**os.environ, "FORETELL_PREBUILD": "1", "CC": str(quick_compiler(tmp_path))}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
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
