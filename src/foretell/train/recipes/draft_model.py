"""A small model, trained on the target's probabilities."""

from typing import Any

from foretell.heads.teacher import Objective
from foretell.methods.draft_model.drafter import DraftModelObjective, check_draft
from foretell.model.load import load_model
from foretell.train.making import Making, Options, Recipe


def build(making: Making, options: Options) -> Objective:
    """The model that ``init`` names, in float32."""
    assert making.init is not None
    draft: Any = load_model(
        making.init, dtype="float32", device=making.model.spec.device, implementation="transformers"
    )
    check_draft(draft.spec, making.model.spec, making.longest, name=making.init)
    return DraftModelObjective(draft.module, num_tokens=draft.spec.vocab_size)


RECIPE = Recipe(build, {}, needs_init=True)
