"""Every exact rule on the bundled pair: mean acceptance length and time of verification, by temperature and drafts.

    python benchmarks/rules.py [--prompts 20] [--tokens 64] [--temperatures 0.6,1] [--drafts 1,2,4,8]

n drafts are n parallel lines of four guesses (one line for n = 1). All rules decode the same prompts with the same seeds,
in turn. The time is that of ``verify.draw`` alone: laws in, verdict out. Acceptance of a single token, and its distance
from the optimum, is what ``foretoken theory optimum`` computes.
"""

import argparse
import itertools
from collections import defaultdict
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from foretoken import VERIFIERS, Engine, SamplingParams
from foretoken.bench import encode_item, load_suite
from foretoken.engine import step as step_module

DEPTH = 4


def shape_of(drafts: int) -> str:
    return "chain" if drafts == 1 else f"delayed/delay=0/width={drafts}/depth={DEPTH}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0.6,1")
    parser.add_argument("--drafts", default="1,2,4,8")
    parser.add_argument("--rules", default=",".join(VERIFIERS))
    args = parser.parse_args()
    torch.set_num_threads(2)
    base = Engine.load("bundled", speculative="draft_model")
    suite = load_suite("bundled")
    items = suite[:: max(1, len(suite) // args.prompts)][: args.prompts]
    prompts = [encode_item(base, item) for item in items]
    prompts = [ids for ids in prompts if len(ids) + args.tokens < base.model.spec.max_positions]
    seconds: list[float] = []
    draw = step_module.draw

    def timed(*given: Any) -> Any:
        begun = perf_counter()
        verdict = draw(*given)
        seconds.append(perf_counter() - begun)
        return verdict

    step_module.draw = timed  # type: ignore[assignment]
    rules = [name for name in args.rules.split(",") if name != "judge"]
    print(f"{len(prompts)} prompts, {args.tokens} tokens each, lines of {DEPTH} guesses; torch {torch.__version__}")
    print(f"{'T':>4} {'drafts':>6} {'rule':>14} {'kind':>6} {'length':>7} {'+-':>6} {'us/step':>8}")
    for temperature, drafts in itertools.product(
        map(float, args.temperatures.split(",")), map(int, args.drafts.split(","))
    ):
        engines: dict[str, Engine] = {}
        for rule in rules:
            config = {
                "method": "draft_model",
                "verify": rule,
                "shape": shape_of(drafts),
                "num_speculative_tokens": DEPTH,
            }
            try:
                engines[rule] = base.with_method(config)
            except ValueError:
                continue  # refused: block branches nowhere
        lengths, times = defaultdict(list), defaultdict(list)
        for index, ids in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_new_tokens=args.tokens, seed=index, ignore_eos=True)
            for rule, engine in engines.items():
                seconds.clear()
                completion = engine.generate(ids, params)
                lengths[rule].append(completion.mean_acceptance_length)
                times[rule] += seconds
        for rule in engines:
            spread = torch.tensor(lengths[rule]).std() / len(prompts) ** 0.5
            kind = "exact" if VERIFIERS[rule].exact else "LOSSY"
            print(
                f"{temperature:4.1f} {drafts:6d} {rule:>14} {kind:>6} {mean(lengths[rule]):7.3f} {float(spread):6.3f} "
                f"{1e6 * median(times[rule]):8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
