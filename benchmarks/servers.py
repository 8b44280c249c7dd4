"""Running servers beside each other under load: tokens a second, first token, and the gaps between updates.

    python -m benchmarks.servers --server ours=http://127.0.0.1:8000 --server llama.cpp=http://127.0.0.1:8080
                                 [--loads 1,4,8,16,32] [--rounds 3] [--tokens 96] [--temperature 0]

Any server with OpenAI's /v1/chat/completions. A round sends as many streamed requests as the load at once, and is timed
until the last has ended, prompts included; the servers take turns on the same messages (short ones of the bundled suite,
new ones in each round), in an order that rotates. Every request writes ``--tokens`` tokens (``ignore_eos``), which is
checked. Figures are medians of the rounds; ratios are to the first server's, in the same round. A gap is the time between
two updates of a request after its first: an update of a server that guesses may hold several tokens. Start the servers
with one model and the same threads; an idle one must not compute.
"""

import argparse
import json
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from time import perf_counter
from urllib.parse import urlsplit

from foretell.bench import load_suite

MAX_CHARACTERS = 400
"""Longer messages of the suite are left out, so that decoding is most of the time."""


@dataclass
class Reply:
    """One streamed answer: seconds of its updates, since the round began, and its tokens."""

    at: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Round:
    """What a server made of a round."""

    tokens_a_second: float
    first_s: float  # median
    gap_p99_s: float


def ask(
    url: str, model: str, message: str, tokens: int, temperature: float, seed: int, begun: float, into: Reply
) -> None:
    """Send a message, and read its answer to the end."""
    place = urlsplit(url)
    body = {
        "model": model, "messages": [{"role": "user", "content": message}], "max_tokens": tokens, "seed": seed,
        "temperature": temperature, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    connection = HTTPConnection(place.hostname or "", place.port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            into.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
            return
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                into.tokens = event["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                into.at.append(perf_counter() - begun)
    except OSError as error:
        into.error = str(error)
    finally:
        connection.close()


def run(url: str, model: str, messages: Sequence[str], tokens: int, temperature: float) -> Round:
    """As many requests at once as there are messages. Raises SystemExit where an answer is not as long as asked."""
    replies = [Reply() for _ in messages]
    begun = perf_counter()
    threads = [
        threading.Thread(target=ask, args=(url, model, message, tokens, temperature, seed, begun, reply))
        for seed, (message, reply) in enumerate(zip(messages, replies, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - begun
    for reply in replies:
        if reply.error or reply.tokens != tokens:
            raise SystemExit(f"{url}: {reply.error or f'an answer of {reply.tokens} tokens, {tokens} were asked for'}")
    gaps = sorted(late - early for reply in replies for early, late in zip(reply.at, reply.at[1:], strict=False))
    return Round(
        len(messages) * tokens / seconds,
        statistics.median(reply.at[0] for reply in replies),
        gaps[int(0.99 * len(gaps))],
    )


def model_of(url: str) -> str:
    """The first model that a server lists."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request("GET", "/v1/models")
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, help="NAME=URL; others are compared to the first")
    parser.add_argument("--loads", default="1,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    servers = dict(text.split("=", 1) for text in args.server)
    models = {name: model_of(url) for name, url in servers.items()}
    messages = [item.prompt for item in load_suite() if item.format == "chat" and len(item.prompt) <= MAX_CHARACTERS]
    for name, url in servers.items():  # not counted
        run(url, models[name], messages[:2], args.tokens, args.temperature)
    print("| requests at once | server | tokens/s | ratio to the first | first token, s | p99 between updates, ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    begin = 2
    for load in map(int, args.loads.split(",")):
        found: dict[str, list[Round]] = {name: [] for name in servers}
        for number in range(args.rounds):
            chosen = [messages[(begin + at) % len(messages)] for at in range(load)]
            begin += load
            names = [*servers][number % len(servers) :] + [*servers][: number % len(servers)]
            for name in names:
                found[name].append(run(servers[name], models[name], chosen, args.tokens, args.temperature))
        first = found[next(iter(servers))]
        for name, rounds in found.items():
            ratios = [one.tokens_a_second / base.tokens_a_second for one, base in zip(rounds, first, strict=True)]
            print(
                f"| {load} | {name} | {statistics.median(one.tokens_a_second for one in rounds):.1f} | "
                f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] | "
                f"{statistics.median(one.first_s for one in rounds):.2f} | "
                f"{1000 * statistics.median(one.gap_p99_s for one in rounds):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
