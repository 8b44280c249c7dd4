"""docs/model-types.md says what a run over tiny instances says. The default tier runs a sample, the slow one a quarter
of the other types, the exhaustive one the rest."""

from pathlib import Path

import pytest
import transformers

from tests.model.survey import groups, page, survey
from tests.model.zoo import TYPES

TEXT = (Path(__file__).parents[2] / "docs" / "model-types.md").read_text(encoding="utf-8")
GROUPS = groups(TEXT)
SAMPLE = (
    "bart", "bert-generation", "bloom", "deepseek_v3", "deepseek_v4", "doge", "gemma3_text", "gemma4_text", "gpt2",
    "gpt_neo", "llama", "longcat_flash", "mamba", "mpt", "phi3", "qwen3_moe", "roberta", "xlnet",
)  # fmt: skip
"""One of each way: natively, lean, ALiBi, masks of their own, counted positions, shared K and V, states, refused."""
at_this_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in TEXT,
    reason="the page was made with another version of transformers",
)


def test_at_least_150_types_work() -> None:
    """The count on the page is that of the types that it lists."""
    working = [group for group in GROUPS.values() if not group.startswith("- ")]
    assert len(working) >= 150
    assert f"\n{len(working)} of {len(GROUPS)} types work" in TEXT


@at_this_version
def test_every_type_is_listed_once() -> None:
    assert set(GROUPS) == set(TYPES)
    with pytest.raises(ValueError, match="llama is listed twice"):
        groups(TEXT + "| native and lean | yes | yes | yes | yes | yes | `llama` |\n")
    assert page([]).partition("\n\n0 of")[0] in TEXT


@at_this_version
@pytest.mark.parametrize(
    "kind", [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
)
def test_the_line_is_what_a_run_says(kind: str) -> None:
    """Implementation, trees, chains, heads and the reason of a refusal; logits are compared within."""
    found = survey(kind)
    assert found.group == GROUPS[kind], "regenerate: python -m tests.model.survey > docs/model-types.md"
