"""AMX: for quantised matrices the bits of the kernels without it, for bf16 those of its own order of sums."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan

import pytest
import torch
from torch import Tensor

from foretell.core.tree import layout
from foretell.kernels import structures
from foretell.kernels.functions import native_functions
from foretell.kernels.native import need, variant
from foretell.model.llama import shape as llama
from foretell.model.llama.read.matrices import FORMAT_OF
from foretell.model.llama.run.native import NativeModel
from tests.model.llama import quantised as twin
from tests.model.llama.family import BUSHY, make_model, prefill
from tests.model.llama.test_quantise import KINDS, SIZES, Held, Requantised, columns_of, file_rows

pytestmark = pytest.mark.skipif(variant() != "amx", reason=f"kernels run as {variant()}")


@contextmanager
def amx_from(rows: int) -> Iterator[None]:
    """AMX for quantised matrices from so many rows on; 0: never."""
    before = native_functions().amx_rows(rows)
    try:
        yield
    finally:
        native_functions().amx_rows(before)


def inputs(rows: int, columns: int) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    x[0, :32], x[1, 3] = 0.0, 1e4
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_product_has_the_same_bits_with_amx_and_without(kind: str) -> None:
    """At every width up to 40 and beyond a block of rows, with a tile that is not full, on one thread and two."""
    columns = columns_of(kind) + (256 if columns_of(kind) % 256 == 0 else 96)  # no whole number of chunks of k
    held = Held(FORMAT_OF[kind], kind, file_rows(kind, 90, columns), columns)
    x = inputs(290, columns)
    with amx_from(0):
        expected = held.product(x)
    with amx_from(1):
        for rows in (*range(1, 41), 256, 257, 290):
            assert torch.equal(held.product(x[:rows], threads=1 + rows % 2), expected[:rows]), rows
        assert torch.equal(held.product(x[37:38])[0], expected[37])
        assert torch.equal(held.product(x[200:233]), expected[200:233])


def test_the_switch_reaches_the_kernel() -> None:
    """What the comparison rests on: AMX's sums are taken from the tile's bytes, so both must see a changed code."""
    held, x = Held("Q4", torch.float32, torch.randn(16, 64), 64), inputs(16, 64)
    before = native_functions().amx_rows(0)
    assert native_functions().amx_rows(before) == 0
    seen = []
    for rows in (0, 1):
        with amx_from(rows):
            held.bytes[64 + 12] ^= 0x10
            seen.append(held.product(x))
            held.bytes[64 + 12] ^= 0x10
            assert not torch.equal(held.product(x)[:, 3], seen[-1][:, 3])
    assert torch.equal(*seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_models_ragged_trees_have_the_same_bits(dtype: torch.dtype) -> None:
    module = make_model("llama", **SIZES)
    model = NativeModel(llama.read_shape(module.config), Requantised(module, KINDS), dtype=dtype, name="x")
    seen = []
    for rows in (0, 1):
        with amx_from(rows):
            cache = model.new_cache(2, 64)
            length = prefill(model, cache, [list(range(23)), [5, 3]], chunk=16)
            tokens = torch.randint(0, 61, BUSHY.shape, generator=torch.Generator().manual_seed(1))
            seen.append(model.forward(tokens, layout(BUSHY, length, 64), cache).logits)
            seen[-1] = seen[-1][:, :3]  # nodes that both rows have
    assert torch.equal(*seen)


# ------------------------------------------------------------------------------------------------ bf16 ----------------


def product(weight: Tensor, x: Tensor, threads: int = 1) -> Tensor:
    """[rows, out] float32 by the kernels; weight [out, columns] bf16, x float32."""
    out = torch.full((len(x), len(weight)), nan)
    matrix = structures.Matrix.of(weight)
    need([matrix.format])
    call = native_functions().product
    address, rows = ctypes.addressof(matrix), len(weight)
    assert call(address, rows, x.data_ptr(), len(x), out.data_ptr(), rows, threads) == 0
    return out


def in_order(weight: Tensor, x: Tensor) -> Tensor:
    """The order of ``amx_bf16.h`` in torch: of each 32 of k even ones, odd ones, both sums, then onto the accumulator."""
    w, a = weight.float(), x.bfloat16().float()
    columns = -(-w.shape[1] // 32) * 32
    w, a = (torch.nn.functional.pad(part, (0, columns - part.shape[1])) for part in (w, a))
    acc = torch.zeros(len(a), len(w))
    for k in range(0, columns, 32):
        halves = []
        for odd in (0, 1):
            total = torch.zeros(len(a), len(w))
            for i in range(k + odd, k + 32, 2):
                total = twin.fma(a[:, i, None].expand_as(total), w[None, :, i].expand_as(total), total)
            halves.append(total)
        acc = acc + (halves[0] + halves[1])
    return acc


@pytest.mark.parametrize(("rows", "columns"), [(50, 160), (9, 72), (33, 32), (16, 20)])
def test_bf16_sums_are_in_the_order_that_is_written_down(rows: int, columns: int) -> None:
    """Whole and partial tiles and steps, at one row and at any number."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    x = torch.randn(37, columns, generator=generator)
    expected = in_order(weight, x)
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33, 37):
        assert torch.equal(product(weight, x[:width], threads=1 + width % 2), expected[:width]), width
    for row in (3, 36):
        assert torch.equal(product(weight, x[row : row + 1])[0], expected[row])
    exact = x.bfloat16().double() @ weight.double().T
    assert (expected - exact).abs().max() < 1e-6 * columns**0.5 * exact.abs().max()


def test_bf16_weights_beside_a_matrix_are_not_read_into_it() -> None:
    """A step that passes a row's end would read the next row, or what lies behind the matrix: NaN times zero is NaN."""
    memory = torch.full((19, 40), nan, dtype=torch.bfloat16)
    memory[:17] = 1.0
    memory[5] = nan
    out = product(memory[:17], torch.ones(3, 40))
    assert torch.isnan(out[:, 5]).all()
    assert (torch.cat((out[:, :5], out[:, 6:]), 1) == 40.0).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_too_long_to_be_packed_by_16_have_the_same_bits(rows: int) -> None:
    columns = 65_568  # one step more than the packed rows hold
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(17, columns, generator=generator).bfloat16(),
        torch.randn(rows, columns, generator=generator),
    )
    out = product(weight, x)
    exact = x.bfloat16().double() @ weight.double().T
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    assert torch.equal(out[rows - 1], product(weight, x[rows - 1 : rows])[0])
