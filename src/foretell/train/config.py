"""How to train: one dataclass, whose fields are the keys of ``--config`` and, with their help, options of the command; how
long, and the learning rate along it: linear warmup, then half a cosine, by the share done."""

import math
from dataclasses import dataclass

from foretell.core.errors import ConfigError, require
from foretell.core.settings import setting, settle

PRECISIONS = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
TINY, BELOW_ONE = 1e-12, 1 - 1e-9
"""Numbers that must be above 0, or below 1, are at least and at most these."""
RANGES: dict[str, tuple[float, float]] = {
    "lr": (TINY, 10.0), "warmup": (0.0, BELOW_ONE), "final_lr": (0.0, 1.0), "beta1": (0.0, BELOW_ONE),
    "beta2": (0.0, BELOW_ONE), "weight_decay": (0.0, 10.0), "clip": (TINY, 1e9), "batch_tokens": (1, 10**9),
    "accumulate": (1, 10**6), "max_length": (2, 10**7), "temperature": (1e-3, 1e3), "keep_gib": (0.0, 1e6),
    "held_out": (TINY, BELOW_ONE), "eval_every": (0, 10**9), "eval_tokens": (1, 10**12), "checkpoint_every": (1, 10**9),
}  # fmt: skip
"""Least and largest value of each number."""


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError for a number outside, NaN among them; name: of the setting."""
    if not low <= value <= high:
        least = "above 0" if low == TINY else f"at least {low:.12g}"
        most = "below 1" if high == BELOW_ONE else f"at most {high:.12g}"
        raise ConfigError(f"{name} = {value!r} must be {least} and {most}")


@dataclass(frozen=True)
class TrainBudget:
    """Exactly one of the three. By minutes the rate follows the clock, so two runs differ; every step's rate is
    logged."""

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Refuse none, several, and values that are not positive."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ConfigError(f"give one of steps, epochs and minutes, not {', '.join(given) or 'none of them'}")
        name, value = next(iter(given.items()))
        require(0 < value < math.inf, name, value, "positive")

    def share(self, step: int, seconds: float, steps_per_epoch: float) -> float:
        """Share of training done before a step, after so many seconds: 1 or more ends it."""
        if self.minutes is not None:
            return seconds / (60.0 * self.minutes)
        return step / self.num_steps(steps_per_epoch)

    def num_steps(self, steps_per_epoch: float) -> int:
        """Steps in all; 0 where the clock decides."""
        if self.steps is not None:
            return self.steps
        return 0 if self.epochs is None else max(1, round(self.epochs * steps_per_epoch))


@dataclass(frozen=True)
class TrainConfig:
    """How to train. The method and the head are chosen by the objective.

    steps, epochs and minutes exclude each other; none of them is one epoch.
    """

    steps: int | None = setting(None, "How long, in steps; give one of steps, epochs and minutes.")
    epochs: float | None = setting(None, "How long, in passes over the data.", default_text="1")
    minutes: float | None = setting(
        None, "How long, by the clock: the learning rate then follows the clock, so two runs differ.", metavar="M"
    )
    optimizer: str = setting(
        "adamw", "What makes the steps; muon: Muon for hidden matrices, AdamW for all else, at one rate.",
        metavar="|".join(OPTIMIZERS),
    )  # fmt: skip
    lr: float = setting(1e-3, "Learning rate.", default_text="by the target's hidden size, 0.002 for 256 and less")
    warmup: float = setting(0.04, "Share of training in which the rate rises.")
    final_lr: float = setting(0.0, "Rate at the end, as a share of --lr.")
    beta1: float = setting(0.9, "Of AdamW.")
    beta2: float = setting(0.95, "Of AdamW.")
    weight_decay: float = setting(0.01, "Of both optimizers.")
    clip: float = setting(1.0, "The most that the gradient's norm may be.", default_text="1.0, or the method's own")
    batch_tokens: int = setting(
        4096, "Tokens of a pass of one process, padding counted.", default_text="4096, or the method's own"
    )
    accumulate: int = setting(1, "Passes of a step.")
    max_length: int = setting(1024, "Texts are cut to this many tokens.")
    precision: str = setting(
        "float32", "Of the head's arithmetic; bfloat16 is autocast, the weights stay float32.",
        metavar="|".join(PRECISIONS),
    )  # fmt: skip
    divergence: str | None = setting(
        None, "The loss, e.g. forward_kl, tv or lk_hybrid/eta=2.", metavar="NAME", default_text="the method's own"
    )
    temperature: float = setting(1.0, "Of both distributions in the loss.", option="--loss-temperature", metavar="T")
    keep_gib: float = setting(
        0.0,
        "Of memory for the target's outputs, in GiB: those that fit are computed once, not in every pass over the data.",
    )
    held_out: float = setting(0.05, "Share of the prompts that is kept for evaluation.")
    eval_every: int = setting(200, "Steps between evaluations; 0: at the end only.")
    eval_tokens: int = setting(16384, "Tokens of an evaluation.")
    checkpoint_every: int = setting(200, "Steps between checkpoints.")
    seed: int = setting(0, "Of weights, answers and batches.", envvar="FORETELL_SEED")

    def __post_init__(self) -> None:
        """Refuse invalid values: of other types, not finite, out of range."""
        settle(self)
        if self.steps is not None:
            check_range("steps", self.steps, 1, 10**9)
        for name, most in (("epochs", 1e6), ("minutes", 1e6)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), TINY, most)
        _ = self.budget
        if self.divergence is not None:
            from foretell.train.losses import parse_divergence  # imports torch, which ``train --help`` does without

            parse_divergence(self.divergence)
        for name, (low, high) in RANGES.items():
            check_range(name, getattr(self, name), low, high)
        for name, choices in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be {' or '.join(choices)}")

    @property
    def budget(self) -> TrainBudget:
        """How long, in steps; give one of steps, epochs and minutes."""
        none = self.steps is None and self.epochs is None and self.minutes is None
        return TrainBudget(self.steps, 1.0 if none else self.epochs, self.minutes)


def rate(share: float, *, warmup: float, final: float) -> float:
    """Factor of the learning rate when ``share`` of training is done; warmup, final: share of it, last factor."""
    if share < warmup:
        return max(share, 1e-3) / warmup
    along = min(1.0, (share - warmup) / max(1e-9, 1.0 - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * along))
