"""Distil the draft from the target: match its distribution at every token, on its own text and on training text.

The draft shares the target's tokenizer and nothing else: no layer, no weight. The loss is the forward KL at
temperature 1 over the whole vocabulary: 1 - TV, which bounds acceptance, follows it closely, and it needs no draws.
Half of each batch is text that the target wrote (`recipes.sampling`), half is training text; without samples all of
it is training text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from recipes.gradients import add_gradients
from recipes.losses import distillation
from recipes.models import SIZES, build, save
from recipes.muon import optimizers
from recipes.process import Stopwatch, budget_minutes, prepare, wait_while_paused
from recipes.train_target import rate

LENGTH = 256  # tokens of a row; training text also comes in rows of twice that


def batches(
    stream: NDArray[np.uint16], samples: NDArray[np.uint16] | None, *, tokens: int, seed: int
) -> Iterator[list[Tensor]]:
    """Endless batches of about `tokens` tokens: [[B, T], ...]; samples are shuffled anew in each round."""
    r = np.random.default_rng(seed)
    long = stream[: len(stream) // (2 * LENGTH) * 2 * LENGTH].reshape(-1, 2 * LENGTH)
    order, at = np.empty(0, np.int64), 0
    while True:
        parts = []
        share = tokens // 2 if samples is not None else tokens
        rows = long[np.sort(r.integers(len(long), size=share // (2 * LENGTH)))]
        # Every other batch of text comes as short rows: cheaper, and the beginnings of a context count twice.
        parts.append(rows.reshape(-1, LENGTH) if r.random() < 0.5 else rows)
        if samples is not None:
            if at + share // LENGTH > len(order):
                order, at = r.permutation(len(samples)), 0
            parts.append(samples[order[at : at + share // LENGTH]])
            at += share // LENGTH
        yield [torch.from_numpy(p.astype(np.int64)) for p in parts]


def kl(draft: Qwen3ForCausalLM, target: PreTrainedModel, tokens: Tensor, weight: float) -> Tensor:
    """Mean KL(target || draft) in nats over all positions of tokens [B, T], times `weight`."""
    with torch.no_grad():
        teacher = target.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, cache_enabled=False):
        hidden = draft.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
    return distillation(hidden, draft.lm_head.weight, teacher, target.lm_head.weight) * weight


@torch.no_grad()
def start_from(draft: Qwen3ForCausalLM, target: PreTrainedModel) -> None:
    """Begin with the main directions of the target's embedding: [V, 256] to [V, 128] by singular values.

    A beginning only: every weight is trained afterwards, and nothing is shared.
    """
    read = target.lm_head.weight.float() * target.model.norm.weight.float()  # what the target's logits are read with
    u, s, _ = torch.linalg.svd(read, full_matrices=False)
    s = s.clamp_max(s[1].item())  # the first is one direction that all rows share, five times as long as the next
    small = u[:, : draft.config.hidden_size] * s[: draft.config.hidden_size]
    # Small, so that the first distributions are nearly flat: at the target's own scale they are sure of the wrong tokens.
    small *= 0.03 / small.pow(2).mean().sqrt()
    draft.model.embed_tokens.weight.copy_(small)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the draft is written to its model/")
    parser.add_argument(
        "--samples", type=Path, nargs="*", default=[], help="rows of the target's own text, from recipes.sampling"
    )
    parser.add_argument("--init", type=Path, help="an earlier draft to start from")
    parser.add_argument("--size", choices=sorted(SIZES), default="draft")
    parser.add_argument("--minutes", type=float, default=16.0)
    parser.add_argument("--tokens", type=int, default=0, help="budget in tokens; if given, minutes do not count")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=2048, help="tokens per pass")
    parser.add_argument("--muon-lr", type=float, default=0.014)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare("recipes.distill_draft", threads=args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).to(args.device).eval()
    draft = build(args.size, seed=args.seed)
    if args.init:
        draft.load_state_dict(AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32).state_dict())
    else:
        start_from(draft, target)
    draft.to(args.device)
    both = optimizers(draft, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=0.05)
    samples = np.concatenate([np.load(path) for path in args.samples]) if args.samples else None
    stream = np.load(args.data / "train.npy", mmap_mode="r")
    watch, seen, step, window = Stopwatch(), 0, 0, []
    log = (args.out / "loss.jsonl").open("a")
    for parts in batches(stream, samples, tokens=args.batch, seed=args.seed):
        share = seen / args.tokens if args.tokens else watch.elapsed_s / (60 * budget_minutes(args.out, args.minutes))
        if share >= 1:
            break
        wait_while_paused(args.out)
        start = time.monotonic()
        for group in (g for o in both for g in o.param_groups):
            group["lr"] = group["peak"] * rate(share)
        pieces = [(i, x.to(args.device)) for i, p in enumerate(parts) for x in p.split(max(1, args.micro // p.size(1)))]
        jobs = [partial(kl, draft, target, x, x.numel() / args.batch) for _, x in pieces]
        found = add_gradients(draft, jobs, 1 if args.device.startswith("cuda") else args.threads)
        # Mean KL of each part: training text first, then the target's own.
        losses = [
            sum(f for f, (j, _) in zip(found, pieces, strict=True) if j == i) * len(parts) for i in range(len(parts))
        ]
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        watch.add(time.monotonic() - start)
        seen, step = seen + sum(p.numel() for p in parts), step + 1
        window.append(losses)
        if step % 20 == 0:
            line = {
                "step": step,
                "tokens": seen,
                "elapsed_s": round(watch.elapsed_s, 1),
                "kl": np.mean(window, 0).round(4).tolist(),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(json.dumps(line), flush=True)
            window = []
    save(draft, args.target, args.out / "model")


if __name__ == "__main__":
    main()
