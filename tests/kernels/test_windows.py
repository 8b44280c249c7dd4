"""Kernels for Windows, by a cross compiler and wine: the bits of this machine."""

import shutil
from pathlib import Path

import pytest

from foretell.kernels import build, native
from foretell.kernels.cpu import cpu_flags
from tests.kernels.emulator import WINDOWS, compiled, emulated
from tests.kernels.test_arm import BF16, F32, Q4, Q8, numbers, passes, product

missing = [name for name in (WINDOWS, "wine") if shutil.which(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing), reason=f"no {' and no '.join(missing)} here")
@pytest.mark.skipif("avx2" not in cpu_flags(), reason="this CPU has no AVX2")
def test_passes_and_products_have_the_bits_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, which are the pool's there."""
    formats = (F32, BF16, Q8, Q4)
    calls = [product(kind, 101, 600, width, 3) for kind in formats for width in (1, 5, 16)] + passes()
    names = [build.PRODUCTS[kind] for kind in formats]
    here, reason = native._library("avx2")
    assert here is not None, reason
    for kind, made in zip(formats, build.load_libraries(names, "avx2"), strict=True):
        here.foretell_use(kind, native.address_in(made, "foretell_products"))
    monkeypatch.setenv("CC", WINDOWS)
    found = emulated(calls, compiled(["native", *names], "avx2"), "", tmp_path, compiler=WINDOWS)
    for i, (call, (back, result)) in enumerate(zip(calls, found, strict=True)):
        expected_back, expected = call.run(here)
        assert back == expected_back == 0
        assert expected != call.buffers[0], "it wrote nothing"
        assert numbers(result).equal(numbers(expected)), f"call {i}, {call.function}"
