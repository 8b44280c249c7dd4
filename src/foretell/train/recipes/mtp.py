"""MTP: one layer over the target's last hidden state, for targets whose checkpoint has none."""

from foretell.heads.objective import Objective
from foretell.methods.mtp.objective import MTPObjective
from foretell.methods.mtp.trained import MTPHead, MTPHeadConfig
from foretell.train.making import LAYER, SIZES, Making, Options, Recipe, shaped


def build(making: Making, options: Options) -> Objective:
    """A layer of the target's sizes, or of the given ones."""
    spec = making.model.spec
    config = MTPHeadConfig(
        spec.hidden_size, spec.vocab_size, tap_layer=spec.num_layers - 1, **shaped(making, options, *LAYER)
    )
    given = {name: options[name] for name in ("num_slots", "decay", "alone")}
    head = making.head(
        MTPHead, lambda: MTPHead.fresh(config, making.generator, final_norm=making.norm_weight)
    )  # fmt: skip
    return MTPObjective(head, **given)


RECIPE = Recipe(
    build, {**SIZES, "num_slots": 3, "decay": 0.6, "alone": 0.3}, {"clip": 0.5, "batch_tokens": 2048}
)  # fmt: skip
