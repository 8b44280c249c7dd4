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

from foretoken.core.errors import ModelError


def find_layers(module: PreTrainedModel, *, name: str) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The decoder inside a language model, and its list of layers. Raises ModelError where there is no such pair."""
    model: Any = module  # transformers leaves get_decoder untyped
    num_layers = int(module.config.get_text_config().num_hidden_layers)
    candidates: list[Any] = [model.get_decoder(), module.base_model]
    candidates += [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    for decoder in candidates:
        if not isinstance(decoder, PreTrainedModel):
            continue
        lists = [x for x in decoder.children() if isinstance(x, nn.ModuleList) and len(x) == num_layers > 0]
        if len(lists) > 1:  # further per-layer lists (norms, projections) may hang beside the layers
            lists = [x for x in lists if any(n.endswith(("attn", "attention")) for n, _ in x[0].named_children())]
        if len(lists) == 1:
            return decoder, lists[0]
    raise ModelError(
        f"{name}: {type(module).__name__} has no one list of {num_layers} decoder layers, "
        "so it cannot be run layer by layer"
    )


@contextmanager
def layer_range(layers: nn.ModuleList, first: int, stop: int, hidden: Tensor | None, *, tuples: bool) -> Iterator[None]:
    """Let only layers [first, stop) compute while the context is open; hidden [B, n, H] is what layer first reads.

    tuples says whether this model's layers return tuples. With first == stop == L nothing computes and the final norm
    reads hidden. Changes the module while it is open: two threads must not run the same module at once.
    """
    skipped = [i for i in range(len(layers)) if not first <= i < stop]
    saved: dict[int, Any] = {}
    absent = object()
    try:
        for index in skipped:
            # An attribute of the instance, which ``nn.Module.__call__`` finds before the class's. Accelerate's
            # dispatch hooks live in the same place, hence saved and put back rather than deleted.
            attributes = layers[index].__dict__
            saved[index] = attributes.get("forward", absent)
            attributes["forward"] = _answer(hidden if index == first - 1 else None, tuples)
        yield
    finally:
        for index, forward in saved.items():
            if forward is absent:
                del layers[index].__dict__["forward"]
            else:
                layers[index].__dict__["forward"] = forward


@contextmanager
def answering(decoder: nn.Module, normed: Tensor) -> Iterator[None]:
    """Let a decoder return normed [B, n, H] for what comes after its final norm, all else as it is, while open."""

    def put(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (normed, *output[1:])
        output.last_hidden_state = normed
        return output

    handle = decoder.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


def _answer(given: Tensor | None, tuples: bool) -> Callable[..., Any]:
    """A forward that returns ``given``, or else what it was given."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stream = hidden_states if given is None else given
        return (stream,) if tuples else stream

    return forward
