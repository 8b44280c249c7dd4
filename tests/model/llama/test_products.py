"""Products with bf16 matrices, but by AMX: sums in one order, whatever the CPU's instructions, rows, threads and sizes."""

from math import nan

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from foretell.kernels.native import variant
from tests.model.llama import quantised as twin
from tests.model.llama.test_amx import product

pytestmark = pytest.mark.skipif(variant() in (None, "amx"), reason=f"kernels run as {variant()}")
WIDTHS = (*range(1, 15), 24, 25, 40)
"""Rows of activations: tiles of every height, and several of them."""


def in_order(weight: Tensor, x: Tensor) -> Tensor:
    """The order of ``linear.h`` in torch: 16 lanes, each of pairs of k, the odd element before the even one; then lanes i
    and i + 8, i + 4, i + 2, i + 1."""
    steps = -(-weight.shape[1] // 32)
    w, a = (pad(part, (0, 32 * steps - part.shape[1])) for part in (weight.float(), x.bfloat16().float()))
    w, a = w.view(1, len(w), steps, 16, 2), a.view(len(a), 1, steps, 16, 2)
    lanes = torch.zeros(len(x), len(weight), 16)
    for step in range(steps):
        for odd in (1, 0):
            parts = (part[:, :, step, :, odd].expand_as(lanes) for part in (a, w))
            lanes = twin.fma(*parts, lanes)
    while lanes.shape[-1] > 1:
        lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return lanes[..., 0]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (101, 40),  # a block of rows and some, a line and a part of one
        (50, 576),
        (7, 8),
        (30, 1000),  # of more than eight rows in chunks
        (26, 2100),  # of three rows in chunks, the last behind whole lines
        (60, 22500),  # more than stays widened, even of one group
    ],
)
def test_sums_are_in_the_order_that_is_written_down(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    x = torch.randn(max(WIDTHS), columns, generator=generator)
    expected = in_order(weight, x)
    for width in WIDTHS:
        assert torch.equal(product(weight, x[:width], threads=1 + width % 2), expected[:width]), width
    assert torch.equal(product(weight, x[17:18])[0], expected[17])
    exact = x.bfloat16().double() @ weight.double().T
    assert (expected - exact).abs().max() < 1e-6 * columns**0.5 * exact.abs().max()


def test_more_rows_than_stay_widened_have_the_same_bits() -> None:
    """500 rows of 600: the weights are read twice."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 600, generator=generator).bfloat16()
    x = torch.randn(500, 600, generator=generator)
    made = product(weight, x, threads=2)
    for start in (0, 7, 430, 499):
        assert torch.equal(product(weight, x[start : start + 1])[0], made[start])


@pytest.mark.parametrize("columns", [8, 40, 72])
def test_weights_beside_a_matrix_are_not_read_into_it(columns: int) -> None:
    """A line that passes a row's end would read the next row, or what lies behind the matrix: NaN times zero is NaN."""
    memory = torch.full((19, columns), nan, dtype=torch.bfloat16)
    memory[:17] = 1.0
    weight = memory[:17]
    for width in WIDTHS:
        made = product(weight, torch.ones(width, columns))
        assert torch.equal(made, torch.full((width, 17), float(columns)))


def test_control_another_order_has_other_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(20, 576, generator=generator).bfloat16()
    x = torch.randn(5, 576, generator=generator)
    places = torch.arange(576).view(-1, 2).flip(1).reshape(-1)  # the even element first
    assert not torch.equal(product(weight, x), in_order(weight[:, places].contiguous(), x[:, places].contiguous()))
