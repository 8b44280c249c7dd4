"""DFlash, with DSpark's heads on request: a block of guesses in one pass."""

from foretell.methods.common.objective import Objective
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig, spread_layers
from foretell.methods.dflash.objective import DFlashObjective
from foretell.train.making import LAYER, SIZES, Making, Options, Recipe, shaped


def build(making: Making, options: Options) -> Objective:
    """A block drafter over features of the given layers, or of evenly spread ones."""
    spec = making.model.spec
    mask = options["mask_token_id"]
    if mask is None:  # a token that no text holds
        mask = making.size("pad_token_id", default=spec.vocab_size - 1)
    names = ("num_layers", "block_size", "causal", "sample_from_anchor", "markov_rank", "confidence")
    config = DFlashHeadConfig(
        spec.hidden_size, spec.vocab_size, mask_token_id=int(mask),
        layer_ids=tuple(options["layer_ids"] or spread_layers(spec.num_layers, options["num_features"])),
        **shaped(making, options, *LAYER), **{name: options[name] for name in names},
    )  # fmt: skip
    head = making.head(DFlashHead, lambda: DFlashHead.fresh(config, seed=making.seed, model=making.model))
    return DFlashObjective(head, num_anchors=options["num_anchors"], gamma=options["gamma"])


RECIPE = Recipe(
    build,
    {**SIZES, "num_layers": 2, "block_size": 8, "num_features": 3, "layer_ids": None, "mask_token_id": None,
     "causal": False, "sample_from_anchor": False, "markov_rank": 0, "confidence": False, "num_anchors": 64,
     "gamma": 4.0},
)  # fmt: skip
