"""Threads without an OpenMP runtime: regions whose parts add up, and the bits of passes and products."""

import shutil
import subprocess
from pathlib import Path

import pytest

from foretell.kernels import build, native
from foretell.model.llama.run.native import NativeModel
from tests.kernels.emulator import emulated
from tests.kernels.test_arm import BF16, F32, Q4, Q8, numbers, passes, product

COMPILERS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name} here"))
    for name in ("gcc", "clang")
]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_regions_run_on_the_pool(compiler: str, tmp_path: Path) -> None:
    """Of several callers at once too, within each other, and in a child of a process that had threads."""
    pool, program = Path(build.load_library("pool")._name), tmp_path / "regions"
    source = Path(__file__).with_name("regions.c")
    made = tmp_path / "regions.o"
    subprocess.run([compiler, "-O1", "-fopenmp", "-c", str(source), "-o", str(made)], check=True)
    subprocess.run(
        [compiler, str(made), str(pool), "-pthread", f"-Wl,-rpath,{pool.parent}", "-o", str(program)], check=True
    )
    ended = subprocess.run([str(program), "100"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "fine\n", ended.stderr


def test_where_torch_has_no_runtime_the_pool_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = native.variant()
    if variant is None:
        pytest.skip("there are no native passes here")
    asked: list[str] = []
    monkeypatch.setattr(native, "openmp_runtime", lambda: None)
    monkeypatch.setattr(native, "load_library", lambda name: asked.append(name) or build.load_library(name))
    lib, reason = native._library.__wrapped__(variant)
    assert lib is not None, reason
    assert asked == ["pool"]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_passes_and_products_have_the_bits_of_openmp(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a compiler of each kind of calls."""
    variant = native.variant()
    if variant is None:
        pytest.skip("there are no native passes here")
    calls = [product(kind, 101, 300, width, 3) for kind in (F32, Q4) for width in (1, 5)]
    monkeypatch.setattr(NativeModel, "_threads", lambda *_, **__: 3)  # the scratch has room for as many as are used
    calls += passes()
    names = ["native", *(build.PRODUCTS[kind] for kind in (F32, BF16, Q8, Q4))]
    here = build.load_libraries(names, variant)
    for name, made in zip(names[1:], here[1:], strict=True):
        here[0].foretell_use(build.PRODUCTS.index(name), native.address_in(made, "foretell_products"))
    monkeypatch.setenv("CC", compiler)
    threads = next(build._libraries("pool", "baseline"))
    libraries = {name: next(build._libraries(name, variant)) for name in names}
    found = emulated(calls, libraries, "", tmp_path, threads, compiler)
    for i, (call, (back, result)) in enumerate(zip(calls, found, strict=True)):
        expected_back, expected = call.run(here[0])
        assert back == expected_back == 0
        assert expected != call.buffers[0], "it wrote nothing"
        assert numbers(result).equal(numbers(expected)), f"call {i}, {call.function}"
