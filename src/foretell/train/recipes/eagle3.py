"""EAGLE-3: one layer over fused features of three target layers, with a vocabulary of its own."""

from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.teacher import Objective
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.eagle.objective import Eagle3Objective
from foretell.train.making import LAYER, SIZES, Making, Options, Recipe, shaped


def three_layers(num_layers: int) -> tuple[int, ...]:
    """Outputs of an early, a middle and a late layer: the authors' 1, L/2 - 1, L - 4, or, where these are not three,
    evenly from the first but one on."""
    authors = (1, num_layers // 2 - 1, num_layers - 4)
    if authors[0] < authors[1] < authors[2]:
        return authors
    if num_layers < 3:
        return tuple(range(num_layers))
    first = 1 if num_layers > 3 else 0
    return (first, (first + num_layers - 1) // 2, num_layers - 1)


def build(making: Making, options: Options) -> Objective:
    """A layer, a draft vocabulary of the most frequent tokens, and norms scaled to the layers that are tapped."""
    spec = making.model.spec
    size = min(options["draft_vocab_size"] or 32000, spec.vocab_size)
    flags = {name: options[name] for name in ("norm_before_residual", "fc_norm", "norm_output")}
    config = Eagle3HeadConfig(
        spec.hidden_size, spec.vocab_size, draft_vocab_size=size,
        layer_ids=tuple(options["layer_ids"] or three_layers(spec.num_layers)),
        **shaped(making, options, *LAYER), **flags,
    )  # fmt: skip

    def fresh() -> Eagle3Head:
        vocabulary = draft_vocabulary(making.counts, size) if size < spec.vocab_size else None
        return Eagle3Head.fresh(
            config, making.generator, vocabulary=vocabulary, head=making.head_weight, final_norm=making.norm_weight,
            tap_scale=making.tap_scale(config.layer_ids),
        )  # fmt: skip

    head = making.head(Eagle3Head, fresh)
    head.lm_head.requires_grad_(requires_grad=options["train_lm_head"])
    given = {name: options[name] for name in ("num_slots", "decay", "alone")}
    return Eagle3Objective(head, **given)


RECIPE = Recipe(
    build,
    {**SIZES, "num_slots": 7, "decay": 0.8, "alone": 0.6, "train_lm_head": False, "draft_vocab_size": None,
     "layer_ids": None, "norm_before_residual": False, "fc_norm": False, "norm_output": False},
    {"clip": 0.5, "batch_tokens": 2048},
)  # fmt: skip
