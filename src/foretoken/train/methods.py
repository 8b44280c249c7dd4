"""Each method's name: how to make a fresh head for a target, what to train it by, and with which settings by default.

Settings are flat: a method's own (sizes of the head, its loss), those of ``TrainConfig``, and ``save_dtype``. Sizes that
are not given are the target's own. Objectives are imported where they are needed: a method costs nothing until it is used.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError, nearest
from foretoken.heads import formats
from foretoken.heads.base import Head
from foretoken.heads.load import AnyHead, load_head
from foretoken.model.load import load_model, load_tokenizer, parse_dtype
from foretoken.model.target import CausalModel
from foretoken.train.lesson import Teacher
from foretoken.train.objective import Objective
from foretoken.train.responses import Responses
from foretoken.train.trainer import TrainConfig

Options = dict[str, Any]


@dataclass(frozen=True)
class Making:
    """What a head is made from."""

    model: CausalModel  # the target
    responses: Responses
    seed: int
    init: str | None = None  # what to begin from, or what to read: a directory
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that are no defaults

    @property
    def generator(self) -> torch.Generator:
        """Of the head's first weights."""
        return torch.Generator().manual_seed(self.seed)

    def head(self, kind: type[AnyHead], fresh: Callable[[], AnyHead]) -> AnyHead:
        """The head to be trained, in float32: a fresh one, or that of ``init`` with all its weights and sizes. Raises
        ConfigError where a setting asks for another size than that one has, ModelError where it cannot be loaded."""
        if self.init is None:
            return fresh()
        head = load_head(self.init, self.model.spec, kind, dtype=torch.float32)
        for key, asked in self.given.items():
            found = getattr(head.config, key, asked)
            if asked is not None and found != (tuple(asked) if isinstance(asked, list) else asked):
                raise ConfigError(
                    f"{key} = {asked!r}, but the head of --init {self.init} has {found!r}: drop one of them"
                )
        return head.requires_grad_(requires_grad=True)

    def size(self, *names: str, default: Any = None) -> Any:
        """A number of the target's own configuration, by the first of its names that is there."""
        config = getattr(getattr(self.model, "module", None), "config", None)
        config = config.get_text_config() if config is not None else None
        return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

    @property
    def shape(self) -> Options:
        """Sizes of a layer like the target's own."""
        hidden = self.model.spec.hidden_size
        heads = self.size("num_attention_heads", "n_head", default=max(1, hidden // 64))
        rope = self.size("rope_parameters", default={})
        return {
            "intermediate_size": self.size("intermediate_size", default=3 * hidden),
            "num_heads": heads,
            "num_kv_heads": self.size("num_key_value_heads", default=heads),
            "head_dim": self.size("head_dim", default=hidden // heads),
            "rope_theta": float(rope.get("rope_theta", 0) or self.size("rope_theta", default=10000.0)),
            "rms_norm_eps": self.size("rms_norm_eps", default=1e-6),
        }

    @property
    def counts(self) -> Tensor:
        """[V] how often each token stands in a response."""
        responses = self.responses
        index = torch.arange(responses.tokens.shape[1])
        said = (index >= responses.start[:, None]) & (index < responses.length[:, None])
        return torch.bincount(responses.tokens[said].long(), minlength=self.model.spec.vocab_size)

    @property
    def head_weight(self) -> Tensor:
        """[V, H] float32 of the target's head."""
        from foretoken.heads.medusa import head_weight

        return head_weight(self.model)

    @property
    def norm_weight(self) -> Tensor:
        """[H] float32 of the target's final norm."""
        from foretoken.heads.medusa import norm_weight

        return norm_weight(self.model)

    def tap_scale(self, layers: tuple[int, ...]) -> list[float]:
        """Root mean square of what each of these layers puts out, over a few responses."""
        batch = self.responses.batch(list(range(min(8, len(self.responses))))).to(self.model.spec.device)
        taps = Teacher(self.model).teach(batch, layers).taps[batch.supervised]
        return [float(part.pow(2).mean().sqrt()) for part in taps.chunk(len(layers), -1)]


Build = Callable[[Making, Options], Objective]


@dataclass(frozen=True)
class Recipe:
    """One method."""

    build: Build
    options: Options  # its own settings; None: the target's own size, or what ``build`` makes of it
    config: Options = field(default_factory=dict)  # where its defaults are not TrainConfig's
    needs_init: bool = False
    finish: Callable[[Objective, Teacher, Responses], None] | None = None  # after the last step, on held-out text


def _shaped(making: Making, options: Options, *names: str) -> Options:
    """These settings, the target's sizes where they are None."""
    return {name: making.shape[name] if options[name] is None else options[name] for name in names}


LAYER = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps")


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


def _eagle1(making: Making, options: Options) -> Objective:
    from foretoken.heads.eagle1 import Eagle1Config, Eagle1Head
    from foretoken.train.objectives.eagle1 import Eagle1Objective

    spec = making.model.spec
    config = Eagle1Config(
        spec.hidden_size, spec.vocab_size, tap_layer=spec.num_layers - 1, **_shaped(making, options, *LAYER)
    )
    given = {name: options[name] for name in ("num_slots", "weight_feature", "weight_law", "noise")}
    head = making.head(Eagle1Head, lambda: Eagle1Head.fresh(config, making.generator))
    return Eagle1Objective(head, **given)


def _eagle3(making: Making, options: Options) -> Objective:
    from foretoken.heads.eagle3 import Eagle3Config, Eagle3Head, draft_vocabulary
    from foretoken.train.objectives.eagle3 import Eagle3Objective

    spec = making.model.spec
    size = min(options["draft_vocab_size"] or 32000, spec.vocab_size)
    flags = {name: options[name] for name in ("norm_before_residual", "fc_norm", "norm_output")}
    config = Eagle3Config(
        spec.hidden_size, spec.vocab_size, draft_vocab_size=size,
        layer_ids=tuple(options["layer_ids"] or three_layers(spec.num_layers)),
        **_shaped(making, options, *LAYER), **flags,
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


def _medusa(making: Making, options: Options) -> Objective:
    from foretoken.heads.medusa import MedusaHead
    from foretoken.train.objectives.medusa import MedusaObjective

    size, wide = options["draft_vocab_size"] or 32000, making.model.spec.vocab_size
    ids = making.counts.argsort(descending=True, stable=True)[:size].sort().values if size < wide else None
    given = {name: options[name] for name in ("num_heads", "num_layers", "own_lm_head")}
    head = making.head(MedusaHead, lambda: MedusaHead.fresh(making.model, draft_vocab=ids, **given))
    return MedusaObjective(head, decay=options["decay"])


def _kangaroo(making: Making, options: Options) -> Objective:
    from foretoken.heads.kangaroo import KangarooHead
    from foretoken.train.objectives.kangaroo import KangarooObjective

    given = _shaped(making, options, "num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(making.seed)
        head = making.head(
            KangarooHead, lambda: KangarooHead.fresh(making.model, exit_layer=options["exit_layer"], **given)
        )
    return KangarooObjective(head)


def _dflash(making: Making, options: Options) -> Objective:
    from foretoken.heads.dflash import DFlashConfig, DFlashHead, spread_layers
    from foretoken.train.objectives.dflash import DFlashObjective

    spec = making.model.spec
    mask = options["mask_token_id"]
    if mask is None:  # a token that no text holds
        mask = making.size("pad_token_id", default=spec.vocab_size - 1)
    names = ("num_layers", "block_size", "causal", "sample_from_anchor", "markov_rank", "confidence")
    config = DFlashConfig(
        spec.hidden_size, spec.vocab_size, mask_token_id=int(mask),
        layer_ids=tuple(options["layer_ids"] or spread_layers(spec.num_layers, options["num_features"])),
        **_shaped(making, options, *LAYER), **{name: options[name] for name in names},
    )  # fmt: skip
    head = making.head(DFlashHead, lambda: DFlashHead.fresh(config, seed=making.seed, model=making.model))
    return DFlashObjective(head, num_anchors=options["num_anchors"], gamma=options["gamma"])


def _acceptance(making: Making, options: Options) -> Objective:
    from foretoken.heads.acceptance import LAW_DRAFTER, AcceptanceConfig, AcceptanceHead, law_refused
    from foretoken.train.objectives.acceptance import AcceptanceObjective
    from foretoken.train.objectives.reading import open_reader

    spec = making.model.spec
    if making.init is None and spec.name not in ("bundled", "bundled/target"):
        raise ConfigError(
            "acceptance needs --init DIR: the draft model, or the head, whose hidden states are to be read"
        )
    reader = open_reader(making.init or "bundled/draft", making.model, num_slots=options["num_slots"])
    if options["reads_law"] and reader.drafter != LAW_DRAFTER:
        raise ConfigError(law_refused(reader.drafter))
    config = AcceptanceConfig(
        reader.hidden_size, spec.vocab_size, num_layers=options["num_layers"], normalize=options["normalize"],
        drafter=reader.drafter, reads_law=options["reads_law"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(making.seed)
        head = AcceptanceHead(config)
    own = (
        "rule", "temperatures", "prefix", "target_share", "everywhere", "weight_accepted", "weight_rejected",
    )  # fmt: skip
    return AcceptanceObjective(head, reader, **{name: options[name] for name in own})


@torch.no_grad()
def _calibrate(objective: Objective, teacher: Teacher, held_out: Responses) -> None:
    """Platt scaling of an acceptance head on held-out text, at most 64 batches of it."""
    from foretoken.heads.acceptance import AcceptanceHead
    from foretoken.train.data import sequential_batches
    from foretoken.train.objectives.acceptance import AcceptanceObjective, calibrate

    assert isinstance(objective, AcceptanceObjective)
    assert isinstance(objective.head, AcceptanceHead)
    logits, labels = [], []
    for number, index in enumerate(sequential_batches(held_out.length.tolist(), 4096)[:64]):
        batch = held_out.batch(index).to(teacher.model.spec.device)
        generator = torch.Generator().manual_seed(10_000 + number)  # other places than ``evaluate`` draws
        places = objective.places(teacher.teach(batch, objective.taps), teacher, generator)
        logits.append(objective.read(places))
        labels.append(places.labels)
    calibrate(objective.head, torch.cat(logits), torch.cat(labels))


def _draft_model(making: Making, options: Options) -> Objective:
    from foretoken.train.objectives.draft_model import DraftModelObjective

    assert making.init is not None
    draft: Any = load_model(
        making.init, dtype="float32", device=making.model.spec.device, implementation="transformers"
    )
    return DraftModelObjective(draft.module)


SIZES: Options = dict.fromkeys(LAYER)
RECIPES: dict[str, Recipe] = {
    "eagle1": Recipe(
        _eagle1, {**SIZES, "num_slots": 7, "weight_feature": 1.0, "weight_law": 0.1, "noise": 0.1}, {"clip": 0.5}
    ),
    "eagle3": Recipe(
        _eagle3,
        {**SIZES, "num_slots": 7, "decay": 0.8, "alone": 0.6, "train_lm_head": False, "draft_vocab_size": None,
         "layer_ids": None, "norm_before_residual": False, "fc_norm": False, "norm_output": False},
        {"clip": 0.5, "batch_tokens": 2048},
    ),
    "medusa": Recipe(
        _medusa, {"num_heads": 4, "num_layers": 1, "own_lm_head": True, "draft_vocab_size": None, "decay": 0.8},
        {"batch_tokens": 2048},
    ),
    "kangaroo": Recipe(
        _kangaroo,
        {"exit_layer": 2, **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "rope_theta", "rms_norm_eps"))},
    ),
    "dflash": Recipe(
        _dflash,
        {**SIZES, "num_layers": 2, "block_size": 8, "num_features": 3, "layer_ids": None, "mask_token_id": None,
         "causal": False, "sample_from_anchor": False, "markov_rank": 0, "confidence": False, "num_anchors": 64,
         "gamma": 4.0},
    ),
    "acceptance": Recipe(
        _acceptance,
        {"num_layers": 2, "normalize": True, "reads_law": False, "rule": "coupled", "temperatures": [0.0, 1.0],
         "prefix": "mixed", "target_share": 0.15, "everywhere": False, "weight_accepted": 1.0, "weight_rejected": 6.0,
         "num_slots": 5},
        finish=_calibrate,
    ),
    "draft_model": Recipe(_draft_model, {}, needs_init=True),
}  # fmt: skip
"""By name. ``judge`` is trained by ``train.judge``: it has labels, not laws."""


@dataclass(frozen=True)
class Prepared:
    """All that ``Trainer`` needs for a method."""

    method: str
    objective: Objective
    config: TrainConfig
    options: Options  # of the method, resolved, for the record
    save: Callable[[Path], None]
    finish: Callable[[Objective, Teacher, Responses], None] | None


def check(method: str, given: Mapping[str, Any], *, init: str | None = None) -> tuple[Options, Options]:
    """(the method's settings, those of training), before anything is loaded. Raises ConfigError."""
    if method not in RECIPES:
        raise ConfigError(f"method {method!r} cannot be trained{nearest(method, [*RECIPES, 'judge'])}")
    recipe = RECIPES[method]
    config = {item.name: item for item in dataclasses.fields(TrainConfig)}
    known = [*recipe.options, *config, "save_dtype"]
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"unknown setting {key!r} of {method!r}{nearest(key, known)}")
        default = recipe.options[key] if key in recipe.options else getattr(config.get(key), "default", "")
        _check_kind(key, value, default)
    if recipe.needs_init and init is None:
        raise ConfigError(f"{method} needs --init DIR: the model to begin from")
    parse_dtype(given.get("save_dtype"))
    options = {**recipe.options, **{key: value for key, value in given.items() if key in recipe.options}}
    training = {**recipe.config, **{key: value for key, value in given.items() if key in config}}
    TrainConfig(**training)
    return options, training


def _check_kind(key: str, value: object, default: object) -> None:
    """Refuse a value of another kind than the default's; where that is None, anything goes to who reads it."""
    if default is None or value is None or dataclasses.MISSING in (default,):
        return
    if isinstance(default, bool) != isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r} must be {'true or false' if isinstance(default, bool) else 'a number'}")
    good = isinstance(value, (int, float)) if isinstance(default, float) else isinstance(value, type(default))
    if not good:
        expected = {int: "a whole number", float: "a number", str: "a text", list: "a list"}.get(
            type(default), "of another kind"
        )
        raise ConfigError(f"{key} = {value!r} must be {expected}")


def prepare(
    method: str,
    model: CausalModel,
    responses: Responses,
    given: Mapping[str, Any] | None = None,
    *,
    init: str | None = None,
    target_name: str | None = None,
) -> Prepared:
    """A head with its objective, fresh or (init) as an earlier run left it; model is the target, as
    ``implementation="transformers"``. Raises ConfigError, ModelError.

    Where lr is not given it is 2e-3 for a hidden size of 256 and falls with its square root (the published recipes lie
    between 5e-5 and 6e-4 for 4096; small heads bear more).
    """
    given = dict(given or {})
    options, training = check(method, given, init=init)
    if "lr" not in training:
        training["lr"] = round(2e-3 * min(1.0, (256 / model.spec.hidden_size) ** 0.5), 8)
    config = TrainConfig(**training)
    objective = RECIPES[method].build(
        Making(model, responses.cut(config.max_length), config.seed, init, given), options
    )
    dtype = parse_dtype(given.get("save_dtype")) or torch.float32

    def save(out: Path) -> None:
        _save(objective, out, dtype, init, model, target_name)

    return Prepared(method, objective, config, {**options, "save_dtype": str(dtype)[6:]}, save, RECIPES[method].finish)


def _save(
    objective: Objective, out: Path, dtype: torch.dtype, init: str | None, model: CausalModel, target_name: str | None
) -> None:
    """Final weights: parameters in dtype, buffers (maps, calibration) as they are. Raises OSError."""
    head = copy.deepcopy(objective.head)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    if isinstance(head, Head):
        formats.save(head, out, target=model.spec, target_name=target_name)
        return
    module: Any = head
    module.config.dtype = dtype
    module.save_pretrained(str(out))
    assert init is not None
    load_tokenizer(init).save_pretrained(str(out))


def names() -> Sequence[str]:
    """All methods that can be trained."""
    return [*RECIPES, "judge"]
