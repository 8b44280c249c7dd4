"""P-EAGLE heads as the speculators library writes them: its EAGLE-3 layout, a mask token and ``mask_hidden``."""

import dataclasses
from typing import Any

from foretell.core.errors import ModelError
from foretell.heads.head import HeadConfig
from foretell.heads.layout import FoundLayout, TargetInfo
from foretell.methods.eagle.eagle3 import Eagle3HeadConfig
from foretell.methods.eagle.formats import Eagle3Speculators
from foretell.methods.eagle.parallel import PEagleHead, PEagleHeadConfig

OF_TRAINING = (
    "down_sample_ratio", "down_sample_ratio_min", "embed_requires_grad", "max_seq_len", "num_depths", "para_depths",
    "prediction_loss_weight",
)  # fmt: skip
"""Keys that say how a head was trained, and nothing about what it computes."""
MASKS = ("mask_token_id", "ptd_token_id")
"""The mask token, in newer and older files."""


class PEagleSpeculators(Eagle3Speculators):
    """``PEagleDraftModel`` of the speculators library."""

    name = "peagle"
    summary = "P-EAGLE, of the speculators library (vLLM)"
    head = PEagleHead
    architectures = ("PEagleSpeculator", "PEagleDraftModel")
    speculators = "peagle"

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        out = super().describe(head, target)
        out |= {"speculators_model_type": self.speculators, MASKS[0]: head.config.mask_token_id}
        out["speculators_config"]["algorithm"] = self.speculators
        return out

    def parse(self, found: FoundLayout) -> HeadConfig:
        """EAGLE-3's keys, and the mask token. Raises ModelError."""
        found.keys.read.update((*OF_TRAINING, *MASKS))
        given = {key: found.keys.integer(key) for key in MASKS if found.keys.values.get(key) is not None}
        if len(set(given.values())) != 1:
            said = " and ".join(f"{key} = {value}" for key, value in given.items()) or f"no {MASKS[0]}"
            raise ModelError(f"{found.name}: config.json has {said}; expected the id of one mask token")
        config = super().parse(found)
        assert isinstance(config, Eagle3HeadConfig)
        fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        return PEagleHeadConfig(**fields, mask_token_id=next(iter(given.values())))
