"""Reading prompts: our format, Spec-Bench's, and what is neither."""

import gzip
import json
from pathlib import Path

import pytest

from foretell.bench import Item, load_suite, select
from foretell.bench.answers import AnswerCheck
from foretell.core.errors import ConfigError


def written(folder: Path, *records: object) -> Path:
    """A JSONL file."""
    file = folder / "suite.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n")
    return file


def test_our_format(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"question_id": 3, "category": "code", "format": "text", "turns": ["def f("], "reference": "x"},
        {"question_id": 4, "category": "copy", "format": "chat", "turns": ["Repeat: a"], "prediction": "a"},
    )
    assert load_suite(file) == [Item(3, "code", "def f(", "text", None), Item(4, "copy", "Repeat: a", "chat", "a")]


def test_spec_bench_questions(tmp_path: Path) -> None:
    """Lines as in Spec-Bench's question.jsonl: two turns, sometimes references as a list, no format."""
    file = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        {"question_id": 401, "category": "math_reasoning", "turns": ["1 + 1?"], "reference": ["2"]},
        "",
    )
    first, second = load_suite(str(file))
    assert first == Item(81, "writing", "Compose a post.", "chat", None, ("Rewrite it.",), task="mt_bench")
    assert (second.category, second.format, second.group) == ("math_reasoning", "chat", "math_reasoning")
    assert second.check == AnswerCheck("number", "2.0")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ({"text": "x"}, "line 2: expected a text, or an object with"),
        ([1], "expected a text, or an object with"),
        ({"turns": []}, "expected a text, or an object with"),
        ({"turns": [""]}, "expected a text, or an object with"),
        ({"turns": ["x", 3]}, "expected a text, or an object with"),
        ({"question": "How many?", "answer": "many"}, "the answer has no number: 'many'"),
        ({"turns": ["x"], "format": "markdown"}, "format = 'markdown' must be 'text' or 'chat'"),
        ({"turns": ["x"], "prediction": 3}, "prediction must be a text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_suite(written(tmp_path, {"turns": ["ok"]}, line))
    assert said in str(caught.value)


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    for name, content, said in [
        ("no", None, "cannot be read"),
        ("empty", b"\n", "is empty"),
        ("bin", b"\xff", "UTF-8"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_suite(tmp_path / name)
        assert said in str(caught.value)


def test_select_by_category_and_limit() -> None:
    items = [Item(i, "ab"[i % 2], "x") for i in range(8)]
    assert [item.question_id for item in select(items, limit=2)] == [0, 1, 2, 3]
    assert [item.question_id for item in select(items, categories=["b"], limit=3)] == [1, 3, 5]
    with pytest.raises(ConfigError, match="unknown category 'c'"):
        select(items, categories=["c"])
    with pytest.raises(ConfigError, match="limit = 0"):
        select(items, limit=0)


def test_gsm8k_and_humaneval_lines(tmp_path: Path) -> None:
    given = "import math\n\n\ndef area(r):\n    pass\n"
    file = written(
        tmp_path,
        {"question": "6 times 7?", "answer": "6*7=<<6*7=42>>42\n#### 1,042"},
        {
            "task_id": "HumanEval/0",
            "prompt": given,
            "test": "def check(f):\n    assert f(0) == 0\n",
            "entry_point": "area",
        },
        {"turns": ["6 times 7?"], "category": "math", "reference": ["it is 42"]},
        {"turns": ["6 times 7?"], "category": "x", "reference": "#### 42"},
    )
    word, code, essay, marked = load_suite(file)
    assert marked.check == AnswerCheck("number", "42.0")
    assert (word.question_id, word.category, word.check) == (1, "gsm8k", AnswerCheck("number", "1042.0"))
    assert word.prompt.startswith("6 times 7?\n")
    assert (code.question_id, code.category) == ("HumanEval/0", "humaneval")
    assert f"```python\n{given}```" in code.prompt
    assert code.check == AnswerCheck("python", "def check(f):\n    assert f(0) == 0\n", "area", given)
    assert essay.check is None  # MT-bench's references are essays


def test_a_packed_file(tmp_path: Path) -> None:
    file = tmp_path / "suite.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"turns": ["x"]}\n'))
    assert load_suite(file) == [Item(1, "all", "x")]
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConfigError, match="is not a whole gzip file"):
        load_suite(file)


def test_a_task_stands_for_its_categories() -> None:
    items = [
        Item(81, "writing", "x", task="mt_bench"),
        Item(91, "roleplay", "x", task="mt_bench"),
        Item(161, "qa", "x"),
    ]
    assert [item.question_id for item in select(items, categories=["mt_bench"])] == [81, 91]
    assert [item.question_id for item in select(items, categories=["roleplay", "qa"])] == [91, 161]
