"""Questions of several messages, judged answers, and a planner in the bench: with table models, in milliseconds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import Item, load_suite, parse_method, run as bench_run, run_bench, with_forms
from foretell.bench.answers import AnswerCheck, python_check
from foretell.bench.script import Script, encode_item, encode_turns
from foretell.bench.trace import DecodedRun
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine
from tests.bench.test_run import Letters
from tests.model.table import TableLM


class Chat(Letters):
    """The letters, with a template that puts < and > around messages of the user, [ and ] around answers."""

    chat_template = "present"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        marks = {"user": "<>", "assistant": "[]"}
        return "".join(marks[one["role"]][0] + one["content"] + marks[one["role"]][1] for one in messages)


@pytest.fixture
def engine() -> Engine:
    return Engine(TableLM(16, seed=3, sharpness=2.0, max_positions=64), Chat())


TWO = Item(81, "writing", "hello", "chat", later=("again", "more"), task="mt_bench")
ONE = Item(161, "translation", "good")


def prompts_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every prompt that is measured, warm-up left out."""
    seen: list[list[int]] = []
    sound = bench_run.measure

    def noted(engine: Engine, prompt: Sequence[int], params: SamplingParams, *rest: Any) -> DecodedRun:
        if not params.ignore_eos:
            seen.append(list(prompt))
        return sound(engine, prompt, params, *rest)

    monkeypatch.setattr(bench_run, "measure", noted)
    return seen


def test_a_later_message_follows_the_models_own_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(monkeypatch)
    found = run_bench(engine, [TWO, ONE], ["ngram:2"], max_new_tokens=6, seed=4)
    letters = Letters()
    told = [letters.decode(ids) for ids in prompts]
    assert len(told) == 2 * 4
    answers = []
    for turn, seed in enumerate((4, 5)):  # message number i has SEED + i
        done = engine.generate(prompts[2 * turn], temperature=0.0, max_new_tokens=6, seed=seed)
        answers.append(letters.decode(done.token_ids))
    second = letters.encode(f"<hello>[{answers[0]}]<again>")
    third = letters.encode(f"<hello>[{answers[0]}]<again>[{answers[1]}]<more>")
    assert prompts[2] == prompts[3] == second
    assert prompts[4] == prompts[5] == third
    none, ngram = found.temperatures[0].methods
    assert none.overall.num_prompts == ngram.overall.num_prompts == 4
    assert ngram.overall.num_identical == 4
    assert none.overall.num_independent == ngram.overall.num_independent == 2
    assert [record["turn"] for record in found.prompts] == [1, 2, 3, 1] * 2
    assert (found.settings["num_questions"], found.settings["num_prompts"]) == (2, 4)
    assert found.settings["num_runs"] == found.settings["num_runs_planned"] == 8


def test_reports_sum_up_by_task(engine: Engine) -> None:
    items = [TWO, Item(91, "roleplay", "good", later=("b",), task="mt_bench"), ONE]
    method = run_bench(engine, items, ["ngram:2"], max_new_tokens=6).temperatures[0].methods[1]
    assert [part.category for part in method.categories] == ["mt_bench", "translation"]
    assert [part.num_prompts for part in method.categories] == [5, 1]
    assert [part.num_independent for part in method.categories] == [2, 1]
    assert [part.category for part in method.subcategories] == ["writing", "roleplay"]
    assert method.macro.num_tasks == 2
    speeds = [part.tokens_per_second for part in method.categories]
    assert method.macro.tokens_per_second == pytest.approx(sum(speeds) / 2)
    ratios = [part.speedup.value for part in method.categories]
    assert method.macro.speedup.value == pytest.approx(sum(ratios) / 2)


def test_a_conversation_that_outgrows_the_context_is_left_out_and_counted(engine: Engine) -> None:
    long = Item(82, "writing", "hello", later=("x" * 50, "y"))
    found = run_bench(engine, [long, ONE], ["ngram:2"], max_new_tokens=20, rounds=2)
    assert found.settings["num_prompts_too_long"] == 2
    assert found.settings["num_runs"] == found.settings["num_runs_planned"] == 2 * 2 * 2
    assert found.temperatures[0].methods[1].overall.num_prompts == 2
    with pytest.raises(ConfigError, match="none of 1 prompts fits"):
        Script(engine, [Item(1, "a", "x" * 70)])


