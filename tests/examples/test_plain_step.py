"""The step in plain code of docs/how-a-step-works.md writes the engine's tokens."""

import re
from pathlib import Path
from typing import Any

import pytest

import foretell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-a-step-works.md"
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    found = re.search(r"<!-- file: plain_step.py -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) <= 100
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_it_writes_the_tokens_of_the_engine(plain: dict[str, Any], temperature: float) -> None:
    engine = foretell.Engine.load("bundled", speculative="ngram")
    result = engine.generate(PROMPT, temperature=temperature, seed=2, max_new_tokens=40, ignore_eos=True)
    model, ids = plain["load_model"]("bundled/target"), engine.tokenizer.encode(PROMPT)
    assert plain["generate"](model, ids, 40, temperature, 2) == result.token_ids
    guessed = plain["step"](model, ids + result.token_ids[:12], temperature, 2)
    assert guessed == result.token_ids[12 : 12 + len(guessed)]


def test_control_another_seed_writes_another_text(plain: dict[str, Any]) -> None:
    model, ids = plain["load_model"]("bundled/target"), plain["load_tokenizer"]("bundled/target").encode(PROMPT)
    one, other = (plain["generate"](model, ids, 20, 1.0, seed) for seed in (2, 3))
    assert one != other
