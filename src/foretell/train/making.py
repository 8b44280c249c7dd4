"""The inputs from which a head to be trained is made, and each method's ``Recipe``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.noise import int64_seed
from foretell.heads import config_keys as config_values
from foretell.heads.formats import load_head
from foretell.heads.head import AnyHead
from foretell.heads.teacher import Objective, Teacher
from foretell.methods.medusa.head import head_weight, norm_weight
from foretell.model.target import CausalModel
from foretell.train.config import TINY, check_range
from foretell.train.responses import Responses

Options = dict[str, Any]


@dataclass(frozen=True)
class Making:
    """The inputs from which a head is made."""

    model: CausalModel  # the target
    responses: Responses  # to learn from: none of those that are held out
    seed: int
    init: str | None = None  # directory to start from, or to read
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that are no defaults
    longest: int = 0  # tokens of the longest text, held-out ones included

    @property
    def generator(self) -> torch.Generator:
        """Of the head's first weights."""
        return torch.Generator().manual_seed(int64_seed(self.seed))

    def head(self, kind: type[AnyHead], fresh: Callable[[], AnyHead]) -> AnyHead:
        """The head to be trained, in float32 beside the target: a fresh one, or that of ``init`` with all its weights and
        sizes. Raises ConfigError where a setting differs from the size of that head, ModelError where it cannot be
        loaded."""
        if self.init is None:
            return fresh().to(self.model.spec.device)  # objectives keep its draft vocabulary as it lies
        head = load_head(self.init, self.model.spec, kind, dtype=torch.float32, target=self.model)
        for key, asked in self.given.items():
            found = getattr(head.config, key, asked)
            if asked is not None and found != (tuple(asked) if isinstance(asked, list) else asked):
                raise ConfigError(
                    f"{key} = {asked!r}, but the head of --init {self.init} has {found!r}: drop one of them"
                )
        return head.to(self.model.spec.device).requires_grad_(requires_grad=True)

    def size(self, *names: str, default: Any = None) -> Any:
        """A number of the target's own configuration, by the first of its names that is there."""
        config = getattr(getattr(self.model, "module", None), "config", None)
        config = config.get_text_config() if config is not None else None
        return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

    @property
    def shape(self) -> Options:
        """Sizes of a layer like the target's own."""
        hidden = self.model.spec.hidden_size
        heads = self.size("num_attention_heads", "n_head", default=max(1, hidden // 64))
        rope = self.size("rope_parameters", default={})
        return {
            "intermediate_size": self.size("intermediate_size", default=3 * hidden),
            "num_heads": heads,
            "num_kv_heads": self.size("num_key_value_heads", default=heads),
            "head_dim": self.size("head_dim", default=hidden // heads),
            "rope_theta": float(rope.get("rope_theta", 0) or self.size("rope_theta", default=10000.0)),
            "rms_norm_eps": self.size("rms_norm_eps", default=1e-6),
        }

    @property
    def counts(self) -> Tensor:
        """[V] how often each token stands in a response."""
        responses = self.responses
        index = torch.arange(responses.tokens.shape[1])
        said = (index >= responses.start[:, None]) & (index < responses.length[:, None])
        return torch.bincount(responses.tokens[said].long(), minlength=self.model.spec.vocab_size)

    @property
    def head_weight(self) -> Tensor:
        """[V, H] float32 of the target's head."""
        return head_weight(self.model)

    @property
    def norm_weight(self) -> Tensor:
        """[H] float32 of the target's final norm."""
        return norm_weight(self.model)

    def tap_scale(self, layers: tuple[int, ...]) -> list[float]:
        """Root mean square of each of these layers' outputs, over a few responses."""
        batch = self.responses.batch(list(range(min(8, len(self.responses))))).to(self.model.spec.device)
        taps = Teacher(self.model).label(batch, layers).taps[batch.supervised]
        return [float(part.pow(2).mean().sqrt()) for part in taps.chunk(len(layers), -1)]


NUMBERS: dict[str, tuple[Any, float, float]] = {
    **{name: (int | None, *config_values.RANGES[name]) for name in ("intermediate_size", "num_kv_heads", "head_dim")},
    **{name: (int | None, *config_values.RANGES[name]) for name in ("draft_vocab_size", "mask_token_id")},
    **{name: (int, *config_values.RANGES[name]) for name in ("num_layers", "block_size", "markov_rank", "exit_layer")},
    "num_heads": (int | None, *config_values.RANGES["num_heads"]),
    "rope_theta": (float | None, *config_values.SHARES["rope_theta"]),
    "rms_norm_eps": (float | None, *config_values.SHARES["rms_norm_eps"]),
    "num_slots": (int, 1, 64), "num_features": (int, 1, 64), "num_anchors": (int, 1, 2**20),
    "decay": (float, 0.0, 1.0), "alone": (float, 0.0, 1.0), "target_share": (float, 0.0, 1.0), "gamma": (float, TINY, 1e6),
    **dict.fromkeys(("weight_feature", "weight_law", "weight_accepted", "weight_rejected", "noise"), (float, 0.0, 1e6)),
}  # fmt: skip
"""Kind, least and largest value of the methods' own settings that are numbers. None, where it is one: the target's own."""
LISTS: dict[str, Any] = {"layer_ids": tuple[int, ...] | None, "temperatures": tuple[float, ...]}
"""Kinds of settings that are lists."""


def option_kind(name: str, default: Any) -> Any:
    """The type of a method's own setting: by its name, else that of its default."""
    if default is not None and name not in LISTS:
        return type(default)
    found: Any = NUMBERS[name][0] if name in NUMBERS else LISTS.get(name, Any)
    return found


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a method's own setting that is out of range."""
    for name, value in options.items():
        if name in NUMBERS and value is not None:
            check_range(name, value, *NUMBERS[name][1:])


Build = Callable[[Making, Options], Objective]


@dataclass(frozen=True)
class Recipe:
    """How one method is trained on the target's probabilities: see ``recipes.py``."""

    build: Build
    options: Options  # its own settings; None: the target's own size, or decided by ``build``
    config: Options = field(default_factory=dict)  # where its defaults are not TrainConfig's
    needs_init: bool = False
    finish: Callable[[Objective, Teacher, Responses], None] | None = None  # after the last step, on held-out text


def shaped(making: Making, options: Options, *names: str) -> Options:
    """These settings, the target's sizes where they are None."""
    return {name: making.shape[name] if options[name] is None else options[name] for name in names}


LAYER = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps")
"""Sizes of one layer."""
SIZES: Options = dict.fromkeys(LAYER)
"""Settings that are the target's own sizes where they are not given."""
