"""Logs: one line an event, parseable whatever was written, and silent about what people said."""

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from structlog.contextvars import bind_contextvars

from foretell.core.errors import ConfigError, ModelError
from foretell.server.logs import configure_logs, log, log_request
from tests.server.conftest import Serve
from tests.server.fake import FakeService
from tests.server.test_metrics import RECORD as OTHER

RECORD = replace(
    OTHER, request_id="chat-1", endpoint="/v1/chat/completions", stream=True, method="draft_model",
    seconds_queue=0.1234567891, seconds_prefill=0.0,
)  # fmt: skip
NASTY = 'a\nb\r\x1b[31mred\x00\u2028\x85\ud800 "quoted" = é'


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What configure_logs changes in the process is put back."""
    names = [
        "",
        "foretell",
        "uvicorn",
        "uvicorn.error",
        "uvicorn.access",
        "uvicorn.asgi",
        "transformers",
        "sse_starlette",
    ]
    loggers = [logging.getLogger(name) for name in names]
    before = [([*logger.handlers], logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Untold:
    def __str__(self) -> str:
        raise RuntimeError("cannot be told")


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """Each line as JSON, cut as the strictest reader would: at anything that may end a line."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_when_what_and_figures() -> None:
    stream = io.StringIO()
    configure_logs("info", True, stream=stream)
    log("ready", seconds=1.5, model="bundled", nothing=None, endless=float("inf"))
    (line,) = lines(stream)
    when = datetime.fromisoformat(str(line.pop("ts")))
    assert when.tzinfo == UTC
    assert abs((datetime.now(UTC) - when).total_seconds()) < 60
    assert line == {
        "level": "info", "event": "ready", "seconds": 1.5, "model": "bundled", "nothing": None, "endless": None,
    }  # fmt: skip


def test_a_finished_request_is_one_line_with_its_figures() -> None:
    stream = io.StringIO()
    configure_logs("info", True, stream=stream)
    log_request(RECORD)
    (line,) = lines(stream)
    expected = {
        "event": "request", "level": "info", "request_id": "chat-1", "finish_reason": "stop", "status": 200,
        "method": "draft_model", "num_tokens": 20, "seconds_queue": 0.123457, "acceptance_rate": 0.5,
        "mean_acceptance_length": 2.5, "stream": True,
    }  # fmt: skip
    assert {key: line[key] for key in expected} == expected
    assert "error" not in line


@pytest.mark.parametrize("change", [{"status": 500}, {"finish_reason": "error", "error": "it broke"}])
def test_a_failed_request_is_an_error(change: dict[str, object]) -> None:
    stream = io.StringIO()
    configure_logs("error", True, stream=stream)
    log_request(RECORD)
    log_request(replace(RECORD, **change))  # type: ignore[arg-type]
    (line,) = lines(stream)
    assert line["level"] == "error"
    assert line.get("error") == change.get("error")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("more", "status", "level", "says"),
    [
        ({"logit_bias": {"65": -100}}, 400, "info", "no token is possible any more"),
        ({}, 500, "error", "not finite"),
    ],
)
def test_an_error_is_logged_as_the_client_gets_it(
    serve: Serve, stream: bool, more: dict[str, Any], status: int, level: str, says: str
) -> None:
    """Where a grammar or biases leave no token the request was wrong, and not the server."""
    written = io.StringIO()
    configure_logs("info", True, stream=written)
    client = serve(FakeService(failure=ModelError("not finite")))
    answer = client.post("/v1/completions", json={"model": "fake", "prompt": "a", "stream": stream, **more})
    assert answer.status_code == (200 if stream else status)
    (line,) = [line for line in lines(written) if line["event"] == "request"]
    assert (line["status"], line["level"], line["finish_reason"]) == (status, level, "error")
    assert says in line["error"]
    assert (says in answer.text) == (status == 400)


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_texts_show_only_where_asked(as_json: bool, asked: bool) -> None:
    stream = io.StringIO()
    configure_logs("debug", as_json, asked, stream=stream)
    log_request(RECORD, prompt="my secret", text="the answer")
    log("received", level="debug", messages=[{"role": "user", "content": "my secret"}])
    assert stream.getvalue().count("my secret") == (2 if asked else 0)
    assert stream.getvalue().count("the answer") == (1 if asked else 0)
    assert stream.getvalue().count("chat-1") == 1


def test_the_stream_library_never_logs_texts() -> None:
    stream = io.StringIO()
    configure_logs("debug", True, stream=stream)
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("sse_starlette.sse").debug("chunk: %s", b"my secret")
    assert "my secret" not in stream.getvalue()


def test_the_request_of_a_task_is_on_all_its_lines() -> None:
    stream = io.StringIO()
    configure_logs("info", True, stream=stream)

    async def serve(name: str) -> None:
        bind_contextvars(request_id=name)
        await asyncio.sleep(0)
        log("step", of=name)
        logging.getLogger("some.library").warning("hm from %s", name)

    async def main() -> None:
        await asyncio.gather(*(serve(f"r{k}") for k in range(5)))

    asyncio.run(main())
    log("after")
    told = lines(stream)
    assert [line["of"] for line in told if line["event"] == "step"] == [f"r{k}" for k in range(5)]
    assert all(line["request_id"] == line["of"] for line in told if line["event"] == "step")
    library = [line for line in told if line.get("logger") == "some.library"]
    assert all(line["event"] == f"hm from {line['request_id']}" for line in library)
    assert len(library) == 5
    assert "request_id" not in told[-1]


