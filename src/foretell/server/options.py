"""Options of the server's operator: limits, keys, and default fields of responses."""

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path

from foretell.core.errors import ConfigError, nearest
from foretell.core.settings import setting, settle
from foretell.engine.structured.thoughts import NAMES

HOST = re.compile(r"\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]", re.ASCII)
ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+", re.ASCII)
GGUF = ".gguf"
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
TIME_PART = re.compile(rf"(\d+(?:\.\d*)?|\.\d+)({'|'.join(UNITS)})")
MOST_SECONDS = 1e8  # timers of the event loop hold no more; it is without end
_POSITIVE = ("max_body_mib", "max_choices", "header_timeout_s", "body_timeout_s", "write_timeout_s", "keepalive_s")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def check_level(level: str) -> None:
    """Raise ConfigError where a level is none of LEVELS."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not a level{nearest(level, LEVELS)}")


@dataclass(frozen=True)
class ServerOptions:
    """See ``build_app``. A client can lower a limit for its request, never raise it."""

    served_model_name: tuple[str, ...] = setting(
        (), "What clients call the model, or several names joined by commas; may be repeated. '*': any name is answered "
        "beside these, as clients ask for more than the one that is set.", metavar="NAME", default_text="as it was loaded",
    )  # fmt: skip
    api_keys: tuple[str, ...] = setting(
        (), "Ask clients for this key before /v1 and /metrics; may be repeated. The variable keeps it out of the list of "
        "processes.", option="--api-key", envvar="FORETELL_API_KEY",
    )  # fmt: skip
    metrics_key: str | None = setting(
        None, "Ask for this key before /metrics, and for no client's: for the program that scrapes it.",
        metavar="KEY", envvar="FORETELL_METRICS_KEY", default_text="/metrics asks for a client's key, where there are any",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = setting(
        (), "A name by which clients call this server, in their Host header, beside the loopback's; may be repeated. "
        "'*': any.", option="--allowed-host", metavar="NAME", default_text="the loopback's alone where it listens there, "
        "else any",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = setting(
        (), "A site, such as https://app.example, whose web pages may use this server from a browser (CORS); may be "
        "repeated. '*': any site.", option="--allowed-origin", metavar="ORIGIN", default_text="none",
    )  # fmt: skip
    max_body_mib: float = setting(4.0, "Of a request.", metavar="MIB", panel="Limits")  # counted while it is read
    max_tokens_limit: int | None = setting(
        None, "The most tokens that a completion may ask for.", default_text="the model's context", panel="Limits"
    )
    max_choices: int = 32  # completions of one request: n times its prompts
    request_timeout_s: float | None = setting(
        600.0, "A request that takes longer, from its arrival on, ends with what it has. 0: no limit.",
        option="--request-timeout", metavar="SECONDS", min=0, panel="Limits",
    )  # fmt: skip
    # For a request's headers to arrive, from the connection's begin or the last answer on.
    header_timeout_s: float = 20.0
    body_timeout_s: float = 30.0  # for a request's body to arrive
    write_timeout_s: float = 30.0  # an answer is cut off when its client reads nothing for this long
    keepalive_s: float = 15.0  # a comment line is sent when a stream was silent for this long
    include_metrics: bool = True  # ``metrics.speculative_decoding`` in responses, unless a request says otherwise
    parse_special: bool = setting(
        False, "A marker such as <|im_end|> in a message counts as the model's token: it can end the turn. Left out, it is "
        "text.",
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto", "How the model marks its thoughts, so that replies tell them apart from the answer: "
        f"{', '.join(NAMES)}; none: not at all; auto: found from its chat template.", metavar="NAME",
    )  # fmt: skip
    marked_calls_only: bool = setting(
        False, "Leave an answer that is a JSON object with a tool's name and fitting arguments a text, where the marks of "
        "calls are missing. Left out, it is a call.",
    )  # fmt: skip
    keep_changing_lines: bool = setting(
        False, "Keep Claude Code's line x-anthropic-billing-header, after which no other conversation's text is found."
    )
    strict_fields: bool = setting(
        False, "Refuse request fields that nobody knows, which are taken else and named in x-foretell-without-effect."
    )
    log_prompts: bool = setting(False, "Log prompts and outputs too; they are left out else.", panel="Logs")

    def __post_init__(self) -> None:
        """Refuse invalid values, each with one clear ConfigError."""
        settle(self)
        for name in _POSITIVE:
            _require_positive(name, getattr(self, name))
        if self.max_body_mib == math.inf:
            raise ConfigError("max_body_mib is infinite: give a number of MiB")
        for name in ("max_tokens_limit", "request_timeout_s"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        for what, keys in (("an API key", self.api_keys), ("the metrics key", (self.metrics_key,))):
            for key in keys:
                if key is not None and not key.strip():
                    raise ConfigError(f"{what} is empty: leave it out, or give one")
                if key is not None and not (key.isascii() and key.isprintable()):
                    raise ConfigError(f"{what} has characters that no HTTP header can carry: use printable ASCII")
        if self.reasoning_parser not in ("auto", "none", *NAMES):
            known = ", ".join(("auto", "none", *NAMES))
            raise ConfigError(f"reasoning parser {self.reasoning_parser!r} is not known; there are {known}")
        if self.metrics_key in self.api_keys:
            raise ConfigError(
                "the metrics key is a client's API key too: give the program that scrapes a key of its own"
            )
        for host in self.allowed_hosts:
            if not HOST.fullmatch(host):
                raise ConfigError(f"allowed host {host!r} is not a name: give it without scheme, port and path, or '*'")
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed origin {origin!r} is not one: give scheme and name, as in https://app.example"
                )
        names = [name.strip() for given in self.served_model_name for name in given.split(",")]
        if "" in names:
            raise ConfigError("served_model_name is empty: leave it out, or give a name")
        object.__setattr__(self, "served_model_name", tuple(dict.fromkeys(names)))

    @property
    def max_body_bytes(self) -> int:
        """``max_body_mib`` in bytes."""
        return int(self.max_body_mib * 2**20)


@dataclass(frozen=True)
class ModelsOptions:
    """Of a server with several models."""

    models_dir: str | None = setting(
        None, "Serve every GGUF file and every directory with a config.json in here too, by its name.", metavar="DIRECTORY",
    )  # fmt: skip
    max_models: int = setting(
        3, "Of several, loaded at once; the one that was not used for longest is unloaded for another.", min=1,
    )  # fmt: skip
    keep_alive: str = setting(
        "5m", "How long one of several stays loaded where nobody asks: seconds, or '90s', '1h30m'; -1: always.",
        metavar="TIME",
    )  # fmt: skip
    preload: bool = setting(False, "Load every TARGET at the start, and keep it.")

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        settle(self)
        if self.max_models < 1:
            raise ConfigError(f"max_models = {self.max_models} must be at least 1")
        if self.models_dir is not None and not Path(self.models_dir).expanduser().is_dir():
            raise ConfigError(f"models_dir = {self.models_dir} is no directory: give one that holds models")
        seconds_of(self.keep_alive)

    @property
    def keep_alive_s(self) -> float:
        """``keep_alive`` in seconds."""
        return seconds_of(self.keep_alive)


def seconds_of(given: float | str) -> float:
    """A time as Ollama's clients give it: seconds, or text such as "5m"; below 0: without end. Raises ConfigError."""
    text = str(given).strip()
    parts = TIME_PART.findall(text)
    if parts and "".join(map("".join, parts)) == text.removeprefix("-"):
        seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    else:
        try:
            seconds = abs(float(text))
        except ValueError:
            seconds = math.nan
        if math.isnan(seconds):
            raise ConfigError(
                f"keep_alive = {given!r} is no time: give seconds, or text such as '90s', '5m', '1h30m'; -1: never"
            )
    return math.inf if text.startswith("-") or seconds > MOST_SECONDS else seconds


def name_of(target: str) -> str:
    """What a model is called by default: the last part of a path, without ".gguf"; a hub id or known name as it is."""
    path = Path(target).expanduser()
    is_path = target.startswith((".", "/", "~")) or path.exists()
    return without_suffix(path.resolve().name if path.name in ("", ".", "..") else path.name) if is_path else target


def without_suffix(name: str) -> str:
    """A file's name without ".gguf"."""
    return name[: -len(GGUF)] if name.lower().endswith(GGUF) else name


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} = {value!r} must be positive")
