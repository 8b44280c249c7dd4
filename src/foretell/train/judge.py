"""Training a judge from mined labels: a logistic regression on the target's hidden states (AutoJudge, 2504.20039, 3.2).

Its inputs are standardised, its classes weighted to equal mass, its L2 penalty is the one of best ROC-AUC on a tenth of
the prompts, held out. Recall is that of *important* tokens: the share of them that is refused. From it follows the
threshold, and the bias is shifted so that the threshold is 0.5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, require
from foretell.core.noise import derive_seed
from foretell.core.settings import value_of
from foretell.core.tree import TokenTree, layout
from foretell.heads import formats
from foretell.methods.acceptance.objective import area_under_curve
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights, features
from foretell.model.target import CausalModel, Target
from foretell.train.mining import Mined, read_labels

STRENGTHS = tuple(10.0**power for power in range(-4, 3))
"""Of the L2 penalty, per example: the grid."""
RECALLS = (1.0, 0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.25, 0.0)
"""Rows of the table of thresholds."""


@dataclass(frozen=True)
class Examples:
    """M labelled tokens."""

    x: Tensor  # [M, W] float32: what the head is linear in
    important: Tensor  # [M] bool
    prompt: Tensor  # [M] int64 number of the prompt

    def at(self, chosen: Tensor) -> "Examples":
        """Those where chosen [M] is True."""
        return Examples(self.x[chosen], self.important[chosen], self.prompt[chosen])


@torch.inference_mode()
def collect(model: CausalModel, labels: Sequence[Mined], config: JudgeHeadConfig, *, batch_size: int = 8) -> Examples:
    """The hidden states of all swapped tokens, each after the target has read it, following the text that it stood in.

    A prompt is one tree: its last text, which holds the unimportant swaps, as a chain, and each important swap as a leaf
    beside the token that stayed.
    """
    used = [mined for mined in labels if mined.swaps]
    # Similar lengths are batched together: less padding.
    order = sorted(used, key=lambda mined: len(mined.prompt) + len(mined.answer))
    x, important, prompt = [], [], []
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        tree, nodes = _tree(part, model.spec.device)
        longest = tree.num_nodes
        plan = layout(tree.parent, torch.zeros(len(part), dtype=torch.int64, device=model.spec.device), longest)
        taps = Target(model, len(part), longest).forward(tree.tokens, plan, taps=(config.layer,), head=False).taps
        assert taps is not None
        for row, mined in enumerate(part):
            x.append(features(taps[row, nodes[row]], config).cpu())
            important += [swap.important for swap in mined.swaps]
            prompt += [mined.index] * len(mined.swaps)
    empty = torch.zeros(0, config.columns)
    return Examples(torch.cat([empty, *x]), torch.tensor(important, dtype=torch.bool), torch.tensor(prompt))


def _tree(part: Sequence[Mined], device: torch.device) -> tuple[TokenTree, list[list[int]]]:
    """A tree a prompt, padded; and of each the nodes of its swaps."""
    tokens, parents, nodes = [], [], []
    for mined in part:
        ids = [*mined.prompt, *mined.answer]
        parent = list(range(-1, len(ids) - 1))
        mine = []
        for swap in mined.swaps:
            node = len(mined.prompt) + swap.position
            if swap.important:
                parent.append(node - 1)
                ids.append(swap.token)
                node = len(ids) - 1
            mine.append(node)
        tokens.append(ids)
        parents.append(parent)
        nodes.append(mine)
    width = max(map(len, tokens))
    ids_of = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=device)
    parent_of = torch.tensor([row + [-1] * (width - len(row)) for row in parents], device=device)
    return TokenTree(ids_of, parent_of, torch.zeros_like(ids_of)), nodes


def fit_logistic(x: Tensor, y: Tensor, strength: float, *, max_steps: int = 300) -> tuple[Tensor, Tensor]:
    """(weight [W], bias []) of least mean weighted log loss + strength / 2 |weight|^2, in the dtype of x [M, W].

    y [M] bool; each class has half of the weight. The bias is not penalised. L-BFGS from zero: the problem is convex.
    """
    sign = torch.where(y, 1.0, -1.0).to(x.dtype)
    share = y.to(x.dtype).mean()
    importance = torch.where(y, 0.5 / share, 0.5 / (1 - share)) / len(y)
    parameters = torch.zeros(x.shape[1] + 1, dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=max_steps, tolerance_grad=1e-7, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        weight, bias = parameters[:-1], parameters[-1]
        margin = sign * (x @ weight + bias)
        value = (importance * torch.nn.functional.softplus(-margin)).sum() + strength / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    found = parameters.detach()
    return found[:-1], found[-1]


def standardised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(z, mean, scale): x [M, W] with columns of mean 0 and deviation 1; a constant column keeps scale 1."""
    mean, scale = x.mean(0), x.std(0, correction=0)
    scale = torch.where(scale > 1e-12 * x.abs().amax(0).clamp(min=1e-30), scale, 1.0)
    return (x - mean) / scale, mean, scale


