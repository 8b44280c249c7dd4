"""Heads and targets with one mistake each, planted in copies of the bundled ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foretell

BUNDLED = Path(foretell.__path__[0]) / "bundled"
Tensors = dict[str, Tensor]


def copy(kind: str, into: Path, *, record: bool = True) -> Path:
    """A copy of a bundled directory, writable; without what is recorded of its training on request."""
    out = into / kind
    shutil.copytree(BUNDLED / kind, out)
    if not record:
        (out / "record.json").unlink()
        edit_config(out, lambda config: config["foretell"].pop("target"))
    return out


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return directory


def edit_tensors(directory: Path, change: Callable[[Tensors], None]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return directory


def layers_one_early(into: Path) -> Path:
    def change(config: dict[str, Any]) -> None:
        config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 4]

    return edit_config(copy("eagle3", into), change)


def exit_one_early(into: Path) -> Path:
    return edit_config(copy("kangaroo", into), lambda config: config.update(exit_layer=1))


def rope_in_pairs(into: Path) -> Path:
    """Rows of q and k as files of interleaved rotary dimensions have them."""

    def change(tensors: Tensors) -> None:
        for name, weight in tensors.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = weight.shape[0] // 64
                tensors[name] = weight.view(heads, 2, 32, -1).transpose(1, 2).reshape(weight.shape)

    return edit_tensors(copy("eagle3", into), change)


def norm_after(into: Path) -> Path:
    return edit_config(copy("eagle3", into), lambda config: config.update(norm_output=True))


def residual_normed(into: Path) -> Path:
    return edit_config(copy("eagle3", into), lambda config: config.update(norm_before_residual=True))


def first_ids(into: Path) -> Path:
    """The draft vocabulary as if it were the target's first ids."""

    def change(tensors: Tensors) -> None:
        size, total = len(tensors["d2t"]), len(tensors["t2d"])
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
        tensors["t2d"] = torch.arange(total) < size

    return edit_tensors(copy("eagle3", into), change)


def ids_for_offsets(into: Path) -> Path:
    def change(tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    return edit_tensors(copy("eagle3", into), change)


def too_large_for_half(into: Path) -> Path:
    """One matrix scaled beyond float16 and stored so."""

    def change(tensors: Tensors) -> None:
        for name, weight in tensors.items():
            if weight.is_floating_point():
                scale = 1e6 if name.endswith("down_proj.weight") else 1.0
                tensors[name] = (weight.float() * scale).half()

    return edit_tensors(copy("eagle3", into), change)


def joined_the_other_way(into: Path) -> Path:
    def change(tensors: Tensors) -> None:
        tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], 1)

    return edit_tensors(copy("eagle1", into), change)


def other_basis(into: Path) -> Path:
    """A target that writes what the bundled one does, its hidden dimensions in another order: no head of the one fits the
    other."""
    out = copy("target", into)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    inputs = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")

    def change(tensors: Tensors) -> None:
        for name, weight in tensors.items():
            module = name.split(".")[-2]
            if module in inputs:
                tensors[name] = weight[:, order]
            elif module in ("o_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "norm"):
                tensors[name] = weight[order]

    return edit_tensors(out, change)
