"""How each method is trained: a recipe a method, which ``core.builtin`` names."""

from typing import Any

import torch

from foretell.core.errors import ConfigError
from foretell.core.noise import int64_seed
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.teacher import Objective, Teacher
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.acceptance.objective import AcceptanceObjective, calibrate, open_reader
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig, spread_layers
from foretell.methods.dflash.objective import DFlashObjective
from foretell.methods.draft_model.drafter import DraftModelObjective, check_draft
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.eagle.objective import Eagle1Objective, Eagle3Objective
from foretell.methods.kangaroo.head import KangarooHead, KangarooObjective
from foretell.methods.medusa.head import MedusaHead, MedusaObjective
from foretell.model.load import load_model
from foretell.train.data import sequential_batches
from foretell.train.making import LAYER, SIZES, Making, Options, Recipe, shaped
from foretell.train.responses import Responses


def build_draft_model(making: Making, options: Options) -> Objective:
    """A small model, trained on the target's probabilities. The model that ``init`` names, in float32."""
    assert making.init is not None
    draft: Any = load_model(
        making.init, dtype="float32", device=making.model.spec.device, implementation="transformers"
    )
    check_draft(draft.spec, making.model.spec, making.longest, name=making.init)
    return DraftModelObjective(draft.module, num_tokens=draft.spec.vocab_size)


DRAFT_MODEL = Recipe(build_draft_model, {}, needs_init=True)


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


def build_eagle3(making: Making, options: Options) -> Objective:
    """EAGLE-3: one layer over fused features of three target layers, with a vocabulary of its own. A layer, a draft
    vocabulary of the most frequent tokens, and norms scaled to the layers that are tapped."""
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


EAGLE3 = Recipe(
    build_eagle3,
    {**SIZES, "num_slots": 7, "decay": 0.8, "alone": 0.6, "train_lm_head": False, "draft_vocab_size": None,
     "layer_ids": None, "norm_before_residual": False, "fc_norm": False, "norm_output": False},
    {"clip": 0.5, "batch_tokens": 2048},
)  # fmt: skip


def build_eagle1(making: Making, options: Options) -> Objective:
    """EAGLE-1: one layer that predicts the target's next feature. A layer of the target's sizes, or of the given ones."""
    spec = making.model.spec
    config = Eagle1HeadConfig(
        spec.hidden_size, spec.vocab_size, tap_layer=spec.num_layers - 1, **shaped(making, options, *LAYER)
    )
    given = {name: options[name] for name in ("num_slots", "weight_feature", "weight_law", "noise")}
    head = making.head(Eagle1Head, lambda: Eagle1Head.fresh(config, making.generator))
    return Eagle1Objective(head, **given)


EAGLE1 = Recipe(
    build_eagle1, {**SIZES, "num_slots": 7, "weight_feature": 1.0, "weight_law": 0.1, "noise": 0.1}, {"clip": 0.5}
)


def build_medusa(making: Making, options: Options) -> Objective:
    """Medusa: heads on the target's last hidden state. The given number of heads, each initialised with the target's
    own head."""
    size, wide = options["draft_vocab_size"] or 32000, making.model.spec.vocab_size
    ids = making.counts.argsort(descending=True, stable=True)[:size].sort().values if size < wide else None
    given = {name: options[name] for name in ("num_heads", "num_layers", "own_lm_head")}
    head = making.head(MedusaHead, lambda: MedusaHead.fresh(making.model, draft_vocab=ids, **given))
    return MedusaObjective(head, decay=options["decay"])


MEDUSA = Recipe(
    build_medusa, {"num_heads": 4, "num_layers": 1, "own_lm_head": True, "draft_vocab_size": None, "decay": 0.8},
    {"batch_tokens": 2048},
)  # fmt: skip


def build_dflash(making: Making, options: Options) -> Objective:
    """DFlash, with DSpark's heads on request: a block of guesses in one pass. A block drafter over features of the
    given layers, or of evenly spread ones."""
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


DFLASH = Recipe(
    build_dflash,
    {**SIZES, "num_layers": 2, "block_size": 8, "num_features": 3, "layer_ids": None, "mask_token_id": None,
     "causal": False, "sample_from_anchor": False, "markov_rank": 0, "confidence": False, "num_anchors": 64,
     "gamma": 4.0, "draft_vocab_size": None, "train_lm_head": False},
)  # fmt: skip


def build_kangaroo(making: Making, options: Options) -> Objective:
    """Kangaroo: an adapter after the target's own lower layers. An adapter after the exit layer."""
    given = shaped(making, options, "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int64_seed(making.seed))
        head = making.head(
            KangarooHead, lambda: KangarooHead.fresh(making.model, exit_layer=options["exit_layer"], **given)
        )
    return KangarooObjective(head)


KANGAROO = Recipe(
    build_kangaroo,
    {"exit_layer": 2, **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps"))},
)


def build_acceptance(making: Making, options: Options) -> Objective:
    """SpecDec++'s acceptance head: the probability that the target keeps a guess. A head on the hidden states of the
    draft model that ``init`` names. Raises ConfigError where none is named."""
    spec = making.model.spec
    if making.init is None and spec.name not in ("bundled", "bundled/target"):
        raise ConfigError("acceptance needs --init DIR: the draft model whose hidden states are to be read")
    reader = open_reader(making.init or "bundled/draft", making.model)
    check_draft(reader.draft.model.spec, spec, making.longest, name=making.init or "bundled/draft")
    config = AcceptanceHeadConfig(
        reader.hidden_size, spec.vocab_size, num_layers=options["num_layers"], normalize=options["normalize"],
        drafter="draft_model", reads_law=options["reads_law"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int64_seed(making.seed))
        head = AcceptanceHead(config)
    own = ("rule", "temperatures", "prefix", "target_share", "weight_accepted", "weight_rejected")
    return AcceptanceObjective(head, reader, **{name: options[name] for name in own})


@torch.no_grad()
def calibrate_head(objective: Objective, teacher: Teacher, held_out: Responses) -> None:
    """Platt scaling of an acceptance head on held-out text, at most 64 batches of it."""
    assert isinstance(objective, AcceptanceObjective)
    assert isinstance(objective.head, AcceptanceHead)
    logits, labels = [], []
    for number, index in enumerate(sequential_batches(held_out.length.tolist(), 4096)[:64]):
        batch = held_out.batch(index).to(teacher.model.spec.device)
        generator = torch.Generator().manual_seed(10_000 + number)  # other places than ``evaluate`` draws
        places = objective.places(teacher.label(batch, objective.taps), teacher, generator)
        logits.append(objective.read(places))
        labels.append(places.labels)
    calibrate(objective.head, torch.cat(logits), torch.cat(labels))


ACCEPTANCE = Recipe(
    build_acceptance,
    {"num_layers": 2, "normalize": True, "reads_law": False, "rule": "coupled", "temperatures": [0.0, 1.0],
     "prefix": "mixed", "target_share": 0.15, "weight_accepted": 1.0, "weight_rejected": 6.0},
    finish=calibrate_head,
)  # fmt: skip
