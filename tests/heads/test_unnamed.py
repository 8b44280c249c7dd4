"""Weights that nobody named and that do not fit: the error speaks of what was asked for."""

from typing import Any

import pytest

from foretell import Engine
from foretell.core.errors import ModelError
from foretell.model.load import load_model
from foretell.model.target import CausalModel


@pytest.fixture(scope="module")
def other() -> CausalModel:
    """A target of another size than the bundled heads are for."""
    return load_model("bundled/draft", implementation="lean")


@pytest.mark.parametrize("method", ["eagle3", "eagle1", "medusa", "kangaroo", "dflash", "hybrid"])
def test_a_bundled_head_that_nobody_named_is_not_spoken_of(method: str, other: CausalModel) -> None:
    with pytest.raises(ModelError) as caught:
        Engine(other, None, speculative=method)
    said = str(caught.value)
    assert said.startswith(
        f"no weights are named for method {method!r}, and those that come with foretell do not fit: "
    )
    assert "'bundled/draft' has 128" in said
    assert "foretell train" in said
    assert said.endswith(
        "or name some (--draft; in Python the key 'model'), or choose a method without weights, e.g. ngram"
    )
    assert "bundled/" not in said.replace("'bundled/draft'", "")


def test_a_head_that_was_named_is_named(other: CausalModel) -> None:
    with pytest.raises(ModelError, match=r"^bundled/eagle3: this eagle3 head was trained for a target of .* 256"):
        Engine(other, None, speculative={"method": "eagle3", "model": "bundled/eagle3"})


@pytest.mark.parametrize("given", [{}, {"judge": "bundled/judge"}])
def test_a_judge_is_named_where_it_was(given: dict[str, Any], other: CausalModel) -> None:
    with pytest.raises(ModelError) as caught:
        Engine(other, None, speculative={"method": "ngram", "verify": "judge", **given})
    if given:
        assert str(caught.value).startswith("bundled/judge: ")
    else:
        assert str(caught.value).startswith("no judge is named, and the one that comes with foretell does not fit: ")
