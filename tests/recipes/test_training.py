"""Losses against their plain twins, Muon's update, and a run that is stopped and resumed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes.losses import cross_entropy, distillation
from recipes.muon import orthogonal
from recipes.process import Stopwatch
from recipes.train_target import Run, rate, sequence_length

from recipes import models


def test_cross_entropy_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 32).bfloat16().float(), torch.randn(97, 32).bfloat16().float() * 0.3
    labels = torch.randint(0, 97, (700,))
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    twin = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = cross_entropy(*ours, labels)
    plain = torch.nn.functional.cross_entropy(twin[0] @ twin[1].T, labels)
    loss.backward()
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=5e-3)  # logits are bfloat16
    for a, b in zip(ours, twin, strict=True):
        assert (a.grad - b.grad).norm() < 0.02 * b.grad.norm()


def test_distillation_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 16).bfloat16().float(), torch.randn(97, 16).bfloat16().float() * 0.3
    teacher, teacher_weight = torch.randn(600, 24).bfloat16().float(), torch.randn(97, 24).bfloat16().float() * 0.3
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    twin = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = distillation(*ours, teacher, teacher_weight)
    p = (teacher @ teacher_weight.T).log_softmax(-1)
    plain = torch.nn.functional.kl_div((twin[0] @ twin[1].T).log_softmax(-1), p, log_target=True, reduction="batchmean")
    loss.backward()
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-2)
    for a, b in zip(ours, twin, strict=True):
        assert (a.grad - b.grad).norm() < 0.02 * b.grad.norm()


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 48, 16), (2, 16, 48)])
def test_orthogonal_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_schedules() -> None:
    assert rate(0.0) < 0.1
    assert rate(0.2) == 1.0
    assert rate(1.0) == 0.0
    assert [sequence_length(s) for s in (0.0, 0.5, 0.99)] == [256, 512, 1024]


def test_a_stopped_step_does_not_count_as_training_time() -> None:
    watch = Stopwatch()
    for seconds in (1.0, 1.0, 600.0, 1.0):
        watch.add(seconds)
    assert watch.elapsed_s == pytest.approx(4.0)


def test_resume_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SIZES, "tiny", (32, 2, 48, 2, 1))
    monkeypatch.setattr("recipes.train_target.save", lambda *a, **k: None)
    np.save(tmp_path / "train.npy", np.random.default_rng(0).integers(0, 8192, 1024 * 12).astype(np.uint16))

    def run(folder: str, stop_after: int | None = None) -> list[float]:
        args = argparse.Namespace(
            data=tmp_path, tokenizer=tmp_path, out=tmp_path / folder, size="tiny", minutes=1.0, tokens=6 * 1024,
            batch=1024, micro=512, muon_lr=0.02, adam_lr=0.004, weight_decay=0.05, checkpoint_minutes=5.0, threads=1,
            device="cpu", seed=0,
        )  # fmt: skip
        this, losses = Run(args), []
        while this.share() < 1.0 and (stop_after is None or this.progress.step < stop_after):
            losses.append(this.step(this.share()))
        this.store()
        return losses

    whole = run("whole")
    parts = run("parts", stop_after=3) + run("parts")
    assert len(whole) == 6
    assert parts == pytest.approx(whole, abs=1e-6)
    assert whole[-1] < whole[0]


def test_save_keeps_the_card_and_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    from foretell import bundled

    monkeypatch.setitem(models.SIZES, "tiny", (32, 2, 48, 2, 1))
    model, out = models.build("tiny"), tmp_path / "model"
    out.mkdir()
    (out / "README.md").write_text("card")
    models.save(model, bundled.path("target"), out)
    models.save(model, bundled.path("target"), out)
    assert (out / "README.md").read_text() == "card"
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16().float())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
