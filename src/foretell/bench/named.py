"""Suites by name: the bundled ones, and public ones with where they come from, how many questions they have, and a fixed
sample of them.

None of the public ones is bundled. Such a suite is read from the cache directory; where it is not there it is fetched once
from the repository of its authors. Spec-Bench: Xia et al. 2024, "Unlocking Efficiency in Large Language Model Inference"
(480 questions: MT-bench's 80 with two turns, and 80 each of translation, summarisation, question answering, word problems
and retrieval). EAGLE: the six sets that its papers report, 80 questions each. GSM8K: Cobbe et al. 2021. HumanEval: Chen
et al. 2021.
"""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretell import bundled
from foretell.bench.suite import BUNDLED, Item, Suite, read_file
from foretell.core.cachedir import cache_directory
from foretell.core.errors import ConfigError

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH_TASKS: dict[str, range] = {
    "mt_bench": range(81, 161),
    "translation": range(161, 241),
    "summarization": range(241, 321),
    "qa": range(321, 401),
    "math_reasoning": range(401, 481),
    "rag": range(481, 561),
}
"""The six tasks of Spec-Bench's tables, and the question ids of each."""
SPEC_BENCH_COUNTS = {**dict.fromkeys(MT_BENCH, 10), **{task: 80 for task in SPEC_BENCH_TASKS if task != "mt_bench"}}
RULE = "sample-1"
"""Name of the rule of ``sample``. Another rule needs another name."""
FETCH_TIMEOUT_S = 30.0
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """Where a suite comes from, and its stated size."""

    url: str
    num_questions: int
    counts: Mapping[str, int] | None = None  # by category, where the suite states them
    category: str | None = None  # of all its lines, where they name none of their own


def _eagle(name: str) -> Source:
    url = f"https://raw.githubusercontent.com/SafeAILab/EAGLE/main/eagle/data/{name}/question.jsonl"
    if name == "mt_bench":
        return Source(url, 80, dict.fromkeys(MT_BENCH, 10))
    return Source(url, 80, category=name)


