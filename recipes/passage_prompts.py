"""Tasks about passages for the drafters of a chat model: summaries, answers from documents, translations, second turns.

    python -m recipes.passage_prompts --target DIR --out prompts.jsonl --written 900 --found 600

A head that has seen short questions alone guesses badly behind a page of text. Half of the passages are written by the
model itself (``recipes.own_answers``' quick writer), so nothing of a suite can be in them; the others are prose that comes
with Python: the chapters of its language reference in ``pydoc_data``, and the descriptions of installed packages whose
licence is MIT, BSD, Apache or Python's own. The answers are made later, by ``recipes.own_answers``. What was written is
kept beside the output: the same command goes on where it was killed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer

from foretell.train.found import passages
from foretell.train.own_prompts import TASKS
from recipes.chat_prompts import ABOUT, GERMAN, PASSAGES, SUBJECTS
from recipes.own_answers import Writer, answer
from recipes.process import prepare

ROWS = 128  # of a batch of the writer
LONG = 6  # passages for one task about four of them
AGAIN = (
    "Summarize that in one sentence.",
    "Rewrite your answer for a child of ten years.",
    "Give the three most important points as a list.",
    "Which names, places and numbers are in your answer? List them.",
    "Write the same as a short letter to a friend.",
    "Now argue the opposite in a few sentences.",
    "Continue the text.",
)
"""A second turn about the first answer."""


def written(folder: Path, out: Path, count: int, most: int, seed: int) -> list[tuple[str, str]]:
    """(order, passage) pairs, the passages written by the model at temperature 0.7."""
    kept = [tuple(json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    orders = [PASSAGES[i % len(PASSAGES)].format(SUBJECTS[i // len(PASSAGES) % len(SUBJECTS)]) for i in range(count)]
    if len(kept) < count:
        writer, tokenizer = Writer(folder), AutoTokenizer.from_pretrained(folder)
        for begin in range(len(kept), count, ROWS):
            part = orders[begin : begin + ROWS]
            prompts = [_ids(tokenizer, [{"role": "user", "content": order}]) for order in part]
            generator = torch.Generator().manual_seed(1000 * seed + begin)
            texts, _, _ = answer(writer, prompts, torch.ones(len(part)), most, generator, sharpness=1 / 0.7)
            new = [
                (order, tokenizer.decode(ids[at:], skip_special_tokens=True).strip())
                for order, (ids, at) in zip(part, texts, strict=True)
            ]
            with out.open("a") as file:
                file.writelines(json.dumps(pair) + "\n" for pair in new)
            kept += new
            print(f"{len(kept)} of {count} passages", flush=True)
    return [(order, text) for order, text in kept[:count] if len(text.split()) > 25]


def _ids(tokenizer: object, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])  # type: ignore[attr-defined]


def tasks(r: random.Random, pairs: list[tuple[str, str]], found: list[str]) -> list[list[dict[str, str]]]:
    """Conversations: a task about every passage, and second turns about some that the model wrote."""
    german = [text for order, text in pairs if "German" in order]
    english = [text for order, text in pairs if "German" not in order]
    made = [r.choice(GERMAN).format(" ".join(text.split())) for text in german]
    for texts in (english, found):
        for text in texts:
            task = r.choice((*ABOUT, *TASKS))
            made.append(task.format(*([text, r.choice(texts)][: task.count("{}")])))
        number = len(texts) // LONG if len(texts) > 3 else 0
        made += [r.choice(ABOUT[:3]).format("\n\n".join(r.sample(texts, 4))) for _ in range(number)]
    told = [[{"role": "user", "content": text}] for text in made]
    for order, text in pairs:
        if r.random() < 0.5:
            turns = [order, text, r.choice(AGAIN)]
            told.append([{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)])
    r.shuffle(told)
    return told


def main() -> None:
    """Command line: one JSON object {"messages": [...]} a line, in random order."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--written", type=int, default=900, help="passages that the model writes")
    parser.add_argument("--found", type=int, default=600, help="passages of documentation on this machine")
    parser.add_argument("--most", type=int, default=256, help="tokens of a written passage")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare("recipes.passage_prompts", threads=args.threads, niceness=0)
    r = random.Random(f"passages/{args.seed}")
    pairs = written(args.target, args.out.with_suffix(".passages"), args.written, args.most, args.seed)
    told = tasks(r, pairs, passages(r, args.found))
    args.out.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in told))
    print(f"{len(told)} prompts")


if __name__ == "__main__":
    main()
