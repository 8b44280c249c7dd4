"""Our speculation beside llama.cpp's own on the same GGUF files, greedy, batch 1, interleaved.

    python -m benchmarks.speculation_llamacpp --program PATH/llama-speculative-simple --bench PATH/llama-bench \\
        --target TARGET.gguf --draft DRAFT.gguf [--guesses 2 4] [--methods draft_model:2 suffix auto:draft_model:4]

Theirs: ``llama-speculative-simple`` with the draft model (or head) and each number of guesses, and with its n-gram
drafter; plain decoding is ``llama-bench``'s, whose passes leave sampling out. All figures are tokens a second behind the
prompt. Each prompt is one round; ratios are to our own plain decoding and to the best of theirs, prompt by prompt. Ours are
checked for plain decoding's tokens. Prompts are raw beginnings of texts, so that both sides read the same tokens.
"""

import argparse
import re
import statistics
import subprocess
from collections.abc import Callable

import torch
from benchmarks.against_llamacpp import theirs as their_plain

from foretell import Engine
from foretell.bench.run import parse_method
from foretell.core.params import SamplingParams

PROMPTS = (
    "def quicksort(values):",
    "# A class for a bank account with deposit, withdraw and history\nclass Account:",
    "The three laws of motion, explained to a child:",
    "import csv\n\ndef read_rows(path):",
    "A letter to a neighbour whose dog barks at night:\n\nDear",
    "def test_parse_date():\n    assert parse_date('2024-01-31') ==",
)
SPEED = re.compile(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


def their_speculative(arguments: list[str], prompt: str, tokens: int) -> float:
    """Tokens a second of llama-speculative-simple. Raises RuntimeError with its last line where it prints none."""
    command = [*arguments, "-p", prompt, "-n", str(tokens), "--temp", "0", "-c", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, errors="replace")
    found = SPEED.search(done.stdout + done.stderr)
    if found is None:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"{arguments[0]} printed no speed: {last}")
    return float(found.group(1))


def ours(engine: Engine, prompt: str, tokens: int) -> tuple[float, list[int]]:
    """Tokens a second, and the tokens."""
    options = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    completion = engine.generate(prompt, options)
    return completion.tokens_per_second, list(completion.token_ids)


def main() -> None:
    """Command line: a table with a row a choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="llama-speculative-simple")
    parser.add_argument("--bench", required=True, help="llama-bench")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="a draft model, or with --spec-type draft-eagle3 a head")
    parser.add_argument("--spec-type", default="draft-simple", help="what theirs takes the draft for")
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--methods", nargs="+", default=["draft_model:2", "draft_model:4", "suffix"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plain_engine = Engine.load(args.target, dtype="bfloat16", speculative="none")
    methods = {text: parse_method(text, draft=None if "model=" in text else args.draft) for text in args.methods}
    engines = {
        text: plain_engine.with_method(method.config, speculation=method.speculation)
        for text, method in methods.items()
    }
    base = [args.program, "-m", args.target, "-t", str(args.threads)]
    draft = [*base, "-md", args.draft, "--spec-type", args.spec_type, "-td", str(args.threads), "--spec-draft-n-max"]
    runs: dict[str, Callable[[str], float]] = {
        "llama.cpp, plain": lambda prompt: their_plain(
            args.bench, args.target, args.threads, "-p", "0", "-n", str(args.tokens)
        ),
        **{
            f"llama.cpp, draft, {n} guesses": lambda prompt, n=n: their_speculative(
                [*draft, str(n)], prompt, args.tokens
            )
            for n in args.guesses
        },
        "llama.cpp, ngram-simple": lambda prompt: their_speculative(
            [*base, "--spec-type", "ngram-simple"], prompt, args.tokens
        ),
    }
    speeds: dict[str, list[float]] = {name: [] for name in (*runs, "plain", *args.methods)}
    with torch.inference_mode():
        for engine in (plain_engine, *engines.values()):
            ours(engine, PROMPTS[-1], 16)  # not timed
        for prompt in PROMPTS:
            for name, run in runs.items():
                speeds[name].append(run(prompt))
            speed, plain = ours(plain_engine, prompt, args.tokens)
            speeds["plain"].append(speed)
            for method, engine in engines.items():
                speed, tokens = ours(engine, prompt, args.tokens)
                speeds[method].append(speed)
                if tokens != plain:
                    raise SystemExit(f"{method} parted from plain decoding behind {prompt!r}")
    best = max(runs, key=lambda name: statistics.median(speeds[name]))
    print(f"| | tokens/s, median of {len(PROMPTS)} prompts | to our plain | to the best of theirs ({best}) |")
    print("| --- | --- | --- | --- |")
    for name, values in speeds.items():
        cells = [f"{statistics.median(values):.1f}"]
        for other in ("plain", best):
            ratios = sorted(value / base_ for value, base_ in zip(values, speeds[other], strict=True))
            cells.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
        print(f"| {name if name in runs else 'foretell, ' + name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
