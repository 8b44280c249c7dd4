"""Common parts of soak.py, hostile.py and fuzz.py: a server under test, its figures, and reports."""

import argparse
import asyncio
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

GAUGES = ("num_requests_running", "num_requests_prefilling", "num_requests_waiting", "kv_cache_used_tokens")
TIMEOUT = httpx.Timeout(120.0)
ROOT = Path(__file__).parents[2]
LISTENS = re.compile(r"serving .* at (http://\S+) \(API: ")
"""What a server says when it takes requests."""


@dataclass
class Served:
    """A server that listens. ``pid`` None: it was not started here, and its memory is read from its metrics."""

    url: str
    pid: int | None = None
    log: Path | None = None

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def figures(self) -> dict[str, float]:
        """/metrics: sample name without prefix -> value, summed over labels."""
        body = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        figures: dict[str, float] = {}
        for family in text_string_to_metric_families(body):
            for sample in family.samples:
                name = sample.name.removeprefix("foretell:")
                figures[name] = figures.get(name, 0.0) + sample.value
        return figures

    def rss_mib(self) -> float:
        """Resident memory of the server's processes."""
        if self.pid is None:
            return self.figures().get("process_resident_memory_bytes", 0.0) / 2**20
        process = psutil.Process(self.pid)
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                total += child.memory_info().rss
        return total / 2**20

    def held(self) -> dict[str, int]:
        """Open files, and threads where the server was started here."""
        if self.pid is None:
            return {"fds": int(self.figures().get("process_open_fds", 0))}
        process = psutil.Process(self.pid)
        return {"fds": process.num_fds(), "threads": process.num_threads()}

    def integrity(self) -> dict[str, Any] | None:
        """The answer of GET /debug/integrity; None of one that was not started here."""
        answer = httpx.get(f"{self.url}/debug/integrity", timeout=60)
        return None if answer.status_code == 404 else {**_object(answer), "ok": answer.status_code == 200}

    def model(self) -> str:
        """The name of the served model."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"])

    def is_up(self) -> bool:
        """Whether it answers and takes requests."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        return False

    async def idle(self, timeout_s: float = 30.0) -> str | None:
        """Wait until no request is left and none holds KV; the prefix store may. Returns what is left, or None."""
        end = time.monotonic() + timeout_s
        while True:
            now = await asyncio.to_thread(self.figures)
            left = {name: now[name] for name in GAUGES if now[name]}
            if not left:
                return None
            if time.monotonic() > end:
                return ", ".join(f"{name} {value:g}" for name, value in left.items())
            await asyncio.sleep(0.25)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is."""
    parser.add_argument("--url", help="a server that runs; default: 'foretell serve' is started on a loopback port")
    parser.add_argument("--serve-args", default="", help="further arguments of 'foretell serve', as a shell reads them")


@contextmanager
def served(args: argparse.Namespace) -> Iterator[Served]:
    """The server that the options name, up; one that was started here is stopped at the end."""
    if args.url:
        server = Served(args.url.rstrip("/"))
        if not server.is_up():
            raise SystemExit(f"nothing is ready at {args.url}")
        yield server
        return
    options = ["--host", "127.0.0.1", "--port", "0", *shlex.split(args.serve_args)]
    command = [sys.executable, "-m", "tests.stress.serve", "serve", *options]
    with tempfile.NamedTemporaryFile("wb", prefix="foretell-serve-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    server = Served("", process.pid, Path(log.name))
    try:
        wait_up(server, process)
        yield server
    finally:
        process.terminate()
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status == 0:
            Path(log.name).unlink()
        else:
            print(f"the server ended with {status} on SIGTERM; its log: {log.name}", file=sys.stderr)


def wait_up(server: Served, process: "subprocess.Popen[bytes]", timeout_s: float = 180.0) -> None:
    """Until it answers, at the address that its log tells: it takes a free port itself, so that nobody else can take it
    before. Raises SystemExit with the end of its log where it does not."""
    end = time.monotonic() + timeout_s
    while not (server.url and server.is_up()):
        told = None if server.url or server.log is None else LISTENS.search(server.log.read_text(errors="replace"))
        if told is not None:
            server.url = told[1]
            continue
        if process.poll() is not None or time.monotonic() > end:
            tail = server.log.read_text(errors="replace")[-2000:] if server.log else ""
            raise SystemExit(f"the server did not come up (exit status {process.poll()}):\n{tail}")
        time.sleep(0.25)


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    return body if isinstance(body, dict) else {"body": body}


@dataclass
class Check:
    """One line of a report."""

    name: str
    ok: bool
    said: str


def report(checks: list[Check], figures: dict[str, Any] | None = None) -> int:
    """Print the table, and as the last line the same as JSON; the exit status."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.said}")
    failed = [check.name for check in checks if not check.ok]
    print(json.dumps({"ok": not failed, "failed": failed, **(figures or {})}))
    return 1 if failed else 0
