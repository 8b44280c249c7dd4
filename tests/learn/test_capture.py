"""What is captured of texts that are served, against the target that wrote them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell import Engine, SamplingParams
from foretell.engine.event import StepEvent
from foretell.engine.threads import Allowance
from foretell.learn.capture import Capture, CaptureState
from foretell.learn.training.texts import RawText
from foretell.methods.draft_model.drafter import DraftModel
from tests.engine.harness import VOCAB, ToyTokenizer, mixed_requests, prompts, table


class Recorder:
    """Marks all rows and captures them."""

    def __init__(self, **options: Any) -> None:
        settings: dict[str, Any] = {"max_length": 4096, "max_bytes": 1 << 30, **options}
        self.capture = Capture(settings.pop("allowance", Allowance(1.0, most=1e9)), **settings)
        self.texts: list[tuple[list[int], RawText]] = []

    def __call__(self, event: StepEvent) -> None:
        for row in event.rows:
            if row.capture is None:
                row.capture = CaptureState("", ())
        self.texts += [(list(row.known), text) for row, text in self.capture.observe(event)]


def serve(recorder: Recorder, requests: Sequence[Any], *, shape: str = "chain") -> Engine:
    config = {"method": "draft_model", "num_speculative_tokens": 4, "shape": shape}
    engine = Engine(table(1), ToyTokenizer(), speculative=config, method=DraftModel(table(1, blur=0.4)))
    engine.observers.append(recorder)
    engine.generate_batch(requests, batch_size=3)
    return engine


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x1x1"])
def test_every_place_has_the_targets_own_law(shape: str) -> None:
    recorder, target = Recorder(), table(1)
    serve(recorder, mixed_requests(), shape=shape)
    assert len(recorder.texts) >= 6
    for known, raw in recorder.texts:
        assert raw.tokens == known[: len(raw.tokens)] == known
        text = raw.reduced(VOCAB)
        for index, law in enumerate(text.laws(VOCAB)):
            p = torch.softmax(target.probs_after(raw.tokens[: raw.start + index]).log() / text.loss_temperature, 0)
            assert (law.exp() - p).abs().max() < 5e-3
    assert recorder.capture.held_bytes == 0


def test_a_long_text_is_cut_and_a_long_prompt_left_out() -> None:
    recorder = Recorder(max_length=20)
    serve(recorder, mixed_requests())
    lengths = [len(raw.tokens) for _, raw in recorder.texts]
    assert lengths
    assert max(lengths) <= 20
    assert recorder.capture.num_skipped == sum(len(ids) + 1 >= 20 for ids in prompts())


def test_nothing_is_captured_that_the_allowance_does_not_cover() -> None:
    spent = Allowance(1e-9)
    spent.charge(10.0)
    recorder = Recorder(allowance=spent)
    serve(recorder, mixed_requests())
    assert not recorder.texts
    assert recorder.capture.num_skipped == len(mixed_requests())


def test_memory_in_flight_is_capped() -> None:
    recorder = Recorder(max_bytes=4 * VOCAB * 2)
    held: list[int] = []
    engine = Engine(table(1), ToyTokenizer(), speculative="none")
    engine.observers += [recorder, lambda event: held.append(recorder.capture.held_bytes)]
    engine.generate_batch([[1, 2, 3]] * 6, SamplingParams(max_new_tokens=20, ignore_eos=True, seed=1), batch_size=6)
    assert max(held) <= 4 * VOCAB * 2
    assert recorder.capture.num_skipped >= 2


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error", "stop"])
def test_requests_that_ended_without_a_step_hold_nothing(reason: str) -> None:
    recorder = Recorder()
    rows: list[Any] = []
    engine = Engine(table(1), ToyTokenizer(), speculative="none")

    def cut(event: StepEvent) -> None:
        if event.rows[0].finish_reason is not None:
            return
        rows.extend(event.rows)
        assert recorder.capture.held_bytes > 0
        rows[0].finish_reason = reason
        recorder.capture.sweep()
        assert recorder.capture.held_bytes == 0
        assert not recorder.capture._open
        rows[0].finish_reason = None

    engine.observers += [recorder, cut]
    engine.generate([1, 2, 3], SamplingParams(max_new_tokens=2, ignore_eos=True, seed=1))
    assert rows
