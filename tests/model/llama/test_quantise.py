"""Quantised matrices: the C code against its twin in torch, bit for bit, and models of them."""

import ctypes
import math
from collections.abc import Callable
from math import inf, nan
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from foretell.checkpoints.packed import BLOCK_KINDS, Packed
from foretell.checkpoints.weights import ModuleWeights
from foretell.core.tree import layout
from foretell.kernels import structures
from foretell.kernels.functions import native_functions
from foretell.kernels.native import need
from foretell.model.llama import shape as llama
from foretell.model.llama.read import matrices, matrices as quantise
from foretell.model.llama.read.matrices import FORMAT_OF, FORMATS, TILE
from foretell.model.llama.run import native
from foretell.model.llama.run.native import NativeModel
from tests.checkpoints.gguf.make import FEW_BITS, SCALES, SIZES as SCALE_SIZES, put_scales
from tests.model.llama import quantised as twin
from tests.model.llama.family import BUSHY, chain, make_model, oracle_logits, prefill
from tests.model.llama.quantised import Blocks

REASON = native.supports(make_model("llama").config, torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
KINDS = tuple(BLOCK_KINDS)
ROWS = 50  # three whole tiles and two rows


def columns_of(kind: str) -> int:
    return 512 if BLOCK_KINDS[kind].values == 256 else 224  # seven blocks: half a unit of 64 is padding


def file_rows(kind: str, rows: int = ROWS, columns: int | None = None, size: float = 0.05) -> Tensor:
    """[rows, bytes] of random codes with scales of about this size."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    block = BLOCK_KINDS[kind]
    shape = (rows, (columns or columns_of(kind)) // block.values)
    raw = torch.randint(0, 256, (*shape, block.size), dtype=torch.uint8, generator=generator)
    for at in SCALES[kind]:
        scale = (torch.rand(*shape, 1, generator=generator) * 2 - 1) * size
        raw[..., at : at + 2] = scale.half().view(torch.uint8)
    if kind == "IQ1_M":
        scale = (torch.rand(shape, generator=generator) * 2 - 1) * size
        put_scales(kind, raw.view(-1, block.size).numpy(), scale.half().flatten().numpy())
    if kind == "MXFP4":
        raw[..., 0] = 126 + round(math.log2(size)) + raw[..., 0] % 4
    return raw.flatten(1)


def floats(rows: int, columns: int, seed: int = 7) -> Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[1, :40] = 0.0  # a block of zeros, and part of one
    weight[2] *= 1e-6  # scales that float16 holds badly
    return weight


class Held:
    """A packed matrix in memory that begins at a line of the cache."""

    def __init__(self, form: str, kind: str | torch.dtype, rows: Tensor, columns: int) -> None:
        row_bytes = FORMATS[form].row_bytes(columns)
        size = -(-len(rows) // TILE) * TILE * row_bytes
        memory = torch.zeros(size + 64, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        self.bytes = memory[start : start + size]
        quantise.pack_into(self.bytes, form, kind, rows, columns)
        self.num_rows, self.columns = len(rows), columns
        self.matrix = structures.Matrix(self.bytes.data_ptr(), None, FORMATS[form].number, columns, row_bytes)
        need([self.matrix.format])

    def product(self, x: Tensor, threads: int = 1) -> Tensor:
        out = torch.full((len(x), self.num_rows), nan)
        call = native_functions().product
        problem = call(
            ctypes.addressof(self.matrix), self.num_rows, x.data_ptr(), len(x), out.data_ptr(), self.num_rows, threads
        )
        assert problem == 0
        return out

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.full((len(ids), self.columns), nan)
        native_functions().rows(ctypes.addressof(self.matrix), ids.data_ptr(), len(ids), out.data_ptr())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_library(kind: str) -> None:
    rows = file_rows(kind)
    expected = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(twin.unpack(kind, rows).values()[:, : columns_of(kind)], torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_files_blocks_are_packed_multiplied_and_read_as_the_twin_does(kind: str) -> None:
    rows, columns = file_rows(kind), columns_of(kind)
    blocks = twin.unpack(kind, rows)
    held = Held(FORMAT_OF[kind], kind, rows, columns)
    assert torch.equal(held.bytes, twin.interleave(blocks).flatten())
    ids = torch.tensor([0, 15, 16, 49, 31])
    assert torch.equal(held.rows(ids), blocks.values()[ids, :columns])
    check_products(held, blocks)


@pytest.mark.parametrize("columns", [32, 48, 96, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "rounded"), [("Q8", twin.round_to_int8), ("Q4", twin.round_to_int4)])
def test_floats_are_rounded_packed_and_multiplied_as_the_twin_does(
    form: str, rounded: Callable[[Tensor], Blocks], dtype: torch.dtype, columns: int
) -> None:
    weight = floats(ROWS, columns).to(dtype)
    blocks = rounded(weight)
    held = Held(form, dtype, weight, columns)
    assert torch.equal(held.bytes, twin.interleave(blocks).flatten())
    ids = torch.arange(ROWS)
    assert torch.equal(held.rows(ids), blocks.values()[:, :columns])
    check_products(held, blocks)


def check_products(held: Held, blocks: Blocks) -> None:
    """Equal to the twin at every number of rows, for each row by itself, and on two threads."""
    x = torch.randn(20, held.columns, generator=torch.Generator().manual_seed(3))
    x[4, :32] = 0.0
    x[5] *= 1e-35  # its blocks count as zero, or nearly
    x[6, 3] = 1e4
    expected = twin.product(blocks, x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 20):
        assert torch.equal(held.product(x[:rows]), expected[:rows]), rows
    assert torch.equal(held.product(x, threads=2), expected)
    for row in range(20):
        assert torch.equal(held.product(x[row : row + 1])[0], expected[row]), row
    exact = x.double() @ blocks.values()[:, : held.columns].double().T
    assert (expected - exact).abs().max() < 0.02 * exact.abs().max()


def test_long_rows_in_chunks_of_k_have_the_same_bits() -> None:
    columns = 9 * 1024 + 64  # eight rows of it are five chunks
    weight = torch.randn(80, columns, generator=torch.Generator().manual_seed(1))
    blocks, held = twin.round_to_int8(weight), Held("Q8", torch.float32, weight, columns)
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(2))
    expected = twin.product(blocks, x)
    for rows in (1, 4, 8, 9):
        assert torch.equal(held.product(x[:rows]), expected[:rows])


def test_control_one_changed_code_is_seen() -> None:
    weight = floats(ROWS, 96)
    held, x = Held("Q4", torch.float32, weight, 96), floats(3, 96, seed=1)
    before = held.product(x)
    held.bytes[64 + 12] ^= 0x10  # the first unit's codes: row 3, one of its values
    assert not torch.equal(held.product(x)[:, 3], before[:, 3])
    assert torch.equal(held.product(x)[:, 4:], before[:, 4:])


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("form", ["Q8", "Q4"])
def test_what_is_not_finite_does_not_become_finite(form: str, value: float) -> None:
    held, x = Held(form, torch.float32, torch.rand(16, 96) + 1, 96), torch.ones(2, 96)
    x[1, 70] = value
    out = held.product(x)
    assert torch.isfinite(out[0]).all()
    assert not torch.isfinite(out[1]).any()


def test_activations_are_rounded_as_the_twin_rounds_them() -> None:
    """4,096 blocks against a matrix that reads out their codes: 127 on the diagonal, whose scale is 1."""
    unit = Held("Q8", torch.float32, torch.eye(32) * 127, 32)
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    rounded = twin.round_activations(x, 1)
    expected = 127 * rounded.codes[:, 0].float() * rounded.scale
    assert torch.equal(unit.product(x), expected)


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(4096, generator=generator) for _ in range(3))
    c = c * 2.0 ** torch.randint(-20, 20, (4096,), generator=generator)
    once = twin.fma(a, b, c)
    # Exactly, in integers: every value is a multiple of 2^-80.
    for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), once.tolist(), strict=True):
        exact = int(x * 2.0**60) * int(y * 2.0**60) + (int(z * 2.0**60) << 60)
        below = torch.tensor(found).nextafter(torch.tensor(-inf)).item()
        above = torch.tensor(found).nextafter(torch.tensor(inf)).item()
        error = abs(exact - (int(found * 2.0**60) << 60))
        assert error <= abs(exact - (int(below * 2.0**60) << 60))
        assert error <= abs(exact - (int(above * 2.0**60) << 60))
    assert (once != a * b + c).any()  # two roundings do differ


# ------------------------------------------------------------------------------------------------ models --------------


class Requantised(ModuleWeights):
    """A module's weights whose matrices are in blocks, as a GGUF file's are: kinds in turn."""

    def __init__(self, module: Any, kinds: tuple[str, ...]) -> None:
        super().__init__(module)
        matrices = [name for name in self.names if len(self.shape(name)) == 2]
        self.blocks: dict[str, Packed] = {}
        for index, name in enumerate(matrices):
            rows, columns = self.shape(name)
            kind = kinds[index % len(kinds)]
            size = (
                SCALE_SIZES[kind]
                if kind in FEW_BITS
                else 2e-4
                if kind == "IQ4_XS"
                else 0.02
                if kind[:2] == "Q8"
                else 0.04
                if kind[-2:] in ("_0", "_1")
                else 0.003
            )
            data = file_rows(kind, rows, columns, size=size)
            self.blocks[name] = Packed(kind, (rows, columns), data)
            values = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
            with torch.no_grad():
                self._tensors[name].copy_(torch.from_numpy(values.copy()))

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        return self.blocks[name].part(rows) if name in self.blocks else None

    def shared(self, name: str) -> Tensor | None:
        return None


def plain_and_wide(model: NativeModel) -> tuple[Tensor, Tensor]:
    """Logits of one text, token by token on one thread and in one pass on two."""
    text = torch.randint(0, model.shape.vocab_size, (1, 11), generator=torch.Generator().manual_seed(2))
    cache = model.new_cache(1, 64)
    plans = [layout(chain(1, 1), torch.tensor([i]), 64) for i in range(11)]
    steps = [model.forward(text[:, i : i + 1], plans[i], cache).logits for i in range(11)]
    torch.set_num_threads(2)
    wide = model.forward(text, layout(chain(1, 11), torch.tensor([0]), 64), model.new_cache(1, 64)).logits
    torch.set_num_threads(1)
    assert wide is not None
    return torch.cat([step for step in steps if step is not None], 1), wide


SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in (*KINDS, "mixed")), ("mixed", torch.bfloat16)]
)
def test_a_model_of_a_files_blocks(kind: str, dtype: torch.dtype) -> None:
    """The same bits at any width, and near the model of the dequantised weights."""
    module = make_model("llama", **SIZES)
    source = Requantised(module, KINDS if kind == "mixed" else (kind,))
    model = NativeModel(llama.read_shape(module.config), source, dtype=dtype, name="x")
    assert set(model.spec.weights.split("+")) == (set(KINDS) if kind == "mixed" else {kind})
    assert model.spec.is_quantised
    plain, wide = plain_and_wide(model)
    assert torch.equal(plain, wide)
    prompt = [3, 1, 4, 1, 5, 9]
    cache = model.new_cache(1, 64)
    length = prefill(model, cache, [prompt], chunk=16)
    tokens = torch.randint(0, 61, (1, 9))
    logits = model.forward(tokens, layout(BUSHY[:1], length, 64), cache).logits
    expected = oracle_logits(module, prompt, tokens[0], BUSHY[0])
    assert (logits[0] - expected).abs().mean() < 0.06 * expected.abs().mean()
    assert torch.equal(model.embed(tokens), module.model.embed_tokens(tokens).detach())


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    "kind",
    ["qwen3-tied", "llama-mha-bias", "mistral-window", "qwen2", "gemma2", "olmo2", "granite", "qwen3moe", "qwen2moe"],
)
def test_rounded_models(kind: str, weights: str) -> None:
    """Sizes that no block divides; the same bits at any width; near the module whose weights are rounded likewise."""
    module = make_model(kind, **({} if kind.startswith("qwen2") else {"hidden_size": 80, "intermediate_size": 200}))
    model = NativeModel.from_hf(module, weights=weights)
    assert model.spec.weights == ("int8" if weights == "int8" else "int4+int8")
    plain, wide = plain_and_wide(model)
    assert torch.equal(plain, wide)
    outer = ("embed_tokens", "lm_head")
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() >= 2 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                rounded = (
                    twin.round_to_int4
                    if weights == "int4" and outer[0] not in name and outer[1] not in name
                    else twin.round_to_int8
                )
                rows = weight.flatten(0, -2)
                weight.copy_(rounded(rows).values()[:, : rows.shape[1]].view(weight.shape))
    tokens = torch.randint(0, 61, (1, 9))
    cache = model.new_cache(1, 64)
    logits = model.forward(tokens, layout(BUSHY[:1], torch.tensor([0]), 64), cache).logits
    expected = oracle_logits(module, [], tokens[0], BUSHY[0])
    # Rounded activations may send a row to another expert.
    assert (logits[0] - expected).abs().mean() < (0.06 if "moe" in kind else 0.03) * expected.abs().mean()


def test_head_and_embedding_for_drafters() -> None:
    module = make_model("llama-tied")
    model = NativeModel.from_hf(module, weights="int8")
    values = twin.round_to_int8(module.model.embed_tokens.weight.detach()).values()[:, :48]
    tokens = torch.tensor([[3, 60, 0]])
    assert torch.equal(model.embed(tokens), values[tokens])
    with pytest.raises(IndexError, match="vocabulary of 61"):
        model.embed(torch.tensor([61]))
    cache = model.new_cache(1, 64)
    output = model.forward(tokens, layout(chain(1, 3), torch.tensor([0]), 64), cache)
    assert output.logits is not None
    normed = model.normed(output.hidden)
    torch.testing.assert_close(model.head(normed), output.logits)
    torch.testing.assert_close(model.head(normed), normed @ values.T, atol=0.05, rtol=0.05)
    wanted = normed.requires_grad_()  # training reads the dequantised head: its product has a gradient
    model.head(wanted).sum().backward()
    torch.testing.assert_close(wanted.grad[0, 0], values.sum(0))


def test_bf16_dequantises_and_int4_keeps_what_has_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_model("llama", **SIZES)
    shape = llama.read_shape(module.config)

    def label(kinds: tuple[str, ...], weights: str, dtype: torch.dtype = torch.float32) -> str:
        source = Requantised(module, kinds)
        return NativeModel(shape, source, dtype=dtype, name="x", weights=weights).spec.weights

    assert label(("Q4_K",), "bf16", torch.bfloat16) == "bfloat16"
    assert label(("Q4_K",), "int4") == "Q4_K+int8"
    assert label(("Q6_K",), "int4") == "int4+int8"
    fewer = ("IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", *FEW_BITS)
    assert set(label(fewer, "int4").split("+")) == {*fewer, "int8"}
    assert label(fewer, "int8") == "int8"
    assert label(("Q8_0",), "int8") == "Q8_0"
    assert label(("Q6_K",), "int8") == "int8"
    assert label(("Q6_K",), "least") == "Q6_K"  # so few weights are not what takes the time
    monkeypatch.setattr(matrices, "LARGE", 1 << 18)
    assert label(("Q6_K",), "least") == "int4"
    assert set(label(fewer, "least").split("+")) == set(fewer)


def test_bytes_of_a_pass_are_those_of_the_matrices() -> None:
    model = NativeModel.from_hf(make_model("llama", **SIZES), weights="int8")
    num_weights = 3 * (256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 512)
    head = -(-61 // TILE) * TILE * 256
    assert model.spec.weight_bytes == (num_weights + head) * 34 // 32


def test_pages_of_a_file_are_released_after_every_packed_matrix() -> None:
    module = make_model("llama", **SIZES)
    source = Requantised(module, ("Q8_0",))
    released: list[int] = []
    source.release = lambda: released.append(1)  # type: ignore[method-assign]
    NativeModel(llama.read_shape(module.config), source, dtype=torch.float32, name="x")
    assert len(released) == len(source.blocks)
