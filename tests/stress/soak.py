"""A long mixed load on a server: every text must equal that of its request alone, and no requests or memory may remain.

    python -m tests.stress.soak [--minutes 20] [--clients 16] [--url http://127.0.0.1:8000]

Clients send requests of a fixed pool with fixed seeds, each time with a method chosen at random: with the default
verifier the text does not depend on it. A third hang up at a random moment, one request in ten is malformed.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from foretell.bench import load_suite
from tests.stress.answers import Seen, difference, read
from tests.stress.served import TIMEOUT, Check, Served, add_options, report, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
METHODS = ("none", "draft_model", "ngram", "suffix", "eagle3", "medusa", "hybrid", "kangaroo")
CANCELLED, MALFORMED = 1 / 3, 1 / 10
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
MALFORMED_BODIES: tuple[tuple[str, bytes], ...] = (
    (TEXT, b""),
    (TEXT, b"{"),
    (TEXT, b"[]"),
    (TEXT, b'{"model": "MODEL"}'),
    (TEXT, b'{"model": "MODEL", "prompt": 5}'),
    (TEXT, b'{"model": "MODEL", "prompt": "a", "max_tokens": -1}'),
    (TEXT, b'{"model": "MODEL", "prompt": "a", "temperature": 1e999}'),
    (TEXT, b'{"model": "MODEL", "prompt": "a", "temperature": "hot"}'),
    (TEXT, b'{"model": "MODEL", "prompt": "a", "temprature": 1}'),
    (TEXT, b'{"model": "no such model", "prompt": "a"}'),
    (TEXT, b'{"model": "MODEL", "prompt": [99999999]}'),
    (TEXT, b'{"model": "MODEL", "prompt": "a", "speculative": {"method": "no_such_method"}}'),
    (TEXT, b'{"model": "MODEL", "prompt": "\xff\xfe"}'),
    (CHAT, b'{"model": "MODEL", "messages": []}'),
    (CHAT, b'{"model": "MODEL", "messages": [{"role": "nobody", "content": "a"}]}'),
    (CHAT, b'{"model": "MODEL", "messages": "hello", "n": 0}'),
)


@dataclass
class Tally:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss: list[tuple[float, float]] = field(default_factory=list)  # (minutes, MiB)
    rates: list[float] = field(default_factory=list)  # accepted / drafted of each minute
    speed: list[float] = field(default_factory=list)  # tokens a second of each minute


def pool(model: str, size: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of distinct requests; every kind of parameter occurs in some."""
    items = [item for item in load_suite() if item.prompt]
    made: list[tuple[str, dict[str, Any]]] = []
    for index in range(size):
        draw = random.Random(index)
        text = items[index * 7 % len(items)].prompt[: draw.choice((40, 200, 600, 1200))]
        body: dict[str, Any] = {"model": model, "seed": index, "max_tokens": draw.choice((4, 16, 32, 64))}
        body["temperature"] = draw.choice((0, 0.5, 0.8, 1.0, 1.2))
        for name, values in {
            "top_p": (0.9, 0.5), "top_k": (5, 40), "min_p": (0.05,), "presence_penalty": (0.5, -0.5),
            "frequency_penalty": (0.4,), "repetition_penalty": (1.2,), "n": (2, 3), "stop": ([".", "the"], "\n"),
            "min_tokens": (4,), "logit_bias": ({"40": 2.0, "50": -3.0},), "ignore_eos": (True,),
        }.items():  # fmt: skip
            if draw.random() < 0.2:
                body[name] = draw.choice(values)
        if index % 12 == 5:
            body = {key: body[key] for key in ("model", "seed", "max_tokens", "temperature")} | {"max_tokens": 48}
            schema = {"name": "reply", "schema": SCHEMA, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if index % 12 == 5 or index % 2:
            logprobs = {"logprobs": True, "top_logprobs": 2}
            made.append((CHAT, body | {"messages": [{"role": "user", "content": text}]}))
        else:
            logprobs = {"logprobs": 2}
            made.append((TEXT, body | {"prompt": text}))
        if draw.random() < 0.2:
            made[-1][1].update(logprobs)
    return made


async def usable_methods(client: httpx.AsyncClient, model: str) -> list[str]:
    """The methods that this server has loaded."""
    usable = []
    for method in METHODS:
        body = {"model": model, "prompt": "a", "max_tokens": 1, "speculative": {"method": method}}
        if (await client.post(TEXT, json=body)).status_code == 200:
            usable.append(method)
    return usable


async def solos(client: httpx.AsyncClient, asks: list[tuple[str, dict[str, Any]]]) -> list[Seen]:
    """The answer to each request alone on the server, without guesses."""
    plain = {"speculative": False, "provenance": True}
    found = [await read(client, path, body | plain) for path, body in asks]
    if refused := [one for one in found if one.status != 200]:
        raise SystemExit(f"a request alone was refused: {refused[0].status} {refused[0].refusal:.300}")
    return found


async def ask(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    alone: Seen,
    methods: list[str],
    draw: random.Random,
    tally: Tally,
) -> None:
    """One request of the pool, to its end or not."""
    stream, cut = draw.random() < 0.6, draw.random() < CANCELLED
    method = draw.choice(methods)
    body = body | {"stream": stream, "provenance": True, "speculative": {"method": method}}
    name = f"seed {body['seed']}, {method}{', stream' if stream else ''}{', cut' if cut else ''}"
    try:
        if cut and not stream:
            async with asyncio.timeout(draw.random() * 0.7):
                got = await read(client, path, body)
            cut = False  # it was faster
        else:
            got = await read(client, path, body, stop_after=draw.randint(1, 12) if cut else sys.maxsize)
    except TimeoutError:
        tally.counts["hung up"] += 1
        return
    except httpx.HTTPError as error:
        tally.wrong.append(f"{name}: {type(error).__name__} {error}")
        return
    if got.status == 429:
        tally.counts["told to wait"] += 1
        await asyncio.sleep(0.5)
        return
    tally.counts["hung up" if cut else "finished"] += 1
    tally.counts["with token ids"] += any(choice.ids for choice in got.choices.values())
    if (trouble := difference(alone, got, whole=not cut)) is not None:
        tally.wrong.append(f"{name}: {trouble}")


async def malform(client: httpx.AsyncClient, model: str, draw: random.Random, tally: Tally) -> None:
    """One request that must be refused, with a reason."""
    path, body = draw.choice(MALFORMED_BODIES)
    content = body.replace(b"MODEL", model.encode())
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    tally.counts["malformed"] += 1
    try:
        told = bool(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        told = False
    if not (400 <= answer.status_code < 500 and told):
        tally.wrong.append(f"malformed {content!r}: HTTP {answer.status_code} {answer.text[:200]}")


async def watch(server: Served, tally: Tally, began: float) -> None:
    """Memory every five seconds; acceptance, speed and the engine's invariants every minute."""
    last, then = await asyncio.to_thread(server.figures), time.monotonic()
    while True:
        await asyncio.sleep(5)
        now = time.monotonic()
        tally.rss.append(((now - began) / 60, await asyncio.to_thread(server.rss_mib)))
        if now - then < 60:
            continue
        figures = await asyncio.to_thread(server.figures)
        drafted, accepted, written = (
            figures.get(name, 0.0) - last.get(name, 0.0)
            for name in (
                "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "generation_tokens_total",
            )
        )  # fmt: skip
        if drafted:
            tally.rates.append(accepted / drafted)
        tally.speed.append(written / (now - then))
        if (books := await asyncio.to_thread(server.integrity)) is not None and books.get("ok") is not True:
            tally.wrong.append(f"books after {(now - began) / 60:.0f} min: {books}")
        last, then = figures, now
        print(
            f"{(now - began) / 60:5.1f} min  {dict(tally.counts)}  wrong {len(tally.wrong)}  "
            f"{tally.speed[-1]:.0f} tokens/s  accepted {accepted / drafted if drafted else 0:.3f}  "
            f"{tally.rss[-1][1]:.0f} MiB",
            file=sys.stderr,
        )


async def load(
    server: Served, args: argparse.Namespace, model: str, methods: list[str], asks: list[Any], alone: list[Seen]
) -> Tally:
    """All clients until the time is over."""
    tally, began = Tally(), time.monotonic()
    end = began + 60 * args.minutes

    async def client_loop(index: int) -> None:
        draw = random.Random(1000 + index)
        limits = httpx.Limits(max_connections=2)
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as client:
            while time.monotonic() < end:
                if draw.random() < MALFORMED:
                    await malform(client, model, draw, tally)
                    continue
                which = draw.randrange(len(asks))
                await ask(client, *asks[which], alone[which], methods, draw, tally)

    watcher = asyncio.create_task(watch(server, tally, began))
    try:
        await asyncio.gather(*(client_loop(index) for index in range(args.clients)))
    finally:
        watcher.cancel()
    return tally


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(MiB a minute, minutes) over the last two thirds: what comes before is warming up."""
    late = points[len(points) // 3 :]
    if len(late) < 4:
        return 0.0, 0.0
    line = statistics.linear_regression([x for x, _ in late], [y for _, y in late])
    return line.slope, late[-1][0] - late[0][0]


async def soak(server: Served, args: argparse.Namespace) -> int:
    model = server.model()
    asks = pool(model, args.pool)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        methods = await usable_methods(client, model)
        alone = await solos(client, asks)
    left_before = await server.idle()
    before, books_before = server.held(), server.integrity()
    print(
        f"{len(asks)} requests known, {sum(len(one.choices) for one in alone)} choices; methods {', '.join(methods)}",
        file=sys.stderr,
    )
    tally = await load(server, args, model, methods, asks, alone)
    left = await server.idle()
    await asyncio.sleep(2)  # for connections to be seen closed
    after, integrity = server.held(), server.integrity()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        again = await solos(client, asks)
    changed = [k for k, (old, new) in enumerate(zip(alone, again, strict=True)) if difference(old, new)]
    growth, measured = slope(tally.rss)
    third = len(tally.rates) // 3
    drift = statistics.mean(tally.rates[-third:]) - statistics.mean(tally.rates[:third]) if third else 0.0
    judged = measured >= args.judge_after
    wrong = "".join(f"\n      {line}" for line in tally.wrong[:20])
    short = "" if judged else ", too short to judge"
    rates = ", ".join(f"{rate:.3f}" for rate in tally.rates)
    checks = [
        Check("started idle", left_before is None, left_before or "nothing held"),
        Check("requests", tally.counts["finished"] > 0, ", ".join(f"{v} {k}" for k, v in tally.counts.items())),
        Check("same tokens as alone", not tally.wrong, f"{len(tally.wrong)} wrong{wrong}"),
        Check("ids were sent", tally.counts["with token ids"] > 0, f"by {tally.counts['with token ids']} answers"),
        Check("same alone afterwards", not changed, f"{len(changed)} of {len(asks)} changed"),
        Check("nothing left", left is None, left or "no request, no KV of one"),
        Check(
            "memory", not judged or growth <= args.max_growth, f"{growth:+.2f} MiB/min over {measured:.1f} min{short}"
        ),
        Check("threads and files", all(after[k] <= before[k] + 8 for k in after), f"{before} before, {after} after"),
        Check("acceptance", abs(drift) <= args.max_drift, f"{drift:+.3f}, first third to last; by minute: {rates}"),
        Check("books", integrity is None or integrity.get("ok") is True, f"{books_before} before, {integrity} after"),
    ]
    figures = {"minutes": args.minutes, "clients": args.clients, "counts": dict(tally.counts), "methods": methods}
    figures |= {
        "mib_per_minute": growth,
        "rss_mib": tally.rss,
        "acceptance": tally.rates,
        "tokens_per_second": tally.speed,
    }
    return report(checks, figures)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pool", type=int, default=60, help="distinct requests")
    parser.add_argument("--max-growth", type=float, default=1.0, help="MiB a minute")
    parser.add_argument(
        "--judge-after", type=float, default=5.0, help="minutes of warm memory figures that judge growth"
    )
    parser.add_argument("--max-drift", type=float, default=0.1, help="of the acceptance rate, first third to last")
    args = parser.parse_args(argv)
    with served(args) as server:
        return asyncio.run(soak(server, args))


if __name__ == "__main__":
    sys.exit(main())
