"""Kinds of blocks at their edges, held packed: scales of every size, sums of every size, rows of every length."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.model.llama.read.matrices import FORMAT_OF, FORMATS
from tests.checkpoints.gguf.make import FEW_BITS, SCALES, put_scales
from tests.model.llama import quantised as twin
from tests.model.llama.quantised import E2M1_LEVELS, IQ4_LEVELS, LEVELS, Blocks, interleave, unpack
from tests.model.llama.test_quantise import BLOCK_KINDS, KINDS, Held, check_products, columns_of, file_rows, pytestmark

__all__ = ["pytestmark"]
NEWER = ("IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "MXFP4", *FEW_BITS)


def held_of(kind: str, rows: Tensor, columns: int) -> Held:
    return Held(FORMAT_OF[kind], kind, rows, columns)


def in_blocks(kind: str, rows: Tensor) -> Tensor:
    """[rows, blocks, bytes], the same memory."""
    return rows.view(len(rows), -1, BLOCK_KINDS[kind].size)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_every_size_are_read_as_the_library_reads_them(kind: str) -> None:
    """Zero, subnormal and largest ones, of either sign, to the last bit; of MXFP4 all powers, whose products overflow."""
    columns = 4096
    rows = file_rows(kind, 33, columns)
    blocks = in_blocks(kind, rows)
    for at in SCALES[kind] or (0,):
        finite = np.arange(0x7C00, dtype=np.uint16)
        every = np.concatenate((finite[:: 5 + 2 * at], finite[:9], finite[-3:]))
        chosen = torch.from_numpy(np.resize(np.concatenate((every, every | 0x8000)), blocks.shape[:2]))
        if kind == "IQ1_M":
            put_scales(kind, rows.view(-1, blocks.shape[2]).numpy(), chosen.numpy().flatten())
        elif SCALES[kind]:
            blocks[..., at : at + 2] = chosen.contiguous().view(torch.uint8).view(*chosen.shape, 2)
    if kind == "MXFP4":
        blocks[..., 0] = torch.arange(blocks.shape[0] * blocks.shape[1]).view(blocks.shape[:2]) % 256
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    found = held_of(kind, rows, columns).rows(torch.arange(33))
    assert torch.equal(found.view(torch.int32), torch.from_numpy(expected.copy()).view(torch.int32))
    assert not found.isnan().any()


@pytest.mark.parametrize("form", ["Q2T", "Q3I", "Q3J", "Q4I", "Q4J"])
def test_the_largest_sums_of_few_bits(form: str) -> None:
    """Rows of one code each, of every code there is, with the largest scale."""
    kind = next(kind for kind in FEW_BITS if FORMAT_OF[kind] == form)
    columns, count = 512, 4 if form == "Q2T" else len(LEVELS[form])
    codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, columns).contiguous()
    steps = torch.full((count, columns // (16 if form[:2] == "Q3" else 32)), 15, dtype=torch.uint8)
    blocks = Blocks(form, codes, torch.ones(count, 2).half(), scale_steps=None if form == "Q2T" else steps)
    held = held_of(kind, file_rows(kind, count, columns), columns)
    held.bytes[:] = interleave(blocks).flatten()
    x = torch.ones(9, columns)
    x[1], x[2, ::2], x[3] = -1, -1, torch.arange(columns) % 2 * 2.0 - 1
    expected = twin.product(blocks, x)
    for rows in (1, 2, 4, 9):
        assert torch.equal(held.product(x[:rows]), expected[:rows])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FEW_BITS])
def test_the_largest_sums_are_exact(kind: str) -> None:
    """Codes of all zeros and all ones (and of each level, where they have some) against activations of one size: what is
    added up in 16 bits somewhere must fit there."""
    columns = columns_of(kind)
    levels = LEVELS.get(FORMAT_OF[kind])
    fills = range(16) if levels else (0, 15)
    rows = file_rows(kind, 16, columns)
    blocks = in_blocks(kind, rows).clone()
    kept = [*range(blocks.shape[2])]
    start = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2, "Q5_0": 2, "Q5_1": 4, "IQ4_NL": 2, "IQ4_XS": 8, "MXFP4": 1, "Q6_K": 0}
    end = {"Q6_K": 192, "Q2_K": 80, "Q3_K": 96}
    codes = kept[start.get(kind, 16 if kind != "Q3_K" else 0) : end.get(kind)]
    for row, fill in enumerate(fills):
        blocks[row, :, codes] = fill * 17
    rows = blocks.flatten(1)
    x = torch.ones(9, columns)
    x[1], x[2, ::2], x[3] = -1, -1, torch.arange(columns) % 2 * 2.0 - 1
    expected = twin.product(unpack(kind, rows), x)
    held = held_of(kind, rows, columns)
    for count in (1, 2, 4, 9):
        assert torch.equal(held.product(x[:count]), expected[:count])


@pytest.mark.parametrize("columns", [32, 96, 160, 352])
@pytest.mark.parametrize("kind", ["IQ4_NL", "MXFP4"])
def test_rows_that_end_in_the_middle_of_a_unit(kind: str, columns: int) -> None:
    rows = file_rows(kind, 19, columns)
    blocks, held = unpack(kind, rows), held_of(kind, rows, columns)
    assert torch.equal(held.rows(torch.arange(19)), blocks.values()[:, :columns])
    check_products(held, blocks)


@pytest.mark.parametrize("kind", NEWER)
def test_long_rows_in_chunks_of_k(kind: str) -> None:
    columns = 17 * 256  # four rows of it are two chunks
    rows = file_rows(kind, 40, columns)
    blocks, held = unpack(kind, rows), held_of(kind, rows, columns)
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(2))
    expected = twin.product(blocks, x)
    for count in (1, 4, 8, 9):
        assert torch.equal(held.product(x[:count], threads=1 + count % 2), expected[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tile_by_themselves(kind: str) -> None:
    """1, 2, 15, 16 and 17 rows: what stands beside them in a tile is not theirs."""
    columns = columns_of(kind)
    rows = file_rows(kind, 17, columns)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(2))
    expected = twin.product(unpack(kind, rows), x)
    for count in (1, 2, 15, 16, 17):
        held = held_of(kind, rows[:count].contiguous(), columns)
        assert torch.equal(held.product(x), expected[:, :count])


@pytest.mark.parametrize("kind", NEWER)
def test_bytes_of_a_weight(kind: str) -> None:
    """No more than 1.06 times the file's; of kinds that number entries of a list, and of TQ1_0, more (docs/models.md)."""
    block, columns = BLOCK_KINDS[kind], 512
    more = {"IQ1": 2.12, "IQ2": 1.61, "IQ3": 1.41, "TQ1": 1.23}.get(kind[:3], 1.06)
    assert FORMATS[FORMAT_OF[kind]].row_bytes(columns) <= more * (columns // block.values) * block.size


def test_levels_are_the_librarys() -> None:
    assert gguf.quants.IQ4_NL.kvalues == IQ4_LEVELS
    assert gguf.quants.MXFP4.kvalues == E2M1_LEVELS
