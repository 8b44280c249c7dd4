"""Plain decoding of GGUF files beside llama.cpp's ``llama-bench`` on the same files, interleaved, batch 1.

    python benchmarks/against_llamacpp.py --llama-bench PATH FILE.gguf ... [--threads 2] [--rounds 5] [--isa avx2]

``llama-bench -n`` times passes alone, without sampling. Ours is given twice: the passes alone, which is the same, and the
engine whole (a request with all that it takes). The bandwidth limit is what this machine reads in a second over the bytes
that a pass reads. --isa avx2 needs a llama.cpp that was built without AVX-512.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch

from foretell import Engine
from foretell.core.params import SamplingParams
from foretell.core.tree import layout
from foretell.model.bandwidth import dram_read_bandwidth

PROMPT = 32  # tokens before those that are timed, on both sides


def passes(engine: Engine, tokens: int) -> float:
    """Tokens a second of passes alone."""
    cache, root = engine.model.new_cache(1, 64 * (-(-(PROMPT + tokens + 8) // 64))), torch.tensor([[-1]])
    plans = [layout(root, torch.tensor([slot]), cache.capacity) for slot in range(PROMPT + tokens)]
    begun = 0.0
    for slot, plan in enumerate(plans):
        if slot == PROMPT:
            begun = time.perf_counter()
        engine.model.forward(torch.tensor([[slot % 1000 + 5]]), plan, cache)
    return tokens / (time.perf_counter() - begun)


def whole(engine: Engine, tokens: int) -> float:
    """Tokens a second of a greedy request, after its prompt."""
    options = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return engine.generate(list(range(5, 5 + PROMPT)), options).tokens_per_second


def theirs(program: str, file: str, threads: int, tokens: int) -> float:
    """Tokens a second of llama-bench."""
    command = [program, "-m", file, "-p", "0", "-n", str(tokens), "-d", str(PROMPT), "-r", "1", "-t", str(threads)]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, timeout=600, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def main() -> None:
    """Command line: one table row a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--isa", help="FORETELL_ISA: the best instruction set that may be used")
    args = parser.parse_args()
    if args.isa:
        os.environ["FORETELL_ISA"] = args.isa
    torch.set_num_threads(args.threads)
    print("| file | limit | llama.cpp | our passes | our engine | passes / llama.cpp | engine / llama.cpp |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for file in args.files:
        engine = Engine.load(file, dtype="bfloat16")
        limit = dram_read_bandwidth(huge=True) / engine.model.spec.weight_bytes
        with torch.inference_mode():
            passes(engine, args.tokens), whole(engine, args.tokens)  # not timed
            rounds = [
                (
                    theirs(args.llama_bench, file, args.threads, args.tokens),
                    passes(engine, args.tokens),
                    whole(engine, args.tokens),
                )
                for _ in range(args.rounds)
            ]
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        cells = [f"{value:.1f}" for value in (limit, *medians)]
        for place in (1, 2):
            ratios = sorted(round_[place] / round_[0] for round_ in rounds)
            cells.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
        print(f"| {Path(file).stem} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
