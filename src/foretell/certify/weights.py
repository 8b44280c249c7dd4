"""How far a quantised model's distributions are from those of the same model without quantisation.

Speculation changes no distribution; quantised weights do. The distance is measured position by position over given texts,
at temperature 1 without filters: Kullback-Leibler divergence from the unquantised distribution (nats), total variation
(half the sum of absolute differences), and how often both have the same most likely token.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.tree import layout
from foretell.model.load import load_model
from foretell.model.target import CausalModel

CHUNK = 64  # positions of one pass


@dataclass(frozen=True)
class WeightsDistance:
    """Over all positions of some texts. See the module's docstring."""

    weights: str  # how the measured model holds its matrices
    num_positions: int
    mean_kl: float  # nats
    largest_kl: float
    mean_tv: float  # 0 to 1
    largest_tv: float
    same_top: float  # share of positions with the same most likely token

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"{self.weights} weights: the text follows the quantised model's distribution. From the unquantised model's, "
            f"over {self.num_positions} positions: KL {self.mean_kl:.1e} nats (largest {self.largest_kl:.1e}), total "
            f"variation {self.mean_tv:.3f} (largest {self.largest_tv:.3f}), same most likely token {self.same_top:.1%}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@torch.no_grad()
def weights_distance(model: CausalModel, unquantised: CausalModel, texts: Sequence[Sequence[int]]) -> WeightsDistance:
    """The distance of model from unquantised after every prefix of every text. Raises ConfigError where the two differ in
    their vocabulary, or there is no text."""
    if model.spec.vocab_size != unquantised.spec.vocab_size:
        raise ConfigError(
            f"{model.spec.name!r} has {model.spec.vocab_size} tokens and {unquantised.spec.name!r} "
            f"{unquantised.spec.vocab_size}: expected one model twice"
        )
    kl, tv, same = [], [], []
    for ids in texts:
        for mine, its in zip(log_probs(model, ids), log_probs(unquantised, ids), strict=True):
            kl.append((its.exp() * (its - mine)).sum(-1))
            tv.append((its.exp() - mine.exp()).abs().sum(-1) / 2)
            same.append(its.argmax(-1) == mine.argmax(-1))
    if not kl:
        raise ConfigError("no text: give at least one of at least one token")
    all_kl, all_tv = torch.cat(kl), torch.cat(tv)
    return WeightsDistance(
        weights=model.spec.weights or str(model.spec.dtype).removeprefix("torch."),
        num_positions=len(all_kl),
        mean_kl=float(all_kl.mean()),
        largest_kl=float(all_kl.max()),
        mean_tv=float(all_tv.mean()),
        largest_tv=float(all_tv.max()),
        same_top=float(torch.cat(same).double().mean()),
    )


def log_probs(model: CausalModel, ids: Sequence[int]) -> list[Tensor]:
    """Chunks [n, V] float64 of the log probabilities after each prefix of a text."""
    device = model.spec.device
    text, found = torch.tensor([list(ids)], device=device), []
    capacity = -(-len(ids) // CHUNK) * CHUNK
    cache = model.new_cache(1, capacity)
    for start in range(0, len(ids), CHUNK):
        part = text[:, start : start + CHUNK]
        parent = torch.arange(-1, part.shape[1] - 1, device=device)[None]
        logits = model.forward(part, layout(parent, torch.tensor([start], device=device), capacity), cache).logits
        assert logits is not None
        found.append(logits[0].double().log_softmax(-1))
    return found


def unquantised_of(model: CausalModel) -> CausalModel:
    """The same model in float32 with its matrices dequantised. Raises ModelError where it cannot be loaded again."""
    return load_model(model.spec.name, dtype="float32", device=str(model.spec.device), weights="fp32")
