"""When to stop drafting: fixed lengths, stops by rule, a trained acceptance head, and the most that any stop could gain.

    python -m benchmarks.stopping --prompts-per-category 4 --rounds 3 > stopping.md
    python -m benchmarks.stopping --target build/inflated --draft bundled/draft --acceptance DIR
    python -m benchmarks.stopping --draft-cost 0.42 --draft-cost 0.024 --temperature 1

The question of SpecDec++ (2405.19715): by category, tokens/s of the best fixed length of a sweep, of the stops that need
no training, and of ``specdec`` with its head, each at its best threshold of the sweep; beside them the oracle, which stops
right before the first guess that will be rejected, computed from the accepted lengths of a run with --most guesses a step.

Two measures. tokens/s: timed, all policies in turn on each prompt. modelled: tokens a plain pass, from each policy's own
recorded steps and one table of costs for all (drafting, and verifying by width, medians over all fixed lengths), which is
free of the clock's noise and of what a rule itself costs. The oracle has no clock: it is modelled alone.

With --draft-cost nothing is timed: a guess costs so many plain passes, a pass of the target one whatever its width. Only
the modelled figures are shown, once for each cost given; those of --rounds above 1 would be the same. In brackets 95 % of
the gain over the best fixed length by bootstrap over prompts, the policies held as they were chosen on all of them.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.stopping_speed import oracle_speed, policy_speed
from benchmarks.theory.pass_costs import PassCosts
from torch import Tensor

from foretell import Engine, ForetellError, SamplingParams
from foretell.bench import encode_item, load_suite, select
from foretell.bench.run import measure
from foretell.bench.stats import PairedRuns, bootstrap, tails
from foretell.bench.trace import Cut, cut
from foretell.cli.output import as_json
from foretell.engine.config import speculative_config
from foretell.engine.recorder import StepTime
from foretell.theory.run_costs import StepCosts, step_costs

RULES = {
    "path": (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "probability": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "specdec": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
}
WARM_UP_TOKENS = 16


@dataclass
class Lane:
    """One policy and its runs: prompt to one run per round."""

    family: str  # "plain", "fixed", "long" or a rule
    value: float  # length or threshold
    engine: Engine
    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    steps: dict[int, list[StepTime]] = field(default_factory=dict)  # all of them, loops included
    texts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As the table shows it."""
        return f"{self.family} {self.value:g}"

    def tokens_and_seconds(self, prompts: Sequence[int]) -> tuple[int, float]:
        """Summed over prompts, each in its median round."""
        middles = [self.middle(prompt) for prompt in prompts]
        return sum(len(one.token_ids) for one in middles), sum(one.seconds for one in middles)

    def middle(self, prompt: int) -> Cut:
        """The round of median time."""
        ordered = sorted(self.cuts[prompt], key=lambda one: one.seconds)
        return ordered[(len(ordered) - 1) // 2]

    def tokens_per_second(self, prompts: Sequence[int]) -> float:
        """Tokens over seconds."""
        tokens, seconds = self.tokens_and_seconds(prompts)
        return tokens / seconds

    def recorded(self, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(accepted [S], drafted [S]) of the steps that count; those at a text's end, without room, among them."""
        steps = [step for prompt in prompts for step in self.middle(prompt).steps]
        return (
            torch.tensor([step.num_accepted_tokens for step in steps]),
            torch.tensor([step.num_draft_tokens for step in steps]),
        )


def lanes_of(engine: Engine, args: argparse.Namespace) -> list[Lane]:
    """Plain, fixed lengths, the long run, and every rule at every threshold; rules that cannot run are left out with a
    message."""
    base: dict[str, Any] = {"method": args.method}
    if args.draft is not None:
        base["model"] = args.draft
    lanes = [Lane("plain", 0, engine.with_method(None))]
    shares = engine.with_method(speculative_config({**base, "num_speculative_tokens": args.most}))
    lengths = range(1, args.longest + 1)
    lanes += [Lane("fixed", n, shares.with_method({**base, "num_speculative_tokens": n})) for n in lengths]
    lanes.append(Lane("long", args.most, shares))
    for rule in args.rules.split(","):
        config: dict[str, Any] = {**base, "num_speculative_tokens": args.most}
        try:
            if rule == "specdec":
                known = {one.name for one in fields(shares.speculative)}
                if args.acceptance is not None and "acceptance" in known:
                    config["acceptance"] = args.acceptance
            with_head = shares.with_method({**config, "shape": shape_of(rule, RULES[rule][0])})
            with_head.generate([1, 2], max_new_tokens=4)  # raises here, at the latest, where something is missing
            for threshold in RULES[rule]:
                own = speculative_config({**config, "shape": shape_of(rule, threshold)})
                lanes.append(Lane(rule, threshold, with_head.with_method(own, method=with_head.method)))
        except (ForetellError, KeyError, OSError) as error:
            print(f"{rule} left out: {error}\n", flush=True)
    return lanes


def shape_of(rule: str, threshold: float) -> str:
    """The shape of a stop."""
    if rule == "specdec":
        return f"specdec/threshold={threshold:g}"
    return f"adaptive/rule={rule}/threshold={threshold:g}"


def record(lanes: Sequence[Lane], encoded: Sequence[list[int]], params: SamplingParams, rounds: int) -> None:
    """All lanes on each prompt in an order that turns, after a short run of each that is not counted."""
    for lane in lanes:
        measure(lane.engine, encoded[0], replace(params, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True))
    for turn in range(rounds):
        for index, ids in enumerate(encoded):
            print(f"\rround {turn + 1} of {rounds}, prompt {index + 1} of {len(encoded)} ", end="", file=sys.stderr)
            start = (index + turn) % len(lanes)
            for lane in [*lanes[start:], *lanes[:start]]:
                run = measure(lane.engine, ids, replace(params, seed=index))
                lane.cuts.setdefault(index, []).append(cut(run))
                lane.steps.setdefault(index, []).extend(run.steps[1:])  # the first reads the prompt
                lane.texts[index] = run.token_ids
    print(file=sys.stderr)


@dataclass(frozen=True)
class Model:
    """One table of costs for all policies."""

    draft: float  # c: a pass of the drafter, in plain passes
    verify: PassCosts

    @classmethod
    def of(cls, costs: StepCosts) -> "Model":
        """From medians over the steps of the fixed lengths."""
        each = [cost / count for count, cost in costs.draft.items() if count]
        points = {1: 1.0, **{count + 1: cost for count, cost in costs.verify.items() if count}}
        return cls(statistics.median(each), PassCosts.of(points))

    @classmethod
    def given(cls, draft: float, most: int) -> "Model":
        """A guess at this cost, a pass of the target at 1 whatever its width."""
        return cls(draft, PassCosts.of({1: 1.0, most + 1: 1.0}))

    def speed(self, lane: Lane, prompts: Sequence[int], most: int) -> float:
        """Tokens a plain pass. A rule that stops early has read one guess more than it decided on, but for "path"."""
        accepted, drafted = lane.recorded(prompts)
        passes = (
            drafted if lane.family in ("fixed", "long", "path") else torch.where(drafted < most, drafted + 1, drafted)
        )
        passes = torch.where(drafted == 0, 0, passes)
        return policy_speed(accepted, drafted, self.draft, passes=passes, target_cost=self.verify)

    def oracle(self, lane: Lane, prompts: Sequence[int]) -> float:
        """The most that stopping could reach on the steps of the long run."""
        return oracle_speed(lane.recorded(prompts)[0], self.draft, target_cost=self.verify)


def best_of(lanes: Sequence[Lane], family: str, prompts: Sequence[int]) -> Lane | None:
    """Of a family's lanes the one of most tokens/s on these prompts."""
    return max(
        (lane for lane in lanes if lane.family == family),
        key=lambda lane: lane.tokens_per_second(prompts),
        default=None,
    )


def rows(lanes: Sequence[Lane], model: Model, category: str, prompts: Sequence[int], most: int) -> list[dict[str, Any]]:
    """Figures of one category: every family at its best, and the oracle."""
    plain, long = (next(lane for lane in lanes if lane.family == family) for family in ("plain", "long"))
    fixed = best_of(lanes, "fixed", prompts)
    assert fixed is not None
    by_model = max(
        (lane for lane in lanes if lane.family == "fixed"), key=lambda lane: model.speed(lane, prompts, most)
    )
    base, top = model.speed(by_model, prompts, most), model.oracle(long, prompts)
    out = []
    for family in ("fixed", *RULES):
        chosen = best_of(lanes, family, prompts)
        if chosen is None:
            continue
        accepted, drafted = chosen.recorded(prompts)
        pairs = []
        for prompt in prompts:
            ours, theirs = chosen.middle(prompt), fixed.middle(prompt)
            pairs.append(PairedRuns(len(theirs.token_ids), theirs.seconds, len(ours.token_ids), ours.seconds))
        against = bootstrap(pairs)
        same_family = [lane for lane in lanes if lane.family == family]
        modelled = max(same_family, key=lambda lane: model.speed(lane, prompts, most))
        speed = model.speed(modelled, prompts, most)
        out.append(
            {
                "category": category,
                "policy": chosen.label,
                "tokens_per_step": 1 + float(accepted.double().mean()),
                "guesses_per_step": float(drafted.double().mean()),
                "tokens_per_second": chosen.tokens_per_second(prompts),
                "against_plain": chosen.tokens_per_second(prompts) / plain.tokens_per_second(prompts),
                "against_fixed": (against.value, against.low, against.high),
                "modelled_policy": modelled.label,
                "modelled": speed,
                "modelled_gain": speed / base - 1,
                "share_of_oracle": (speed - base) / (top - base) if top > base else None,
            }
        )
    out.append({"category": category, "policy": "oracle", "modelled": top, "modelled_gain": top / base - 1})
    return out


def modelled(
    lanes: Sequence[Lane], model: Model, prompts: Sequence[int], most: int, resamples: int = 1000
) -> list[dict[str, Any]]:
    """Every family at the length or threshold that is best by the model, beside the best fixed length; the oracle."""
    long = next(lane for lane in lanes if lane.family == "long")
    families = {name: [lane for lane in lanes if lane.family == name] for name in ("fixed", *RULES)}
    best = {name: max(own, key=lambda lane: model.speed(lane, prompts, most)) for name, own in families.items() if own}
    generator = torch.Generator().manual_seed(0)
    samples = [
        [prompts[index] for index in drawn]
        for drawn in torch.randint(len(prompts), (resamples, len(prompts)), generator=generator).tolist()
    ]
    fixed = [model.speed(best["fixed"], drawn, most) for drawn in samples]
    base = model.speed(best["fixed"], prompts, most)
    out: list[dict[str, Any]] = []
    for name, lane in best.items():
        accepted, drafted = lane.recorded(prompts)
        speed = model.speed(lane, prompts, most)
        gains = torch.tensor(
            [model.speed(lane, drawn, most) / there - 1 for drawn, there in zip(samples, fixed, strict=True)]
        )
        out.append(
            {
                "draft_cost": model.draft,
                "policy": lane.label,
                "tokens_per_step": 1 + float(accepted.double().mean()),
                "guesses_per_step": float(drafted.double().mean()),
                "modelled": speed,
                "gain": None if name == "fixed" else speed / base - 1,
                "interval": None if name == "fixed" else gains.quantile(torch.tensor(tails(len(prompts)))).tolist(),
            }
        )
    top = model.oracle(long, prompts)
    return [*out, {"draft_cost": model.draft, "policy": "oracle", "modelled": top, "gain": top / base - 1}]


def show_modelled(found: Sequence[dict[str, Any]]) -> None:
    """One Markdown table."""
    print("| c | policy | tokens a step | guesses a step | tokens a pass | gain |\n|--:|---|--:|--:|--:|---|")
    for one in found:
        gain = "-" if one["gain"] is None else f"{one['gain']:+.1%}"
        if one.get("interval"):
            gain += " [{:+.1%}, {:+.1%}]".format(*one["interval"])
        cells = [
            f"{one['draft_cost']:g}",
            one["policy"],
            number(one.get("tokens_per_step")),
            number(one.get("guesses_per_step")),
            number(one["modelled"], 3),
            gain,
        ]
        print("| " + " | ".join(cells) + " |")


def show(found: Sequence[dict[str, Any]]) -> None:
    """One Markdown table."""
    columns = (
        "category", "policy", "tokens a step", "guesses a step", "tokens/s", "x plain", "x best fixed", "modelled at",
        "tokens a pass", "gain", "of the oracle's",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|---|---|" + "--:|" * (len(columns) - 2))
    for one in found:
        against = one.get("against_fixed")
        share = one.get("share_of_oracle")
        is_fixed = one["policy"].startswith("fixed")
        cells = [
            one["category"],
            one["policy"],
            number(one.get("tokens_per_step")),
            number(one.get("guesses_per_step")),
            number(one.get("tokens_per_second"), 1),
            number(one.get("against_plain")),
            "-" if against is None or is_fixed else "{:.3f} [{:.3f}, {:.3f}]".format(*against),
            one.get("modelled_policy", "-"),
            number(one["modelled"]),
            "-" if is_fixed else f"{one['modelled_gain']:+.1%}",
            "-" if share is None or is_fixed else f"{share:.0%}",
        ]
        print("| " + " | ".join(cells) + " |")


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--draft", default="bundled/draft", help="its weights; '' for the method's own default")
    parser.add_argument("--acceptance", help="the acceptance head of specdec; default: the bundled one")
    parser.add_argument("--categories")
    parser.add_argument("--prompts-per-category", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=8, help="fixed lengths are 1 to this")
    parser.add_argument("--most", type=int, default=16, help="guesses of the long run, and most of a rule's")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--draft-cost", type=float, action="append", help="no clock: see above; may be repeated")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.draft = args.draft or None
    torch.set_num_threads(args.threads)
    print("```text\npython -m benchmarks.stopping " + shlex.join(sys.argv[1:]) + "\n```\n", flush=True)
    engine = Engine.load(args.target, dtype=args.dtype)
    wanted = args.categories.split(",") if args.categories else None
    items = select(load_suite("bundled"), categories=wanted, limit=args.prompts_per_category)
    encoded = [encode_item(engine, item) for item in items]
    kept = [index for index, ids in enumerate(encoded) if len(ids) < engine.model.spec.max_positions]
    items, encoded = [items[index] for index in kept], [encoded[index] for index in kept]
    lanes = lanes_of(engine, args)
    params = SamplingParams(temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    record(lanes, encoded, params, args.rounds)

    every = list(range(len(items)))
    same = sum(lane.texts == lanes[0].texts for lane in lanes)
    if args.draft_cost:
        by_cost = [
            row for cost in args.draft_cost for row in modelled(lanes, Model.given(cost, args.most), every, args.most)
        ]
        show_modelled(by_cost)
        print(f"\ntemperature {args.temperature:g}, {len(items)} prompts")
        print(f"policies whose texts are plain decoding's own: {same} of {len(lanes)}")
        if args.json:
            args.json.write_text(as_json({"argv": sys.argv[1:], "rows": by_cost}, pretty=True), encoding="utf-8")
        return 0 if same == len(lanes) else 1
    passes = {
        family: [step for lane in lanes if lane.family == family for prompt in every for step in lane.steps[prompt]]
        for family in ("plain", "fixed", "long")
    }
    costs = step_costs(passes["plain"], passes["fixed"] + passes["long"], split=True)
    model = Model.of(costs)
    groups = {
        name: [i for i in every if items[i].category == name] for name in dict.fromkeys(x.category for x in items)
    }
    found = []
    for name, prompts in {**groups, "all": every}.items():
        found += rows(lanes, model, name, prompts, args.most)
    show(found)
    widths = "  ".join(f"{nodes}: {cost:.2f}" for nodes, cost in model.verify.points)
    print(f"\nc = {model.draft:.3f}; a pass over so many nodes, in plain passes: {widths}")
    print(f"plain pass {1e3 * costs.seconds_plain_pass:.2f} ms; temperature {args.temperature:g}, {args.rounds} rounds")
    print(f"policies whose texts are plain decoding's own: {same} of {len(lanes)}")
    winners = [
        one["category"]
        for one in found
        if one["policy"].startswith("specdec") and one["category"] != "all" and one["against_fixed"][0] > 1
    ]
    if any(lane.family == "specdec" for lane in lanes):
        print(f"specdec is faster than the best fixed length on: {', '.join(winners) or 'none'}")
    if args.json:
        sweep = [
            {"category": name, "policy": lane.label, "tokens_per_second": lane.tokens_per_second(prompts),
             "modelled": model.speed(lane, prompts, args.most)}
            for name, prompts in {**groups, "all": every}.items() for lane in lanes if lane.family != "plain"
        ]  # fmt: skip
        args.json.write_text(
            as_json({"argv": sys.argv[1:], "rows": found, "sweep": sweep, "costs": costs.to_dict()}, pretty=True),
            encoding="utf-8",
        )
    return 0 if same == len(lanes) else 1


if __name__ == "__main__":
    sys.exit(main())
