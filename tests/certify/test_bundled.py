"""The bundled pair passes, in float32 and in bfloat16; its sampled rule under real kernels, its default one too."""

import pytest

from foretell.certify import certify
from foretell.engine.engine import Engine
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.load import load_model, load_tokenizer
from tests.certify import harness as h

PROMPTS = ["def fibonacci(n):\n    ", "The weather in the mountains", "import os\n\ndef walk(", "one two three one two"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bundled(dtype: str) -> None:
    model, draft = load_model("bundled/target", dtype=dtype), load_model("bundled/draft", dtype=dtype)
    engine = Engine(
        model, load_tokenizer("bundled/target"), speculative={"method": "draft_model"}, method=DraftModel(draft)
    )
    found = certify(
        engine, PROMPTS[: 4 if dtype == "float32" else 2], verifiers=["coupled", "rejection"], shapes=[h.TREE],
        temperatures=(0.0, 1.0), max_new_tokens=12, budget=h.SMALL,
    )  # fmt: skip
    assert found.verdict == "certified", [check.findings for check in found.defects]
    assert found.settings["dtype"] == dtype
    window, *_ = found.checks
    assert window.num_contexts > 20
    assert window.deviation is not None
    if dtype == "float32":
        assert {check.verdict for check in found.checks} == {"pass"}
        assert window.deviation < 1e-4  # 0 where native passes run: the same bits at any width
