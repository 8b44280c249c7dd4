"""Random requests over HTTP: each by every method, whole and in a stream, against plain decoding of the same server.

    python -m tests.stress.differ [--minutes 5] [--seed 1] [--url http://127.0.0.1:8000]
    python -m tests.stress.differ --seed 1 --only 17        # one request again, with all that it was and gave

Every parameter that decides a text occurs, alone and with others: temperature, top_p, top_k, min_p, penalties, logit_bias,
stop texts and ids, fewest and most tokens, n, log probabilities, echo, seeds, formats, tools, predictions; on
``/v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``. Equal must be: texts, token ids, calls, log
probabilities, offsets, usage, ends; and where plain decoding is refused, status and message. Request number i is a
function of --seed and i. --clients requests run at once, each with all its variants, so that batches are mixed.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from foretell.bench import Item, load_suite
from tests.stress.answers import RESPONSES, Seen, difference, read
from tests.stress.served import TIMEOUT, Check, add_options, report, served
from tests.stress.soak import CHAT, SCHEMA, TEXT, usable_methods

SERVE = "bundled --speculation on --also hybrid --also eagle3 --also medusa --max-num-seqs 8"
STOPS = (".", "\n", "the", " a", "e", "in", "))", ", ", "\n\n", "def", "ü", "1", "self.", " of the ", '"', "is")
TOOLS: tuple[dict[str, Any], ...] = (
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}},
                                       "required": ["city"], "additionalProperties": False}},
    {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}},
    {"name": "now"},
)  # fmt: skip
FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}}},
    {"regex": "[a-c]{2,9}( [0-9]+)*"},
    {"guided_choice": ["yes", "no", "yes and no", "yes, but"]},
    {"grammar": 'root ::= item+\nitem ::= "a" | "bc" | " "'},
)


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request: what is asked, and how it may be guessed for beside the usual ways."""

    path: str
    body: dict[str, Any]
    options: dict[str, Any]  # of a speculative configuration


def request(seed: int, number: int, model: str, vocab_size: int) -> Ask:
    """Request ``number``: each parameter is there with a chance, and drawn where it is."""
    draw = random.Random(f"{seed}/{number}")
    path = draw.choices((TEXT, CHAT, RESPONSES), (5, 5, 2))[0]
    body: dict[str, Any] = {"model": model, "seed": draw.choice((draw.randrange(100), -5, 2**53, 2**63, -(2**63)))}
    sampled: dict[str, Callable[[], Any]] = {
        "temperature": lambda: draw.choice((0, 0, 0.3, 0.7, 1.0, 1.0, 1.5, 8.0)),
        "top_p": lambda: draw.choice((0.05, 0.5, 0.9, 0.99)),
        "top_k": lambda: draw.choice((-1, 0, 1, 2, 5, 40, 100_000)),
        "min_p": lambda: draw.choice((0.0, 0.02, 0.2, 1.0)),
        "presence_penalty": lambda: draw.choice((-2, -0.5, 0.6, 2)),
        "frequency_penalty": lambda: draw.choice((-2, -0.3, 0.4, 2)),
        "repetition_penalty": lambda: draw.choice((0.7, 1.1, 1.5, 5.0)),
        "logit_bias": lambda: {
            str(draw.randrange(vocab_size if draw.random() < 0.5 else 300)): draw.choice((-100, -3, 2.5, 8, 100))
            for _ in range(draw.choice((1, 1, 3, 30)))
        },
        "stop": lambda: draw.sample(STOPS, draw.choice((1, 2, 5))) if draw.random() < 0.7 else draw.choice(STOPS),
        "stop_token_ids": lambda: [draw.randrange(300) for _ in range(draw.choice((1, 20)))],
        "ignore_eos": lambda: True,
        "min_tokens": lambda: draw.choice((0, 1, 5, 17)),
        "stream_options": lambda: draw.choice(({"include_usage": True}, {"include_usage": True,
                                                                         "continuous_usage_stats": True})),
    }  # fmt: skip
    shares = {"temperature": 0.9, "stop": 0.35, "stream_options": 0.6}
    for name, value in sampled.items():
        if draw.random() < shares.get(name, 0.17):
            body[name] = value()
    most = draw.choice((0, 1, 2, 3, 8, 20, 20, 40, 70))
    body["max_tokens"] = max(most, body.get("min_tokens", 0))
    if path == RESPONSES:
        body.pop("stream_options", None)
        body["max_output_tokens"] = body.pop("max_tokens")
    else:
        if draw.random() < 0.2:
            body["n"] = draw.choice((2, 3))
        body["provenance"] = draw.random() < 0.7
    body |= {TEXT: _text, CHAT: _chat, RESPONSES: _response}[path](draw, body)
    options = {"num_speculative_tokens": draw.choice((1, 3, 8, 12))} if draw.random() < 0.5 else {}
    return Ask(path, body, options)


