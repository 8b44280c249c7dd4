"""Prompts for training drafters: the target answers them itself (`foretell train` regenerates the answers).

Beginnings of training blocks and questions of training conversations, as in `recipes.sampling`; nothing of the suite:
its material comes from held-out packages and from another stream of problems.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from recipes.mix import BLOCK, read_documents
from recipes.problems import problem
from recipes.questions import chats, copies

TEXT_PROMPT = (24, 96)  # tokens of a beginning that is to be continued
LONGEST_QUESTION = 1200  # characters


def main() -> None:
    """Command line: one JSON object a line, {"prompt": text} or {"messages": [...]}."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    r = random.Random(f"prompts/{args.seed}")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    stream = np.load(args.data / "train.npy", mmap_mode="r")
    documents = read_documents(args.data / "train.jsonl")
    lines: list[dict[str, object]] = []
    while len(lines) < args.count:
        kind = r.random()
        if kind < 0.5:
            length = r.randint(*TEXT_PROMPT)
            start = r.randrange(len(stream) // BLOCK) * BLOCK + r.randrange(BLOCK - length)
            lines.append({"format": "text", "prompt": tokenizer.decode(stream[start : start + length].tolist())})
            continue
        if kind < 0.67:
            questions = [problem("train", r.randrange(40_000)).question]
        else:
            document = r.choice(documents)
            made = chats(r, document, most=1) if kind < 0.84 else copies(r, document)
            questions = [p.question for p in made][:1]
        lines += [{"messages": [{"role": "user", "content": q}]} for q in questions if len(q) <= LONGEST_QUESTION]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines[: args.count]))


if __name__ == "__main__":
    main()
