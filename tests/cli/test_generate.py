"""What ``foretell generate`` prints: text, figures and JSON, the same text by every way of guessing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell import Engine, SamplingParams
from foretell.cli.figures import figures
from tests.cli.conftest import Invoke

PROMPT = "def total(values):\n    return the"
COMMON = ("--max-new-tokens", 40, "--seed", 7)

FIELDS = {
    "text", "token_ids", "finish_reason", "num_prompt_tokens", "num_tokens", "seconds_prefill", "seconds_decode",
    "tokens_per_second", "num_steps", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos",
    "mean_acceptance_length", "acceptance_rate", "config", "sampling", "seed", "foretell",
}  # fmt: skip


@pytest.fixture
def ways(models: dict[str, Path]) -> dict[str, list[object]]:
    """Options of each way of guessing."""
    return {
        "none": ["--method", "none"],
        "draft": ["--draft", models["draft"]],
        "draft 8": ["--draft", models["draft"], "--num-speculative-tokens", 8],
        "itself": ["--draft", models["target"], "--num-speculative-tokens", 3],
        "exact": ["--draft", models["draft"], "--verify", "exact"],
        "ngram": ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}'],
        "prediction": ["--prediction", "return the values"],
    }


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_is_complete_consistent_and_the_same_text_by_every_method(
    generate: Invoke, ways: dict[str, list[object]], temperature: float
) -> None:
    texts = {}
    for name, options in ways.items():
        result = generate(PROMPT, *COMMON, *options, "--temperature", temperature, "--json")
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        found = json.loads(result.stdout)
        assert found.keys() >= FIELDS
        assert found["num_tokens"] == len(found["token_ids"]) == 40
        assert found["tokens_per_second"] == pytest.approx(found["num_tokens"] / found["seconds_decode"])
        accepted, per_pos = found["num_accepted_tokens"], found["num_accepted_tokens_per_pos"]
        assert sum(per_pos) == accepted <= found["num_draft_tokens"] == sum(found["num_draft_tokens_per_pos"])
        assert all(hit <= made for hit, made in zip(per_pos, found["num_draft_tokens_per_pos"], strict=True))
        assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / found["num_steps"])
        assert found["acceptance_rate"] == pytest.approx(accepted / max(1, found["num_draft_tokens"]))
        assert found["config"]["implementation"] == "lean"
        assert found["sampling"]["seed"] == found["seed"] == 7
        texts[name] = found["token_ids"], found["text"]
    assert all(text == texts["none"] for text in texts.values())


def test_a_perfect_draft_is_always_accepted(generate: Invoke, models: dict[str, Path]) -> None:
    result = generate(PROMPT, *COMMON, "--draft", models["target"], "--json")
    found = json.loads(result.stdout)
    assert found["acceptance_rate"] == 1.0
    assert found["mean_acceptance_length"] > 5


def test_streamed_text_is_the_final_text_and_figures_go_to_stderr(generate: Invoke, models: dict[str, Path]) -> None:
    options = (PROMPT, *COMMON, "--draft", models["draft"])
    text = json.loads(generate(*options, "--json").stdout)["text"]
    result = generate(*options)
    assert result.exit_code == 0
    assert result.stdout == text if text.endswith("\n") else result.stdout == text + "\n"
    assert "\x1b" not in result.stdout.replace(text, "")
    (line,) = result.stderr.splitlines()
    for part in (
        "lean fp32",
        "40 tokens in",
        "tokens/s",
        "mean acceptance length",
        "acceptance rate",
        "steps",
        "seed 7",
    ):
        assert part in line


def test_prompt_from_standard_input_and_from_a_file(generate: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    wanted = json.loads(generate(PROMPT, *COMMON, "--json").stdout)
    for result in (
        generate("-", *COMMON, "--json", input=PROMPT),
        generate("--prompt-file", file, *COMMON, "--json"),
        generate("--prompt-file", "-", *COMMON, "--json", input=PROMPT.encode()),
    ):
        found = json.loads(result.stdout)
        assert found["token_ids"] == wanted["token_ids"]
        assert found["num_prompt_tokens"] == wanted["num_prompt_tokens"]


def test_chat_template_and_system_message(generate: Invoke) -> None:
    by_hand = generate("<system>Be brief.\n<user>Hi\n<assistant>", *COMMON, "--json")
    chat = generate("Hi", "--chat", "--system", "Be brief.", *COMMON, "--json")
    assert json.loads(chat.stdout)["token_ids"] == json.loads(by_hand.stdout)["token_ids"]


def test_output_file(generate: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = generate(PROMPT, *COMMON, "--json", "--output", file)
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(file.read_text())["num_tokens"] == 40
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_sampling_options_arrive(generate: Invoke) -> None:
    result = generate(
        PROMPT, *COMMON, "--json", "--temperature", 0.5, "--top-k", 9, "--top-p", 0.9, "--min-p", 0.01, "--stop", "q",
        "--stop", "zz", "--repetition-penalty", 1.1, "--presence-penalty", 0.1, "--frequency-penalty", 0.2,
        "--min-new-tokens", 2, "--ignore-eos", "--logit-bias", '{"3": -2.5}',
    )  # fmt: skip
    sampling = json.loads(result.stdout)["sampling"]
    wanted = {
        "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "stop": ["q", "zz"], "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "min_new_tokens": 2, "max_new_tokens": 40, "seed": 7,
        "ignore_eos": True, "logit_bias": {"3": -2.5},
    }  # fmt: skip
    assert {key: sampling[key] for key in wanted} == wanted


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def test_answers_of_a_format_and_log_probabilities(generate: Invoke, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "hi"')
    found = json.loads(
        generate(PROMPT, "--json", "--json-schema", schema, "--logprobs", 1, "--seed", 1, "--max-new-tokens", 60).stdout
    )
    assert set(json.loads(found["text"])) == {"a"}
    assert [one["token_id"] for one in found["logprobs"]] == found["token_ids"]
    assert all(one["logprob"] <= one["top_logprobs"][0][1] + 1e-6 for one in found["logprobs"])
    assert generate(PROMPT, "--grammar", grammar).stdout.strip() == "hi"
    assert generate(PROMPT, "--regex", "[ab]c").stdout.strip() in ("ac", "bc")
    assert generate(PROMPT, "--choice", "yes", "--choice", "no").stdout.strip() in ("yes", "no")
    schema.write_text('{"enum": ["a"], "not": {}}')
    assert "lenient_schema" in generate(PROMPT, "--json-schema", schema).stderr
    loose = generate(PROMPT, "--json-schema", schema, "--lenient-schema")
    assert (loose.stdout.strip(), loose.exit_code) == ('"a"', 0)
    assert "not enforced of the schema: not" in loose.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--logprobs", 1], "--json"),
        (["--logprobs", -1], "--logprobs"),
        (["--json-schema", "none-such.json"], "cannot read 'none-such.json'"),
        (["--regex", "a", "--choice", "b"], "regex and choice both say"),
        (["--lenient-schema"], "json_schema, which was not given"),
        (["--prompt-file", "-", "--grammar", "-"], "standard input holds one text"),
    ],
)
def test_formats_that_cannot_be_are_refused(generate: Invoke, options: list[object], says: str) -> None:
    result = generate(*([] if "--prompt-file" in options else [PROMPT]), *options)
    assert result.exit_code == 2
    assert says in result.stderr


def test_without_a_seed_the_one_drawn_is_told_and_repeats_the_text(generate: Invoke) -> None:
    first = json.loads(generate(PROMPT, "--json", "--max-new-tokens", 12).stdout)
    again = json.loads(generate(PROMPT, "--json", "--max-new-tokens", 12, "--seed", first["seed"]).stdout)
    assert again["token_ids"] == first["token_ids"]


def test_environment_sets_and_the_command_line_beats_it(generate: Invoke) -> None:
    env = {"FORETELL_METHOD": "ngram", "FORETELL_NUM_SPECULATIVE_TOKENS": "4", "FORETELL_MAX_NEW_TOKENS": "5"}
    found = json.loads(generate(PROMPT, "--json", env=env).stdout)
    assert found["config"]["speculative"]["method"] == "ngram"
    assert found["config"]["speculative"]["num_speculative_tokens"] == 4
    assert found["num_tokens"] == 5
    typed = ["--speculative-config", '{"method": "none", "num_speculative_tokens": 2}']
    found = json.loads(generate(PROMPT, "--json", *typed, env=env).stdout)
    assert found["config"]["speculative"]["method"] == "none"
    assert found["config"]["speculative"]["num_speculative_tokens"] == 2


def test_flags_and_json_are_merged(generate: Invoke) -> None:
    merged = generate(
        PROMPT, *COMMON, "--json", "--method", "ngram", "--speculative-config", '{"prompt_lookup_max": 3}'
    )
    speculative = json.loads(merged.stdout)["config"]["speculative"]
    assert (speculative["method"], speculative["prompt_lookup_max"]) == ("ngram", 3)


def test_interrupt_in_process_says_what_was_done(generate: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.engine.engine import Stream

    real = Stream.__next__
    seen: list[int] = []

    def impatient(self: Stream) -> object:
        seen.append(1)
        if len(seen) == 6:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Stream, "__next__", impatient)
    result = generate(PROMPT, *COMMON)
    assert result.exit_code == 130
    assert result.stderr.startswith("interrupted · lean fp32 · 5 tokens")
    seen.clear()
    result = generate(PROMPT, *COMMON, "--json")
    assert (result.exit_code, result.stdout) == (130, "")


def test_a_full_context_is_said() -> None:
    engine = Engine.load("bundled")
    params = SamplingParams(max_new_tokens=30, seed=1)
    room = engine.model.spec.max_positions
    done = engine.generate([40, 41] * (room // 2 - 4), params)
    assert (done.finish_reason, done.num_tokens) == ("length", 8)
    assert f"the model's context of {room} tokens is full" in figures(done, params, tint=False)
    short = replace(params, max_new_tokens=8)
    assert "context" not in figures(engine.generate([40, 41], short), short, tint=False)
