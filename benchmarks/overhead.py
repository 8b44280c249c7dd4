"""The cost of checking: verification, noise and tree growth as shares of a decode step, beside the passes of the
models.

    python benchmarks/overhead.py --target build/inflated [--dtype float32] [--tokens 64] [--temperature 1]

Growing a tree is drafting without the draft model's passes; verification is ``verify.draw``, its noise and the
distributions that a rule reads included.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from foretell import Engine
from foretell.bench import encode_item, load_suite
from foretell.engine import judging
from foretell.engine.event import StepEvent

CASES = (
    "coupled:chain:5", "rejection:chain:5", "block:chain:5", "coupled:sequoia/size=15:5", "rejection:sequoia/size=15:5",
    "traversal:sequoia/size=15:5", "greedy_block:static/branching=3x1x1x1x1", "rejection:dyspec/size=15:5",
    "coupled:eagle2/size=15:5", "coupled:opt_tree/size=15:5",
)  # fmt: skip

WIDTHS = {"step": 7, "target": 7, "drafts": 7, "grow": 6, "draw": 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = Engine.load(args.target, speculative={"method": "draft_model", "model": "bundled/draft"}, dtype=args.dtype)
    prompts = [encode_item(base, item) for item in load_suite()[:: 120 // args.prompts]]
    clock: dict[str, float] = defaultdict(float)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            begun = perf_counter()
            try:
                return work(*given, **options)
            finally:
                clock[name] += perf_counter() - begun

        return call

    judging.draw = timed("draw", judging.draw)  # p included, where a rule reads it
    draft = base.method.model  # type: ignore[attr-defined]
    draft.forward = timed("drafts", draft.forward)
    rows: dict[str, list[float]] = defaultdict(list)

    def watched(event: StepEvent) -> None:
        passes, draft_s = clock["drafts"], event.seconds_draft
        parts = {"step": event.seconds, "target": event.seconds_target, "drafts": passes, "grow": draft_s - passes}
        for name, seconds in {**parts, "draw": clock["draw"]}.items():
            rows[name].append(1e6 * seconds)
        clock.clear()

    print(
        f"{args.target}, {args.dtype}, T = {args.temperature}, {torch.get_num_threads()} threads; microseconds a step"
    )
    print(f"{'rule : shape : depth':44} {'step':>7} {'target':>7} {'drafts':>7} {'grow':>6} {'draw':>6}  share")
    for case in CASES:
        verify, shape, count = case.split(":")
        config = {"method": "draft_model", "model": "bundled/draft", "verify": verify, "shape": shape,
                  "num_speculative_tokens": int(count)}  # fmt: skip
        engine = base.with_method(config)
        engine.observers.append(watched)
        for counted in (False, True):  # once to warm up
            rows.clear()
            for index, ids in enumerate(prompts if counted else prompts[:1]):
                engine.generate(ids, temperature=args.temperature, seed=index, max_new_tokens=args.tokens)
        mid = {name: median(values) for name, values in rows.items()}
        share = (mid["grow"] + mid["draw"]) / mid["step"]
        figures = " ".join(f"{mid[name]:{width}.0f}" for name, width in WIDTHS.items())
        print(f"{case:44} {figures} {100 * share:5.2f} %", flush=True)


if __name__ == "__main__":
    main()
