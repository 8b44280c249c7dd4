"""How large a tree an EAGLE head grows behind suffix: what this machine's passes of this target allow."""

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretell.core.measured import measured_now, of_passes
from foretell.core.tree import chain_parent, layout
from foretell.costs.table import isotonic
from foretell.kernels.build import loaded_files
from foretell.model.target import CausalModel

TOKENS = {2: 1.0, 3: 1.05, 4: 1.08, 6: 1.125}
"""Tokens a step by the guesses of an opt_tree, three deep; the smallest tree's are 1: SmolLM2-135M with its EAGLE-3 head
after suffix, ten prompts of the bundled suite, mean of temperatures 0 and 1 (docs/performance.md)."""
BESIDE = 0.2
"""What stands beside the target's pass in a step with guesses, in plain passes: the head, verification, bookkeeping."""
LEAST_BYTES = 64 << 20
"""Of weights: a smaller target stays in the caches, where every node costs what it computes."""
FEW_BYTES = 512 << 20
"""Of weights: a smaller target is timed in more rounds, which take no longer."""
CONTEXT, ROUNDS, MORE_ROUNDS = 64, 2, 6  # rounds of each of two measurements
WIDTHS = (1, *(size + 2 for size in TOKENS))
"""Nodes of the passes that are timed: a plain one's, and those of each size with the root and one token of a suffix."""

_known: WeakKeyDictionary[CausalModel, int] = WeakKeyDictionary()


def size_for(model: CausalModel) -> int:
    """``tree_size``, asked once of a model: methods that are loaded for it side by side grow trees of one size, whatever
    the machine did in between."""
    size = _known.get(model)
    if size is None:
        size = _known[model] = tree_size(model)
    return size


def tree_size(model: CausalModel) -> int:
    """Guesses of a tree that pay best where wide passes cost what they cost here: measured in 20 to 60 passes, or
    recalled from an earlier start.

    It changes no text. On an accelerator, where a pass reads weights for as long as several nodes compute, the largest.
    """
    spec = model.spec
    if spec.device.type != "cpu":
        return max(TOKENS)
    # Of a model that several processes share each holds another part, and all must make the same passes.
    weight_bytes = model.share(spec.weight_bytes)
    if weight_bytes < LEAST_BYTES or spec.max_positions < CONTEXT + 16:
        return min(TOKENS)
    rounds = MORE_ROUNDS if weight_bytes < FEW_BYTES else ROUNDS
    if model.is_shared:  # and none may find measured what another has not
        return model.share(best_size(measured_now(WIDTHS, partial(pass_seconds, model, rounds))))
    subject = {"of": "tree_size", "kernels": loaded_files(), "model": spec.described}
    return best_size(of_passes(subject, WIDTHS, partial(pass_seconds, model, rounds), partial(plain_seconds, model)))


def best_size(seconds: Mapping[int, float]) -> int:
    """seconds: of passes by their nodes, those of ``WIDTHS``."""
    smooth = dict(zip(seconds, isotonic(list(seconds.values())), strict=True))  # a wider pass is never cheaper
    return max(TOKENS, key=lambda size: TOKENS[size] / (smooth[size + 2] / smooth[1] + BESIDE))


@torch.inference_mode()
def pass_seconds(model: CausalModel, rounds: int = ROUNDS) -> dict[int, float]:
    """Least seconds of passes over 1 node and over those that ``best_size`` asks for, in interleaved rounds; ascending."""
    cache, length = model.new_cache(1, CONTEXT + 16), torch.tensor([CONTEXT])
    tokens = torch.arange(CONTEXT)[None] % model.spec.vocab_size
    model.forward(tokens, layout(chain_parent(CONTEXT, length.device)[None], torch.tensor([0]), CONTEXT + 16), cache)
    plans = {width: layout(_two_branches(width)[None], length, CONTEXT + 16) for width in WIDTHS}
    least = dict.fromkeys(WIDTHS, float("inf"))
    for _ in range(rounds):
        for width, plan in plans.items():
            begun = perf_counter()
            model.forward(tokens[:, :width], plan, cache)
            least[width] = min(least[width], perf_counter() - begun)
    return least


def _two_branches(width: int) -> Tensor:
    """[width] a parent vector: a recurrent model reads a tree otherwise than a line."""
    parent = (torch.arange(width) - 2).clamp(min=0)
    parent[0] = -1
    return parent


@torch.inference_mode()
def plain_seconds(model: CausalModel) -> dict[int, float]:
    """The lesser of two passes over one node, without a text before it: what ``pass_seconds`` may not be far above."""
    cache, seconds = model.new_cache(1, 16), []
    plan = layout(chain_parent(1, torch.device("cpu"))[None], torch.tensor([0]), 16)
    for _ in range(2):
        begun = perf_counter()
        model.forward(torch.zeros(1, 1, dtype=torch.int64), plan, cache)
        seconds.append(perf_counter() - begun)
    return {1: min(seconds)}
