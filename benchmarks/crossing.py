"""Draft models of another vocabulary beside plain decoding: acceptance, tokens a step, speed and equality of the texts.

    python benchmarks/crossing.py --target qwen2.5-coder-1.5b.gguf --draft SmolLM2-135M-Instruct.gguf

Plain decoding and crossing on the same prompts, seeds and temperatures; the first run of each is not counted. --repeats 2
times every way twice, in turn, and takes each way's fastest. Rates and texts do not depend on what else the machine does.
"""

import argparse
import time
from itertools import zip_longest
from typing import Any

from foretell import Completion, Engine

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits and their colours.",
    "Write a function in C that reverses a string in place.",
    "Write a regular expression for dates like 2024-05-31, and explain it.",
    "What does the HTTP status code 404 mean?",
    "Translate into French: The train leaves at nine in the morning.",
    "Write a SQL query that counts the orders of each customer.",
    "A shop sells pens at 3 for 2 dollars. What do 12 pens cost? Explain the steps.",
    "Write a short poem about the sea.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Name three causes of the First World War, one sentence each.",
)
WAYS = ("plain", "tli")


def main() -> None:
    """Print one line for each way and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--weights", default="auto", help="of the target, e.g. int8 for kinds without a kernel")
    given = parser.parse_args()
    plain = Engine.load(given.target, weights=given.weights)
    prompts = [chat(plain, text) for text in PROMPTS[: given.prompts]]
    draft = {"method": "draft_model", "model": given.draft, "num_speculative_tokens": given.guesses}
    engines = {
        way: plain.with_method({"method": "none"} if way == "plain" else {**draft, "vocabulary": way}) for way in WAYS
    }
    print(
        "| vocabulary | T | accepted, of guesses | given the one before | tokens a step | same texts | tokens/s | speedup |"
    )
    print("| --- | --: | --: | --- | --: | --: | --: | --: |")
    for temperature in given.temperature:
        asked: dict[str, Any] = {"max_new_tokens": given.max_new_tokens, "temperature": temperature, "seed": 1}
        fastest = dict.fromkeys(WAYS, 0.0)
        found: dict[str, list[Completion]] = {}
        for turn in range(given.repeats):
            for way, engine in engines.items():
                if not turn:
                    engine.generate(prompts[0], max_new_tokens=8)
                start = time.perf_counter()
                found[way] = [engine.generate(prompt, **asked) for prompt in prompts]
                speed = sum(one.num_tokens for one in found[way]) / (time.perf_counter() - start)
                fastest[way] = max(fastest[way], speed)
        for way in WAYS:
            print(line(way, temperature, found[way], found["plain"], fastest[way], fastest["plain"]), flush=True)


def chat(engine: Engine, text: str) -> list[int]:
    """The prompt's tokens."""
    return engine.chat_prompt([{"role": "user", "content": text}])


def line(
    way: str, temperature: float, found: list[Completion], plain: list[Completion], speed: float, base: float
) -> str:
    """One row of the table."""
    steps, kept = sum(one.num_steps for one in found), sum(one.num_accepted_tokens for one in found)
    tried = sum(one.num_draft_tokens for one in found)
    kept_at = [sum(each) for each in zip_longest(*(one.num_accepted_tokens_per_pos for one in found), fillvalue=0)]
    first = sum(one.num_draft_tokens_per_pos[0] for one in found if one.num_draft_tokens_per_pos)
    rates = " ".join(f"{now / max(1, before):.2f}" for before, now in zip([first, *kept_at], kept_at, strict=False))
    same = sum(one.token_ids == other.token_ids for one, other in zip(found, plain, strict=True))
    return (
        f"| {way} | {temperature:g} | {kept / max(1, tried):.2f} | {rates} | {1 + kept / steps:.2f} | "
        f"{same}/{len(found)} | {speed:.1f} | {speed / base:.2f} |"
    )


if __name__ == "__main__":
    main()
