"""How far do judges agree? Intraclass correlation of several judges who score the same answers.

    python -m benchmarks.papers agreement --answers build/abstention.jsonl [--judges T1,T2]

Theirs ("AI Predicts AGI", 2412.09385, abstract): language models that review each other's forecasts, ICC 0.79. Ours:
answers of row ``abstention``, scored by three rules (``foretell.bench.quality`` says it anywhere; says it first; share
of sentences) and, with --judges, by models: the probability of "Yes" against "No" to the question whether the answer says
that nobody knows. ICC(2,1) counts a difference in strictness as disagreement, ICC(3,1) does not; 95 % intervals by F.
"""

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.papers.row import Line, Row, dtype_of
from benchmarks.theory.pairs import logits_at

from foretell import Engine
from foretell.bench.quality import SAYS, says_unknown
from foretell.bench.stats import Interval, f_quantile

ASK = 'Here is an answer to a question:\n"{}"\nDoes the answer say that the truth is not known? Reply with Yes or No.'
THEIRS = 0.79
HEDGES = re.compile(
    r"\b(?:may|might|could|perhaps|possibly|probably|likely|believed?|thought\s+to|suggests?|theor(?:y|ies|ised|ized)"
    r"|hypothes[ie]s|debate[ds]?|speculat\w+|estimates?|some\s+(?:say|argue|scientists|researchers))\b",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")


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


def opens_unknown(text: str) -> bool:
    """Whether its first sentence says so: the strict rule."""
    found = sentences(text)
    return bool(found) and SAYS.search(found[0]) is not None


def share_unknown(text: str) -> float:
    """The share of its sentences that say so, or hedge (count half): the graded rule. 0 of an empty text."""
    found = sentences(text)
    marks = [1.0 if SAYS.search(one) else 0.5 if HEDGES.search(one) else 0.0 for one in found]
    return sum(marks) / len(marks) if marks else 0.0


def sentences(text: str) -> list[str]:
    """Its sentences, roughly: split at full stops, question and exclamation marks, and line ends."""
    return [part.strip() for part in SENTENCE.findall(text.replace("\u2019", "'")) if re.search(r"\w", part)]


@dataclass(frozen=True)
class Agreement:
    """Intraclass correlations of several raters who all rate the same subjects: 1 is full agreement, 0 is chance."""

    num_subjects: int
    num_raters: int
    absolute: Interval  # ICC(2,1): a rater who is always stricter than the others agrees less
    consistent: Interval  # ICC(3,1): such a constant difference does not count


def agreement(ratings: Sequence[Sequence[float]], *, level: float = 0.95) -> Agreement:
    """ICC(2,1) and ICC(3,1) of ratings [subjects][raters], single ratings, both from one two-way analysis of variance.

    Shrout and Fleiss 1979, "Intraclass correlations: uses in assessing rater reliability"; the interval of ICC(2,1) is
    their approximation, as in McGraw and Wong 1996. Where all ratings are equal there is nothing to correlate: NaN,
    between -1 and 1. Raises ValueError below two subjects or two raters.
    """
    table = np.asarray(ratings, dtype=np.float64)
    if table.ndim != 2 or min(table.shape) < 2:
        raise ValueError(f"ratings have shape {list(table.shape)}: expected at least 2 subjects by at least 2 raters")
    n, k = table.shape
    mean = table.mean()
    rows = k * float(((table.mean(1) - mean) ** 2).sum()) / (n - 1)
    columns = n * float(((table.mean(0) - mean) ** 2).sum()) / (k - 1)
    left = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + mean
    error = float((left**2).sum()) / ((n - 1) * (k - 1))
    if rows + error < 1e-12 * max(1.0, mean * mean):
        nothing = Interval(math.nan, -1.0, 1.0)
        return Agreement(n, k, nothing, nothing)
    return Agreement(n, k, _icc2(rows, columns, error, n, k, level), _icc3(rows, error, n, k, level))


def _icc3(rows: float, error: float, n: int, k: int, level: float) -> Interval:
    """From the mean squares between subjects and of what is left."""
    value = (rows - error) / (rows + (k - 1) * error)
    if error < 1e-12 * rows:
        return Interval(value, value, value)
    upper, d1, d2 = (1 + level) / 2, n - 1, (n - 1) * (k - 1)
    low, high = rows / error / f_quantile(upper, d1, d2), rows / error * f_quantile(upper, d2, d1)
    return Interval(value, (low - 1) / (low + k - 1), (high - 1) / (high + k - 1))


def _icc2(rows: float, columns: float, error: float, n: int, k: int, level: float) -> Interval:
    """From the mean squares between subjects, between raters, and of what is left."""
    value = (rows - error) / (rows + (k - 1) * error + k * (columns - error) / n)
    if error + columns < 1e-12 * rows:
        return Interval(value, value, value)
    a = k * value / (n * (1 - value))
    b = 1 + k * value * (n - 1) / (n * (1 - value))
    parts = (a * columns) ** 2 / (k - 1) + (b * error) ** 2 / ((n - 1) * (k - 1))
    freedom = max(1.0, (a * columns + b * error) ** 2 / parts) if parts else 1.0
    upper, rest = (1 + level) / 2, k * columns + (k * n - k - n) * error
    below, above = f_quantile(upper, n - 1, freedom), f_quantile(upper, freedom, n - 1)
    low = n * (rows - below * error) / (below * rest + n * rows)
    high = n * (above * rows - error) / (rest + n * above * rows)
    return Interval(value, low, high)
