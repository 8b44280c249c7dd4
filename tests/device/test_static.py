"""Steps of one kind are the same kernels, one after the other, and those of one serve the next: what graphs need.

A kind is how many rows, nodes and attended slots there are, and whether slots move. (Of EAGLE also how many hidden states
are kept and read: the passes over them have padded widths, what gathers them has not.)
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from foretell import SamplingParams
from foretell.core.spec import method_words
from foretell.core.tree import Plan
from foretell.engine import judging
from foretell.engine.event import StepEvent
from foretell.model import blocks
from foretell.model.blocks import BlockCache
from foretell.model.prefill import round_up
from foretell.verify.base import Evidence, Verdict
from tests.device.counting import engine_on, requests
from tests.device.pretend import METER, NAME, Call, recording, replay

LONG = SamplingParams(max_new_tokens=24, ignore_eos=True)
ROWS = [LONG, replace(LONG, temperature=0.0)]


@pytest.mark.parametrize(
    "words",
    ["none", "draft_model:4", pytest.param("eagle3:4", marks=pytest.mark.slow), "draft_model:static/branching=2x1"],
)
def test_steps_of_a_kind_are_the_same_kernels(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """In order, with the same shapes, strides and dtypes. (Blocks are given between steps.)"""
    tell, taken = BlockCache._tell, 0

    def between(self: BlockCache, rows: list[int]) -> None:
        nonlocal taken
        taken, count = taken + 1, len(METER.calls or [])
        tell(self, rows)
        if METER.calls is not None:
            del METER.calls[count:]

    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(BlockCache, "_tell", between)
    engine = engine_on(NAME, method_words(words)[0])
    kinds: dict[Any, list[list[Any]]] = defaultdict(list)
    num_steps = read = 0  # known tokens that the drafter reads, at most

    with recording() as calls:

        def watch(event: StepEvent) -> None:
            nonlocal read, num_steps
            paths, num_nodes = event.commit.path, event.evidence.tree.num_nodes
            span = round_up(max(len(row.known) for row in event.rows) + num_nodes, 64)
            moved = any(path != list(range(len(path))) for path in paths)
            kind: tuple[Any, ...] = len(paths), tuple(event.commit.guessed), span, moved, any(event.commit.ended)
            kept = max(map(len, paths))
            if words.startswith("eagle"):  # which keeps hidden states of what is kept, and reads them in the next step
                kind += (kept, read)
            num_steps, read = num_steps + 1, kept
            if num_steps > 3:  # in those before prompts are read and constants made
                kinds[kind].append([call.described() for call in calls if call.launched])
            calls.clear()
            if any(event.commit.ended):  # the next step opens the state of fewer rows
                num_steps = 2

        engine.observers.append(watch)
        # Of EAGLE there are many kinds: one row, and a text that ends before its span does.
        rows = [replace(LONG, max_new_tokens=40)] if words.startswith("eagle") else ROWS
        engine.generate_batch(requests(rows))
    assert taken > 6
    repeated = [lists for lists in kinds.values() if len(lists) > 1]
    assert repeated
    for lists in repeated:
        for one in lists[1:]:
            assert one == lists[0]


class Replayed:
    """The target's pass and the verdict of one step, run again for every later step of the same kind."""

    def __init__(self) -> None:
        self.compared = 0
        self._held: dict[
            Any, tuple[list[Call], list[Tensor], Verdict]
        ] = {}  # by kind: kernels, what they read, outcome

    def judge(self, layout: Callable[..., Plan], draw: Callable[..., Verdict]) -> tuple[Any, Any]:
        """In the place of a step's ``layout``, where it begins, and of ``draw``, where it ends."""
        now: dict[str, Any] = {}

        def begin(parent: Tensor, length: Tensor, capacity: int, *, span: int, pack: bool, is_line: bool) -> Plan:
            now["kind"], METER.calls = (tuple(parent.shape), parent.stride(), span), []
            now["inputs"] = [parent, length]
            return layout(parent, length, capacity, span=span, pack=pack, is_line=is_line)

        def end(verifier: Any, evidence: Evidence) -> Verdict:
            verdict = draw(verifier, evidence)
            calls, METER.calls = METER.calls or [], None
            noise = evidence.noise
            assert noise is not None
            inputs = [*now["inputs"], evidence.tree.tokens, noise.coupled_keys(evidence.tree.num_nodes)]
            if now["kind"] not in self._held:
                self._held[now["kind"]] = calls, inputs, verdict
                return verdict
            kernels, held, outcome = self._held[now["kind"]]
            for mine, given in zip(held, inputs, strict=True):
                if mine.tolist() != given.tolist():  # parents of whole chains are one vector
                    mine.copy_(given)
            replay(kernels)
            for name in ("path", "count", "bonus", "sound"):
                assert getattr(outcome, name).tolist() == getattr(verdict, name).tolist()
            self.compared += 1
            return verdict

        return begin, end


@pytest.mark.parametrize(
    "words",
    [
        "draft_model:4",
        *(pytest.param(words, marks=pytest.mark.slow) for words in ("none", "draft_model:static/branching=2x1")),
    ],
)
def test_the_kernels_of_one_step_decide_the_next(words: str) -> None:
    """Nothing of a step is in its kernels but the memory they read: with the next step's tokens, parents, lengths and keys
    there they come to its verdict."""
    replayed, plain = Replayed(), engine_on(NAME, method_words(words)[0])
    begin, end = replayed.judge(judging.layout, judging.draw)
    expected = [done.token_ids for done in plain.generate_batch(requests(ROWS))]
    with patch.multiple(judging, layout=begin, draw=end):
        found = [done.token_ids for done in engine_on(NAME, method_words(words)[0]).generate_batch(requests(ROWS))]
    assert found == expected
    assert replayed.compared > 3
