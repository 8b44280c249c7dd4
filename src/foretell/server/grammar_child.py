"""The process that compiles a grammar before the server does. It is run as a script: it imports nothing of foretell.

Neither the compiler of schemas nor that of patterns has a limit on time, and a thread cannot be stopped. A process can.
Lines of JSON: first the tokenizer and the limits, then a grammar each, answered with its error or "".
"""

import json
import os
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


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
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(matcher.get_error() if matcher.is_error() else ""), flush=True)


if __name__ == "__main__":
    main()
