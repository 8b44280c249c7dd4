"""Milliseconds and weight bytes per second of one pass, by number of tokens: transformers, lean and native.

    python benchmarks/forward.py --hidden 1024 --layers 26 --vocab 8192 [--dtype bfloat16] [--prefill]
    python benchmarks/forward.py path/to/model
    python benchmarks/forward.py --experts 32 --tokens 1 2 4 8 --dtype bfloat16

With --experts the random model is a Qwen3-MoE, about 0.3B by default. Tokens are random, so that each chooses its own
experts, and passes of many read more of them: "weights a pass" counts those of one token.

Prints the machine's DRAM bandwidth, measured in the same run, a table, and one line of JSON. Figures are medians (and
minima in the JSON) over interleaved rounds, so that a disturbance affects all implementations equally.
"""

import argparse
import gc
import json
import platform
from collections.abc import Callable, Iterator
from functools import cache as cache_of
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3MoeConfig

from foretell.core.tree import layout
from foretell.kernels.functions import dram_read_bandwidth
from foretell.model.llama.run import lean, native
from foretell.model.target import CausalModel, PassOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model directory; without it, a random Qwen3 of the sizes below")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=None, help="default: 26, with experts 8")
    parser.add_argument("--intermediate", type=int, default=None, help="default: 2.75 times hidden")
    parser.add_argument("--heads", type=int, default=None, help="default: hidden / 64, key-value heads half as many")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=0, help="experts of every layer; 0: none")
    parser.add_argument("--chosen", type=int, default=4, help="experts that a token reads")
    parser.add_argument("--expert-intermediate", type=int, default=384)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16])
    parser.add_argument("--context", type=int, default=256, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=["transformers", "lean", "native"])
    parser.add_argument("--prefill", action="store_true", help="also time a 512-token pass without the head")
    return parser.parse_args()


