"""DySpec against Sequoia where the target's weights are streamed from the host: acceptance measured, cost simulated.

    python -m benchmarks.papers offload [--sizes 16,64] [--temperatures 0,0.6] [--verify coupled,rejection] [--limit 4]

Where a pass of the target takes seconds, its width is free and tokens/s are tokens a step: a step costs one pass, and one
pass of the draft a level of the tree. Theirs (2410.11744, tables of the offloading experiment; Llama-2-7B for 70B on one
A100 with 40 GB, a pass 5.3 to 5.6 s, a draft's 25 ms): 64 nodes, C4, temperature 0: DySpec 9.10 tokens a step, Sequoia
6.08; 768 nodes at 0.6: DySpec 7.14, Sequoia 8.96. Ours: trees of the same sizes on the pair that is here.
"""

import argparse

from benchmarks.papers.row import Line, Row, load, mean, pair_options, questions
from benchmarks.shapes import acceptance_by_child, forms

from foretell.bench import load_suite, run_bench

DRAFT_COST = 0.025 / 5.45
THEIRS = {(64, 0.0): (9.10, 6.08), (768, 0.6): (7.14, 8.96)}


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.set_defaults(limit=4, tokens=48)
    parser.add_argument("--sizes", default="64")
    parser.add_argument("--temperatures", default="0,0.6")
    parser.add_argument("--verify", default="coupled,rejection")


def run(args: argparse.Namespace) -> Row:
    """All shapes on the same prompts."""
    engine = load(args)
    suite = load_suite("bundled")
    names = list(dict.fromkeys(item.category for item in suite))
    others = [item for name in names for item in [i for i in suite if i.category == name][-4:]]
    sizes = [int(size) for size in args.sizes.split(",")]
    lines, details = [], {}
    for temperature in map(float, args.temperatures.split(",")):
        for verify in args.verify.split(","):
            if temperature == 0 and verify != "coupled":
                continue  # one text, one acceptance
            rates = acceptance_by_child(engine, others, temperature, verify, 48)
            chosen = [one for one in forms(rates, verify, ["static", "sequoia", "dyspec"]) if one.size in sizes]
            report = run_bench(
                engine, questions(args), [one.label for one in chosen], temperatures=[temperature],
                max_new_tokens=args.tokens, draft=args.draft or "bundled/draft",
            )  # fmt: skip
            found = {one.label: one for one in report.temperatures[0].methods}
            for size in sizes:
                speed = {}
                for one in chosen:
                    if one.size == size:
                        method = found[one.label]
                        depth = int(one.label.split(":")[1])
                        length = method.overall.mean_acceptance_length
                        speed[one.family] = length / (1 + depth * DRAFT_COST)
                        details[f"{temperature:g} {verify} {one.family} {size}"] = {
                            "length": length, "simulated speedup": speed[one.family],
                            "lengths of prompts": mean([1 + p["num_accepted_tokens"] / max(1, p["num_steps"])
                                                        for p in report.prompts if p["method"] == one.label]),
                        }  # fmt: skip
                        print(f"T {temperature:g} {verify:>9} {one.family:>8} of {size}: {length:.2f} tokens a step, "
                              f"simulated {speed[one.family]:.2f}x", flush=True)  # fmt: skip
                theirs = THEIRS.get((size, temperature))
                ratio = theirs[0] / theirs[1] if theirs else None
                what = f"T {temperature:g}, {verify}, {size} nodes: DySpec over Sequoia"
                lines.append(Line(what, ratio, speed["dyspec"] / speed["sequoia"]))
                lines.append(Line(f"T {temperature:g}, {verify}, {size} nodes: DySpec, simulated speedup",
                                  theirs[0] if theirs else None, speed["dyspec"]))  # fmt: skip
    return Row(
        "offload", "DySpec, Xiong et al. 2024, 2410.11744; Sequoia, Chen et al. 2024, 2402.12374",
        "DySpec, tables of offloading", lines, "the order is theirs at temperature 0, the size is not",
        "lengths are bounded by how near the draft is to the target, and theirs has a thousandfold size", details,
    )  # fmt: skip
