"""Check what a transformers model does by running it on a few tokens before it is used.

Configurations do not show whether a model ignores the positions or the mask it is given, shares K and V between layers,
or keeps several residual streams. So each model is run over a small tree and compared with itself, run plainly over
the tree's paths with masks and positions of its own making. A model that differs is refused.
"""

from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foretell.core.errors import ModelError, first_line
from foretell.core.tree import chain_parent, chain_tree, layout
from foretell.model.hf.attention import LayerMemory
from foretell.model.hf.reading import ModuleMixer
from foretell.model.hf.recurrent.mixers import StateRecorder
from foretell.model.hf.runner import ModuleRunner, hooked
from foretell.model.target import CausalModel, PassOptions

# Two committed tokens, then a root with two children and a grandchild under each: slots and visible slots of the last
# three nodes differ from those of a chain.
NUM_COMMITTED = 2
PARENT = (-1, 0, 0, 1, 2)
PATHS = ((0, 1, 3), (0, 2, 4))


@dataclass(frozen=True)
class Layers:
    """What ``inspect_layers`` found."""

    tuples: int  # length of the tuples that layers return; 0: they return the stream itself
    memory: list[LayerMemory]  # of each layer; of each attention where layers have several
    shares: bool  # some layers read K and V of others, within one pass
    mixers: list[ModuleMixer]  # recurrent modules, in the order of their layers
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

    cache = StateRecorder()
    tokens = probe_tokens(module, 3, device)[None]
    positions = torch.arange(3, device=device)[None]
    notes = (layer.register_forward_hook(note(index)) for index, layer in enumerate(layers))
    try:
        with hooked(notes), cache.watching(layers) as inputs:
            result = ModuleRunner(module)(tokens, positions, cache)
    except Exception as error:
        raise ModelError(
            f"{name}: {type(module).__name__} cannot be run with given positions and cache ({first_line(error)}); "
            "expected a decoder-only model whose forward takes position_ids and past_key_values"
        ) from error
    silent = [index for index in range(len(layers)) if index not in cache.seen]
    mixers = cache.mixers(layers, inputs)
    if not cache.seen and not mixers:
        raise ModelError(
            f"{name}: the layers of {type(module).__name__} keep no keys and values in the cache they are given "
            "(transformers recomputes them, or keeps a state out of reach); expected a model that decodes with a cache"
        )
    streams = [output[0] if isinstance(output, tuple) else output for output in returned.values()]
    if len(streams) != len(layers) or any(not isinstance(x, Tensor) or x.dim() != 3 for x in streams):
        raise ModelError(f"{name}: the layers of {type(module).__name__} do not pass on one residual stream [B, n, H]")
    return Layers(
        tuples=len(returned[0]) if isinstance(returned[0], tuple) else 0,
        # A layer may keep nothing (recurrent, without attention, or reading another's), or more than one K and V.
        memory=[
            cache.seen.get(index, _nothing(streams[min(index, len(streams) - 1)]))
            for index in range(max((len(layers), *(x + 1 for x in cache.seen))))
        ],
        shares=bool(silent) and not mixers,
        mixers=mixers,
        hidden_size=streams[-1].shape[-1],
        vocab_size=result.logits.shape[-1],
    )


def _nothing(stream: Tensor) -> LayerMemory:
    """Of a layer without attention."""
    return LayerMemory(0, 0, 0, stream.dtype, stream.device)


