"""Dequantisation in C against the gguf library's own, bit for bit, for every kind."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from foretell.kernels import dequantise as module
from foretell.kernels.dequantise import KINDS, can_dequantise, dequantise_into, dequantise_library
from tests.checkpoints.gguf.make import BLOCKS, K_BLOCKS, SCALES, put_scales, random_blocks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_kind_equals_the_library(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C and without a compiler, in one piece and in many; float16 scales of every exponent, zero and subnormal ones."""
    if dequantise_library() is None:
        pytest.skip("no C compiler")
    raw = random_blocks(kind, 40, 512)
    size = (BLOCKS | K_BLOCKS)[kind][1]
    every = np.arange(0, 1 << 16, 7, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    many = np.resize(raw.reshape(-1, size), (len(finite), size)).copy()
    for at in SCALES[kind]:
        many[:, at : at + 2] = np.roll(finite, at).view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":
        put_scales(kind, many, finite)
    if kind == "MXFP4":
        many[:, 0] = np.arange(len(many)) % 256
    raw = many.reshape(1, -1)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind]).copy()).view(-1)
    for library, chunk in ((dequantise_library(), 1 << 22), (dequantise_library(), 4096), (None, 4096)):
        monkeypatch.setattr(module, "dequantise_library", lambda library=library: library)
        monkeypatch.setattr(module, "_CHUNK", chunk)
        out = torch.empty(expected.shape, dtype=dtype)
        with np.errstate(over="ignore"):
            dequantise_into(kind, raw.reshape(-1), out)
        assert torch.equal(out, expected.to(dtype))


def test_control_a_changed_block_is_seen() -> None:
    """The comparison above can fail."""
    raw = random_blocks("Q4_K", 1, 256)
    one, other = torch.empty(256), torch.empty(256)
    dequantise_into("Q4_K", raw.reshape(-1), one)
    raw[0, 20] ^= 1
    dequantise_into("Q4_K", raw.reshape(-1), other)
    assert int((one != other).sum()) == 1


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64"])
def test_floats_are_read_as_they_are(kind: str) -> None:
    values = torch.randn(7, 9).to(module._FLOATS[kind])
    raw = values.view(-1).view(torch.uint8).numpy()
    out = torch.empty(7, 9, dtype=torch.float64)
    dequantise_into(kind, raw, out)
    assert torch.equal(out, values.double())


def test_kinds_of_the_library_alone() -> None:
    """What the library can read is read, more slowly; what nobody can is said."""
    assert can_dequantise("NVFP4")
    assert not can_dequantise("I32")
    assert not can_dequantise("Q1_0")
    raw = np.random.default_rng(0).integers(0, 64, (1, 36), dtype=np.uint8)
    out = torch.empty(64)
    dequantise_into("NVFP4", raw.reshape(-1), out)
    assert torch.equal(out, torch.from_numpy(dequantize(raw, GGMLQuantizationType.NVFP4).copy()).view(-1))
