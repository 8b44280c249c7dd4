"""Train the bundled target model on the token stream of `recipes.mix`.

The stream is read once, front to back, in blocks of 1,024 tokens (which `recipes.mix` has shuffled). Early on a block
is cut into four sequences of 256 tokens, then two of 512, at the end it is one of 1,024: attention costs less while
the model learns words, and long contexts come when there is something to learn from them. The learning rate rises,
stays, and falls linearly to zero; where on that curve a step is depends on the share of the budget used, in minutes
or in tokens, so the run ends well whenever it must end. A file MINUTES in the run's folder changes the budget of a
running job.

Resume: run the same command again. The checkpoint holds weights, optimizer state, position and time.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from recipes.gradients import add_gradients
from recipes.losses import cross_entropy
from recipes.models import SIZES, build, save
from recipes.muon import optimizers
from recipes.process import Stopwatch, budget_minutes, prepare, wait_while_paused

BLOCK = 1024  # tokens
# (from this share of the budget, sequence length)
LENGTHS = ((0.0, 256), (0.45, 512), (0.85, 1024))
WARM_UP, DECAY_FROM = 0.02, 0.28  # shares of the budget


@dataclass
class Progress:
    """Where a run is; everything but the weights and optimizer states that a resume needs."""

    step: int = 0
    block: int = 0  # next block of the stream
    tokens: int = 0
    elapsed_s: float = 0.0


def rate(share: float) -> float:
    """Learning rate as a share of its peak, at a share of the budget."""
    if share < WARM_UP:
        return 0.05 + 0.95 * share / WARM_UP
    return 1.0 if share < DECAY_FROM else max(0.0, (1 - share) / (1 - DECAY_FROM))


def sequence_length(share: float) -> int:
    """Tokens per sequence at a share of the budget."""
    return [length for start, length in LENGTHS if share >= start][-1]


def batch_loss(model: Qwen3ForCausalLM, tokens: Tensor, weight: float) -> Tensor:
    """Mean next-token loss in nats over tokens [B, T], inside bf16 autocast, times `weight`."""
    # No cache of casts: it is shared between threads, and no weight is used twice in a pass.
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, cache_enabled=False):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state  # [B, T, H]
    return cross_entropy(hidden[:, :-1].flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten()) * weight


class Run:
    """One training run in its folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.stream = np.load(args.data / "train.npy", mmap_mode="r")
        self.blocks = len(self.stream) // BLOCK
        self.model = build(args.size, seed=args.seed).to(args.device)
        self.optimizers = optimizers(
            self.model, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=args.weight_decay
        )
        self.progress = Progress()
        if self.checkpoint.exists():
            self.load()
        self.watch = Stopwatch(self.progress.elapsed_s)

    @property
    def checkpoint(self) -> Path:
        """File that a resume reads."""
        return self.out / "checkpoint.pt"

    def load(self) -> None:
        """Continue from the last checkpoint."""
        state = torch.load(self.checkpoint, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # Rates and the like are those of this command, not of the one that wrote the checkpoint.
            optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(state["rng"].cpu())
        self.progress = Progress(**state["progress"])

    def store(self) -> None:
        """Write the checkpoint in one rename."""
        new = self.checkpoint.with_suffix(".new")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "rng": torch.get_rng_state(),
                "progress": asdict(self.progress),
            },
            new,
        )
        new.rename(self.checkpoint)

    def share(self) -> float:
        """Share of the budget that is used, 0 to 1 and beyond."""
        if self.args.tokens:
            return self.progress.tokens / self.args.tokens
        minutes = budget_minutes(self.out, self.args.minutes)
        return self.progress.elapsed_s / (60 * minutes)

    def next_tokens(self, length: int) -> Tensor:
        """The next batch of the stream: [batch tokens / length, length] int64; wraps around at the end."""
        count = self.args.batch // BLOCK
        index = [(self.progress.block + i) % self.blocks for i in range(count)]
        self.progress.block += count
        rows = np.stack([self.stream[i * BLOCK : (i + 1) * BLOCK] for i in index]).astype(np.int64)
        return torch.from_numpy(rows).view(-1, length).to(self.args.device)

    def step(self, share: float) -> float:
        """One optimizer step; its mean loss in nats."""
        tokens = self.next_tokens(sequence_length(share))
        parts = tokens.split(max(1, self.args.micro // tokens.size(1)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(share)
        jobs = [partial(batch_loss, self.model, part, part.size(0) / tokens.size(0)) for part in parts]
        losses = add_gradients(self.model, jobs, 1 if tokens.is_cuda else self.args.threads)
        torch.nn.utils.clip_grad_norm_(self.optimizers[1].param_groups[0]["params"], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += tokens.numel()
        return sum(losses)

    def train(self) -> None:
        """Until the budget is used; then export."""
        last_store, window = self.progress.elapsed_s, []
        log = (self.out / "loss.jsonl").open("a")
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
        while (share := self.share()) < 1.0:
            if stop:  # a request to end early: keep the state, to be resumed
                self.store()
                return
            wait_while_paused(self.out)
            start = time.monotonic()
            window.append(self.step(share))
            self.watch.add(time.monotonic() - start)
            self.progress.elapsed_s = self.watch.elapsed_s
            if self.progress.step % 20 == 0:
                line = {**asdict(self.progress), "loss": float(np.mean(window)), "share": round(share, 4)}
                line["tokens_per_s"] = round(self.args.batch / max(1e-9, time.monotonic() - start))
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(json.dumps(line), flush=True)
                window = []
            if self.progress.elapsed_s - last_store > 60 * self.args.checkpoint_minutes:
                self.store()
                last_store = self.progress.elapsed_s
        self.store()
        save(self.model, self.args.tokenizer, self.out / "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.npy")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; resumes what it finds there")
    parser.add_argument("--size", choices=sorted(SIZES), default="7m")
    parser.add_argument("--minutes", type=float, default=75.0, help="budget of training time, pauses not counted")
    parser.add_argument("--tokens", type=int, default=0, help="budget in tokens; if given, minutes do not count")
    parser.add_argument("--batch", type=int, default=8192, help="tokens per step, a multiple of 1,024")
    parser.add_argument("--micro", type=int, default=2048, help="tokens per pass")
    parser.add_argument("--muon-lr", type=float, default=0.014)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare("recipes.train_target", threads=args.threads)
    Run(args).train()


if __name__ == "__main__":
    main()
