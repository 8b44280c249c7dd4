"""Kernels for ARM under an emulator: the bits of AVX2 on this machine."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.noise import token_table
from foretell.kernels import build, native
from foretell.kernels.cpu import cpu_flags
from foretell.model.llama.run.native import NativeModel
from tests.kernels.emulator import COMPILER, At, Call, compiled, emulated, needs_emulator, recorded
from tests.model.llama.family import BUSHY, CAPACITY, VOCABULARY, make_model, prefill, run_tree
from tests.processes import quick_compiler

F32, BF16, Q8, Q8M, Q4, Q4M, Q4K, Q8K, Q8S, Q4N, Q4X, Q4E, Q2K, Q3S, Q2T, Q3I, Q3J, Q4I, Q4J = range(19)
MINIMUM, LEVELS, HALVES = (Q8M, Q4M, Q4K, Q8K, Q2K), (Q4N, Q4X, Q4E, Q4I, Q4J), (Q8S, Q2K, Q3S)
STEPS = {Q4X: 128, Q2T: 0, **dict.fromkeys((Q3I, Q3J, Q4I, Q4J), 128), **dict.fromkeys((Q4K, Q8K, *HALVES), 256)}
BITS = {Q2K: 2, Q2T: 2, **dict.fromkeys((Q3S, Q3I, Q3J), 3), **dict.fromkeys((Q4, Q4M, Q4K, *LEVELS), 4)}
CPUS = {"neon": "cortex-a53", "neon_dot": "cortex-a76", "neon_i8mm": "max"}
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
    unit, bits = 256 if kind in STEPS else 64, BITS.get(kind, 8)
    shape = (-(-rows // 16), -(-columns // unit))
    if kind == Q4E:
        side = [a_byte(118, 136, (*shape, 32), generator)]
        side[0][:, ::5, :9] = a_byte(0, 3, (1,), generator)  # subnormal powers
    elif kind in STEPS:
        numbers = 16 if kind > Q3S else 32  # the newer have no room for a second float16 a row
        side = [halves((*shape, numbers), generator), a_byte(0, 256, (*shape, STEPS[kind]), generator)]
    else:
        side = [halves((*shape, 64 if kind in MINIMUM else 32), generator)]
    codes = a_byte(0, 64 if kind in (Q8M, Q8K) else 256, (*shape, unit * 2 * bits), generator)
    tiles = torch.cat([*side, codes], -1)
    return tiles.numpy().tobytes(), tiles.shape[-1] * shape[1] // 16


def product(kind: int, rows: int, columns: int, width: int, threads: int, special: bool = False) -> Call:
    """x [width, columns] times a matrix [rows, columns]; of formats with scales in steps columns are whole units."""
    columns = -(-columns // 256) * 256 if kind in STEPS else columns
    generator = torch.Generator().manual_seed(1000 * columns + 10 * kind)
    data, row_bytes = weights(kind, rows, columns, generator)
    x = torch.randn(16, columns, generator=generator)
    x[0, :32], x[-1, columns // 2] = 0.0, 1e4
    if special:
        x[0, 1], x[1, 2], x[2, 3], x[3, 4:] = float("nan"), float("inf"), 1e-40, 1e-39
    matrix = b"".join(value.to_bytes(8, "little") for value in (0, 0, kind, columns, row_bytes))
    return Call(
        "foretell_product",
        [b"\xff" * (4 * width * (rows + 3)), matrix, data, x[:width].contiguous().view(torch.uint8).numpy().tobytes()],
        [At(1), rows, At(3), width, At(0), rows + 3, threads],
        [(1, 0, 2, 0)],
    )


@pytest.fixture(scope="module")
def here() -> ctypes.CDLL:
    """The kernels of AVX2."""
    library, reason = native._library("avx2") if "avx2" in cpu_flags() else (None, "this CPU has no AVX2")
    if library is None:
        pytest.skip(str(reason))
    return library


@pytest.fixture
def cross(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory; behind it libraries are compiled for ARM, by ``cc()``."""
    quick = "FORETELL_PLANTED_BUG" in os.environ
    monkeypatch.setenv("CC", str(quick_compiler(tmp_path, COMPILER)) if quick else COMPILER)
    return tmp_path


def numbers(result: bytes) -> Tensor:
    """Their bits; of any that is not finite the same (of infinite activations int8 have lost the sign)."""
    made = torch.frombuffer(bytearray(result), dtype=torch.float32).clone()
    made[~made.isfinite()] = float("nan")
    return made.view(torch.int32)