NAMED: dict[str, Source] = {
    "spec-bench": Source(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        480,
        SPEC_BENCH_COUNTS,
    ),
    **{f"eagle/{name}": _eagle(name) for name in ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")},
    "gsm8k": Source(
        "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/test.jsonl", 1319
    ),
    "humaneval": Source("https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz", 164),
}


def load_suite(name: str | Path = "bundled") -> list[Item]:
    """The questions of ``read_suite``, without its notes. Raises ConfigError."""
    return read_suite(name).items


def read_suite(name: str | Path = "bundled") -> Suite:
    """A suite by name (one of BUNDLED, or of NAMED: from the cache directory, or fetched into it), or by a file.

    Raises ConfigError that names the line.
    """
    name = str(name)
    if name in BUNDLED:
        return Suite(name, _read(bundled.path(BUNDLED[name]), name))
    return read_named(name) if name in NAMED else described(Suite(name, _read(Path(name), name)))


def _read(path: Path, name: str, *, is_json: bool = False) -> list[Item]:
    return read_file(path, name, [*BUNDLED, *NAMED], is_json=is_json)


def suite_file(name: str) -> Path:
    """Where a named suite is kept: ``suites`` in the cache directory."""
    end = ".jsonl.gz" if NAMED[name].url.endswith(".gz") else ".jsonl"
    return cache_directory() / "suites" / (name.replace("/", "-") + end)


def read_named(name: str) -> Suite:
    """A named suite from the cache directory, fetched into it where it is not there. Raises ConfigError."""
    file = suite_file(name)
    if not file.exists():
        _fetch(name, file)
    return described(Suite(name, _read(file, f"{name} ({file})")))


def described(suite: Suite) -> Suite:
    """The suite with its tasks, and with a note where its counts are not those stated.

    A file is taken for Spec-Bench's where every question has the id and the category of one of its questions.
    """
    items, notes = suite.items, list(suite.notes)
    source = NAMED.get(suite.name)
    if source is not None and source.category is not None:
        items = [replace(item, task=source.category) for item in items]
    elif source is None and _is_spec_bench(items):
        source = NAMED["spec-bench"]
    if source is None:
        return suite
    if _is_spec_bench(items):
        items = [replace(item, task="mt_bench" if item.category in MT_BENCH else item.category) for item in items]
    called = suite.name if suite.name in NAMED else f"{suite.name} (Spec-Bench's questions)"
    found: dict[str, int] = {}
    for item in items:
        found[item.category] = found.get(item.category, 0) + 1
    if len(items) != source.num_questions:
        notes.append(f"suite {called} has {len(items)} questions; {source.num_questions} are stated for it")
    elif source.counts is not None and found != dict(source.counts):
        wrong = [name for name in {**source.counts, **found} if found.get(name, 0) != source.counts.get(name, 0)]
        told = ", ".join(f"{name} {found.get(name, 0)} for {source.counts.get(name, 0)}" for name in wrong)
        notes.append(f"suite {called} has other counts than stated for it: {told}")
    twice = len(items) - len({item.question_id for item in items})
    if twice:
        notes.append(f"suite {called} has {twice} questions whose id another one has")
    return Suite(suite.name, items, notes)


def _is_spec_bench(items: Sequence[Item]) -> bool:
    """Whether all have Spec-Bench's ids and categories, and they are not MT-bench alone."""
    for item in items:
        task = "mt_bench" if item.category in MT_BENCH else item.category
        if not isinstance(item.question_id, int) or item.question_id not in SPEC_BENCH_TASKS.get(task, ()):
            return False
    return any(item.category not in MT_BENCH for item in items)


def sample(suite: Suite, size: int) -> Suite:
    """The same ``size`` questions for everybody: as many of each task (the first tasks one more, where it does not divide).

    A task's questions stand in the order of sha256 of "sample-1:CATEGORY:ID", in hexadecimal digits; where a task has
    several categories, first the first of each category, then the second ones. The first so many are taken, so that a
    sample is a part of every larger one. For Spec-Bench the ids are those of the whole suite, whatever the file holds:
    what it lacks is noted. Raises ConfigError.
    """
    spec = _is_spec_bench(suite.items)
    pool: dict[str, list[tuple[str, int | str]]] = {}
    for item in suite.items:
        pool.setdefault(item.group, []).append((item.category, item.question_id))
    if spec:
        pool = {task: [(_category(task, at), at) for at in ids] for task, ids in SPEC_BENCH_TASKS.items()}
    total = sum(map(len, pool.values()))
    if not len(pool) <= size <= total:
        raise ConfigError(
            f"--sample {size} must be at least {len(pool)}, one of each task of suite {suite.name!r}, and at most {total}"
        )
    chosen: set[tuple[str, int | str]] = set()
    for at, (task, keys) in enumerate(pool.items()):
        count = size // len(pool) + (at < size % len(pool))
        if count > len(keys):
            raise ConfigError(f"--sample {size} asks for {count} questions of {task}, which has {len(keys)}")
        chosen.update(_ordered(keys)[:count])
    items = [item for item in suite.items if (item.category, item.question_id) in chosen]
    notes = list(suite.notes)
    missing = sorted(str(key[1]) for key in chosen - {(item.category, item.question_id) for item in items})
    if missing:
        notes.append(
            f"suite {suite.name} lacks {len(missing)} of the {size} questions of the sample: {', '.join(missing)}"
        )
    if not items:
        raise ConfigError(f"suite {suite.name!r} has none of the {size} questions of the sample")
    return Suite(f"{suite.name}/{RULE}/{size}", items, notes)


def _category(task: str, question_id: int) -> str:
    """MT-bench's categories have ten ids each, in their order."""
    return MT_BENCH[(question_id - SPEC_BENCH_TASKS[task].start) // 10] if task == "mt_bench" else task


def _ordered(keys: Sequence[tuple[str, int | str]]) -> list[tuple[str, int | str]]:
    digest = {key: hashlib.sha256(f"{RULE}:{key[0]}:{key[1]}".encode()).hexdigest() for key in keys}
    ranks: dict[str, int] = {}
    rank: dict[tuple[str, int | str], int] = {}
    for key in sorted(digest, key=digest.__getitem__):
        rank[key] = ranks.get(key[0], 0)
        ranks[key[0]] = rank[key] + 1
    return sorted(digest, key=lambda key: (rank[key], digest[key]))


def _fetch(name: str, file: Path) -> None:
    """Fetch a suite; what is no suite is not kept. Raises ConfigError that says where to get the file otherwise."""
    url, scratch = NAMED[name].url, None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            data = answer.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise OSError(f"more than {MAX_BYTES >> 20} MiB")
        with tempfile.NamedTemporaryFile(
            dir=file.parent, suffix=f".new{''.join(file.suffixes)}", delete=False
        ) as stream:
            scratch = Path(stream.name)
            stream.write(data)
        _read(scratch, f"{name} ({url})", is_json=True)
        os.replace(scratch, file)
    except (OSError, urllib.error.URLError, ConfigError) as error:
        reason = str(getattr(error, "reason", None) or error)
        raise ConfigError(
            f"suite {name!r} is not in {file} and could not be fetched ({reason}): get {url} and put it there, or give its "
            "path: --suite FILE"
        ) from None
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
