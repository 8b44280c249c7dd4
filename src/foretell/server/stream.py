"""Server-sent events: pieces of an answer, sent as they are generated while the client reads."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from foretell.server.errors import ApiError, internal
from foretell.server.job import ServerJob
from foretell.server.logs import log

Result = TypeVar("Result")
LINE_END = "\n"
LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""What ``str.splitlines`` takes for the end of a line, beside those that JSON escapes itself: clients that read lines so
(httpx's ``iter_lines``) would cut an event in two."""
DONE = ServerSentEvent("[DONE]", sep=LINE_END).encode()
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep=LINE_END).encode()


class ClientGoneError(Exception):
    """The client has closed the connection."""


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event."""
    return ServerSentEvent(as_json(data).decode(), event=name, sep=LINE_END).encode()


def as_json(data: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8, on one line for every reader."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in LINE_ENDS:
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "replace")


def time_text(seconds: float | None = None) -> str:
    """A Unix time as text, in UTC. None: now."""
    made = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return made.isoformat().replace("+00:00", "Z")


class JsonReply(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return as_json(content)


async def until_gone(receive: Receive) -> None:
    """Return when the client hangs up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work, which is cancelled when the client hangs up. Raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _stop(task, gone)


class EventStream(EventSourceResponse):
    """Sends a job's events. The job is closed at the end, when the client hangs up, and when it stops reading."""

    def __init__(
        self,
        job: ServerJob,
        events: AsyncIterator[bytes],
        *,
        headers: Mapping[str, str] | None = None,
        failed: Callable[[ApiError], bytes] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        """failed: the last events after an error; None: its body, and the end.
        The job is started; events are read once; the iterator itself yields KEEP_ALIVE."""
        super().__init__(
            self._guarded(events, failed or _ending),
            headers={"cache-control": "no-cache", **(headers or {})},
            media_type=media_type,
            ping=0,
            # When the server stops, requests finish: the service's drain ends them, not the response.
            shutdown_grace_period=math.inf,
        )
        del self.headers["connection"]  # set by the server
        self.job = job
        self.write_timeout_s = job.backend.options.write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""

        async def tell(message: Message) -> None:
            # The library's send_timeout leaves out the first message and the last, which may wait as long as any other.
            async with asyncio.timeout(self.write_timeout_s):
                await send(message)

        try:
            await super().__call__(scope, receive, tell)
        except TimeoutError:
            # The response stays without its end, which makes the server close the connection.
            log("cut: the client reads nothing", level="warning", seconds=self.write_timeout_s)
        finally:
            self.job.close()

    @staticmethod
    async def _guarded(events: AsyncIterator[bytes], ending: Callable[[ApiError], bytes]) -> AsyncIterator[bytes]:
        """The events. An error is sent as the last event before the end."""
        failed: ApiError
        try:
            async for data in events:
                yield data
            return
        except ApiError as error:
            failed = error
        except Exception as error:
            log("internal error", level="error", error=error)
            failed = internal()
        yield ending(failed)


def _ending(error: ApiError) -> bytes:
    return event(error.body) + DONE


async def _stop(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
