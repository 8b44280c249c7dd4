"""How far do judges agree? Intraclass correlation of several judges who score the same answers.

    python -m benchmarks.papers agreement --answers build/abstention.jsonl [--judges T1,T2]

Theirs ("AI Predicts AGI", 2412.09385, abstract): language models that review each other's forecasts, ICC 0.79. Ours:
answers of row ``abstention``, scored by three rules of ``foretell.bench.unknown`` (says it anywhere, says it first, share
of sentences) and, with --judges, by models: the probability of "Yes" against "No" to the question whether the answer says
that nobody knows. ICC(2,1) counts a difference in strictness as disagreement, ICC(3,1) does not; 95 % intervals by F.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.papers.row import Line, Row, dtype_of

from foretell import Engine
from foretell.analysis.pairs import logits_at
from foretell.bench.stats import agreement
from foretell.bench.unknown import opens_unknown, says_unknown, share_unknown

ASK = 'Here is an answer to a question:\n"{}"\nDoes the answer say that the truth is not known? Reply with Yes or No.'
THEIRS = 0.79


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--rule", default="none", help="whose answers (default: plain decoding's)")
    parser.add_argument("--judges", default="", help="models, separated by commas")
    parser.add_argument("--limit", type=int, help="answers at most")


def run(args: argparse.Namespace) -> Row:
    """Score and correlate."""
    records = [json.loads(line) for line in args.answers.read_text(encoding="utf-8").splitlines()]
    texts = [record["text"] for record in records if record["rule"] == args.rule][: args.limit]
    scores: dict[str, list[float]] = {
        "says": [float(says_unknown(text)) for text in texts],
        "opens": [float(opens_unknown(text)) for text in texts],
        "share": [share_unknown(text) for text in texts],
    }
    judges = [name for name in args.judges.split(",") if name]
    for name in judges:
        scores[Path(name).stem] = judged(name, texts)
    names = list(scores)
    lines = _lines("three rules", names[:3], scores)
    if len(judges) > 1:
        lines += _lines("models", names[3:], scores)
    if judges:
        lines += _lines("rules and models", names, scores)
        for name in names[3:]:
            lines += _lines(f"`says` and {name}", ["says", name], scores)[:1]
    means = ", ".join(f"{name} {sum(values) / len(values):.2f}" for name, values in scores.items())
    return Row(
        "agreement", '"AI Predicts AGI", 2412.09385', "abstract", lines,
        "other judges, other answers: no verdict", f"{len(texts)} answers; mean scores: {means}", {"scores": scores},
    )  # fmt: skip


def _lines(what: str, names: list[str], scores: dict[str, list[float]]) -> list[Line]:
    found = agreement(list(zip(*(scores[name] for name in names), strict=True)))
    return [
        Line(f"{what}: {name}", THEIRS, one.value, one.low, one.high)
        for name, one in (("ICC(2,1)", found.absolute), ("ICC(3,1)", found.consistent))
    ]


def judged(model: str, texts: list[str]) -> list[float]:
    """A model's probability of "Yes" for each text, against "No"."""
    engine = Engine.load(model, dtype=dtype_of(model))
    tokenizer: Any = engine.tokenizer
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
    found = []
    for text in texts:
        ids = engine.chat_prompt([{"role": "user", "content": ASK.format(text.strip())}])
        row = logits_at(engine.model, ids, [len(ids) - 1])[0]
        found.append(1 / (1 + math.exp(min(60.0, float(row[no] - row[yes])))))
    return found