def build(args: argparse.Namespace) -> Any:
    """The transformers module: loaded, or random."""
    dtype = DTYPES[args.dtype]
    if args.model is not None:
        config = AutoConfig.from_pretrained(args.model)
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, config=config).eval()
    heads = args.heads or args.hidden // 64
    kind, more = Qwen3Config, {}
    if args.experts:
        kind, more = Qwen3MoeConfig, {
            "num_experts": args.experts, "num_experts_per_tok": args.chosen, "norm_topk_prob": True,
            "moe_intermediate_size": args.expert_intermediate,
        }  # fmt: skip
    config = kind(
        vocab_size=args.vocab, hidden_size=args.hidden,
        num_hidden_layers=args.layers or (8 if args.experts else 26),
        intermediate_size=args.intermediate or args.hidden * 11 // 4, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2), head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        dtype=dtype, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def texts(vocab_size: int, num_tokens: int) -> Iterator[torch.Tensor]:
    """Random tokens [1, num_tokens], the same for every implementation."""
    generator = torch.Generator().manual_seed(num_tokens)
    while True:
        yield torch.randint(0, vocab_size, (1, num_tokens), generator=generator)


def module_pass(module: Any, args: argparse.Namespace) -> Callable[[int, bool], None]:
    """One pass of the unmodified module over a dynamic cache, cropped back afterwards."""
    cache = DynamicCache(config=module.config)
    with torch.no_grad():
        module(torch.zeros(1, args.context, dtype=torch.int64), past_key_values=cache)
    texts_of = cache_of(lambda count: texts(module.config.vocab_size, count))

    @torch.no_grad()
    def run(num_tokens: int, head: bool) -> None:
        module(next(texts_of(num_tokens)), past_key_values=cache, logits_to_keep=0 if head else 1)
        cache.crop(-num_tokens)

    return run


def twin_pass(model: CausalModel, args: argparse.Namespace) -> Callable[[int, bool], None]:
    """One pass of a CausalModel over a chain behind the context."""
    capacity = args.context + 512
    cache = model.new_cache(1, capacity)
    length = torch.tensor([args.context])
    texts_of = cache_of(lambda count: texts(model.spec.vocab_size, count))

    def run(num_tokens: int, head: bool) -> None:
        parent = torch.arange(-1, num_tokens - 1)[None]
        span = min(capacity, -(-(args.context + num_tokens) // 64) * 64)
        plan = layout(parent, length, capacity, span=span)
        model.forward(next(texts_of(num_tokens)), plan, cache, PassOptions(head=head))

    return run


def table(
    args: argparse.Namespace, config: Any, weight_bytes: int, times: dict[tuple[str, int], list[float]],
    numbers: list[int], dram: tuple[float, float],
) -> None:  # fmt: skip
    """Print medians: milliseconds, weight bytes per second and the ratio to the first number of tokens."""
    threads = torch.get_num_threads()
    print(f"{config.model_type}, {args.dtype}, {weight_bytes / 1e6:.1f} MB of weights a pass, {threads} threads")
    print(f"DRAM read: {dram[0] / 1e9:.1f} GB/s (4 KiB pages), {dram[1] / 1e9:.1f} GB/s (huge pages)")
    print(f"{'tokens':22}" + "".join(f"{n:10}" for n in numbers))
    for name in dict.fromkeys(name for name, _ in times):
        seconds = [median(times[name, n]) for n in numbers]
        print(f"{name + ' ms':22}" + "".join(f"{x * 1e3:10.3f}" for x in seconds))
        print(f"{'  GB/s of weights':22}" + "".join(f"{weight_bytes / x / 1e9:10.1f}" for x in seconds))
        print(f"{'  / first':22}" + "".join(f"{x / seconds[0]:10.2f}" for x in seconds))


def main() -> None:
    args = parse()
    module = build(args)
    config, dtype = module.config, DTYPES[args.dtype]
    passes: dict[str, Callable[[int, bool], None]] = {}
    weight_bytes = 0
    if "native" in args.only:
        reason = native.supports(config, dtype, torch.device("cpu"))
        if reason is None:
            twin: CausalModel = native.NativeModel.from_hf(module)
            if args.model is not None:
                twin = native.NativeModel.load(args.model, dtype=dtype)
            passes["native"] = twin_pass(twin, args)
            weight_bytes = twin.spec.weight_bytes
        else:
            print(f"native: {reason}")
    if "lean" in args.only:
        twin = lean.LeanModel.from_hf(module)
        passes["lean"] = twin_pass(twin, args)
        weight_bytes = twin.spec.weight_bytes
    if "transformers" in args.only:
        passes["transformers"] = module_pass(module, args)
    gc.collect()

    best_small = best_huge = 0.0
    times: dict[tuple[str, int], list[float]] = {}
    numbers = [*args.tokens, *([512] if args.prefill else [])]
    for _ in range(args.rounds):
        best_small = max(best_small, dram_read_bandwidth(repeats=2))
        best_huge = max(best_huge, dram_read_bandwidth(repeats=2, huge=True))
        for num_tokens in numbers:
            for name, run in passes.items():
                start = perf_counter()
                run(num_tokens, num_tokens != 512)  # uncounted: another model's weights fill the caches
                repeats = 1 if num_tokens == 512 else max(2, min(20, int(0.02 / (perf_counter() - start))))
                for _ in range(repeats):
                    start = perf_counter()
                    run(num_tokens, num_tokens != 512)
                    times.setdefault((name, num_tokens), []).append(perf_counter() - start)

    table(args, config, weight_bytes, times, numbers, (best_small, best_huge))
    result = {
        "host": platform.node(), "threads": torch.get_num_threads(), "dtype": args.dtype, "weight_bytes": weight_bytes,
        "dram_bytes_per_s": best_small, "dram_huge_bytes_per_s": best_huge,
        "seconds": {f"{name}/{n}": {"median": median(t), "min": min(t)} for (name, n), t in times.items()},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
