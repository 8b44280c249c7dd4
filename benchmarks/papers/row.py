"""A row of the science page: a paper's figure beside ours."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell import Engine
from foretell.bench import Item, read_suite, select
from foretell.core.provenance import provenance


@dataclass(frozen=True)
class Line:
    """One figure of a paper, and ours."""

    what: str
    theirs: float | None  # None: the paper has none
    ours: float
    low: float | None = None  # 95 % of ours, where there is an interval
    high: float | None = None
    unit: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return self.ours / self.theirs if self.theirs else None


@dataclass(frozen=True)
class Row:
    """What a row's command found."""

    name: str
    paper: str  # authors, year, number
    source: str  # where in the paper
    lines: list[Line]
    verdict: str  # "won", "lost", or what else can be said
    why: str
    details: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        """As text."""
        print(f"\n{self.name}: {self.paper} ({self.source})\n")
        print("| | theirs | ours | 95 % | ours / theirs |\n|---|--:|--:|---|--:|")
        for line in self.lines:
            theirs = "-" if line.theirs is None else f"{line.theirs:.4g}{line.unit}"
            interval = "" if line.low is None else f"[{line.low:.3g}, {line.high:.3g}]"
            ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
            print(f"| {line.what} | {theirs} | {line.ours:.4g}{line.unit} | {interval} | {ratio} |")
        print(f"\n{self.verdict}: {self.why}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with what it ran on."""
        lines = [{**asdict(line), "ratio": line.ratio} for line in self.lines]
        argv = "python -m benchmarks.papers " + shlex.join(sys.argv[1:])
        return {**asdict(self), "lines": lines, "command": argv, "provenance": provenance()}

    def written(self, file: str) -> None:
        """Write the JSON file."""
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(self.to_dict(), stream, indent=1)
            stream.write("\n")


def pair_options(parser: argparse.ArgumentParser) -> None:
    """Target, draft and questions of a row."""
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", help="default: the bundled one, for the bundled target")
    parser.add_argument("--suite", action="append", help="a name or a file; may be repeated; default: bundled")
    parser.add_argument("--limit", type=int, default=2, help="questions of each category (default 2)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default 64)")


def draft_model(args: argparse.Namespace, **keys: Any) -> dict[str, Any]:
    """The configuration of a draft model."""
    return {"method": "draft_model", "model": args.draft, **keys}


def load(args: argparse.Namespace, **keys: Any) -> Engine:
    """The pair. A GGUF file keeps its own weights."""
    return Engine.load(args.target, speculative=draft_model(args, **keys), dtype=dtype_of(args.target))


def dtype_of(target: str) -> str:
    """float32 for the bundled models and what is made of them, else bfloat16."""
    return "float32" if "bundled" in target or "inflated" in target else "bfloat16"


def questions(args: argparse.Namespace) -> list[Item]:
    """The questions asked for, in the order of the suites."""
    return [item for name in args.suite or ["bundled"] for item in select(read_suite(name).items, limit=args.limit)]


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
