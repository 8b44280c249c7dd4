"""Experts that stay in files: the same bits as with all in memory, what is held, what is read ahead, and errors."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.core.errors import ModelError
from foretell.model.llama.read.disk import EXPERTS_SHARE
from foretell.model.llama.run import native
from foretell.model.llama.run.native import NativeModel
from tests.model.llama.family import make_model
from tests.model.llama.test_mixture import CPU, logits_of, needs_native, tokens_of

pytestmark = needs_native


def saved(path: Path, kind: str = "qwen3moe", **overrides: Any) -> Path:
    """A tiny mixture's checkpoint in float32."""
    make_model(kind, **overrides).save_pretrained(path)
    return path


def memory_for(model: NativeModel, slots: int) -> int:
    """Bytes with which so many experts of a layer are held; model: the same, with all in memory."""
    sizes, mixture = model.matrices.num_bytes, model.shape.mixture
    assert mixture is not None
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - experts + int(experts // mixture.num_experts * (slots + 0.5) / EXPERTS_SHARE)


def load(path: Path, dtype: torch.dtype = torch.float32, memory: int | None = None, **options: Any) -> NativeModel:
    return NativeModel.load(path, dtype=dtype, memory=memory, **options)


def pair(path: Path, slots: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[NativeModel, NativeModel]:
    """With all experts in memory, and with so many of a layer."""
    whole = load(path, dtype, **options)
    part = load(path, dtype, memory_for(whole, slots), **options)
    assert whole.disk is None
    assert part.disk is not None
    return whole, part


@pytest.mark.parametrize("kind", ["qwen3moe", "qwen3moe-dense-between", "qwen2moe", "olmoe", "glm4moe", "granitemoeshared"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_bits_are_those_of_a_model_in_memory(tmp_path: Path, kind: str, weights: str) -> None:
    """With fewer slots than a pass needs, at several widths: waves, evictions and reads change nothing."""
    whole, part = pair(saved(tmp_path, kind), 3, weights=weights)
    tokens = tokens_of(2, 19)
    for width in (19, 1, 5):
        assert torch.equal(logits_of(part, tokens, width), logits_of(whole, tokens, width))
    figures = part.disk
    assert figures is not None
    assert figures.misses > 0 < figures.hits
    assert figures.bytes_read > 0
