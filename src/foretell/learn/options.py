"""How to learn while serving: one dataclass, whose fields are, with their help, options of ``foretell serve``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.core.errors import ConfigError, check_choice, require
from foretell.core.settings import setting, settle
from foretell.planner.budget import LEARN_SHARE

if TYPE_CHECKING:
    from foretell.draft.config import MethodConfig

RECIPES = {
    "draft_model": "draft_model",
    "eagle1": "eagle1",
    "eagle2": "eagle1",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "dflash": "dflash",
}
"""Methods whose weights can learn while serving, and the recipe that trains each; of a method that is made of others the
part that has weights (``MethodConfig.trained``)."""
MAX_TENANTS = 8
"""API keys with weights of their own; the least recently used is dropped."""
WHERE = ("process", "inline")
"""In a process of its own, at idle priority; or on the engine's thread, in quanta while no request runs."""


@dataclass(frozen=True)
class LearnOptions:
    """What ``Service(learn=...)`` takes."""

    learn_every: int = setting(8, "Texts between two updates; twice as many older ones are learned again.")
    learn_memory_mib: float = setting(256.0, "Memory for texts to learn from; the oldest are dropped.", metavar="MIB")
    learn_dir: str | None = setting(
        None, "Where swapped-in weights, the log of events and, on request, checkpoints are written; learning goes on from "
        "there at the next start. Texts are never written.", metavar="DIR", default_text="nothing is written",
    )  # fmt: skip
    learn_share: float = setting(
        LEARN_SHARE, "Share of the serving time that capturing texts and swapping weights may take; with the planner's "
        "trials it stays below 2 %.", metavar="SHARE",
    )  # fmt: skip
    learn_busy_share: float = setting(
        0.01, "Processor time, as a share of one core, that learning may take while the service decodes on all cores. "
        "1: no limit.", metavar="SHARE",
    )  # fmt: skip
    learn_device: str | None = setting(None, "A device to learn on.", metavar="DEVICE", default_text="the CPU")
    learn_lr: float | None = setting(
        None, "Learning rate.", metavar="LR", default_text="by the hidden size, 0.001 for 256 and less"
    )
    # Not of the command line.
    held_out: int = 8  # one text in so many is kept for the gate
    replay: int = 16  # older texts learned again in each update
    batch_texts: int = 4  # of an optimiser step
    # Tokens of a text, prompt included; longer ones are cut, or skipped where the prompt is longer.
    max_length: int = 1024
    where: str = "process"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse invalid values, each with one clear ConfigError."""
        settle(self)
        for name in ("learn_every", "held_out", "replay", "batch_texts", "max_length"):
            if getattr(self, name) < (0 if name == "replay" else 1):
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {0 if name == 'replay' else 1}")
        if self.held_out < 2:
            raise ConfigError("held_out = 1 would leave no text to learn from: one in so many is kept for the gate")
        require(0 < self.learn_memory_mib < math.inf, "learn_memory_mib", self.learn_memory_mib, "positive and finite")
        for name in ("learn_share", "learn_busy_share"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "in (0, 1]")
        require(self.learn_lr is None or 0 < self.learn_lr <= 1, "learn_lr", self.learn_lr, "in (0, 1]; 0.001 is large")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} must have at most 64 bits")
        check_choice("where", self.where, WHERE)
        if self.learn_dir == "":
            raise ConfigError("learn_dir is empty: give a folder, or leave it out and nothing is written")
        if self.learn_dir is not None and Path(self.learn_dir).exists() and not Path(self.learn_dir).is_dir():
            raise ConfigError(f"learn_dir = {self.learn_dir} is a file; expected a folder")

    def lr(self, hidden_size: int) -> float:
        """The learning rate in force, by default by one over the width, so that a step of Adam changes outputs alike
        (2203.03466). By its root, a head of width 1,536 won less and forgot more."""
        return self.learn_lr or round(1e-3 * min(1.0, 256 / hidden_size), 8)


def check_configs(configs: "Sequence[MethodConfig]") -> None:
    """Before anything is loaded. configs: of the methods that guess. Raises ConfigError where none of them can learn."""
    if not configs:
        raise ConfigError("nothing guesses here (speculation = 'off'), so nothing can learn: drop that, or --learn")
    if not any(config.trained.method in RECIPES for config in configs):
        names = ", ".join(sorted({config.method for config in configs}))
        raise ConfigError(
            f"methods {names} cannot learn while serving: choose one of {', '.join(RECIPES)}, or hybrid, whose second "
            "method learns"
        )


def weights_of(config: "MethodConfig") -> str:
    """Directory, hub id or "bundled/..." of the weights that a method loads."""
    name = config.trained.method
    given: str | None = getattr(config.trained, "model", None)
    return given or ("bundled/draft" if name == "draft_model" else f"bundled/{name}")
