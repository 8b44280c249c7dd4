"""Time of a decode step outside the models' passes, by part, as a share of a plain pass.

    python benchmarks/outside.py --target SmolLM2-135M --head bundled/smollm2-135m/eagle3 [--dtype bfloat16]
        [--cases plain suffix eagle3 draft_model hybrid] [--settings T0 T1 top_p top_k penalty] [--weights int8] [--eager]

Of each part the least and the median microseconds of all steps of its kind are printed; "plain" is the pass of plain
decoding at the same setting, and the share is that of the least (the median) of "outside" in it. ``--eager`` makes the
distributions of all nodes at once: the slow twin of what is made when it is read. A case that begins with "auto:" guesses
where the planner lets it; its steps without a guess have a row of their own: what deciding costs those who do not guess.
What follows a colon is a shape: "eagle3:opt_tree/size=6".

    propose   the drafter, without passes of a draft model or of a head in C ("head")
    layout    slots, positions, ancestry
    laws      the distributions of the target, as far as they are made at once
    draw      verification, the draws from the target's logits included
    advance   texts, pieces, the commit
    other     of the step
    loop      what the loop does around the step
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from foretell import Engine, SamplingParams
from foretell.engine import batch as batch_module, judging
from foretell.engine.loop import Loop
from foretell.engine.state import State
from foretell.methods.eagle.native import NativePair
from foretell.verify.base import Evidence

SETTINGS: dict[str, dict[str, Any]] = {
    "T0": {"temperature": 0.0}, "T1": {}, "T0.7": {"temperature": 0.7}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 50},
    "penalty": {"repetition_penalty": 1.1}, "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}  # fmt: skip
PARTS = ("pass", "head", "propose", "layout", "laws", "draw", "advance", "other", "loop", "outside")


class Clock:
    """Seconds of the parts of one step, summed by name; a part does not count what it calls that has a name too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begun = perf_counter()
            try:
                return work(*given, **options)
            finally:
                seconds = perf_counter() - begun
                self.seconds[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return call


def instrument(clock: Clock, steps: list[dict[str, float]], *, eager: bool) -> None:
    """Time what a step is made of; steps gets one entry for each."""
    for name, part in (("layout", "layout"), ("draw", "draw"), ("evidence_of", "laws")):
        setattr(judging, name, clock.timed(part, getattr(judging, name)))
    if eager:
        made = judging.evidence_of

        def at_once(*given: Any) -> Evidence:
            begun = perf_counter()
            lazy = made(*given)
            evidence = Evidence(lazy.tree, lazy.p, lazy.noise, lazy.taps)
            clock.seconds["laws"] += perf_counter() - begun
            clock._inner[-1] += perf_counter() - begun
            return evidence

        judging.evidence_of = at_once
    State.advance = clock.timed("advance", State.advance)  # type: ignore[method-assign]
    NativePair.chain = clock.timed("head", NativePair.chain)  # type: ignore[method-assign]
    NativePair.tree = clock.timed("head", NativePair.tree)  # type: ignore[method-assign]
    step = batch_module.step

    def watched(*given: Any, **options: Any) -> Any:
        head = clock.seconds["head"]
        event = step(*given, **options)
        head = clock.seconds["head"] - head
        clock.seconds["pass"] = event.seconds_target
        clock.seconds["models"] = event.seconds_draft_model + head
        clock.seconds["propose"] = event.seconds_draft - event.seconds_draft_model - head
        clock.seconds["step"] = event.seconds
        clock.seconds["nodes"] = event.commit.tree.num_nodes
        return event

    batch_module.step = watched
    tick = Loop.tick

    def whole(self: Loop) -> Any:
        clock.seconds.clear()
        begun = perf_counter()
        result = tick(self)
        seconds = perf_counter() - begun
        found = dict(clock.seconds)
        if "step" in found:
            named = sum(found.get(part, 0.0) for part in ("layout", "laws", "draw", "advance"))
            inside = found["pass"] + found["models"]
            found["other"] = found["step"] - inside - found["propose"] - named
            found["loop"], found["outside"], found["head"] = seconds - found["step"], seconds - inside, found["models"]
            steps.append(found)
        return result

    Loop.tick = whole  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--head", help="a head for eagle3; default: the one that the target has")
    parser.add_argument(
        "--draft", default="bundled/draft", help="the model for draft_model; one vocabulary with the target"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cases", nargs="+", default=["plain", "suffix", "eagle3"])
    parser.add_argument("--settings", nargs="+", default=["T0", "T1", "top_p", "top_k", "penalty"], choices=SETTINGS)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    eagle = {"method": "eagle3", "num_speculative_tokens": 3, **({"model": args.head} if args.head else {})}
    configs: dict[str, Any] = {
        "plain": "none", "suffix": {"method": "suffix"}, "eagle3": eagle,
        "draft_model": {"method": "draft_model", "model": args.draft, "num_speculative_tokens": 3},
        "hybrid": {"method": "hybrid", **({"model": args.head} if args.head else {})},
    }  # fmt: skip
    clock, steps = Clock(), list[dict[str, float]]()
    instrument(clock, steps, eager=args.eager)
    base = Engine.load(args.target, dtype=args.dtype, weights=args.weights, speculative="none")
    ids = [10 + k * 7919 % 500 for k in range(60)] * 2
    plain: dict[str, tuple[float, float]] = {}
    print(f"{args.target}, {args.dtype}, {args.threads} threads, {'eager' if args.eager else 'when read'}; "
          "microseconds, least / median")  # fmt: skip
    print(f"{'case':28} {'nodes':>5} " + " ".join(f"{part:>13}" for part in PARTS) + "  share of a plain pass")
    for case in args.cases:
        auto, method = case.startswith("auto:"), case.removeprefix("auto:")
        method, _, shape = method.partition(":")
        config = configs[method] if not shape else {**configs[method], "shape": shape}
        engine = base if case == "plain" else base.with_method(config, speculation="auto" if auto else "on")
        for name in args.settings:
            params = SamplingParams(seed=3, max_new_tokens=args.tokens, ignore_eos=True, **SETTINGS[name])
            engine.generate(ids, params)
            steps.clear()
            engine.generate(ids, params if not auto else replace(params, seed=4))  # no text that is known by heart
            for kind in ("", " no guess") if auto else ("",):
                chosen = [step for step in steps if case == "plain" or (step["nodes"] > 1) == (kind == "")]
                report(f"{case} {name}{kind}", chosen, plain, name if case == "plain" else None, name)


def report(
    title: str, chosen: list[dict[str, float]], plain: dict[str, tuple[float, float]], is_plain: str | None, name: str
) -> None:
    """Print a row; that of plain decoding is kept in ``plain`` by its setting."""
    if not chosen:
        print(f"{title:28} no such step")
        return
    low = {part: min(1e6 * step.get(part, 0.0) for step in chosen) for part in PARTS}
    mid = {part: median(1e6 * step.get(part, 0.0) for step in chosen) for part in PARTS}
    if is_plain is not None:
        plain[is_plain] = low["pass"], mid["pass"]
    nodes = median(step["nodes"] for step in chosen)
    figures = " ".join(f"{low[part]:6.0f}/{mid[part]:6.0f}" for part in PARTS)
    share = ""
    if name in plain:
        share = f"{low['outside'] / plain[name][0]:7.1%} ({mid['outside'] / plain[name][1]:.1%})"
    print(f"{title:28} {nodes:5.0f} {figures} {share}", flush=True)


if __name__ == "__main__":
    main()
