"""The engine with Triton's kernels in every place where an accelerator has them: in Triton's interpreter, on the pretend
device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foretell import SamplingParams
from foretell.core.graphs import RECORDERS
from foretell.kernels.gpu import ops as operators
from foretell.model.load import load_model
from tests.device.counting import engine_on, requests, run
from tests.device.pretend import METER, NAME, PretendRecorder, device

SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def target() -> Iterator[Any]:
    """A target on the device that was loaded with the kernels there."""
    operators.DISPATCH_KEYS[NAME] = "CPU"
    operators.ops.cache_clear()
    device()
    yield load_model("bundled/target", device=NAME, implementation="lean", dtype="float32")
    del operators.DISPATCH_KEYS[NAME]
    operators.ops.cache_clear()


CONFIGS = {
    "none": "none",
    "chain": {"method": "draft_model", "num_speculative_tokens": 2},
    "tree": {"method": "draft_model", "shape": "static/branching=2x1"},
    "rejection": {"method": "draft_model", "num_speculative_tokens": 2, "verify": "rejection"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_the_cpus(target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a verdict of exact match takes at most ten launches, whatever the filters. So are those of captured graphs."""
    rows = [SHORT, replace(SHORT, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02)]
    expected = run(engine_on("cpu", CONFIGS[name]), requests(rows))
    found = run(engine_on(NAME, CONFIGS[name], target=target), requests(rows))
    assert found.tokens == expected.tokens
    if name != "rejection":
        assert all(step.launches["verify"] <= 10 for step in found.steps), [step.launches for step in found.steps]
    monkeypatch.setitem(RECORDERS, NAME, PretendRecorder)
    begun, given = METER.graphs, requests([replace(row, max_new_tokens=12) for row in rows])
    expected, found = (
        run(engine_on("cpu", CONFIGS[name]), given),
        run(engine_on(NAME, CONFIGS[name], target=target), given),
    )
    assert found.tokens == expected.tokens
    assert METER.graphs > begun + 2
