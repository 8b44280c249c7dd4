"""Never slower, cell by cell: users x context x temperature x model x what guesses, as ``foretell serve`` would run them.

    python -m benchmarks.cells FILE [FILE ...] --out build/cells [--users 1,2,4,8,16,32] [--contexts 0,2048,8000]
    python -m benchmarks.cells --out build/cells --report

Arms of a cell: plain, what guesses where nothing is said ("default", and "suffix"), both by the planner's own choice, and
both in every step ("always"). All share the weights; each is a service of its own, with its own planner and kept prefixes.
A round gives every arm the same requests: so many users at once, each with the same document before its own question,
``--tokens`` new tokens (fewer for many users: --least), seeds fixed. All arms must write the same tokens, which is
counted. A document is read once an arm and kept as a prefix. The arms take turns of some 60 ms within a round, so that
what the machine does to one it does to all. Beside other work run it with real-time scheduling (``chrt -r 10``): threads
that wait for each other lose their cores for milliseconds at a time, which costs a small model most.

A cell's ratios are medians of paired rounds with 95 % bootstrap intervals: seconds and processor seconds of plain over
those of the arm. ``claimed`` is the service's own live speedup, ``measured`` the ratio of seconds. Each cell is a line of
JSON in a file for each model, written when it is done; cells that are there are not measured again.
"""

import argparse
import gc
import inspect
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import foretell
from foretell.engine import loop as loops
from foretell.engine.request.result import Update
from foretell.engine.request.row import Submission
from foretell.model.trained import default_speculation
from foretell.service.options import ServiceOptions
from foretell.service.service import Service

QUESTIONS = (
    "Summarize this in three sentences.", "Write a Python function that uses it.", "What could go wrong here?",
    "Explain the idea to a beginner.", "Write three unit tests.", "List the main steps.", "Rewrite the first part.",
    "Which names matter most, and why?",
)  # fmt: skip
TOPICS = ("rivers", "a parser for dates", "chess", "the moon", "bread", "sorting", "a poem about rain", "tax")
TURN_S = 0.06
MODULES = ("argparse", "typing", "inspect", "tarfile", "pathlib", "logging", "decimal")  # whose source is a document