def test_it_goes_on_within_a_question(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.jsonl"

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    given: dict[str, Any] = {"temperatures": [0.0, 1.0], "max_new_tokens": 6, "runs_file": file}
    with pytest.raises(bench_run.BenchInterrupted):
        run_bench(engine, [TWO, ONE], ["ngram:2"], progress=stop, **given)
    prompts = prompts_of(monkeypatch)
    found = run_bench(engine, [TWO, ONE], ["ngram:2"], **given)
    assert len(prompts) == 2 * 8 - 3
    fresh = run_bench(engine, [TWO, ONE], ["ngram:2"], temperatures=[0.0, 1.0], max_new_tokens=6)
    assert [record["num_tokens"] for record in found.prompts] == [record["num_tokens"] for record in fresh.prompts]
    with pytest.raises(ConfigError, match="prompts_sha256"):
        run_bench(engine, [Item(81, "writing", "hello", later=("other", "more")), ONE], ["ngram:2"], **given)


def test_without_a_template_texts_stand_after_each_other() -> None:
    plain = Engine(TableLM(16, seed=3, max_positions=64), Letters())
    assert encode_turns(plain, "chat", ["ab", "cd"], ["ef"]) == Letters().encode("ab\n\nef\n\ncd")
    check = python_check("", "f", "def f():\n")
    assert encode_item(plain, Item(1, "humaneval", "Complete this.", check=check)) == Letters().encode("def f():\n")
    chat = Engine(TableLM(16, seed=3, max_positions=64), Chat())
    assert encode_item(chat, Item(1, "humaneval", "Hi.", check=check)) == Letters().encode("<Hi.>")


def test_bare_texts_are_messages_for_an_instruct_model_alone(tmp_path: Path) -> None:
    """An item that nobody has looked at is encoded by the same rule; a line's own tests are of its text."""
    file, bundled = tmp_path / "f.json", Engine.load("bundled", speculative="none")
    file.write_text('[{"prompt": "ab", "test": "", "entry_point": "f"}, {"prompt": "ab", "format": "text"}]')
    bare, text = load_suite(file)
    assert (bare.is_bare, text.is_bare, bare.check is not None) == (True, False, True)
    chat = bundled.chat_prompt([{"role": "user", "content": "ab"}])
    assert [encode_item(bundled, bare), encode_item(bundled, with_forms(bundled, [bare], raw=True)[0])] == [
        chat, encode_item(bundled, text)
    ]  # fmt: skip
    plain = Engine(TableLM(16, seed=3, max_positions=64), Chat())
    assert encode_item(plain, replace(bare, check=None)) == Letters().encode("ab"), (
        "its template ends with no end token"
    )


def test_answers_are_judged_on_request(engine: Engine) -> None:
    """The letters are no numbers: nothing is right."""
    wrong = AnswerCheck("number", "7.0")
    items = [Item(1, "gsm8k", "ab", check=wrong), Item(2, "gsm8k", "cd", check=wrong), Item(3, "copy", "ef")]
    found = run_bench(engine, items, ["ngram:2", "ngram:2:typical"], max_new_tokens=4, judged=True)
    for method in found.temperatures[0].methods:
        (part,) = method.quality
        assert (part.category, part.num_judged, part.num_right, part.p_value) == ("gsm8k", 2, 0, 1.0)
    assert [record["right"] for record in found.prompts[:3]] == [False, False, None]
    assert "sandbox" not in found.settings
    assert run_bench(engine, items, ["ngram:2"], max_new_tokens=4).temperatures[0].methods[0].quality == []


def test_auto_lanes(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    method = parse_method("auto:ngram:3")
    assert (method.label, method.speculation, method.config.num_speculative_tokens) == ("auto:ngram:3", "auto", 3)
    found = run_bench(engine, [ONE], ["ngram:3", "auto:ngram:3"], max_new_tokens=20)
    none, fixed, auto = found.temperatures[0].methods
    assert [method.label for method in (none, fixed, auto)] == ["none", "ngram:3", "auto:ngram:3"]
    assert auto.overall.num_identical == fixed.overall.num_identical == 1
