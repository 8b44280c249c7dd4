"""The program of ``make demo``: speculative text of the bundled models, and the measured speedup.

First the bundled target generates with the bundled draft: accepted guesses are tinted. Then the same target is made as
costly as a model of 350M parameters (same function, more arithmetic: recipes/inflate.py) and decodes the same prompts
with and without guessing, turn by turn. The tokens must be identical; the speedup is whatever was measured.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import foretoken

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "Installation\n============\n\nTo install the package, run\n",
)
TINT, PLAIN = ("\033[36m", "\033[0m") if sys.stdout.isatty() else ("", "")


def show(engine: foretoken.Engine) -> None:
    """Stream one completion, kept guesses tinted."""
    stream = engine.stream(PROMPTS[1], temperature=0.9, seed=1, max_new_tokens=120)
    print(PROMPTS[1], end="")
    for piece in stream:
        kept = piece.source.startswith("draft")
        print(f"{TINT if kept else ''}{piece.text}{PLAIN if kept else ''}", end="", flush=True)
    done = stream.completion
    print(
        f"\n\n[{done.config['implementation']}: {done.num_tokens} tokens in {done.num_steps} passes, "
        f"mean acceptance length {done.mean_acceptance_length:.2f}]\n"
    )


def race(directory: str, rounds: int = 3) -> int:
    """Plain against speculative on the inflated target, interleaved; 0 iff the tokens are identical."""
    plain = foretoken.Engine.load(directory)
    guessing = plain.with_method({"method": "draft_model", "model": "bundled/draft", "num_speculative_tokens": 5})
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    tokens = 0
    identical = True
    for engine in (plain, guessing):
        engine.generate(PROMPTS[0], temperature=0.0, max_new_tokens=8)
    for _ in range(rounds):
        spent = {"plain": 0.0, "speculative": 0.0}
        tokens = 0
        for prompt in PROMPTS:
            a = plain.generate(prompt, temperature=0.7, seed=1, max_new_tokens=48)
            b = guessing.generate(prompt, temperature=0.7, seed=1, max_new_tokens=48)
            spent["plain"] += a.seconds_decode
            spent["speculative"] += b.seconds_decode
            tokens += a.num_tokens
            identical = identical and a.token_ids == b.token_ids
        for name, value in spent.items():
            seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"at the cost of a 350M model ({plain.model.spec.implementation}, {plain.model.spec.dtype}): "
        f"plain {tokens / median['plain']:.1f} tokens/s, speculative {tokens / median['speculative']:.1f} tokens/s"
    )
    verdict = "identical" if identical else "DIFFERENT"
    print(f"speedup {median['plain'] / median['speculative']:.2f}x, tokens {verdict} (median of {rounds} rounds)")
    return 0 if identical else 1


def main() -> int:
    """The whole demo."""
    torch.set_num_threads(min(torch.get_num_threads(), 8))
    show(foretoken.Engine.load("bundled", speculative="draft_model"))
    with tempfile.TemporaryDirectory() as directory:
        print("making the same target as costly as a 350M model ...", flush=True)
        # recipes/ is part of the checkout, not of the package.
        command = [sys.executable, "-m", "recipes.inflate", "--target", "bundled", "--out", directory]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return race(directory)


if __name__ == "__main__":
    sys.exit(main())
