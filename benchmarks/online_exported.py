"""A drafter that ``foretell train`` made learns from requests, is exported, loaded anew, and evaluated:
``python -m benchmarks.online --exported --method eagle3 --draft HEAD --before 120 --requests 500``.

It learns ``--requests`` of the second domain, after ``--before`` of the first one, which stand for what it served until
then: a learner knows no other old traffic. Before and after, ``--probes`` fresh requests of every domain: acceptance is
the share of first guesses kept, and the difference is over the same requests with the same seeds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.domains import prompts
from benchmarks.figures import interval

from foretell import Engine, SamplingParams
from foretell.learn.options import LearnOptions
from foretell.learn.session import Session


def acceptance(engine: Engine, given: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, list[float]]:
    """Share of first guesses kept: over all requests, and of each."""
    each, kept, made = [], 0, 0
    for one in engine.generate_batch([list(ids) for ids in given], params):
        first = [accepted > 0 for drafted, accepted in one.steps if drafted]
        each.append(sum(first) / max(1, len(first)))
        kept, made = kept + sum(first), made + len(first)
    return kept / max(1, made), each


def measure(
    args: argparse.Namespace,
    load: Callable[[str | None], Engine],
    options: LearnOptions,
    params: SamplingParams,
) -> None:
    """Print the table, and write the figures."""
    learned = args.domains[min(1, len(args.domains) - 1)]
    engine = load(args.draft)
    probes = {domain: prompts(engine, domain, args.probes, 900 + args.first_seed) for domain in args.domains}
    before = {domain: acceptance(engine, given, params) for domain, given in probes.items()}
    with tempfile.TemporaryDirectory() as folder:
        session = Session(load(args.draft), replace(options, learn_dir=folder), max_rows=args.rows)
        learner = session.learner
        assert learner is not None
        traffic = prompts(engine, args.domains[0], args.before, 500 + args.first_seed)
        traffic += prompts(engine, learned, args.requests, args.first_seed)
        for _ in session.run(traffic, replace(params, seed=1000 * args.first_seed)):
            pass
        learner.act("save")
        session.learn()
        (served,) = learner.adapters.of(None)
        assert learner.adapters.store is not None
        exported = load(str(learner.adapters.store.folder(served.name) / "export"))
        after = {domain: acceptance(exported, given, params) for domain, given in probes.items()}
        figures = learner.figures()
        session.close()
    lines = [
        f"{args.method}, {args.before} requests of {args.domains[0]}, {args.requests} of {learned}: "
        f"{figures.num_updates} updates, {figures.num_swaps} swaps",
        "", "| domain | as it was trained | exported | difference, over requests | 95 % |", "|--|--|--|--|--|",
    ]  # fmt: skip
    rows: dict[str, Any] = {}
    for domain in args.domains:
        gains = [new - old for old, new in zip(before[domain][1], after[domain][1], strict=True)]
        low, high = interval(gains)
        rows[domain] = {"before": before[domain][0], "after": after[domain][0], "gain": statistics.mean(gains),
                        "interval": [low, high], "learned": domain == learned}  # fmt: skip
        lines.append(
            f"| {domain}{' (learned)' if domain == learned else ''} | {before[domain][0]:.3f} | {after[domain][0]:.3f} | "
            f"{statistics.mean(gains):+.3f} | {low:+.3f} to {high:+.3f} |"
        )
    print("\n".join(lines))
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {"method": args.method, "requests": args.requests, "before": args.before, "domains": rows}, indent=1
            )
            + "\n"
        )
