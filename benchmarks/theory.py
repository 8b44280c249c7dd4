"""Milliseconds a row of the optimal acceptance rates: ``python benchmarks/theory.py``. One thread, pure mathematics.

Rows are float32 softmaxes of random logits at several temperatures (the draft: the same logits with noise), and one pair
cut to the target's top-p nucleus. Reported: the median of several rows, timed one at a time, and the slowest.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from foretell.theory import acceptance, optimum


def pairs(vocab_size: int, temperature: float, count: int) -> list[tuple[Tensor, Tensor]]:
    """count pairs p, q [1, V]."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(count):
        logits = 3.0 * torch.randn(1, vocab_size, generator=generator)
        other = logits + torch.randn(1, vocab_size, generator=generator)
        p, q = torch.softmax(logits / temperature, -1), torch.softmax(other / temperature, -1)
        out.append((p, q))
    return out


def nucleus(distributions: tuple[Tensor, Tensor], top_p: float = 0.95) -> tuple[Tensor, Tensor]:
    """Both distributions cut to the least set of tokens with mass top_p."""
    cut = []
    for probs in distributions:
        mass, order = probs.sort(-1, descending=True)
        kept = torch.where(mass.cumsum(-1) - mass < top_p, mass, 0.0)
        cut.append(torch.zeros_like(probs).scatter_(1, order, kept / kept.sum()))
    return cut[0], cut[1]


def milliseconds(rule: Callable[[Tensor, Tensor], object], rows: list[tuple[Tensor, Tensor]]) -> str:
    """Median and largest of one call a row, the first (a warm-up) left out."""
    taken = []
    for p, q in [rows[0], *rows]:
        start = time.perf_counter()
        rule(p, q)
        taken.append(1e3 * (time.perf_counter() - start))
    return f"{statistics.median(taken[1:]):8.1f} ({max(taken[1:]):6.1f})"


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--num-drafts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=7)
    parser.add_argument("--coupling-vocab-size", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n = options.num_drafts
    print(f"V = {options.vocab_size}, n = {n}, one thread; ms a row: median (slowest) of {options.rows}")
    print(f"{'temperature':>12} {'with repl.':>17} {'without, 1e-6':>17} {'without, 1e-9':>17}  width at 1e-6")
    for temperature in (0.3, 0.6, 1.0, 2.0, 5.0, 0.0):
        rows = pairs(options.vocab_size, temperature or 1.0, options.rows)
        if not temperature:
            rows = [nucleus(row) for row in rows]
        bounds = [optimum.without_replacement(p, q, n) for p, q in rows]
        width = max(float(bound.upper - bound.lower) for bound in bounds)
        cells = [
            milliseconds(lambda p, q: optimum.with_replacement(p, q, n), rows),
            milliseconds(lambda p, q: optimum.without_replacement(p, q, n), rows),
            milliseconds(lambda p, q: optimum.without_replacement(p, q, n, tolerance=1e-9), rows),
        ]
        print(f"{temperature or '1, top-p .95':>12} {cells[0]:>17} {cells[1]:>17} {cells[2]:>17}  {width:.1e}")
    small = options.coupling_vocab_size
    print(f"\nV = {small}: gumbel_top_k to 1e-4 and recursive rejection without replacement, 256 samples")
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.3, 1.0, 2.0):
        rows = pairs(small, temperature, options.rows)
        shared = milliseconds(lambda p, q: acceptance.gumbel_top_k(p, q, n), rows)
        sampled = milliseconds(
            lambda p, q: acceptance.recursive_rejection_without_replacement(p, q, n, generator=generator), rows
        )
        print(f"{temperature:>12} {shared:>17} {sampled:>17}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
