"""The paper's shift experiment: domains in turn, a drafter that stays as it is against one that learns while it serves.

    python -m benchmarks.online --requests 160 --seeds 3 --json online.json
    python -m benchmarks.online --requests 40 --seeds 1 --domains code mathematics          # two minutes
    python -m benchmarks.online --method eagle3 --requests 80 --seeds 2                     # a head, as it is bundled
    python -m benchmarks.online --timed --target build/inflated --requests 96 --seeds 1     # live tokens/s as well
    python -m benchmarks.online --serving --requests 64 --concurrency 1 4 16    # see online_serving.py
    python -m benchmarks.online --exported --method eagle3 --requests 500                   # see online_exported.py

Online Speculative Decoding (2310.07177, section 5.3) changes the domain of the requests and watches acceptance. The draft
model here is the bundled one, first *specialised*: trained on its target's texts of the first domain alone until it has
lost the others, as a draft distilled for yesterday's traffic has. A head begins as it is bundled. Then ``--requests`` of
each domain are served, by the drafter as it is and by one that learns, with the same seeds: under the verifier ``coupled``
every token must be equal, which is checked.

Acceptance is the share of first guesses kept. For each domain: its first and its last quarter of the requests, static and
online, mean over seeds with 95 % of a t interval. Forgetting: fresh requests of each earlier domain after the last one,
by the drafter as it was when it left that domain and as it is at the end. With --timed: tokens/s of the last quarter, both
arms in turn on each request, the online arm as it stands (its training is not on the clock: --serving measures that); with
a target inflated by recipes.inflate a step costs what one of a large model does.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import online_exported, online_serving
from benchmarks.domains import DOMAINS, prompts
from benchmarks.figures import said

from foretell import Engine, SamplingParams
from foretell.engine.request.result import Completion
from foretell.engine.threads import Allowance
from foretell.learn.capture import Capture, CaptureState
from foretell.learn.options import LearnOptions
from foretell.learn.session import Session
from foretell.learn.training.pool import export
from foretell.learn.training.student import Origin, Student
from foretell.learn.training.texts import Text

PARTS = 4  # of a domain's requests: the first and the last are compared


# -- a draft for yesterday's traffic ------------------------------------------------------------------------------------


def collect(engine: Engine, given: Sequence[Sequence[int]], params: SamplingParams) -> list[Text]:
    """The target's texts with its distributions."""
    capture, texts = Capture(Allowance(1.0, most=1e9), max_length=1024, max_bytes=1 << 33), list[Text]()

    def observe(event: Any) -> None:
        for row in event.rows:
            if row.capture is None:
                row.capture = CaptureState("", ())
        texts.extend(text.reduced(64) for _, text in capture.observe(event))

    engine.observers.append(observe)
    engine.generate_batch([list(ids) for ids in given], params)
    engine.observers.remove(observe)
    return texts


def specialise(engine: Engine, draft: str, domain: str, out: Path, args: argparse.Namespace) -> None:
    """Write a draft that knows the first domain alone: the given one, trained on texts of that domain at a high rate."""
    params = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=77)
    texts = collect(engine, prompts(engine, domain, args.special_texts, 77), params)
    options = LearnOptions(learn_lr=args.special_lr, where="inline")
    student = Student(Origin("draft_model", draft, engine.model.spec, None, 1), options)
    r = random.Random(0)
    for _ in range(args.special_epochs):
        r.shuffle(texts)
        for begin in range(0, len(texts), 4):
            for text in texts[begin : begin + 4]:
                student.learn(text, 0.25)
            student.apply()
    export(student, student.weights(), out)


