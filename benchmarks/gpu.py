"""The first half hour on a card, one command an item, correctness first:

    python benchmarks/gpu.py right                     # tokens and noise are the CPU's; nodes are their own paths
    python benchmarks/gpu.py kernels                   # each Triton kernel: equal to its torch twin, and microseconds
    python benchmarks/gpu.py passes --size 1b          # a pass of n nodes against weights / bandwidth
    python benchmarks/gpu.py steps --size 1b           # a speculative step / a plain one; the parts are the host's time

Weights are random. Every item prints a short table, and with --out FILE writes all figures as JSON. ``--device cpu --size
tiny`` tries an item without a card (there ``kernels`` has nothing to compare). What fails is to be mended before anything
is timed: ``right`` ends with 1 where a token differs.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from foretell import Engine, Request, SamplingParams
from foretell.core.noise import Noise, Stream, exponentials, race, stream_keys
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.core.tree import layout
from foretell.engine.event import StepEvent
from foretell.kernels.cdf import invert_cdf
from foretell.kernels.gpu.ops import ops
from foretell.model.llama.lean import LeanModel
from foretell.model.target import CausalModel

SIZES = {  # hidden, layers, intermediate, heads, key-value heads, vocabulary
    "tiny": (64, 2, 128, 4, 2, 512),
    "1b": (2048, 16, 8192, 32, 8, 128_256),
    "8b": (4096, 32, 14_336, 32, 8, 128_256),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
METHODS: tuple[Any, ...] = (
    "ngram", "suffix", {"method": "draft_model", "num_speculative_tokens": 5},
    {"method": "draft_model", "shape": "sequoia/size=16"}, {"method": "eagle3", "num_speculative_tokens": 5},
    {"method": "hybrid"},
)  # fmt: skip


def random_target(size: str, dtype: torch.dtype, device: torch.device, layers: int | None = None) -> CausalModel:
    """A Llama of random weights as ``lean``."""
    hidden, num_layers, intermediate, heads, kv_heads, vocab_size = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden, num_hidden_layers=layers or num_layers,
        intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=16_384, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    return lean_of(config, dtype, device)


def lean_of(config: Any, dtype: torch.dtype, device: torch.device) -> CausalModel:
    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return LeanModel.from_hf(module, name=config.model_type)


def families(device: torch.device) -> dict[str, CausalModel]:
    """Tiny random models in float32: what their traits differ in is in docs/model-types.md."""
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    }  # fmt: skip
    kinds = (LlamaConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig)
    return {kind.model_type: lean_of(kind(**sizes), torch.float32, device) for kind in kinds}


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


def right(args: argparse.Namespace) -> dict[str, Any]:
    """Item 1. Returns what was compared; ``wrong`` counts what differs."""
    device, wrong, compared = args.device, [], 0
    keys = stream_keys(torch.arange(64)[:, None], torch.arange(64), Stream.COUPLED)
    there = stream_keys(torch.arange(64, device=device)[:, None], torch.arange(64, device=device), Stream.COUPLED)
    compared += 1
    if not torch.equal(there.cpu(), keys):
        wrong.append("noise keys")
    for name, model in families(device).items():
        torch.manual_seed(1)
        tokens, parent = torch.randint(512, (1, 6)).to(device), torch.tensor([[-1, 0, 0, 1, 1, 3]], device=device)
        cache, nothing = model.new_cache(1, 64), torch.zeros(1, dtype=torch.int64, device=device)
        logits = model.forward(tokens, layout(parent, nothing, 64), cache).logits
        path = torch.tensor([0, 1, 3, 5], device=device)
        line = torch.arange(-1, 3, device=device)[None]
        alone = model.forward(tokens[:, path], layout(line, nothing, 64), model.new_cache(1, 64)).logits
        assert logits is not None
        assert alone is not None
        compared += 1
        if (logits[0, path] - alone[0]).abs().max() > 1e-3 * alone.abs().max():
            wrong.append(f"{name}: nodes of a tree against their path")
    for temperature in (0.0, 1.0):
        given = [
            Request(prompt, SamplingParams(temperature=temperature, seed=seed, max_new_tokens=48, top_p=0.95))
            for seed, prompt in enumerate(("def add(a, b):\n    return", "class Stack:\n", "x = 1; x = 1; x"))
        ]
        plain: dict[str, list[list[int]]] = {}
        for where in ("cpu", str(device)):
            for launch in ("off",) if where == "cpu" else ("off", "auto"):
                engine = Engine.load(
                    "bundled", device=where, implementation="lean", dtype="float32", cuda_graphs=launch
                )
                for config in (None, *METHODS):
                    tried = engine.with_method(config, drafter_errors="raise")
                    for rows in (1, 3):
                        texts = [done.token_ids for done in tried.generate_batch(given, batch_size=rows)]
                        compared += 1
                        if texts != plain.setdefault("text", texts):
                            about = f"{where}, graphs {launch}, {rows} rows, temperature {temperature}: {config}"
                            wrong.append(about)
    print(f"{compared} comparisons, {len(wrong)} differ", *wrong, sep="\n  ")
    return {"compared": compared, "wrong": wrong}


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
    return found


def passes(args: argparse.Namespace) -> dict[str, Any]:
    """Item 2. Returns milliseconds by (rows, nodes), and the bandwidth."""
    device = args.device
    model, speed = random_target(args.size, args.dtype, device), bandwidth(device)
    least = model.spec.weight_bytes / speed
    print(f"{args.size}, {args.dtype}: {model.spec.weight_bytes / 1e9:.2f} GB, a copy moves {speed / 1e9:.0f} GB/s")
    print(f"{'rows':>6}{'nodes':>7}{'ms':>9}{'/ weights':>11}{'/ one node':>12}")
    found: dict[str, float] = {}
    for num_rows in args.rows:
        cache, capacity = model.new_cache(num_rows, args.context + 64), args.context + 64
        length = torch.full((num_rows,), args.context, device=device)
        for num_nodes in args.nodes:
            index = torch.arange(num_nodes, device=device)
            parent = ((index - 1) // 2).masked_fill(index == 0, -1).expand(num_rows, -1)  # a tree of two children each
            tokens = torch.randint(model.spec.vocab_size, (num_rows, num_nodes), device=device)

            def run(tokens: Any = tokens, parent: Any = parent, length: Any = length, cache: Any = cache) -> None:
                model.forward(tokens, layout(parent, length, capacity), cache)  # noqa: B023 (called at once)

            took = seconds(run, device, args.rounds)
            found[f"{num_rows}x{num_nodes}"] = took * 1e3
            first = found[f"{num_rows}x{args.nodes[0]}"]
            print(f"{num_rows:6}{num_nodes:7}{took * 1e3:9.2f}{took / least:11.2f}{took * 1e3 / first:12.2f}")
    return {"bytes": model.spec.weight_bytes, "bandwidth": speed, "ms": found}


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Item 2, whole steps: a random draft of one layer, so that nothing is accepted and every step is a worst one."""
    device = args.device
    target, draft = (random_target(args.size, args.dtype, device, layers) for layers in (None, 1))
    found: dict[str, Any] = {}
    print(f"{'':28}{'ms':>8}{'draft':>8}{'target':>8}{'rest':>8}{'/ plain':>9}")
    configs = {
        "plain": None,
        "chain of 5": {"method": "draft_model", "model": "llama", "num_speculative_tokens": 5},
        "tree of 16": {"method": "draft_model", "model": "llama", "shape": "sequoia/size=16"},
    }
    for (what, config), launch in product(configs.items(), ("off", "auto")):
        name = what if launch == "off" else f"{what}, graphs"
        engine = Engine(
            target, speculative=config, draft=None if config is None else draft, drafter_errors="raise",
            cuda_graphs=launch,
        )  # fmt: skip
        times: list[StepEvent] = []
        engine.observers.append(times.append)
        begun = waited(device)
        params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=args.tokens)
        engine.generate(list(range(5, 5 + args.context)), params)
        whole = (waited(device) - begun) / max(1, len(times))
        parts = [
            median(getattr(event, f"seconds_{part}") for event in times[len(times) // 2 :]) * 1e3
            for part in ("draft", "target", "rest")
        ]
        found[name] = sum(parts), *parts, whole * 1e3
        share = "".join(f"{part:8.2f}" for part in found[name][:4])
        print(f"{name:28}{share}{found[name][0] / found['plain'][0]:9.2f}")
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=("right", "kernels", "passes", "steps"))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", type=DTYPES.__getitem__, default=torch.bfloat16, help="fp32, bf16 or fp16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=512, help="committed tokens of a row")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that ``steps`` writes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use; --device cpu --size tiny tries the commands")
    figures = {"right": right, "kernels": kernels, "passes": passes, "steps": steps}[args.item](args)
    if args.out is not None:
        card = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else str(args.device)
        args.out.write_text(json.dumps({"item": args.item, "device": card, "torch": torch.__version__, **figures}))
    return 1 if figures.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
