"""Answers of ``recipes.own_answers`` as a file of responses for ``foretell train``.

    python -m recipes.own_responses --target DIR --laws FOLDER... --out responses.safetensors [--prompts-from 40]

``--prompts-from N``: tokens of prompts from the N-th on are trained on, too. The loss compares the head with the target's
own distribution at every place, so a place needs no text that the target wrote; for a text of 500 tokens with an answer of
100 they are five times the places at the price of their products with the head's vocabulary. ``--unanswered FILE``: prompts
without an answer, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from foretell import Engine
from foretell.model.identity import target_hash
from foretell.train.responses import Responses, pack


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--laws", type=Path, nargs="+", required=True, help="folders of recipes.own_answers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts-from", type=int, help="train on prompts, too, from this token on")
    parser.add_argument("--unanswered", type=Path, help="prompts that are trained on alone, with --prompts-from")
    parser.add_argument("--limit", type=int, help="of them")
    parser.add_argument("--shortest", type=int, default=8, help="answers of fewer tokens are left out")
    args = parser.parse_args()
    texts = [
        (ids, start)
        for folder in args.laws
        for file in sorted(folder.glob("*.pt"))
        for ids, start in torch.load(file, weights_only=True, mmap=True)["texts"]
        if len(ids) - start >= args.shortest
    ]
    if not texts:
        raise SystemExit(f"no answers of {args.shortest} tokens in {', '.join(map(str, args.laws))}")
    engine = Engine.load(args.target, speculative="none")
    model, answered = engine.model, {tuple(ids[:start]) for ids, start in texts}
    num_answers = len(texts)
    if args.prompts_from is not None:
        texts = [(ids, min(start, args.prompts_from)) for ids, start in texts]
        lines = [] if args.unanswered is None else args.unanswered.read_text().splitlines()
        for line in lines[: args.limit]:
            ids = engine.chat_prompt(json.loads(line)["messages"])
            if tuple(ids) not in answered and len(ids) > 2 * args.prompts_from:
                texts.append((ids, args.prompts_from))
    known = {"target": model.spec.name, "target_hash": target_hash(model), "source": "recipes.own_responses",
             "num_answers": num_answers, "prompts_from": args.prompts_from}  # fmt: skip
    made: Responses = pack(texts, known)
    made.save(args.out)
    print(f"{len(made)} texts, {made.num_tokens} tokens to learn from, the longest of {int(made.length.max())}")


if __name__ == "__main__":
    main()
