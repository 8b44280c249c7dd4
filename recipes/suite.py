"""Build the prompt suite: 24 prompts in each of five categories, none of them in the training text.

The format is that of Spec-Bench's questions (question_id, category, turns) with three more fields: ``format`` ("text"
to continue, "chat" to put into the chat template), ``prediction`` (copy: the text that the answer should repeat) and
``reference`` (the author's own continuation, or the worked answer).

Code, prose and copy prompts come from packages that are held out as a whole. What is checked, and written to
``suite_check.json``: no window of 50 bytes of the held-out *material* of a prompt occurs anywhere in the training
text, and no chat or reasoning question occurs there as a whole. Instructions ("Repeat this code exactly.") do occur:
the model is meant to have learned them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from recipes.corpus import Document
from recipes.mix import mixture, read_documents
from recipes.overlap import WINDOW, windows_found
from recipes.problems import problem
from recipes.questions import chats, copies

PER_CATEGORY = 24
TOKENS = (40, 300)  # of a prompt; the chat template, eight or nine tokens, is counted as nine
CANDIDATES = 6 * PER_CATEGORY
INDEX_ADDRESS = re.compile(r"\bpy[p]i(\.python)?\.org\b")
PER_SOURCE_AND_KIND = 12  # prompts of one category that may come from one package or one kind of question


@dataclass(frozen=True)
class Candidate:
    """A prompt that may enter the suite."""

    record: dict[str, Any]
    material: str  # what must not occur in the training text, window by window; may be empty
    group: str  # package or kind, for variety


def continuations(r: random.Random, documents: list[Document], category: str) -> Iterator[Candidate]:
    """Beginnings of functions, classes or paragraphs, to be continued."""
    pattern = re.compile(r"\n\n(?=(?:class|def|@|import|from) ?)" if category == "code" else r"\n\n(?=[A-Z])")
    for d in r.choices([d for d in documents if d.category == category], k=5000):
        starts = [m.end() for m in pattern.finditer(d.text)]
        if not starts:
            continue
        start = r.choice(starts)
        lines = d.text[start : start + 3000].split("\n")
        keep = r.randint(4, 14)
        if len(lines) < keep + 6:
            continue
        prompt, rest = "\n".join(lines[:keep]) + "\n", "\n".join(lines[keep:])
        record = {"category": category, "format": "text", "turns": [prompt], "reference": rest[:600]}
        yield Candidate(record, prompt, d.source)


def questions(r: random.Random, documents: list[Document]) -> Iterator[Candidate]:
    """Chat questions about held-out code and documentation."""
    for d in r.choices(documents, k=5000):
        for p in chats(r, d, most=1):
            record = {"category": "chat", "format": "chat", "turns": [p.question], "reference": p.answer}
            yield Candidate(record, "", p.kind)


def reasoning() -> Iterator[Candidate]:
    """Problems of the stream "suite"."""
    for index in range(20_000):
        p = problem("suite", index)
        record = {"category": "reasoning", "format": "chat", "turns": [p.question], "reference": p.answer}
        yield Candidate(record, "", p.kind)


def copying(r: random.Random, documents: list[Document]) -> Iterator[Candidate]:
    """Text to repeat, as it is or with a name changed."""
    for d in r.choices(documents, k=5000):
        for p in copies(r, d):
            record = {
                "category": "copy",
                "format": "chat",
                "turns": [p.question],
                "prediction": p.prediction,
                "reference": p.answer,
            }
            yield Candidate(record, p.question.split("\n", 2)[2].removesuffix("\n```"), p.kind)


def collect(
    candidates: Iterator[Candidate], count_tokens: Callable[[dict[str, Any]], int], most: int
) -> list[Candidate]:
    """The first `most` candidates of the right length that differ from each other."""
    kept: list[Candidate] = []
    seen: set[str] = set()
    for c in candidates:
        question = c.record["turns"][0]
        if question[:60] in seen or not TOKENS[0] <= count_tokens(c.record) <= TOKENS[1]:
            continue
        seen.add(question[:60])
        kept.append(c)
        if len(kept) == most:
            break
    return kept


def clean(candidates: list[Candidate], found: list[set[bytes]], training: list[str]) -> list[Candidate]:
    """Those whose material has no window in the training text (`found`) and whose question is in no training text."""
    whole = {m.group(1) for t in training for m in re.finditer(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", t, re.S)}
    return [
        c for c, windows in zip(candidates, found, strict=True) if not windows and c.record["turns"][0] not in whole
    ]


def choose(candidates: list[Candidate]) -> list[Candidate]:
    """PER_CATEGORY of one category, varied."""
    groups: Counter[str] = Counter()
    kept = []
    for c in candidates:
        if groups[c.group] < PER_SOURCE_AND_KIND and len(kept) < PER_CATEGORY:
            groups[c.group] += 1
            kept.append(c)
    if len(kept) < PER_CATEGORY:
        raise RuntimeError(
            f"only {len(kept)} prompts of {candidates[0].record['category']!r} are left: raise CANDIDATES"
        )
    return kept


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the suite (JSON lines)")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def count_tokens(record: dict[str, Any]) -> int:
        extra = 9 if record["format"] == "chat" else 0  # what the chat template adds
        return len(tokenizer(record["turns"][0])["input_ids"]) + extra

    r = random.Random("suite")
    heldout = read_documents(args.data / "heldout_packages.jsonl")
    training = [text for _, text in mixture(read_documents(args.data / "train.jsonl"), seed="train")]
    makers = {
        "code": continuations(r, heldout, "code"),
        "prose": continuations(r, heldout, "prose"),
        "chat": questions(r, heldout),
        "reasoning": reasoning(),
        "copy": copying(r, heldout),
    }
    collected = {name: collect(candidates, count_tokens, CANDIDATES) for name, candidates in makers.items()}
    everyone = [c for candidates in collected.values() for c in candidates]
    # One pass over the training text for all: what is held-out material, then whole prompts with their instructions.
    found = windows_found([c.material for c in everyone] + [c.record["turns"][0] for c in everyone], training)
    material = dict(zip(map(id, everyone), found[: len(everyone)], strict=True))
    prompts = dict(zip(map(id, everyone), found[len(everyone) :], strict=True))
    check: dict[str, Any] = {"window_bytes": WINDOW, "training_texts": len(training)}
    check["training_bytes"] = sum(len(t.encode()) for t in training)
    suite: list[Candidate] = []
    for name, candidates in collected.items():
        passed = clean(candidates, [material[id(c)] for c in candidates], training)
        chosen = choose(passed)
        suite += chosen
        check[name] = {
            "candidates": len(candidates),
            "without_overlap": len(passed),
            "chosen": len(chosen),
            "chosen_whose_material_shares_a_window": sum(bool(material[id(c)]) for c in chosen),
            "chosen_whose_prompt_shares_a_window": sum(bool(prompts[id(c)]) for c in chosen),
        }
    with args.out.open("w") as out:
        for number, c in enumerate(suite):
            # Prompts must not contain real addresses: those of package indexes become reserved ones.
            line = json.dumps({"question_id": number, **c.record})
            out.write(INDEX_ADDRESS.sub("example.org", line) + "\n")
    (args.data / "suite_check.json").write_text(json.dumps(check, indent=1) + "\n")
    print(json.dumps(check, indent=1))


if __name__ == "__main__":
    main()
