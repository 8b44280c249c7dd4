"""The paper's shift experiment: domains in turn, a draft that stays as it is against one that learns while it serves.

    python -m benchmarks.online --requests 160 --seeds 3 > online.md
    python -m benchmarks.online --requests 40 --seeds 1 --domains code mathematics          # two minutes
    python -m benchmarks.online --timed --target build/inflated --requests 160 --seeds 2    # live tokens/s as well

Online Speculative Decoding (2310.07177, section 5.3) changes the domain of the requests and watches acceptance. The draft
here is the bundled one, first *specialised*: trained on its target's texts of the first domain alone until it has lost the
others, as a draft distilled for yesterday's traffic has. Then ``--requests`` of each domain are served, by the draft as it
is and by one that learns, with the same seeds: under the verifier ``coupled`` every token must be equal, which is checked.

Acceptance is the share of first guesses kept. For each domain: its first and its last quarter of the requests, static and
online, mean over seeds with 95 % of a t interval. Forgetting: fresh requests of each earlier domain after the last one,
by the draft as it was when it left that domain and as it is at the end. With --timed: tokens/s of the last quarter, both
arms in turn on each request, the online arm as it stands (its learning is not on the clock; see ``serving``, below, for
that); with a target inflated by recipes.inflate a step costs what one of a large model does.

    python -m benchmarks.online --serving --requests 64 --concurrency 1 4 16 --rounds 5

``--serving`` measures what learning costs those who are served: paired rounds of the same requests through a service, with
``learn`` and without, in turn: tokens/s and the 99th percentile of the time between tokens.
"""

import argparse
import inspect
import json
import math
import pkgutil
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from recipes.problems import problem

from foretell import Engine, SamplingParams
from foretell.engine.options import ServiceOptions
from foretell.engine.result import Completion
from foretell.engine.service import Service
from foretell.engine.submission import Submission, Update
from foretell.learn.capture import Capture, CaptureState
from foretell.learn.export import export
from foretell.learn.options import LearnOptions
from foretell.learn.session import Session
from foretell.learn.student import Origin, Student
from foretell.learn.texts import Text
from foretell.planner.account import Allowance

DOMAINS = ("code", "mathematics", "prose", "copy")
PARTS = 4  # of a domain's requests: the first and the last are compared


# -- the domains: unlimited prompts, without a network ------------------------------------------------------------------


def sources() -> list[str]:
    """Source files of the standard library, in a fixed order."""
    found = []
    for module in sorted(pkgutil.iter_modules(), key=lambda one: one.name):
        if module.name in sys.stdlib_module_names and not module.name.startswith("_"):
            path = getattr(module.module_finder, "path", "")
            file = Path(path) / f"{module.name}.py"
            if file.is_file() and file.stat().st_size > 4000:
                found.append(file.read_text(encoding="utf-8", errors="replace"))
    return found


