"""Ray Data: files of prompts, each completed once, whatever the actors; and what the driver does by itself."""

import json
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

import foretell  # noqa: E402
from foretell.core.errors import ConfigError  # noqa: E402

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3}
PARAMS = foretell.SamplingParams(max_new_tokens=4, temperature=0.8, seed=5)


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(Counter(row["id"] for row in found).values()) == 1
    return {row["id"]: row for row in found}


def generate(*args: Any, **options: Any) -> Any:
    from foretell.ray import generate_files

    return generate_files(*args, **({"speculative": SPECULATIVE, "params": PARAMS} | options))


@pytest.fixture(scope="module")
def generator() -> Any:
    """What an actor holds, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, on import
        from foretell.ray.data import Generator, RayJob
    return Generator(RayJob("bundled", SPECULATIVE, PARAMS, "prompt", "id"))


def by_one_engine(generator: Any, files: list[Path], batch_size: int = 8) -> dict[str, dict[str, Any]]:
    """The rows that one engine makes, without Ray."""
    from foretell.ray.data import read

    pairs = [(key, prompt) for file in files for _, _, key, prompt in read(file, generator.job)]
    made = [generator.complete(pairs[at : at + batch_size]) for at in range(0, len(pairs), batch_size)]
    return {row["id"]: row for batch in made for row in batch}


def test_a_thousand_prompts_once_each_by_two_actors_and_two_runs(cluster: None, generator: Any, tmp_path: Path) -> None:
    named: list[dict[str, Any]] = [{"id": f"n{i}", "prompt": f"def f{i}(x):"} for i in range(600)]
    plain: list[dict[str, Any]] = [{"prompt": f"# line {i}\n"} for i in range(400)]
    named[3]["prompt"] = [1] * 100_000  # longer than any context
    plain[5]["prompt"] = [40, 41, 42]
    files = [lines(tmp_path / "a.jsonl", named), lines(tmp_path / "b.jsonl", plain)]
    few = [lines(tmp_path / "few" / "a.jsonl", named[:40]), lines(tmp_path / "few" / "b.jsonl", plain[:40])]
    expected = by_one_engine(generator, few)
    out = tmp_path / "out" / "done.jsonl"
    kept = "".join(json.dumps(expected[key]) + "\n" for key in ("n1", "n3", "b.jsonl:2"))
    lines(out, []).write_text(kept + '{"id": "n2", "text": "cut o')  # what a run left that was killed
    summary = generate(files, out, concurrency=2, batch_size=32)
    assert (summary.num_prompts, summary.num_skipped, summary.num_written, summary.num_failed) == (1000, 3, 997, 0)
    assert out.read_text().startswith(kept)
    done = rows(out)
    assert set(done) == {f"n{i}" for i in range(600)} | {f"b.jsonl:{i + 1}" for i in range(400)}
    assert {key: done[key] for key in expected} == expected
    assert "context" in done.pop("n3")["error"]
    assert all(1 <= len(row["token_ids"]) <= 4 and row["finish_reason"] in ("stop", "length") for row in done.values())
    assert len({row["seed"] for row in done.values()}) == 999
    engine = generator.engine.with_method("none")  # a row is what its prompt and seed give alone and without guessing
    for key, prompt in (("n7", named[7]["prompt"]), ("b.jsonl:400", plain[399]["prompt"])):
        if isinstance(prompt, str):  # the bundled target is an instruct model
            prompt = engine.chat_prompt([{"role": "user", "content": prompt}])
        alone = engine.generate(prompt, PARAMS, seed=done[key]["seed"])
        assert (alone.token_ids, alone.text) == (done[key]["token_ids"], done[key]["text"])


def test_a_finished_file_is_left_alone_and_another_seed_refused(generator: Any, tmp_path: Path) -> None:
    file = lines(tmp_path / "in.jsonl", [{"prompt": "class A:"}, {"prompt": [1] * 100_000}])
    out = lines(tmp_path / "out.jsonl", list(by_one_engine(generator, [file]).values()))
    before = out.read_bytes()
    summary = generate(file, out)  # starts no actor: there is no cluster here
    assert (summary.num_skipped, summary.num_written) == (2, 0)
    with pytest.raises(ConfigError, match="another seed"):
        generate(file, out, params=foretell.SamplingParams(seed=6))
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{"text": "x"}], {}, "in.jsonl:1 is not an object with the key 'prompt'"),
        (["x"], {}, "in.jsonl:1 is not an object"),
        ([{"prompt": 3}], {}, "text, token ids or chat messages"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": "1"}], {}, "in.jsonl:2 has the id '1' of .*in.jsonl:1"),
        ([{"prompt": "x", "id": "a\ud800"}], {}, "in.jsonl:1: the id .* is no text"),
        ([{"prompt": "x"}], {"speculative": "oracle"}, "oracle"),
        ([{"prompt": "x"}], {"batch_size": 0}, "at least 1"),
        ([{"prompt": "x"}], {"ray_actor_options": {"num_cpu": 1}}, "Ray refuses ray_actor_options"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    rows: list[Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    file = lines(tmp_path / "in.jsonl", rows)
    with pytest.raises(ConfigError, match=says):
        generate(file, tmp_path / "out.jsonl", **options)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_model_that_cannot_be_loaded_is_told_in_its_own_words(cluster: None, tmp_path: Path) -> None:
    """It was ActorDiedError, with the traceback of another process."""
    file = lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ConfigError, match=r"^dtype 'float99' is unknown; did you mean 'float32'\?$"):
        generate(file, tmp_path / "out.jsonl", engine_options={"dtype": "float99"})


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    file = lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ConfigError, match="one of the input files"):
        generate(file, file)
    with pytest.raises(ConfigError, match="cannot read"):
        generate(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2 is not JSON"):
        generate([file, tmp_path / "bad.jsonl"], tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=r"in\.jsonl:1 is not a row of an earlier run"):
        generate(tmp_path / "bad.jsonl", file)


def test_batches_cover_what_is_not_done(tmp_path: Path) -> None:
    from foretell.ray.data import RayJob, plan, read

    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"é{i}"}) + "\n" * (i % 3) for i in range(30)))  # some lines empty
    job = RayJob("bundled", None, PARAMS, "prompt", "id")
    everything = [(key, prompt) for _, _, key, prompt in read(file, job)]
    assert len(everything) == 30
    done = {key: 0 for key, _ in everything[4:9] + everything[20:21]}
    spans, ids = plan([file], job, done, batch_size=4)
    assert ids == {key for key, _ in everything}
    assert max(span.count for span in spans) == 4
    found = []
    for span in spans:
        found += [(key, prompt) for _, _, key, prompt in read(file, job, span.offset, span.line)][: span.count]
    assert found == [pair for pair in everything if pair[0] not in done]


def test_a_text_without_a_next_token_is_a_failed_row_and_no_failed_run(generator: Any) -> None:
    """Here by banned tokens; with a real model by weights that are not finite."""
    from foretell.ray.data import Generator

    job = generator.job
    banned = tuple(range(generator.engine.model.spec.vocab_size))
    broken = object.__new__(Generator)
    broken.engine = generator.engine
    broken.job = replace(job, params=replace(job.params, banned_token_ids=banned, temperature=0.0))
    made = broken.complete([("a", "x"), ("b", "y")])
    assert [row["id"] for row in made] == ["a", "b"]
    assert all("no token is possible" in row["error"] for row in made)


def test_half_a_surrogate_pair_is_a_failed_row_and_no_failed_run(generator: Any) -> None:
    chat = [{"role": "user", "content": "\udc00"}]
    first, second, third = generator.complete([("a", "x\ud83d"), ("b", "y"), ("c", chat)])
    assert "its character 1 is half a surrogate pair" in first["error"]
    assert second["token_ids"]
    assert "surrogate" in third["error"]
