"""Does ``foretell doctor`` predict what ``foretell bench`` then measures? Both on the same pairs, on other prompts each.

    python benchmarks/doctor.py --limit 10 --bench 10
    python benchmarks/doctor.py --pairs good,large,ngram --target smollm2-135m --draft DIR

A pair is a target and a method. The doctor sees ``--limit`` prompts of the suite, and bench as many others of the same
categories: a prediction from the very prompts that are measured would prove little. The same prompts for both with
--same, which leaves the cost model as the only error. Each predicted speedup stands beside the measured one, at the
number of guesses that the doctor recommends. Exit status 1 where one is off by more than --bar.

Pairs of the bundled target: good (eagle3), head (eagle1), bad (a draft model that is often wrong for its cost), large
(the target as its own draft model: a guess costs a pass), ngram, and hybrid where that method is there. With --target
they are of that target, and --draft is its draft model or head. On a quiet machine, with the threads that will serve.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from foretell import METHODS, Engine, ForetellError
from foretell.bench import BenchMethod, Item, encode_item, load_suite, run_bench
from foretell.cli.output import as_json
from foretell.doctor.candidates import Candidate, drafter_method
from foretell.doctor.checkup import check_up
from foretell.doctor.examine import Examined
from foretell.engine.config import speculative_config


def pairs_of(engine: Engine, draft: str | None) -> dict[str, dict[str, Any]]:
    """Configurations by the pair's name."""
    pairs: dict[str, dict[str, Any]] = {
        "large": {"method": "draft_model", "model": engine.model.spec.name, "num_speculative_tokens": 4},
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
    }
    if "hybrid" in METHODS:
        pairs["hybrid"] = {"method": "hybrid"}
    if draft is not None:
        return {"draft": {"method": drafter_method(draft), "model": draft, "num_speculative_tokens": 8}, **pairs}
    if engine.model.spec.name not in ("bundled", "bundled/target"):
        return pairs
    return {
        "good": {"method": "eagle3", "num_speculative_tokens": 8},
        "head": {"method": "eagle1", "num_speculative_tokens": 8},
        "bad": {"method": "draft_model", "num_speculative_tokens": 8},
        "medusa": {"method": "medusa"},
        **pairs,
    }


def questions(suite: str, count: int, *, skip: int) -> list[Item]:
    """count prompts of all categories in turn, after the first skip."""
    items = load_suite(suite)
    seen: dict[str, int] = {}
    ranked = []
    for index, item in enumerate(items):
        seen[item.category] = seen.get(item.category, 0) + 1
        ranked.append((seen[item.category], index))
    return [items[index] for _, index in sorted(ranked)[skip : skip + count]]


def method_of(config: Mapping[str, Any], examined: Examined) -> BenchMethod:
    """The pair at the length that the doctor found best."""
    assert examined.best is not None
    length = examined.best.num_speculative_tokens
    made = speculative_config({**config, "num_speculative_tokens": length})
    return BenchMethod(f"{made.method}:{length}", made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", help="a draft model or head of --target")
    parser.add_argument("--pairs", help="names, joined by commas; default: all")
    parser.add_argument("--suite", default="bundled")
    parser.add_argument("--limit", type=int, default=10, help="prompts that the doctor sees")
    parser.add_argument("--bench", type=int, default=10, help="prompts that bench measures")
    parser.add_argument("--same", action="store_true", help="measure on the doctor's own prompts")
    parser.add_argument("--timed", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--bar", type=float, default=0.15)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    engine = Engine.load(options.target)
    pairs = pairs_of(engine, options.draft)
    wanted = options.pairs.split(",") if options.pairs else list(pairs)
    unknown = [name for name in wanted if name not in pairs]
    if unknown:
        parser.error(f"no pair {unknown[0]!r} for this target; there are {', '.join(pairs)}")
    seen = questions(options.suite, options.limit, skip=0)
    measured = seen if options.same else questions(options.suite, options.bench, skip=options.limit)
    prompts = [encode_item(engine, item) for item in seen]
    rows, worst = [], 0.0
    print("| pair | method | guesses | predicted | 95 % | measured | 95 % | predicted / measured |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in wanted:
        config = pairs[name]
        candidate = Candidate(config["method"], config, config.get("model"))
        found = check_up(
            engine, prompts, [candidate], {}, target=options.target, temperature=options.temperature,
            max_new_tokens=options.max_new_tokens, num_timed=options.timed, bandwidth=False, time_limit_s=math.inf,
        )  # fmt: skip
        if not found.methods or found.methods[0].best is None:
            print(f"{name}: not examined: {found.left}", file=sys.stderr)
            worst = float("inf")
            continue
        best = found.methods[0].best
        method = method_of(config, found.methods[0])
        report = run_bench(
            engine, measured, [method], temperatures=[options.temperature], max_new_tokens=options.max_new_tokens,
            rounds=options.rounds,
        )  # fmt: skip
        its = report.temperatures[0].methods[1].overall
        error = best.speedup.value / its.speedup.value - 1.0
        worst = max(worst, abs(error))
        said, was = best.speedup, its.speedup
        print(
            f"| {name} | {config['method']} | {best.num_speculative_tokens} | {said.value:.2f} | {said.low:.2f} to "
            f"{said.high:.2f} | {was.value:.2f} | {was.low:.2f} to {was.high:.2f} | {1 + error:.2f} |",
            flush=True,
        )
        rows.append({
            "pair": name, "config": config, "guesses": best.num_speculative_tokens, "error": error,
            "predicted": [said.value, said.low, said.high], "measured": [was.value, was.low, was.high],
            "length_predicted": best.tokens_per_step, "length_measured": its.mean_acceptance_length,
            "cost_predicted": best.cost, "verify_measured": its.verify_cost, "draft_measured": its.draft_cost,
        })  # fmt: skip
    print(f"\nworst: {worst:.0%} (bar {options.bar:.0%})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(as_json({"rows": rows, "options": vars(options)}, pretty=True))
    return int(worst > options.bar)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ForetellError as error:
        sys.exit(f"doctor.py: {error}")
