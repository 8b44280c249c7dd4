"""Medusa: heads on the target's last hidden state."""

from foretell.heads.teacher import Objective
from foretell.methods.medusa.head import MedusaHead, MedusaObjective
from foretell.train.making import Making, Options, Recipe


def build(making: Making, options: Options) -> Objective:
    """The given number of heads, each initialised with the target's own head."""
    size, wide = options["draft_vocab_size"] or 32000, making.model.spec.vocab_size
    ids = making.counts.argsort(descending=True, stable=True)[:size].sort().values if size < wide else None
    given = {name: options[name] for name in ("num_heads", "num_layers", "own_lm_head")}
    head = making.head(MedusaHead, lambda: MedusaHead.fresh(making.model, draft_vocab=ids, **given))
    return MedusaObjective(head, decay=options["decay"])


RECIPE = Recipe(
    build, {"num_heads": 4, "num_layers": 1, "own_lm_head": True, "draft_vocab_size": None, "decay": 0.8},
    {"batch_tokens": 2048},
)  # fmt: skip