@torch.no_grad()
def first_position(module: PreTrainedModel, device: torch.device) -> int:
    """The index of the first position in a model's table: the RoBERTa family keeps the first rows for padding."""
    seen: list[int] = []

    def note(embedding: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            seen.append(int(args[0].min()))

    tables = [
        x for name, x in module.named_modules() if name.endswith("position_embeddings") and type(x) is nn.Embedding
    ]
    if tables:
        with hooked(table.register_forward_pre_hook(note) for table in tables):
            _plain(module)(probe_tokens(module, 3, device)[None])
    return min(seen, default=0)


@torch.no_grad()
def check_tree(model: CausalModel, module: PreTrainedModel) -> None:
    """Compare a small tree's logits with plain runs of its paths, and ``logits`` with the model's own exit.

    Raises ModelError where they differ by more than rounding, or are not finite. Windows longer than the probe are not
    covered here; the tests cover them.
    """
    name = model.spec.name
    expected, tree, exit_error = _compared(model, module, num_trees=1)
    if not bool(expected.isfinite().all()):
        raise ModelError(
            f"{name}: its logits are not finite in {model.spec.dtype}; load it in another dtype (bfloat16 or float32)"
        )
    tree_error, allowed = _judged(model, tree, expected)
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


@torch.no_grad()
def check_branches(model: CausalModel, module: PreTrainedModel) -> None:
    """Raise ModelError where a recurrent model's logits over a tree that comes after a side branch of another are not those
    of plain decoding."""
    expected, tree, _ = _compared(model, module, num_trees=2)
    error, allowed = _judged(model, tree, expected)
    if not error <= allowed:
        raise ModelError(
            f"{model.spec.name}: logits of {type(module).__name__} over a tree differ from plain decoding by {error:.1%} "
            f"(allowed {allowed:.1%})"
        )


def _compared(model: CausalModel, module: PreTrainedModel, num_trees: int) -> tuple[Tensor, Tensor, float]:
    """``_compare``; what a model raises over a tree is a ModelError."""
    try:
        return _compare(model, module, num_trees)
    except Exception as error:
        name, kind = model.spec.name, type(module).__name__
        raise ModelError(f"{name}: {kind} cannot be run over a tree ({first_line(error)})") from error


def _judged(model: CausalModel, tree: Tensor, expected: Tensor) -> tuple[float, float]:
    """The relative error of a tree's paths [2, 3, V], and how large it may be."""
    errors = [relative_error(one, other) for one, other in zip(tree.flatten(0, 1), expected.flatten(0, 1), strict=True)]
    # A wrong mask or position shows as 0.2 to 1, and at each of nodes 2, 3 and 4. In half precision rounding alone may
    # send a token to other experts of a mixture, hence the best of those three; in float32 all nodes must agree.
    exact = model.spec.dtype in (torch.float32, torch.float64)
    return (max(errors), 1e-3) if exact else (min(errors[2], errors[4], errors[5]), 0.1)


# Guesses of each step, and how many of them are kept with the root, in each of two rows: some rejected, some not, a lag
# that is read in a call of its own. The third step has a row without guesses.
CHAIN = (((3, 3), (1, 3)), ((4, 2), (3, 3)), ((0, 4), (1, 2)), ((3, 3), (4, 1)), ((4, 4), (2, 5)), ((2, 3), (1, 1)))
PROMPTS = (5, 2)


@torch.no_grad()
def chain_error(model: CausalModel, module: PreTrainedModel) -> float:
    """The largest relative error of logits over lines of guesses, of two rows, most of them rejected in part, against plain
    runs over the same text; infinite where they are not finite. An error of the model's own code is raised.

    In half precision rounding alone may send a token to other experts of a mixture, so a line of three tokens or more
    counts by the median of its tokens, and shorter ones do not: a wrong state is wrong for all tokens of a line, and
    of later lines.
    """
    exact = model.spec.dtype in (torch.float32, torch.float64)
    device, run = model.spec.device, _plain(module)
    ids = probe_tokens(module, 200, device).tolist()
    texts = [ids[:length] for length in PROMPTS]
    rest = ids[sum(PROMPTS) :]
    capacity = max(PROMPTS) + sum(max(kept) for _, kept in CHAIN) + 8
    cache = model.new_cache(2, capacity)
    worst = 0.0
    for guesses, kept in (((1, 1), (0, 0)), *CHAIN):
        is_prompt = not any(kept)
        lines = [text[:-1] for text in texts] if is_prompt else [[text[-1]] for text in texts]
        if not is_prompt:
            for line, count in zip(lines, guesses, strict=True):
                line += [rest.pop(0) for _ in range(count)]
        filled = [0 if is_prompt else len(text) - 1 for text in texts]
        width = max(map(len, lines))
        counts = torch.tensor([len(line) for line in lines], device=device)
        tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines], device=device)
        plan = layout(chain_tree(tokens, counts).parent, torch.tensor(filled, device=device), capacity)
        logits = model.forward(tokens, plan, cache).logits
        assert logits is not None
        for row, (text, line, start) in enumerate(zip(texts, lines, filled, strict=True)):
            expected = run(torch.tensor([text[:start] + line], device=device))[0, start:]
            found = logits[row, : len(line)]
            if not bool(expected.isfinite().all()):
                worst = float("inf")
            elif exact:
                worst = max(worst, relative_error(found, expected))
            elif len(line) > 2:
                worst = max(worst, _median_error(found, expected))
        if not is_prompt:
            for text, line, count in zip(texts, lines, kept, strict=True):
                text += [*line[1:count], rest.pop(0)]  # the kept guesses and a bonus token
    return worst


