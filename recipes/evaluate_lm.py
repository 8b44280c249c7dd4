"""Bits per byte on held-out text by category, loss by position, and sample outputs as they are."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.heldout import heldout_texts
from recipes.mix import END_OF_TEXT
from recipes.process import prepare

WINDOW, STRIDE = 1024, 512  # every token but the first 512 of a text is scored with 512 to 1,024 tokens before it


@torch.inference_mode()
def text_bits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Bits of each token of a text [T], given <|endoftext|> and the tokens before it."""
    tokens = torch.tensor([END_OF_TEXT, *ids])
    bits = torch.empty(len(ids))
    done = 0
    while done < len(ids):
        start = max(0, done - (WINDOW - STRIDE))
        window = tokens[start : start + WINDOW + 1]
        logits = model(window[None, :-1]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none") / math.log(2)
        bits[done : start + len(losses)] = losses[done - start :]
        done = start + len(losses)
    return bits


def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """Bits per byte of all texts together."""
    total = sum(text_bits(model, tokenizer(t, verbose=False)["input_ids"]).sum().item() for t in texts)
    return total / sum(len(t.encode()) for t in texts)


@torch.inference_mode()
def loss_by_position(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Mean nats per token in ranges of positions of sequences [N, T]: does the model use a long context?"""
    sums: dict[str, list[float]] = defaultdict(list)
    for row in ids:
        logits = model(row[None, :-1]).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
        for low in (0, 128, 256, 512, 1024, 1536):
            part = losses[low : {0: 128, 128: 256}.get(low, low * 2 if low < 1024 else low + 512)]
            if len(part):
                sums[f"from {low}"].append(part.mean().item())
    return {k: round(sum(v) / len(v), 4) for k, v in sums.items()}


@torch.inference_mode()
def samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], *, new_tokens: int
) -> list[str]:
    """Greedy continuations of prompts, as text."""
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        full = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
        out.append(tokenizer.decode(full[0, ids.size(1) :]))
    return out


def asked(question: str) -> str:
    """A question as the chat template writes it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    'def read_config(path):\n    """',
    "Installation\n============\n\n",
    asked("What is 47 + 38?"),
    asked("Maya has 23 books. Leo gives Maya 4 more, and then Maya loses 6. How many books does Maya have now?"),
    asked(
        "Repeat this code with the name total changed to amount.\n"
        "```python\ndef add(a, b):\n    total = a + b\n    return total\n```"
    ),
    asked("What does the function parse_headers do?"),
]


def main() -> None:
    """Command line: one model, all figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bytes", type=int, default=150_000, help="held-out bytes per category")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result here too (JSON)")
    args = parser.parse_args()
    prepare("recipes.evaluate_lm", threads=args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    texts = heldout_texts(args.data, bytes_per_category=args.bytes)
    result: dict[str, object] = {c: round(bits_per_byte(model, tokenizer, t), 4) for c, t in texts.items()}
    long = [tokenizer(t, verbose=False)["input_ids"] for t in texts["code"] + texts["prose"]]
    rows = [ids[:2048] for ids in long if len(ids) >= 2048][:16]
    if rows:
        result["nats_by_position"] = loss_by_position(model, torch.tensor(rows))
    result["samples"] = [
        {"prompt": p, "output": o}
        for p, o in zip(PROMPTS, samples(model, tokenizer, PROMPTS, new_tokens=80), strict=True)
    ]
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
