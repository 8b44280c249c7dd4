"""Check what a transformers model does by running it on a few tokens before it is used.

Configurations do not show whether a model ignores the positions or the mask it is given, shares K and V between layers,
or keeps several residual streams. So each model is run over a small tree and compared with itself, run plainly over
the tree's paths with masks and positions of its own making. A model that differs is refused.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foretoken.core.errors import ModelError
from foretoken.core.tree import chain_parent, layout
from foretoken.model.hf.attention import LayerMemory, RecordingCache
from foretoken.model.target import CausalModel

# Two committed tokens, then a root with two children and a grandchild under each: slots and visible slots of the last
# three nodes differ from those of a chain.
NUM_COMMITTED = 2
PARENT = (-1, 0, 0, 1, 2)
PATHS = ((0, 1, 3), (0, 2, 4))


@dataclass(frozen=True)
class Layers:
    """What ``inspect_layers`` found."""

    tuples: bool  # layers return tuples
    memory: list[LayerMemory]  # of each layer
    hidden_size: int
    vocab_size: int


@torch.no_grad()
def inspect_layers(module: PreTrainedModel, layers: nn.ModuleList, device: torch.device, *, name: str) -> Layers:
    """Run three tokens and note what each layer keeps and returns. Raises ModelError where that cannot be a tree's."""
    returned: dict[int, Any] = {}

    def note(index: int) -> Any:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            returned[index] = output

        return hook

    handles = [layer.register_forward_hook(note(index)) for index, layer in enumerate(layers)]
    cache = RecordingCache()
    tokens = probe_tokens(module, 3, device)[None]
    positions = torch.arange(3, device=device)[None]
    run: Any = module
    try:
        result = run(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    except Exception as error:
        raise ModelError(
            f"{name}: {type(module).__name__} cannot be run with given positions and cache ({first_line(error)}); "
            "expected a decoder-only model whose forward takes position_ids and past_key_values"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    silent = [index for index in range(len(layers)) if index not in cache.seen]
    if silent:
        raise ModelError(
            f"{name}: layers {silent[:4]} of {type(module).__name__} keep no keys and values of their own (a recurrent "
            "state, or K and V shared between layers); expected K and V of its own in every layer"
        )
    streams = [output[0] if isinstance(output, tuple) else output for output in returned.values()]
    if len(streams) != len(layers) or any(not isinstance(x, Tensor) or x.dim() != 3 for x in streams):
        raise ModelError(f"{name}: the layers of {type(module).__name__} do not pass on one residual stream [B, n, H]")
    return Layers(
        tuples=isinstance(returned[0], tuple),
        memory=[cache.seen[index] for index in range(len(layers))],
        hidden_size=streams[-1].shape[-1],
        vocab_size=result.logits.shape[-1],
    )


@torch.no_grad()
def check_tree(model: CausalModel, module: PreTrainedModel) -> None:
    """Compare a small tree's logits with plain runs of its paths, and ``logits`` with the model's own exit.

    Raises ModelError where they differ by more than rounding, or are not finite. Windows longer than the probe are not
    covered here; the tests cover them.
    """
    name = model.spec.name
    try:
        expected, tree, exit_error = _compare(model, module)
    except Exception as error:
        raise ModelError(f"{name}: {type(module).__name__} cannot be run over a tree ({first_line(error)})") from error
    if not bool(expected.isfinite().all()):
        raise ModelError(
            f"{name}: its logits are not finite in {model.spec.dtype}; load it in another dtype (bfloat16 or float32)"
        )
    errors = [relative_error(one, other) for one, other in zip(tree.flatten(0, 1), expected.flatten(0, 1), strict=True)]
    # A wrong mask or position shows as 0.2 to 1, and at each of nodes 2, 3 and 4. In half precision rounding alone may
    # send a token to other experts of a mixture, hence the best of those three; in float32 all nodes must agree.
    exact = model.spec.dtype in (torch.float32, torch.float64)
    tree_error, allowed = (max(errors), 1e-3) if exact else (min(errors[2], errors[4], errors[5]), 0.1)
    if tree_error > allowed:
        raise ModelError(
            f"{name}: logits of {type(module).__name__} over a tree differ from plain decoding by {tree_error:.1%} "
            f"(allowed {allowed:.1%}): it makes positions or masks of its own, so speculation would change its text"
        )
    if exit_error > allowed:
        raise ModelError(
            f"{name}: the exit of {type(module).__name__} is not a function of its last layer's output "
            f"(logits differ by {exit_error:.1%})"
        )


def _compare(model: CausalModel, module: PreTrainedModel) -> tuple[Tensor, Tensor, float]:
    """Logits of both paths run plainly and out of one tree, [2, 3, V] each, and the relative error of ``logits``."""
    device, run = model.spec.device, _plain(module)
    tokens = probe_tokens(module, NUM_COMMITTED + len(PARENT), device)
    prompt, nodes = tokens[:NUM_COMMITTED], tokens[NUM_COMMITTED:]
    expected = run(torch.stack([torch.cat((prompt, nodes[list(path)])) for path in PATHS]))[:, NUM_COMMITTED:]
    capacity = len(tokens) + 1  # one unused slot, so that the last slot is not the newest token
    cache = model.new_cache(1, capacity)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    model.forward(prompt[None], layout(chain_parent(NUM_COMMITTED, device)[None], nothing, capacity), cache, head=False)
    plan = layout(torch.tensor(PARENT, device=device)[None], nothing + NUM_COMMITTED, capacity)
    output = model.forward(nodes[None], plan, cache)
    assert output.logits is not None
    tree = torch.stack([output.logits[0, list(path)] for path in PATHS])
    return expected, tree, relative_error(model.logits(output.hidden), output.logits)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what varies in expected, both in float32."""
    got, expected = got.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm().clamp_min(1e-6)
    return float((got - expected).norm() / spread)


def probe_tokens(module: PreTrainedModel, count: int, device: torch.device) -> Tensor:
    """[count] int64 distinct token ids, as far as the vocabulary goes, away from the special ones at its start."""
    vocab_size = int(module.config.get_text_config().vocab_size)
    return (vocab_size // 3 + 7 * torch.arange(count, device=device)) % vocab_size


def _plain(module: PreTrainedModel) -> Any:
    """A plain call of the model: no mask, no positions, no cache."""
    call: Any = module

    def run(tokens: Tensor) -> Tensor:
        logits: Tensor = call(input_ids=tokens, use_cache=False).logits
        return logits.to(tokens.device)

    return run


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
