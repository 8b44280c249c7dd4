"""An MTP module for a target whose checkpoint has none, to be trained: DeepSeek-V3's (2412.19437), a Llama's layer in it.

Its one module is called again on its own output for further guesses, in training too (FastMTP): the layout of tensors is
Qwen's, in a directory of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from foretell.heads.head import HeadConfig
from foretell.heads.layer_keys import refuse_unknown
from foretell.heads.layout import MARKER, FoundLayout, Layout, TargetInfo
from foretell.heads.modules import RMSNorm
from foretell.heads.pair_head import PairConfig, PairHead, PairLayer
from foretell.methods.eagle.eagle3 import fresh_matrices
from foretell.methods.eagle.formats import last_layer, llama, llama_sizes
from foretell.model.target import CausalModel

PREFIX = "mtp."


@dataclass(frozen=True)
class MTPHeadConfig(PairConfig):
    """Sizes and options; the layer sees all positions."""

    tap_layer: int  # the target's last layer, whose output goes through the final norm


class MTPHead(PairHead):
    """h' = fc [norm e(x); norm h], one layer, a norm; the target's output head reads it, and so does the next guess."""

    method = "mtp"
    config: MTPHeadConfig

    def __init__(self, config: MTPHeadConfig) -> None:
        """Weights are torch's defaults: to be loaded, or see ``fresh``."""
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        # Numbered from 1 as a layer of a pair head: with an input norm.
        self.layers = nn.ModuleList([PairLayer(config, index + 1, size) for index in range(config.num_layers)])
        self.norm = RMSNorm(size, eps)

    @classmethod
    def fresh(cls, config: MTPHeadConfig, generator: torch.Generator, *, final_norm: Tensor) -> "MTPHead":
        """A head to be trained, its matrices as in ``Eagle3Head.fresh``. final_norm [H]: the target's, with which the
        module's own norm begins."""
        self = cls(config)
        fresh_matrices(self, generator)
        with torch.no_grad():
            self.norm.weight.copy_(final_norm)
        return self

    @property
    def taps(self) -> tuple[int, ...]:
        """The last layer alone."""
        return (self.config.tap_layer,)

    @property
    def decoder(self) -> Sequence[PairLayer]:
        """See ``PairHead``."""
        return cast("Sequence[PairLayer]", self.layers)

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        x: Tensor = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(features)], -1))
        return self.decoder[0].input_layernorm(x), x

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``: the normed output is both."""
        normed = self.norm(hidden)
        return normed, normed

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's final norm of its last layer's output."""
        return model.normed(taps.to(model.spec.dtype)).to(self.dtype)

    def logits(self, read: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's output head."""
        return model.head(read.to(model.spec.dtype))


class MTPDirectory(Layout):
    """``ForetellMTP``: a Llama configuration, tensors under ``mtp.``."""

    name = "mtp"
    summary = "MTP modules trained here (foretell alone)"
    head = MTPHead
    architectures: ClassVar[tuple[str, ...]] = ("ForetellMTP",)

    def outward(self, name: str, config: Any) -> str:
        """See the class."""
        return PREFIX + name

    def inward(self, name: str) -> str:
        """See the class."""
        return name.removeprefix(PREFIX)

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: MTPHeadConfig = head.config
        return {
            "architectures": [self.architectures[0]],
            **llama(config, target),
            MARKER: {"tap_layer": config.tap_layer},
        }

    def parse(self, found: FoundLayout) -> HeadConfig:
        """The layers' sizes; the target's last layer is read."""
        tensors: Mapping[str, Tensor] = found.tensors
        sizes = llama_sizes(found.keys, tensors, qwen=found.keys.text("model_type", "llama") == "qwen3")
        config = MTPHeadConfig(**sizes, tap_layer=last_layer(found))
        refuse_unknown(found.keys)
        return config
