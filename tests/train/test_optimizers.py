"""Which optimizer updates what, and a Muon step against the matrix that it stands for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell.core.errors import ConfigError
from foretell.heads.teacher import Outcome
from foretell.train.config import TrainConfig
from foretell.train.optimizers import hidden_matrices, optimizers_of
from foretell.train.trainer import Report, train
from tests.model.tiny import VOCAB
from tests.train.harness import HIDDEN, Linear, teacher, texts
from tests.train.test_trainer import CONFIG, rows

REDUCED = 24


class Head(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB + 1, 16)  # of a size that tells nothing
        self.fc = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 32, bias=False)
        self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(requires_grad=False)
        self.score = nn.Linear(32, 1)
        self.lm_head = nn.Linear(32, REDUCED, bias=False)
        self.back = nn.Linear(VOCAB, 32, bias=False)


def test_matrices_between_hidden_numbers_are_muons_and_all_else_is_adamws() -> None:
    head = Head()
    hidden = hidden_matrices(head, [VOCAB, REDUCED])
    assert [id(p) for p in hidden] == [id(head.fc.weight), id(head.up.weight)]
    muon, adamw = optimizers_of(head, TrainConfig(optimizer="muon"), [VOCAB, REDUCED])
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    updated = [id(p) for one in (muon, adamw) for group in one.param_groups for p in group["params"]]
    assert sorted(updated) == sorted(id(p) for p in head.parameters() if p.requires_grad), "each is in one of the two"
    (alone,) = optimizers_of(head, TrainConfig(), [VOCAB, REDUCED])
    assert isinstance(alone, torch.optim.AdamW)
    with pytest.raises(ConfigError, match="leave it at 'adamw'"):
        optimizers_of(nn.Linear(8, VOCAB), TrainConfig(optimizer="muon"), [VOCAB])
    with pytest.raises(ConfigError, match="optimizer = 'sgd' must be adamw or muon"):
        TrainConfig(optimizer="sgd")


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_a_muon_step_is_the_nearest_orthogonal_matrix_of_adamws_size(shape: tuple[int, int]) -> None:
    """The twin takes a singular value decomposition; five iterations of the quintic leave singular values within .68 and
    1.13 of it (Jordan's figure). The first step's momentum points where the gradient does."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(shape[1], shape[0], bias=False)
    gradient = torch.randn(shape, generator=generator)
    lr = 0.01
    (muon,) = optimizers_of(layer, TrainConfig(optimizer="muon", lr=lr, weight_decay=0.0), [VOCAB])
    before = layer.weight.detach().clone()
    layer.weight.grad = gradient.clone()
    muon.step()
    step = (before - layer.weight.detach()) / lr / (0.2 * max(shape) ** 0.5)
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    along = u.mT @ step @ v.mT  # diagonal where the step has the gradient's singular vectors
    values = along.diagonal()
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25
    assert float((along - torch.diag(values)).abs().max()) < 0.05
    # As large as AdamW's usual steps: entries of .2 of the rate, in the root of their mean square.
    size = float(((before - layer.weight.detach()) ** 2).mean().sqrt()) / lr
    assert size == pytest.approx(0.2 * (min(shape) * max(shape) / (shape[0] * shape[1])) ** 0.5, rel=0.2)


class Deep(Linear):
    """Its first layer is between hidden numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head.append(nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.head[-1].weight.data = torch.eye(HIDDEN)

    def outcome(self, labeled: Any, *args: Any, **named: Any) -> Outcome:
        mixer, slots = self.head[-1], self.head[:-1]
        labeled = type(labeled)(**{**vars(labeled), "taps": mixer(labeled.taps)})
        whole, self.head = self.head, slots
        try:
            return super().outcome(labeled, *args, **named)
        finally:
            self.head = whole


def test_it_learns_and_a_cut_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    settings = {**CONFIG, "optimizer": "muon", "steps": 30, "checkpoint_every": 10, "weight_decay": 0.0}

    def run(out: str, objective: Linear, *, resume: bool = False, progress: Any = None) -> Any:
        return train(
            objective, teacher(), texts(), tmp_path / out, TrainConfig(**settings), resume=resume, progress=progress
        )

    whole, cut, again = Deep(), Deep(), Deep()
    at_once = run("whole", whole)
    losses = [row["loss"] for row in rows(tmp_path / "whole")]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert not torch.equal(whole.head[-1].weight, torch.eye(HIDDEN)), "Muon's matrix has moved"

    class CutError(Exception):
        pass

    def stop(report: Report) -> None:
        if report.step == 14:
            raise CutError

    with pytest.raises(CutError):
        run("cut", cut, progress=stop)
    assert run("cut", again, resume=True) == at_once
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")
    for one, other in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(one, other)
