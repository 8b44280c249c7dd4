"""The gate in front of all routes: request ids, hosts, keys, the size of bodies, and the handler of uncaught errors."""

import asyncio
import hmac
import re
from hashlib import sha256
from time import perf_counter
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, reset_contextvars, unbind_contextvars

from foretell.server.errors import ApiError, internal
from foretell.server.logs import log
from foretell.server.options import ServerOptions
from foretell.server.stream import ClientGoneError

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
PROBES = frozenset({"/health", "/v1/health", "/ping", "/ready"})
"""Paths that are answered under any Host name too: an orchestrator asks by address, and they reveal nothing."""
OPEN = PROBES | {"/", "/favicon.ico", "/version", "/api/version", "/openapi.json"}
"""Paths that need no key: probes send none, and the page and the document contain no secrets."""
METRICS = "/metrics"
TENANT = "foretell.tenant"
"""Key of an ASGI scope: who has sent the request, as ``Submission.tenant``."""
TAKEN = "foretell.taken"
"""Key of an ASGI scope: headers of the answer that name what of the request's fields changes nothing."""
RELEASED = "foretell.released"
"""Key of an ASGI scope: what is called once the request has been answered, to give back what it holds."""
DISCARD_S = 2.0  # how long a body that is too large is still read, so that its sender sees the answer


class Gate:
    """ASGI middleware. It reads a request's body whole before the route is called, within limits of size and time."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app, self.options = app, options
        self._keys = [_digest(key) for key in options.api_keys]
        self._metrics_keys = [] if options.metrics_key is None else [_digest(options.metrics_key)]
        self._hosts = frozenset(host.lower() for host in options.allowed_hosts if "*" not in options.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        name = given if SANE_ID.fullmatch(given) else uuid4().hex
        started, taken = False, dict[str, str]()

        async def tell(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = name
                for key, value in taken.items():
                    headers[key] = ", ".join(filter(None, (value, headers.get(key))))
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        scope["foretell.arrived"], scope[TAKEN], scope[RELEASED] = perf_counter(), taken, []
        is_head = scope["method"] == "HEAD"
        if is_head:  # the answer to GET without its body
            scope = {**scope, "method": "GET"}
        before = bind_contextvars(request_id=name)
        try:
            if scope["path"] not in PROBES:
                self._check_host(headers)
            scope[TENANT] = self._tenant(scope["path"], headers)
            if scope[TENANT] is not None:  # which client it was, not the key
                before = {**before, **bind_contextvars(key_id=scope[TENANT])}
            if scope["method"] == "POST":
                receive = await self._with_body(headers, receive)
            await self.app(scope, receive, tell)
        except ClientGoneError:
            log("client gone", level="debug")
        except asyncio.CancelledError:
            log("cut off: the server stops now", level="warning")  # by a second signal; the connection is closed
        except ApiError as error:
            log("refused", level="debug", status=error.status, code=error.code, path=scope["path"])
            if not started:
                await error.response(scope["path"])(scope, receive, tell)
        except Exception as error:
            log("internal error", level="error", error=error)
            if not started:
                await internal().response(scope["path"])(scope, receive, tell)
        finally:
            for give_back in scope[RELEASED]:
                give_back()
            reset_contextvars(**before)
            unbind_contextvars("without_effect", "model")

    def _check_host(self, headers: Headers) -> None:
        """A page of another site that has its name point here must not reach a server that trusts its machine."""
        if self._hosts:
            host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
            if host not in self._hosts:
                raise ApiError(
                    400,
                    "this server is not known by that Host name (--allowed-host)",
                    param="host",
                    code="unknown_host",
                )

    def _tenant(self, path: str, headers: Headers) -> str | None:
        """Which of the keys the request has, by a name that does not reveal it; None where no key is required. Raises
        ApiError 401."""
        keys = self._keys
        if path == METRICS and self._metrics_keys:
            keys = self._metrics_keys
        if not keys or path in OPEN:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme:
            scheme, key = "bearer", headers.get("x-api-key", "")  # as Anthropic's clients send it
        given = _digest(key.strip()) if scheme.lower() == "bearer" and key.strip() else b""
        # All are compared, as digests: the time reveals neither which key was similar nor how long one is.
        same = [hmac.compare_digest(given, known) for known in keys]
        if not any(same):
            raise ApiError(
                401,
                "the API key is missing or not known: send it as 'Authorization: Bearer KEY' (or x-api-key)",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return tenant_of(key.strip()) if keys is self._keys else None

    async def _with_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body; the receive returned gives it at once, and then what comes after it."""
        limit = self.options.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 15 or int(length) > limit):
            await self._refuse_size(receive)
        chunks: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self.options.body_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunks.append(message.get("body", b""))
                    size, more = size + len(chunks[-1]), message.get("more_body", False)
                    if size > limit:
                        chunks.clear()
                        if more:
                            await self._refuse_size(receive)
                        raise self._too_large()
        except TimeoutError:
            text = f"the body did not arrive within {self.options.body_timeout_s:g} s"
            raise ApiError(408, text, code="request_timeout", headers={"connection": "close"}) from None
        body: bytes | None = b"".join(chunks)

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                message, body = {"type": "http.request", "body": body, "more_body": False}, None
                return message
            return await receive()

        return replay

    async def _refuse_size(self, receive: Receive) -> None:
        try:
            async with asyncio.timeout(DISCARD_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        raise self._too_large()

    def _too_large(self) -> ApiError:
        text = f"the body is larger than this server takes, {self.options.max_body_mib:g} MiB"
        return ApiError(413, text, code="body_too_large", headers={"connection": "close"})


def tenant_of(key: str) -> str:
    """The name by which the holder of an API key is known: of the key alone, not of its place among the others, so that
    what was learned for one client is never taken for another's after a start with other keys. It does not tell the key."""
    return "key-" + sha256(b"foretell tenant\0" + key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
