"""The cost of growing a tree without the drafter's passes: ``python benchmarks/growth.py [--vocab 8192] [--threads
2]``.

A fake drafter returns fixed Zipf-like logits, so that what is timed is the drafter's distributions (a softmax of every
node), the draws with their noise, and the bookkeeping. Medians of interleaved rounds.
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from foretell import DrawMode, SamplingParams
from foretell.core.noise import Noise
from foretell.core.probs import History, Processors
from foretell.core.tree import Plan
from foretell.draft.base import Context
from foretell.draft.growing.grow import grow
from foretell.draft.shapes import Chain, DySpec, Eagle2Shape, OptTree, Sequoia, Shape

LENGTH = 99
CASES: list[tuple[Shape, DrawMode]] = [
    (Chain(depth=15), DrawMode.COUPLED), (Chain(depth=15), DrawMode.IID), (Sequoia(depth=5, size=15), DrawMode.COUPLED),
    (Sequoia(depth=5, size=15), DrawMode.WITHOUT_REPLACEMENT), (DySpec(depth=5, size=15), DrawMode.WITHOUT_REPLACEMENT),
    (Eagle2Shape(depth=5, size=15), DrawMode.COUPLED), (OptTree(depth=5, size=15), DrawMode.COUPLED),
]  # fmt: skip


class Stand:
    """An expander without a model."""

    capacity = 512

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        rank = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(64)])
        self.pool = -2.2 * torch.log(1.0 + rank) + torch.randn(64, vocab_size, generator=generator)

    def begin(self, context: Context, limits: object) -> tuple[Tensor, Tensor]:
        return self.pool[None, :1], context.length

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        return self.pool[None, 1 : tokens.shape[1] + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 151936])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for vocab_size in args.vocab:
        expander = Stand(vocab_size)
        cpu = torch.device("cpu")
        processors = Processors([SamplingParams(seed=1)], vocab_size=vocab_size, end_token_ids=[], device=cpu)
        at = torch.tensor([LENGTH])
        context = Context(History([[1] * (LENGTH + 1)], [10]), processors, at, [LENGTH], at * 0 + 1, [[]], [50])
        times: list[list[float]] = [[] for _ in CASES]
        with torch.inference_mode():
            for turn in range(args.rounds + 2):
                for taken, (shape, draws) in zip(times, CASES, strict=True):
                    noise = Noise(torch.tensor([turn]), at)
                    begun = perf_counter()
                    grow(expander, context, [shape.depth], shape, draws, noise)
                    taken.append(perf_counter() - begun)
        for taken, (shape, draws) in zip(times, CASES, strict=True):
            print(f"V {vocab_size:6d}  {shape.spec:28} {draws.value:20} {1e6 * median(taken[2:]):7.0f} us", flush=True)


if __name__ == "__main__":
    main()
