"""A suite of sixty messages with documents in front, for ``benchmarks.real``: does guessing still pay behind long texts?

    python -m benchmarks.contexts --target FILE.gguf --tokens 0,2048,7168 --out build/contexts
    python -m benchmarks.real --suite build/contexts/2048.jsonl --sample 0 --prefix-memory-gib 4 ...

As in retrieval, passages come first and then a question about one of them: ten questions of five kinds behind each of six
sets of passages, so that with kept prefixes a set is read once. Passages are prose of Python's language reference and of
installed packages under free licences (``foretell.train.found.passages``). At 0 the question's own passage stands there
alone.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from foretell.model.load import load_tokenizer
from foretell.train.found import passages as found_passages

SETS = 6
QUESTIONS = {
    "quote": ("Copy passage {n} word for word.", "Copy the first sentence of passage {n}, then say what it means."),
    "summary": ("Summarize passage {n} in three sentences.", "Give the main points of passage {n} as a list."),
    "answer": ("Which names does passage {n} mention, and what are they for?", "Explain why passage {n} says that."),
    "rewrite": ("Rewrite passage {n} in simple words.", "Turn passage {n} into a short dialogue of two people."),
    "code": ("Write a Python function that fits passage {n}.", "Write a test in Python for what passage {n} claims."),
}  # fmt: skip


def suite(tokenizer: Any, tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of a suite. tokens: of the passages in front, at least; a function of the seed and of what is installed."""
    r = random.Random(f"contexts/{seed}")
    passages = found_passages(r, 10_000)
    lines: list[dict[str, Any]] = []
    for _ in range(SETS):
        chosen, size = list[str](), 0
        for text in r.sample(passages, len(passages)):  # sets may share passages, not their beginnings
            chosen.append(text)
            size += len(tokenizer.encode(text))
            if size >= tokens:
                break
        else:
            raise SystemExit(f"the passages on this machine have {size} tokens: --tokens {tokens} is more")
        front = "\n\n".join(f"Passage {number}: {text}" for number, text in enumerate(chosen, 1))
        for kind, questions in QUESTIONS.items():
            for question in questions:
                asked = question.format(n=r.randrange(1, len(chosen) + 1))
                lines.append({"question_id": len(lines) + 1, "category": kind, "turns": [f"{front}\n\n{asked}"]})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="whose tokenizer counts")
    parser.add_argument("--tokens", default="0,2048,7168")
    parser.add_argument("--out", type=Path, required=True, help="folder for TOKENS.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    args.out.mkdir(parents=True, exist_ok=True)
    for tokens in map(int, args.tokens.split(",")):
        lines = suite(tokenizer, tokens, args.seed)
        (args.out / f"{tokens}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{tokens}: {len(lines)} messages")


if __name__ == "__main__":
    main()
