"""``--lora`` of generate, chat, bench and serve."""

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


def test_chat_and_bench_decode_with_it(invoke: Invoke, models: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    """A bench says which it was, and does not go on with another's runs."""
    options = "--implementation", "lean", "--max-new-tokens", 12, "--temperature", 0
    engine = Engine.load(models["target"], implementation="lean", speculative="none", lora=adapter)
    expected = engine.generate(
        engine.chat_prompt([{"role": "user", "content": "the"}]), temperature=0.0, max_new_tokens=12
    )
    said = invoke("chat", "--target", models["target"], "--lora", adapter, *options, input="the\n")
    assert said.exit_code == 0, said.output
    assert said.stdout == expected.text + "\n"
    suite, report = tmp_path / "suite.jsonl", tmp_path / "report.json"
    suite.write_text(json.dumps({"question_id": 1, "category": "a", "turns": ["the"]}) + "\n")
    asked = "bench", "--target", models["target"], "--suite", suite, "--methods", "ngram", "--no-bandwidth", *options
    result = invoke(*asked, "--output", report, "--lora", adapter)
    assert result.exit_code == 0, result.output
    assert json.loads(report.read_text())["settings"]["loras"] == [str(adapter)]
    runs = [json.loads(line) for line in Path(f"{report}.runs.jsonl").read_text().splitlines()]
    assert [run["token_ids"] for run in runs if "token_ids" in run] == [expected.token_ids] * 2
    refused = invoke(*asked, "--output", report, "--resume")
    assert refused.exit_code == 2
    assert "loras" in refused.stderr
