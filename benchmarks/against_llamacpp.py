"""Plain decoding of GGUF files beside llama.cpp's ``llama-bench`` on the same files, interleaved, batch 1.

    python benchmarks/against_llamacpp.py --llama-bench PATH FILE.gguf ... [--depths 32,4096] [--prompts 512] [--rounds 5]

``llama-bench -n`` times passes alone, without sampling, after a text of ``-d`` tokens; flash attention is on. Ours is given
twice: the passes alone, which is the same, and the engine whole (a request with all that it takes). The bandwidth limit is
what this machine reads in a second over the bytes that a pass reads, keys and values included. ``--prompts``: a text of so
many tokens is read. --isa avx2 needs a llama.cpp that was built without AVX-512.
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
from foretell.kernels.functions import dram_read_bandwidth
from foretell.model.prefill import feed, round_up
from foretell.model.target import Target


def read(engine: Engine, depth: int, room: int) -> Target:
    """A row that has read ``depth`` tokens, with room for more."""
    target = Target(engine.model, 1, 64 * (-(-(depth + room) // 64)))
    feed(target, [text(depth)], [0], head=False)
    return target


def text(count: int) -> list[int]:
    """Some tokens."""
    return [5 + at % 1000 for at in range(count)]


def passes(target: Target, depth: int, tokens: int) -> float:
    """Tokens a second of passes alone, which write over those of the call before."""
    root = torch.tensor([[-1]])
    plans = [
        layout(
            root, torch.tensor([slot]), target.cache.capacity, span=min(target.cache.capacity, round_up(slot + 1, 64))
        )
        for slot in range(depth, depth + tokens)
    ]
    begun = time.perf_counter()
    for plan in plans:
        target.forward(torch.tensor([[int(plan.slots) % 1000 + 5]]), plan)
    return tokens / (time.perf_counter() - begun)


def whole(engine: Engine, depth: int, tokens: int) -> float:
    """Tokens a second of a greedy request, after its prompt."""
    options = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return engine.generate(text(depth), options).tokens_per_second


def prompt(engine: Engine, tokens: int) -> float:
    """Tokens a second of a text that is read."""
    target = Target(engine.model, 1, 64 * (-(-tokens // 64)))
    begun = time.perf_counter()
    feed(target, [text(tokens)], [0], head=False)
    return tokens / (time.perf_counter() - begun)


def theirs(program: str, file: str, threads: int, *asked: str) -> float:
    """Tokens a second of llama-bench."""
    command = [program, "-m", file, "-fa", "1", "-r", "1", "-t", str(threads), *asked]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, timeout=900, check=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def shown(rounds: list[tuple[float, ...]]) -> list[str]:
    """Medians of the columns, and of each column's ratio to the first, with the least and the largest."""
    cells = [f"{statistics.median(column):.1f}" for column in zip(*rounds, strict=True)]
    for place in range(1, len(rounds[0])):
        ratios = sorted(each[place] / each[0] for each in rounds)
        cells.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
    return cells


def main() -> None:
    """Command line: one table row a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depths", default="32", help="tokens before those that are timed")
    parser.add_argument("--prompts", default="", help="tokens of texts that are read")
    parser.add_argument("--isa", help="FORETELL_ISA: the best instruction set that may be used")
    args = parser.parse_args()
    if args.isa:
        os.environ["FORETELL_ISA"] = args.isa
    torch.set_num_threads(args.threads)
    depths, prompts = ([int(each) for each in given.split(",") if each] for given in (args.depths, args.prompts))
    count = str(args.tokens)
    print("| file | depth | limit | llama.cpp | our passes | our engine | passes / llama.cpp | engine / llama.cpp |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for file in args.files:
        engine = Engine.load(file, dtype="bfloat16", prefix_memory_gib=2)
        spec = engine.model.spec
        for depth in depths:
            asked = ("-p", "0", "-n", count, "-d", str(depth))
            with torch.inference_mode():
                target = read(engine, depth, args.tokens + 8)
                num_bytes = spec.weight_bytes + depth * target.cache.bytes_per_slot
                passes(target, depth, args.tokens), whole(engine, depth, args.tokens)  # not timed
                limits, rounds = [], []
                for _ in range(args.rounds):  # on a shared machine the bandwidth changes within minutes
                    limits.append(dram_read_bandwidth(repeats=3, huge=True) / num_bytes)
                    other = theirs(args.llama_bench, file, args.threads, *asked)
                    mine = passes(target, depth, args.tokens), whole(engine, depth, args.tokens)
                    rounds.append((other, *mine))
                limit = statistics.median(limits)
            print(f"| {Path(file).stem} | {depth} | {limit:.1f} | {' | '.join(shown(rounds))} |", flush=True)
        for tokens in prompts:
            asked = ("-p", str(tokens), "-n", "0")
            with torch.inference_mode():
                prompt(engine, min(tokens, 512))  # not timed
                read_ = [
                    (theirs(args.llama_bench, file, args.threads, *asked), prompt(engine, tokens))
                    for _ in range(args.rounds)
                ]
            one, mine, ratio = shown(read_)
            print(f"| {Path(file).stem} | prompt of {tokens} | - | {one} | {mine} | - | {ratio} | - |", flush=True)


if __name__ == "__main__":
    main()
