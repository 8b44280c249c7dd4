"""Every Triton kernel compiles to machine code of two generations of cards, on a machine without one."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import itertools
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foretell.kernels.gpu import attention, draws, layers

KINDS = {"probs": "*fp32", "logits": "*fp32", "warps": "*fp32", "uniforms": "*fp64", "eps": "fp32", "weight": "*bf16",
         "scale": "fp32", "cap": "fp32", "ancestry": "*u8", "partial": "*fp32", "sums": "*fp32",
         **dict.fromkeys(("x", "qkv", "cos", "sin", "growth", "query", "queries", "keys", "values"), "*bf16")}
INTEGERS = {"seeds", "positions", "index", "parents", "drawn", "tokens", "slots", "lengths", "tree_positions", "table"}
SIZES = {"BLOCK": 1024, "ROWS": 64, "SLOTS": 64, "DIM": 128, "PARTS": 8, "PRECISION": "tf32"}
count = 0
for module, capability, ones in itertools.product((draws, layers, attention), (80, 90), (False, True)):
    # Triton makes constants of arguments that are 1.
    for name, kernel in vars(module).items():
        if not name.endswith("_kernel"):
            continue
        signature, constants = {}, {}
        for parameter in kernel.params:
            if parameter.is_constexpr:
                constants[parameter.name] = SIZES.get(parameter.name, True)
                signature[parameter.name] = "constexpr"
            elif ones and parameter.name not in KINDS and parameter.name not in INTEGERS | {"out", "stream"}:
                constants[parameter.name], signature[parameter.name] = 1, "constexpr"
            elif parameter.name == "out":
                kinds = {"norm_kernel": "*bf16", "join_kernel": "*bf16", "scores_kernel": "*fp32"}
                signature["out"] = kinds.get(name, "*i64")
            elif parameter.name == "keys" and module is draws or parameter.name in INTEGERS:
                signature[parameter.name] = "*i64"
            else:
                signature[parameter.name] = KINDS.get(parameter.name, "i32")
        made = triton.compile(ASTSource(kernel, signature=signature, constexprs=constants),
                              target=GPUTarget("cuda", capability, 32))
        assert len(made.asm["cubin"]) > 1000
        count += 1
print("compiled", count)
"""


@pytest.mark.slow
def test_all_kernels_compile_for_cards(tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "compiled 44"
