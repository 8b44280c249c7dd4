"""``--lora`` of generate and serve."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from foretell import ConfigError, Engine
from foretell.cli import settings
from tests.cli.conftest import Invoke
from tests.model.adapters import write_adapter

PROMPT = "def total(values):\n    return the"


@pytest.fixture
def adapter(models: dict[str, Path], tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "mine", load_file(models["target"] / "model.safetensors"), size=0.3)


def test_generate_merges_it_with_any_method(generate: Invoke, models: dict[str, Path], adapter: Path) -> None:
    texts = []
    for options in ((), ("--lora", adapter), ("--lora", adapter, "--draft", models["draft"])):
        result = generate(
            PROMPT, "--max-new-tokens", 20, "--temperature", 0, "--json", "--implementation", "lean", *options
        )
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["token_ids"])
    engine = Engine.load(models["target"], implementation="lean", speculative="none", lora={"a": adapter})
    expected = engine.generate(PROMPT, temperature=0.0, max_new_tokens=20, lora="a").token_ids
    assert texts[0] != texts[1] == texts[2] == expected


def test_what_is_wrong_is_said_in_one_line(
    generate: Invoke, invoke: Invoke, models: dict[str, Path], adapter: Path
) -> None:
    result = generate(PROMPT, "--implementation", "lean", "--lora", adapter.parent)
    assert result.exit_code == 1
    assert "no adapter_config.json there; expected the directory of an adapter" in result.stderr
    result = generate(PROMPT, "--implementation", "transformers", "--lora", adapter)
    assert "lora needs implementation 'native' or 'lean'" in result.stderr
    result = invoke("serve", models["target"], "--lora", adapter)
    assert result.exit_code != 0
    assert "expected NAME=DIR" in result.stderr


def test_serve_names_each() -> None:
    assert settings.loras(None) is None
    assert settings.loras(["a=x", "b=/y/z=1"]) == {"a": "x", "b": "/y/z=1"}
    for wrong, told in ((["a"], "expected NAME=DIR"), (["=x"], "expected NAME=DIR"), (["a=x", "a=y"], "given twice")):
        with pytest.raises(ConfigError, match=told):
            settings.loras(wrong)
