"""What is compiled for which model: the layers, the products of its formats, and heads where one decodes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretell.core.errors import ModelError
from foretell.kernels import native
from foretell.kernels.build import BuildError, load_libraries
from foretell.kernels.functions import native_functions
from foretell.kernels.variants import KERNELS, PRODUCTS
from tests.processes import quick_compiler

COUNT = """
import sys, torch
from foretell.core.tree import chain_parent, layout
from foretell.model.load import load_model
options = {{"dtype": sys.argv[1]}} if sys.argv[1] != "int4" else {{"weights": "int4"}}
model = load_model("bundled/target", implementation="native", **options)
length = torch.zeros(1, dtype=torch.int64)
plan = layout(chain_parent(3, length.device)[None], length, 8)
model.forward(torch.zeros(1, 3, dtype=torch.int64), plan, model.new_cache(1, 8))
{more}
"""
HEADS = "from foretell.kernels import heads; assert heads.library()[0] is not None"


@pytest.mark.slow
@pytest.mark.skipif(native.library()[0] is None, reason=str(native.library()[1]))
@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        ("float32", "", {"native", "product_f32"}),
        ("bfloat16", HEADS, {"native", "product_bf16", "heads"}),
        ("int4", "", {"native", "product_q4", "product_q8"}),
    ],
)
def test_a_model_compiles_what_it_needs(kind: str, more: str, wanted: set[str], tmp_path: Path) -> None:
    environment = {
        **os.environ, "FORETELL_CACHE": str(tmp_path / "cache"), "CC": str(quick_compiler(tmp_path)),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", COUNT.format(more=more), kind], env=environment, check=True, timeout=200)
    built = {path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*.so")}
    assert built & {"native", "heads", *PRODUCTS} == wanted


@pytest.mark.slow
@pytest.mark.skipif(native.library()[0] is None, reason=str(native.library()[1]))
def test_a_product_that_is_not_loaded_is_refused() -> None:
    code = (
        "import ctypes, torch\n"
        "from foretell.kernels import structures\n"
        "from foretell.kernels.functions import check, native_functions\n"
        "matrix, x = structures.Matrix.of(torch.ones(16, 32)), torch.ones(1, 32)\n"
        "check(native_functions().product(ctypes.addressof(matrix), 16, x.data_ptr(), 1, x.data_ptr(), 16, 1))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stderr.endswith("RuntimeError: the products of a matrix's format are not loaded\n")


@pytest.mark.skipif(native.library()[0] is None, reason=str(native.library()[1]))
def test_products_that_cannot_be_built_are_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(names: list[str], variant: str) -> None:
        raise BuildError("native/product.c could not be built: no")

    monkeypatch.setattr(native, "load_libraries", fail)
    monkeypatch.setattr(native, "_loaded", {})
    with pytest.raises(ModelError, match=r"not available: native/product\.c could not be built"):
        native.need([3])


class Products(ctypes.Structure):
    """``Product`` of ``native/product.h``."""

    _fields_ = (
        ("linear", ctypes.c_void_p),
        ("l2_rows", ctypes.POINTER(ctypes.c_int64)),
        ("amx_rows", ctypes.POINTER(ctypes.c_int64)),
    )


@pytest.mark.skipif(native.library()[0] is None, reason=str(native.library()[1]))
def test_settings_reach_the_products_loaded_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = native.variant()
    assert variant is not None
    functions = native_functions()
    before = functions.l2_rows(0)
    try:
        native.need([0])
        functions.l2_rows(7)
        monkeypatch.setattr(native, "_loaded", {})
        made = Products.in_dll(load_libraries([PRODUCTS[0]], variant)[0], "foretell_products")
        assert made.l2_rows[0] == 7
        made.l2_rows[0] = 9
        native.need([0])
        assert made.l2_rows[0] == 7
    finally:
        functions.l2_rows(before)
    assert made.l2_rows[0] == before


def test_every_format_has_its_products_by_its_number() -> None:
    from foretell.kernels.structures import FORMATS as PLAIN
    from foretell.model.llama.read.matrices import FORMATS

    numbers = {f"product_{name.lower()}": form.number for name, form in FORMATS.items()}
    assert {**numbers, "product_f32": 0, "product_bf16": 1} == {name: PRODUCTS.index(name) for name in PRODUCTS}
    assert sorted(PLAIN.values()) == [0, 1]
    text = (Path(native.__file__).parent / "native" / "common.h").read_text()
    order = text[text.index("enum { F32") :].partition("}")[0].removeprefix("enum {").replace(" ", "").split(",")
    assert [f"product_{name.lower()}" for name in order[:-1]] == list(PRODUCTS)
    assert all(f"-DPRODUCT={number}" in KERNELS[name].flags for number, name in enumerate(PRODUCTS))
