"""The process that compiles a grammar before the server does. It is run as a script: of foretell it imports one file alone.

Neither the compiler of schemas nor that of patterns has a limit on time, and a thread cannot be stopped. A process can.
Lines of JSON: first the tokenizer and the limits, then a grammar each, answered with its error or "". A line
{"gbnf": a grammar of llama.cpp's} is answered with {"grammar": the same in llguidance's form} or {"error": why not}.
"""

import json
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

sys.path.append(str(Path(__file__).parents[3]))  # foretell may lie where this process does not look
from foretell.core.platform import cpu_limit, limit_memory, lower_priority


def main() -> None:
    """Answer until the input ends."""
    lower_priority(10)  # requests that are being decoded come first
    given = json.loads(sys.stdin.readline())
    limit_memory(given["max_bytes"])
    tokenizer = LLTokenizer(given["tokenizer"], n_vocab=given["n_vocab"], eos_token=given["eos_token"])
    limits = LLParserLimits(**given["limits"])
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        grammar = json.loads(line)
        with cpu_limit(given["cpu_seconds"]):
            if isinstance(grammar, dict):
                answer: object = _converted(grammar["gbnf"])
            else:
                matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
                if not matcher.is_error():
                    matcher.compute_bitmask()
                answer = matcher.get_error() if matcher.is_error() else ""
        print(json.dumps(answer), flush=True)


def _converted(text: str) -> dict[str, str]:
    try:
        return {"grammar": grammar_from("gbnf", text)}
    except Exception as error:  # the converter raises various errors
        return {"error": str(error)}


if __name__ == "__main__":
    main()
