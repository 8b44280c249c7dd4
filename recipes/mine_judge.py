"""Mine labels for the bundled judge on worked problems, and train it.

    python -m recipes.mine_judge --out W/judge [--problems 4000] [--minutes 10]

Problems are those of the stream "judge", so none is in the training text (stream "train") or the suite (stream "suite")
but by chance. The outcome of an answer is its last line ``Answer: ...``. The bundled target solves almost none of the
problems but those that cannot be answered; so labels say whether *its own* answer is kept, right or wrong. Problems of the
kind "count" are left out: its answers to them end in a loop, without an outcome.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

from foretell import Engine
from foretell.model.load import load_model
from foretell.train.mining import Mined, mine
from recipes.problems import GENERATORS, Problem, problem
from recipes.process import prepare

STREAM = "judge"
KINDS = [kind for kind in GENERATORS if kind != "count"]
DECLINED = "cannot be known"
ANSWER = re.compile(r"^Answer: (.+)$", re.MULTILINE)
MAX_NEW_TOKENS = 128  # four times the mean answer


def outcome(text: str) -> str | None:
    """The outcome of an answer; None where it does not end."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def solved(text: str, of: Problem) -> bool:
    """Whether an answer is right."""
    return outcome(text) == outcome(of.answer)


def problems(count: int, stream: str = STREAM) -> list[Problem]:
    """The first problems of a stream."""
    return [problem(stream, index, KINDS) for index in range(count)]


def prompt_ids(engine: Engine, of: Problem) -> list[int]:
    """A problem in the chat template."""
    return engine.chat_prompt([{"role": "user", "content": of.question}])


def summary(asked: list[Problem], labels: list[Mined]) -> dict[str, Any]:
    """By kind: problems, those with an outcome, those solved, swaps, important ones."""
    rows: dict[str, Counter[str]] = {}
    for mined in labels:
        of = asked[mined.index]
        row = rows.setdefault(of.kind, Counter())
        row["problems"] += 1
        row["with an outcome"] += mined.outcome is not None
        row["solved"] += mined.outcome == outcome(of.answer)
        row["swaps"] += len(mined.swaps)
        row["important"] += sum(swap.important for swap in mined.swaps)
    return {kind: dict(row) for kind, row in sorted(rows.items())}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled/target")
    parser.add_argument("--draft", default="bundled/draft")
    parser.add_argument("--out", type=Path, required=True, help="labels.jsonl and the judge are written here")
    parser.add_argument("--problems", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=10.0, help="mining ends then; run again to go on")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mine-only", action="store_true")
    args = parser.parse_args()
    prepare("recipes.mine_judge", threads=args.threads)
    engine = Engine.load(args.target, speculative="none")
    draft = load_model(args.draft)
    asked = problems(args.problems)
    begun = perf_counter()

    def report(done: int, total: int, mined: Mined) -> bool:
        seconds = perf_counter() - begun
        if done % 100 == 0:
            print(f"{done} of {total} problems, {seconds:.0f} s", flush=True)
        return seconds > 60 * args.minutes

    labels = mine(
        engine, draft, [prompt_ids(engine, of) for of in asked], lambda index, text: outcome(text),
        args.out / "labels.jsonl", max_new_tokens=MAX_NEW_TOKENS, batch_size=args.batch_size, progress=report,
    )  # fmt: skip
    found = summary(asked, labels)
    (args.out / "labels.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if args.mine_only:
        return
    from foretell.train.judge import train_judge

    print(json.dumps(train_judge(engine.model, args.out / "labels.jsonl", args.out), indent=1))


if __name__ == "__main__":
    main()
