"""Logs on stderr: one JSON object a line for machines, one readable line on a terminal.

Every line has ts, level, event and, within a request, request_id. What people wrote or were written is left out unless it
was asked for: the formatters drop it, whoever logs it.
"""

import logging
import math
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from typing import Any, TextIO

from foretoken.errors import ConfigError, nearest
from foretoken.server.metrics import RequestRecord

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PRIVATE = frozenset({"prompt", "messages", "text", "stop", "prediction", "schema"})
"""Figures that are dropped unless ``log_prompts`` is asked for."""

OTHERS = ("transformers",)  # libraries that write to stderr themselves, past the root logger
UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)  # values that a readable line shows without quotes

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that the current task serves; every line logged meanwhile carries it."""

_logger = logging.getLogger("foretoken")


def configure_logs(
    level: str = "info", json: bool | None = None, log_prompts: bool = False, *, stream: TextIO | None = None
) -> None:
    """Send all of this process's logs to stderr (or stream), one line each. Called again, it replaces what it did before.

    json None: JSON unless the stream is a terminal. To be called again once models are loaded: what is imported with them
    brings handlers of its own. Raises ConfigError where level is none of LEVELS.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not a level{nearest(level, LEVELS)}")
    stream = stream or sys.stderr
    as_json = not stream.isatty() if json is None else json
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter(log_prompts) if as_json else ReadableFormatter(log_prompts))
    root = logging.getLogger()
    for other in [*root.handlers]:
        if isinstance(other, _Handler):
            root.removeHandler(other)
    root.addHandler(handler)
    _logger.setLevel(LEVELS[level])
    for name in (*UVICORN, *OTHERS):
        logger = logging.getLogger(name)
        logger.handlers.clear()  # its own would write the line a second time, in another form
        logger.propagate = True
        if name in UVICORN:
            logger.setLevel(LEVELS[level])
    # Our own line of a finished request says more than the access log's, which is kept for those who look closely.
    logging.getLogger("uvicorn.access").setLevel(LEVELS[level] if level == "debug" else logging.WARNING)
    logging.captureWarnings(True)


def log(event: str, *, level: str = "info", error: BaseException | str | None = None, **figures: Any) -> None:
    """One line. error: an exception, which adds its traceback, or what is wrong in words."""
    trouble = None
    if isinstance(error, BaseException):
        trouble = (type(error), error, error.__traceback__)
    elif error is not None:
        figures["error"] = error
    _logger.log(LEVELS[level], event, exc_info=trouble, extra={"figures": figures})


def log_request(record: RequestRecord, *, prompt: str | None = None, text: str | None = None) -> None:
    """The one line of a request that has ended; prompt and text show only where prompts are logged."""
    figures = {name: value for name, value in asdict(record).items() if value is not None}
    for name in ("acceptance_rate", "mean_acceptance_length"):
        if (value := getattr(record, name)) is not None:
            figures[name] = value
    figures |= {name: value for name, value in (("prompt", prompt), ("text", text)) if value is not None}
    level = "info" if record.status < 500 and record.finish_reason != "error" else "error"
    log("request", level=level, **figures)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that it can be told from others'."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A log that nobody reads any more (a closed pipe, a full disk) must not fill the place with tracebacks."""
        if not isinstance(sys.exception(), (OSError, ValueError)):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, log_prompts: bool) -> None:
        super().__init__()
        self.log_prompts = log_prompts

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """All that a line says, in order."""
        figures: Mapping[str, Any] = getattr(record, "figures", {})
        event, figures = (record.getMessage(), figures) if record.name != "uvicorn.access" else _access(record)
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": event,
        }
        if (current := request_id.get()) is not None:
            fields["request_id"] = current
        if not record.name.startswith("foretoken"):
            fields["logger"] = record.name
        fields |= {key: value for key, value in figures.items() if self.log_prompts or key not in PRIVATE}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = type(record.exc_info[1]).__name__
            fields["traceback"] = self.formatException(record.exc_info)
        return fields


class JsonFormatter(_Formatter):
    """One JSON object a line, ASCII alone, so that no text can break a line in two."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return dumps(_plain(self.fields(record)), default=str)


class ReadableFormatter(_Formatter):
    """``18:04:59 info request request_id=... num_tokens=12``; control characters are shown, never sent."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the traceback below it where there is one."""
        fields = self.fields(record)
        traceback = fields.pop("traceback", None)
        head = f"{fields.pop('ts')[11:19]} {fields.pop('level'):<7} {_visible(str(fields.pop('event')))}"
        line = " ".join([head, *(f"{_visible(key)}={_shown(value)}" for key, value in fields.items())])
        return line if traceback is None else "\n".join([line, *map(_visible, traceback.splitlines())])


def _access(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """uvicorn's access line as figures. The query is left out: keys travel in it."""
    try:
        client, method, path, _, status = record.args  # type: ignore[misc]
        return "http", {"client": client, "http_method": method, "path": str(path).partition("?")[0], "status": status}
    except (TypeError, ValueError):
        return record.getMessage(), {}


def _plain(value: Any) -> Any:
    """Rounded to what a log needs, and without the numbers that JSON does not have."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _shown(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else dumps(value, default=str)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() else dumps(char)[1:-1] for char in text)
