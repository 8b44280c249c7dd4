"""Hostile clients on loopback, each beside a well-behaved client whose text must not change.

    python -m tests.stress.hostile [--only slow_reader ...] [--scale 1.0] [--url http://127.0.0.1:8000]

After each scenario the server must be up and idle, and its memory within a bound. --scale makes counts and times smaller.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from tests.stress.answers import Seen, difference, read
from tests.stress.served import TIMEOUT, Check, Served, add_options, report, served

PATH = "/v1/completions"
LIMIT_S = 60.0  # for any one answer
MAX_WAIT_S, MAX_BUSY = 0.5, 4.0  # of a client beside requests that ask for much; so many times longer on a busy machine
VICTIM = """
import httpx, sys
with httpx.stream("POST", sys.argv[1], content=sys.argv[2], headers={"content-type": "application/json"}) as answer:
    for _ in answer.iter_raw():
        print("reading", flush=True)
"""


class WrongError(Exception):
    """Wrong behaviour of the server."""


class Scene:
    """The inputs of a scenario."""

    def __init__(self, server: Served, model: str, scale: float, max_wait_s: float = MAX_WAIT_S) -> None:
        """max_wait_s: of a client beside requests that ask for much, where a core is free."""
        self.server, self.model, self.scale, self.max_wait_s = server, model, scale, max_wait_s

    def count(self, full: int) -> int:
        return max(2, round(full * self.scale))

    def body(self, **changes: Any) -> dict[str, Any]:
        """A request that goes on for long, the end token left aside."""
        return {
            "model": self.model, "prompt": "Once upon a time", "max_tokens": 400, "temperature": 1.0, "seed": 7,
            "ignore_eos": True, "stream": True, **changes,
        }  # fmt: skip

    def raw(self, body: bytes | dict[str, Any], *, path: str = PATH, headers: str = "") -> bytes:
        """A request as bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        host = "{}:{}".format(*self.server.address)
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{headers}"
        return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection(*self.server.address), LIMIT_S)

    async def told(self, data: bytes) -> int | None:
        """The status of the answer to these bytes; None where the connection was closed instead."""
        reader, writer = await self.open()
        try:
            with suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            return await read_status(reader)
        finally:
            writer.close()


