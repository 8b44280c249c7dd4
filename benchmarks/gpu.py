"""The first quarter of an hour on a card. One command runs all items, each in a process of its own, correctness first:

    python benchmarks/gpu.py all --seconds 240 --out FOLDER

Some of them (``--only right kernels``), or one item:

    python benchmarks/gpu.py right --part keys         # what there is to compare is in gpu_right.py
    python benchmarks/gpu.py kernels                   # each Triton kernel: equal to its torch twin, and microseconds
    python benchmarks/gpu.py passes --size 1b          # a pass of n nodes against weights / bandwidth
    python benchmarks/gpu.py steps --size 1b           # a speculative step / a plain one; the parts are the host's time
    python benchmarks/gpu.py peer --size 1b            # a pass of one node by transformers: static cache, compiled

Weights are random. Every item prints a short table, and with --out FOLDER leaves its figures there (``steps`` the kernels
of its steps as well). ``--device cpu --size tiny`` tries an item without a card (there ``kernels`` has nothing to compare).
What fails is to be mended before anything is timed: ``right`` ends with 1 where a token differs.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gpu_right import PARTS, Findings, lean_of, module_of
from transformers import LlamaConfig, StaticCache

from foretell import Engine, Request, SamplingParams
from foretell.core.graphs import RECORDERS
from foretell.core.noise import Noise, exponentials, race
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.core.tree import layout
from foretell.engine.event import StepEvent
from foretell.kernels.gpu import ops as operators
from foretell.kernels.gpu.ops import ops
from foretell.kernels.small import invert_cdf

SIZES = {  # hidden, layers, intermediate, heads, key-value heads, vocabulary
    "tiny": (64, 2, 128, 4, 2, 512),
    "1b": (2048, 16, 8192, 32, 8, 128_256),
    "8b": (4096, 32, 14_336, 32, 8, 128_256),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def llama_config(size: str, layers: int | None = None) -> LlamaConfig:
    hidden, num_layers, intermediate, heads, kv_heads, vocab_size = SIZES[size]
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers or num_layers,
        intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=16_384, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip


def waited(device: torch.device) -> float:
    """The time, after all that the device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def seconds(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median over rounds, after three that are not counted."""
    times = []
    for _ in range(rounds + 3):
        begun = waited(device)
        run()
        times.append(waited(device) - begun)
    return median(times[3:])


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of 1 GiB (a CPU: 64 MiB) reads and writes."""
    x = torch.empty(2**28 if device.type == "cuda" else 2**24, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / seconds(lambda: y.copy_(x), device, 9)


def captured(run: Callable[[], Any], device: torch.device) -> Callable[[], None] | None:
    """What launches a run as one graph, on a device that has graphs; the run was made before."""
    return RECORDERS[device.type](device).capture(run)[0] if device.type in RECORDERS else None


def right(args: argparse.Namespace) -> dict[str, Any]:
    """Item 1. Returns what was compared; ``wrong`` lists what differs."""
    findings = Findings()
    for part in [args.part] if args.part else PARTS:
        PARTS[part](args.device, findings)
    print(f"{findings.compared} comparisons, {len(findings.wrong)} differ", *findings.wrong, sep="\n  ")
    return vars(findings)


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Item 3. Returns by kernel (equal, microseconds, microseconds of the twin)."""
    device, own = args.device, ops(args.device.type)
    if own is None:
        print(f"Triton's kernels do not run on {device}")
        return {}
    vocab_size, num_rows, num_nodes = SIZES[args.size][5], 1, 16
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(num_rows, num_nodes, vocab_size, device=device, generator=generator)
    probs = torch.softmax(logits[0], -1)
    noise = Noise(torch.arange(num_rows, device=device), torch.arange(num_rows, device=device))
    keys = noise.coupled_keys(num_nodes)
    uniform = torch.rand(num_nodes, dtype=torch.float64, device=device, generator=generator)
    found: dict[str, Any] = {}

    def compare(name: str, fast: Callable[[], torch.Tensor], twin: Callable[[], torch.Tensor]) -> None:
        equal = bool((fast() == twin()).all())
        found[name] = equal, *(seconds(run, device, args.rounds) * 1e6 for run in (fast, twin))
        print(f"{name:24}{'equal' if equal else 'DIFFERS':>9}{found[name][1]:10.1f} us{found[name][2]:10.1f} us")

    print(f"{'':24}{'':>9}{'Triton':>10}   {'torch':>10}")
    compare("race", lambda: own.race(probs, keys[0]), lambda: (probs / exponentials(keys[0], vocab_size)).argmax(-1))
    host = probs.cpu(), uniform.cpu()
    compare("cdf", lambda: own.invert_cdf(probs, uniform), lambda: invert_cdf(*host).to(device))
    paths = Paths(torch.zeros(1, num_nodes, dtype=torch.int64, device=device), torch.zeros(0, device=device))
    for name, params in {
        "plain": {}, "top-k 40": {"top_k": 40}, "top-p 0.9": {"top_p": 0.9}, "min-p 0.05": {"min_p": 0.05},
        "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    }.items():  # fmt: skip
        rows = Processors([SamplingParams(**params)], vocab_size=vocab_size, end_token_ids=[], device=device)
        table, history = rows.warp_table, History([[0]], [1])
        compare(
            f"draw, {name}",
            lambda table=table: own.draw(logits, table, keys, -1),
            lambda rows=rows, history=history: race(logits_to_probs(logits, rows, history, paths), keys),
        )
    found |= _sizes(
        args, logits, Processors([SamplingParams()], vocab_size=vocab_size, end_token_ids=[], device=device), keys
    )
    return found


def _sizes(args: argparse.Namespace, logits: torch.Tensor, rows: Processors, keys: torch.Tensor) -> dict[str, Any]:
    """Microseconds of kernels by what they divide their work into."""
    own, found = ops(args.device.type), {}
    assert own is not None
    held, each, table = (operators.DRAW_BLOCK, operators.DRAW_WARPS), operators.SLOTS_EACH, rows.warp_table
    for block_warps in ((1024, 4), (2048, 8), (4096, 16), (8192, 32)):
        operators.DRAW_BLOCK, operators.DRAW_WARPS = block_warps
        for nodes in (1, 16):
            run = lambda n=nodes: own.draw(logits[:, :n], table, keys[:, :n], -1)  # noqa: E731
            found[f"draw of {nodes}, blocks of {block_warps}"] = seconds(run, args.device, args.rounds) * 1e6
    operators.DRAW_BLOCK, operators.DRAW_WARPS = held
    config, device = llama_config(args.size), args.device
    dim = config.hidden_size // config.num_attention_heads
    for context, nodes, slots in product((576, 4160), (1, 16), (128, 256, 512)):
        shape = (1, config.num_key_value_heads, context, dim)
        memory = [torch.randn(shape, dtype=args.dtype, device=device) for _ in range(2)]
        query = torch.randn(1, config.num_attention_heads, nodes, dim, dtype=args.dtype, device=device)
        plan = layout(
            torch.arange(-1, nodes - 1, device=device)[None], torch.tensor([context - 64], device=device), context
        )
        operators.SLOTS_EACH = slots
        run = lambda q=query, m=memory, p=plan: own.attend(  # noqa: E731
            q, None, *m, p.ancestry, p.length, p.positions, p.tree_positions, p.span, 0, dim**-0.5, 0.0
        )
        found[f"attention of {nodes} over {context}, {slots} each"] = seconds(run, device, args.rounds) * 1e6
    operators.SLOTS_EACH = each
    for name, took in found.items():
        print(f"{name:44}{took:10.1f} us")
    return found


def passes(args: argparse.Namespace) -> dict[str, Any]:
    """Item 2. Returns milliseconds by (rows, nodes), call by call and as a graph, and the bandwidth."""
    device, dtype = args.device, args.dtype
    model, speed = lean_of(llama_config(args.size), dtype, device), bandwidth(device)
    least = model.spec.weight_bytes / speed
    print(f"{args.size}, {dtype}: {model.spec.weight_bytes / 1e9:.2f} GB, a copy moves {speed / 1e9:.0f} GB/s")
    print(f"{'rows':>6}{'nodes':>7}{'calls':>9}{'graph':>9}{'/ weights':>11}{'/ one node':>12}   ms")
    found: dict[str, Any] = {}
    for num_rows in args.rows:
        capacity = args.context + 64
        pool = model.new_pool(num_rows, capacity, None)
        pool.fit([capacity] * num_rows)
        length = torch.full((num_rows,), args.context, device=device)
        for num_nodes in args.nodes:
            index = torch.arange(num_nodes, device=device)
            parent = ((index - 1) // 2).masked_fill(index == 0, -1).expand(num_rows, -1)  # a tree of two children each
            tokens = torch.randint(model.spec.vocab_size, (num_rows, num_nodes), device=device)

            @torch.inference_mode()
            def run(tokens: Any = tokens, parent: Any = parent, length: Any = length, pool: Any = pool) -> None:
                model.forward(tokens, layout(parent, length, capacity), pool)  # noqa: B023 (called at once)

            calls = seconds(run, device, args.rounds) * 1e3
            launch = captured(run, device)
            took = calls if launch is None else seconds(launch, device, args.rounds) * 1e3
            found[f"{num_rows}x{num_nodes}"] = calls, took
            one = found[f"{num_rows}x{args.nodes[0]}"][1]
            print(
                f"{num_rows:6}{num_nodes:7}{calls:9.2f}{took:9.2f}{took / 1e3 / least:11.2f}{took / one:12.2f}",
                flush=True,
            )
    return {"bytes": model.spec.weight_bytes, "bandwidth": speed, "ms": found}


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Item 2, whole steps: a random draft of one layer, so that nothing is accepted and every step is a worst one."""
    device = args.device
    target, draft = (lean_of(llama_config(args.size, layers), args.dtype, device, layers or 0) for layers in (None, 1))
    found: dict[str, Any] = {}
    print(f"{'':34}{'ms':>8}{'draft':>8}{'target':>8}{'rest':>8}{'/ plain':>9}")
    few = {"method": "draft_model", "model": "llama", "draft_vocab_size": min(32_768, SIZES[args.size][5] // 2)}
    configs = {
        "plain": None,
        "chain of 5": few | {"num_speculative_tokens": 5},
        "tree of 16": few | {"shape": "sequoia/size=16"},
    }
    for num_rows, (what, config), launch in product(args.rows, configs.items(), ("off", "auto")):
        name = f"{what}, {num_rows} rows, graphs {launch}"
        engine = Engine(
            target, speculative=config, draft=None if config is None else draft, drafter_errors="raise",
            cuda_graphs=launch,
        )  # fmt: skip
        times: list[StepEvent] = []
        engine.observers.append(times.append)
        after = args.tokens - Profile.STEPS - 4  # what is recorded is slower
        profile = Profile(device, name, after) if launch == "auto" and num_rows == args.rows[0] else None
        if profile is not None:
            engine.observers.append(profile.watch)
        params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=args.tokens)
        engine.generate_batch(
            [Request([5 + at % 499 for at in range(args.context)], params)] * num_rows, batch_size=num_rows
        )
        middle = times[len(times) // 3 : after]
        parts = [
            median(getattr(event, f"seconds_{part}") for event in middle) * 1e3 for part in ("draft", "target", "rest")
        ]
        found[name] = sum(parts), *parts
        share = "".join(f"{part:8.2f}" for part in found[name])
        plain = found[f"plain, {num_rows} rows, graphs {launch}"][0]
        print(f"{name:34}{share}{found[name][0] / plain:9.2f}", flush=True)
        if profile is not None:
            print(profile.first, flush=True)
            if args.out is not None:
                with (args.out / f"profile-{args.size}.txt").open("a") as file:
                    file.write(profile.table)
    return found


class Profile:
    """What the device does in some steps of an engine that it observes."""

    STEPS = 8

    def __init__(self, device: torch.device, name: str, after: int) -> None:
        """after: steps before those that are recorded."""
        kind = torch.profiler.ProfilerActivity
        self.device, self.name, self.after, self.seen = device, name, after, 0
        self.first = self.table = ""
        self._profile = torch.profiler.profile(activities=[kind.CUDA if device.type == "cuda" else kind.CPU])

    def watch(self, event: StepEvent) -> None:
        self.seen += 1
        if self.seen == self.after:
            self._profile.start()
            self._begun = waited(self.device)
        elif self.seen == self.after + self.STEPS:
            wall = (waited(self.device) - self._begun) / self.STEPS * 1e6
            self._profile.stop()
            self._read(wall)

    def _read(self, wall: float) -> None:
        on = torch.autograd.DeviceType.CUDA if self.device.type == "cuda" else torch.autograd.DeviceType.CPU
        rows = [
            (getattr(each, f"self_{'cpu' if self.device.type == 'cpu' else 'device'}_time_total"), each.count, each.key)
            for each in self._profile.key_averages()
            if each.device_type == on
        ]
        rows.sort(reverse=True)
        busy, count = (sum(row[at] for row in rows) / self.STEPS for at in (0, 1))
        self.first = f"    the device is busy {busy:.0f} of {wall:.0f} us a step, with {count:.0f} kernels"
        lines = [f"{us / self.STEPS:10.1f} us{each / self.STEPS:8.1f} of {key[:100]}" for us, each, key in rows[:25]]
        self.table = "\n".join([self.name, self.first, *lines, "", ""])


def peer(args: argparse.Namespace) -> dict[str, Any]:
    """Item 2, beside it: milliseconds of a pass of one node by transformers, with a static cache."""
    device, config = args.device, llama_config(args.size)
    module, found = module_of(config, args.dtype, device), {}
    cache = StaticCache(config=config, max_cache_len=args.context + 64)
    tokens = torch.randint(config.vocab_size, (1, args.context), device=device)
    one, at = tokens[:, :1].clone(), torch.full((1, 1), args.context, device=device)

    def run(function: Callable[..., Any] = module) -> Any:
        for layer in cache.layers:
            layer.cumulative_length.fill_(args.context)
        return function(input_ids=one, position_ids=at, past_key_values=cache, use_cache=True).logits

    def compiled() -> Callable[[], Any]:
        function = torch.compile(module, mode="reduce-overhead")
        return lambda: run(function)

    with torch.inference_mode():
        module(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for name, make in {
            "calls": lambda: run, "graph": lambda: captured(run, device) or run, "compiled": compiled,
        }.items():  # fmt: skip
            begun = waited(device)
            try:
                found[name] = seconds(make(), device, args.rounds) * 1e3
            except Exception as error:  # the others go on
                print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            else:
                print(f"{args.size}, {name:10}{found[name]:8.2f} ms{waited(device) - begun:8.1f} s whole", flush=True)
    return found


def everything(args: argparse.Namespace) -> int:
    """All items by this file's own command line, each at most as long as it may and as the rest of ``--seconds`` allows.
    What they print goes to FOLDER/log.txt as well."""
    begun, status = perf_counter(), 0
    environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "2"}
    small = args.size == "tiny"
    sizes = ("tiny",) if small else ("8b", "1b")
    nodes = {"8b": "1 4 8 16 64", "1b": "1 4 8 16 32 64", "tiny": "1 4"}
    checks = [(f"right --part {part}", 130) for part in PARTS]
    others = [("kernels", 60)]
    for size in sizes:
        rows = ("1", "1 8") if size == "8b" else ("1 8", "1 8 32")
        others += [
            (f"steps --size {size} --rows {rows[0]}", 80),
            (f"passes --size {size} --rows {rows[1]} --nodes {nodes[size]}", 60),
        ]
    others += [(f"peer --size {size}", 90) for size in reversed(sizes)]
    wanted = tuple(args.only or ("",))
    checks, others = ([each for each in items if each[0].startswith(wanted)] for items in (checks, others))

    def one(item: str, most: float) -> str:
        left = min(most, args.seconds - (perf_counter() - begun))
        if left < 5:
            return f"== {item}: no time is left\n"
        command = [sys.executable, __file__, *item.split(), "--device", str(args.device), "--out", str(args.out)]
        command += ["--size", "tiny"] if small and "--size" not in item else []
        started = perf_counter()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left, env=environment
            )
            output, end = done.stdout, f"ended with {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output, end = (error.stdout or b"").decode(errors="replace"), f"was stopped after {left:.0f} s"
        return f"{output}== {item}: {end}, {perf_counter() - started:.0f} s\n"

    def tell(text: str) -> None:
        nonlocal status
        status |= "ended with 0" not in text.splitlines()[-1]
        with (args.out / "log.txt").open("a") as log:
            log.write(text)
        lines = text.splitlines()
        print(*([*lines[:20], "...", *lines[-40:]] if len(lines) > 62 else lines), sep="\n", flush=True)

    with ThreadPoolExecutor(3) as pool:  # together: their time is no figure
        for done in as_completed([pool.submit(one, *check) for check in checks]):
            tell(done.result())
    for item in others:
        tell(one(*item))
    return status


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=("all", *ITEMS))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", type=DTYPES.__getitem__, default=torch.bfloat16, help="fp32, bf16 or fp16")
    parser.add_argument("--part", choices=PARTS, help="the part of ``right``; all by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=512, help="committed tokens of a row")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that ``steps`` writes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=240, help="how long ``all`` may take")
    parser.add_argument("--only", nargs="+", help="of ``all`` the items that begin so: right, 'steps --size 8b'")
    parser.add_argument("--out", type=Path, help="a folder; ``all`` needs one")
    args = parser.parse_args(given)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use; --device cpu --size tiny tries the commands")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    if args.item == "all":
        return everything(args) if args.out is not None else parser.error("all needs --out FOLDER")
    figures = ITEMS[args.item](args)
    if args.out is not None:
        card = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else str(args.device)
        about = {"item": args.item, "size": args.size, "part": args.part, "device": card, "torch": torch.__version__}
        with (args.out / "figures.jsonl").open("a") as file:
            file.write(json.dumps(about | figures) + "\n")
    return 1 if figures.get("wrong") else 0


ITEMS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "right": right, "kernels": kernels, "passes": passes, "steps": steps, "peer": peer,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
