"""Mix documents and generated conversations into one token stream, and read such streams.

A stream is a ``.npy`` file of uint16 token ids: documents in a shuffled order, each ended by ``<|endoftext|>``, cut
into blocks of 1,024 tokens that are shuffled again. Training
reads it from front to back once, so what was seen after n tokens is exactly the first n entries: that is also what the
n-gram baseline is counted on. ``mix.json`` says how many tokens of each kind there are.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.corpus import Document
from recipes.problems import Problem, problem

BLOCK = 1024  # tokens; training reads whole blocks
END_OF_TEXT = 0  # id of <|endoftext|>, see tokenizer.SPECIAL
# Share of the bytes of the whole mixture, by kind of generated conversation; the rest is documents.
SHARES = {"problems": 0.07, "questions": 0.05, "copies": 0.05}
CODE_SHARE_OF_DOCUMENTS = 0.68  # code is far more plentiful than prose; a cap keeps a share for prose


def read_documents(path: Path) -> list[Document]:
    """All documents of a split."""
    with path.open() as lines:
        return [Document(**json.loads(line)) for line in lines]


def chat_text(p: Problem) -> str:
    """A problem as a ChatML conversation, exactly as the tokenizer's chat template writes it."""
    return f"<|im_start|>user\n{p.question}<|im_end|>\n<|im_start|>assistant\n{p.answer}<|im_end|>\n"


def mixture(documents: Sequence[Document], *, seed: str) -> list[tuple[str, str]]:
    """(kind, text) of every training text, in the order of training."""
    from recipes.questions import chats, copies  # questions needs Document, the tokenizer needs mix: no cycle at import

    r = random.Random(f"mixture/{seed}")
    pool = list(documents)
    r.shuffle(pool)
    prose_bytes = sum(len(d.text) for d in pool if d.category == "prose")
    code_left = int(prose_bytes * CODE_SHARE_OF_DOCUMENTS / (1 - CODE_SHARE_OF_DOCUMENTS))
    texts: list[tuple[str, str]] = []
    for d in pool:
        if d.category == "code":
            if code_left <= 0:
                continue
            code_left -= len(d.text)
        texts.append((d.category, d.text))
    total = sum(len(text) for _, text in texts) / (1 - sum(SHARES.values()))
    left = {kind: int(total * share) for kind, share in SHARES.items()}
    for _round in range(50):  # several rounds over the documents: each asks something else
        for d in pool:
            for kind, make in (("questions", chats), ("copies", copies)):
                for p in make(r, d) if left[kind] > 0 else ():
                    texts.append((kind, chat_text(p)))
                    left[kind] -= len(texts[-1][1])
        if left["questions"] <= 0 and left["copies"] <= 0:
            break
    index = 0
    while left["problems"] > 0:
        texts.append(("problems", chat_text(problem("train", index))))
        left["problems"] -= len(texts[-1][1])
        index += 1
    r.shuffle(texts)
    return texts


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> np.ndarray:
    """Token ids of all texts in a row, each ended by <|endoftext|>: [T] uint16."""
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 512):
        ids = tokenizer(list(texts[start : start + 512]), verbose=False)["input_ids"]
        parts.extend(np.asarray([*row, END_OF_TEXT], dtype=np.uint16) for row in ids)
    return np.concatenate(parts)


def in_shuffled_blocks(stream: np.ndarray, *, seed: int) -> np.ndarray:
    """The stream cut into blocks of BLOCK tokens in a random order, so that no step reads one long file: [T] uint16."""
    whole = len(stream) // BLOCK * BLOCK
    blocks = stream[:whole].reshape(-1, BLOCK)
    return blocks[np.random.default_rng(seed).permutation(len(blocks))].reshape(-1)


def main() -> None:
    """Command line: documents and tokenizer in, token streams out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seed", default="train")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    texts = mixture(read_documents(args.data / "train.jsonl"), seed=args.seed)
    tokens: Counter[str] = Counter()
    bytes_: Counter[str] = Counter()
    streams = []
    for start in range(0, len(texts), 2048):
        part = texts[start : start + 2048]
        streams.append(encode(tokenizer, [text for _, text in part]))
        for kind, text in part:
            bytes_[kind] += len(text.encode())
        for kind in {k for k, _ in part}:
            tokens[kind] += len(
                encode(tokenizer, [t for k, t in part[::8] if k == kind] or [""])
            )  # an eighth: a report
    stream = in_shuffled_blocks(np.concatenate(streams), seed=0)
    np.save(args.data / "train.npy", stream)
    report = {"tokens": len(stream), "bytes": dict(bytes_), "texts": len(texts)}
    report["token_share"] = {k: round(v / sum(tokens.values()), 4) for k, v in tokens.items()}
    (args.data / "mix.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
