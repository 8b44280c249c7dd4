"""Judge decoding and other lossy rules: how much longer steps get, and what it costs in right answers.

    python -m benchmarks.papers judge --target T --draft D --suite gsm8k.jsonl --tokens 384 --answers build/judge.jsonl
    python -m benchmarks.judge --problems 400 --unanswerable 200          # the trained head, on the bundled target

Theirs (Judge, 2501.19309): Llama-3.1 8B drafts for 405B, accepted length 6.3 → 19.7, accuracy on GSM8K kept. AutoJudge
(2504.20039): up to 2x over plain speculation at -1 % accuracy on GSM8K. Ours, on a target that can solve word problems:
the rules that need no training, beside the exact one. At temperature 0 none of them changes anything, since no token but
the target's own has a probability there (the trained head may leave that support: ``off_support``), so the temperature is
0.6. Answers are judged by their number; an answer that reached ``--tokens`` is judged by what it has, and counted.

length: tokens a step. over exact: the ratio of lengths, 95 % by a bootstrap over questions. right: Wilson. difference:
the rule's share of right answers less the exact rule's, paired by question (Newcombe's method 10). kept: answers whose
number is the exact rule's. same text: answers whose tokens are. With --answers FILE a run that was stopped goes on.
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.answers import Answers, Engines, params
from benchmarks.papers.row import Line, Row, load, pair_options, questions

from foretell.bench import Item
from foretell.bench.answers import final_number
from foretell.bench.quality import Judge, quality
from foretell.bench.stats import Interval, bootstrap, wilson

RULES = "coupled,typical,top_n"
JUDGE_GAIN = 19.7 / 6.3


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.set_defaults(tokens=384)
    parser.add_argument("--rules", default=RULES, help="the first one is the exact one")
    parser.add_argument("--gamma", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--answers", type=Path, help="a file that answers are kept in")


def run(args: argparse.Namespace) -> Row:
    """Every rule on the same problems."""
    items = [item for item in questions(args) if item.check is not None]
    setting = [str(args.target), str(args.draft), args.gamma, args.temperature, args.tokens]
    answers = Answers(args.answers, setting, spread=True)
    engines = Engines(partial(load, args, num_speculative_tokens=args.gamma))
    rules = [rule for rule in args.rules.split(",") if rule]
    found: dict[str, dict[str, Any]] = {}
    for rule in rules:
        answers.complete(rule, items, partial(engines.of, rule), partial(params, args), batch_size=args.batch_size)
        found[rule] = compared(rule, rules[0], answers, items)
        print(_said(rule, found[rule]), flush=True)
    lines = []
    for rule in rules[1:]:
        gain, share, lost = (found[rule][name] for name in ("gain", "right", "difference"))
        lines.append(Line(f"`{rule}`: length over the exact rule's", JUDGE_GAIN, gain.value, gain.low, gain.high))
        lines.append(Line(f"`{rule}`: right", None, *_percent(share), " %"))
        lines.append(Line(f"`{rule}`: right, less exact", None, *_percent(lost), " points"))
    lines.append(Line("exact: right", None, *_percent(found[rules[0]]["right"]), " %"))
    best = max((found[rule]["gain"].value for rule in rules[1:]), default=1.0)
    most = (1 + args.gamma) / found[rules[0]]["length"]
    return Row(
        "judge", "Judge decoding, Bachmann et al. 2025, 2501.19309", "abstract; table of accepted lengths", lines,
        "won" if best > JUDGE_GAIN else "lost",
        f"with {args.gamma} guesses a step no rule could be more than {most:.2f} times as long as the exact one",
        {rule: {name: vars(x) if isinstance(x, Interval) else x for name, x in of.items()} for rule, of in found.items()},
    )  # fmt: skip


def compared(rule: str, exact: str, answers: Answers, items: list[Item]) -> dict[str, Any]:
    """Figures of a rule beside the exact one's: see the module."""
    judge, mine, theirs = Judge(), answers.of(rule, items), answers.of(exact, items)
    right, its = (
        {at: judge.right(item.check, record["text"]) for at, (item, record) in enumerate(zip(items, of, strict=True))}  # type: ignore[arg-type]
        for of in (mine, theirs)
    )
    part = quality(dict.fromkeys(range(len(items)), "problems"), right, its)[0]
    numbers = [
        (final_number(one["text"]), final_number(other["text"])) for one, other in zip(mine, theirs, strict=True)
    ]
    return {
        "length": answers.length(rule, items), "gain": bootstrap(answers.lengths(rule, exact, items)),
        "right": part.share, "num_right": part.num_right, "count": part.num_judged, "p": part.p_value,
        "exact_alone": part.num_plain_only, "rule_alone": part.num_method_only,
        "difference": paired_difference(part.num_method_only, part.num_plain_only, part.num_right, part.num_judged),
        "kept": sum(one == other for one, other in numbers), "same": answers.same(rule, exact, items),
        "cut": sum(one["finish"] == "length" for one in mine), "tokens": sum(len(one["ids"]) for one in mine),
    }  # fmt: skip


def _said(rule: str, of: dict[str, Any]) -> str:
    gain, share, lost = of["gain"], of["right"], of["difference"]
    return (
        f"{rule:>24}: length {of['length']:.2f}, over exact {gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}], right "
        f"{of['num_right']}/{of['count']} [{share.low:.0%}, {share.high:.0%}], difference {lost.value:+.0%} "
        f"[{lost.low:+.0%}, {lost.high:+.0%}], exact alone {of['exact_alone']}, rule alone {of['rule_alone']}, p "
        f"{of['p']:.3f}, kept {of['kept']}, same text {of['same']}, cut {of['cut']}, tokens {of['tokens']}"
    )


def _percent(of: Interval) -> tuple[float, float, float]:
    return 100 * of.value, 100 * of.low, 100 * of.high


def paired_difference(one: int, other: int, hits: int, count: int) -> Interval:
    """Share of one side less the other's on the same ``count`` questions, with its 95 % interval (Newcombe 1998, Statistics
    in Medicine 17, 2635: method 10, from Wilson's two intervals and the correlation of the sides).

    one, other: questions that only this side has right. hits: those that ``one``'s side has right in all. NaN, between -1
    and 1, of nothing.
    """
    if not count:
        return Interval(math.nan, -1.0, 1.0)
    both, second = hits - one, hits - one + other
    mine, theirs = wilson(hits, count), wilson(second, count)
    neither = count - both - one - other
    spread = hits * (count - hits) * second * (count - second)
    cross = float(both * neither - one * other)
    if cross > 0:
        cross = max(0.0, cross - count / 2)  # his correction for continuity
    phi = cross / math.sqrt(spread) if spread else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    value = mine.value - theirs.value
    low = reach(mine.value - mine.low, theirs.high - theirs.value)
    high = reach(mine.high - mine.value, theirs.value - theirs.low)
    return Interval(value, max(-1.0, value - low), min(1.0, value + high))
