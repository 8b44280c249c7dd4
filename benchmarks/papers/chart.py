"""The chart of the 7/13/70B papers on what is here: plain, three guesses, five guesses, Medusa, EAGLE.

    python -m benchmarks.papers chart                                                     # counts: any machine will do
    python -m benchmarks.papers chart --target build/inflated --heads build/heads         # speedups: a quiet machine

Theirs: Spec-Bench's leaderboard, Vicuna-13B on one A100, greedy, batch 1 (speedup, and mean tokens a step). Ours: the
bundled heads, temperature 0, verifier coupled, texts equal to plain decoding's. *tokens a step* needs no clock; *speedup*
is of this run, and means something only where nothing else runs, at the cost of a large model (--target build/inflated; see
docs/drafters.md for how it and the heads are made).
"""

import argparse
from pathlib import Path

from benchmarks.drafters import method_of
from benchmarks.papers.row import Line, Row, dtype_of, pair_options, questions

from foretell import Engine
from foretell.bench import run_bench

THEIRS = {  # method here: (name there, speedup, tokens a step)
    "draft_model:3": ("separate draft model (SpS)", 1.54, 2.19),
    "draft_model:5": ("separate draft model (SpS)", 1.54, 2.19),
    "medusa": ("Medusa", 1.80, 2.39),
    "eagle1": ("EAGLE", 2.16, 3.64),
    "eagle2": ("EAGLE-2", 2.46, 4.43),
    "eagle3": ("EAGLE-3", 3.02, 5.71),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.add_argument("--heads", type=Path, help="heads of this target, HEADS/METHOD")
    parser.add_argument("--methods", default=",".join(THEIRS))


def run(args: argparse.Namespace) -> Row:
    """All methods on the same prompts, in turn."""
    engine = Engine.load(args.target, dtype=dtype_of(args.target))
    names = args.methods.split(",")
    methods = [method_of(name, 5, args.heads, args.draft or "bundled/draft") for name in names]
    report = run_bench(engine, questions(args), methods, max_new_tokens=args.tokens)
    found = {one.label: one for one in report.temperatures[0].methods}
    lines, same = [], True
    for name in names:
        one = found[name].overall
        same &= one.num_identical == one.num_prompts
        called, speedup, length = THEIRS[name]
        lines.append(Line(f"`{name}` ({called}): tokens a step", length, one.mean_acceptance_length))
        value = one.speedup
        lines.append(Line(f"`{name}` ({called}): speedup", speedup, value.value, value.low, value.high, "x"))
    return Row(
        "chart", "Leviathan 2211.17192, Medusa 2401.10774, EAGLE 2401.15077 and its successors",
        "Spec-Bench leaderboard, Vicuna-13B, A100", lines, "lost in length for every trained head",
        "heads of 0.9 to 4.5 million parameters, trained on less than a million tokens, on a target of six layers; "
        + "all texts "
        + ("are plain decoding's" if same else "ARE NOT plain decoding's"),
        {"num_prompts": len(report.prompts) // max(1, len(found))},
    )  # fmt: skip
