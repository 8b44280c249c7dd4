"""Trees against chains: every shape and size on one pair of models, at every temperature, beside plain decoding.

    python benchmarks/shapes.py [--target build/inflated] [--limit 1] [--tokens 48] [--verify coupled]

One process, one set of weights, prompts in turn over all shapes (``foretell.bench.run_bench``). Sequoia's trees are made
from the acceptance by child that is measured first, on other prompts. The winner is the shape of most tokens/s.
"""

import argparse
from dataclasses import dataclass

import torch
from benchmarks.theory.pairs import PairText, collect
from benchmarks.theory.trees import positional_acceptance

from foretell import Engine
from foretell.bench import Item, encode_item, load_suite, run_bench
from foretell.verify import parse_verifier

SIZES = (4, 8, 16, 32, 64)
STATIC = {4: "2x1", 8: "2x1x1x1", 16: "3x2x1", 32: "4x2x1x1", 64: "4x3x2x1"}


@dataclass(frozen=True)
class Form:
    family: str
    size: int
    label: str  # as --methods takes it


def forms(acceptance: list[float], verify: str, families: list[str]) -> list[Form]:
    """Every shape at every size: about so many guesses, static ones as near as whole numbers come."""
    rates = "x".join(f"{rate:.4f}" for rate in acceptance)
    out = []
    for size in SIZES:
        deep = {4: 3, 8: 4, 16: 6, 32: 8, 64: 10}[size]
        specs = {
            "chain": f"{min(size, 16)}:{verify}",
            "adaptive": f"{min(size, 16)}:{verify}:adaptive/threshold=0.3",
            "static": f"4:{verify}:static/branching={STATIC[size]}",
            "sequoia": f"{deep}:{verify}:sequoia/size={size}/acceptance={rates}",
            "dyspec": f"{deep}:{verify}:dyspec/size={size}",
            "eagle2": f"{deep}:{verify}:eagle2/size={size}/width=4",
            "opt_tree": f"{deep}:{verify}:opt_tree/size={size}",
        }
        for family, spec in specs.items():
            if family in families and not (family in ("chain", "adaptive") and size > 16):
                out.append(Form(family, size, f"draft_model:{spec}"))
    return out


def acceptance_by_child(engine: Engine, items: list[Item], temperature: float, verify: str, tokens: int) -> list[float]:
    texts = []
    for index, item in enumerate(items):
        ids = encode_item(engine, item)
        done = engine.generate(ids, temperature=temperature, seed=index, max_new_tokens=tokens)
        texts.append(PairText([*ids, *done.token_ids], len(ids)))
    pairs = collect(engine.model, engine.method.model, texts, per_text=32)  # type: ignore[attr-defined]
    rule = parse_verifier(verify)
    return positional_acceptance(pairs, temperature, rule, rule.draws)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each category")
    parser.add_argument("--prompts", type=int, default=100, help="at most so many in all")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--verify", default="coupled")
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--families", default="chain,adaptive,static,sequoia,dyspec,eagle2,opt_tree")
    args = parser.parse_args()
    torch.set_num_threads(2)
    draft = {"method": "draft_model", "model": "bundled/draft"}
    engine = Engine.load(args.target, speculative=draft, dtype=args.dtype)
    small = Engine.load("bundled", speculative=draft)  # the same function as the inflated target, faster
    suite = load_suite("bundled")
    names = list(dict.fromkeys(item.category for item in suite))
    ours = [item for name in names for item in [i for i in suite if i.category == name][: args.limit]][: args.prompts]
    others = [item for name in names for item in [i for i in suite if i.category == name][-6:]]
    for temperature in map(float, args.temperatures.split(",")):
        rates = acceptance_by_child(small, others, temperature, args.verify, 64)
        print(f"\ntemperature {temperature:g}, {args.verify}; accepted child: {' '.join(f'{r:.3f}' for r in rates)}")
        chosen = forms(rates, args.verify, args.families.split(","))
        report = run_bench(
            engine, ours, [form.label for form in chosen], temperatures=[temperature], max_new_tokens=args.tokens,
            draft="bundled/draft",
        )  # fmt: skip
        found = {method.label: method.overall for method in report.temperatures[0].methods}
        print(f"{'shape':>9} {'size':>4} {'length':>7} {'tok/s':>7} {'speedup':>8}  95 %")
        for form in chosen:
            figures = found[form.label]
            speedup = figures.speedup
            print(
                f"{form.family:>9} {form.size:4d} {figures.mean_acceptance_length:7.3f} {figures.tokens_per_second:7.1f} "
                f"{speedup.value:8.3f}  [{speedup.low:.2f}, {speedup.high:.2f}]",
                flush=True,
            )
        best = max(chosen, key=lambda form: found[form.label].tokens_per_second)
        print(f"winner at temperature {temperature:g}: {best.family} of {best.size} ({best.label})")


if __name__ == "__main__":
    main()
