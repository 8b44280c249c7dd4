"""Every way a request can fail, in OpenAI's shape. No message has a path of this machine or a stack trace in it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.responses import JSONResponse

from foretell.core.errors import (
    ConfigError,
    EngineError,
    ForetellError,
    PromptError,
    QueueFullError,
    ServiceClosedError,
    nearest,
)
from foretell.server.unsupported import UNSUPPORTED, Taken

Model = TypeVar("Model", bound=BaseModel)
INVALID, SERVER = "invalid_request_error", "server_error"
KINDS = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's words for a status."""
KIND_OF = ("type", "role")  # fields that say of what kind the object is that they stand in
MOST_TROUBLES = 256  # of a request, that are looked at to find the one to name


class ApiError(Exception):
    """A response that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or (SERVER if status >= 500 else INVALID)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As the client reads it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """As clients of a path read it: Anthropic's, Ollama's, or OpenAI's."""
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": KINDS.get(self.status, self.kind), "message": self.message}}
        return {"error": self.message} if path.startswith("/api/") else self.body

    def response(self, path: str) -> JSONResponse:
        """As it is sent."""
        return JSONResponse(self.body_for(path), self.status, headers=self.headers)


def internal() -> ApiError:
    """An internal error: details go to the log only, not to the client."""
    return ApiError(500, "internal error: see the server's log under this response's x-request-id", code="internal")


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """An error in the request, to be mended by the client."""
    return ApiError(400, message, param=param, code=code)


def of_engine(error: ForetellError, param: str | None = None) -> ApiError:
    """Errors of the engine: refused requests, and failures."""
    if isinstance(error, QueueFullError):
        headers = {"retry-after": str(max(1, round(error.retry_after_s + 0.5)))}
        return ApiError(429, str(error), code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)
    if isinstance(error, ServiceClosedError):
        return ApiError(503, str(error), code="unavailable", headers={"retry-after": "5"})
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, PromptError):
        too_long = "shorten" in str(error)
        return bad(str(error), param, "context_length_exceeded" if too_long else "invalid_prompt")
    if isinstance(error, ConfigError):
        return bad(str(error), param)
    return internal()


def parse(kind: type[Model], body: bytes, taken: Taken | None = None) -> Model:
    """A request of this kind from its JSON. taken: gets the names of what changes nothing and was left out. Raises ApiError
    400 naming the field, and the nearest known one."""
    taken = taken or Taken()
    try:
        return kind.model_validate_json(body, context=taken)
    except ValidationError as error:
        raise _explain(kind, _troubles(error), body, taken.meant) from None


def _troubles(error: ValidationError) -> list[ErrorDetails]:
    """All that is wrong. Raises ApiError where that is so much that listing it would hold the event loop up."""
    if error.error_count() > MOST_TROUBLES:
        raise bad(
            f"{error.error_count()} fields of the request are unknown or cannot have their values: see /openapi.json"
        )
    return error.errors(include_url=False, include_input=False)


def _said(trouble: ErrorDetails) -> str:
    """What is wrong, in words of a request and not of what reads it."""
    more = trouble.get("ctx", {})
    if trouble["type"] == "value_error":
        return str(more["error"])
    if trouble["type"] == "union_tag_not_found":
        return f"the field {more['discriminator']} is missing, or is no text"
    if trouble["type"] == "union_tag_invalid":
        return f"{more['discriminator']} is {more['tag']!r:.64}; expected {more['expected_tags']}"
    return trouble["msg"]


def _is_unknown(trouble: ErrorDetails) -> bool:
    return trouble["type"] == "extra_forbidden"


def _explain(kind: type[BaseModel], found: Sequence[ErrorDetails], body: bytes, meant: Mapping[str, str]) -> ApiError:
    if found[0]["type"] == "json_invalid":
        return bad(f"the body is not JSON: {found[0]['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    given = from_json(body)
    # A part of a kind that is not known has fields that are not known: it is the kind that is wrong.
    wrong = {
        tuple(path[:-1])
        for trouble in found
        if (path := _path(trouble["loc"], given)) and path[-1] in KIND_OF and trouble["type"] != "extra_forbidden"
    }
    found = [one for one in found if not _is_unknown(one) or tuple(_path(one["loc"], given)[:-1]) not in wrong]
    for trouble in found:
        if _is_unknown(trouble):
            return _unknown(kind, trouble["loc"], given, meant)
    where = [_path(trouble["loc"], given, is_missing=trouble["type"] == "missing") for trouble in found]
    if not where[0]:
        return bad("the body must be a JSON object", code="invalid_json")
    # Where a value may have several types, each reports its errors. The deepest ones with the fewest errors are used, and
    # of these the ones that come last in the lists they are in: each type's first there.
    faults = Counter(trouble["loc"][:2] for trouble in found)
    fit = [
        (-len(path), faults[trouble["loc"][:2]], [-step for step in path if isinstance(step, int)])
        for trouble, path in zip(found, where, strict=True)
    ]
    best = min(range(len(found)), key=fit.__getitem__)
    place = where[best]
    said = dict.fromkeys(
        _said(trouble)
        for trouble, path, how in zip(found, where, fit, strict=True)
        if (path, how) == (place, fit[best])
    )
    param = ".".join(map(str, place))
    code = "missing_required_parameter" if found[best]["type"] == "missing" else "invalid_value"
    text = ", or ".join(message[:1].lower() + message[1:] for message in said)
    return bad(f"{param}: {text}", param, code)


def _unknown(kind: type[BaseModel], loc: Sequence[int | str], given: Any, meant: Mapping[str, str]) -> ApiError:
    name, path = str(loc[-1]), _path(loc, given)
    param = ".".join(map(str, path))
    if name in UNSUPPORTED:
        return bad(f"{name!r} is not supported: {UNSUPPORTED[name].reason}", param, "unsupported_parameter")
    hint = nearest(name, kind.model_fields) if len(path) == 1 else ""
    if name in meant:
        hint = f"; did you mean {meant[name]!r}?"
    shown = name if len(name) <= 64 else name[:61] + "..."
    return bad(f"unknown field {shown!r}{hint}", param[:200], "unknown_parameter")


def _path(loc: Iterable[int | str], given: Any, *, is_missing: bool = False) -> list[int | str]:
    """The part of a location that lies in what was given: names of the types that were tried are left out."""
    path: list[int | str] = []
    at = given
    rest = list(loc)
    for index, step in enumerate(rest):
        is_key = isinstance(at, dict) and isinstance(step, str) and step in at
        is_place = isinstance(at, list) and isinstance(step, int) and 0 <= step < len(at)
        if is_key or is_place:
            at = at[step]
        elif not (is_missing and index == len(rest) - 1):
            continue
        path.append(step)
    return path
