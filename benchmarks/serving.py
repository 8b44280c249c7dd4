"""Throughput at 1 to 32 concurrent requests: plain, the best fixed draft length, auto; all on one engine.

    python benchmarks/serving.py --target bundled [--draft DIR] [--nonsense] [--rounds 7] [--loads 1,2,4,8,16,32]
    python benchmarks/serving.py --target bundled --transformers
    python benchmarks/serving.py --target qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --method suffix --lengths "" --loads 8,16

For each load: the best fixed length is chosen on other prompts (one round of each), then ``--rounds`` paired rounds run
plain, that length, and auto on the same prompts in rotating order, and (unless --once) once more in the reverse order,
so that a drift of the machine affects all equally. Without lengths there is no fixed arm. A round submits as many
requests as the load at once and is timed until the last has ended, prefill included; every request writes its full
number of tokens (end tokens are ignored), at temperature 1 with fixed seeds, so all arms write the same tokens, which is
checked. The figures are medians of the rounds' ratios with percentile bootstrap intervals of the median. --nonsense
replaces the draft by one whose logits are shifted to other tokens. Prefix reuse is off: it would help later arms.
"""

import argparse
import json
import logging
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import foretell
from foretell.bench import load_suite
from foretell.engine.request.result import Update
from foretell.engine.request.row import Submission
from foretell.engine.threads import release_workers
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.target import CausalModel
from foretell.service.options import ServiceOptions
from foretell.service.service import Service

MAX_PROMPT = 64
"""Longer prompts of the suite are left out, so that decoding is most of the time."""


