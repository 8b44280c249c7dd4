"""docs/model-types.md says what a run over tiny instances says. The default tier runs a sample, the slow one a quarter
of the other types, the exhaustive one the rest."""

from pathlib import Path

import pytest
import transformers

from tests.model.survey import page, survey
from tests.model.zoo import TYPES

PAGE = Path(__file__).parents[2] / "docs" / "model-types.md"
LINES = {line.split("`")[1]: line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")}
SAMPLE = (
    "bart", "bert-generation", "bloom", "deepseek_v3", "deepseek_v4", "doge", "gemma3_text", "gemma4_text", "gpt2",
    "gpt_neo", "llama", "longcat_flash", "mamba", "mpt", "phi3", "qwen3_moe", "roberta", "xlnet",
)  # fmt: skip
"""One of each way: natively, lean, ALiBi, masks of their own, counted positions, shared K and V, states, refused."""
at_this_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in PAGE.read_text(encoding="utf-8"),
    reason="the page was made with another version of transformers",
)


def test_at_least_150_types_work() -> None:
    """The count on the page is that of its lines."""
    working = [line for line in LINES.values() if "| refused |" not in line]
    assert len(working) >= 150
    assert f"\n{len(working)} of {len(LINES)} types work" in PAGE.read_text(encoding="utf-8")


@at_this_version
def test_every_type_is_listed_once() -> None:
    """In the order of their names, between the header and the end."""
    assert tuple(LINES) == TYPES
    assert page([]).partition("instance")[0] in PAGE.read_text(encoding="utf-8")


@at_this_version
@pytest.mark.parametrize(
    "kind", [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
)
def test_the_line_is_what_a_run_says(kind: str) -> None:
    """Implementation, trees, chains, heads and the reason of a refusal; logits are compared within."""
    found = survey(kind)
    assert found.line == LINES[kind], "regenerate: python -m tests.model.survey > docs/model-types.md"
