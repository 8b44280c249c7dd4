"""The wheel for ARM, built here and run there under an emulator: the texts of this machine."""

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.arm_root import Unavailable, command, install, system
from tests.kernels.emulator import COMPILER, needs_emulator
from tests.kernels.test_arm import CPUS
from tests.kernels.test_wheel import NEW_SETUPTOOLS, ROOT, built_in
from tests.processes import quick_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_emulator, NEW_SETUPTOOLS]
HEADS = ("eagle1", "eagle3", "medusa", "dflash")
ARM64 = 183  # EM_AARCH64
SCRIPT = """
import sys
from foretell.cli.main import main
for arguments in {runs}:
    sys.argv = ["foretell", "generate", "def add(a, b):", "--target", "bundled", "--seed", "5", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    print("\\n--", flush=True)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed."""
    try:
        system()
    except Unavailable as reason:
        pytest.skip(f"no system for ARM: {reason}")
    directory = tmp_path_factory.mktemp("arm")
    cross = {"FORETELL_PREBUILD": "1", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    environment = {**os.environ, **cross, "CC": str(quick_compiler(directory, COMPILER, "-O1"))}
    wheel = built_in(directory, environment, ignore=shutil.ignore_patterns("__pycache__"))
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    install([str(wheel)], directory / "site")
    package = directory / "site" / "foretell"
    for head in HEADS:  # a wheel leaves them out
        (package / "bundled" / head).symlink_to(ROOT / "src" / "foretell" / "bundled" / head)
    return directory / "site"


def test_what_is_compiled_is_for_arm(site: Path) -> None:
    libraries = [*site.glob("foretell/kernels/prebuilt/*.so")]
    assert {struct.unpack_from("<H", path.read_bytes(), 18) for path in libraries} == {(ARM64,)}
    assert {path.name.split("-")[1] for path in libraries} == {*CPUS, "baseline"}


RUNS = {
    # torch's wheel dies at import on the CPUs that have no more than this: its own instructions are ARMv8.2's.
    "neon": [[]],
    "neon_dot": [["--temperature", "0", "--weights", "int4"], ["--weights", "bf16", "--method", "ngram"]],
    "neon_i8mm": [["--weights", "int8"], *(["--method", head] for head in HEADS)],
}


@pytest.mark.parametrize("variant", ["neon_i8mm", "neon_dot", pytest.param("neon", marks=pytest.mark.exhaustive)])
def test_generate_writes_what_it_writes_here(variant: str, site: Path, tmp_path: Path) -> None:
    """Natively, at temperature 1 but for one: text, steps and guesses."""
    cpu, asked = CPUS[variant], {"FORETELL_CACHE": str(tmp_path)}
    if variant == "neon":
        cpu, asked["FORETELL_ISA"] = CPUS["neon_dot"], variant
    runs = RUNS[variant]
    script = SCRIPT.format(runs=[[*run, "--max-new-tokens", "8"] for run in runs])
    there = said([*command(cpu, site), "-c", script], asked, tmp_path)
    here = said([sys.executable, "-c", script], {"PYTHONPATH": str(ROOT / "src")}, tmp_path)
    assert there == here
    assert len(there) == 2 * len(runs)
    assert all(line.startswith("native ") for line in there[len(runs) :])
    assert not [*tmp_path.rglob("*.so")], "something was compiled"


def said(parts: list[str], asked: dict[str, str], directory: Path) -> list[str]:
    """The texts, then what is said of each but for its times."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", **asked}
    ended = subprocess.run(
        parts, env=environment, cwd=directory, capture_output=True, text=True, timeout=550, check=False
    )
    assert ended.returncode == 0, ended.stderr[-500:]
    lines = [line for line in ended.stderr.splitlines() if " tokens in " in line]
    return [
        *ended.stdout.split("\n--\n")[:-1],
        *(re.sub(r" in [\d.]+ s · [\d.]+ tokens/s", "", line) for line in lines),
    ]