async def read_status(reader: asyncio.StreamReader) -> int | None:
    """The status of the next answer; None at the end of the connection. Raises WrongError where nothing comes."""
    try:
        line = await asyncio.wait_for(reader.readline(), LIMIT_S)
    except TimeoutError:
        raise WrongError(f"no answer within {LIMIT_S:.0f} s") from None
    except ConnectionError:
        return None
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, as a process that dies does."""
    raw: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def killed_client(scene: Scene) -> str:
    """A client process is killed while it reads a stream."""
    kills = scene.count(5)
    for _ in range(kills):
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-c", VICTIM, scene.server.url + PATH, json.dumps(scene.body(max_tokens=2000)),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert victim.stdout is not None
            if not await asyncio.wait_for(victim.stdout.readline(), LIMIT_S):
                raise WrongError("the client read nothing")
        finally:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
            await victim.wait()
    return f"{kills} killed"


async def slow_reader(scene: Scene) -> str:
    """Streams whose clients read a byte a second, through the smallest buffer there is."""
    seconds, clients = max(2.0, 20 * scene.scale), scene.count(8)

    async def read_slowly() -> int:
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        link.setblocking(False)
        loop = asyncio.get_running_loop()
        got = 0
        try:
            await loop.sock_connect(link, scene.server.address)
            await loop.sock_sendall(link, scene.raw(scene.body(max_tokens=2000, provenance=True, logprobs=5)))
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                with suppress(TimeoutError):
                    got += len(await asyncio.wait_for(loop.sock_recv(link, 1), 1.0))
                await asyncio.sleep(1.0)
        except ConnectionError:
            pass  # a server may close slow connections
        finally:
            link.close()
        return got

    got = await asyncio.gather(*(read_slowly() for _ in range(clients)))
    if not any(got):
        raise WrongError("no slow reader got a byte")
    return f"{clients} clients, {sum(got)} bytes in {seconds:.0f} s"


async def huge_prompt(scene: Scene) -> str:
    """Two megabytes of prompt, and a body beyond any limit: refused, soon."""
    said = []
    for text in ("a" * 2_000_000, "word " * 400_000, "\u00e9\U0001f600" * 300_000):
        began = time.monotonic()
        status = await scene.told(scene.raw(scene.body(prompt=text)))
        if status not in (400, 413):
            raise WrongError(f"{len(text)} characters: HTTP {status}, expected 400 or 413")
        said.append(f"{status} in {time.monotonic() - began:.1f} s")
    status = await scene.told(scene.raw(b'{"prompt": "' + b"a" * round(64e6 * min(1.0, scene.scale)) + b'"}'))
    if status not in (None, 400, 413):
        raise WrongError(f"a body of many megabytes: HTTP {status}")
    # Bytes that are announced and never come must not be waited for where they would be too many.
    status = await scene.told(scene.raw(b"").replace(b"content-length: 0", b"content-length: 1000000000000"))
    if status not in (None, 400, 413):
        raise WrongError(f"a terabyte announced: HTTP {status}")
    return ", ".join(said)


async def many_connections(scene: Scene) -> str:
    """A thousand connections, first idle, then with a request each: all are answered."""
    total = scene.count(1000)
    links = await asyncio.gather(*(scene.open() for _ in range(total)))
    await asyncio.sleep(2 * min(1.0, scene.scale))

    async def one(index: int) -> int | None:
        reader, writer = links[index]
        try:
            with suppress(ConnectionError):
                writer.write(scene.raw(scene.body(stream=False, max_tokens=1, seed=index)))
                await writer.drain()
            return await read_status(reader)
        finally:
            writer.close()

    statuses = Counter(await asyncio.gather(*(one(index) for index in range(total))))
    if bad := {status for status in statuses if status not in (200, 429, 503)}:
        raise WrongError(f"answers {dict(statuses)}: {bad} are none of 200, 429, 503")
    if not statuses[200]:
        raise WrongError(f"no client was served: {dict(statuses)}")
    return ", ".join(f"{count} times {status}" for status, count in statuses.items())


async def dribbled_headers(scene: Scene) -> str:
    """Requests that come a byte at a time, and some that never end."""
    clients, seconds = scene.count(50), max(2.0, 15 * scene.scale)
    whole = scene.raw(scene.body(stream=False, max_tokens=2))

    async def dribble(index: int) -> int | None:
        reader, writer = await scene.open()
        ends = index % 2 == 0
        data = whole if ends else whole.split(b"\r\n\r\n")[0] + b"x" * 10_000
        try:
            for at in range(len(data)):
                writer.write(data[at : at + 1])
                await writer.drain()
                await asyncio.sleep(seconds / len(whole))
                if not ends and at >= len(whole):
                    return 0
            return await read_status(reader)
        except ConnectionError:
            return None  # a server may close slow connections
        finally:
            writer.close()

    statuses = Counter(await asyncio.gather(*(dribble(index) for index in range(clients))))
    if bad := set(statuses) - {0, 200, 408, 429, None}:
        raise WrongError(f"answers {dict(statuses)}: {bad}")
    return f"{clients} clients over {seconds:.0f} s, answers {dict(statuses)}"


async def endless_header(scene: Scene) -> str:
    """A header that never ends must be cut off before it has filled the memory."""
    most, block = 2**20 * max(8, scene.count(64)), b"a" * 2**16
    reader, writer = await scene.open()
    sent = 0
    try:
        writer.write(b"GET /v1/models HTTP/1.1\r\nx: ")
        async with asyncio.timeout(LIMIT_S):
            while sent < most and not reader.at_eof():
                writer.write(block)
                await writer.drain()
                sent += len(block)
                await asyncio.sleep(0)  # for the end of the connection to be seen
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    if sent >= most:
        raise WrongError(f"{sent / 2**20:.0f} MiB of one header were read, and more would have been")
    return f"cut after {sent / 2**20:.1f} MiB"


async def half_closed(scene: Scene) -> str:
    """Clients that close their side after the request: they must get an answer or an end, in time."""
    clients, answers = scene.count(20), Counter[str]()
    for index in range(clients):
        reader, writer = await scene.open()
        try:
            writer.write(scene.raw(scene.body(stream=bool(index % 2), max_tokens=20)))
            await writer.drain()
            writer.write_eof()
            try:
                rest = await asyncio.wait_for(reader.read(), LIMIT_S)
            except TimeoutError:
                raise WrongError("a half-closed connection was left open") from None
            except ConnectionError:
                rest = b""
            answers[rest.split(b"\r\n", 1)[0].decode(errors="replace") or "closed"] += 1
        finally:
            writer.close()
    if bad := [line for line in answers if " 5" in line[:12]]:
        raise WrongError(f"answers {bad}")
    return ", ".join(f"{count} times {line}" for line, count in answers.items())


async def hang_ups(scene: Scene) -> str:
    """A storm of requests whose clients reset the connection at once or after the first bytes."""
    total = scene.count(200)

    async def one(index: int) -> None:
        reader, writer = await scene.open()
        with suppress(ConnectionError, TimeoutError):
            writer.write(scene.raw(scene.body(max_tokens=1000, seed=index, n=1 + index % 2)))
            await writer.drain()
            if index % 3:
                await asyncio.wait_for(reader.read(64 * (index % 3)), 0.02 * (index % 50))
        reset(writer)

    for start in range(0, total, 25):
        await asyncio.gather(*(one(index) for index in range(start, min(total, start + 25))))
    return f"{total} hung up"


def garbage(scene: Scene) -> dict[str, bytes]:
    """Malformed or useless requests. The answer must be a 4xx, or the end of the connection."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n".encode()

    def with_body(content: bytes) -> bytes:
        return scene.raw(content)

    prompt = f'{{"model": "{scene.model}", "prompt": '.encode()
    told = {
        "nothing but noise": bytes(range(256)) * 4 + b"\r\n\r\n",
        "a TLS hello": bytes.fromhex("1603010200010001fc0303") + b"\0" * 64 + b"\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "no version": b"GET /nothing\r\n\r\n",
        "no target": b"GET HTTP/1.1\r\n\r\n",
        "an unknown method": b"FROB / HTTP/1.1\r\nhost: a\r\n\r\n",
        "a path of a megabyte": b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        "a header of a megabyte": b"GET /nothing HTTP/1.1\r\nx: " + b"a" * 2**20 + b"\r\n\r\n",
        "ten thousand headers": b"GET /nothing HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
        "a broken header": b"GET / HTTP/1.1\r\nhost a\r\n\r\n",
        "a null in a header": b"GET / HTTP/1.1\r\nhost: \0b\r\n\r\n",
        "a negative length": head + b"content-length: -1\r\n\r\n",
        "two lengths": head + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "a length that is no number": head + b"content-length: ten\r\n\r\n",
        "bad chunks": head + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        "a path upwards": b"GET /../../../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n",
        "an encoded path upwards": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n",
        "a null in the path": b"GET /v1/models%00 HTTP/1.1\r\nhost: a\r\n\r\n",
        "no JSON": with_body(b"hello"),
        "half a JSON": with_body(prompt),
        "deep JSON": with_body(prompt + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "a deep schema": with_body(b'{"messages": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"),
        "a number of many digits": with_body(prompt + b'"a", "seed": ' + b"9" * 100_000 + b"}"),
        "infinity": with_body(prompt + b'"a", "temperature": 1e99999}'),
        "NaN": with_body(prompt + b'"a", "temperature": NaN}'),
        "half a surrogate": with_body(prompt + b'"\\ud800", "no such field": 1}'),
        "bytes that are no UTF-8": with_body(prompt + b'"\xc3\x28"}'),
        "UTF-16": with_body((prompt + b'"a"}').decode().encode("utf-16")),
        "many stops": with_body(prompt + b'"a", "stop": [' + b'"x",' * 50_000 + b'"y"]}'),
    }  # fmt: skip
    # A server may refuse a host that is not its own before it looks at the rest.
    host = "{}:{}".format(*scene.server.address).encode()
    return {name: data.replace(b"host: a\r\n", b"host: " + host + b"\r\n") for name, data in told.items()}


async def malformed(scene: Scene) -> str:
    """What is no request is refused or hung up on, at once, and never with a 5xx."""
    answers = Counter[int | None]()
    for name, data in garbage(scene).items():
        began = time.monotonic()
        reader, writer = await scene.open()
        try:
            with suppress(OSError):  # the server may have hung up already
                writer.write(data)
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
            status = await read_status(reader)
        except WrongError as error:
            raise WrongError(f"{name}: {error}") from None
        finally:
            writer.close()
        if status is not None and not 400 <= status < 500:
            raise WrongError(f"{name}: HTTP {status}")
        if (took := time.monotonic() - began) > 10:
            raise WrongError(f"{name}: {took:.0f} s")
        answers[status] += 1
    return f"answers {dict(answers)}"


async def longest_wait(scene: Scene, attack: Awaitable[None] | None) -> float:
    """Seconds that a well-behaved client waits at most, for a token of a stream or for a short answer, while an attack goes
    on; without one, for a few seconds."""
    running = asyncio.ensure_future(attack if attack is not None else asyncio.sleep(max(1.0, 4 * scene.scale)))
    longest = 0.0

    async def reads() -> None:
        nonlocal longest
        body = scene.body(prompt="A client that reads", seed=3, max_tokens=400)
        async with httpx.AsyncClient(base_url=scene.server.url, timeout=TIMEOUT) as client:
            while not running.done():
                last = time.monotonic()
                async with client.stream("POST", PATH, json=body) as answer:
                    async for _ in answer.aiter_raw():
                        now = time.monotonic()
                        longest, last = max(longest, now - last), now

    async def asks() -> None:
        nonlocal longest
        body = scene.body(prompt="A client that asks", seed=4, max_tokens=1, stream=False)
        async with httpx.AsyncClient(base_url=scene.server.url, timeout=TIMEOUT) as client:
            while not running.done():
                began = time.monotonic()
                await client.post(PATH, json=body)
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.05)

    clients = asyncio.gather(reads(), asks())
    try:
        await running
        await clients
    finally:
        running.cancel()
        clients.cancel()
    return longest


METER = """
import statistics, sys, time
found = []
while True:
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() < cpu + 0.02:
        pass
    found.append((time.perf_counter() - wall) / 0.02)
    print(statistics.median(found), flush=True)
    time.sleep(0.2)
"""


@asynccontextmanager
async def metered() -> AsyncIterator[Callable[[], float]]:
    """How many seconds a CPU second takes meanwhile, beside all that runs on the machine: 1 where a core is free."""
    meter = await asyncio.create_subprocess_exec(sys.executable, "-c", METER, stdout=asyncio.subprocess.PIPE)
    told = [1.0]

    async def read() -> None:
        assert meter.stdout is not None
        async for line in meter.stdout:
            told[:] = [float(line)]

    reading = asyncio.create_task(read())
    try:
        yield lambda: max(1.0, told[-1])
    finally:
        reading.cancel()
        with suppress(ProcessLookupError):
            meter.kill()
        await meter.wait()


async def freezes(scene: Scene, requests: list[tuple[str, dict[str, Any]]]) -> str:
    """Whether these requests make others wait: at most ``max_wait_s``, where a core is free; on a busy machine as many
    times longer as a CPU second takes there, up to four."""
    answers = Counter[int]()

    async def attack() -> None:
        async with httpx.AsyncClient(base_url=scene.server.url, timeout=TIMEOUT) as client:
            for _ in range(max(1, round(4 * scene.scale))):
                told = await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
                answers.update(answer.status_code for answer in told)

    quiet = await longest_wait(scene, None)
    async with metered() as slowdown:
        during = await longest_wait(scene, attack())
        busy = slowdown()
    if bad := set(answers) - {200, 400, 408, 429}:
        raise WrongError(f"answers {dict(answers)}: {bad}")
    said = (
        f"longest wait {during:.2f} s, where a CPU second took {busy:.2f} s; without the attack {quiet:.2f} s; "
        f"answers {dict(answers)}"
    )
    if during > scene.max_wait_s * min(busy, MAX_BUSY):
        raise WrongError(said)
    return said


async def costly_numbers(scene: Scene) -> str:
    """Requests whose numbers ask for much: they are refused, or harm nobody."""
    prompt = "abc abd abc abe " * 60
    settings: list[dict[str, Any]] = [
        {"method": "ngram", "prompt_lookup_max": 10**9},
        {"method": "ngram", "prompt_lookup_max": 10**7},
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 64, "num_speculative_tokens": 63},
        {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "num_speculative_tokens": 63},
    ]  # fmt: skip
    body = scene.body(prompt=prompt, stream=False, max_tokens=64)
    requests = [(PATH, {**body, "speculative": one}) for one in settings]
    requests.append((PATH, {**body, "logit_bias": {str(token): 1.0 for token in range(8000)}}))
    return await freezes(scene, requests)


