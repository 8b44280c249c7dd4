"""Text that the target itself writes, to distil a draft on: what a draft must predict is the target's text, not
people's.

Prompts are beginnings of training blocks and questions of training conversations. Rows of one batch have prompts of one
length, so nothing is padded; each row has its own temperature, 0 included.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from recipes.mix import BLOCK, read_documents
from recipes.problems import problem
from recipes.process import prepare
from recipes.questions import chats, copies

ROW = 256  # tokens of a row, prompt included
TEXT_PROMPT = 48  # tokens
TEMPERATURES = (0.0, 0.0, 0.5, 1.0, 1.0)  # drawn per row with equal chance


@torch.inference_mode()
def continue_rows(model: PreTrainedModel, prompts: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of ROW tokens that begin with prompts [B, P]; temperatures [B], 0 meaning the most likely token."""
    rows = [prompts]
    cache = DynamicCache(config=model.config)
    current = prompts
    for _ in range(ROW - prompts.size(1)):
        logits = model(current, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        # Exponential race: argmax of p / e with e exponential is a draw from p; e = 1 for greedy rows.
        probs = torch.softmax(logits / temperatures.clamp_min(1e-4)[:, None], -1)
        race = torch.empty_like(probs).exponential_(generator=generator)
        race[temperatures == 0] = 1.0
        current = (probs / race).argmax(-1, keepdim=True)
        rows.append(current)
    return torch.cat(rows, 1)


def question_prompts(
    r: random.Random, tokenizer: PreTrainedTokenizerBase, data: Path, count: int
) -> dict[int, list[list[int]]]:
    """Token ids of about `count` training questions, up to the answer's beginning, by length."""
    documents = read_documents(data / "train.jsonl")
    questions = [problem("train", r.randrange(40_000)).question for _ in range(count // 3)]
    while len(questions) < count:
        d = r.choice(documents)
        questions += [p.question for p in (chats(r, d, most=1) if r.random() < 0.5 else copies(r, d))]
    texts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in questions]
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for ids in tokenizer(texts, verbose=False)["input_ids"]:
        if len(ids) <= ROW * 2 // 3:
            by_length[len(ids)].append(ids)
    return by_length


def prompt_batches(
    r: random.Random, stream: NDArray[np.uint16], by_length: dict[int, list[list[int]]], batch: int
) -> list[Tensor]:
    """One text batch and one question batch, [batch, P] each; a question may be asked twice to fill its batch."""
    starts = [r.randrange(len(stream) // BLOCK) * BLOCK + r.randrange(BLOCK - TEXT_PROMPT) for _ in range(batch)]
    text = torch.from_numpy(np.stack([stream[s : s + TEXT_PROMPT] for s in starts]).astype(np.int64))
    lengths = sorted(by_length)
    length = r.choices(lengths, [len(by_length[n]) for n in lengths])[0]
    pool = by_length[length]
    chosen = r.sample(pool, batch) if len(pool) >= batch else r.choices(pool, k=batch)
    return [text, torch.tensor(chosen)]


def main() -> None:
    """Command line: rows of the target's own text, [N, 256] uint16."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=0, help="stop at this many rows; if given, minutes do not count")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare("recipes.sampling", threads=args.threads)
    r, generator = random.Random(f"sampling/{args.seed}"), torch.Generator().manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    stream = np.load(args.data / "train.npy", mmap_mode="r")
    by_length = question_prompts(r, tokenizer, args.data, 6000)
    start, rows = time.monotonic(), []
    count = 0
    while count < args.rows if args.rows else time.monotonic() - start < 60 * args.minutes:
        for prompts in prompt_batches(r, stream, by_length, args.batch):
            temperatures = torch.tensor([r.choice(TEMPERATURES) for _ in range(args.batch)])
            rows.append(continue_rows(model, prompts, temperatures, generator).numpy().astype(np.uint16))
            count += args.batch
    np.save(args.out, np.concatenate(rows))
    print(json.dumps({"rows": count, "seconds": round(time.monotonic() - start, 1), "tokens": count * ROW}))


if __name__ == "__main__":
    main()