def alone() -> None:
    """Take pytest's own handlers off: what they catch is sent between processes, and half a character cannot be."""
    logging.getLogger().handlers.clear()


def test_nothing_written_can_break_a_line() -> None:
    alone()
    stream = io.StringIO()
    configure_logs("info", True, True, stream=stream)
    log(NASTY, prompt=NASTY, **{NASTY: NASTY})
    (line,) = lines(stream)
    assert (line["event"], line["prompt"], line[NASTY]) == (NASTY, NASTY, NASTY)


def test_a_terminal_is_never_sent_control_characters() -> None:
    alone()
    stream = Terminal()
    configure_logs("info", None, True, stream=stream)
    log(NASTY, prompt=NASTY, path="/v1/models", seconds=0.123456, count=3, rest=["a b", 1.0], **{NASTY: 1})
    (line,) = stream.getvalue().splitlines()
    assert all(char.isprintable() for char in line)
    assert "path=/v1/models seconds=0.1235 count=3" in line
    assert line[2] == line[5] == ":"


def test_the_form_follows_the_terminal_unless_told() -> None:
    for stream, given, is_json in ((Terminal(), None, False), (io.StringIO(), None, True), (Terminal(), True, True)):
        configure_logs("info", given, stream=stream)
        log("ready")
        assert stream.getvalue().startswith("{") == is_json


def test_levels() -> None:
    stream = io.StringIO()
    configure_logs("warning", True, stream=stream)
    for level in ("debug", "info", "warning", "error"):
        log(f"at {level}", level=level)
    assert [line["event"] for line in lines(stream)] == ["at warning", "at error"]
    with pytest.raises(ConfigError, match="did you mean 'debug'"):
        configure_logs("debgu", True)


def test_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logs("info", True, stream=first)
    configure_logs("info", True, stream=second)
    log("ready")
    assert (len(lines(first)), len(lines(second))) == (0, 1)


def test_exceptions_carry_their_traceback() -> None:
    stream, terminal = io.StringIO(), Terminal()
    for where, as_json in ((stream, True), (terminal, False)):
        configure_logs("info", as_json, stream=where)
        try:
            raise ValueError("what\x1b[2J")
        except ValueError as error:
            log("broke", level="error", error=error)
    (line,) = lines(stream)
    assert line["exception"] == "ValueError"
    assert "test_exceptions_carry" in str(line["traceback"])
    assert "\x1b" not in terminal.getvalue()
    assert terminal.getvalue().count("ValueError: what") == 1


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_without_an_exception_is_a_line(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure_logs("info", as_json, stream=stream)
    logging.getLogger("some.library").error("odd", exc_info=True)
    assert stream.getvalue().count("\n") == 1
    assert "odd" in stream.getvalue()
    assert capsys.readouterr().err == ""


def test_uvicorn_speaks_through_ours() -> None:
    stream = io.StringIO()
    loud = logging.getLogger("uvicorn.error")
    loud.addHandler(logging.StreamHandler(io.StringIO()))
    configure_logs("info", True, stream=stream)
    assert loud.handlers == []
    loud.info("Started server process [%d]", 7)
    access = logging.getLogger("uvicorn.access")
    words = '%s - "%s %s HTTP/%s" %d'
    access.info(words, "127.0.0.1:5", "GET", "/v1/models?key=secret", "1.1", 200)
    configure_logs("debug", True, stream=stream)
    access.info(words, "127.0.0.1:5", "GET", "/v1/models?key=secret", "1.1", 200)
    access.info("something else")
    started, request, other = lines(stream)
    assert (started["event"], started["logger"]) == ("Started server process [7]", "uvicorn.error")
    assert (request["event"], request["path"], request["status"]) == ("http", "/v1/models", 200)
    assert other["event"] == "something else"
    assert "secret" not in stream.getvalue()


def test_libraries_with_handlers_of_their_own_are_led_through_ours() -> None:
    stream, theirs = io.StringIO(), io.StringIO()
    library = logging.getLogger("transformers")
    library.addHandler(logging.StreamHandler(theirs))
    library.propagate = False
    configure_logs("info", True, stream=stream)
    logging.getLogger("transformers.tokenization_utils_base").warning("too long")
    (line,) = lines(stream)
    assert (line["event"], line["logger"]) == ("too long", "transformers.tokenization_utils_base")
    assert theirs.getvalue() == ""


def test_warnings_are_lines_too() -> None:
    stream = io.StringIO()
    configure_logs("info", True, stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # catch_warnings put showwarning back
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
    (line,) = lines(stream)
    assert line["logger"] == "py.warnings"
    assert "old name" in str(line["event"])


def test_a_closed_stream_is_survived_and_a_bug_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure_logs("info", True, stream=stream)
    stream.close()
    log("nobody reads this")
    assert capsys.readouterr().err == ""
    configure_logs("info", True, stream=io.StringIO())
    log("ready", figure=Untold())
    assert "cannot be told" in capsys.readouterr().err
