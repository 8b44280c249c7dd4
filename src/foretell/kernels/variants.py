"""The C kernels and the instruction sets that each is compiled for; ``build.py`` compiles and loads them."""

from typing import NamedTuple


class Variant(NamedTuple):
    """One instruction set that kernels are compiled for."""

    needs: tuple[str, ...]  # of the CPU, as Linux names them
    flags: tuple[str, ...]  # for the compiler
    machine: str = ""  # that has the instructions, as cpu.machine names it; empty: every one


_AVX2 = Variant(("avx2", "fma", "f16c", "bmi2"), ("-mavx2", "-mfma", "-mf16c", "-mbmi2"), "x86_64")
_AVX512 = Variant(
    (*_AVX2.needs, "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    (*_AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    "x86_64",
)
_AVX512_VNNI = Variant((*_AVX512.needs, "avx512_vnni"), (*_AVX512.flags, "-mavx512vnni"), "x86_64")
_AVX512_BF16 = Variant((*_AVX512_VNNI.needs, "avx512_bf16"), (*_AVX512_VNNI.flags, "-mavx512bf16"), "x86_64")
_AMX = Variant(
    (*_AVX512_BF16.needs, "amx_tile", "amx_int8", "amx_bf16"),
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "x86_64",
)
_NEON = Variant(("asimd",), ("-march=armv8-a",), "aarch64")
_NEON_DOT = Variant((*_NEON.needs, "asimddp", "atomics"), ("-march=armv8.2-a+dotprod",), "aarch64")
_NEON_I8MM = Variant((*_NEON_DOT.needs, "i8mm"), ("-march=armv8.2-a+dotprod+i8mm",), "aarch64")

VARIANTS = {
    "amx": _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_i8mm": _NEON_I8MM,
    "neon_dot": _NEON_DOT,
    "neon": _NEON,
    "baseline": Variant((), ()),
}
"""Best first of each machine. A CPU runs the first whose needs it meets, and of a kernel the first of those that the kernel
has."""


class Kernel(NamedTuple):
    """A C file beside this one, and how it is built."""

    source: str
    flags: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("avx512", "avx2", "baseline")


QUICK = ("-fno-thread-jumps",)
"""Flags of GCC: a sixth of the time to compile, and no pass is slower."""
_BY_HAND = tuple(name for name in VARIANTS if name != "baseline")
_FEW_BITS = ("q2t", "q3i", "q3j", "q4i", "q4j")
_FORMATS = ("f32", "bf16", "q8", "q8m", "q4", "q4m", "q4k", "q8k", "q8s", "q4n", "q4x", "q4e", "q2k", "q3s", *_FEW_BITS)
PRODUCTS = tuple(f"product_{name}" for name in _FORMATS)
"""Products with matrices by their format's number in ``native/common.h``: a model needs those of its own formats."""

KERNELS = {
    "bounds": Kernel("bounds.c"),
    "cdf": Kernel("cdf.c", ("-ffp-contract=off",)),
    "dequantise": Kernel("dequantise.c", ("-ffp-contract=off",)),
    "race": Kernel("race.c", ("-ffp-contract=off", "-fopenmp-simd")),
    "residual": Kernel("residual.c", ("-fopenmp-simd",)),
    "suffix": Kernel("suffix.c", ("-ffp-contract=off",), ("baseline",)),
    "tree": Kernel("tree.c"),
    "pool": Kernel("native/pool.c", ("-pthread",), ("baseline",)),
    # Their OpenMP runtime is the one that torch has loaded, or the pool: see native.py.
    "native": Kernel("native/native.c", (*QUICK, "-fopenmp"), _BY_HAND),
    "heads": Kernel("native/heads.c", (*QUICK, "-fopenmp"), _BY_HAND),
    **{
        name: Kernel("native/product.c", (*QUICK, f"-DPRODUCT={number}"), _BY_HAND)
        for number, name in enumerate(PRODUCTS)
    },
}
