"""Prompts for training drafters of the bundled target without fetching anything: beginnings of passages of Python's own
standard library, and generated problems. The target answers them itself (`foretell train` asks it)."""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path

from foretell.train.found import clean
from recipes.problems import problem

CHARACTERS = (80, 320)  # of a passage's beginning
PROBLEMS = 0.34  # share of the prompts


def main() -> None:
    """Command line: one JSON object a line, {"prompt": text} or {"messages": [...]}."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.write_text("".join(json.dumps(line) + "\n" for line in prompts(args.count, args.seed)))


def prompts(count: int, seed: int) -> list[dict[str, object]]:
    """So many prompts; a function of the seed and of the interpreter's library."""
    r = random.Random(f"library_prompts/{seed}")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if not {"test", "tests", "site-packages", "idlelib"} & set(path.parts)
    )
    lines: list[dict[str, object]] = []
    while len(lines) < count:
        if r.random() < PROBLEMS:
            question = problem("train", r.randrange(40_000)).question
            lines.append({"messages": [{"role": "user", "content": question}]})
            continue
        text = clean(r.choice(files).read_bytes()) or ""
        starts = [index + 1 for index in range(len(text) - CHARACTERS[1]) if text[index] == "\n"]
        if starts:
            start = r.choice(starts)
            lines.append({"format": "text", "prompt": text[start : start + r.randint(*CHARACTERS)]})
    return lines


if __name__ == "__main__":
    main()
