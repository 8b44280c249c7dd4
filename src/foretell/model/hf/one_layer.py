"""One decoder layer of a family as transformers has it, given tensors: what an MTP module is made of."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, Qwen2Config

from foretell.checkpoints.files import read_json
from foretell.checkpoints.source import is_file, read_config
from foretell.core.errors import ModelError, first_line
from foretell.model.hf.runner import forwards, hooked
from foretell.model.target import ModelSpec


def find_layers(module: PreTrainedModel, *, name: str) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The decoder inside a language model, and its list of layers. Raises ModelError where there is no such pair."""
    model: Any = module  # transformers leaves get_decoder untyped
    config: Any = module.config.get_text_config()
    # Of an encoder-decoder model's decoder alone, num_hidden_layers may still be the encoder's.
    keys = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
    counts = list(dict.fromkeys(int(found) for key in keys if (found := getattr(config, key, None))))
    candidates: list[Any] = [model.get_decoder(), module.base_model]
    candidates += [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    for count in counts:
        for inner in (False, True):  # the BERT family holds its layers in a module of their own
            for decoder in candidates:
                if isinstance(decoder, PreTrainedModel) and (found := _layers_of(decoder, count, inner)) is not None:
                    return decoder, found
    raise ModelError(
        f"{name}: {type(module).__name__} has no one list of {counts[-1] if counts else 0} decoder layers, "
        "so it cannot be run layer by layer"
    )


def _layers_of(decoder: PreTrainedModel, count: int, inner: bool) -> nn.ModuleList | None:
    """The one list of count layers among a decoder's children, or (inner) among those of a plain module in it."""
    holders = [x for x in decoder.children() if not isinstance(x, PreTrainedModel)] if inner else [decoder]
    lists = [y for x in holders for y in x.children() if isinstance(y, nn.ModuleList) and len(y) == count]
    if len(lists) > 1:  # further per-layer lists (norms, projections) may hang beside the layers
        lists = [x for x in lists if any(n.endswith(("attn", "attention")) for n, _ in x[0].named_children())]
    return lists[0] if len(lists) == 1 else None


def towers(module: PreTrainedModel, *, name: str) -> list[PreTrainedModel]:
    """The models inside a multi-modal one that read images or sounds: they lie beside its text decoder."""
    config: Any = module.config
    if config.get_text_config() is config:
        return []
    decoder, _ = find_layers(module, name=name)
    inner = set(decoder.modules())
    beside = [
        child
        for child in module.modules()
        if isinstance(child, PreTrainedModel) and child not in inner and decoder not in set(child.modules())
    ]
    return [one for one in beside if not any(one is not other and one in set(other.modules()) for other in beside)]


def drop_towers(module: PreTrainedModel, *, name: str) -> None:
    """Free the weights of ``towers``: texts never reach them."""
    unused = {id(tower) for tower in towers(module, name=name)}
    if not unused:
        return
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            if id(child) in unused:
                setattr(parent, key, nn.Identity())


@contextmanager
def layer_range(layers: nn.ModuleList, first: int, stop: int, hidden: Tensor | None, *, tuples: int) -> Iterator[None]:
    """Let only layers [first, stop) compute while the context is open; hidden [B, n, H] is what layer first reads.

    tuples is the length of the tuples that this model's layers return, 0 for none. With first == stop == L nothing computes
    and the final norm reads hidden. Changes the module while it is open: two threads must not run the same module at once.

    A layer outside the range returns its input instead of computing; the last one below the range returns the given
    residual stream. So everything a model does around its layers (scaled or learned position embeddings, rotary
    tables, masks by layer type, final norm, scaled or capped logits) stays its own code.
    """
    skipped = [i for i in range(len(layers)) if not first <= i < stop]
    with forwards({layers[i]: _answer(hidden if i == first - 1 else None, tuples) for i in skipped}):
        yield


@contextmanager
def answering(decoder: nn.Module, normed: Tensor) -> Iterator[None]:
    """Let a decoder return normed [B, n, H] for what comes after its final norm, all else as it is, while open."""

    def put(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (normed, *output[1:])
        output.last_hidden_state = normed
        return output

    with hooked([decoder.register_forward_hook(put)]):
        yield


def _answer(given: Tensor | None, tuples: int) -> Callable[..., Any]:
    """A forward that returns ``given``, or else what it was given."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stream = hidden_states if given is None else given
        return (stream, *[None] * (tuples - 1)) if tuples else stream

    return forward


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