def prompts(engine: Engine, domain: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of ``count`` prompts of a domain; of another seed, others."""
    r, made = random.Random(f"{domain}/{seed}"), list[list[int]]()
    files = sources() if domain != "mathematics" else []
    paragraphs = [part for text in files for part in _paragraphs(text)] if domain in ("prose", "copy") else []
    while len(made) < count:
        if domain == "mathematics":
            question = problem(f"online/{seed}", r.randrange(1 << 30)).question
            made.append(engine.chat_prompt([{"role": "user", "content": question}]))
        elif domain == "code":
            lines = r.choice(files).splitlines()
            begin = r.randrange(max(1, len(lines) - 30))
            made.append(engine._encode("\n".join(lines[begin : begin + 12]))[:96])
        elif domain == "prose":
            made.append(engine._encode(r.choice(paragraphs))[:48])
        elif domain == "copy":
            text = r.choice(paragraphs)[:400]
            made.append(engine.chat_prompt([{"role": "user", "content": f"Repeat this text exactly.\n{text}"}])[:192])
        else:
            raise SystemExit(f"domain {domain!r} is not one of {', '.join(DOMAINS)}")
    return made


def _paragraphs(source: str) -> list[str]:
    """Docstrings of a module, its first and those of its functions, as prose."""
    pieces = source.split('"""')[1::2]
    whole = [inspect.cleandoc(piece) for piece in pieces]
    return [text for text in whole if len(text) > 200 and ">>>" not in text]


# -- a draft for yesterday's traffic ------------------------------------------------------------------------------------


def collect(engine: Engine, given: Sequence[Sequence[int]], params: SamplingParams) -> list[Text]:
    """The target's texts with its distributions."""
    capture, texts = Capture(Allowance(1.0, most=1e9), max_length=1024, max_bytes=1 << 33), list[Text]()

    def observe(event: Any) -> None:
        for row in event.rows:
            if row.capture is None:
                row.capture = CaptureState("", "", ())
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
    """A draft over all domains: of each request the first guesses made and kept, its tokens and its seconds."""

    session: Session
    kept: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    seconds: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    texts: dict[int | None, list[int]] = field(default_factory=dict)  # by seed

    def take(self, domain: str, one: Completion) -> None:
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


def load(args: argparse.Namespace, draft: str) -> Engine:
    return Engine.load(
        args.target,
        speculative={"method": "draft_model", "model": draft, "num_speculative_tokens": args.guesses,
                     "verify": args.verify},
    )  # fmt: skip


def trial(args: argparse.Namespace, draft: str, seed: int) -> dict[str, Any]:
    """One seed: both arms over all domains, then forgetting."""
    options = LearnOptions(where="inline", learn_share=1.0, seed=seed, learn_lr=args.lr, learn_every=args.every,
                           replay=args.replay, batch_texts=args.batch)  # fmt: skip
    arms = {"static": Arm(Session(load(args, draft), None, max_rows=args.rows)),
            "online": Arm(Session(load(args, draft), options, max_rows=args.rows))}  # fmt: skip
    params = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=1000 * seed)
    engine, learner = arms["static"].session.engine, arms["online"].session.learner
    assert learner is not None
    left: dict[str, float] = {}
    probes = {domain: prompts(engine, domain, args.probes, 900 + seed) for domain in args.domains}
    for domain in args.domains:
        given = prompts(engine, domain, args.requests, seed)
        for begin in range(0, len(given), args.rows):
            for arm in arms.values():  # in turn, so that a busy machine is busy for both
                for one in arm.session.run(given[begin : begin + args.rows], params):
                    arm.take(domain, one)
        left[domain] = probe(args, learner, probes[domain], draft)
    equal = arms["static"].texts == arms["online"].texts
    if args.verify == "coupled" and not equal:
        raise SystemExit("texts differ between the arms: learning changed what the target writes")
    end = {domain: probe(args, learner, probes[domain], draft) for domain in args.domains}
    figures = learner.figures()
    out = {
        "seed": seed,
        "rates": {d: {n: [arm.rate(d, 0), arm.rate(d, PARTS - 1)] for n, arm in arms.items()} for d in args.domains},
        "speeds": {d: {n: arm.speed(d, PARTS - 1) for n, arm in arms.items()} for d in args.domains},
        "forgot": {d: left[d] - end[d] for d in args.domains[:-1]},
        "swaps": figures.num_swaps, "refused": figures.num_refused, "reverts": figures.num_reverts,
        "updates": figures.num_updates, "learning": figures.seconds_learning, "capture": figures.seconds_serving,
        "equal": equal,
    }  # fmt: skip
    arms["online"].session.close()
    return out


def probe(args: argparse.Namespace, learner: Any, given: Sequence[Sequence[int]], draft: str) -> float:
    """Acceptance of fresh requests by the weights that serve now, learning nothing."""
    engine = load(args, draft)
    served_one = next(iter(learner.adapters.by_name.values()))
    engine = engine.with_method(engine.speculative, method=served_one.method.serving[1])
    params = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=5)
    steps = [
        step for one in engine.generate_batch([list(ids) for ids in given], params) for step in one.steps if step[0]
    ]
    return sum(accepted > 0 for _, accepted in steps) / max(1, len(steps))


# -- what it costs those who are served ----------------------------------------------------------------------------------


