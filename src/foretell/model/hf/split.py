"""Running some layers of an unmodified transformers model, and finding those layers.

A layer outside the range returns its input instead of computing; the last one below the range returns the given
residual stream. So everything a model does around its layers (scaled or learned position embeddings, rotary tables,
masks by layer type, final norm, scaled or capped logits) stays its own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from foretell.core.errors import ModelError
from foretell.model.hf.runner import forwards, hooked


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
