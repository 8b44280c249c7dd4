"""The judge on worked problems: mean acceptance length and quality of the answers, by threshold.

    python -m benchmarks.judge [--problems 400] [--thresholds 1,0.9,0.7,0.5,0.3,0.1,0] [--temperatures 0,0.7]
                               [--judge DIR] [--gamma 8] [--unanswerable 200] [--json FILE]

Problems come from a stream of their own, so that none was seen in training but by chance. The same problems are answered
with the bundled draft under ``coupled`` (exact), ``typical`` at several epsilon, and ``judge`` at each threshold, with
``off_support``: at temperature 0 no other token than the target's has a probability, so without it the judge, like
``typical``, would change nothing.

length: mean acceptance length. right: answers that are, with a 95 % interval (Wilson). kept: answers with the same
outcome as the exact run (same seed). none: answers that do not end. declined: of further problems, none of which can be
answered, those that are declined. +-: a standard error of kept. The bundled target solves few problems but those that
cannot be answered: the interval of *right* is then wider than the judge's effect, so *kept* is the figure to use.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from recipes.mine_judge import DECLINED, MAX_NEW_TOKENS, outcome, problems, prompt_ids
from recipes.problems import Problem, problem

from foretell import Completion, Engine, Request, SamplingParams
from foretell.bench.stats import wilson
from foretell.core.errors import ConfigError
from foretell.core.provenance import provenance

STREAM = "judge held out"
EPSILONS = (0.3, 0.09, 0.03)


@dataclass(frozen=True)
class Row:
    """One rule at one temperature."""

    temperature: float
    rule: str
    length: float
    right: float
    kept: float
    none: float
    declined: float
    num_problems: int
    num_unanswerable: int
    num_tokens: int
    kept_by_kind: dict[str, float]

    @property
    def error(self) -> float:
        """Standard error of ``kept``."""
        return sqrt(self.kept * (1 - self.kept) / self.num_problems)


def share(found: list[bool]) -> float:
    return sum(found) / max(1, len(found))


def measure(
    temperature: float, rule: str, asked: list[Problem], found: list[Completion], exact: list[Completion]
) -> Row:
    """Figures of one rule's answers beside those of the exact run. Behind the problems asked come unanswerable ones."""
    further = [outcome(one.text) for one in found[len(asked) :]]
    found, exact = found[: len(asked)], exact[: len(asked)]
    said = [outcome(one.text) for one in found]
    reference = [outcome(one.text) for one in exact]
    kept = [mine == its for mine, its in zip(said, reference, strict=True)]
    steps, accepted = sum(one.num_steps for one in found), sum(one.num_accepted_tokens for one in found)
    kinds = sorted({of.kind for of in asked})
    return Row(
        temperature,
        rule,
        length=1 + accepted / steps,
        right=share([mine == outcome(of.answer) for mine, of in zip(said, asked, strict=True)]),
        kept=share(kept),
        none=share([mine is None for mine in said]),
        declined=share([mine == DECLINED for mine in further]),
        num_problems=len(asked),
        num_unanswerable=len(further),
        num_tokens=sum(one.num_tokens for one in found),
        kept_by_kind={kind: share([k for k, of in zip(kept, asked, strict=True) if of.kind == kind]) for kind in kinds},
    )


def show(rows: list[Row]) -> None:
    """One table, and the longest runs at the same quality."""
    print("| T | rule | length | kept | +- | right | none | declined |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        right = wilson(round(row.right * row.num_problems), row.num_problems)
        print(
            f"| {row.temperature:g} | `{row.rule}` | {row.length:.2f} | {row.kept:.1%} | {row.error:.1%} "
            f"| {row.right:.1%} [{right.low:.1%}, {right.high:.1%}] | {row.none:.1%} | {row.declined:.1%} |"
        )
    for temperature in dict.fromkeys(row.temperature for row in rows):
        here = [row for row in rows if row.temperature == temperature]
        for rule in ("typical", "judge"):
            good = [row for row in here if row.rule.startswith(rule) and row.kept >= here[0].kept - 0.01]
            if good:
                best = max(good, key=lambda row: row.length)
                gain = best.length / here[0].length - 1
                print(
                    f"\nT = {temperature:g}, `kept` within one point of exact: `{best.rule}`, length "
                    f"{best.length:.2f} beside {here[0].length:.2f} ({gain:+.1%}), declined {best.declined:.1%}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled/target")
    parser.add_argument("--draft", default=None, help="default: the bundled one")
    parser.add_argument("--judge", default=None, help="directory of the head; default: the bundled one")
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--unanswerable", type=int, default=200)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--thresholds", default="1,0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1,0")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    common: dict[str, Any] = {
        "method": "draft_model", "model": args.draft, "num_speculative_tokens": args.gamma, "judge": args.judge
    }  # fmt: skip
    base = Engine.load(args.target, speculative=common)
    asked = problems(args.problems, STREAM)
    further = [problem(STREAM, index, ["unanswerable"]) for index in range(args.unanswerable)]
    ids = [prompt_ids(base, of) for of in [*asked, *further]]
    rules = ["coupled", *(f"typical/epsilon={epsilon}" for epsilon in EPSILONS)]
    rules += [f"judge/threshold={threshold}/off_support=true" for threshold in args.thresholds.split(",")]
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        requests = [
            Request(prompt, SamplingParams(temperature=temperature, seed=index, max_new_tokens=MAX_NEW_TOKENS))
            for index, prompt in enumerate(ids)
        ]
        exact: list[Completion] = []
        for rule in rules:
            if temperature == 0 and rule.startswith("typical") and rule != rules[1]:
                continue  # greedy decoding, whatever epsilon
            engine = base.with_method({**common, "verify": rule})
            if engine.method is not base.method:
                raise ConfigError("the draft model was loaded anew")
            found = engine.generate_batch(requests, batch_size=args.batch_size)
            exact = exact or found
            rows.append(measure(temperature, rule, asked, found, exact))
            print(f"  {temperature:g} {rule}: {rows[-1].length:.2f} {rows[-1].kept:.3f}", flush=True)
    print(
        f"\n{rows[0].num_problems} problems of all kinds and {rows[0].num_unanswerable} unanswerable ones of the stream "
        f"{STREAM!r}; chains of {args.gamma} guesses; at most {MAX_NEW_TOKENS} tokens.\n"
    )
    show(rows)
    if args.json:
        content = {"provenance": provenance(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
