"""A small model, trained on the target's probabilities."""

from typing import Any

from foretell.methods.common.objective import Objective
from foretell.methods.draft_model.objective import DraftModelObjective
from foretell.model.load import load_model
from foretell.train.making import Making, Options, Recipe


def build(making: Making, options: Options) -> Objective:
    """The model that ``init`` names, in float32."""
    assert making.init is not None
    draft: Any = load_model(
        making.init, dtype="float32", device=making.model.spec.device, implementation="transformers"
    )
    return DraftModelObjective(draft.module)


RECIPE = Recipe(build, {}, needs_init=True)
