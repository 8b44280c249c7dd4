"""Heads are trained and measured on an accelerator as on the CPU."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from foretell.heads.teacher import Teacher
from foretell.model.load import from_module
from foretell.train.losses import parse_divergence
from foretell.train.methods import prepare
from foretell.train.metrics import divergence_of, evaluate
from tests.device.pretend import NAME, device
from tests.model.tiny import tiny_module
from tests.train.harness import texts


def figures(where: str, method: str) -> tuple[list[float], float]:
    """(gradient norms, held-out loss) of a fresh head with a draft vocabulary of 12 tokens."""
    model = from_module(tiny_module("qwen3").to(where))
    responses = texts(6)
    objective = prepare(method, model, responses, {"draft_vocab_size": 12, "num_heads": 4, "seed": 1}).objective
    teacher, divergence = Teacher(model), parse_divergence(objective.divergence)
    labeled = teacher.label(responses.batch([0, 1, 2]).to(model.spec.device), objective.taps)
    objective.share = 1.0
    outcome = objective.outcome(labeled, teacher, torch.Generator().manual_seed(1), training=True)
    divergence_of(labeled, outcome, divergence).total.backward()
    norms = [float(each.grad.norm()) for each in objective.head.parameters() if each.grad is not None]
    return norms, evaluate(objective, teacher, responses, divergence).loss


METHODS = ("eagle3", "dflash")


def on_the_device() -> dict[str, tuple[list[float], float]]:
    """Of each method."""
    device()
    return {method: figures(NAME, method) for method in METHODS}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[float], float]]:
    """By a process of its own: torch counts devices when it first follows gradients, and in this one it may have."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(on_the_device).result()


@pytest.mark.slow  # a process that imports torch: 6 s
@pytest.mark.parametrize("method", METHODS)
def test_a_head_with_a_small_vocabulary_learns_there_as_on_the_cpu(
    method: str, found: dict[str, tuple[list[float], float]]
) -> None:
    norms, loss = found[method]
    expected_norms, expected = figures("cpu", method)
    assert len(norms) > 5
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert loss == pytest.approx(expected, rel=1e-4)
