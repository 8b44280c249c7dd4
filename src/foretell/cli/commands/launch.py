"""``foretell launch``: a coding program that uses a server here, with nothing of its own settings changed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import typer

from foretell.cli.errors import TERMINATED
from foretell.core.errors import ConfigError, ModelError, nearest

ANSWER_S, STOP_S = 5, 40
ATTEMPTS = 25  # at an answer, .2 s apart, from who was seen to load a model
READY = "(API: "  # in the line that a server logs when it takes requests


@dataclass(frozen=True)
class Client:
    """How a program finds a server. {url}, {name} (of the model) and {key} are put in."""

    get: str  # how to install it
    arguments: Sequence[str] = ()  # before the user's
    environment: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)  # variables that the user's own may override
    without: Sequence[str] = ()  # variables that would lead it elsewhere


_CLAUDE_MODELS = [f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")]
_CLAUDE_MODELS += ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
_CODEX = {
    "model": "{name}",
    "model_provider": "foretell",
    "model_reasoning_summary": "none",
    "model_providers.foretell.name": "foretell",
    "model_providers.foretell.base_url": "{url}/v1",
    "model_providers.foretell.wire_api": "responses",
    "model_providers.foretell.env_key": "FORETELL_API_KEY",
}
_OPENCODE = {
    "model": "foretell/{name}",
    "small_model": "foretell/{name}",
    "provider": {
        "foretell": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "foretell",
            "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
            "models": {"{name}": {"name": "{name}"}},
        }
    },
}
CLIENTS = {
    "claude": Client(
        "npm install -g @anthropic-ai/claude-code",
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            **dict.fromkeys(_CLAUDE_MODELS, "{name}"),
        },
        # The header in front of the prompt has letters of the first message: no two conversations would share a beginning.
        usual={"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        without=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    ),
    "codex": Client(
        "npm install -g @openai/codex",
        arguments=[part for key, value in _CODEX.items() for part in ("-c", f'{key}="{value}"')],
        environment={"FORETELL_API_KEY": "{key}"},
    ),
    "opencode": Client("npm install -g opencode-ai", environment={"OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE)}),
    "aider": Client(
        "pip install aider-chat, in an environment of its own",
        arguments=("--model", "openai/{name}", "--no-show-model-warnings"),
        environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}"},
    ),
}

ClientName = Annotated[str, typer.Argument(metavar="|".join(CLIENTS), show_default=False, help="The program.")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", show_default=False, help="What the program is given.")
]
HELP = "The model to serve while the program runs, as TARGET of 'serve', where no server answers yet."
Model = Annotated[str | None, typer.Option("--model", metavar="TARGET", show_default=False, help=HELP)]
Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="Of the server, on this machine.")]


def launch(client: ClientName, arguments: Arguments = None, *, model: Model = None, port: Port = 8000) -> None:
    """Run a coding program (Claude Code, Codex, OpenCode, aider) with a model here, in this terminal.

    A server that answers at the port is used; else one of --model is started, and stopped when the program ends. Variables
    and arguments say where it is: no file of yours is changed. The program's exit status is passed on.
    FORETELL_API_KEY: the server's key.
    """
    if client not in CLIENTS:
        raise ConfigError(f"unknown program {client!r}{nearest(client, CLIENTS)}")
    if (program := shutil.which(client)) is None:
        raise ConfigError(f"{client} is not installed, or not on PATH: {CLIENTS[client].get}")
    url, key = f"http://127.0.0.1:{port}", os.environ.get("FORETELL_API_KEY") or "none"
    for each in ("SIGTERM", "SIGHUP"):  # else the server would stay when the terminal is closed
        if hasattr(signal, each):
            signal.signal(getattr(signal, each), _end)
    with ExitStack() as stack:
        if (name := _served(url, key)) is None:
            if model is None:
                raise ConfigError(
                    f"no server answers at {url}: 'foretell serve TARGET --port {port}' starts one, or give --model TARGET"
                )
            name = stack.enter_context(_server(model, url, port, key))
        elif model is not None and Path(model).name != Path(name).name:
            raise ConfigError(f"the server at {url} has {name!r}, not {model!r}: drop --model, or give another --port")
        put = {"{url}": url, "{name}": name, "{key}": key}
        status = _run(program, CLIENTS[client], arguments or (), put)
    raise typer.Exit(status)


def _end(number: int, frame: Any) -> NoReturn:
    sys.exit(TERMINATED)


def _served(url: str, key: str) -> str | None:
    """The model that a server has, once it is loaded; None where none answers. Raises ConfigError for another kind of
    server."""
    asked = Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
    left = 0  # attempts that may fail: once a model is seen to load, where the server takes over
    while True:
        try:
            with build_opener(ProxyHandler({})).open(asked, timeout=ANSWER_S) as answer:  # no proxy: it is this machine
                model = json.load(answer)["data"][0]
            if (model.get("status") or {}).get("value") != "loading":
                return str(model["id"])
            if not left:
                typer.echo(f"foretell: waiting for the server at {url}, which loads {model['id']}", err=True)
            left = ATTEMPTS
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            if getattr(error, "code", 0) == 401:
                raise ConfigError(f"the server at {url} asks for a key: set FORETELL_API_KEY to it") from None
            if isinstance(error, HTTPError) or not isinstance(error, OSError):
                raise ConfigError(f"what answers at {url} is no server of models: give another --port") from None
            if not left:
                return None
            left -= 1
        time.sleep(0.2)


@contextmanager
def _server(model: str, url: str, port: int, key: str) -> Iterator[str]:
    """A server of this model while this lasts: its name for it. Raises ModelError where it does not start."""
    given = [sys.executable, "-m", "foretell", "serve", model, "--port", str(port)]
    typer.echo(f"foretell: starting a server of {model} at {url}", err=True)
    with tempfile.TemporaryDirectory() as folder:
        log, name = Path(folder, "log"), None
        with log.open("w") as said:  # in a session of its own, as Ctrl-C is the program's
            served = subprocess.Popen(given, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            while name is None:
                has_ended = served.poll() is not None  # before its log is read, so that all of it is there
                lines = log.read_text(errors="replace").splitlines()
                if any(READY in line for line in lines):
                    name = _served(url, key)
                if name is None and has_ended:
                    last = re.sub(r'\{.*"event": "(.*?)".*', r"\1", lines[-1] if lines else "it said nothing")
                    raise ModelError(f"the server did not start: {last.removeprefix('foretell: ')}")
                time.sleep(0.1)
            yield name
        finally:
            served.terminate()
            with suppress(subprocess.TimeoutExpired):
                served.wait(STOP_S)
            served.kill()
            served.wait()


def _run(program: str, client: Client, arguments: Sequence[str], put: Mapping[str, str]) -> int:
    """The exit status of a program with a server; 128 and the signal where one ended it, as shells say it."""

    def with_values(text: str) -> str:
        for name, value in put.items():
            text = text.replace(name, json.dumps(value)[1:-1] if '"' in text else value)  # JSON and TOML quote alike
        return text

    environment = {
        **client.usual,
        **os.environ,
        **{name: with_values(text) for name, text in client.environment.items()},
    }
    for name in client.without:
        environment.pop(name, None)
    try:
        process = subprocess.Popen([program, *map(with_values, client.arguments), *arguments], env=environment)
    except OSError as error:
        raise ConfigError(f"{program} cannot be run: {error.strerror or error}") from None
    try:
        while True:
            with suppress(KeyboardInterrupt):  # the terminal has told the program as well, which decides what it does
                status = process.wait()
                return status if status >= 0 else 128 - status
    finally:
        if process.poll() is None:
            process.terminate()
