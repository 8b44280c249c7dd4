"""Kernels for ARM under an emulator: the bits of AVX2 on this machine."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell.kernels import build, native
from tests.kernels.emulator import At, Call, compiled, emulated, needs_emulator

F32, BF16, Q8, Q8M, Q4, Q4M, Q4K, Q8K, Q8S, Q4N, Q4X, Q4E, Q2K, Q3S = range(14)
MINIMUM, LEVELS, HALVES = (Q8M, Q4M, Q4K, Q8K, Q2K), (Q4N, Q4X, Q4E), (Q8S, Q2K, Q3S)
BY_256 = (Q4K, Q8K, Q4X, *HALVES)
BITS = {Q2K: 2, Q3S: 3, **dict.fromkeys((Q4, Q4M, Q4K, *LEVELS), 4)}
CPUS = {"neon": "cortex-a53", "neon_dot": "cortex-a76", "neon_i8mm_bf16": "max"}
"""Variants, and CPUs that have what they need."""


def a_byte(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def halves(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float16 numbers, some of them subnormal, as bytes."""
    numbers = torch.randn(shape, generator=generator) * torch.tensor([1e-1, 1e-6])[a_byte(0, 2, shape, generator).int()]
    return numbers.half().view(torch.uint8)


def weights(kind: int, rows: int, columns: int, generator: torch.Generator) -> tuple[bytes, int]:
    """Random weights as ``native/quant.h`` lays them out, and the bytes of a row."""
    if kind in (F32, BF16):
        plain = torch.randn(rows, columns, generator=generator).to(torch.float32 if kind == F32 else torch.bfloat16)
        return plain.view(torch.uint8).numpy().tobytes(), columns * plain.itemsize
    unit, bits = 256 if kind in BY_256 else 64, BITS.get(kind, 8)
    shape = (-(-rows // 16), -(-columns // unit))
    if kind == Q4E:
        side = [a_byte(118, 136, (*shape, 32), generator)]
        side[0][:, ::5, :9] = a_byte(0, 3, (1,), generator)  # subnormal powers
    elif kind in BY_256:
        steps = a_byte(0, 256, (*shape, 256 if kind != Q4X else 128), generator)
        side = [halves((*shape, 32), generator), steps]
    else:
        side = [halves((*shape, 64 if kind in MINIMUM else 32), generator)]
    codes = a_byte(0, 64 if kind in (Q8M, Q8K) else 256, (*shape, unit * 2 * bits), generator)
    tiles = torch.cat([*side, codes], -1)
    return tiles.numpy().tobytes(), tiles.shape[-1] * shape[1] // 16


def product(kind: int, rows: int, columns: int, width: int, threads: int, special: bool = False) -> Call:
    """x [width, columns] times a matrix [rows, columns]; of formats with scales in steps columns are whole units."""
    columns = -(-columns // 256) * 256 if kind in BY_256 else columns
    generator = torch.Generator().manual_seed(1000 * columns + 10 * kind)
    data, row_bytes = weights(kind, rows, columns, generator)
    x = torch.randn(16, columns, generator=generator)
    x[0, :32], x[-1, columns // 2] = 0.0, 1e4
    if special:
        x[0, 1], x[1, 2], x[2, 3], x[3, 4:] = float("nan"), float("inf"), 1e-40, 1e-39
    matrix = b"".join(value.to_bytes(8, "little") for value in (0, 0, kind, columns, row_bytes))
    return Call(
        "foretell_product",
        [bytes(4 * width * (rows + 3)), matrix, data, x[:width].contiguous().view(torch.uint8).numpy().tobytes()],
        [At(1), rows, At(3), width, At(0), rows + 3, threads],
        [(1, 0, 2, 0)],
    )


@pytest.fixture(scope="module")
def here() -> ctypes.CDLL:
    """The kernels of AVX2 with all products."""
    library, reason = native._library("avx2") if "avx2" in build.cpu_flags() else (None, "this CPU has no AVX2")
    if library is None:
        pytest.skip(str(reason))
    for number, made in enumerate(build.load_libraries(build.PRODUCTS, "avx2")):
        library.foretell_use(ctypes.c_int64(number), native.address_in(made, "foretell_products"))
    return library


def numbers(result: bytes) -> Tensor:
    """Their bits; of any that is not finite the same (of infinite activations int8 have lost the sign)."""
    made = torch.frombuffer(bytearray(result), dtype=torch.float32).clone()
    made[~made.isfinite()] = float("nan")
    return made.view(torch.int32)


def check(calls: list[Call], variant: str, here: ctypes.CDLL, directory: Path) -> None:
    found = emulated(calls, compiled(("native", *build.PRODUCTS), variant), CPUS[variant], directory)
    for call, (back, made) in zip(calls, found, strict=True):
        expected_back, expected = call.run(here)
        assert back == expected_back == 0
        differing = (numbers(made) != numbers(expected)).sum().item()
        assert differing == 0, f"{call.function} {call.arguments} of {call.buffers[1]!r}: {differing} numbers differ"


def calls() -> Iterator[Call]:
    for kind in range(14):
        for width in range(1, 17):
            yield product(kind, 53, 576 + 40 * (kind < Q8), width, 1 + width % 2)
        for rows, columns in ((1, 1), (17, 33), (101, 1100)):
            for width in (1, 3):
                yield product(kind, rows, columns, width, 1)
        yield product(kind, 20, 72, 5, 1, special=True)


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("variant", CPUS)
def test_products_have_the_bits_of_avx2(
    variant: str, here: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format, at 1 to 16 rows, at sizes with parts of lines, units and tiles, and of numbers that are none."""
    monkeypatch.setenv("CC", "aarch64-linux-gnu-gcc")
    check([*calls()], variant, here, tmp_path)
