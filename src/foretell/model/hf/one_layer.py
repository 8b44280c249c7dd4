"""One decoder layer of a family as transformers has it, given tensors: what an MTP module is made of."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Qwen2Config

from foretell.checkpoints.files import read_json
from foretell.checkpoints.source import is_file, read_config
from foretell.core.errors import ModelError, first_line
from foretell.model.hf.split import find_layers
from foretell.model.target import ModelSpec

_BORROWED = {"mimo": Qwen2Config}
"""Types that transformers does not know, whose decoder layer is another's."""


def text_config(path: Path, *, name: str) -> Any:
    """The text configuration of a checkpoint or GGUF file whose decoder layer transformers can build. Raises ModelError."""
    raw = {} if is_file(path) else read_json(path / "config.json", name=name)
    kind = raw.get("model_type")
    if kind in _BORROWED:
        known = {key: value for key, value in raw.items() if key not in ("auto_map", "architectures", "model_type")}
        return _BORROWED[kind](**known)
    try:
        return read_config(path, name=name).get_text_config()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: config.json cannot be used ({first_line(error)})") from error


def one_layer(config: Any, block: dict[str, Tensor], spec: ModelSpec, *, name: str) -> tuple[Any, nn.Module]:
    """A decoder of the family with one layer, which holds these tensors; nothing else of it has memory. Raises
    ModelError."""
    config = deepcopy(config)
    sparse = any(".experts." in f".{key}" for key in block)
    for key, value in {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "vocab_size": 8,
        "pad_token_id": None,
    }.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name}: transformers knows no decoder layer of type {config.model_type!r} for its MTP head")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        module = (kind[0] if isinstance(kind, tuple) else kind)(config)
    decoder: Any
    decoder, layers = find_layers(module, name=name)
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config).to(spec.device)
    layer = layers[0]
    wanted = layer.state_dict()
    given = _stacked(block, wanted)
    for key in sorted(given.keys() | wanted.keys()):
        if key not in given or key not in wanted:
            fault = "lacks" if key not in given else "has the unknown"
            raise ModelError(
                f"{name}: its MTP head {fault} tensor {key!r} of a {type(layer).__name__}; expected a checkpoint of type "
                f"{config.model_type!r} as its authors publish it"
            )
        if given[key].shape != wanted[key].shape:
            raise ModelError(
                f"{name}: tensor {key!r} of its MTP head is {tuple(given[key].shape)}, and config.json says "
                f"{tuple(wanted[key].shape)}"
            )
    kept = {  # what a family keeps in float32 (the correction of a router) stays so
        key: tensor.to(spec.device, torch.float32 if key.endswith("e_score_correction_bias") else spec.dtype)
        for key, tensor in given.items()
    }
    layer.load_state_dict(kept, assign=True)
    layer.requires_grad_(requires_grad=False)
    return decoder, layer


def _stacked(block: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as checkpoints have them, as the stacks that transformers computes with: gate and up [E, 2 I, H],
    down [E, H, I]."""
    out = dict(block)
    for stack in [key for key in wanted if key.endswith("experts.gate_up_proj") and key not in block]:
        prefix = stack.removesuffix("gate_up_proj")
        count = 0
        gates, downs = [], []
        while all(f"{prefix}{count}.{part}_proj.weight" in out for part in ("gate", "up", "down")):
            gate, up, down = (out.pop(f"{prefix}{count}.{part}_proj.weight") for part in ("gate", "up", "down"))
            gates.append(torch.cat([gate, up]))
            downs.append(down)
            count += 1
        if count:
            out[stack], out[f"{prefix}down_proj"] = torch.stack(gates), torch.stack(downs)
    return out
