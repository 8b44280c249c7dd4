"""Answers of ``recipes.own_answers`` as a file of responses for ``foretell train``.

    python -m recipes.own_responses --target DIR --laws FOLDER... --out responses.safetensors [--prompts-from 40]

``--prompts-from N``: tokens of prompts from the N-th on are trained on, too. The loss compares the head with the target's
own distribution at every place, so a place needs no text that the target wrote; for a text of 500 tokens with an answer of
100 they are five times the places at the price of their products with the head's vocabulary. ``--unanswered FILE``: prompts
without an answer, too. So may answers of a larger model with the same tokenizer be (``--of FILE`` in place of ``--laws``):
writing takes a small machine longer than reading.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from foretell import Engine
from foretell.model.identity import target_hash
from foretell.train.responses import Responses, pack
from recipes.bundle_head import OWN_TEXT

SEED = 5


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--laws", type=Path, nargs="+", default=[], help="folders of recipes.own_answers")
    source.add_argument("--of", type=Path, help="responses of a model with the same tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts-from", type=int, help="train on prompts, too, from this token on")
    parser.add_argument("--unanswered", type=Path, help="prompts that are trained on alone, with --prompts-from")
    parser.add_argument("--limit", type=int, help="of them, or of the texts of --of, which are shuffled")
    parser.add_argument("--longest", type=int, default=1 << 30, help="longer texts are left out")
    parser.add_argument("--shortest", type=int, default=8, help="answers of fewer tokens are left out")
    args = parser.parse_args()
    texts = [
        (ids, start)
        for folder in args.laws
        for file in sorted(folder.glob("*.pt"))
        for ids, start in torch.load(file, weights_only=True, mmap=True)["texts"]
    ]
    engine = Engine.load(args.target, speculative="none")
    model, wrote = engine.model, OWN_TEXT
    if args.of is not None:
        others = Responses.load(args.of)
        if int(others.tokens.max()) >= model.spec.vocab_size:
            raise SystemExit(f"{args.of} has token {int(others.tokens.max())}: it is of another tokenizer")
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(SEED)).tolist()
        texts = [(others.text(i), int(others.start[i])) for i in order]
        wrote = str(others.metadata.get("target"))
    texts = [(ids, start) for ids, start in texts if len(ids) - start >= args.shortest and len(ids) <= args.longest]
    texts = texts if args.of is None else texts[: args.limit]
    if not texts:
        raise SystemExit(f"no answers of {args.shortest} tokens in {', '.join(map(str, args.laws or [args.of]))}")
    answered = {tuple(ids[:start]) for ids, start in texts}
    num_answers = len(texts)
    if args.prompts_from is not None:
        texts = [(ids, min(start, args.prompts_from)) for ids, start in texts]
        lines = [] if args.unanswered is None else args.unanswered.read_text().splitlines()
        for line in lines[: args.limit]:
            ids = engine.chat_prompt(json.loads(line)["messages"])
            if tuple(ids) not in answered and len(ids) > 2 * args.prompts_from:
                texts.append((ids, args.prompts_from))
    known = {"target": model.spec.name, "target_hash": target_hash(model), "source": "recipes.own_responses",
             "num_answers": num_answers, "prompts_from": args.prompts_from, "written_by": wrote}  # fmt: skip
    made: Responses = pack(texts, known)
    made.save(args.out)
    print(f"{len(made)} texts, {made.num_tokens} tokens to learn from, the longest of {int(made.length.max())}")


if __name__ == "__main__":
    main()
