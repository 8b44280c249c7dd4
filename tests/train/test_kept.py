"""The target's outputs, kept: the same numbers as computed anew, within what memory allows, and the same training."""

import math
from pathlib import Path

import pytest
import torch

from foretell.heads.stored_outputs import GROUP, LinearHead, OutputKeeper, opened, rounded
from foretell.heads.teacher import Teacher
from foretell.methods.medusa.head import head_weight
from foretell.model.load import from_module
from foretell.train.config import TrainConfig
from foretell.train.trainer import train
from tests.model.tiny import VOCAB, tiny_module
from tests.train.harness import Linear, teacher, texts

TAPS = (1, 3)
EVERYTHING = 2**30


def keeper(target: Teacher, most_bytes: int = EVERYTHING) -> OutputKeeper:
    return OutputKeeper(target, LinearHead(target.model, head_weight(target.model)), TAPS, most_bytes)


def test_kept_equals_computed() -> None:
    target, data = teacher(), texts()
    kept = keeper(target)
    chosen = [3, 7, 0, 12]
    batch = data.batch(chosen)
    row, at = batch.supervised.nonzero(as_tuple=True)
    true = target.label(batch, TAPS)
    vocab = torch.tensor([2, 5, 11, VOCAB - 1])
    for _ in range(2):  # the second time from memory
        found = kept.label(batch, chosen)
        torch.testing.assert_close(found.hidden[row, at], true.hidden[row, at], rtol=1e-5, atol=1e-5)
        step = 1.01 * true.taps.unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 64) / 254
        assert ((found.taps - true.taps).abs() <= step.flatten(-2))[row, at].all()
        torch.testing.assert_close(found.logits_at(row, at), true.logits_at(row, at), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found.logits_at(row, at, vocab), true.logits_at(row, at, vocab), rtol=1e-5, atol=1e-5
        )
        assert torch.equal(found.best_at(row, at), true.best_at(row, at))


@pytest.mark.parametrize("width", [192, 96, 5, 0])
def test_hidden_states_in_8_bits_are_within_half_a_step_of_their_group(width: int) -> None:
    """One state of a layer is a thousand times as large as the others, and costs those of other groups nothing."""
    states = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    states[3:, :1] *= 4000
    codes = rounded(states.half())
    found, group = opened(codes), math.gcd(width, GROUP)
    assert found.shape == states.shape
    assert codes.nbytes == 7 * (width + 4 * width // group)
    largest = (
        states.unflatten(-1, (width // group, group)).abs().amax(-1, keepdim=True).expand(-1, -1, group).flatten(-2)
    )
    assert ((found - states).abs() <= largest * (1 / 254 + 1e-3)).all()
    if width:
        states[2, -1] = math.inf
        assert opened(rounded(states)).isfinite().all(-1).tolist() == [row != 2 for row in range(7)]


def test_numbers_do_not_depend_on_the_batch_that_came_first() -> None:
    """Else a resumed run, which meets other batches first, would not be the same run."""
    target, data = teacher(), texts()
    one, other = keeper(target), keeper(target)
    other.label(data.batch([0, 5, 9]), [0, 5, 9])
    batch = data.batch([5, 1])
    first, second = one.label(batch, [5, 1]), other.label(batch, [5, 1])
    assert torch.equal(first.taps, second.taps)
    assert torch.equal(first.hidden, second.hidden)


def test_memory_is_bounded() -> None:
    target, data = teacher(), texts()
    whole = keeper(target)
    whole.label(data.batch(range(len(data))), range(len(data)))
    half = keeper(target, whole.num_bytes // 2)
    found = half.label(data.batch(range(len(data))), range(len(data)))
    assert 0 < half.num_bytes <= whole.num_bytes // 2
    again = half.label(data.batch(range(len(data))), range(len(data)))
    assert torch.equal(found.taps, again.taps)


def test_a_head_with_a_softcap_is_computed_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_module(tiny_module("qwen3"))
    weight = head_weight(model)
    plain = type(model).head
    monkeypatch.setattr(type(model), "head", lambda self, normed: 2.0 * torch.tanh(plain(self, normed) / 2.0))
    hidden = torch.randn(9, model.spec.hidden_size, generator=torch.Generator().manual_seed(0)) * 8
    vocab = torch.tensor([1, 4, 6])
    found = LinearHead(model, weight)(hidden, vocab)
    assert float(found.abs().max()) <= 2.0
    torch.testing.assert_close(found, model.head(model.normed(hidden[None]))[0][:, vocab].float())


def test_a_softcap_is_found_where_logits_are_small() -> None:
    """Near 0 a cap is a line: what was kept of a capped target was then a product without it, at large logits too."""
    model = from_module(tiny_module("gemma2", final_logit_softcapping=30.0))
    head, vocab = LinearHead(model, head_weight(model)), torch.arange(10)
    head.of_normed(torch.full((8, 32), 0.05), vocab)
    large = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)) * 8
    assert float(model.head(large[None]).detach().abs().max()) > 15
    torch.testing.assert_close(head.of_normed(large, vocab), model.head(large[None])[0][:, vocab].detach())


def test_training_with_kept_outputs_learns_the_same(tmp_path: Path) -> None:
    vocab = torch.arange(3, VOCAB, 2)
    losses = []
    for keep in (0.0, 1.0):
        config = TrainConfig(epochs=3, batch_tokens=64, keep_gib=keep, lr=1e-2)
        found = train(Linear(vocab=vocab), teacher(), texts(), tmp_path / str(keep), config)
        losses.append(found.slot_losses)
    assert losses[0] == pytest.approx(losses[1], rel=4e-3), "hidden states are kept in 8 bits: 1.3e-3 was seen"


def test_resumed_run_is_the_same_with_kept_outputs(tmp_path: Path) -> None:
    config = TrainConfig(steps=12, batch_tokens=64, keep_gib=1.0, checkpoint_every=5, eval_every=0)

    def run(name: str, *, stop_at: int | None = None, resume: bool = False) -> Linear:
        objective = Linear()

        def stop(report: object) -> None:
            if stop_at is not None and getattr(report, "step", 0) == stop_at:
                raise KeyboardInterrupt

        try:
            train(objective, teacher(), texts(), tmp_path / name, config, resume=resume, progress=stop)
        except KeyboardInterrupt:
            assert stop_at is not None
        return objective

    whole = run("whole")
    run("cut", stop_at=7)
    resumed = run("cut", resume=True)
    for one, other in zip(whole.head.parameters(), resumed.head.parameters(), strict=True):
        assert torch.equal(one, other)
