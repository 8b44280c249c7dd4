"""Compare two drafters: the difference of their mean acceptance lengths, paired by prompt.

    python benchmarks/drafters.py --methods eagle1,eagle3 --prompts-per-category 24 --rounds 1 \\
      --max-new-tokens 64 --json r.json
    python benchmarks/difference.py r.json eagle1 eagle3

Reads a report of ``foretell bench --output`` or ``drafters.py --json``. Length: 1 + accepted / steps, summed over prompts.
The interval is 95 %, by a paired bootstrap over prompts, widened for few: one that holds 0 shows no difference.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretell.bench.stats import tails

RESAMPLES = 10_000

Table = NDArray[np.float64]
"""[N, 4] steps and accepted guesses of the first method, then of the second, a row a prompt."""


def lengths(table: Table) -> tuple[Table, Table]:
    """Mean acceptance lengths of both methods; table [..., N, 4] is summed over its prompts."""
    total = table.sum(-2)
    return 1 + total[..., 1] / total[..., 0], 1 + total[..., 3] / total[..., 2]


def difference(table: Table, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float, float]:
    """(second less first, low, high)."""
    first, second = lengths(table)
    drawn = np.random.default_rng(seed).integers(len(table), size=(resamples, len(table)))
    one, other = lengths(table[drawn])
    low, high = np.quantile(other - one, tails(len(table)))
    return float(second - first), float(low), float(high)


def tables(report: dict[str, Any], first: str, second: str) -> Iterator[tuple[float, str, Table]]:
    """(temperature, category, counts) of the prompts that both methods have decoded; "all" first."""
    for temperature in dict.fromkeys(record["temperature"] for record in report["prompts"]):
        found = {
            (record["method"], record["question_id"]): record
            for record in report["prompts"]
            if record["temperature"] == temperature
        }
        both = [key for method, key in found if method == first and (second, key) in found]
        rows = {
            key: [found[name, key][field] for name in (first, second) for field in ("num_steps", "num_accepted_tokens")]
            for key in both
        }
        categories = {key: found[first, key]["category"] for key in both}
        for category in ("all", *dict.fromkeys(categories.values())):
            kept = [rows[key] for key in both if category in ("all", categories[key])]
            if kept:
                yield temperature, category, np.array(kept, dtype=np.float64)


def main() -> int:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("first")
    parser.add_argument("second")
    args = parser.parse_args()
    report = json.loads(args.report.read_text(encoding="utf-8"))
    print(f"| T | prompts | {args.first} | {args.second} | difference, 95 % |\n|--:|---|--:|--:|---|")
    for temperature, category, table in tables(report, args.first, args.second):
        one, other = lengths(table)
        value, low, high = difference(table)
        told = f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"
        print(f"| {temperature:g} | {category} ({len(table)}) | {one:.2f} | {other:.2f} | {told} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