def serving(args: argparse.Namespace) -> None:
    """Paired rounds through a service, with learning and without."""
    engine = load(args, "bundled/draft")
    given = [
        ids for domain in args.domains for ids in prompts(engine, domain, -(-args.requests // len(args.domains)), 1)
    ]
    random.Random(0).shuffle(given)
    lines = [
        "| at once | tokens/s, learning : not | 95 % | p99 between tokens, ms | ratio | learner's seconds |",
        "|--|--|--|--|--|--|",
    ]
    for concurrency in args.concurrency:
        services = {}
        for name, learn in (("off", None), ("on", LearnOptions())):
            limits = ServiceOptions(max_num_seqs=concurrency, speculation="on")
            services[name] = Service(load(args, "bundled/draft"), limits, learn=learn)
            services[name].start()
        ratios, gaps = list[float](), {"off": list[float](), "on": list[float]()}
        for number in range(args.rounds + 1):
            speeds = {}
            for name in ("off", "on") if number % 2 else ("on", "off"):
                speeds[name], found = _round(services[name], given, concurrency, args, number)
                if number:  # the first warms up
                    gaps[name] += found
            if number:
                ratios.append(speeds["on"] / speeds["off"])
        p99 = {name: sorted(values)[int(0.99 * len(values))] for name, values in gaps.items()}
        figures = services["on"].snapshot().learn
        assert figures is not None
        low, high = _interval(ratios)
        lines.append(
            f"| {concurrency} | {statistics.mean(ratios):.3f} | {low:.3f} to {high:.3f} | {1000 * p99['on']:.1f} : "
            f"{1000 * p99['off']:.1f} | {p99['on'] / p99['off']:.2f} | {figures.seconds_learning:.1f} |"
        )
        for service in services.values():
            service.close()
    print("\n".join(lines))


def _round(
    service: Service, given: Sequence[Sequence[int]], concurrency: int, args: argparse.Namespace, number: int
) -> tuple[float, list[float]]:
    """(tokens/s, seconds between the updates of each request)."""
    gaps, tokens = list[float](), 0
    room, lock = threading.Semaphore(concurrency), threading.Lock()
    begun = perf_counter()

    def sink(last: list[float]) -> Any:
        def take(update: Update) -> None:
            nonlocal tokens
            now = perf_counter()
            if last and update.pieces:
                gaps.append(now - last[0])
            last[:] = [now]
            if update.is_last:
                with lock:
                    tokens += update.completion.num_tokens if update.completion else 0
                room.release()

        return take

    for index, ids in enumerate(given):
        room.acquire()
        params = SamplingParams(temperature=args.temperature, max_new_tokens=args.tokens, seed=index)
        service.submit(Submission(f"{number}-{index}", list(ids), params), sink([]))
    for _ in range(concurrency):
        room.acquire()
    seconds = perf_counter() - begun
    sleep(0.1)
    return tokens / seconds, gaps


# -- tables -------------------------------------------------------------------------------------------------------------


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of a t interval; the value itself of one."""
    if len(values) < 2:
        return values[0], values[0]
    t = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}.get(len(values) - 1, 2.0)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return mean - half, mean + half


def _said(values: Sequence[float]) -> str:
    low, high = _interval(values)
    return f"{statistics.mean(values):.3f}" + (f" ({low:.3f} to {high:.3f})" if len(values) > 1 else "")


def table(found: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown."""
    names = ["domain", "static, first to last quarter", "online, the same", "online above static, last quarter"]
    names += ["forgotten at the end", *(["tokens/s, online : static"] if args.timed else [])]
    lines = ["| " + " | ".join(names) + " |", "|--" * len(names) + "|"]
    for domain in args.domains:
        rates = [one["rates"][domain] for one in found]
        cells = [" → ".join(_said([rate[name][k] for rate in rates]) for k in (0, 1)) for name in ("static", "online")]
        rise = _said([rate["online"][1] - rate["static"][1] for rate in rates])
        forgot = _said([one["forgot"][domain] for one in found]) if domain in found[0]["forgot"] else "-"
        speed = ""
        if args.timed:
            speed = (
                " " + _said([one["speeds"][domain]["online"] / one["speeds"][domain]["static"] for one in found]) + " |"
            )
        lines.append(f"| {domain} | {cells[0]} | {cells[1]} | {rise} | {forgot} |{speed}")
    sums = ", ".join(f"{name} {sum(one[name] for one in found)}" for name in ("updates", "swaps", "refused", "reverts"))
    lines.append("")
    learning, captured = (sum(one[name] for one in found) for name in ("learning", "capture"))
    equal = all(one["equal"] for one in found)
    lines.append(f"{sums}; learning {learning:.0f} s, capture and swaps {captured:.1f} s; texts equal: {equal}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", default="bundled/draft")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS))
    parser.add_argument("--requests", type=int, default=160, help="of each domain")
    parser.add_argument("--probes", type=int, default=24, help="fresh requests of each domain, for forgetting")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--guesses", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--verify", default="coupled")
    parser.add_argument("--rows", type=int, default=4, help="requests at once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--replay", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--special-texts", type=int, default=192)
    parser.add_argument("--special-epochs", type=int, default=2)
    parser.add_argument("--special-lr", type=float, default=2e-3)
    parser.add_argument("--work", type=Path, help="where the specialised draft is kept")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--serving", action="store_true")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.rows = 1 if args.timed else args.rows  # else a request's seconds are those of others, too
    if args.serving:
        serving(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        special = (args.work or Path(folder)) / f"draft-{args.domains[0]}"
        if not special.is_dir():
            special.parent.mkdir(parents=True, exist_ok=True)
            with torch.inference_mode(mode=False):
                specialise(load(args, args.draft), args.draft, args.domains[0], special, args)
        found = []
        for seed in range(1, args.seeds + 1):
            found.append(trial(args, str(special), seed))
            print(f"seed {seed}: {json.dumps(found[-1])}", file=sys.stderr)
    print(table(found, args))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
