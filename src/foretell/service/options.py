"""Limits and modes of a service: one dataclass, whose fields are, with their help, options of ``foretell serve``."""

from dataclasses import dataclass

from foretell.core.errors import ConfigError, check_choice, require
from foretell.core.places import keyed
from foretell.core.settings import setting, settle

MODES = ("auto", "on", "off")
PREFIX_MAX_GIB = 4.0
SHARED_DRAFTS = ("off", "key", "all")
"""A request learns from itself alone; from requests of its tenant; from all requests."""


@keyed
@dataclass(frozen=True)
class ServiceOptions:
    """Limits and modes of a service."""

    max_num_seqs: int = setting(32, "Requests decoded together.")
    max_queue: int = setting(256, "Waiting requests at most; further ones get status 429.")
    max_model_len: int | None = setting(
        None, "Tokens of prompt and output together.", default_text="the model's context"
    )
    kv_memory_gib: float | None = setting(
        None, "Memory of the KV cache.", metavar="GIB", default_text="a share of what is free"
    )
    stall_target_s: float = setting(
        0.1, "Target for how long reading a prompt delays decoding requests.",
        option="--stall-target", metavar="SECONDS", min=0.001,
    )  # fmt: skip
    speculation: str = setting(
        "auto", "auto: guess as much as pays under the load of the moment. on: always. off: never.",
        metavar="|".join(MODES), panel="Speculation",
    )  # fmt: skip
    # The KV of texts is kept for requests of the same tenant that begin alike.
    prefix_reuse: bool = setting(True, "Keep no KV for prompts that begin alike.", option="--no-prefix-reuse")
    shared_drafts: str = setting(
        "off", "What methods that learn from texts (suffix, hybrid) guess from. off: each request's own text. key: that "
        "of all requests with the same API key. all: of all requests; clients can then see each other's texts.",
        metavar="|".join(SHARED_DRAFTS), panel="Speculation",
    )  # fmt: skip
    state_dir: str | None = setting(
        None, "Keep here what guesses have learned from requests, for the next start: texts too, as --shared-drafts says. "
        "Requests with store: false are never in it.", metavar="DIRECTORY", panel="Speculation",
    )  # fmt: skip
    prefix_dir: str | None = setting(
        None, "Keep here the KV of prompts too, so that after a restart known prompts are not read again.",
        metavar="DIRECTORY",
    )  # fmt: skip
    prefix_max_gib: float | None = setting(None, "Disk space of --prefix-dir.", metavar="GIB", default_text="4")
    models_at_once: int = 1  # of this process, which share what is free: with ``kv_memory_gib`` None
    cost_time_limit_s: float = 20.0  # of measuring, after the first start with a model on a machine

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        settle(self)
        for name in ("max_num_seqs", "max_queue", "models_at_once"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len = {self.max_model_len} must be at least 2: a prompt and an output")
        require(self.kv_memory_gib is None or self.kv_memory_gib > 0, "kv_memory_gib", self.kv_memory_gib, "positive")
        require(self.stall_target_s > 0, "stall_target_s", self.stall_target_s, "positive")
        check_choice("speculation", self.speculation, MODES)
        check_shared(self.shared_drafts)
        if self.state_dir is not None and self.speculation == "off":
            raise ConfigError(
                "state_dir keeps what guesses learned, and with speculation = 'off' there are none: drop one"
            )
        if self.prefix_dir is not None and not self.prefix_reuse:
            raise ConfigError("prefix_dir keeps KV of prompts for reuse, and prefix_reuse is off: drop one")
        if self.prefix_max_gib is not None and self.prefix_dir is None:
            raise ConfigError(f"prefix_max_gib = {self.prefix_max_gib} bounds prefix_dir, which is not given")
        if self.prefix_max_gib is not None and not self.prefix_max_gib > 0:
            raise ConfigError(f"prefix_max_gib = {self.prefix_max_gib} must be positive")

    @property
    def prefix_bytes(self) -> int:
        """What ``prefix_dir`` may hold."""
        return int((PREFIX_MAX_GIB if self.prefix_max_gib is None else self.prefix_max_gib) * 2**30)


def check_shared(value: str) -> None:
    """Raise ConfigError for an unknown way of sharing."""
    check_choice("shared_drafts", value, SHARED_DRAFTS)
