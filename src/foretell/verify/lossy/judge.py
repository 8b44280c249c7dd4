"""Judge decoding (Bachmann et al. 2501.19309): a trained head on the target's hidden states says which guesses are
acceptable."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.core.errors import ConfigError, require
from foretell.verify.base import Verifier, VerifierLoader
from foretell.verify.lossy.base import Lossy, Mismatch

Head = Callable[[Tensor], Tensor]
"""taps [B, N, T * H] -> logits [B, N] of "this token is acceptable"; pure, each node from its own row."""


@dataclass(frozen=True, eq=False)
class JudgeHead:
    """A linear head: w . h + b, with h = columns start .. start + W - 1 of a node's taps."""

    weight: Tensor  # [W]
    bias: float = 0.0
    start: int = 0  # where a layer's hidden states begin, if several layers are tapped
    eps: float | None = None  # h is divided by sqrt(mean(h^2) + eps), over the W columns alone; None: h as it is

    def __call__(self, taps: Tensor) -> Tensor:
        """[B, N] logits, in the weight's dtype."""
        width = self.weight.shape[0]
        stop = self.start + width
        if taps.shape[-1] < stop:
            raise ConfigError(
                f"the judge's head reads columns {self.start} to {stop - 1} of {taps.shape[-1]} tapped ones: tap the "
                "layers of the target that it was trained on"
            )
        h = taps[..., self.start : stop].to(self.weight.dtype)
        if self.eps is not None:
            h = F.rms_norm(h, (width,), eps=self.eps)
        return h @ self.weight + self.bias


@dataclass(frozen=True)
class Judge(Lossy):
    """Tolerate a mismatch iff sigmoid(head(h)) > threshold, h the target's hidden state of the guess itself.

    That is the child's own row of the taps: the state after the target has read the token, where an error shows. The
    head comes from training (``dataclasses.replace(judge, head=..., layers=...)``; an engine loads it where its
    configuration says); there is none by default, and without one the rule is refused with ConfigError. 0.5 is the
    usual threshold, and a trained head is shifted so that it has the recall chosen in training; 1 tolerates nothing
    (and needs no head), 0 everything.

    The judge is most used greedily, but at temperature 0 p is one-hot, and every other token is impossible.
    ``off_support`` lets the judge accept such tokens: those that greedy decoding would not take, and with them those
    that top-k, top-p, min-p, a ban, min_new_tokens or a user's processor excludes, since p alone does not distinguish
    them.
    """

    name = "judge"
    summary = "lossy: also accept guesses that a trained head on the target's hidden states finds good enough"
    distance = "measured, not bounded"
    reads = frozenset({"noise", "taps"})

    threshold: float = 0.5
    off_support: bool = False
    head: Head | None = field(default=None, repr=False, metadata={"spec": False})
    layers: tuple[int, ...] = field(default=(), repr=False, metadata={"spec": False})  # that the head reads

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "between 0 and 1 (1: tolerate nothing)")

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that the head reads."""
        return self.layers

    def load(self, loader: VerifierLoader) -> Verifier:
        """With the head that the configuration names. With plain decoding no head is read. Raises ModelError."""
        if not loader.guesses:
            return replace(self, threshold=1.0)
        rule: Verifier = loader.head("judge").verifier(self)
        return rule

    @property
    def cut(self) -> float:
        """The logit above which a token is tolerated: that of the threshold."""
        if self.threshold in (0, 1):
            return math.inf if self.threshold else -math.inf
        return math.log(self.threshold / (1 - self.threshold))

    def possible(self, mismatch: Mismatch) -> Tensor:
        """Tokens that p gives a probability, or all."""
        return torch.ones_like(mismatch.asked) if self.off_support else super().possible(mismatch)

    def tolerated(self, mismatch: Mismatch) -> Tensor:
        """By the head, from each child's own hidden state."""
        if self.head is None:
            if self.threshold == 1:
                return torch.zeros_like(mismatch.asked)
            raise ConfigError(
                "verifier 'judge' has no head: train one for this target and give it, or choose 'typical'"
            )
        taps = mismatch.evidence.taps
        if taps is None:
            raise ConfigError("verifier 'judge' reads hidden states of the target, and none are tapped")
        return self.head(taps) > self.cut
