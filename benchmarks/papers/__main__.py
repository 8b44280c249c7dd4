"""Seed papers' figures beside ours, a command a row (docs/papers.md).

python -m benchmarks.papers                     # the rows
python -m benchmarks.papers ROW [--json FILE] [the row's own options; --help lists them]
"""

import argparse
import importlib
import sys

import torch

ROWS = {
    "chart": "plain, three and five guesses, Medusa, EAGLE: the chart of speedups",
    "stopping": "SpecDec++: when to stop drafting, on Alpaca, GSM8K and HumanEval questions",
    "offload": "DySpec against Sequoia where the target's weights are streamed: simulated cost",
    "kangaroo": "Kangaroo: the target's own lower layers as draft",
    "multidraft": "optimal multi-draft verification: how near each rule comes to optimal transport",
    "judge": "judge decoding and other lossy rules: longer steps, and accuracy on word problems",
    "online": "Online Speculative Decoding: acceptance after a change of domain",
    "abstention": "The Impossible Test: who says that nobody knows, exact against lossy rules",
    "agreement": "agreement of judges by intraclass correlation",
}


def main() -> int:
    """Run one row, print it, write its JSON."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        for name, about in ROWS.items():
            print(f"  {name:<11} {about}")
        return 0
    name = sys.argv[1]
    if name not in ROWS:
        print(f"row {name!r} is not one of {', '.join(ROWS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.papers.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.papers {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    module.options(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write what was found to this file")
    args = parser.parse_args(sys.argv[2:])
    torch.set_num_threads(args.threads)
    row = module.run(args)
    row.show()
    if args.json:
        row.written(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
