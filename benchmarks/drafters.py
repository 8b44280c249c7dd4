"""Every drafter on one target: acceptance by slot, mean acceptance length, costs, speedup, and whether texts are the same.

    python benchmarks/drafters.py --prompts-per-category 4 --rounds 3 > table.md
    python benchmarks/drafters.py --target build/inflated --heads build/heads --draft bundled/draft

One process, one set of weights, all methods in turn on each prompt (``foretell.bench.run_bench``); verification is
``coupled``, so all texts must be plain decoding's own. Heads are the bundled ones, or DIR/METHOD with --heads DIR (eagle2
reads eagle1's where it has none of its own). A method is written as ``foretell bench --methods`` takes it. Methods
whose head is missing are left out with a message. Markdown on stdout, progress on stderr; --json FILE keeps the whole
report.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from foretell import Engine, ForetellError
from foretell.bench import BenchMethod, BenchReport, MethodReport, load_suite, parse_method, run_bench, select
from foretell.cli.output import as_json

# Plain decoding always runs.
METHODS = "draft_model,medusa,eagle1,eagle2,eagle3,kangaroo,dflash,ngram,suffix"
BORROWED = {"eagle2": "eagle1"}
COLUMNS = (
    "method", "T", "accepted by slot, given the one before", "length", "c", "drafting", "verifying", "speedup", "tokens/s",
    "same text",
)  # fmt: skip
NOTES = """\
length: mean acceptance length, 1 + accepted / steps. c: one guess in plain passes of the target. drafting, verifying: all
drafting of a step, and the target's pass over it, in plain passes. speedup: tokens/s against plain decoding of the same
prompts, in brackets 95 % by paired bootstrap over prompts. same text: prompts whose tokens are plain decoding's own, all
of them. suffix reads each request's own text alone: in a second round it would repeat every output."""


def method_of(text: str, guesses: int, heads: Path | None, draft: str | None) -> BenchMethod:
    """One method with its number of guesses and its weights. Raises ForetellError."""
    name, *rest = text.split(":")
    counted = text if name == "none" or any(part.isdecimal() for part in rest) else f"{text}:{guesses}"
    found = parse_method(counted, draft=draft if name == "draft_model" else None)
    config = found.config
    takes_head = name != "draft_model" and any(field.name == "model" for field in fields(config))
    if heads is not None and takes_head and (config.capabilities.needs_head or (heads / name).is_dir()):
        places = [heads / place for place in (name, BORROWED.get(name, name)) if (heads / place).is_dir()]
        config = replace(config, model=str(places[0] if places else heads / name))  # type: ignore[call-arg]
    if name == "suffix":
        config = replace(config, suffix_decoding_max_cached_tokens=0)  # type: ignore[call-arg]
    return BenchMethod(text, config)


def usable(
    engine: Engine, names: Sequence[str], guesses: int, heads: Path | None, draft: str | None
) -> list[BenchMethod]:
    """The methods that can be loaded; of the others a line each."""
    found = []
    for text in names:
        try:
            method = method_of(text, guesses, heads, draft)
            engine.with_method(method.config)
        except (ForetellError, KeyError, OSError) as error:
            print(f"{text} left out: {error}\n", flush=True)
        else:
            found.append(method)
    return found


def guesses_a_step(report: BenchReport, temperature: float, label: str) -> float:
    """Nodes guessed a step, over all prompts."""
    mine = [one for one in report.prompts if one["temperature"] == temperature and one["method"] == label]
    return float(sum(one["num_draft_tokens"] for one in mine) / max(1, sum(one["num_steps"] for one in mine)))


