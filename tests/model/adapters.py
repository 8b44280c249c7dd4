"""Random adapters of low rank, in files as peft's save_pretrained writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path, weights: Mapping[str, Tensor], *, targets: Sequence[str] = ALL, rank: int = 4, seed: int = 0,
    size: float = 0.15, tensors: Mapping[str, Tensor | None] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """An adapter of every linear of ``weights`` (a model's state) whose name ends in one of ``targets``.

    size: of its entries, about those of B A. tensors: what replaces or (None) removes some; config: keys of the file.
    """
    random, made = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module == name or module.split(".")[-1] not in targets:
            continue
        rows, columns = weight.shape
        key = f"base_model.model.{module}"
        made[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=random) * columns**-0.5
        made[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=random) * size
    for name, other in (tensors or {}).items():
        made.pop(name, None)
        if other is not None:
            made[name] = other
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, directory / "adapter_model.safetensors")
    whole = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets),
        "bias": "none", "modules_to_save": None, "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
        "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, **config,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(whole))
    return directory
