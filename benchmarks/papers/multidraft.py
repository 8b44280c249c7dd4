"""Optimal multi-draft verification: the share of the optimum that each rule for independent drafts reaches.

    python -m benchmarks.papers multidraft [--temperature 1] [--drafts 2,4,8] [--limit 2]
    python -m benchmarks.papers multidraft --target T --draft D --suite FILE               # your own pair

Theirs (Khisti et al. 2410.18234, table of acceptance on Dolly, OPT models, K = 2, 4, 8): optimal .6384/.6731/.6962,
importance weighting .6348/.6691/.6919, SpecTr .6246/.6560/.6800, SpecInfer .6202/.6489/.6722. Compared are shares of the
optimum, which do not depend on how good a draft is: exact means over contexts, nothing is sampled. The optimum is the
formula of Hu et al. (2502.18779).
"""

import argparse

from benchmarks.papers.row import Line, Row, load, pair_options, questions
from benchmarks.theory.pairs import PairText, collect
from benchmarks.theory.table import optimum_table

from foretell.bench import encode_item

OPTIMAL = {2: 0.6384, 4: 0.6731, 8: 0.6962}
THEIRS = {
    "transport": OPTIMAL,
    "importance": {2: 0.6348, 4: 0.6691, 8: 0.6919},
    "k_seq": {2: 0.6246, 4: 0.6560, 8: 0.6800},
    "rejection": {2: 0.6202, 4: 0.6489, 8: 0.6722},
}


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--drafts", default="2,4,8")
    parser.add_argument("--contexts", type=int, default=8, help="of each text")


def run(args: argparse.Namespace) -> Row:
    """The optimum and every rule at contexts of the target's own text."""
    engine = load(args)
    texts = []
    for index, item in enumerate(questions(args)):
        ids = encode_item(engine, item)
        done = engine.generate(ids, temperature=args.temperature, seed=index, max_new_tokens=args.tokens)
        texts.append(PairText([*ids, *done.token_ids], len(ids)))
    pairs = collect(engine.model, engine.method.model, texts, per_text=args.contexts)  # type: ignore[attr-defined]
    counts = [int(count) for count in args.drafts.split(",")]
    table = optimum_table({args.temperature: pairs}, temperatures=[args.temperature], num_drafts=counts)
    lines, won = [], []
    for cell in table.cells:
        n, share = cell.num_drafts, cell.share_of_optimum
        if cell.draws == "iid" and cell.rule in THEIRS and n in OPTIMAL and share is not None:
            theirs = 100 * THEIRS[cell.rule][n] / OPTIMAL[n]
            lines.append(Line(f"`{cell.rule}`, {n} drafts: share of the optimum", theirs, 100 * share, unit=" %"))
            if cell.rule == "transport":
                won.append(share)
    return Row(
        "multidraft", "Khisti et al. 2024, 2410.18234; Hu et al. 2025, 2502.18779", "table of acceptance on Dolly", lines,
        "won" if won and min(won) > 1 - 1e-4 else "NOT OPTIMAL",
        f"`transport` reaches {100 * min(won, default=0):.2f} % of the optimum; {pairs.num_contexts} contexts of "
        f"{len(texts)} texts",
        table.to_dict(),
    )  # fmt: skip
