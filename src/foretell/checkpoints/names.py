"""Names of implementations, dtypes and weights, checked without torch: the command line refuses a wrong one at once."""

from foretell.core.errors import ConfigError, nearest, require
from foretell.core.jsontext import JSONDecodeError, parse_json

FAST = {"native": "NativeModel", "lean": "LeanModel"}  # in order of preference, before transformers
IMPLEMENTATIONS = ("auto", "transformers", *FAST)
WEIGHTS = ("auto", "fp32", "bf16", "int8", "int4", "least")
"""How matrices may be held: see ``load_model``."""
KV = ("auto", "int8")
"""How keys and values may be held: in dtype, or rounded."""
CUDA_GRAPHS = ("auto", "off")
"""Whether steps are launched as captured graphs, on devices that have them."""
DEVICES = (
    "cpu", "cuda", "mps", "xpu", "hip", "hpu", "npu", "xla", "mtia", "maia", "ipu", "ve", "vulkan", "meta",
)  # fmt: skip
"""Kinds of devices that torch, or a package for it, knows."""
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
    "fp16": "float16", "half": "float16",
}  # fmt: skip
"""What a dtype may be called -> torch's name of it."""


def check_implementation(name: str) -> None:
    """Raise ConfigError for one that is unknown."""
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation {name!r} is unknown{nearest(name, IMPLEMENTATIONS)}")


def check_cuda_graphs(value: str) -> None:
    """Raise ConfigError for another value than "auto" and "off"."""
    require(value in CUDA_GRAPHS, "cuda_graphs", value, "'auto' or 'off'")


def check_weights(name: str, option: str = "weights") -> None:
    """Raise ConfigError for a way to hold matrices that is unknown. option: as messages call it."""
    if name not in WEIGHTS:
        raise ConfigError(f"{option} {name!r} is unknown{nearest(name, WEIGHTS)}")


def check_kv(name: str) -> None:
    """Raise ConfigError for a way to hold keys and values that is unknown."""
    if name not in KV:
        raise ConfigError(f"kv {name!r} is unknown{nearest(name, KV)}; in another type than int8 they are by dtype")


def check_memory(gib: float | None) -> None:
    """Raise ConfigError for what is no size of a memory in GiB; None is no limit."""
    require(gib is None or 0 < gib < 1 << 20, "memory_gib", gib, "positive, and in GiB")


def check_device(name: str) -> None:
    """Raise ConfigError for what no device is called."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (number.isascii() and number.isdecimal())):
        hint = nearest(kind, DEVICES) if kind not in DEVICES else f"; expected {kind} or {kind}:0"
        raise ConfigError(f"device {name!r} cannot be used here (torch has no such device{hint}); try 'cpu'")


def check_device_map(text: str) -> None:
    """Raise ConfigError for what is neither JSON nor a way in which Accelerate spreads a model, nor a device."""
    if text.lstrip().startswith("{"):
        try:
            parse_json(text)
        except JSONDecodeError as error:
            raise ConfigError(f"--device-map is not JSON ({error}): {text!r:.60}") from None
        return
    if text not in DEVICE_MAPS and text.partition(":")[0] not in DEVICES:
        raise ConfigError(f"device_map {text!r} is unknown{nearest(text, DEVICE_MAPS)}, or a JSON object")


def torch_name(dtype: object) -> str | None:
    """torch's name of a dtype, given by name or as it is; None for "auto". Raises ConfigError for an unknown one."""
    if dtype == "auto":
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"dtype {dtype!r} is unknown{nearest(str(dtype), ('auto', *DTYPES))}")
    return found
