"""What the certificate's tests share: table models, an engine, and defects to plant."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foretell.certify import Certificate, CertifyBudget, Check, certify
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.draft.base import Context, Drafter, Method
from foretell.draft.shapes import Shape
from foretell.engine.engine import Engine
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.model.target import Target
from tests.model.table import TableLM

VOCAB = 16
TARGET = TableLM(VOCAB, seed=1, sharpness=2.0, num_layers=1)
DRAFT = TableLM(VOCAB, seed=1, sharpness=2.0, num_layers=1, blur=0.4)
PROMPTS = [
    [int(x) for x in torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n))] for n in (1, 9, 2, 14)
]
SMALL = CertifyBudget(visits=2, distributions=3, batch_size=16, seeds=20_000)
CHAIN, TREE = "chain", "static/branching=3x2x1"


def engine(
    target: Any = TARGET, method: Method | None = None, *, gamma: int = 3, width: int = 0, draws: str = "auto"
) -> Engine:
    """A speculative engine of models in memory."""
    config = {"method": "draft_model", "num_speculative_tokens": gamma, "draws": draws}
    return Engine(target, speculative=config, method=method or DraftModel(DRAFT), width=width)


def certificate(made: Engine | None = None, **options: Any) -> Certificate:
    """A small one: one verifier and one shape unless asked otherwise."""
    settings: dict[str, Any] = {
        "verifiers": ["rejection"], "shapes": [CHAIN], "temperatures": (0.7, 1.0), "max_new_tokens": 12,
        "budget": SMALL, **options,
    }  # fmt: skip
    return certify(made or engine(), settings.pop("prompts", PROMPTS), **settings)


def check(found: Certificate, name: str) -> Check:
    """The one check of this name."""
    (one,) = [made for made in found.checks if made.name == name]
    return one


def failed(found: Certificate) -> set[str]:
    """Names of the checks with a defect."""
    return {made.name for made in found.defects}


class Spoilt(Method):
    """The draft model with a drafter of another class."""

    name, capabilities = DraftModel.name, DraftModel.capabilities

    def __init__(self, kind: Callable[..., Drafter], model: Any = DRAFT) -> None:
        self.kind, self.model = kind, model

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return self.kind(self.model, context, capacity)


class Tempered(ModelDrafter):
    """Draws from q and reports q at another temperature."""

    power = 1.5

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, draws, noise)
        if tree.q is None:
            return tree
        q = tree.q**self.power
        return replace(tree, q=q / q.sum(-1, keepdim=True).clamp(min=1e-30))


class Echo(ModelDrafter):
    """Draws every node of a chain with the noise that decides where the walk stops."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        return super().propose(context, shape, draws, Shared(noise.seeds, noise.positions))


class Twin(ModelDrafter):
    """Draws all nodes of a step with one number."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        return super().propose(context, shape, draws, One(noise.seeds, noise.positions))


class Shared(Noise):
    def draft(self, node: int) -> Tensor:
        return self.stop()

    def draft_at(self, index: Tensor) -> Tensor:
        return self.stop()[:, None].expand(-1, len(index))


class One(Noise):
    def draft(self, node: int) -> Tensor:
        return super().draft(0)

    def draft_at(self, index: Tensor) -> Tensor:
        return super().draft_at(torch.zeros_like(index))


class Relabelled(ModelDrafter):
    """Draws siblings without replacement and calls them independent."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, draws, noise)
        drawn = tree.drawn_by == DrawnBy.WITHOUT_REPLACEMENT
        return replace(tree, drawn_by=torch.where(drawn, int(DrawnBy.IID), tree.drawn_by))


class Greedy(ModelDrafter):
    """Proposes the best tokens and says that they were drawn."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        drawn = super().propose(context, shape, draws, noise)
        if drawn.q is None:
            return drawn
        tokens = drawn.tokens.clone()
        for node in range(1, drawn.num_nodes):
            tokens[:, node] = drawn.q[:, node - 1].argmax(-1)
        return replace(drawn, tokens=tokens)


def shift(slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A move of KV that reads one slot too far."""
    src, dst = slots
    return torch.where(src != dst, src - 1, src), dst
