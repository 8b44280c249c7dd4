"""The same weights and prompts, four ways, interleaved: transformers plain and assisted, foretell plain and
speculative.

    python benchmarks/against_transformers.py --target DIR [--draft DIR] [--dtype bfloat16] [--prompts 5] [--rounds 3]

Greedy, batch 1, decode time with prefill included on every side (transformers does not separate them). For each
prompt and round the four run one after the other in rotating order; the figures are medians over rounds of the summed
times. Texts are compared too: in float32 all four must agree up to near-ties. Last line: JSON.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import foretell
from foretell.bundled import path as bundled_path
from foretell.model.load import load_tokenizer

Runner = Callable[[list[int]], list[int]]


def transformers_runner(model: PreTrainedModel, tokens: int, assistant: PreTrainedModel | None, guesses: int) -> Runner:
    """Greedy generate, with an assistant where one is given (its number of guesses held constant, as in foretell)."""

    def run(ids: list[int]) -> list[int]:
        extra = {} if assistant is None else {"assistant_model": assistant}
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **extra,
            )
        return out[0, len(ids) :].tolist()

    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = guesses
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
    return run


def our_runner(engine: foretell.Engine, tokens: int) -> Runner:
    """foretell's engine, greedy, the same number of tokens, end tokens ignored."""

    def run(ids: list[int]) -> list[int]:
        end_ids = engine.model.spec.eos_token_ids
        return engine.generate(
            ids, temperature=0.0, max_new_tokens=tokens, ignore_eos=True, banned_token_ids=tuple(end_ids)
        ).token_ids

    return run


def load_prompts(tokenizer: object, limit: int) -> list[list[int]]:
    """The first prompts of every category of the bundled suite, in turn, as token ids."""
    items = [json.loads(line) for line in bundled_path("suite").read_text(encoding="utf-8").splitlines()]
    by_category: dict[str, list[str]] = {}
    for item in items:
        by_category.setdefault(item["category"], []).append(item["turns"][0])
    turns = [texts[index] for index in range(limit) for texts in by_category.values() if index < len(texts)]
    return [tokenizer.encode(text) for text in turns[:limit]]  # type: ignore[attr-defined]


def llama_cpp(gguf: str | None) -> float | None:
    """Tokens per second of llama.cpp's plain decoding of the same weights, where llama-bench and a GGUF file are
    available."""
    program = shutil.which("llama-bench")
    if program is None or gguf is None:
        return None
    done = subprocess.run(
        [program, "-m", gguf, "-p", "0", "-n", "64", "-t", "2", "-r", "3", "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)[0]["avg_ts"])


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default=str(bundled_path("draft")))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--gguf")
    options = parser.parse_args()
    torch.set_num_threads(2)
    dtype = getattr(torch, options.dtype)
    prompts = load_prompts(load_tokenizer(options.target), options.prompts)
    plain = foretell.Engine.load(options.target, dtype=options.dtype)
    config = {
        "method": "draft_model",
        "model": options.draft,
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    speculative = plain.with_method(config)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
    assistant = AutoModelForCausalLM.from_pretrained(options.draft, dtype=dtype).eval()
    runners = {
        "transformers plain": transformers_runner(model, options.tokens, None, 0),
        "transformers assisted": transformers_runner(model, options.tokens, assistant, options.num_speculative_tokens),
        "foretell plain": our_runner(plain, options.tokens),
        "foretell draft_model": our_runner(speculative, options.tokens),
    }
    for run in runners.values():
        run(prompts[0][:16])
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    texts: dict[str, list[list[int]]] = {name: [] for name in runners}
    for turn in range(options.rounds):
        spent = dict.fromkeys(runners, 0.0)
        for ids in prompts:
            names = list(runners)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                begun = time.perf_counter()
                out = runners[name](ids)
                spent[name] += time.perf_counter() - begun
                if turn == 0:
                    texts[name].append(out)
        for name, value in spent.items():
            seconds[name].append(value)
        print(
            f"round {turn + 1}: " + ", ".join(f"{name} {value:.1f} s" for name, value in spent.items()), file=sys.stderr
        )
    count = options.tokens * len(prompts)
    speed = {name: count / statistics.median(values) for name, values in seconds.items()}
    base = texts["transformers plain"]
    print(
        f"{Path(options.target).name}, {options.dtype}, {len(prompts)} x {options.tokens} tokens, {options.rounds} rounds"
    )
    for name, value in speed.items():
        same = sum(a == b for a, b in zip(base, texts[name], strict=True))
        print(f"  {name:24s} {value:8.1f} tokens/s   same text as transformers plain: {same} of {len(base)}")
    outside = llama_cpp(options.gguf)
    print(f"  {'llama.cpp plain':24s} " + (f"{outside:8.1f} tokens/s" if outside else "    not installed"))
    ratios = {
        "plain / transformers plain": speed["foretell plain"] / speed["transformers plain"],
        "speculative / transformers assisted": speed["foretell draft_model"] / speed["transformers assisted"],
        "speculative / plain": speed["foretell draft_model"] / speed["foretell plain"],
    }
    for name, value in ratios.items():
        print(f"  {name:36s} {value:5.2f}")
    print(json.dumps({"argv": sys.argv[1:], "tokens_per_second": speed, "llama_cpp": outside, "ratios": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
