"""Names of implementations, dtypes and weights, checked without torch: the command line refuses a wrong one at once."""

from foretell.core.errors import ConfigError, nearest

FAST = {"native": "NativeModel", "lean": "LeanModel"}  # in order of preference, before transformers
IMPLEMENTATIONS = ("auto", "transformers", *FAST)
WEIGHTS = ("auto", "fp32", "bf16", "int8", "int4")
"""How matrices may be held: see ``load_model``."""
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
"""What a dtype may be called -> torch's name of it."""


def check_implementation(name: str) -> None:
    """Raise ConfigError for one that is unknown."""
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation {name!r} is unknown{nearest(name, IMPLEMENTATIONS)}")


def check_weights(name: str) -> None:
    """Raise ConfigError for a way to hold matrices that is unknown."""
    if name not in WEIGHTS:
        raise ConfigError(f"weights {name!r} is unknown{nearest(name, WEIGHTS)}")


def torch_name(dtype: object) -> str | None:
    """torch's name of a dtype, given by name or as it is; None for "auto". Raises ConfigError for an unknown one."""
    if dtype == "auto":
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"dtype {dtype!r} is unknown{nearest(str(dtype), ('auto', *DTYPES))}")
    return found
