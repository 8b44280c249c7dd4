"""Draft models of another vocabulary beside plain decoding: acceptance, speed and equality of the texts.

    python benchmarks/crossing.py --target qwen2.5-coder-1.5b --draft smollm2-135m

Every way of crossing on the same prompts, seeds and temperatures; the first run of each is not counted.
"""

import argparse
import time

from foretell import Engine

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits and their colours.",
    "Write a function in C that reverses a string in place.",
)


def main() -> None:
    """Print one line for each way and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    given = parser.parse_args()
    plain = Engine.load(given.target)
    prompts = [plain.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    print("vocabulary | T | tokens/s | speedup | accepted a step | acceptance rate | same texts")
    for temperature in (0.0, 1.0):
        asked = {"max_new_tokens": given.max_new_tokens, "temperature": temperature, "seed": 1}
        baseline, expected = 0.0, []
        for way in ("plain", "tli", "slem"):
            config = {"method": "none"} if way == "plain" else {
                "method": "draft_model", "model": given.draft, "vocabulary": way,
                "num_speculative_tokens": given.guesses,
            }  # fmt: skip
            engine = plain.with_method(config)
            engine.generate(prompts[0], **asked)
            start = time.perf_counter()
            found = [engine.generate(prompt, **asked) for prompt in prompts]
            speed = sum(c.num_tokens for c in found) / (time.perf_counter() - start)
            if way == "plain":
                baseline, expected = speed, [c.token_ids for c in found]
            steps, kept = sum(c.num_steps for c in found), sum(c.num_accepted_tokens for c in found)
            rate = kept / max(1, sum(c.num_draft_tokens for c in found))
            same = sum(c.token_ids == ids for c, ids in zip(found, expected, strict=True))
            print(
                f"{way} | {temperature:g} | {speed:.1f} | {speed / baseline:.2f} | {kept / steps:.2f} | {rate:.2f} | "
                f"{same}/{len(found)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