def fold(weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same map on inputs that are not standardised: w . (x - mean) / scale + b = w' . x + b'."""
    folded = weight / scale
    return folded, bias - folded @ mean


def cut_of(score: Tensor, important: Tensor, recall: float) -> float:
    """The least cut such that of the important tokens at least a share ``recall`` scores no higher; -inf for 0."""
    mine = score[important].sort().values
    need = math.ceil(recall * len(mine) - 1e-9)
    return float(mine[need - 1]) if need else -math.inf


def table(score: Tensor, important: Tensor, shift: float) -> list[dict[str, float]]:
    """The effect of each threshold, by recall: score [M] is the logit of "acceptable" before it is shifted by
    ``shift``."""
    rows = []
    for recall in RECALLS:
        cut = cut_of(score, important, recall)
        accepted = score > cut
        rows.append(
            {
                "threshold": round(1 / (1 + math.exp(min(700.0, -(cut + shift)))), 4),
                "recall": round(float((~accepted[important]).double().mean()), 4),
                "unimportant_accepted": round(float(accepted[~important].double().mean()), 4),
                "accepted": round(float(accepted.double().mean()), 4),
            }
        )
    return rows


def held_out(prompt: Tensor, seed: int) -> Tensor:
    """[M] bool: about a tenth of the prompts, independent of the other prompts."""
    numbers = prompt.tolist()
    chosen = {number: derive_seed(seed, number) % 10 == 0 for number in set(numbers)}
    return torch.tensor([chosen[number] for number in numbers], dtype=torch.bool)


def train_judge(
    model: CausalModel,
    labels_path: Path,
    out: Path,
    *,
    layer: int | None = None,
    columns: int | None = None,
    recall: float = 0.9,
    seed: int = 0,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Train a judge for a target, write it to the directory ``out``, and return its figures.

    layer: whose output is read (default: the last). columns: how many of its first columns (default: all). recall: of
    the important held-out tokens, the share that the threshold 0.5 must refuse. Raises ConfigError.
    """
    spec = model.spec
    given = {"layer": layer, "columns": columns, "seed": seed, "batch_size": batch_size}
    for key, value in given.items():
        value_of(value, int if key in ("seed", "batch_size") else int | None, key)
    recall = value_of(recall, float, "recall")
    if batch_size < 1 or (columns is not None and not 1 <= columns <= spec.hidden_size):
        raise ConfigError(
            f"batch_size = {batch_size} must be at least 1, and columns = {columns} between 1 and {spec.hidden_size}"
        )
    layer = spec.num_layers - 1 if layer is None else layer
    if not 0 <= layer < spec.num_layers:
        raise ConfigError(f"layer = {layer} must be between 0 and {spec.num_layers - 1}: {spec.name!r} has no other")
    require(0 <= recall <= 1, "recall", recall, "between 0 and 1")
    config = JudgeHeadConfig(spec.hidden_size, spec.vocab_size, layer, columns or spec.hidden_size)
    examples = collect(model, read_labels(labels_path), config, batch_size=batch_size)
    out_of_training = held_out(examples.prompt, seed)
    seen, unseen = examples.at(~out_of_training), examples.at(out_of_training)
    for name, part in (("", examples), (" of the training prompts", seen), (" of the held-out prompts", unseen)):
        number = int(part.important.sum())
        if number in (0, len(part.important)):
            raise ConfigError(
                f"{labels_path}: {number} of {len(part.important)} labels{name} are important; both kinds are needed: "
                "mine more prompts"
            )
    z, mean, scale = standardised(seen.x.double())
    best: tuple[float, float, Tensor, Tensor] | None = None
    grid = []
    for strength in STRENGTHS:
        weight, bias = fold(*fit_logistic(z, ~seen.important, strength), mean, scale)
        auc = area_under_curve(unseen.x.double() @ weight + bias, ~unseen.important)
        grid.append({"strength": strength, "auc": round(auc, 4)})
        if best is None or auc > best[0]:
            best = (auc, strength, weight, bias)
    assert best is not None
    auc, strength, weight, bias = best
    score = unseen.x.double() @ weight + bias
    cut = cut_of(score, unseen.important, recall)
    shift = 0.0 if math.isinf(cut) else -cut
    figures: dict[str, Any] = {
        "target": spec.name,
        "labels": len(examples.important),
        "important": int(examples.important.sum()),
        "prompts": len(set(examples.prompt.tolist())),
        "held_out_labels": len(unseen.important),
        "held_out_important": int(unseen.important.sum()),
        "auc": round(auc, 4),
        "auc_training": round(area_under_curve(seen.x.double() @ weight + bias, ~seen.important), 4),
        "strength": strength,
        "grid": grid,
        "recall": recall,
        "shift": round(shift, 6),
        "seed": seed,
        "thresholds": table(score, unseen.important, shift),
    }
    head = JudgeWeights(replace(config, training=figures))
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.fill_(float(bias) + shift)
    formats.save(head, out)
    return figures
