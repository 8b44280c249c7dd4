"""Online Speculative Decoding: how much acceptance a draft wins back after the requests change.

    python -m benchmarks.papers online [--requests 40] [--domains code mathematics]        # two minutes on an idle machine
    python -m benchmarks.papers online --requests 160 --domains code mathematics prose copy

Theirs (2310.07177, abstract): acceptance +0.1 to +0.65 over the static draft. Ours: benchmarks.online, the last quarter
of the second domain, first guesses kept, online less static; every token is equal in both arms.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.papers.row import Line, Row

LEAST, MOST = 0.10, 0.65


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--domains", nargs="+", default=["code", "mathematics"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)


def run(args: argparse.Namespace) -> Row:
    """The benchmark, in a process of its own: it trains."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "online.json"
        command = [
            sys.executable, "-m", "benchmarks.online", "--requests", str(args.requests), "--domains", *args.domains,
            "--seeds", str(args.seeds), "--tokens", str(args.tokens), "--probes", "8", "--json", str(file),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found = json.loads(file.read_text(encoding="utf-8"))
    lines = []
    for domain in args.domains[1:]:
        gains = [one["rates"][domain]["online"][1] - one["rates"][domain]["static"][1] for one in found]
        lines.append(Line(f"{domain}: acceptance, online less static (theirs: least)", LEAST, sum(gains) / len(gains)))
    equal = all(one["equal"] for one in found)
    worst = min(line.ours for line in lines)
    return Row(
        "online", "Online Speculative Decoding, Liu et al. 2023, 2310.07177", "abstract", lines,
        "within their range" if LEAST <= worst <= MOST else "below their range",
        f"texts of both arms equal: {equal}", {"runs": found},
    )  # fmt: skip
