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
    training: str | None = None  # for ``foretell train``: its Recipe, or a function where it learns from labels


METHODS: dict[str, Parts] = {
    "none": Parts("foretell.draft.none:NoneConfig"),
    "draft_model": Parts(
        "foretell.methods.draft_model.config:DraftModelConfig", training="foretell.train.recipes:DRAFT_MODEL"
    ),
    "eagle3": Parts(
        "foretell.methods.eagle.drafter:Eagle3Config",
        ("foretell.methods.eagle.formats:Eagle3Native", "foretell.methods.eagle.formats:Eagle3Speculators"),
        "foretell.train.recipes:EAGLE3",
    ),
    "eagle1": Parts(
        "foretell.methods.eagle.drafter:Eagle1Config",
        ("foretell.methods.eagle.formats:Eagle1Native",),
        "foretell.train.recipes:EAGLE1",
    ),
    "eagle2": Parts("foretell.methods.eagle.drafter:Eagle2Config"),  # reads EAGLE-1's head
    "medusa": Parts(
        "foretell.methods.medusa.drafter:MedusaConfig",
        ("foretell.methods.medusa.formats:MedusaAuthors", "foretell.methods.medusa.formats:MedusaVLLM"),
        "foretell.train.recipes:MEDUSA",
    ),
    "dflash": Parts(
        "foretell.methods.dflash.drafter:DFlashConfig",
        (
            "foretell.methods.dflash.formats:DFlashLayout",
            "foretell.methods.dflash.formats:DSparkLayout",
            "foretell.methods.dflash.formats:DFlashSpeculators",
            "foretell.methods.dflash.formats:DSparkSpeculators",
        ),
        "foretell.train.recipes:DFLASH",
    ),
    "kangaroo": Parts(
        "foretell.methods.kangaroo.drafter:KangarooConfig",
        ("foretell.methods.kangaroo.head:KangarooLayout",),
        "foretell.train.recipes:KANGAROO",
    ),
    "mtp": Parts("foretell.methods.mtp.drafter:MTPConfig"),  # reads the module in a target's own checkpoint
    "ngram": Parts("foretell.draft.ngram:NgramConfig"),
    "prediction": Parts("foretell.draft.prediction:PredictionConfig"),
    "suffix": Parts("foretell.draft.suffix:SuffixConfig"),
    "hybrid": Parts("foretell.methods.hybrid.config:HybridConfig"),
    "acceptance": Parts(
        layouts=("foretell.methods.acceptance.head:AcceptanceLayout",), training="foretell.train.recipes:ACCEPTANCE"
    ),
    "judge": Parts(layouts=("foretell.methods.judge.head:JudgeLayout",), training="foretell.train.judge:train_judge"),
}

CONFIGS = {name: parts.config for name, parts in METHODS.items() if parts.config is not None}
"""Names that ``--method`` takes, to their configurations."""

LAYOUTS = tuple(layout for parts in METHODS.values() for layout in parts.layouts)
"""All checkpoint layouts. A directory is read in the first that claims it."""

TRAINING = {name: parts.training for name, parts in METHODS.items() if parts.training is not None}
"""Names that ``foretell train`` takes."""

LEARNER = "foretell.learn.learner:opener"
"""What ``Service(learn=...)`` is served by: from (engine, loaded methods, options) to a function that opens the learner."""

SHAPES = {
    name: f"foretell.draft.shapes:{kind}"
    for name, kind in {
        "chain": "Chain",
        "adaptive": "Adaptive",
        "specdec": "SpecDec",
        "static": "Static",
        "sequoia": "Sequoia",
        "dyspec": "DySpec",
        "eagle2": "Eagle2Shape",
        "opt_tree": "OptTree",
    }.items()
}

DRAWS = ("fixed", "iid", "without_replacement", "coupled", "greedy")
"""Ways of drawing children: the values of ``tree.DrawMode``."""
MOST_SPECULATIVE_TOKENS = 64

VERIFIERS = {
    # by comparing tokens
    "coupled": "foretell.verify.exact:Coupled",
    "exact": "foretell.verify.exact:Exact",
    # by q
    "rejection": "foretell.verify.rejection:Rejection",
    "block": "foretell.verify.block:Block",
    "traversal": "foretell.verify.traversal:Traversal",
    "greedy_block": "foretell.verify.greedy_block:GreedyBlock",
    "k_seq": "foretell.verify.multidraft:KSeq",
    "importance": "foretell.verify.selection:Importance",
    "transport": "foretell.verify.selection:Transport",
    # lossy
    "typical": "foretell.verify.lossy.base:Typical",
    "top_n": "foretell.verify.lossy.base:TopN",
    "judge": "foretell.verify.lossy.judge:Judge",
}
