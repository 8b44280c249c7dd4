"""Who says that nobody knows? "The Impossible Test" on questions of our own, exact rules against lossy ones.

    python -m benchmarks.papers abstention --target T --draft D --answers build/abstention.jsonl [--seeds 1]

Suite ``abstention`` (72 open problems: 8 categories, 3 levels) is answered plainly and under each rule, with the same
seeds. An answer counts as right where it says that the answer is not known (``foretell.bench.quality``). Answers are kept
in a file, a line each: what is there is not answered again, and row ``agreement`` reads it. ``--method`` chooses another
drafter than a draft model. The report has shares with 95 % intervals (Wilson) by category and level, and pairs with plain
decoding (McNemar's exact test); under ``coupled`` every answer must be plain decoding's, token for token.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.answers import PLAIN, Answers, Engines, params
from benchmarks.papers.row import Line, Row, dtype_of

from foretell import Engine
from foretell.bench import read_suite
from foretell.bench.quality import Quality, quality, says_unknown
from foretell.bench.stats import wilson

RULES = "coupled,rejection,typical,top_n"
BEST, GPT4_HARD, GPT4_EASY = 0.68, 0.358, 0.200
PAPER = "Noever and McKee 2024, 2411.14486"


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--draft", help="weights of the method")
    parser.add_argument("--gamma", type=int, default=5, help="guesses in a line (default 5)")
    parser.add_argument("--rules", default=RULES)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seeds", type=int, default=1, help="answers of each question (default 1)")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="questions in all")
    parser.add_argument("--answers", type=Path, help="a file that answers are kept in")


def run(args: argparse.Namespace) -> Row:
    """Answer, judge, compare."""
    items = read_suite("abstention").items[: args.limit]
    setting = [str(args.target), args.method, str(args.draft), args.gamma, args.temperature, args.tokens]
    answers, engines = Answers(args.answers, setting, seeds=args.seeds), Engines(partial(engine, args))
    rules = [rule for rule in args.rules.split(",") if rule]
    for rule in [PLAIN, *rules]:
        answers.complete(rule, items, partial(engines.of, rule), partial(params, args), batch_size=args.batch_size)
    groups = {at: item.category for at, item in enumerate(items)}
    levels = {at: f"level {item.level}" for at, item in enumerate(items)}
    plain = judged(answers.of(PLAIN, items))
    found: dict[str, dict[str, Any]] = {}
    for rule in [PLAIN, *rules]:
        mine = judged(answers.of(rule, items))
        by = [
            *quality(_spread(groups, args.seeds), mine, plain),
            *quality(_spread(levels, args.seeds), mine, plain)[1:],
        ]
        same = answers.same(rule, PLAIN, items)
        found[rule] = {"parts": by, "same": same, "count": len(mine), "length": answers.length(rule, items)}
        whole = by[0]
        print(
            f"{rule:>24}: says so {whole.num_right}/{whole.num_judged} = {whole.share.value:.1%} "
            f"[{whole.share.low:.1%}, {whole.share.high:.1%}], plain alone {whole.num_plain_only}, rule alone "
            f"{whole.num_method_only}, p {whole.p_value:.3f}, same text {same}/{len(mine)}, "
            f"length {found[rule]['length']:.2f}",
            flush=True,
        )
    show_parts(found)
    first = found[PLAIN]["parts"]
    lines = [Line("best of twelve models / plain decoding here", BEST, *_shares(first[0]))]
    for name, theirs, level in (("hard", GPT4_HARD, "level 3"), ("easy", GPT4_EASY, "level 1")):
        parts = [part for part in first if part.category == level]  # none where few questions were asked
        lines += [Line(f"{name} questions: GPT-4 / plain decoding here", theirs, *_shares(part)) for part in parts]
    coupled = found.get("coupled")
    why = "coupled was not asked for"
    if coupled is not None:
        equal = coupled["same"] == coupled["count"]
        why = "under coupled every answer is plain decoding's" if equal else "COUPLED DIFFERS FROM PLAIN"
    return Row(
        "abstention", f'"The Impossible Test", {PAPER}', "abstract", lines, "other questions, other models: no verdict",
        why,
        {rule: {**entry, "parts": [vars(part) | {"share": vars(part.share)} for part in entry["parts"]]}
         for rule, entry in found.items()},
    )  # fmt: skip


def engine(args: argparse.Namespace) -> Engine:
    """The target with its drafter."""
    keys: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.gamma}
    if args.draft:
        keys["model"] = args.draft
    return Engine.load(args.target, speculative=keys, dtype=dtype_of(str(args.target)))


def judged(records: Sequence[dict[str, Any]]) -> dict[int, bool]:
    """Whether each answer says that nobody knows."""
    return {at: says_unknown(record["text"]) for at, record in enumerate(records)}


def _shares(part: Quality) -> tuple[float, float, float]:
    return part.share.value, part.share.low, part.share.high


def _spread(groups: dict[int, str], seeds: int) -> dict[int, str]:
    """The same for answers: question at with seed s is at * seeds + s."""
    return {at * seeds + s: name for at, name in groups.items() for s in range(seeds)}


def show_parts(found: dict[str, dict[str, Any]]) -> None:
    """A table: rules by categories and levels."""
    names = [part.category for part in next(iter(found.values()))["parts"]]
    print("\n| rule | " + " | ".join(names) + " |\n|---|" + "--:|" * len(names))
    for rule, entry in found.items():
        shares = [wilson(part.num_right, part.num_judged) for part in entry["parts"]]
        print(f"| `{rule}` | " + " | ".join(f"{s.value:.0%} [{s.low:.0%}, {s.high:.0%}]" for s in shares) + " |")