def row(report: BenchReport, method: MethodReport, temperature: float, depth: int) -> list[str]:
    """One line of the table."""
    figures = method.overall
    drafted = guesses_a_step(report, temperature, method.label)
    rates = figures.conditional_acceptance_per_pos[:depth]
    speedup = figures.speedup
    plain = method.config["method"] == "none"
    return [
        method.label,
        f"{temperature:g}",
        " ".join(f"{rate:.2f}" for rate in rates),
        f"{figures.mean_acceptance_length:.2f}",
        number(figures.draft_cost if not plain else None, 3),
        number(figures.draft_cost * drafted if figures.draft_cost is not None and not plain else None),
        number(figures.verify_cost if not plain else None),
        "1" if plain else f"{speedup.value:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]",
        f"{figures.tokens_per_second:.1f}",
        f"{figures.num_identical}/{figures.num_prompts}",
    ]


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def losses(report: BenchReport) -> list[str]:
    """Of every method that is slower than plain decoding, why."""
    out = []
    for at in report.temperatures:
        for method in at.methods:
            figures = method.overall
            if method.config["method"] == "none" or figures.speedup.value >= 1 or figures.verify_cost is None:
                continue
            drafting = (figures.draft_cost or 0.0) * guesses_a_step(report, at.temperature, method.label)
            step = drafting + figures.verify_cost + (figures.overhead_cost or 0.0)
            out.append(
                f"{method.label} loses at temperature {at.temperature:g}: {figures.mean_acceptance_length:.2f} tokens a "
                f"step for {step:.2f} plain passes (drafting {drafting:.2f}, verifying {figures.verify_cost:.2f}, "
                f"the rest {number(figures.overhead_cost)})."
            )
    return out


def show(report: BenchReport, depths: dict[str, int]) -> None:
    """The table as Markdown, then what it was measured on."""
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "|".join("---" if name in ("method", "speedup") else "--:" for name in COLUMNS) + "|")
    for label in dict.fromkeys(method.label for at in report.temperatures for method in at.methods):
        for at in report.temperatures:
            for method in at.methods:
                if method.label == label:
                    print("| " + " | ".join(row(report, method, at.temperature, depths.get(label, 0))) + " |")
    print(f"\n{NOTES}\n")
    for line in losses(report):
        print(f"- {line}")
    s, p = report.settings, report.provenance
    print(
        f"\n{s['target']} ({s['architecture']}, {s['weight_bytes'] / 1e6:.1f} MB a pass), {s['implementation']}, "
        f"{s['dtype']}, {p['machine']['torch_threads']} threads, "
        f"{s['num_prompts']} prompts x {s['max_new_tokens']} tokens x "
        f"{s['rounds']} rounds, seed {s['seed']}; {p['machine']['processor']}; revision {p['git_revision']}"
    )


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--heads", type=Path, help="trained heads of this target lie in HEADS/METHOD")
    parser.add_argument("--draft", help="of draft_model; default: bundled/draft")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--categories")
    parser.add_argument("--prompts-per-category", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("```text\npython benchmarks/drafters.py " + shlex.join(sys.argv[1:]) + "\n```\n", flush=True)
    engine = Engine.load(args.target, dtype=args.dtype)
    wanted = args.categories.split(",") if args.categories else None
    items = select(load_suite("bundled"), categories=wanted, limit=args.prompts_per_category)
    names = [name for name in args.methods.split(",") if name and name != "none"]
    methods = usable(engine, names, args.num_speculative_tokens, args.heads, args.draft or "bundled/draft")
    report = run_bench(
        engine, items, methods, temperatures=[float(t) for t in args.temperatures.split(",")],
        max_new_tokens=args.max_new_tokens, rounds=args.rounds, seed=args.seed,
        progress=lambda done, total: print(f"\r{done}/{total} ", end="", file=sys.stderr, flush=True),
    )  # fmt: skip
    if args.json:
        args.json.write_text(as_json({"argv": sys.argv[1:], **report.to_dict()}, pretty=True), encoding="utf-8")
    show(report, {method.label: method.config.proposal_shape.depth for method in methods})
    broken = [
        f"{method.label} at temperature {at.temperature:g}: {method.overall.num_identical} of {method.overall.num_prompts}"
        for at in report.temperatures
        for method in at.methods
        if method.overall.num_identical < method.overall.num_prompts
    ]
    if broken:
        print("\nTexts that are not plain decoding's own: " + json.dumps(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