class Turns:
    """Whose turn it is: one arm after another, each for some ``TURN_S`` seconds, while it has work. What the machine does
    to one arm it then does to all."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._waiting: list[Arm] = []  # in the order in which they came
        self._now: Arm | None = None

    def take(self, arm: "Arm") -> None:
        """Wait for it."""
        with self._news:
            self._waiting.append(arm)
            self._news.wait_for(lambda: self._now is None and self._waiting[0] is arm)
            self._now = self._waiting.pop(0)

    def give(self) -> None:
        """To who has waited longest."""
        with self._news:
            self._now = None
            self._news.notify_all()


class Arm:
    """A service, which counts what its steps take."""

    def __init__(self, name: str, engine: foretell.Engine, mode: str, options: dict[str, Any], turns: Turns) -> None:
        self.name, self._turns = name, turns
        self.seconds = self.used = 0.0
        self._begun: tuple[float, float] | None = None  # of the turn
        self.service = Service(engine, ServiceOptions(speculation=mode, **options))
        self.service.start()
        self.service.measure()
        self.service._measure_again = lambda: None  # another arm has the cores while this one has no work
        assert self.service._loop is not None
        self._loop, self._tick = self.service._loop, self.service._loop.tick
        self._loop.tick = self._step  # type: ignore[method-assign]
        self._ended, self._made = threading.Event(), dict[str, list[int]]()

    def _step(self) -> list[Any]:
        if self._begun is None:
            self._turns.take(self)
            self._begun = time.perf_counter(), time.process_time()
        try:
            return self._tick()
        finally:
            seconds, used = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
            if seconds > TURN_S or not self._loop.has_work:
                self.seconds, self.used, self._begun = self.seconds + seconds, self.used + used, None
                self._turns.give()

    def begin(self, prompts: Sequence[list[int]], tokens: int, temperature: float) -> None:
        """Submit requests."""
        self._ended.clear()
        self._made.clear()
        self.seconds = self.used = 0.0

        def sink(update: Update) -> None:
            if update.is_last:
                if update.completion is not None:
                    self._made[update.request_id] = update.completion.token_ids
                if len(self._made) == len(prompts) or update.completion is None:
                    self._ended.set()

        for index, prompt in enumerate(prompts):
            params = foretell.SamplingParams(
                temperature=temperature, seed=index, max_new_tokens=tokens, ignore_eos=True
            )
            self.service.submit(Submission(str(index), prompt, params), sink)

    def end(self, count: int) -> list[list[int]]:
        """Wait for them: their texts."""
        self._ended.wait()
        while self._begun is not None:  # the last tick ends after its sinks were told
            time.sleep(0.001)
        if len(self._made) != count:
            raise SystemExit(f"{self.name}: a request has failed; see the log")
        return [self._made[str(index)] for index in range(count)]


def interval(values: Sequence[float], resamples: int = 2000) -> list[float]:
    """The median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return [round(one, 4) for one in (statistics.median(values), medians[resamples // 40], medians[-resamples // 40])]


def document(engine: foretell.Engine, context: int) -> str:
    """A text of about so many tokens: source of the standard library."""
    text = "\n\n".join(inspect.getsource(__import__(name)) for name in MODULES) if context else ""
    return engine.tokenizer.decode(engine.tokenizer.encode(text)[:context]) if context else ""


def prompts_of(engine: foretell.Engine, text: str, users: int, number: int) -> list[list[int]]:
    """Of one round: the document first, then each user's own question."""
    rng = random.Random(number)
    asked = [f"{rng.choice(QUESTIONS)} The topic: {rng.choice(TOPICS)} ({number}.{user})." for user in range(users)]
    return [engine.chat_prompt([{"role": "user", "content": f"{text}\n\n{one}".strip()}]) for one in asked]


def measure(arms: Sequence[Arm], cell: dict[str, Any], text: str, rounds: int, tokens: int) -> dict[str, Any]:
    """One cell; arms[0] is plain."""
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    used: dict[str, list[float]] = {arm.name: [] for arm in arms}
    users, temperature, engine = cell["users"], cell["temperature"], arms[0].service.engine
    equal = count = 0
    for number in range(-1, rounds):  # the first is not counted: what arms learn, they learn of this cell's requests
        prompts = prompts_of(engine, text, users, number)
        for turn in range(len(arms)):
            arms[(turn + number) % len(arms)].begin(prompts, tokens, temperature)
        texts = [arm.end(users) for arm in arms]
        if number < 0:
            continue
        for arm in arms:
            seconds[arm.name].append(arm.seconds)
            used[arm.name].append(arm.used)
        equal += sum(all(one == same[0] for one in same) for same in zip(*texts, strict=True))
        count += users
    plain = arms[0].name
    found: dict[str, Any] = {**cell, "rounds": rounds, "tokens": tokens, "equal": f"{equal} of {count}"}
    found["plain_tok_s"] = round(users * tokens / statistics.median(seconds[plain]), 1)
    for arm in arms[1:]:
        faster = [a / b for a, b in zip(seconds[plain], seconds[arm.name], strict=True)]
        leaner = [a / b for a, b in zip(used[plain], used[arm.name], strict=True)]
        claimed = None if arm.service._costs is None else arm.service._costs.planner.speedup
        found[arm.name] = {"wall": interval(faster), "processor": interval(leaner), "claimed": claimed}
    return found


def report(folder: Path) -> None:
    """A table of all cells that are there."""
    print("model  context users T | plain tok/s | " + "default wall [interval] cpu claimed | suffix ... | best always")
    for file in sorted(folder.glob("*.jsonl")):
        for cell in map(json.loads, file.read_text().splitlines()):
            line = f"{file.stem[:12]:12s} {cell['context']:5d} {cell['users']:3d} {cell['temperature']:.0f} "
            line += f"| {cell['plain_tok_s']:7.1f} "
            for name in ("default", "suffix"):
                if name in cell:
                    (mid, low, high), cpu, said = cell[name]["wall"], cell[name]["processor"], cell[name]["claimed"]
                    claim = "" if said is None else f" {said:.2f}"
                    line += f"| {mid:.3f} [{low:.2f}, {high:.2f}] {cpu[0]:.3f} [{cpu[1]:.2f}, {cpu[2]:.2f}]{claim} "
            best = {name: cell[name]["wall"][0] for name in cell if name.startswith("always")}
            line += "| " + " ".join(f"{name.split()[1][:7]} {ratio:.2f}" for name, ratio in best.items())
            print(line + f" | {cell['equal']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--users", default="1,2,4,8,16,32")
    parser.add_argument("--contexts", default="0,2048,8000")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--arms", default="default,suffix,always default,always suffix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--least", type=int, default=16, help="tokens for most users")
    parser.add_argument("--memory", type=float, default=10.0, help="GiB of the arms' KV together")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    # What else runs is to leave the machine alone. An arm that works in turns would not get back threads that it gave up.
    loops.thread_limit = nullcontext  # type: ignore[assignment]
    options.out.mkdir(parents=True, exist_ok=True)
    for target in [] if options.report else options.targets:
        users = [int(one) for one in options.users.split(",")]
        contexts = [int(one) for one in options.contexts.split(",")]
        heats = [float(one) for one in options.temperatures.split(",")]
        head = foretell.Engine.load(target, speculative=dict(default_speculation(target)))
        engines = {"default": head, "suffix": head.with_method({"method": "suffix"})}
        longest = min(max(contexts) + 256, head.model.spec.max_positions)
        names = options.arms.split(",")
        limits = {
            "max_num_seqs": max(users),
            "max_model_len": longest,
            "kv_memory_gib": options.memory / (1 + len(names)),
        }
        turns = Turns()
        arms = [Arm("plain", head, "off", limits, turns)]
        for name in names:
            mode = "on" if name.startswith("always") else "auto"
            arms.append(Arm(name, engines[name.removeprefix("always ")], mode, limits, turns))
        gc.collect()
        gc.freeze()  # as ``foretell serve`` does: else a tenth of a second falls to one arm or the other
        file = options.out / f"{Path(target).stem}.jsonl"
        done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        known = {(one["users"], one["context"], one["temperature"]) for one in done}
        for context in contexts:
            text = document(head, min(context, longest - 256))
            for count, heat in product(users, heats):
                if (count, context, heat) in known:
                    continue
                if count * (context + 256) > min(arm.service.kv_tokens for arm in arms):
                    print(target[-20:], f"{count} users of {context} tokens do not fit --memory", file=sys.stderr)
                    continue
                tokens = max(options.least, options.tokens // (1 if count <= 4 else 2 if count <= 16 else 3))
                cell = {"users": count, "context": context, "temperature": heat}
                begun = time.perf_counter()
                found = measure(arms, cell, text, options.rounds, tokens)
                with file.open("a") as out:
                    out.write(json.dumps(found) + "\n")
                print(target[-20:], cell, f"{time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        for arm in arms:
            arm.service.close()
    report(options.out)


if __name__ == "__main__":
    main()