@cache
def _suite() -> list[Item]:
    return [item for item in load_suite() if item.prompt]


def _prompt(draw: random.Random) -> str:
    text = draw.choice(_suite()).prompt[: draw.choice((20, 120, 400, 1200))]
    if draw.random() < 0.25:  # much to be copied
        text = (text[:60] + "\n") * draw.choice((3, 8))
    return text if draw.random() < 0.9 else f"Grüße 😀 {text[:50]} naïve 漢字"


def _text(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt": _prompt(draw)}
    if draw.random() < 0.15:
        found["prompt"] = [_prompt(draw), _prompt(draw)]
    elif draw.random() < 0.15:
        found["prompt"] = [draw.randrange(8000) for _ in range(draw.choice((1, 9, 40)))]
    if draw.random() < 0.4:
        found["logprobs"] = draw.choice((0, 1, 3, 5))
    if draw.random() < 0.2:
        found["echo"] = True
    return found | (draw.choice(FORMATS) if draw.random() < 0.12 else {})


def _chat(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": _prompt(draw)}]
    if draw.random() < 0.3:
        messages.insert(0, {"role": draw.choice(("system", "developer")), "content": "Be short."})
    found: dict[str, Any] = {"messages": messages}
    if draw.random() < 0.15:
        messages.append({"role": "assistant", "content": "Well, I"})
        found |= {"continue_final_message": True, "add_generation_prompt": False}
    elif draw.random() < 0.2:
        messages += [
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Go on: " + _prompt(draw)[:80]},
        ]
    if draw.random() < 0.4:
        found |= {"logprobs": True, "top_logprobs": draw.choice((0, 2, 5))}
    chance = draw.random()
    if chance < 0.12:
        return found | draw.choice(FORMATS)
    if chance < 0.35:
        given = draw.sample(TOOLS, draw.choice((1, 2, 3)))
        named: dict[str, Any] = {"type": "function", "function": {"name": given[0]["name"]}}
        found |= {
            "tools": [{"type": "function", "function": tool} for tool in given],
            "tool_choice": draw.choice(("auto", "none", "required", named)),
        }
        if draw.random() < 0.3:
            found["parallel_tool_calls"] = draw.random() < 0.5
        if draw.random() < 0.6:  # room for a whole call
            found["max_tokens"] = max(60, body["max_tokens"])
    return found


def _response(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"input": _prompt(draw)}
    if draw.random() < 0.3:
        found["instructions"] = "Be short."
    if draw.random() < 0.3:
        found |= {"include": ["message.output_text.logprobs"], "top_logprobs": draw.choice((0, 2))}
    if draw.random() < 0.15:
        found["text"] = {"format": {"type": "json_object"}}
    elif draw.random() < 0.2:
        found |= {"tools": [{"type": "function", **TOOLS[0]}], "tool_choice": draw.choice(("auto", "required"))}
    return found


def variants(ask: Ask, methods: list[str], plain: "Seen") -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what the body has beside): each method as it is by default or with the request's options, whole and
    streamed."""
    ways: list[tuple[str, dict[str, Any]]] = [("none", {"speculative": False})]
    ways += [(name, {"speculative": {"method": name, **ask.options}}) for name in methods if name != "none"]
    if ask.path == CHAT and plain.choices and not plain.choices[0].calls:
        text = plain.choices[0].text
        wrong = text[: len(text) // 2] + "?!" + text[len(text) // 2 :]
        ways += [(f"prediction ({how})", {"prediction": {"type": "content", "content": content}})
                 for how, content in (("right", text), ("wrong", wrong)) if content]  # fmt: skip
    for name, more in ways:
        for stream in (False, True):
            if name != "none" or stream:  # the other one is what it is compared with
                yield f"{name}, {'streamed' if stream else 'whole'}", {**more, "stream": stream}


def spelt(body: dict[str, Any]) -> dict[str, Any]:
    """Without what a stream alone takes, where it is none."""
    return body if body["stream"] else {key: value for key, value in body.items() if key != "stream_options"}


# -- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    methods: Counter[str] = field(default_factory=Counter)  # answers compared
    kinds: Counter[str] = field(default_factory=Counter)  # what plain answers had


def count_kinds(kinds: Counter[str], plain: Seen) -> None:
    """What there was to be compared: an answer without text is always equal."""
    for said in plain.choices.values():
        kinds[f"end {said.end}"] += 1
        kinds["text"] += bool(said.text)
        kinds["token ids"] += bool(said.ids)
        kinds["log probabilities"] += bool(said.values)
        kinds["calls"] += bool(said.calls)


async def compare(
    client: httpx.AsyncClient, ask: Ask, number: int, methods: list[str], seed: int, tally: Tally
) -> None:
    """One request by all variants at once."""
    plain = await read(client, ask.path, spelt(ask.body | {"speculative": False, "stream": False}))
    tally.counts["served" if plain.status == 200 else f"refused ({plain.status})"] += 1
    count_kinds(tally.kinds, plain)
    if plain.status >= 500:
        tally.wrong.append(f"--seed {seed} --only {number}, plain: {plain.status} {plain.refusal}")
    ways = list(variants(ask, methods, plain))
    bodies = [spelt(ask.body | more) for _, more in ways]
    told = len(tally.wrong)
    found = await asyncio.gather(*(read(client, ask.path, body) for body in bodies), return_exceptions=True)
    for (name, _), seen in zip(ways, found, strict=True):
        tally.methods[name.partition(",")[0]] += 1
        trouble = f"{type(seen).__name__}: {seen}" if isinstance(seen, BaseException) else difference(plain, seen)
        if trouble is not None:
            tally.wrong.append(f"--seed {seed} --only {number}, {ask.path}, {name}: {trouble}")
    if len(tally.wrong) > told:
        print("\n".join([*tally.wrong[told:], json.dumps(ask.body)]), file=sys.stderr, flush=True)


async def differ(url: str, args: argparse.Namespace) -> Tally:
    """Requests in their order until the time is over, or --requests of them."""
    tally, end = Tally(), time.monotonic() + 60 * args.minutes
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        listed = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
        model = str(listed["id"])
        methods = await usable_methods(client, model)
        numbers = iter([args.only] if args.only is not None else range(args.requests or sys.maxsize))

        async def client_loop() -> None:
            while args.requests or args.only is not None or time.monotonic() < end:
                number = next(numbers, None)
                if number is None:
                    return
                await compare(
                    client, request(args.seed, number, model, args.vocab_size), number, methods, args.seed, tally
                )

        await asyncio.gather(*(client_loop() for _ in range(args.clients)))
    return tally


def judged(tally: Tally, args: argparse.Namespace) -> int:
    """The report; the exit status."""
    answered = tally.counts["served"]
    wrong = "".join(f"\n      {line}" for line in tally.wrong[:20])
    checks = [
        Check("requests", answered > 0, ", ".join(f"{count} {name}" for name, count in tally.counts.items())),
        Check("most are served", answered >= 0.6 * tally.counts.total(), f"{answered} of {tally.counts.total()}"),
        Check(
            "methods", len(tally.methods) >= 4, ", ".join(f"{name} {count}" for name, count in tally.methods.items())
        ),
        Check("much to compare", _is_much(tally), ", ".join(f"{count} {name}" for name, count in tally.kinds.items())),
        Check("as plain decoding", not tally.wrong, f"{len(tally.wrong)} of {tally.methods.total()} differ{wrong}"),
    ]
    return report(checks, {"seed": args.seed, "counts": dict(tally.counts), "answers": dict(tally.methods)})


def _is_much(tally: Tally) -> bool:
    """Whether every kind of thing was there to be compared; of few requests, whether there were texts."""
    names = ("text", "token ids", "log probabilities", "calls") if tally.counts["served"] >= 100 else ("text",)
    return all(tally.kinds[name] for name in names)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(serve_args=SERVE)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--requests", type=int, help="so many, instead of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this request alone")
    parser.add_argument("--clients", type=int, default=2, help="requests at once, each with all its variants")
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args(argv)
    with served(args) as server:
        tally = asyncio.run(differ(server.url, args))
    return judged(tally, args)


if __name__ == "__main__":
    sys.exit(main())
