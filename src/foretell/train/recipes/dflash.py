"""DFlash, with DSpark's heads on request: a block of guesses in one pass."""

from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.teacher import Objective
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
    size = options["draft_vocab_size"]
    if size is not None and size >= spec.vocab_size:
        size = None
    config = DFlashHeadConfig(
        spec.hidden_size, spec.vocab_size, mask_token_id=int(mask), draft_vocab_size=size,
        layer_ids=tuple(options["layer_ids"] or spread_layers(spec.num_layers, options["num_features"])),
        **shaped(making, options, *LAYER), **{name: options[name] for name in names},
    )  # fmt: skip

    def fresh() -> DFlashHead:
        exist = max(config.layer_ids) < spec.num_layers  # else the head is refused, with a reason
        return DFlashHead.fresh(
            config, seed=making.seed, model=making.model,
            tap_scale=making.tap_scale(config.layer_ids) if exist else None,
            vocabulary=None if size is None else draft_vocabulary(making.counts, size),
            output=None if size is None else making.head_weight,
        )  # fmt: skip

    head = making.head(DFlashHead, fresh)
    if head.lm_head is not None:
        head.lm_head.requires_grad_(requires_grad=options["train_lm_head"])
    return DFlashObjective(head, num_anchors=options["num_anchors"], gamma=options["gamma"])


RECIPE = Recipe(
    build,
    {**SIZES, "num_layers": 2, "block_size": 8, "num_features": 3, "layer_ids": None, "mask_token_id": None,
     "causal": False, "sample_from_anchor": False, "markov_rank": 0, "confidence": False, "num_anchors": 64,
     "gamma": 4.0, "draft_vocab_size": None, "train_lm_head": False},
)  # fmt: skip
