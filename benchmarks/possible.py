"""Are the speeds that ``foretell bench`` calls possible reached where a part is perfect? By the clock.

    python -m benchmarks.possible --target bundled --method draft_model:5 --prompts 4 --rounds 3

Each prompt is decoded plainly, by the method, by the same method told in each step how many guesses will be kept, and with
the target as its own draft, whose guesses are all right; one after the other, in turn. What ``foretell.theory.possible``
says of the method's steps alone stands beside the speeds of these runs, the drafter's seconds left out where it is free.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from foretell import Engine, SamplingParams
from foretell.bench import encode_item, load_suite, select
from foretell.bench.run import measure, parse_method
from foretell.bench.trace import DecodedRun
from foretell.costs.table import CostTable
from foretell.planner.acceptance import Acceptance
from foretell.planner.observations import RowView
from foretell.planner.plan import StepPlan
from foretell.planner.planner import Planner
from foretell.theory.possible import of_run

LEVELS = ("have", "stopped", "candidates", "possible")


class Scripted(Planner):
    """Lets a single row guess as deep as it is told, step by step."""

    def __init__(self, depths: Iterator[int]) -> None:
        super().__init__(CostTable({(1, 1): 1.0}, {}), Acceptance(32), mode="on")
        self._depths = depths

    def plan(self, rows: Sequence[RowView], arriving: int = 0) -> StepPlan:
        """The next depth."""
        made = super().plan(rows, arriving)
        made.caps = [min(made.caps[0], next(self._depths, 0))]
        return made

    def again(self, *_: Any, **__: Any) -> None:
        """It is asked every time."""


def told(engine: Engine, depths: Iterable[int]) -> Engine:
    """The engine, guessing so deep in each step of its next request."""
    made = engine.with_method(engine.speculative, method=engine.method, speculation="auto")
    planning: Any = SimpleNamespace(planner=lambda *_: Scripted(iter(depths)), used=lambda choice: choice)
    made._planning = planning
    return made


def seconds_a_token(runs: Sequence[DecodedRun], *, is_free: bool = False) -> float:
    """Of the steps after the first, which reads the prompt, and before the last, which the end cuts."""
    steps = [
        (spent, step)
        for run in runs
        for spent, step in list(zip(run.seconds_of(), run.steps, strict=True))[1 : -1 if len(run.steps) > 2 else None]
    ]
    seconds = sum(spent - (step.seconds_draft if is_free else 0.0) for spent, step in steps)
    return seconds / sum(step.num_tokens for _, step in steps)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", help="of draft_model, or a head; default: the method's own")
    parser.add_argument("--method", default="draft_model:5", help="as bench takes it")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("```text\npython -m benchmarks.possible " + shlex.join(sys.argv[1:]) + "\n```\n", flush=True)
    plain = Engine.load(args.target, speculative="none")
    config = parse_method(args.method, draft=args.draft).config
    method = plain.with_method(config, speculation="on")
    own = {"method": "draft_model", "model": args.target, "num_speculative_tokens": config.num_speculative_tokens}
    right = plain.with_method(own, speculation="on")
    items = select(load_suite("bundled"), limit=1)[: args.prompts]
    prompts = [encode_item(plain, item) for item in items]
    runs: dict[str, list[DecodedRun]] = {name: [] for name in ("plain", "method", "told", "right")}
    params = SamplingParams(temperature=0.0, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    for engine in (plain, method, right):
        measure(engine, prompts[0], params)
    for _ in range(args.rounds):
        for ids in prompts:
            runs["plain"].append(measure(plain, ids, params))
            runs["method"].append(measure(method, ids, params))
            kept = [step.num_accepted_tokens for step in runs["method"][-1].steps]
            runs["told"].append(measure(told(method, kept), ids, params))
            runs["right"].append(measure(right, ids, params))
    steps = [step for run in runs["method"] for step in run.steps[1:-1]]
    unit, spent = seconds_a_token(runs["plain"]), seconds_a_token(runs["method"])
    tokens = sum(step.num_tokens for step in steps)
    one = of_run(
        [step for run in runs["plain"] for step in run.steps[1:]], steps, unit / spent,
        tokens=tokens, seconds=spent * tokens, split=True,
    )  # fmt: skip
    measured = {
        "have": spent, "stopped": seconds_a_token(runs["told"]), "candidates": seconds_a_token(runs["told"], is_free=True),
        "possible": seconds_a_token(runs["right"], is_free=True),
    }  # fmt: skip
    print(f"{one.line}\n\n| level | foretold | measured | difference |\n|---|--:|--:|--:|")
    for level in LEVELS:
        foretold, found = getattr(one, level), unit / measured[level]
        print(f"| {level} | {foretold:.2f} | {found:.2f} | {foretold / found - 1:+.1%} |")
    same = all(len({tuple(run.token_ids) for run in group}) == 1 for group in zip(*runs.values(), strict=True))
    print(f"\nall texts are plain decoding's: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
