"""EAGLE-1: one layer that predicts the target's next feature."""

from foretell.heads.teacher import Objective
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.objective import Eagle1Objective
from foretell.train.making import LAYER, SIZES, Making, Options, Recipe, shaped


def build(making: Making, options: Options) -> Objective:
    """A layer of the target's sizes, or of the given ones."""
    spec = making.model.spec
    config = Eagle1HeadConfig(
        spec.hidden_size, spec.vocab_size, tap_layer=spec.num_layers - 1, **shaped(making, options, *LAYER)
    )
    given = {name: options[name] for name in ("num_slots", "weight_feature", "weight_law", "noise")}
    head = making.head(Eagle1Head, lambda: Eagle1Head.fresh(config, making.generator))
    return Eagle1Objective(head, **given)


RECIPE = Recipe(
    build, {**SIZES, "num_slots": 7, "weight_feature": 1.0, "weight_law": 0.1, "noise": 0.1}, {"clip": 0.5}
)  # fmt: skip
