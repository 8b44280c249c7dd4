"""Kangaroo: the target's own lower layers and a small adapter guess.

    python -m benchmarks.papers kangaroo [--limit 4]
    python -m benchmarks.papers kangaroo --target build/inflated --heads build/heads      # speedups: a quiet machine

Theirs (2404.18911, abstract; Spec-Bench, Vicuna-7B, one sequence): up to 1.68x, exit after 2 of 32 layers. Ours: the
bundled adapter, exit after 2 of 6 layers, so a guess cannot cost less than a third of a pass. *layers counted*: a
step runs the lower share once for every guess and the rest once, which needs no clock.
"""

import argparse
from pathlib import Path

from benchmarks.drafters import method_of
from benchmarks.papers.row import Line, Row, dtype_of, pair_options, questions

from foretell import Engine
from foretell.bench import run_bench

HERE, THERE = 2 / 6, 2 / 32


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--guesses", type=int, default=2)


def run(args: argparse.Namespace) -> Row:
    """Tokens a step, and what they would be worth at either depth of exit."""
    engine = Engine.load(args.target, dtype=dtype_of(args.target))
    method = method_of("kangaroo", args.guesses, args.heads, None)
    report = run_bench(engine, questions(args), [method], max_new_tokens=args.tokens)
    found = report.temperatures[0].methods[-1].overall
    length, guesses = found.mean_acceptance_length, args.guesses

    def modelled(share: float) -> float:
        return length / (share * (guesses + 1) + (1 - share))

    value = found.speedup
    lines = [
        Line("tokens a step", None, length),
        Line("speedup, layers counted, exit after 2 of 6", 1.68, modelled(HERE), unit="x"),
        Line("the same acceptance with their exit, 2 of 32", 1.68, modelled(THERE), unit="x"),
        Line("speedup of this run", 1.68, value.value, value.low, value.high, "x"),
    ]
    return Row(
        "kangaroo", "Kangaroo, Liu et al. 2024, 2404.18911", "abstract", lines, "lost",
        "two of six layers are a third of the cost of the target, and they guess its token one time in three; two of 32 "
        "layers are a sixteenth",
    )  # fmt: skip
