"""What snapshots and reading again cost recurrent models: passes over rejected guesses beside passes that never go back.

    python benchmarks/hybrid.py [--family qwen3_5] [--guesses 4] [--acceptance 0.7] [--rows 1 4] [--rounds 40] [--size 1.0]

Models of about 0.3B random weights (--size scales the width). Each round times, interleaved, one pass of the root and its
guesses: with transformers' own cache, which keeps no snapshot and goes on from where it is, and twice with ours: once where
all guesses were accepted (snapshot alone), once where they are accepted with the given probability each, so that lags are
read again in front of passes and, when long, in calls of their own. The last column is the bar: at most 10 %. --cpu-time
counts the process's own time, for one thread on a machine that has other work. A line takes at most about --seconds: fewer
rounds are made then.
"""

import argparse
import random
import statistics
import warnings
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from foretell.core.tree import chain_tree, layout
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import Target

PROMPT = 64
clock: Callable[[], float] = perf_counter
VOCAB = 32_000


def config_of(family: str, size: float) -> Any:
    """About 0.3B weights at size 1."""
    width = max(128, int(1024 * size) // 128 * 128)
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 20,
        "num_attention_heads": width // 64, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "qwen3_5":
        heads = width // 128
        return transformers.Qwen3_5TextConfig(
            **common, head_dim=64, linear_num_key_heads=heads, linear_num_value_heads=2 * heads,
            linear_key_head_dim=128, linear_value_head_dim=128,
        )  # fmt: skip
    if family == "lfm2":
        kinds = ["conv", "conv", "full_attention", "conv"] * 5
        return transformers.Lfm2Config(**common, layer_types=kinds, block_auto_adjust_ff_dim=False)
    if family == "mamba2":
        names = ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
        some = {name: common[name] for name in names}
        return transformers.Mamba2Config(
            **some, num_hidden_layers=40, num_heads=width // 32, head_dim=64, n_groups=1, state_size=128
        )
    raise SystemExit(f"--family {family}: qwen3_5, lfm2 or mamba2")


class Ours:
    """Rows behind our cache."""

    def __init__(self, model: TransformersModel, rows: int, guesses: int, capacity: int) -> None:
        self.target, self.capacity, self.rows = Target(model, rows, capacity), capacity, rows
        self.random = random.Random(1)
        self.width = guesses + 1
        self.length = [PROMPT] * rows
        self.target.forward(torch.full((rows, PROMPT), 7), self.plan(PROMPT, [0] * rows), head=False)

    def plan(self, width: int, start: list[int]) -> Any:
        """A line of width nodes a row."""
        tokens = torch.zeros(self.rows, width, dtype=torch.int64)
        span = min(self.capacity, -(-(max(start) + width) // 64) * 64)
        return layout(chain_tree(tokens).parent, torch.tensor(start), self.capacity, span=span)

    def step(self, acceptance: float) -> float:
        """Seconds of one pass."""
        tokens = torch.randint(5, VOCAB, (self.rows, self.width))
        begun = clock()
        self.target.forward(tokens, self.plan(self.width, self.length))
        seconds = clock() - begun
        for row in range(self.rows):
            kept = 0
            while kept < self.width - 1 and self.random.random() < acceptance:
                kept += 1
            self.length[row] += kept + 1
        return seconds


class Theirs:
    """The same passes with transformers' own cache."""

    def __init__(self, module: Any, rows: int, guesses: int) -> None:
        self.module, self.rows, self.width = module, rows, guesses + 1
        self.cache = DynamicCache(config=module.config)
        self.name = "cache_params" if "Mamba2" in type(module).__name__ else "past_key_values"
        self.run(torch.full((rows, PROMPT), 7))

    def run(self, tokens: torch.Tensor) -> None:
        """One pass."""
        self.module(input_ids=tokens, use_cache=True, **{self.name: self.cache})

    def step(self) -> float:
        """Seconds of one pass."""
        tokens = torch.randint(5, VOCAB, (self.rows, self.width))
        begun = clock()
        self.run(tokens)
        return clock() - begun


def main() -> None:
    """Command line: one table row a family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["qwen3_5", "mamba2", "lfm2"])
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--size", type=float, default=1.0)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    if options.cpu_time:
        global clock
        clock = process_time
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    print("| family | weights | rows | rounds | their pass | snapshot alone | with rejections | snapshot | both |")
    print("|---|---|--:|--:|---|---|---|---|---|")
    for family in options.family:
        module = AutoModelForCausalLM.from_config(config_of(family, options.size), dtype=torch.float32).eval()
        count = sum(p.numel() for p in module.parameters())
        for rows in options.rows:
            seconds = rounds(module, family, rows, options)
            # Medians of what is alike; the mean of what is not: calls of their own are rare and long.
            plain, snapshot, _ = (statistics.median(column) for column in zip(*seconds, strict=True))
            ratios = [one[2] / plain for one in seconds]
            both = statistics.fmean(sorted(ratios)[1:-1] or ratios)
            head = f"| {family} | {count / 1e9:.2f}B | {rows} | {len(seconds)}"
            print(
                f"{head} | {plain * 1e3:.1f} ms | {snapshot * 1e3:.1f} ms | {both * plain * 1e3:.1f} ms "
                f"| {snapshot / plain - 1:+.1%} | {both - 1:+.1%} |",
                flush=True,
            )


@torch.no_grad()
def rounds(module: Any, family: str, rows: int, options: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Seconds of the three passes, round by round; the first two rounds are not counted."""
    model = TransformersModel(module, name=family)
    capacity = PROMPT + (options.rounds + 4) * (options.guesses + 1)
    theirs = Theirs(module, rows, options.guesses)
    accepted = Ours(model, rows, options.guesses, capacity)
    rejected = Ours(model, rows, options.guesses, capacity)
    found, begun = [], perf_counter()
    for number in range(options.rounds + 2):
        if number > 4 and perf_counter() - begun > options.seconds:
            break
        found.append((theirs.step(), accepted.step(1.0), rejected.step(options.acceptance)))
    return found[2:]


if __name__ == "__main__":
    main()
