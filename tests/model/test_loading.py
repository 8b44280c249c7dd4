"""How a model is loaded, from what was asked for and what the files are: a table, and nothing is loaded."""

from typing import Any

import pytest
import torch

from foretell.core.errors import ConfigError, ForetellError
from foretell.model.loading import Found, Loading, Wish, plan_loading

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def without(*kinds: str, bf16: bool = True) -> dict[str, Any]:
    """A machine or model on which these implementations do not run, or native ones not in bfloat16."""

    def unsupported(kind: str, dtype: torch.dtype) -> str | None:
        if kind in kinds:
            return f"no {kind} here"
        return None if bf16 or dtype != BF16 or kind != "native" else "no bfloat16"

    return {"unsupported": unsupported}


def planned(wish: dict[str, Any], found: dict[str, Any]) -> Loading:
    wished = Wish("m", **wish)
    wished.check()
    return plan_loading(wished, Found(**found))


ALL, BLOCKS = ("native", "lean", "transformers"), {"is_gguf": True, "is_quantised": True, "stored": BF16}
GPU = {"device": torch.device("meta")}


@pytest.mark.parametrize(
    ("wish", "found", "ways", "dtype"),
    [
        ({}, {}, ALL, F32),
        ({}, {"stored": BF16}, ALL, F32),
        ({"is_auto_dtype": True}, {"stored": BF16}, ALL, BF16),
        ({"dtype": F16}, {"stored": BF16}, ALL, F16),
        (GPU, {"stored": BF16}, ALL, BF16),
        (GPU, {}, ALL, F32),
        ({"device_map": "auto"}, {"stored": BF16}, ("transformers",), BF16),
        ({"implementation": "transformers"}, {"stored": BF16}, ("transformers",), F32),
        ({"implementation": "lean"}, without("native"), ("lean",), F32),
        ({}, without("native"), ("lean", "transformers"), F32),
        ({}, without("native", "lean"), ("transformers",), F32),
        ({}, BLOCKS, ALL, BF16),
        ({}, {**BLOCKS, **without(bf16=False)}, ALL, F32),
        ({"is_auto_dtype": True}, BLOCKS, ALL, BF16),
        ({"implementation": "lean"}, BLOCKS, ("lean",), F32),
        ({"weights": "fp32"}, BLOCKS, ALL, F32),
        ({"weights": "bf16"}, BLOCKS, ALL, BF16),
        ({"weights": "least"}, {"stored": F32}, ALL, F32),
        ({"weights": "int4"}, {"stored": F32}, ("native",), BF16),
        ({"weights": "int8", "dtype": F32}, {}, ("native",), F32),
        ({"kv": "int8"}, {}, ("native",), F32),
        ({"num_loras": 1}, {}, ("native", "lean"), F32),
        ({"num_loras": 2}, without("native"), ("lean",), F32),
        ({"tensor_parallel": True}, {"stored": BF16}, ("shard",), F32),
        ({"tensor_parallel": True, "is_auto_dtype": True}, {"stored": BF16}, ("shard",), BF16),
        ({}, {"has_code": True}, ("own code",), None),
        ({"dtype": BF16}, {"has_code": True}, ("own code",), BF16),
    ],
)
def test_what_is_run(
    wish: dict[str, Any], found: dict[str, Any], ways: tuple[str, ...], dtype: torch.dtype | None
) -> None:
    loading = planned(wish, found)
    assert (loading.ways, loading.dtype) == (ways, dtype)


@pytest.mark.parametrize(
    ("wish", "found", "merges"),
    [
        ({"merges": True}, {}, True),
        ({"merges": True}, BLOCKS, False),
        ({"merges": True, "weights": "bf16"}, BLOCKS, True),
        ({"merges": True, "weights": "int4"}, {"stored": BF16}, True),
        ({"merges": False}, {}, False),
    ],
)
def test_a_single_adapter_goes_into_weights_that_are_floats(
    wish: dict[str, Any], found: dict[str, Any], *, merges: bool
) -> None:
    assert planned({"num_loras": 1, **wish}, found).merges is merges


@pytest.mark.parametrize(
    ("wish", "found", "is_widened"),
    [({}, {"stored": BF16}, True), ({}, {"stored": F32}, False), ({"is_auto_dtype": True}, {"stored": BF16}, False),
     ({}, BLOCKS, False), ({"dtype": F32}, {"stored": BF16}, False)],
)  # fmt: skip
def test_a_dtype_wider_than_the_stored_one_is_told(
    wish: dict[str, Any], found: dict[str, Any], *, is_widened: bool
) -> None:
    assert planned(wish, found).is_widened is is_widened


@pytest.mark.parametrize(
    ("wish", "found", "told"),
    [
        ({"implementation": "fast"}, {}, "implementation 'fast' is unknown"),
        ({"device_map": "auto", "implementation": "lean"}, {}, "device_map needs implementation='transformers'"),
        ({"num_loras": 1, "device_map": "auto"}, {}, "lora needs implementation 'native' or 'lean'"),
        ({"num_loras": 1, "implementation": "transformers"}, {}, "lora needs implementation"),
        ({"tensor_parallel": True, "device_map": "auto"}, {}, "exclude each other"),
        ({"tensor_parallel": True, "implementation": "native"}, {}, "tensor_parallel=True needs"),
        ({"weights": "fp32", "dtype": BF16}, {}, "contradicts dtype 'bfloat16'"),
        ({"weights": "int2"}, {}, "weights 'int2' is unknown"),
        ({"kv": "int4"}, {}, "kv 'int4' is unknown"),
        ({"weights": "int4", "implementation": "lean"}, {}, "weights='int4' needs the native implementation"),
        ({"kv": "int8", "tensor_parallel": True}, {}, "kv='int8' needs the native implementation"),
        ({"weights": "int4"}, without("native"), "which m has not here: no native here"),
        ({"implementation": "native"}, without("native"), "does not support m: no native here; use 'auto'"),
        ({"num_loras": 1}, without("native", "lean"), "where adapters .* do not run .native: no native here; lean"),
        ({"tensor_parallel": True}, BLOCKS, "m is a GGUF file"),
        ({"weights": "int8"}, {"has_code": True}, "runs its own code"),
        ({"num_loras": 1}, {"has_code": True}, "runs its own code"),
        ({"tensor_parallel": True}, {"has_code": True}, "runs its own code"),
    ],
)
def test_what_is_refused(wish: dict[str, Any], found: dict[str, Any], told: str) -> None:
    with pytest.raises(ForetellError, match=told):
        planned(wish, found)


def test_refusals_of_options_are_errors_of_the_configuration() -> None:
    with pytest.raises(ConfigError):
        Wish("m", implementation="fast").check()