async def costly_grammars(scene: Scene) -> str:
    """Schemas that take long to compile, or whose masks do."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    schemas: list[dict[str, Any]] = [
        {"type": "integer", "multipleOf": 765432},
        {"type": "object", "patternProperties": {f"^a{at:05d}x": {"type": "integer"} for at in range(10_000)}},
        {"type": "object", "patternProperties": {f"^a{at:04d}x": {"type": "integer"} for at in range(500)}},
        {"type": "object", "properties": {f"a{at}": {"type": "string", "pattern": f"^x{at}[0-9]+$"} for at in range(2000)}},
        {"type": "string", "pattern": "^(" + "|".join(f"{a}{b}.{{1,40}}" for a in letters for b in letters) + ")$"},
        {"type": "string", "pattern": ".*a.{18}b.*"},
        {"type": "array", "items": {"type": "number", "multipleOf": 0.0007}, "minItems": 50},
    ]  # fmt: skip
    requests = [
        (
            "/v1/chat/completions",
            {
                "model": scene.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 64, "seed": at,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            },
        )
        for at, schema in enumerate(schemas)
    ]  # fmt: skip
    return await freezes(scene, requests)


async def unfinished_bodies(scene: Scene) -> str:
    """Requests whose body never comes whole, held open, then dropped."""
    total = scene.count(100)
    data = scene.raw(scene.body())[:-10]
    links = []
    for _ in range(total):
        reader, writer = await scene.open()
        writer.write(data)
        links.append((reader, writer))
    await asyncio.sleep(3 * min(1.0, scene.scale))
    for _, writer in links:
        reset(writer)
    return f"{total} left unfinished"


_ALL: tuple[Callable[[Scene], Awaitable[str]], ...] = (
    killed_client, slow_reader, huge_prompt, many_connections, dribbled_headers, endless_header, half_closed, hang_ups,
    unfinished_bodies, malformed, costly_numbers, costly_grammars,
)  # fmt: skip
SCENARIOS = {scenario.__name__: scenario for scenario in _ALL}


async def bystander(scene: Scene, client: httpx.AsyncClient) -> Seen:
    """What a well-behaved client reads. It waits its turn where the server is busy."""
    length = min(80, 8 + scene.count(80))
    body = scene.body(prompt="The well-behaved client", seed=11, max_tokens=length, provenance=True)
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            while (seen := await read(client, PATH, body)).status == 429:
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise WrongError(f"a well-behaved client had not read its text after {2 * LIMIT_S:.0f} s") from None
    if seen.status != 200:
        raise WrongError(f"a well-behaved client was told {seen.status} {seen.refusal:.300}")
    return seen


async def check(scene: Scene, name: str, max_growth: float) -> Check:
    """One scenario, with a well-behaved client before, during and after it."""
    server, began = scene.server, time.monotonic()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
            alone = await bystander(scene, client)
            memory = await asyncio.to_thread(server.rss_mib)
            running = asyncio.create_task(SCENARIOS[name](scene))
            beside = []
            try:
                while not running.done() or not beside:
                    beside.append(await bystander(scene, client))
                    await asyncio.sleep(0.2)
                said = await running
            finally:
                running.cancel()
            beside.append(await bystander(scene, client))
        wrong = [trouble for got in beside if (trouble := difference(alone, got)) is not None]
        if wrong:
            raise WrongError(
                f"a well-behaved client read something else, {len(wrong)} of {len(beside)} times: {wrong[0]}"
            )
        if (left := await server.idle()) is not None:
            raise WrongError(f"left behind: {left}")
        growth = await asyncio.to_thread(server.rss_mib) - memory
        if growth > max_growth:
            raise WrongError(f"{growth:.0f} MiB more than before, at most {max_growth:.0f} expected")
    except (WrongError, httpx.HTTPError, TimeoutError, OSError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - began
    return Check(name, True, f"{said}; {len(beside)} texts beside it unharmed; {growth:+.0f} MiB; {seconds:.1f} s")


async def hostile(
    server: Served, names: list[str], scale: float, max_growth: float, max_wait_s: float = MAX_WAIT_S
) -> list[Check]:
    """All these scenarios, one after the other; after one that brings the server down the others are not tried."""
    checks = []
    scene = Scene(server, server.model(), scale, max_wait_s)
    for name in names:
        checks.append(await check(scene, name, max_growth))
        print(checks[-1], file=sys.stderr)
        if not await asyncio.to_thread(server.is_up):
            checks.append(Check("still up", False, f"no answer after {name}"))
            break
    return checks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--scale", type=float, default=1.0, help="of counts and times")
    parser.add_argument("--max-growth", type=float, default=400.0, help="MiB a scenario may leave")
    args = parser.parse_args(argv)
    with served(args) as server:
        return report(asyncio.run(hostile(server, args.only, args.scale, args.max_growth)))


if __name__ == "__main__":
    sys.exit(main())