# -- one arm ------------------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """A drafter over all domains: of each request the first guesses made and kept, its tokens and its seconds."""

    session: Session
    kept: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    seconds: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    texts: dict[int | None, list[int]] = field(default_factory=dict)  # by seed

    def take(self, domain: str, one: Completion) -> None:
        """A request has ended."""
        guessed = [accepted > 0 for drafted, accepted in one.steps if drafted]
        self.kept.setdefault(domain, []).append((len(guessed), sum(guessed)))
        self.seconds.setdefault(domain, []).append((one.num_tokens, one.seconds_decode))
        self.texts[one.seed] = one.token_ids

    def rate(self, domain: str, part: int) -> float:
        """Share of first guesses kept in one quarter of a domain's requests."""
        rows = _quarter(self.kept[domain], part)
        return sum(kept for _, kept in rows) / max(1, sum(made for made, _ in rows))

    def speed(self, domain: str, part: int) -> float:
        """Tokens/s of one quarter."""
        rows = _quarter(self.seconds[domain], part)
        return sum(tokens for tokens, _ in rows) / max(1e-9, sum(seconds for _, seconds in rows))


def _quarter(rows: Sequence[Any], part: int) -> Sequence[Any]:
    size = len(rows) // PARTS or 1
    return rows[part * size : (part + 1) * size] if part < PARTS - 1 else rows[(PARTS - 1) * size :]


def load(args: argparse.Namespace, draft: str | None) -> Engine:
    """The target with the drafter of a directory; None: the bundled one."""
    given = {"method": args.method, "num_speculative_tokens": args.guesses, "verify": args.verify, "shape": "chain"}
    return Engine.load(args.target, speculative=given if draft is None else {**given, "model": draft})


def options_of(args: argparse.Namespace, seed: int) -> LearnOptions:
    """How the online arm learns."""
    return LearnOptions(
        where="inline", learn_share=1.0, seed=seed, learn_lr=args.lr, learn_every=args.every, replay=args.replay,
        batch_texts=args.batch,
    )  # fmt: skip


def trial(args: argparse.Namespace, draft: str | None, seed: int) -> dict[str, Any]:
    """One seed: both arms over all domains, then forgetting."""
    arms = {"static": Arm(Session(load(args, draft), None, max_rows=args.rows)),
            "online": Arm(Session(load(args, draft), options_of(args, seed), max_rows=args.rows))}  # fmt: skip
    params = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=1000 * seed)
    engine, learner = arms["static"].session.engine, arms["online"].session.learner
    assert learner is not None
    (served,) = learner.adapters.of(None)
    left: dict[str, float] = {}
    probes = {domain: prompts(engine, domain, args.probes, 900 + seed) for domain in args.domains}

    def probe(domain: str) -> float:
        serving = engine.with_method(engine.speculative, method=served.method.serving[1])
        return online_exported.acceptance(serving, probes[domain], params_of(args))[0]

    for domain in args.domains:
        given = prompts(engine, domain, args.requests, seed)
        for begin in range(0, len(given), args.rows):
            for arm in arms.values():  # in turn, so that a busy machine is busy for both
                for one in arm.session.run(given[begin : begin + args.rows], params):
                    arm.take(domain, one)
        left[domain] = probe(domain)
    equal = arms["static"].texts == arms["online"].texts
    if args.verify == "coupled" and not equal:
        raise SystemExit("texts differ between the arms: learning changed what the target writes")
    figures = learner.figures()
    out = {
        "seed": seed,
        "rates": {
            d: {n: [arm.rate(d, part) for part in range(PARTS)] for n, arm in arms.items()} for d in args.domains
        },
        "speeds": {d: {n: arm.speed(d, PARTS - 1) for n, arm in arms.items()} for d in args.domains},
        "forgot": {d: left[d] - probe(d) for d in args.domains[:-1]},
        "swaps": figures.num_swaps, "refused": figures.num_refused, "reverts": figures.num_reverts,
        "updates": figures.num_updates, "learning": figures.seconds_learning, "capture": figures.seconds_serving,
        "equal": equal, "events": list(learner.events),
    }  # fmt: skip
    arms["online"].session.close()
    return out


def params_of(args: argparse.Namespace) -> SamplingParams:
    """Of fresh requests."""
    return SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=5)


# -- tables -------------------------------------------------------------------------------------------------------------


