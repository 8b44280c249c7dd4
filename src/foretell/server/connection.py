"""HTTP/1.1 connections: uvicorn's, and limits on the time in which the head of a request must arrive and an answer be
read."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretell.server.errors import ApiError
from foretell.server.logs import log


class Connection(H11Protocol):  # type: ignore[misc]
    """Closed when a request's head takes too long, counted from when the connection was opened or the answer before was
    sent; so is one whose client goes on sending a body that nobody reads, and one whose client reads nothing of what is
    written.

    uvicorn itself ends only connections without any data: a byte now and then would keep one open. A body that is
    read has a limit of its own (``body_timeout_s``).
    """

    header_timeout_s: float
    write_timeout_s: float
    _limit: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None  # runs while bytes wait for the client

    def connection_made(self, transport: asyncio.Transport) -> None:
        """The time of the first head begins."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes have come: perhaps those that complete a head."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer has been sent: the next head may come, now or after a pause."""
        super().on_response_complete()
        self._watch()
        self._watch_rest()

    def timeout_keep_alive_handler(self) -> None:
        """No further request has come."""
        super().timeout_keep_alive_handler()
        self._watch_rest()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written: nothing more is written until it has caught up."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is waited for."""
        self._rest()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or its head is too large: said in the form of all errors."""
        self._refuse(ApiError(400, msg, code="invalid_http"), b"Bad Request")

    def _watch(self) -> None:
        """Let the time run while what comes is neither for a running request nor a pause after an answer."""
        if self.transport.is_closing() or self._is_answering() or self._is_pausing():
            self._rest()
        elif self._limit is None:
            self._limit = self.loop.call_later(self.header_timeout_s, self._cut)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_pausing(self) -> bool:
        """Nothing has come since an answer: that time has uvicorn's own limit, which the next byte lifts."""
        return self.cycle is not None and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _rest(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _cut(self) -> None:
        self._limit = None
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"the headers did not arrive within {self.header_timeout_s:g} s"
            self._refuse(ApiError(408, text, code="request_timeout"), b"Request Timeout")
        self.transport.close()

    def _refuse(self, error: ApiError, reason: bytes) -> None:
        """Answer what is no request, and close."""
        body = json.dumps(error.body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        answer: list[Any] = [h11.Response(status_code=error.status, headers=headers, reason=reason)]
        for event in (*answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_writing(self) -> None:
        """While nothing is written anew: paused, or closing, which waits for what is left to be read."""
        self._stalled = self.loop.call_later(self.write_timeout_s, self._drop, self.transport.get_write_buffer_size())

    def _watch_rest(self) -> None:
        if self.transport.is_closing() and self.transport.get_write_buffer_size() and self._stalled is None:
            self._watch_writing()

    def _drop(self, before: int) -> None:
        """Give up a client that has read nothing since: closing would hold the bytes for as long as it likes."""
        if self.transport.get_write_buffer_size() < before:
            self._watch_writing()
        else:
            log("cut: the client reads nothing", level="warning", seconds=self.write_timeout_s)
            self.transport.abort()


def connections(header_timeout_s: float, write_timeout_s: float) -> type[Connection]:
    """The class of a server's connections, for ``uvicorn.Config(http=...)``."""
    limits = {"header_timeout_s": header_timeout_s, "write_timeout_s": write_timeout_s}
    return type("Connection", (Connection,), limits)
