"""Measuring with table models: exact, in milliseconds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import BenchInterrupted, BenchReport, Item, PromptDone, parse_method, run as bench_run, run_bench
from foretell.bench.run import measure
from foretell.bench.trace import DecodedRun
from foretell.cli.output import as_json
from foretell.core.errors import ConfigError
from foretell.core.params import SamplingParams
from foretell.engine.engine import Engine
from foretell.methods.draft_model.drafter import DraftModel
from tests.model.table import TableLM


class Letters:
    """A tokenizer of sixteen letters."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 16 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in token_ids)


@pytest.fixture
def engine() -> Engine:
    return Engine(TableLM(16, seed=3, sharpness=2.0, max_positions=64), Letters())


ITEMS = [Item(i, "ab"[i % 2], "hello world"[i:], "text", "abcab" if i < 2 else None) for i in range(4)]


def test_every_lane_decodes_every_prompt_and_agrees(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    found = run_bench(
        engine, ITEMS, ["ngram:3", "ngram:3:exact", "prediction"], temperatures=[0.0, 1.0], max_new_tokens=20, rounds=2,
        seed=5, progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [at.temperature for at in found.temperatures] == [0.0, 1.0]
    for at in found.temperatures:
        none, ngram, exact, prediction = at.methods
        assert [method.label for method in at.methods] == ["none", "ngram:3", "ngram:3:exact", "prediction"]
        assert none.overall.num_tokens == ngram.overall.num_tokens == exact.overall.num_tokens
        assert ngram.overall.num_identical == exact.overall.num_identical == 4
        assert (prediction.overall.num_prompts, prediction.overall.num_identical) == (2, 2)
        assert none.overall.mean_acceptance_length == 1.0
        assert ngram.config["num_speculative_tokens"] == 3
    runs = 2 * 2 * (4 * 3 + 2)
    assert seen == [(done, runs) for done in range(runs + 1)]
    assert len(found.prompts) == 2 * (4 * 3 + 2)
    parsed = json.loads(as_json(found.to_dict()))
    assert parsed.keys() == {
        "settings",
        "dram_read_bytes_per_second",
        "temperatures",
        "prompts",
        "peak_rss_bytes",
        "provenance",
        "partial",
    }
    assert not parsed["partial"]
    assert (parsed["settings"]["num_runs"], parsed["settings"]["num_runs_planned"]) == (runs, runs)
    assert parsed["provenance"].keys() >= {"argv", "time", "versions", "machine", "git_revision"}
    assert parsed["peak_rss_bytes"] > 1 << 20


def test_methods_that_learn_never_meet_a_text_that_they_have_decoded(engine: Engine) -> None:
    """Their stores were shared by lanes, rounds, temperatures and the warm-up: every repetition was guessed whole."""
    kept: dict[tuple[float, int, int, str], list[int]] = {}

    def keep(done: PromptDone) -> None:
        for label, run in done.runs.items():
            kept[done.temperature, done.item.question_id, done.round, label] = [
                step.num_accepted_tokens for step in run.steps
            ]

    suffix = parse_method("suffix:4")
    both = [suffix, replace(suffix, label="again")]
    run_bench(engine, ITEMS, both, temperatures=[0.0, 1.0], max_new_tokens=30, rounds=2, on_prompt=keep)
    together = dict(kept)
    assert len(together) == 2 * 4 * 2 * 3
    run_bench(engine, ITEMS, [suffix], temperatures=[1.0], max_new_tokens=30, on_prompt=keep)
    for (temperature, item, _, label), accepted in together.items():
        if label != "none":
            assert accepted == kept[temperature, item, 0, "suffix:4"], (temperature, item)
    assert sum(together[1.0, 3, 0, "again"]) > 0, "it guesses by the texts of the questions before"
    assert all(together[key] == accepted for key, accepted in kept.items())


def test_a_measured_run_adds_up(engine: Engine) -> None:
    lane = Engine(engine.model, Letters(), speculative={"method": "draft_model", "num_speculative_tokens": 4},
                  method=DraftModel(TableLM(16, seed=3, sharpness=2.0, blur=0.3)))  # fmt: skip
    run = measure(lane, [1, 2, 3], SamplingParams(seed=1, max_new_tokens=30))
    assert len(run.token_ids) == sum(step.num_tokens for step in run.steps) == 30
    assert all(step.num_accepted_tokens <= step.num_draft_tokens <= 4 for step in run.steps)
    assert all(step.num_tokens <= step.num_accepted_tokens + 1 for step in run.steps)
    assert 0 < run.seconds_draft_forward <= sum(step.seconds_draft for step in run.steps)
    assert all(seconds >= step.seconds * 0.99 for seconds, step in zip(run.seconds_of(), run.steps, strict=True))
    assert "forward" not in vars(lane.method.model)  # type: ignore[attr-defined]


def test_only_a_draft_models_own_passes_count_as_drafting() -> None:
    """A head keeps the target beside it: the target's passes are no drafting."""
    engine = Engine.load("bundled", speculative={"method": "medusa", "num_speculative_tokens": 2})
    run = measure(engine, [1, 2, 3], SamplingParams(seed=1, max_new_tokens=3, ignore_eos=True))
    assert run.token_ids
    assert run.seconds_draft_forward == 0.0


METHODS = ["ngram:3", "prediction"]
PLANNED = 2 * 2 * (4 * 2 + 2)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each text is that is measured from here on, warm-up left out."""
    lengths: list[int] = []
    sound = bench_run.measure

    def noted(engine: Engine, prompt: Sequence[int], params: SamplingParams, *rest: Any) -> DecodedRun:
        if not params.ignore_eos:
            lengths.append(len(prompt))
        return sound(engine, prompt, params, *rest)

    monkeypatch.setattr(bench_run, "measure", noted)
    return lengths


def interrupted(engine: Engine, at: int, **options: Any) -> BenchInterrupted:
    def progress(done: int, total: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(BenchInterrupted) as caught:
        run_bench(
            engine, ITEMS, METHODS, temperatures=[0.0, 1.0], max_new_tokens=20, rounds=2, progress=progress, **options
        )
    return caught.value


def whole(engine: Engine, **options: Any) -> BenchReport:
    return run_bench(engine, ITEMS, METHODS, temperatures=[0.0, 1.0], max_new_tokens=20, rounds=2, **options)


def test_an_interrupted_bench_reports_what_it_measured(engine: Engine) -> None:
    # Prompts 0 and 1 are decoded by three methods, 2 and 3 by two: at run 7 two prompts are whole, and one is begun.
    report = interrupted(engine, 7).report
    assert report is not None
    assert report.partial
    assert (report.settings["num_runs"], report.settings["num_runs_planned"]) == (6, PLANNED)
    assert [at.temperature for at in report.temperatures] == [0.0]
    assert [method.overall.num_prompts for method in report.temperatures[0].methods] == [2, 2, 2]
    assert [method.overall.num_identical for method in report.temperatures[0].methods] == [2, 2, 2]
    assert interrupted(engine, 2).report is None
    # In the second round of the second temperature: prompts with one run and with two.
    late = interrupted(engine, PLANNED - 1).report
    assert late is not None
    assert [method.overall.num_prompts for method in late.temperatures[1].methods] == [4, 4, 2]
    assert all(record["identical"] for record in late.prompts)


def test_it_goes_on_where_it_was(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.jsonl"
    report = interrupted(engine, 7, runs_file=file).report
    assert report is not None
    with file.open("a") as stream:
        stream.write('{"temperature":0.0,"index":2,"round":0,"meth')  # a line that was cut short is no run
    lengths, seen, told = counted(monkeypatch), [], []
    found = whole(
        engine, runs_file=file, progress=lambda done, total: seen.append(done), on_prompt=lambda one: told.append(one)
    )
    assert len(lengths) == PLANNED - 7
    assert seen == list(range(PLANNED + 1))
    assert len(told) == 2 * 2 * 4 - 2  # not those that were whole already
    assert not found.partial
    assert found.settings["num_runs"] == PLANNED
    before, after = (
        {(r["question_id"], r["method"]): r for r in one.prompts if r["temperature"] == 0} for one in (report, found)
    )
    assert len(before) == 6
    for key in ("seconds_prefill", "num_tokens", "num_steps", "identical"):  # those of the first round are kept
        assert [after[one][key] for one in before] == [record[key] for record in before.values()]
    fresh = whole(engine)
    for mine, theirs in zip(found.temperatures, fresh.temperatures, strict=True):
        for a, b in zip(mine.methods, theirs.methods, strict=True):
            assert (a.label, a.overall.num_tokens, a.overall.num_steps) == (
                b.label,
                b.overall.num_tokens,
                b.overall.num_steps,
            )
            assert a.overall.num_identical == b.overall.num_identical
    lengths.clear()
    assert whole(engine, runs_file=file).prompts == found.prompts  # nothing is left to be measured
    assert lengths == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 1}, "3 results that were made with rounds = 2, and now rounds is 1"),
        ({"seed": 3}, "seed = 0, and now seed is 3"),
        ({"max_new_tokens": 19}, "max_new_tokens = 20"),
        ({"methods": ["ngram:4", "prediction"]}, r"methods\.ngram:3"),
        ({"verify": "exact"}, r"methods\..*verify = 'coupled', and now .* is 'exact'"),
        ({"temperatures": [0.0, 0.5]}, "temperatures = "),
        ({"prompts": [Item(0, "a", "hallo", "text", "abcab"), *ITEMS[1:]]}, "prompts_sha256 = "),
    ],
)
def test_runs_of_another_configuration_are_refused_by_name(
    engine: Engine, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = tmp_path / "runs.jsonl"
    interrupted(engine, 3, runs_file=file)
    given = {"prompts": ITEMS, "methods": METHODS, "temperatures": [0.0, 1.0], "max_new_tokens": 20, "rounds": 2}
    with pytest.raises(ConfigError, match=said):
        run_bench(engine, **{**given, **changes, "runs_file": file})  # type: ignore[arg-type]
    assert len(file.read_text().splitlines()) == 1 + 3


def test_a_run_is_the_same_after_it_was_written(engine: Engine) -> None:
    run = measure(engine.with_method("ngram"), [1, 2, 3], SamplingParams(seed=1, max_new_tokens=30))
    assert DecodedRun.of(json.loads(json.dumps(run.record()))) == run


def test_plain_is_measured_even_if_not_named_and_only_once(engine: Engine) -> None:
    for methods in ([], ["none"], ["none", "none"]):
        found = run_bench(engine, ["hello"], methods, max_new_tokens=5)
        assert [method.label for method in found.temperatures[0].methods] == ["none"]


def test_prompts_that_do_not_fit_are_left_out_and_counted(engine: Engine) -> None:
    found = run_bench(engine, [*ITEMS, Item(9, "a", "x" * 64, "text")], [], max_new_tokens=4)
    assert found.settings["num_prompts_too_long"] == 1
    assert found.temperatures[0].methods[0].overall.num_prompts == 4
    with pytest.raises(ConfigError, match="none of 1 prompts fits"):
        run_bench(engine, [Item(9, "a", "x" * 64, "text")], [], max_new_tokens=4)


def test_methods_with_options() -> None:
    method = parse_method("draft_model:7:rejection", draft="some/draft")
    assert method.label == "draft_model:7:rejection"
    assert method.config.resolved() == {
        "method": "draft_model", "model": "some/draft", "num_speculative_tokens": 7, "verify": "rejection",
        "shape": "chain", "draws": "auto", "judge": None, "draft_weights": "least", "acceptance": None,
        "vocabulary": "auto", "draft_vocab_size": 0, "draft_window": -1,
    }  # fmt: skip
    options = "hybrid:9:second=draft_model:second_tokens=3:draft_vocab_size=512:discount=0.5"
    both: Any = parse_method(options, draft="some/draft").config
    assert (both.num_speculative_tokens, both.second, both.second_tokens) == (9, "draft_model", 3)
    assert (both.draft_vocab_size, both.discount, both.model) == (512, 0.5, "some/draft")
    with pytest.raises(ConfigError, match="unknown key 'secnd' for method 'hybrid'; did you mean 'second'"):
        parse_method("hybrid:secnd=draft_model")
    tree = parse_method("draft_model:6:static/branching=2x1:rejection:iid").config
    assert (tree.shape, tree.verify, tree.draws) == ("static/branching=2x1", "rejection", "iid")
    assert parse_method("ngram", draft="x", verify="exact").config.verify == "exact"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ngrams", "did you mean 'ngram'"),
        ("ngram:0", "between 1 and 64"),
        ("ngram:", "METHOD"),
        ("ngram:exakt", "'exact'"),
    ],
)
def test_wrong_methods(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_method(text)
    assert said in str(caught.value)


def test_wrong_settings(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        run_bench(engine, ITEMS, ["ngram", "ngram"])
    with pytest.raises(ConfigError, match="rounds = 0"):
        run_bench(engine, ITEMS, [], rounds=0)
    with pytest.raises(ConfigError, match="temperature = -1"):
        run_bench(engine, ITEMS, [], temperatures=[-1.0])
