"""Models that come with Python code of their own (``auto_map`` in config.json): run only where the caller trusts it."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from foretell.core.errors import ConfigError, ModelError, first_line
from foretell.model.hf.adapter import TransformersModel


def has_code(path: Path, *, name: str, trusted: bool) -> bool:
    """Whether a directory's own code is to be run. Raises ModelError where it would have to be, and is not trusted.

    Where transformers knows the model's type by itself, its own implementation runs and no trust is needed.
    """
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # ``check_files`` and ``load_config`` say what is wrong
    if not isinstance(config, dict) or "AutoModelForCausalLM" not in (config.get("auto_map") or ()):
        return False
    if trusted:
        return True
    if config.get("model_type") in CONFIG_MAPPING:
        return False
    raise ModelError(
        f"{name} comes with Python code of its own, which would run here with your rights: if you trust its authors, give "
        "--trust-remote-code (in Python trust_remote_code=True)"
    )


def load_with_code(
    path: Path,
    *,
    name: str,
    dtype: torch.dtype | None,
    device: torch.device,
    device_map: str | dict[str, Any] | None,
    implementation: str,
    is_auto_dtype: bool,
) -> TransformersModel:
    """The model by its own code, as a transformers model. dtype None: the checkpoint's own (is_auto_dtype, and on
    accelerators), else float32. Raises ConfigError, ModelError."""
    if implementation not in ("auto", "transformers"):
        raise ConfigError(f"implementation {implementation!r} does not run a model's own code: use 'transformers'")
    try:
        config: Any = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=True)
    except Exception as error:  # it is anybody's code
        raise ModelError(f"{name}: its own configuration cannot be used ({first_line(error)})") from error
    if dtype is None:
        keeps = is_auto_dtype or device.type != "cpu" or device_map is not None
        dtype = (getattr(config, "dtype", None) if keeps else None) or torch.float32
    return TransformersModel.load(
        path, dtype=dtype, device=device, device_map=device_map, name=name, trust_remote_code=True
    )
