"""Built-in parts by name: a method, a learned head or a verifier is one line here.

A part is named as "module:attribute" and imported when it is first used: decoding never imports training, and a floor that
reads one kind of part imports no other. ``registry.Registry`` reads packages' additions in the same form.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Where the parts of one method or learned head are; it may lack any of them."""

    config: str | None = None  # its MethodConfig, for ``--method``. None: a head that does not draft
    layouts: tuple[str, ...] = ()  # checkpoint layouts of its head; the first that can hold a head is the default
    training: str | None = None  # for ``foretoken train``: its Recipe, or a function where it learns from labels


METHODS: dict[str, Parts] = {
    "none": Parts("foretoken.draft.none:NoneConfig"),
    "draft_model": Parts(
        "foretoken.draft.model:DraftModelConfig", training="foretoken.train.builders.draft_model:RECIPE"
    ),
    "eagle3": Parts(
        "foretoken.engine.learned:Eagle3Config",
        ("foretoken.heads.formats.eagle:Eagle3Native", "foretoken.heads.formats.eagle:Eagle3Speculators"),
        "foretoken.train.builders.eagle3:RECIPE",
    ),
    "eagle1": Parts(
        "foretoken.engine.learned:Eagle1Config",
        ("foretoken.heads.formats.eagle:Eagle1Native",),
        "foretoken.train.builders.eagle1:RECIPE",
    ),
    "eagle2": Parts("foretoken.engine.learned:Eagle2Config"),  # reads EAGLE-1's head
    "medusa": Parts(
        "foretoken.engine.learned:MedusaConfig",
        ("foretoken.heads.formats.medusa:MedusaAuthors", "foretoken.heads.formats.medusa:MedusaVLLM"),
        "foretoken.train.builders.medusa:RECIPE",
    ),
    "dflash": Parts(
        "foretoken.engine.learned:DFlashConfig",
        ("foretoken.heads.formats.dflash:DFlash", "foretoken.heads.formats.dflash:DSpark"),
        "foretoken.train.builders.dflash:RECIPE",
    ),
    "kangaroo": Parts(
        "foretoken.engine.learned:KangarooConfig",
        ("foretoken.heads.formats.own:Kangaroo",),
        "foretoken.train.builders.kangaroo:RECIPE",
    ),
    "early_exit": Parts("foretoken.engine.learned:EarlyExitConfig"),
    "ngram": Parts("foretoken.draft.ngram:NgramConfig"),
    "prediction": Parts("foretoken.draft.prediction:PredictionConfig"),
    "suffix": Parts("foretoken.draft.suffix:SuffixConfig"),
    "recycling": Parts("foretoken.draft.recycling:RecyclingConfig"),
    "acceptance": Parts(
        layouts=("foretoken.heads.formats.own:Acceptance",), training="foretoken.train.builders.acceptance:RECIPE"
    ),
    "judge": Parts(layouts=("foretoken.heads.formats.own:Judge",), training="foretoken.train.judge:train_judge"),
}

CONFIGS = {name: parts.config for name, parts in METHODS.items() if parts.config is not None}
"""Names that ``--method`` takes, to their configurations."""

LAYOUTS = tuple(layout for parts in METHODS.values() for layout in parts.layouts)
"""All checkpoint layouts. A directory is read in the first that claims it."""

TRAINING = {name: parts.training for name, parts in METHODS.items() if parts.training is not None}
"""Names that ``foretoken train`` takes."""

VERIFIERS = {
    # by comparing tokens
    "coupled": "foretoken.verify.exact:Coupled",
    "exact": "foretoken.verify.exact:Exact",
    "gumbel_list": "foretoken.verify.gumbel_list:GumbelList",
    # by q
    "rejection": "foretoken.verify.rejection:Rejection",
    "block": "foretoken.verify.block:Block",
    "traversal": "foretoken.verify.traversal:Traversal",
    "greedy_block": "foretoken.verify.greedy_block:GreedyBlock",
    "k_seq": "foretoken.verify.multidraft:KSeq",
    "importance": "foretoken.verify.selection:Importance",
    "transport": "foretoken.verify.selection:Transport",
    # lossy
    "typical": "foretoken.verify.lossy:Typical",
    "threshold": "foretoken.verify.lossy:Threshold",
    "top_n": "foretoken.verify.lossy:TopN",
    "lenience": "foretoken.verify.lenience:Lenience",
    "entropy_gated": "foretoken.verify.lookahead:EntropyGated",
    "divergence": "foretoken.verify.divergence:Divergence",
    "judge": "foretoken.verify.judge:Judge",
}
