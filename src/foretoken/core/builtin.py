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
        "foretoken.methods.draft_model.config:DraftModelConfig",
        training="foretoken.methods.draft_model.training:RECIPE",
    ),
    "eagle3": Parts(
        "foretoken.methods.eagle.config:Eagle3Config",
        ("foretoken.methods.eagle.formats:Eagle3Native", "foretoken.methods.eagle.formats:Eagle3Speculators"),
        "foretoken.methods.eagle.training_eagle3:RECIPE",
    ),
    "eagle1": Parts(
        "foretoken.methods.eagle.config:Eagle1Config",
        ("foretoken.methods.eagle.formats:Eagle1Native",),
        "foretoken.methods.eagle.training_eagle1:RECIPE",
    ),
    "eagle2": Parts("foretoken.methods.eagle.config:Eagle2Config"),  # reads EAGLE-1's head
    "medusa": Parts(
        "foretoken.methods.medusa.config:MedusaConfig",
        ("foretoken.methods.medusa.formats:MedusaAuthors", "foretoken.methods.medusa.formats:MedusaVLLM"),
        "foretoken.methods.medusa.training:RECIPE",
    ),
    "dflash": Parts(
        "foretoken.methods.dflash.config:DFlashConfig",
        (
            "foretoken.methods.dflash.formats:DFlashLayout",
            "foretoken.methods.dflash.formats:DSparkLayout",
            "foretoken.methods.dflash.formats:DFlashSpeculators",
            "foretoken.methods.dflash.formats:DSparkSpeculators",
        ),
        "foretoken.methods.dflash.training:RECIPE",
    ),
    "kangaroo": Parts(
        "foretoken.methods.kangaroo.config:KangarooConfig",
        ("foretoken.methods.kangaroo.formats:KangarooLayout",),
        "foretoken.methods.kangaroo.training:RECIPE",
    ),
    "mtp": Parts(
        "foretoken.methods.mtp.config:MTPConfig",
        ("foretoken.methods.mtp.trained:MTPDirectory",),
        "foretoken.methods.mtp.training:RECIPE",
    ),
    "early_exit": Parts("foretoken.methods.kangaroo.config:EarlyExitConfig"),
    "ngram": Parts("foretoken.draft.ngram:NgramConfig"),
    "prediction": Parts("foretoken.draft.prediction:PredictionConfig"),
    "suffix": Parts("foretoken.draft.suffix:SuffixConfig"),
    "recycling": Parts("foretoken.draft.recycling:RecyclingConfig"),
    "hybrid": Parts("foretoken.methods.hybrid.config:HybridConfig"),
    "acceptance": Parts(
        layouts=("foretoken.methods.acceptance.formats:AcceptanceLayout",),
        training="foretoken.methods.acceptance.training:RECIPE",
    ),
    "judge": Parts(
        layouts=("foretoken.methods.judge.formats:JudgeLayout",), training="foretoken.train.judge:train_judge"
    ),
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
    "typical": "foretoken.verify.lossy.typical:Typical",
    "threshold": "foretoken.verify.lossy.threshold:Threshold",
    "top_n": "foretoken.verify.lossy.top_n:TopN",
    "lenience": "foretoken.verify.lossy.lenience:Lenience",
    "entropy_gated": "foretoken.verify.lossy.lookahead:EntropyGated",
    "divergence": "foretoken.verify.lossy.divergence:Divergence",
    "judge": "foretoken.verify.lossy.judge:Judge",
}