def table(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown."""
    names = ["domain", "static, first to last quarter", "online, the same", "online above static, last quarter"]
    names += ["forgotten at the end", *(["tokens/s, online : static"] if args.timed else [])]
    lines = ["| " + " | ".join(names) + " |", "|--" * len(names) + "|"]
    for domain in args.domains:
        rates = [one["rates"][domain] for one in found]
        cells = [" → ".join(said([rate[name][k] for rate in rates]) for k in (0, -1)) for name in ("static", "online")]
        rise = said([rate["online"][-1] - rate["static"][-1] for rate in rates])
        forgot = said([one["forgot"][domain] for one in found]) if domain in found[0]["forgot"] else "-"
        speeds = [one["speeds"][domain]["online"] / one["speeds"][domain]["static"] for one in found]
        last = f" {said(speeds)} |" if args.timed else ""
        lines.append(f"| {domain} | {cells[0]} | {cells[1]} | {rise} | {forgot} |{last}")
    sums = ", ".join(f"{name} {sum(one[name] for one in found)}" for name in ("updates", "swaps", "refused", "reverts"))
    learning, captured = (sum(one[name] for one in found) for name in ("learning", "capture"))
    equal = all(one["equal"] for one in found)
    lines.append(f"\n{sums}; training {learning:.0f} s, capture and swaps {captured:.1f} s; texts equal: {equal}")
    return "\n".join(lines)


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--target", default="bundled")
    add("--method", default="draft_model")
    add("--draft", help="the drafter to begin with; by default the bundled one")
    add("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    add("--requests", type=int, default=160, help="of each domain")
    add("--probes", type=int, default=24, help="fresh requests of each domain, for forgetting")
    add("--tokens", type=int, default=64)
    add("--guesses", type=int, default=3)
    add("--temperature", type=float, default=1.0)
    add("--verify", default="coupled")
    add("--rows", type=int, default=4, help="requests at once")
    add("--seeds", type=int, default=3)
    add("--first-seed", type=int, default=1)
    add("--lr", type=float)
    add("--every", type=int, default=LearnOptions.learn_every)
    add("--replay", type=int, default=LearnOptions.replay)
    add("--batch", type=int, default=LearnOptions.batch_texts)
    add("--special-texts", type=int, default=192)
    add("--special-epochs", type=int, default=2)
    add("--special-lr", type=float, default=2e-3)
    add("--work", type=Path, help="where the specialised draft is kept, and found again")
    add("--timed", action="store_true", help="tokens/s of both arms, one request at a time")
    add("--serving", action="store_true", help="what learning costs those who are served")
    add("--exported", action="store_true", help="learn --requests of the second domain, export, evaluate on all")
    add("--before", type=int, default=0, help="with --exported: requests of the first domain that are served first")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    add("--rounds", type=int, default=40, help="with --serving: pairs of windows")
    add("--seconds", type=float, default=2.0, help="with --serving: of a window")
    add("--json", type=Path)
    return parser


def main() -> None:
    """Command line."""
    args = parser_of().parse_args()
    args.rows = 1 if args.timed else args.rows  # else a request's seconds are those of others, too
    if args.serving:
        online_serving.measure(args, partial(load, args, args.draft))
        return
    if args.exported:
        online_exported.measure(args, partial(load, args), options_of(args, args.first_seed), params_of(args))
        return
    with tempfile.TemporaryDirectory() as folder:
        drafter = args.draft
        if args.method == "draft_model":
            special = (args.work or Path(folder)) / f"draft-{args.domains[0]}"
            if not special.is_dir():
                special.parent.mkdir(parents=True, exist_ok=True)
                draft = args.draft or "bundled/draft"
                with torch.inference_mode(mode=False):
                    specialise(load(args, draft), draft, args.domains[0], special, args)
            drafter = str(special)
        found = []
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            found.append(trial(args, drafter, seed))
            short = {name: value for name, value in found[-1].items() if name != "events"}
            print(f"seed {seed}: {json.dumps(short)}", file=sys.stderr, flush=True)
            if args.json is not None:  # after each, so that what was measured is not lost
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found, args))


if __name__ == "__main__":
    main()
