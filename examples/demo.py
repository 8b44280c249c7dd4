"""The program of ``make demo``: a real small model answers, its accepted guesses tinted, then plain against speculative.

The model is SmolLM2-135M-Instruct, fetched once (98 MB, ``foretell pull smollm2-135m``). Where it cannot be fetched, the
tiny bundled pair stands in, and a line says why; its target is then also made as costly as a model of 350M parameters
(same function, more arithmetic: recipes/inflate.py). The tokens of both sides must be identical; the speedup is whatever
was measured.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import foretell
from foretell.checkpoints.catalogue import DEFAULT, pulled
from foretell.cli.commands.pull import fetch
from foretell.core.errors import ForetellError
from foretell.kernels.build import cpu_flags
from foretell.model.trained import default_speculation

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What are the three primary colours, and what does one get by mixing two of them?"
PASSAGE = (
    "The lighthouse stands at the end of the old stone pier. Every evening the keeper climbs its hundred steps and "
    "lights the lamp. On clear nights sailors see it from twenty miles away."
)
QUESTIONS = (
    f"Repeat this text word for word:\n\n{PASSAGE}",
    "List the days of the week, one on each line, each followed by a short sentence about it.",
    "Write a Python class Point with x and y, and methods that add, subtract and scale points.",
)
CODE = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "Installation\n============\n\nTo install the package, run\n",
)
PATIENCE_S = 20.0  # a demo does not wait longer for a network that gives nothing
TINT, PLAIN = ("\033[36m", "\033[0m") if sys.stdout.isatty() else ("", "")


def show(engine: foretell.Engine, prompt: Any, **options: Any) -> None:
    """Stream one completion, kept guesses tinted."""
    stream = engine.stream(prompt, **options)
    for piece in stream:
        kept = piece.source.startswith("draft")
        print(f"{TINT if kept else ''}{piece.text}{PLAIN if kept else ''}", end="", flush=True)
    done = stream.completion
    print(
        f"\n\n[{done.config['implementation']}: {done.num_tokens} tokens in {done.num_steps} passes, "
        f"mean acceptance length {done.mean_acceptance_length:.2f}]\n"
    )


def race(guessing: foretell.Engine, prompts: Sequence[Any], what: str, *, temperature: float, rounds: int = 3) -> int:
    """Plain against speculative, prompt by prompt, turn by turn; 0 iff the tokens are identical."""
    plain = guessing.with_method("none")
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_new_tokens": 64}
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    tokens, identical = 0, True
    for engine in (plain, guessing):
        engine.generate(prompts[0], **{**options, "max_new_tokens": 8})
    for _ in range(rounds):
        spent = {"plain": 0.0, "speculative": 0.0}
        tokens = 0
        guessing.forget()  # else a method that learns from texts would guess those of the round before
        for prompt in prompts:
            a = plain.generate(prompt, **options)
            b = guessing.generate(prompt, **options)
            spent["plain"] += a.seconds_decode
            spent["speculative"] += b.seconds_decode
            tokens += a.num_tokens
            identical = identical and a.token_ids == b.token_ids
        for name, value in spent.items():
            seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    spec = plain.model.spec
    print(
        f"{what} ({spec.implementation}, {str(spec.dtype).removeprefix('torch.')}, method {guessing.speculative.method}): "
        f"plain {tokens / median['plain']:.1f} tokens/s, speculative {tokens / median['speculative']:.1f} tokens/s"
    )
    verdict = "identical" if identical else "DIFFERENT"
    print(f"speedup {median['plain'] / median['speculative']:.2f}x, tokens {verdict} (median of {rounds} rounds)")
    return 0 if identical else 1


def real() -> int:
    """The demo with SmolLM2."""
    dtype = "bfloat16" if "avx512_bf16" in cpu_flags() else None
    with Console(stderr=True).status(f"loading {DEFAULT}"):
        engine = foretell.Engine.load(DEFAULT, speculative=default_speculation(DEFAULT), dtype=dtype)

    def asked(question: str) -> list[int]:
        return engine.chat_prompt([{"role": "user", "content": question}])

    print(f"> {QUESTION}\n")
    show(engine, asked(QUESTION), temperature=0.0, max_new_tokens=120)
    return race(
        engine, [asked(question) for question in QUESTIONS], "three answers (a copy, a list, code)", temperature=0.0
    )


def tiny(*, sizes: Sequence[str] = (), rounds: int = 3) -> int:
    """The demo with the bundled pair. sizes: options of recipes/inflate.py, whose own come to 350M parameters."""
    print(CODE[1], end="")
    engine = foretell.Engine.load("bundled", speculative="draft_model")
    show(engine, CODE[1], temperature=0.9, seed=1, max_new_tokens=120)
    with tempfile.TemporaryDirectory() as directory:
        print("making the same target as costly as a 350M model ...", flush=True)
        # recipes/ is part of the checkout, not of the package.
        command = [sys.executable, "-m", "recipes.inflate", "--target", "bundled", "--out", directory, *sizes]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        draft = {"method": "draft_model", "model": "bundled/draft", "num_speculative_tokens": 5}
        engine = foretell.Engine.load(directory, speculative=draft)
        return race(engine, CODE, "at the cost of a 350M model", temperature=0.7, rounds=rounds)


def main() -> int:
    """The whole demo."""
    torch.set_num_threads(min(torch.get_num_threads(), 8))
    if pulled(DEFAULT) is None:
        try:
            fetch(DEFAULT, patience_s=PATIENCE_S)
        except ForetellError as error:
            print(f"the tiny bundled pair instead of {DEFAULT}: {error}\n", flush=True)
            return tiny()
    return real()


if __name__ == "__main__":
    sys.exit(main())