def check(calls: list[Call], formats: list[int], variant: str, here: ctypes.CDLL, directory: Path) -> None:
    """The calls, with products of these formats, on both machines."""
    names = [build.PRODUCTS[number] for number in formats]
    found = emulated(calls, compiled(["native", *names], variant), CPUS[variant], directory)
    os.environ.pop("CC")
    for number, made in zip(formats, build.load_libraries(names, "avx2"), strict=True):
        here.foretell_use(ctypes.c_int64(number), native.address_in(made, "foretell_products"))
    for i, (call, (back, result)) in enumerate(zip(calls, found, strict=True)):
        expected_back, expected = call.run(here)
        assert back == expected_back == 0
        assert expected != call.buffers[0], "it wrote nothing"
        differing = (numbers(result) != numbers(expected)).sum().item()
        assert differing == 0, f"call {i}, {call.function} {call.arguments}: {differing} numbers differ"


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize("variant", CPUS)
@pytest.mark.parametrize("kind", range(19), ids=build.PRODUCTS)
def test_products_have_the_bits_of_avx2(kind: int, variant: str, here: ctypes.CDLL, cross: Path) -> None:
    """At 1 to 16 rows, at sizes with parts of lines, units and tiles, and of numbers that are none."""
    calls = [product(kind, 53, 576 + 40 * (kind < Q8), width, 1 + width % 2) for width in range(1, 17)]
    calls += [product(kind, *size, width, 1) for size in ((1, 1), (17, 33), (101, 1100)) for width in (1, 3)]
    check([*calls, product(kind, 20, 72, 5, 1, special=True)], [kind], variant, here, cross)


def passes() -> list[Call]:
    """Two prompts, then trees behind them: norms, rotations, attention, activations and mixtures; heads of 16 and of 80
    numbers."""
    made: list[Call] = []
    for kind, dtype, held, kv, sizes in (
        ("llama", torch.float32, "auto", "auto", {"head_dim": 80}),
        ("gemma2", torch.bfloat16, "auto", "auto", {}),
        ("mistral-window", torch.bfloat16, "int4", "auto", {}),
        ("qwen3moe", torch.float32, "int8", "int8", {}),
        ("llama-mha-bias", torch.bfloat16, "auto", "int8", {"head_dim": 80}),
    ):
        model = NativeModel.from_hf(make_model(kind, **sizes).to(dtype), weights=held, kv=kv)

        def record(*arguments: Any, forward: Any = model.native.forward) -> int:
            call = recorded("foretell_forward", arguments, arguments[23] or arguments[19])
            # What is compared may lie where an earlier pass wrote the same numbers: it begins as numbers that are none.
            made.append(call._replace(buffers=[b"\xff" * len(call.buffers[0]), *call.buffers[1:]]))
            return int(forward(*arguments))

        model.native.forward = record
        cache = model.new_cache(2, CAPACITY)
        tokens = torch.randint(VOCABULARY, (2, 19), generator=torch.Generator().manual_seed(1))
        length = prefill(model, cache, [tokens[0].tolist(), tokens[1, :16].tolist()], 19)
        run_tree(model, cache, tokens[:, : BUSHY.shape[1]], BUSHY, length)
    return made


@needs_emulator
@pytest.mark.slow
@pytest.mark.skipif(native.variant() is None, reason="there are no native passes to record")
@pytest.mark.parametrize("variant", CPUS)
def test_passes_have_the_bits_of_avx2(variant: str, here: ctypes.CDLL, cross: Path) -> None:
    environment = os.environ.pop("CC")
    calls = passes()
    assert len(calls) == 10
    os.environ["CC"] = environment
    check(calls, [F32, BF16, Q8, Q4], variant, here, cross)


@needs_emulator
@pytest.mark.slow
def test_races_have_the_winners_of_this_machine(cross: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, size = 40, 1003
    generator = torch.Generator().manual_seed(2)
    probs = torch.randn(rows, size, generator=generator).mul(3).softmax(-1)
    probs[1, ::3], probs[2] = 0.0, 1 / size
    keys = torch.randint(2**62, (rows,), generator=generator)
    bytes_of = [
        part.view(torch.uint8).numpy().tobytes() for part in (probs, keys, token_table(size, torch.device("cpu")))
    ]
    call = Call("foretell_race", [bytes(8 * rows), *bytes_of], [rows, size, At(1), At(2), At(3), At(0)])
    ((_, made),) = emulated([call], compiled(["race"], "baseline"), "cortex-a53", cross)
    monkeypatch.delenv("CC")
    _, expected = call.run(build.load_library("race"))
    assert made == expected
    assert len(set(torch.frombuffer(bytearray(made), dtype=torch.int64).tolist())) > rows // 2


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "cpu"), [("neon_i8mm", "neoverse-n1"), ("neon_dot", "cortex-a53")])
def test_control_a_cpu_without_the_instructions_stops(variant: str, cpu: str, cross: Path) -> None:
    """What the equalities above rest on: each variant has instructions of its own, and the emulator tells CPUs apart."""
    with pytest.raises(AssertionError, match=f"{cpu}: -4 "):  # SIGILL
        emulated([product(Q8, 16, 64, 1, 1)], compiled(["native", "product_q8"], variant), cpu, cross)
