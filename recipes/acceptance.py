"""How often the target takes what the draft proposes, measured on the suite without running the library.

The target continues each prompt, greedily and at temperature 1; both models then read the same text once. Temperature
0: the share of positions where both prefer the same token, and the mean acceptance length of chains of γ guesses
along the text (walked exactly: a wrong guess ends the chain, the target's own token follows). Temperature 1: the mean
of 1 - TV, which is the acceptance rate of one guess under rejection sampling, and the length with γ guesses if the
rates were walked independently (an estimate, stated as such).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.process import prepare

NEW_TOKENS = 128
GAMMAS = (3, 5, 7)
ENDS = (0, 2)  # <|endoftext|>, <|im_end|>


def prompt_ids(tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> list[int]:
    """Token ids of a suite prompt, as the engine would see it."""
    text = record["turns"][0]
    if record["format"] == "chat":
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer(text)["input_ids"]


@torch.inference_mode()
def continued(model: PreTrainedModel, prompts: list[list[int]], *, sample: bool) -> list[list[int]]:
    """The target's continuations, up to and with the end token; prompts are padded on the left."""
    longest = max(map(len, prompts))
    pad = model.config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = (
        {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    )
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **how)[:, longest:].tolist()
    kept = []
    for row in out:
        end = next((i + 1 for i, t in enumerate(row) if t in ENDS), len(row))
        kept.append(row[:end])
    return kept


@torch.inference_mode()
def probs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """Logits before each token of the answer: [len(answer), V] float32."""
    ids = torch.tensor([prompt + answer[:-1]])
    return model(ids, logits_to_keep=len(answer)).logits[0].float()


def greedy_length(agree: list[bool], gamma: int) -> tuple[int, int]:
    """(tokens, steps) of speculative decoding along a text whose guesses are right where `agree` is True."""
    at, steps = 0, 0
    while at < len(agree):
        taken = 0
        while taken < gamma and at + taken < len(agree) and agree[at + taken]:
            taken += 1
        at += taken + 1
        steps += 1
    return min(at, len(agree)), steps


def sampled_length(rates: Tensor, gamma: int, r: np.random.Generator) -> tuple[int, int]:
    """(tokens, steps) with each guess taken independently at its own rate."""
    return greedy_length((r.random(len(rates)) < rates.numpy()).tolist(), gamma)


def measure(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, suite: list[dict[str, Any]]
) -> dict[str, Any]:
    """Figures by category and over all."""
    r = np.random.default_rng(0)
    torch.manual_seed(0)
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    for record in suite:
        by_category[record["category"]].append(prompt_ids(tokenizer, record))
    result: dict[str, Any] = {}
    pooled: dict[str, list[Any]] = defaultdict(list)
    for category, prompts in by_category.items():
        found: dict[str, list[Any]] = defaultdict(list)
        for sample in (False, True):
            for prompt, answer in zip(prompts, continued(target, prompts, sample=sample), strict=True):
                p, q = probs(target, prompt, answer), probs(draft, prompt, answer)
                if sample:
                    found["sampled"].append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
                else:
                    found["greedy"].append((p.argmax(-1) == q.argmax(-1)).tolist())
        result[category] = figures(found, r)
        for key, value in found.items():
            pooled[key] += value
    result["all"] = figures(pooled, r)
    return result


def figures(found: dict[str, list[Any]], r: np.random.Generator) -> dict[str, float]:
    """The figures of one category."""
    agree, rates = found["greedy"], torch.cat(found["sampled"])
    row: dict[str, float] = {"tokens_t0": sum(map(len, agree)), "tokens_t1": len(rates)}
    row["agreement_t0"] = round(sum(map(sum, agree)) / sum(map(len, agree)), 4)
    row["one_minus_tv_t1"] = round(rates.mean().item(), 4)
    for gamma in GAMMAS:
        pairs = [greedy_length(a, gamma) for a in agree]
        row[f"length_t0_gamma{gamma}"] = round(sum(t for t, _ in pairs) / sum(s for _, s in pairs), 3)
        pairs = [sampled_length(x, gamma, r) for x in found["sampled"]]
        row[f"length_t1_gamma{gamma}"] = round(sum(t for t, _ in pairs) / sum(s for _, s in pairs), 3)
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result here too (JSON)")
    args = parser.parse_args()
    prepare("recipes.acceptance", threads=args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (args.target, args.draft)]
    suite = [json.loads(line) for line in args.suite.read_text().splitlines()]
    result = measure(models[0], models[1], tokenizer, suite)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
