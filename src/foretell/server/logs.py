"""Logs on stderr: one JSON object a line for machines, one readable line on a terminal.

Every line has ts, level, event and, within a request, request_id, which ``structlog.contextvars`` carry. Prompts and
outputs are dropped by the formatter unless ``log_prompts`` is set.

Lines are ordinary ``logging`` records, so that an app mounted in another program follows that program's logging, and
lines of uvicorn and other libraries pass the same structlog processors.
"""

import logging
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps
from traceback import format_exception
from typing import Any, TextIO

from structlog.contextvars import merge_contextvars
from structlog.dev import Column, ConsoleRenderer, KeyValueColumnFormatter, plain_traceback
from structlog.processors import JSONRenderer, TimeStamper
from structlog.stdlib import ProcessorFormatter, add_log_level
from structlog.typing import EventDict, Processor, WrappedLogger

from foretell.server.metrics import RequestRecord
from foretell.server.options import LEVELS, check_level

PRIVATE = frozenset({"prompt", "messages", "text", "stop", "prediction", "schema"})
"""Fields that are dropped unless ``log_prompts`` is set."""

OTHERS = ("transformers",)  # libraries that write to stderr themselves, past the root logger
UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)  # values that a readable line shows without quotes

HEAD = ("ts", "level", "event", "request_id", "key_id", "logger")  # what a JSON line begins with

_logger = logging.getLogger("foretell")


def configure_logs(
    level: str = "info", json: bool | None = None, log_prompts: bool = False, *, stream: TextIO | None = None
) -> None:
    """Send all of this process's logs to stderr (or stream), one line each. Called again, it replaces what it did before.

    json None: JSON unless the stream is a terminal. Call it again after models are loaded: their imports add handlers.
    Raises ConfigError where level is none of LEVELS.
    """
    check_level(level)
    stream = stream or sys.stderr
    as_json = not stream.isatty() if json is None else json
    handler = _Handler(stream)
    handler.setFormatter(_formatter(as_json, log_prompts))
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
    # The server's line of a finished request has more than the access log's, which is kept at level debug.
    logging.getLogger("uvicorn.access").setLevel(LEVELS[level] if level == "debug" else logging.WARNING)
    logging.getLogger("sse_starlette").setLevel(logging.INFO)  # its debug lines hold what was written
    logging.captureWarnings(True)


def log(
    event: str, *, level: str = "info", error: BaseException | str | None = None, always: bool = False, **figures: Any
) -> None:
    """One line. error: an exception, which adds its traceback, or what is wrong in words. always: at any log level."""
    trouble = None
    if isinstance(error, BaseException):
        trouble = (type(error), error, error.__traceback__)
    elif error is not None:
        figures["error"] = error
    extra = {"figures": figures}
    if always:
        _logger.handle(_logger.makeRecord(_logger.name, LEVELS[level], "", 0, event, (), trouble, extra=extra))
    else:
        _logger.log(LEVELS[level], event, exc_info=trouble, extra=extra)


def log_request(record: RequestRecord, *, prompt: str | None = None, text: str | None = None) -> None:
    """The one line of a request that has ended; prompt and text show only where prompts are logged."""
    figures = {name: value for name, value in asdict(record).items() if value is not None}
    for name in ("acceptance_rate", "mean_acceptance_length"):
        if (value := getattr(record, name)) is not None:
            figures[name] = value
    figures |= {name: value for name, value in (("prompt", prompt), ("text", text)) if value is not None}
    ours = record.status >= 500 or (record.finish_reason == "error" and record.status < 400)  # not the client's mistake
    level = "error" if ours else "info"
    log("request", level=level, **figures)


class _Handler(logging.StreamHandler[TextIO]):
    """A handler class of its own, so that it can be found again."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A log that cannot be written (a closed pipe, a full disk) must not produce tracebacks."""
        if not isinstance(sys.exception(), (OSError, ValueError)):
            super().handleError(record)


def _formatter(as_json: bool, log_prompts: bool) -> ProcessorFormatter:
    """The formatter of all records. JSON lines are ASCII only, so that no text can break a line in two."""
    read: list[Processor] = [_figures, ProcessorFormatter.remove_processors_meta, add_log_level, merge_contextvars]
    if not log_prompts:
        read.append(_without_texts)
    write: list[Processor]
    if as_json:
        write = [TimeStamper("iso", key="ts"), _with_traceback, _for_json, JSONRenderer(default=str)]
    else:
        columns = [
            Column("ts", KeyValueColumnFormatter(None, "", "", str)),
            Column("level", KeyValueColumnFormatter(None, "", "", str, width=7)),
            Column("event", KeyValueColumnFormatter(None, "", "", str)),
            Column("", KeyValueColumnFormatter("", "", "", _shown)),  # all others
        ]
        console = ConsoleRenderer(columns=columns, sort_keys=False, exception_formatter=plain_traceback)
        write = [TimeStamper("%H:%M:%S", key="ts"), _one_line, console, _visible_lines]
    return ProcessorFormatter(processors=[*read, *write], pass_foreign_args=True)


def _figures(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """The fields of a record: those of ``log``, or another library's message and its name."""
    record: logging.LogRecord = fields["_record"]
    arguments = fields.pop("positional_args")
    if record.name == "uvicorn.access":
        fields.update(_access(arguments))
    if not record.name.startswith("foretell"):
        fields["logger"] = record.name
    if fields.get("exc_info") == (None, None, None):  # logged as an error where none was raised
        del fields["exc_info"]
    fields.update(getattr(record, "figures", {}))
    return fields


def _without_texts(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    return {key: value for key, value in fields.items() if key not in PRIVATE}


def _with_traceback(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """The class of an exception apart from its traceback, so that lines can be counted by it."""
    if (raised := fields.pop("exc_info", None)) is not None:
        fields["exception"] = raised[0].__name__
        fields["traceback"] = "".join(format_exception(*raised)).rstrip()
    return fields


def _for_json(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    plain = {key: _plain(value) for key, value in fields.items()}
    return {key: plain[key] for key in HEAD if key in plain} | plain


def _one_line(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Keys and the event as they may stand on a terminal's line: control characters are shown, never sent."""
    made: EventDict = {_visible(key): value for key, value in fields.items()}
    made["event"] = _visible(str(fields["event"]))
    return made


def _visible_lines(_: WrappedLogger, __: str, text: Any) -> str:
    """The same for tracebacks, which stand on lines below."""
    return "\n".join(map(_visible, text.split("\n")))


def _access(arguments: Any) -> EventDict:
    """uvicorn's access line as figures. The query is left out: keys travel in it."""
    try:
        client, method, path, _, status = arguments
        path = str(path).partition("?")[0]
        return {"event": "http", "client": client, "http_method": method, "path": path, "status": status}
    except (TypeError, ValueError):
        return {}


def _plain(value: Any) -> Any:
    """Rounded for a log, without NaN and infinity, which JSON does not have."""
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