class Nonsense(CausalModel):
    """A draft model with shifted logits: wrong guesses at the full cost."""

    def __init__(self, model: CausalModel) -> None:
        self.model, self.spec = model, model.spec

    def new_cache(self, num_rows, capacity):
        return self.model.new_cache(num_rows, capacity)

    def forward(self, *args, **options):
        out = self.model.forward(*args, **options)
        return out if out.logits is None else replace(out, logits=out.logits.roll(out.logits.shape[-1] // 2, -1))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden).roll(self.spec.vocab_size // 2, -1)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    def normed(self, hidden: Tensor) -> Tensor:
        return self.model.normed(hidden)

    def head(self, normed: Tensor) -> Tensor:
        return self.model.head(normed)


class Arm:
    """One service. All arms share the weights, and only one of them has work at a time."""

    verbose = False

    def __init__(self, name: str, engine: foretell.Engine, mode: str, max_rows: int) -> None:
        self.name = name
        options = ServiceOptions(max_num_seqs=max_rows, speculation=mode, prefix_reuse=False, max_model_len=1024)
        self.service = Service(engine, options)
        self.service.start()
        self.service.measure()
        self.service._measure_again = lambda: None  # another arm has the cores while this one has no work

    def run(self, prompts: Sequence[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Tokens a second, and the tokens."""
        ended, made = threading.Event(), {}

        def sink(update: Update) -> None:
            if not update.is_last:
                return
            if update.completion is None:
                raise SystemExit(f"{self.name}: {update.error}")
            made[update.request_id] = update.completion.token_ids
            if len(made) == len(prompts):
                ended.set()

        banned = tuple(self.service.engine.model.spec.eos_token_ids)
        before = self.service.snapshot()
        begun = time.perf_counter()
        for index, prompt in enumerate(prompts):
            params = foretell.SamplingParams(
                seed=index, max_new_tokens=tokens, ignore_eos=True, banned_token_ids=banned
            )
            self.service.submit(Submission(str(index), prompt, params), sink)
        ended.wait()
        seconds = time.perf_counter() - begun
        if self.verbose:
            now = self.service.snapshot()
            parts = {
                part: getattr(now, f"seconds_{part}") - getattr(before, f"seconds_{part}")
                for part in ("draft", "target", "rest", "prefill")
            }
            said = "  ".join(f"{part} {spent:.3f}" for part, spent in parts.items())
            steps = now.num_steps - before.num_steps
            print(f"  {self.name:8s} {seconds:.3f} s, {steps} steps: {said}", file=sys.stderr)
        return len(prompts) * tokens / seconds, [made[str(index)] for index in range(len(prompts))]


def interval(values: Sequence[float], resamples: int = 4000) -> tuple[float, float, float]:
    """The median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples))
    return statistics.median(values), medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def prompts_of(engine: foretell.Engine, count: int, skip: int) -> list[list[int]]:
    """Prompts of the bundled suite, chats in the model's template, from ``skip`` on and around again."""
    items = load_suite()
    random.Random(1).shuffle(items)
    prompts = [
        engine.chat_prompt([{"role": "user", "content": item.prompt}])
        if item.format == "chat"
        else list(engine.tokenizer.encode(item.prompt))
        for item in items
    ]
    short = [prompt for prompt in prompts if len(prompt) <= MAX_PROMPT]
    return [short[(skip + index) % len(short)] for index in range(count)]


class Transformers:
    """transformers' own continuous batching on the same weights: greedy, its manager kept from call to call."""

    def __init__(self, target: str, tokens: int) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        from foretell.checkpoints.directories import resolve

        self.tokens = tokens
        self.model = AutoModelForCausalLM.from_pretrained(str(resolve(target)), dtype=torch.float32)
        release_workers()  # of this thread: they would slow the manager's thread and the engine's
        self.config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(self, prompts: list[list[int]]) -> float:
        """Tokens a second, prompts included."""
        begun = time.perf_counter()
        out = self.model.generate_batch(inputs=prompts, generation_config=self.config, persistent_manager=True)
        seconds = time.perf_counter() - begun
        made = [len(one.generated_tokens) for one in out.values()]
        if made != [self.tokens] * len(prompts):
            raise SystemExit(f"transformers wrote {made} tokens instead of {self.tokens} each")
        return sum(made) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--nonsense", action="store_true")
    parser.add_argument("--transformers", action="store_true", help="in each round also its generate_batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--extra", type=int, default=0, help="further rounds of plain and auto alone, at each load")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with rounds for so long at each load")
    parser.add_argument("--loads", default="1,2,4,8,16,32")
    parser.add_argument("--lengths", default="1,2,4,7")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--once", action="store_true", help="each arm once a round, where runs are long")
    parser.add_argument("--verbose", action="store_true", help="where each run's time went")
    options = parser.parse_args()
    Arm.verbose = options.verbose
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    loads = [int(load) for load in options.loads.split(",")]
    lengths = [int(length) for length in options.lengths.split(",") if length]
    base = {"method": options.method, **({"num_speculative_tokens": max(lengths)} if lengths else {})}
    if options.draft:
        base["model"] = options.draft
    engine = foretell.Engine.load(options.target, speculative=base, implementation=options.implementation)
    if options.nonsense:
        method = DraftModel(Nonsense(engine.method.model))
        engine = foretell.Engine(engine.model, engine.tokenizer, speculative=base, method=method)
    most = max(loads)
    plain = Arm("plain", engine, "off", most)
    auto = Arm("auto", engine, "auto", most)
    fixed = {
        length: Arm(f"fixed {length}", engine.with_method({**base, "num_speculative_tokens": length}), "on", most)
        for length in lengths
    }
    if options.nonsense:
        fixed = {
            length: Arm(
                f"fixed {length}",
                foretell.Engine(
                    engine.model, engine.tokenizer, speculative={**base, "num_speculative_tokens": length},
                    method=engine.method,
                ),
                "on",
                most,
            )
            for length in lengths
        }  # fmt: skip
    report = []
    peer = Transformers(options.target, options.tokens) if options.transformers else None
    for load in loads:
        other = prompts_of(engine, load, 1000)
        for arm in (plain, auto):
            arm.run(other, options.tokens)  # warm
        tuned = {length: arm.run(other, options.tokens)[0] for length, arm in fixed.items()}
        best = max(tuned, key=tuned.__getitem__, default=0)
        arms = [plain, *([fixed[best]] if fixed else []), auto]
        speeds: dict[str, list[float]] = {arm.name: [] for arm in arms}
        equal = 0
        theirs: list[float] = []
        if peer is not None:
            peer.run(other)  # warm
        begun, number = time.perf_counter(), -1
        while number + 1 < options.rounds or time.perf_counter() - begun < options.seconds:
            number += 1
            prompts = prompts_of(engine, load, number * load)
            made = {}
            turns = [arms[(turn + number) % len(arms)] for turn in range(len(arms))]
            taken = dict.fromkeys(speeds, 0.0)
            for arm in turns if options.once else turns + turns[::-1]:
                speed, made[arm.name] = arm.run(prompts, options.tokens)
                taken[arm.name] += load * options.tokens / speed
            for name, seconds in taken.items():
                speeds[name].append(load * options.tokens * (1 if options.once else 2) / seconds)
            if peer is not None:
                theirs.append(peer.run(prompts))
            equal += sum(len(set(map(tuple, texts))) == 1 for texts in zip(*made.values(), strict=True))
        for _ in range(options.extra):
            number += 1
            prompts = prompts_of(engine, load, number * load)
            taken = {"plain": 0.0, "auto": 0.0}
            turns = [plain, auto] if number % 2 else [auto, plain]
            for arm in turns + turns[::-1]:
                speed, made[arm.name] = arm.run(prompts, options.tokens)
                taken[arm.name] += load * options.tokens / speed
            for name, seconds in taken.items():
                speeds[name].append(load * options.tokens * 2 / seconds)
            equal += sum(a == b for a, b in zip(made["plain"], made["auto"], strict=True))
        ratios = {"auto / plain": [a / b for a, b in zip(speeds["auto"], speeds["plain"], strict=True)]}
        if fixed:
            ratios["auto / best fixed"] = [a / b for a, b in zip(speeds["auto"], speeds[arms[1].name], strict=False)]
        figures = {name: interval(values) for name, values in ratios.items()}
        found = {
            "load": load,
            "plain": statistics.median(speeds["plain"]),
            **({"best_length": best, "best_fixed": statistics.median(speeds[arms[1].name])} if fixed else {}),
            "auto": statistics.median(speeds["auto"]),
            **{name: [round(x, 3) for x in values] for name, values in figures.items()},
            "rounds": number + 1,
            "equal": f"{equal} of {load * (number + 1)}",
            "tuned": {length: round(speed, 1) for length, speed in tuned.items()},
        }
        if theirs:
            found["transformers"] = statistics.median(theirs)
            figures["plain / transformers"] = interval([a / b for a, b in zip(speeds["plain"], theirs, strict=False)])
            found["plain / transformers"] = [round(x, 3) for x in figures["plain / transformers"]]
        report.append(found)
        print(
            f"load {load:2d}  plain {found['plain']:7.1f}  "
            + (f"fixed {best}: {found['best_fixed']:7.1f}  " if fixed else "")
            + f"auto {found['auto']:7.1f} tok/s  "
            + "  ".join(f"{name} {m:.3f} [{low:.3f}, {high:.3f}]" for name, (m, low, high) in figures.items())
            + f"  {number + 1} rounds, equal {found['equal']}"
            + (f"  transformers {found['transformers']:.1f} tok/s" if theirs else ""),
            flush=True,
        )
    print(json.dumps(report))
    for arm in (plain, auto, *fixed.values()):
        arm.service.close()


if __name__ == "__main__":
    main()
