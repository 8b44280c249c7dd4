"""SpecDec++: does a trained head that stops the draft beat the best fixed length, on its three sets of questions?

    python -m benchmarks.papers stopping --suite alpaca.jsonl --suite gsm8k.jsonl --suite humaneval.jsonl --limit 20
    python -m benchmarks.papers stopping --target T --draft D --rules path,probability --draft-cost 0.35 ...

Theirs (2405.19715, abstract and table 1): Llama-2-chat 7B drafts for 70B; over the best fixed length +7.2 % on Alpaca,
+9.4 % on GSM8K, +11.1 % on HumanEval. Ours: no clock. A guess costs --draft-cost plain passes (their pair: about 0.1),
a pass of the target one whatever its width; every policy at its best threshold or length of the sweep. Suites are names of
``foretell bench --suite`` (eagle/alpaca, eagle/gsm8k, eagle/humaneval) or files.
"""

import argparse

from benchmarks import stopping as bench
from benchmarks.papers.row import Line, Row, load, pair_options

from foretell import SamplingParams
from foretell.bench import encode_item, read_suite, select

THEIRS = {"alpaca": 7.2, "gsm8k": 9.4, "humaneval": 11.1}


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.set_defaults(suite=None, limit=20)
    parser.add_argument("--draft-cost", type=float, default=0.1)
    parser.add_argument("--rules", default="specdec,probability")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--longest", type=int, default=8)
    parser.add_argument("--most", type=int, default=10)


def run(args: argparse.Namespace) -> Row:
    """One sweep a suite."""
    engine = load(args)
    made = argparse.Namespace(
        method="draft_model", draft=args.draft or "bundled/draft", acceptance=None, longest=args.longest,
        most=args.most, rules=args.rules,
    )  # fmt: skip
    lines, details = [], {}
    for suite in args.suite or ["eagle/alpaca", "eagle/gsm8k", "eagle/humaneval"]:
        name = next((one for one in THEIRS if one in suite), suite)
        lanes = bench.lanes_of(engine, made)
        room = engine.model.spec.max_positions - args.tokens
        encoded = [encode_item(engine, item) for item in select(read_suite(suite).items, limit=args.limit)]
        encoded = [ids for ids in encoded if len(ids) < room]
        bench.record(lanes, encoded, SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens), 1)
        found = bench.modelled(
            lanes, bench.Model.given(args.draft_cost, args.most), list(range(len(encoded))), args.most
        )
        print(f"\n{name}: {len(encoded)} questions; texts of all policies equal: "
              f"{all(lane.texts == lanes[0].texts for lane in lanes)}")  # fmt: skip
        bench.show_modelled(found)
        details[name] = found
        for one in found:
            if one["gain"] is not None:
                low, high = (100 * value for value in one.get("interval") or (one["gain"], one["gain"]))
                theirs = THEIRS.get(name) if one["policy"].startswith("specdec") else None
                lines.append(
                    Line(
                        f"{name}: {one['policy']} over the best fixed length",
                        theirs,
                        100 * one["gain"],
                        low,
                        high,
                        " %",
                    )
                )
    return Row(
        "stopping", "SpecDec++, Huang et al. 2024, 2405.19715", "abstract", lines, "lost",
        "the draft is so small that what it reads foretells little, and a guess that is judged has been paid for", details,
    )  # fmt: skip
