"""The process that compiles a grammar before the server does. It is run as a script: it imports nothing of foretell.

Neither the compiler of schemas nor that of patterns has a limit on time, and a thread cannot be stopped. A process can.
Lines of JSON: first the tokenizer and the limits, then a grammar each, answered with its error or "". A line
{"gbnf": a grammar of llama.cpp's} is answered with {"grammar": the same in llguidance's form} or {"error": why not}.
"""

import json
import os
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from


def main() -> None:
    """Answer until the input ends."""
    os.nice(10)  # requests that are being decoded come first
    given = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (given["max_bytes"],) * 2)
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["n_vocab"], eos_token=given["eos_token"])
    limits = LLParserLimits(**given["limits"])
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        # CPU seconds, not those of a clock: what else runs on the machine does not count. The signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, given["cpu_seconds"])
        grammar = json.loads(line)
        if isinstance(grammar, dict):
            answer: object = _converted(grammar["gbnf"])
        else:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            answer = matcher.get_error() if matcher.is_error() else ""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(answer), flush=True)


def _converted(text: str) -> dict[str, str]:
    try:
        return {"grammar": grammar_from("gbnf", text)}
    except Exception as error:  # the converter raises various errors
        return {"error": str(error)}


if __name__ == "__main__":
    main()
