"""Every rule on the bundled pair: expected acceptance length and time of verification, by temperature and drafts.

    python benchmarks/rules.py [--prompts 20] [--tokens 64] [--temperatures 0.6,1] [--drafts 1,2,4,8] [--lossy]

n drafts are n parallel lines of four guesses (one line for n = 1). Each way of drawing decodes the same prompts once, and
at every step all suitable rules are evaluated on the same tree: length is the mean of 1 + E[accepted guesses] given
the tree, so differences between rules of one group are paired. The time is that of ``verify.draw``: distributions in,
verdict out. Acceptance of a single token, and its distance from the optimum: ``benchmarks.theory optimum``.
"""

import argparse
import itertools
from collections import defaultdict
from statistics import mean, median, stdev
from time import perf_counter
from typing import Any

import torch

from foretell import VERIFIERS, DrawMode, Engine
from foretell.bench import encode_item, load_suite
from foretell.core.tree import depths
from foretell.engine import judging

DEPTH = 4
READERS = [rule.name for rule in VERIFIERS.values() if rule.exact and "noise" not in rule.reads]
ON_TREES = [name for name in READERS if not VERIFIERS[name].chains_only]
LOSSY = [rule.name for rule in VERIFIERS.values() if not rule.exact and "taps" not in rule.reads]


def groups(drafts: int, lossy: bool) -> dict[DrawMode, list[str]]:
    """Ways of drawing, and the rules that are evaluated on such trees; the first rule decodes."""
    if lossy:
        matching = [name for name in LOSSY if VERIFIERS[name].draws == DrawMode.COUPLED]
        return {
            DrawMode.COUPLED: ["coupled", *matching],
            DrawMode.WITHOUT_REPLACEMENT: ["rejection"],
        }
    if drafts == 1:
        return {DrawMode.IID: READERS, DrawMode.COUPLED: ["coupled"], DrawMode.FIXED: ["exact"]}
    return {
        DrawMode.IID: ON_TREES,
        DrawMode.WITHOUT_REPLACEMENT: ["rejection", "traversal"],
        DrawMode.GREEDY: ["rejection", "traversal"],
        DrawMode.COUPLED: ["coupled"],
        DrawMode.FIXED: ["exact"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0.6,1")
    parser.add_argument("--drafts", default="1,2,4,8")
    parser.add_argument("--lossy", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = Engine.load("bundled", speculative="draft_model")
    suite = load_suite("bundled")
    prompts = [encode_item(base, item) for item in suite[:: max(1, len(suite) // args.prompts)][: args.prompts]]
    prompts = [ids for ids in prompts if len(ids) + args.tokens < base.model.spec.max_positions]
    draw = judging.draw
    rules: list[str] = []
    lengths: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)

    def asked(verifier: Any, evidence: Any) -> Any:
        """The verdict of the rule that decodes, and every rule's expected length on this tree."""
        depth = depths(evidence.tree.parent)
        for name in rules:
            begun = perf_counter()
            draw(VERIFIERS[name], evidence)
            times[name].append(perf_counter() - begun)
            lengths[name].append(1.0 + float((VERIFIERS[name].stops(evidence).stops * depth).sum()))
        return draw(verifier, evidence)

    judging.draw = asked
    print(
        f"{len(prompts)} prompts of {args.tokens} tokens, lines of {DEPTH} guesses, {args.threads} threads; times in us"
    )
    print(
        f"{'T':>4} {'drafts':>6} {'draws':>20} {'rule':>14} {'length':>7} {'+-':>6} {'- first':>8} {'+-':>6} {'us':>6}"
    )
    numbers = map(int, args.drafts.split(","))
    for temperature, drafts in itertools.product(list(map(float, args.temperatures.split(","))), list(numbers)):
        shape = "chain" if drafts == 1 else f"static/branching={drafts}" + "x1" * (DEPTH - 1)
        for draws, rules in groups(drafts, args.lossy).items():
            config = {"method": "draft_model", "verify": rules[0], "shape": shape, "draws": draws.value,
                      "num_speculative_tokens": DEPTH}  # fmt: skip
            engine = base.with_method(config)
            means: dict[str, list[float]] = defaultdict(list)
            times.clear()
            for index, ids in enumerate(prompts):
                lengths.clear()
                engine.generate(ids, temperature=temperature, max_new_tokens=args.tokens, seed=index, ignore_eos=True)
                for name in rules:
                    means[name].append(mean(lengths[name]))
            for name in rules:
                gain = [mine - first for mine, first in zip(means[name], means[rules[0]], strict=True)]
                root = len(prompts) ** 0.5
                print(
                    f"{temperature:4.1f} {drafts:6d} {draws.value:>20} {name:>14} {mean(means[name]):7.3f} "
                    f"{stdev(means[name]) / root:6.3f} {mean(gain):+8.3f} {stdev(gain) / root:6.3f} "
                    f"{1e6 * median(times[name]):6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