def check_chain(model: CausalModel, module: PreTrainedModel) -> None:
    """Raise ModelError where lines of guesses, some of them rejected, do not give the logits of plain decoding."""
    name, kind = model.spec.name, type(module).__name__
    try:
        error = chain_error(model, module)
    except Exception as caught:
        raise ModelError(f"{name}: {kind} cannot be run over a line of guesses ({first_line(caught)})") from caught
    allowed = 1e-3 if model.spec.dtype in (torch.float32, torch.float64) else 0.1
    if not error <= allowed:
        raise ModelError(
            f"{name}: logits of {kind} over lines of guesses differ from plain decoding by {error:.1%} (allowed "
            f"{allowed:.1%}): its states cannot be taken up again in the middle of a text"
        )


def _compare(model: CausalModel, module: PreTrainedModel, num_trees: int) -> tuple[Tensor, Tensor, float]:
    """Logits of both paths run plainly and out of a tree, [2, 3, V] each, and the relative error of ``logits``. The tree is
    the last of num_trees; of those before, the second path was kept."""
    device, run = model.spec.device, _plain(module)
    tokens = probe_tokens(module, NUM_COMMITTED + num_trees * len(PARENT), device)
    text, trees = tokens[:NUM_COMMITTED], tokens[NUM_COMMITTED:].view(num_trees, -1)
    capacity = len(tokens) + 1  # one unused slot, so that the last slot is not the newest token
    cache, kept = model.new_cache(1, capacity), torch.tensor([PATHS[1]], device=device)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    plan = layout(chain_parent(NUM_COMMITTED, device)[None], nothing, capacity)
    model.forward(text[None], plan, cache, PassOptions(head=False))
    for number, nodes in enumerate(trees):
        plan = layout(torch.tensor(PARENT, device=device)[None], nothing + len(text), capacity)
        output = model.forward(nodes[None], plan, cache)
        if number < num_trees - 1:
            cache.move(len(text) + kept, len(text) + torch.arange(kept.shape[1], device=device)[None])
            text = torch.cat((text, nodes[kept[0]]))
    assert output.logits is not None
    expected = run(torch.stack([torch.cat((text, nodes[list(path)])) for path in PATHS]))[:, len(text) :]
    tree = torch.stack([output.logits[0, list(path)] for path in PATHS])
    return expected, tree, relative_error(model.logits(output.hidden), output.logits)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what varies in expected, both in float32."""
    got, expected = got.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm().clamp_min(1e-6)
    return float((got - expected).norm() / spread)


def _median_error(got: Tensor, expected: Tensor) -> float:
    """The median of the errors of each token, infinite where one is no number."""
    errors = [relative_error(one, other) for one, other in zip(got, expected, strict=True)]
    return median(errors) if all(map(isfinite, errors)) else float("inf")


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
