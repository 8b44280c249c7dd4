"""Adapters of low rank (LoRA, arXiv 2106.09685) in the directories that peft saves, read and checked.

Such a directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. A linear W of the model becomes
W + scale * B A.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foretell.checkpoints.files import read_header, read_json, weight_files
from foretell.checkpoints.weights import ShapeError
from foretell.core.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_SHARED = ("embed_tokens", "lm_head")
"""Modules that drafters share with the target: an adapter that changed them would be the target's alone."""
MAX_NAME = 256
"""Characters of an adapter's name."""
_UNREAD = (
    "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
_STARTS = ("gaussian", "eva", "orthogonal")
"""Kinds of ``init_lora_weights`` that leave the base model as it is."""


class LoraError(ShapeError):
    """An adapter that cannot be read, or does not fit the model: no implementation can run it."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one linear."""

    a: Tensor  # [rank, in] float32
    b: Tensor  # [out, rank] float32
    scale: float

    @property
    def product(self) -> Tensor:
        """scale * B A, [out, in] float32."""
        return self.b @ self.a * self.scale


@dataclass(frozen=True)
class Lora:
    """One adapter, of a directory."""

    path: Path
    modules: Mapping[str, LowRank]  # by the linear's name in the model: "model.layers.0.self_attn.q_proj"

    @property
    def file(self) -> Path:
        """Where its tensors are, for messages."""
        return self.path / WEIGHTS


def read_lora(directory: str | PathLike[str]) -> Lora:
    """The adapter of a directory. Raises LoraError (a ModelError) for what is absent, damaged, or of a kind that is not
    run."""
    path = Path(fspath(directory)).expanduser()
    name = str(path)
    if not (path / CONFIG).is_file():
        raise LoraError(
            f"{name}: no {CONFIG} there; expected the directory of an adapter, as peft's save_pretrained makes"
        )
    config = read_json(path / CONFIG, name=name)
    _check_config(config, path / CONFIG)
    files = weight_files(path, name=name, known=(WEIGHTS,)).files
    tensors: dict[str, Tensor] = {}
    for file in files:
        read_header(file, name=name)  # a clear error for a damaged file
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise LoraError(f"{file}: cannot be read ({error}); download it again") from error
    return Lora(path, _modules(config, tensors, path))


def is_name(name: object) -> bool:
    """Whether an adapter may have this name: requests, logs and lists of models say it, so it is one line, and nothing that
    a program could take for another place (``../x``). A hub id is a name."""
    if not isinstance(name, str) or not name.isprintable() or name != name.strip() or len(name) > MAX_NAME:
        return False
    return all(part.strip() not in ("", ".", "..") for part in re.split(r"[/\\]", name))


def read_loras(given: Mapping[str, str | PathLike[str]]) -> dict[str, Lora]:
    """Several adapters, by their names. Raises ConfigError for what is no name, LoraError as above."""
    for name in given:
        if not is_name(name):
            raise ConfigError(
                f"{name!r} is no name of an adapter; expected up to {MAX_NAME} characters that can be printed, no '..' "
                "among the parts of a path, and no space around it: give NAME=DIR"
            )
    return {name: read_lora(directory) for name, directory in given.items()}


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Refuse what would be another sum than W x + scale * B (A x)."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise LoraError(f"{file}: peft_type is {kind!r}; expected 'LORA'")
    used = [key for key, value in config.items() if key.startswith("use_") and value and key != "use_rslora"]
    for key in (*used, *(key for key in _UNREAD if config.get(key))):
        name = "DoRA (use_dora)" if key == "use_dora" else key
        raise LoraError(f"{file}: {name} is set, which is not run: merge the adapter into the model with peft")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _STARTS:
        raise LoraError(
            f"{file}: init_lora_weights is {start!r}, which changes the model itself: save the adapter converted "
            "(path_initial_model_for_weight_conversion)"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise LoraError(f"{file}: {key} is {config[key]!r}; expected an object of names and numbers")
    ranks = {"r": config.get("r"), **(config.get("rank_pattern") or {})}
    alphas = {"lora_alpha": config.get("lora_alpha"), **(config.get("alpha_pattern") or {})}
    for key, value in ranks.items():
        if type(value) is not int or value < 1:
            raise LoraError(f"{file}: the rank of {key} is {value!r}; expected a number from 1 on")
    for key, value in alphas.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise LoraError(f"{file}: the alpha of {key} is {value!r}; expected a number")


def _modules(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> dict[str, LowRank]:
    file, halves = path / WEIGHTS, dict[str, dict[str, Tensor]]()
    for key, tensor in tensors.items():
        found = _TENSOR.fullmatch(key)
        if any(f"{shared}." in key for shared in _SHARED):
            raise LoraError(
                f"{file}: {key} changes {'/'.join(_SHARED)}, which drafters share with the model: train without it"
            )
        if found is None:
            raise LoraError(f"{file}: {key} {_unread(config, key)}")
        if not bool(torch.isfinite(tensor).all()):
            raise LoraError(f"{file}: {key} holds NaN or infinity; expected finite numbers")
        halves.setdefault(found["module"], {})[found["part"]] = tensor.float()
    if not halves:
        raise LoraError(f"{file}: it holds no tensor; expected pairs of ....lora_A.weight and ....lora_B.weight")
    made = {}
    for module, parts in halves.items():
        rank = _of(config.get("rank_pattern"), module, config["r"])
        for part, at in (("A", 0), ("B", 1)):
            shape = tuple(parts[part].shape) if part in parts else None
            if shape is None or len(shape) != 2 or shape[at] != rank:
                wanted = f"({rank}, inputs)" if part == "A" else f"(outputs, {rank})"
                has = "is missing" if shape is None else f"has shape {shape}"
                raise LoraError(f"{file}: {module}.lora_{part}.weight {has}; expected {wanted}, by {CONFIG}")
        alpha = float(_of(config.get("alpha_pattern"), module, config["lora_alpha"]))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        made[module] = LowRank(parts["A"], parts["B"], scale)
    return made


def _unread(config: Mapping[str, Any], key: str) -> str:
    """What a tensor is that is none of a pair. The file decides, not the configuration: peft keeps names in it that the
    model did not have, and writes nothing for them."""
    if key.endswith(".bias"):
        return f"is a trained bias (bias is {config.get('bias')!r}), which is not read: train with bias 'none'"
    if "lora_magnitude_vector" in key:
        return "is of DoRA, which is not run: merge the adapter into the model with peft"
    if ".lora_" not in key:
        saved = config.get("modules_to_save")
        return (
            f"is a whole tensor beside the adapter (modules_to_save is {saved!r}), which is not read: train without it, or "
            "merge it into the model"
        )
    return "is no tensor of an adapter that is read; expected ....lora_A.weight"


def _of(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends in, as peft reads them."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default
