"""How long training lasts, and the learning rate along it: linear warmup, then half a cosine, by the share done."""

import math
from dataclasses import dataclass

from foretell.core.errors import ConfigError


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
        if not value > 0 or not math.isfinite(value):
            raise ConfigError(f"{name} = {value} must be positive")

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


def rate(share: float, *, warmup: float, final: float) -> float:
    """Factor of the learning rate when ``share`` of training is done; warmup, final: share of it, last factor."""
    if share < warmup:
        return max(share, 1e-3) / warmup
    along = min(1.0, (share - warmup) / max(1e-9, 1.0 - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * along))
