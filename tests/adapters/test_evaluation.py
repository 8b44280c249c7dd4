"""Scores and texts for evaluation harnesses: by enumeration over a table, by windows, and equal with every method."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foretell import Engine
from foretell.adapters.evaluation import Evaluation, windows
from foretell.core.errors import ConfigError, PromptError
from tests.engine.harness import EOS, ToyTokenizer, table


def toy(**options: Any) -> Evaluation:
    return Evaluation(Engine(table(1), ToyTokenizer()), **options)


def test_continuations_are_a_law() -> None:
    """The probabilities of all texts of two tokens after a context sum to 1, and the greedy one is told."""
    made, context = toy(), [3, 1, 4]
    pairs = [(context, list(pair)) for pair in product(range(24), repeat=2)]
    scores = made.token_scores(pairs)
    assert math.fsum(math.exp(score.logprob) for score in scores) == pytest.approx(1.0, abs=1e-4)
    greedy = [pair[1] for pair, score in zip(pairs, scores, strict=True) if score.is_greedy]
    assert greedy == [Engine(table(1)).generate(context, temperature=0, max_new_tokens=2, ignore_eos=True).token_ids]


@pytest.mark.parametrize("length", [1, 4, 5, 9, 10, 23])
def test_windows_score_each_token_once_with_as_much_context_as_there_is_room_for(length: int) -> None:
    ids, limit = list(range(100, 100 + length)), 5
    known, scored = [7, *ids], list[int]()
    for context, part in windows(ids, 7, limit):
        assert len(context) > 0
        assert len(context) + len(part) <= limit + 1
        end = 1 + len(scored) + len(part)
        assert [*context, *part] == known[max(0, end - limit - 1) : end]
        scored += part
    assert scored == ids


def test_a_whole_text_is_the_sum_of_its_tokens_and_of_windows_where_it_is_long() -> None:
    made, short = toy(), toy(max_length=6)
    text = "abc the end. abc"
    ids = made.encode(text)
    assert made.prefix_token_id == EOS
    whole = [piece.logprob for piece in next(made.engine.score([[EOS, *ids]]))][1:]
    assert made.rolling([text])[0] == pytest.approx(math.fsum(value for value in whole if value is not None))
    parts = [short.token_scores([window])[0].logprob for window in windows(ids, EOS, 6)]
    assert len(parts) > 1
    assert short.rolling(["x", text])[1] == pytest.approx(math.fsum(parts))


def test_spaces_belong_to_what_follows_and_no_context_is_the_first_token() -> None:
    made = toy()
    assert made.pair("ab ", "c") == made.pair("ab", " c")
    assert made.pair("", "c") == ([EOS], made.encode("c"))
    assert made.loglikelihood([("ab ", "c"), ("ab", " c")])[0] == made.loglikelihood([("ab", " c")])[0]


def test_long_contexts_lose_their_beginning_and_long_continuations_are_refused() -> None:
    made = toy(max_length=8)
    long, short = made.token_scores([([1] * 30 + [2, 3, 4], [5, 6, 0, 1, 9]), ([1, 2, 3, 4], [5, 6, 0, 1, 9])])
    assert long == short
    with pytest.raises(PromptError, match="9 tokens"):
        made.token_scores([([1], [2] * 9)])


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("def add(a, b):\n", {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}),
    ("import os\n", {"until": "\n\n", "max_gen_toks": 24, "do_sample": True, "temperature": 0.9, "top_p": 0.95}),
    ("import os\n", {"until": [], "max_new_tokens": 24, "temperature": 0.9}),
]
PAIRS = [("def add(a, b):\n    return", " a + b"), ("import", " os"), ("The cat", " sat on the mat.")]


@pytest.fixture(scope="module")
def plain() -> Engine:
    return Engine.load("bundled", dtype="float32")


@pytest.mark.parametrize("method", ["suffix", "ngram", {"method": "draft_model", "num_speculative_tokens": 4}])
def test_figures_are_those_of_plain_decoding(plain: Engine, method: Any) -> None:
    config = {"method": method} if isinstance(method, str) else method
    guessing = plain.with_method({**config, "verify": "coupled"})
    one, other = Evaluation(plain), Evaluation(guessing, batch_size=2)
    assert one.loglikelihood(PAIRS) == other.loglikelihood(PAIRS)
    assert one.rolling([a + b for a, b in PAIRS]) == other.rolling([a + b for a, b in PAIRS])
    assert dict(one.texts(REQUESTS)) == dict(other.texts(REQUESTS))
    assert guessing.recorder.methods
    texts = dict(one.texts(REQUESTS))
    assert texts[1] != texts[2]  # samples of one prompt have seeds of their own


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Evaluation(Engine(table(1))), "no tokenizer"),
        (lambda: toy(max_length=1), "max_length = 1"),
        (lambda: toy(batch_size=0), "batch_size = 0"),
        (lambda: list(toy().texts([("a", {"untl": ["b"]})])), "unknown key 'untl'.*until"),
        (lambda: list(toy(max_length=8).texts([("a", {"max_gen_toks": 8})])), "leaves nothing"),
    ],
)
def test_refusals(call: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        call()


@pytest.mark.parametrize("name", ["min_new_tokens", "min_tokens"])
@pytest.mark.parametrize("method", ["none", "suffix"])
def test_a_minimum_holds_against_stop_texts(name: str, method: str) -> None:
    """Whatever a task stops at, the fewest tokens that it asks for are written first."""
    made = Evaluation(Engine(table(1), ToyTokenizer(), speculative=method))
    asked = {"until": list("abcthexyz.!01 \n"), "max_gen_toks": 24, "do_sample": False}
    (_, short), (_, long) = sorted(made.texts([("ab", asked), ("ab", {**asked, name: 20})]))
    ids = made.engine.generate("ab", temperature=0.0, max_new_tokens=20, min_new_tokens=20).token_ids
    assert short == ""
    assert long.startswith(ToyTokenizer().decode(ids).rstrip("\ufffd"))
    assert len(long) >= 10


TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""


@pytest.mark.parametrize(("named", "expected"), [("owner/name", "owner__name"), ("", "table"), (None, "table")])
def test_requests_that_are_kept_are_those_of_one_tokenizer(named: str | None, expected: str) -> None:
    """The tokenizer of a GGUF file has an empty name, which every other one has too."""
    made = toy()
    if named is not None:
        made.engine.tokenizer.name_or_path = named  # type: ignore[union-attr]
    assert made.tokenizer_name == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_itself_finds_equal_scores(tmp_path: Path) -> None:
    """Its own command line on three local tasks, plain and guessing."""
    data = tmp_path / "data.jsonl"
    docs = [
        {"q": "def add(a, b):\n    return", "c": [" a + b", " cat"], "l": 0},
        {"q": "import", "c": [" os", " 7"], "l": 0},
    ]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    kinds = {
        "choice": "output_type: multiple_choice\ndoc_to_choice: c\ndoc_to_target: l\n",
        "whole": "output_type: loglikelihood_rolling\ndoc_to_target: '{{q}}'\n",
        "text": "output_type: generate_until\ndoc_to_target: '{{c[0]}}'\n"
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 12, do_sample: true, temperature: 0.9}\n",
    }
    for name, kind in kinds.items():
        head = TASK.format(name=f"local_{name}", data=data)
        (tmp_path / f"{name}.yaml").write_text(head.replace("{{q}}", "") + kind if name == "whole" else head + kind)
    found = []
    for method in ("none", "suffix"):
        out = tmp_path / method
        command = [
            sys.executable, "-m", "foretell.adapters.lm_eval", "run", "--model", "foretell", "--include_path",
            str(tmp_path), "--tasks", ",".join(f"local_{name}" for name in kinds), "--log_samples", "--output_path",
            str(out), "--model_args", f"pretrained=bundled,method={method},verify=coupled", "--batch_size", "2",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        samples = sorted(out.rglob("samples_*.jsonl"))
        assert len(samples) == 3
        found.append([json.loads(line)["resps"] for path in samples for line in path.read_text().splitlines()])
    assert found[0] == found[1]
