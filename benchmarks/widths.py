"""Prefill rate and the cost of a pass by its number of nodes, with AMX and without, of one model by native kernels.

    python -m benchmarks.widths path/to/model [more models] [--dtype bfloat16] [--threads 2]

Every variant of the kernels that is named runs in the same process on its own copy of the weights, in interleaved rounds,
so that a disturbance affects all. Figures are medians (and minima in the JSON). `FORETELL_AMX=0` and `FORETELL_ISA` choose
a variant elsewhere as ``--variants`` does here.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from foretell.core.tree import layout
from foretell.kernels import build
from foretell.kernels.functions import dram_read_bandwidth
from foretell.kernels.native import variant
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import PassOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="directories or GGUF files of the Llama family")
    parser.add_argument("--variants", nargs="+", default=["amx", "avx512_bf16"], choices=build.VARIANTS)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill, in passes of --chunk")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--context", type=int, default=256, help="committed tokens in front of the nodes")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def load(path: str, chosen: str, dtype: torch.dtype) -> NativeModel:
    """The model by one variant of the kernels."""
    before = os.environ.get("FORETELL_ISA")
    os.environ["FORETELL_ISA"] = chosen
    try:
        assert variant() == chosen, f"this machine runs {variant()}, not {chosen}"
        return NativeModel.load(path, dtype=dtype)
    finally:
        os.environ.pop("FORETELL_ISA")
        if before is not None:
            os.environ["FORETELL_ISA"] = before


def passes_of(model: NativeModel, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """What is timed, by name: "prefill", and numbers of nodes."""
    capacity = args.context + max(args.prompt, *args.nodes)
    cache = model.new_cache(1, capacity)
    tokens = torch.randint(0, model.spec.vocab_size, (1, capacity), generator=torch.Generator().manual_seed(0))

    def run(start: int, count: int, head: bool) -> None:
        plan = layout(torch.arange(-1, count - 1)[None], torch.tensor([start]), capacity)
        model.forward(tokens[:, start : start + count], plan, cache, PassOptions(head=head))

    def prefill() -> None:
        for start in range(0, args.prompt, args.chunk):
            run(start, min(args.chunk, args.prompt - start), False)

    prefill()
    run(0, args.context, False)
    return {"prefill": prefill, **{str(n): lambda n=n: run(args.context, n, True) for n in args.nodes}}  # type: ignore[misc]


def measure(path: str, args: argparse.Namespace) -> None:
    models = {name: load(path, name, DTYPES[args.dtype]) for name in args.variants}
    work = {name: passes_of(model, args) for name, model in models.items()}
    times: dict[tuple[str, str], list[float]] = {}
    read = 0.0
    for _ in range(args.rounds):
        read = max(read, dram_read_bandwidth(repeats=2, huge=True))
        for what in ("prefill", *map(str, args.nodes)):
            for name, runs in work.items():
                if what != "prefill":
                    runs[what]()  # uncounted: another model's weights fill the caches
                start = perf_counter()
                runs[what]()
                times.setdefault((name, what), []).append(perf_counter() - start)
    spec = models[args.variants[0]].spec
    print(
        f"{path}: {spec.weights}, {spec.weight_bytes / 1e6:.0f} MB a pass, {args.threads} threads, {read / 1e9:.1f} GB/s"
    )
    print(f"{'':14}{'prefill':>10}{'1 node':>10}" + "".join(f"{n:>8}" for n in args.nodes))
    for name in args.variants:
        one = median(times[name, str(args.nodes[0])])
        rate = args.prompt / median(times[name, "prefill"])
        ratios = "".join(f"{median(times[name, str(n)]) / one:8.2f}" for n in args.nodes)
        print(f"{name:14}{rate:8.0f}/s{one * 1e3:8.2f}ms{ratios}")
    seconds = {f"{name}/{what}": {"median": median(t), "min": min(t)} for (name, what), t in times.items()}
    told = {
        "host": platform.node(),
        "model": path,
        "threads": args.threads,
        "dram_bytes_per_s": read,
        "seconds": seconds,
    }
    print(json.dumps(told), flush=True)


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    for path in args.models:
        measure(path, args)


if __name__ == "__main__":
    main()
