"""Hostile clients: against servers that fail in known ways, and against ours."""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from foretell.server.metrics import Metrics
from foretell.server.run import bind
from foretell.service.snapshot import Snapshot
from tests.stress import MINUTES, hostile
from tests.stress.served import Served, served

SMALL = 0.01
SCALE = 1.0 if MINUTES else 0.02
FROZEN_S = 0.5 if MINUTES else 10.0
"""A wait of this length fails. The half second itself is for the benchmark: what runs beside a test may take as long; the
requests of these scenarios once stopped everybody for minutes."""


class StandIn:
    """A server of made-up texts that keeps the contract, but for the one fault it is given."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.running, self.num_freezes = fault, 0, 0
        self.metrics = Metrics(self, "toy")
        self.app = Starlette(
            routes=[
                Route("/ready", lambda _: JSONResponse({"status": "ok"})),
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "toy"}]})),
                Route("/metrics", lambda _: Response(self.metrics.render()[0])),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(num_running=self.running, kv_used_tokens=10 * self.running, kv_capacity_tokens=1000)

    async def chat(self, request: Request) -> Response:
        self.freeze()
        return refusal(400)

    def freeze(self) -> None:
        """Once, as nobody else is answered meanwhile."""
        if self.fault == "freezes" and self.num_freezes == 0:
            self.num_freezes += 1
            time.sleep(1.0)

    async def completions(self, request: Request) -> Response:
        if int(request.headers.get("content-length", "0")) > 2**22:
            return refusal(413)
        try:
            body = json.loads((await request.body()).decode())
            known = body["model"] == "toy" and "prompt" in body and -1 < body.get("temperature", 1.0) < 100
            known = known and "no such field" not in body and len(body.get("stop", ())) <= 16
            known = known and isinstance(body["prompt"], str) and body.get("seed", 0) < 2**63
        except ClientDisconnect:
            return refusal(400)
        except (ValueError, KeyError, TypeError, RecursionError):
            return refusal(500 if self.fault == "breaks on nonsense" else 400)
        if (body.get("speculative") or {}).get("prompt_lookup_max", 1) > 64:
            self.freeze()
            known = False
        if not known or (len(body["prompt"]) > 10_000 and self.fault != "takes any prompt"):
            return refusal(400)
        if not body.get("stream"):
            return JSONResponse({"choices": [self.piece(body, 0, body["max_tokens"])]})
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            for at in range(body["max_tokens"]):
                await asyncio.sleep(0.001)
                yield b"data: " + json.dumps({"choices": [self.piece(body, at, at + 1)]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
            self.running -= 1
        except BaseException:
            self.running -= self.fault != "leaks"
            raise

    def piece(self, body: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        mixed = self.running if self.fault == "mixes rows" and self.running > 1 else 0
        ids = [(body["seed"] * 7 + at + mixed) % 50 for at in range(start, end)]
        told = [{"token_id": token} for token in ids]
        reason = "length" if end == body["max_tokens"] else None
        return {"index": 0, "text": "".join(f"{token} " for token in ids), "provenance": told, "finish_reason": reason}


def refusal(status: int) -> Response:
    return JSONResponse({"error": {"message": "no"}}, status)


@contextmanager
def listening(app: Any) -> Iterator[Served]:
    """The app on a loopback port, in a thread."""
    made = bind("127.0.0.1", 0)
    # h11, as httptools reads headers without end.
    server = uvicorn.Server(uvicorn.Config(app, http="h11", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [made]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Served(f"http://127.0.0.1:{made.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def run(server: Served, *names: str, scale: float = SMALL, max_wait_s: float = FROZEN_S) -> list[hostile.Check]:
    return asyncio.run(hostile.hostile(server, list(names), scale, max_growth=200.0, max_wait_s=max_wait_s))


def test_a_server_that_keeps_the_contract_passes() -> None:
    with listening(StandIn().app) as server:
        checks = run(server, *hostile.SCENARIOS)
    assert [check for check in checks if not check.ok] == []
    assert [check.name for check in checks] == list(hostile.SCENARIOS)


@pytest.mark.parametrize(
    ("fault", "scenario", "said"),
    [
        ("leaks", "hang_ups", "left behind: num_requests_running"),
        ("breaks on nonsense", "malformed", "HTTP 500"),
        ("takes any prompt", "huge_prompt", "expected 400 or 413"),
        ("mixes rows", "hang_ups", "read something else"),
        ("freezes", "costly_numbers", "longest wait"),
        ("freezes", "costly_grammars", "longest wait"),
    ],
)
def test_control_a_server_that_fails_is_found_out(
    fault: str, scenario: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = Served.idle
    monkeypatch.setattr(Served, "idle", lambda self: idle(self, timeout_s=1.0))
    monkeypatch.setattr(hostile, "METER", "")  # as on a machine with a free core
    with listening(StandIn(fault).app) as server:
        (check,) = run(server, scenario, scale=0.1, max_wait_s=0.5)
    assert not check.ok
    assert said in check.said


@pytest.fixture(scope="module")
def ours() -> Iterator[Served]:
    """``foretell serve`` with the bundled models, as a process of its own. It guesses, whether or not that pays here."""
    with served(argparse.Namespace(url=None, serve_args="--speculation on --also ngram --max-num-seqs 8")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("scenario", hostile.SCENARIOS)
def test_our_server_survives(ours: Served, scenario: str) -> None:
    assert [check.said for check in run(ours, scenario, scale=SCALE) if not check.ok] == []
    assert ours.integrity() == {"status": "ok", "ok": True}
