"""Plain decoding beside other processes that compute: tokens a second, and as a part of the idle machine's.

    python benchmarks/busy.py TARGET [--busy 0,2,8] [--rounds 3] [--seconds 6] [--threads 2] [--apart]

Each round decodes for ``--seconds`` beside each number of busy processes; they loop and touch no memory. The figures are
medians of the rounds. ``--apart`` starts them in sessions of their own, as another terminal would: where the kernel groups
processes by session (sched_autogroup), each group has an equal part of a core.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch

from foretell import Engine

PROMPT = "The history of the steam engine begins in"
BUSY = "while True: pass"


def tokens_a_second(engine: Engine, seconds: float) -> float:
    """Decode one text after another until the time is up; the prompt's pass does not count."""
    count, took = 0, 0.0
    while took < seconds:
        began = None
        for _ in engine.stream(PROMPT, max_new_tokens=256, ignore_eos=True, temperature=0.0):
            now = time.perf_counter()
            if began is None:
                began = last = now
                continue
            count, last = count + 1, now
            if took + now - began >= seconds:
                break
        assert began is not None
        took += last - began
    return count / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--busy", default="0,2,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine.load(args.target, speculative={"method": "none"}, **({"dtype": args.dtype} if args.dtype else {}))
    loads = [int(number) for number in args.busy.split(",")]
    speeds: dict[int, list[float]] = {load: [] for load in loads}
    tokens_a_second(engine, 1.0)  # caches, threads
    for _ in range(args.rounds):
        for load in loads:
            others = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=args.apart) for _ in range(load)]
            try:
                time.sleep(0.5)
                speeds[load].append(tokens_a_second(engine, args.seconds))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    idle = statistics.median(speeds[loads[0]])
    print(f"{args.target}, {args.threads} threads")
    for load in loads:
        rate = statistics.median(speeds[load])
        rounds = " ".join(f"{speed:.1f}" for speed in speeds[load])
        print(f"beside {load}: {rate:7.1f} tokens/s, {rate / idle:.2f} of beside {loads[0]}; rounds {rounds}")


if __name__ == "__main__":
    main()
