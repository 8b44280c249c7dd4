"""What speculation could do, on a real pair of models or from numbers alone:

    python -m benchmarks.theory optimum [--target T --draft D] [--temperatures 0,0.6,1] [--drafts 1,2,4,8] [--plot FILE]
    python -m benchmarks.theory shape [--target T --draft D] [--temperatures 0,0.6,1] [--verify coupled] [--draws auto]
    python -m benchmarks.theory length [--acceptance 0.8] [--cost 0.05]

optimum: acceptance of every rule for several drafts of one token, beside the most that any rule could accept of drafts
drawn so (Hu et al. 2502.18779), at contexts of the target's own text. shape: the fastest tree on this machine, as --shape
takes it (Sequoia, 2402.12374). length: tokens a step and speedup of chains (Leviathan et al. 2211.17192).
"""

import argparse
import json
from pathlib import Path

from benchmarks.papers.row import load, pair_options, questions
from benchmarks.theory.figures import csv_of, draw_plot, optimum_rows
from benchmarks.theory.length import best_length, expected_tokens, operations_factor, walltime_factor
from benchmarks.theory.pairs import Pairs, PairText, collect
from benchmarks.theory.table import optimum_table
from benchmarks.theory.trees import choose_tree, pass_seconds

from foretell import Engine
from foretell.bench import encode_item
from foretell.draft.config import parse_draws
from foretell.verify import parse_verifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("optimum", "shape"):
        command = commands.add_parser(name)
        pair_options(command)
        command.add_argument("--temperatures", default="0,0.3,0.6,0.8,1,1.2" if name == "optimum" else "0,0.6,1")
        command.add_argument("--contexts", type=int, default=8 if name == "optimum" else 32, help="of each text")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--json", help="write the figures to this file")
        if name == "optimum":
            command.add_argument("--drafts", default="1,2,3,4,6,8")
            command.add_argument("--csv")
            command.add_argument("--plot")
        else:
            command.add_argument("--verify", default="coupled")
            command.add_argument("--draws", default="auto")
            command.add_argument("--max-size", type=int, default=63)
    command = commands.add_parser("length")
    command.add_argument("--acceptance", default="0.8", help="one rate, or one for each position")
    command.add_argument("--cost", type=float, default=0.05, help="of one guess, in plain passes of the target")
    command.add_argument("--max-length", type=int, default=16)
    args = parser.parse_args()
    {"optimum": optimum, "shape": shape, "length": length}[args.command](args)


def optimum(args: argparse.Namespace) -> None:
    engine, at = load(args), [float(t) for t in args.temperatures.split(",")]
    pairs = {t: texts_of(engine, args, t) for t in at}
    table = optimum_table(
        pairs, temperatures=at, num_drafts=[int(count) for count in args.drafts.split(",")], seed=args.seed
    )
    for title, columns, rows in optimum_rows(table):
        print(f"\n{title}\n\n| {' | '.join(columns)} |\n|---{'|--:' * (len(columns) - 1)}|")
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print(f"\n{table.num_contexts} contexts of {table.num_texts} texts; in brackets: the share of the optimum")
    if args.csv:
        Path(args.csv).write_text(csv_of(table))
    if args.plot:
        draw_plot(table, args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(table.to_dict(), indent=1) + "\n")


def shape(args: argparse.Namespace) -> None:
    engine, verifier = load(args), parse_verifier(args.verify)
    draft = engine.method.model  # type: ignore[attr-defined]
    seconds = {"seconds_target": pass_seconds(engine.model), "seconds_draft": pass_seconds(draft, (1, 4))}
    choices = [
        choose_tree(
            texts_of(engine, args, t), t, verifier, draws=parse_draws(args.draws), max_size=args.max_size, **seconds
        )
        for t in map(float, args.temperatures.split(","))
    ]
    for choice in choices:
        rates = " ".join(f"{rate:.3f}" for rate in choice.acceptance)
        print(
            f"T {choice.temperature:g}: acceptance by child {rates}, a draft pass {choice.cost_draft:.3f}, "
            f"{choice.expected_tokens:.2f} tokens a step, speedup {choice.expected_speedup:.2f}, "
            + (f"--shape {choice.spec}" if choice.spec else "plain decoding is fastest")
        )
    if args.json:
        Path(args.json).write_text(json.dumps([choice.to_dict() for choice in choices], indent=1) + "\n")


def length(args: argparse.Namespace) -> None:
    rates = [float(rate) for rate in args.acceptance.split(",")]
    given = rates[0] if len(rates) == 1 else rates
    longest = args.max_length if len(rates) == 1 else min(args.max_length, len(rates))
    print("| guesses | tokens a step | speedup | operations |\n|--:|--:|--:|--:|")
    for count in range(longest + 1):
        figures = (
            expected_tokens(given, count),
            walltime_factor(given, count, args.cost),
            operations_factor(given, count, args.cost),
        )
        print(f"| {count} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    print(f"best: {best_length(given, args.cost, max_length=longest)} guesses")


def texts_of(engine: Engine, args: argparse.Namespace, temperature: float) -> Pairs:
    """Logits of both models at contexts of the target's own text at this temperature."""
    texts = []
    for index, item in enumerate(questions(args)):
        ids = encode_item(engine, item)
        done = engine.generate(ids, temperature=temperature, seed=args.seed + index, max_new_tokens=args.tokens)
        texts.append(PairText([*ids, *done.token_ids], len(ids)))
    return collect(engine.model, engine.method.model, texts, per_text=args.contexts)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
