"""Rows of an accelerator take blocks of one memory that has not room for all of them at full length."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretell import SamplingParams
from foretell.core import graphs
from foretell.core.spec import method_words
from foretell.engine import engine as engines
from foretell.engine.event import StepEvent
from foretell.engine.integrity import check_loop
from foretell.engine.loop import Limits, Loop
from foretell.kernels.gpu import ops as operators
from foretell.model import blocks
from foretell.model.blocks import BlockCache
from tests.device.counting import engine_on, requests, run
from tests.device.pretend import METER, NAME, PretendRecorder
from tests.device.test_tokens import DRAFT, FAST, SLOW

LONG = SamplingParams(max_new_tokens=20, ignore_eos=True)
ROWS = [LONG, replace(LONG, temperature=0.0), replace(LONG, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=30), LONG]
QUICK = ("none", "static, transport", "kangaroo", "eagle3")


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Loop]]:
    """Blocks of eight slots, of which there are three quarters of what four whole rows need; the loops that ran."""
    monkeypatch.setattr(blocks, "BLOCK", 8)
    monkeypatch.setattr(operators, "BLOCK_SLOTS", 8)
    made: list[Loop] = []
    begin, tick = Loop.__init__, Loop.tick

    def few(rows: int, queue: int, kv_tokens: int, capacity: int, **options: Any) -> Limits:
        return Limits(rows, queue, 14 * 8, capacity, **options)

    def keep(self: Loop, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    def checked(self: Loop) -> Any:
        ended = tick(self)
        if self.jobs:
            check_loop(self)
        return ended

    monkeypatch.setattr(engines, "Limits", few)
    monkeypatch.setattr(Loop, "__init__", keep)
    monkeypatch.setattr(Loop, "tick", checked)
    yield made


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAST, *SLOW) if name not in QUICK)]
)
@pytest.mark.parametrize("graph", ["off", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_tokens_are_the_cpus(
    loops: list[Loop], monkeypatch: pytest.MonkeyPatch, name: str, graph: str
) -> None:
    """Whoever has to wait for blocks, or gives them up and reads its text again."""
    given = requests(ROWS)
    with monkeypatch.context() as whole:
        whole.undo()
    expected = run(engine_on("cpu", (FAST | SLOW)[name]), given)
    if graph == "auto":
        monkeypatch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
    found = run(engine_on(NAME, (FAST | SLOW)[name]), given)
    assert found.tokens == expected.tokens
    loop = loops[-1]
    pool = loop.batch.pool
    assert isinstance(pool, BlockCache)
    assert pool.num_blocks == 14 < 4 * -(-loop.limits.capacity // 8)
    assert min(len(step.rows) for step in found.steps[:12]) < len(ROWS) or loop.recorder.num_preemptions
