"""Options of the server's operator: limits, keys, and default fields of responses."""

from dataclasses import dataclass

from foretoken.core.errors import ConfigError
from foretoken.core.settings import setting, settle


@dataclass(frozen=True)
class ServerOptions:
    """See ``build_app``. A client can lower a limit for its request, never raise it."""

    served_model_name: str | None = setting(
        None, "What clients call the model.", metavar="NAME", default_text="as it was loaded"
    )
    api_keys: tuple[str, ...] = setting(
        (), "Ask clients for this key before /v1 and /metrics; may be repeated. The variable keeps it out of the list of "
        "processes.", option="--api-key", envvar="FORETOKEN_API_KEY",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = ()  # Host headers that are answered; none: all
    max_body_mib: float = setting(4.0, "Of a request.", metavar="MIB", panel="Limits")  # counted while it is read
    max_tokens_limit: int | None = setting(
        None, "The most tokens that a completion may ask for.", default_text="the model's context", panel="Limits"
    )
    max_choices: int = 32  # completions of one request: n times its prompts
    request_timeout_s: float | None = setting(
        600.0, "A request that takes longer, from its arrival on, ends with what it has. 0: no limit.",
        option="--request-timeout", metavar="SECONDS", min=0, panel="Limits",
    )  # fmt: skip
    body_timeout_s: float = 30.0  # for a request's body to arrive
    write_timeout_s: float = 30.0  # a stream is closed when its client reads nothing for this long
    keepalive_s: float = 15.0  # a comment line is sent when a stream was silent for this long
    include_metrics: bool = True  # ``metrics.speculative_decoding`` in responses, unless a request says otherwise
    log_prompts: bool = setting(False, "Log prompts and outputs too; they are left out else.", panel="Logs")
    debug: bool = setting(False, "Add /debug/integrity, a check of the engine's state.", panel="Logs")

    def __post_init__(self) -> None:
        """Refuse invalid values, each with one clear ConfigError."""
        settle(self)
        for name in ("max_body_mib", "max_choices", "body_timeout_s", "write_timeout_s", "keepalive_s"):
            _require_positive(name, getattr(self, name))
        for name in ("max_tokens_limit", "request_timeout_s"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if not all(self.api_keys):
            raise ConfigError("an API key is empty: leave it out, or give one")
        if not all(key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key has characters that no HTTP header can carry: use printable ASCII")
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty: leave it out, or give a name")

    @property
    def max_body_bytes(self) -> int:
        """``max_body_mib`` in bytes."""
        return int(self.max_body_mib * 2**20)


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} = {value!r} must be positive")
