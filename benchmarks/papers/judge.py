"""Judge decoding and other lossy rules: how much longer steps get, and what it costs in right answers.

    python -m benchmarks.papers judge --target T --draft D --suite gsm8k.jsonl --suite spec-bench.jsonl --tokens 192
    python -m benchmarks.judge --problems 400 --unanswerable 200          # the trained head, on the bundled target

Theirs (Judge, 2501.19309): Llama-3.1 8B drafts for 405B, accepted length 6.3 → 19.7, accuracy on GSM8K kept. AutoJudge
(2504.20039): up to 2x over plain speculation at -1 % accuracy on GSM8K. Ours, on a target that can solve word problems:
the rules that need no training, beside the exact one. At temperature 0 none of them changes anything, since no token but
the target's own has a probability there (the trained head may leave that support: ``off_support``), so the temperature is
0.6. Answers are judged by their number.
"""

import argparse
from typing import Any

from benchmarks.papers.row import Line, Row, load, pair_options, questions

from foretell import Request, SamplingParams
from foretell.bench import encode_item
from foretell.bench.quality import Judge, quality
from foretell.bench.script import answer_text
from foretell.engine.config import speculative_config

RULES = "coupled,typical,top_n,lenience"
JUDGE_GAIN = 19.7 / 6.3


def options(parser: argparse.ArgumentParser) -> None:
    """Of this row."""
    pair_options(parser)
    parser.set_defaults(tokens=192)
    parser.add_argument("--rules", default=RULES, help="the first one is the exact one")
    parser.add_argument("--gamma", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--batch-size", type=int, default=8)


def run(args: argparse.Namespace) -> Row:
    """Every rule on the same problems."""
    base = load(args, num_speculative_tokens=args.gamma)
    items = [item for item in questions(args) if item.check is not None]
    requests = [
        Request(
            encode_item(base, item), SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=at)
        )
        for at, item in enumerate(items)
    ]
    judge, groups = Judge(), dict.fromkeys(range(len(items)), "problems")
    found: dict[str, dict[str, Any]] = {}
    for rule in args.rules.split(","):
        config = speculative_config({**base.speculative.resolved(), "verify": rule})
        engine = base.with_method(config, method=base.method)
        done = engine.generate_batch(requests, batch_size=args.batch_size)
        right = {at: judge.right(items[at].check, answer_text(engine, one.token_ids)) for at, one in enumerate(done)}  # type: ignore[arg-type]
        length = 1 + sum(one.num_accepted_tokens for one in done) / sum(one.num_steps for one in done)
        first = next(iter(found.values()))["right"] if found else right
        found[rule] = {"right": right, "length": length, "quality": quality(groups, right, first)[0]}
        part = found[rule]["quality"]
        print(f"{rule:>24}: length {length:.2f}, right {part.num_right}/{part.num_judged} [{part.share.low:.0%}, "
              f"{part.share.high:.0%}], exact alone {part.num_plain_only}, rule alone {part.num_method_only}, "
              f"p {part.p_value:.3f}", flush=True)  # fmt: skip
    exact = next(iter(found.values()))
    lines = []
    for rule, entry in list(found.items())[1:]:
        share = entry["quality"].share
        lines.append(Line(f"`{rule}`: length over the exact rule's", JUDGE_GAIN, entry["length"] / exact["length"]))
        lines.append(Line(f"`{rule}`: right", None, 100 * share.value, 100 * share.low, 100 * share.high, " %"))
    share = exact["quality"].share
    lines.append(Line("exact: right", None, 100 * share.value, 100 * share.low, 100 * share.high, " %"))
    return Row(
        "judge", "Judge decoding, Bachmann et al. 2025, 2501.19309", "abstract; table of accepted lengths", lines, "lost",
        "the exact rule already keeps most of what this draft guesses right; no rule here trebles a step",
        {rule: {"length": entry["length"], "right": entry["quality"].num_right} for rule, entry in found.items()},
    )  # fmt: skip
