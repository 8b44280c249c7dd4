"""Resolve a method's name and settings to the inputs of ``Trainer``.

Settings are flat: a method's own (sizes of the head, its loss), those of ``TrainConfig``, and ``save_dtype``. Sizes that
are not given are the target's own. Each method's own part is its recipe in ``recipes.py``, which is imported when it is
used.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foretell.core import builtin
from foretell.core.errors import ConfigError, ModelError, TrainError, nearest
from foretell.core.registry import load_reference
from foretell.core.settings import check_keys, field_kinds, value_of
from foretell.heads import formats
from foretell.heads.formats import HEADS
from foretell.heads.head import Head
from foretell.heads.layout import Layout, check_layer_ids
from foretell.heads.teacher import Objective, Outcome, Teacher
from foretell.methods.draft_model.vocabulary.tli import differences
from foretell.model.load import load_tokenizer, parse_dtype
from foretell.model.target import CausalModel
from foretell.train.config import TrainConfig
from foretell.train.making import Making, Options, Recipe, check_options, option_kind
from foretell.train.responses import Responses


@dataclass(frozen=True)
class Prepared:
    """All that ``Trainer`` needs for a method."""

    method: str
    objective: Objective
    config: TrainConfig
    options: Options  # of the method, resolved, for the record
    save: Callable[[Path], None]
    finish: Callable[[Objective, Teacher, Responses], None] | None


def recipe_of(method: str) -> Recipe:
    """The recipe of a method, or of a package's head. Raises ConfigError for what cannot be trained."""
    found = load_reference(builtin.TRAINING[method]) if method in builtin.TRAINING else None
    if found is None and method in HEADS and type(HEADS[method]).objective is not Layout.objective:
        found = _of_package(HEADS[method])
    if not isinstance(found, Recipe):
        known = [*builtin.TRAINING, *(name for name in HEADS.names() if name not in HEADS.builtin)]
        raise ConfigError(f"method {method!r} cannot be trained{nearest(method, known)}")
    return found


def _of_package(layout: Layout) -> Recipe:
    """The recipe of a package's head. What is wrong with what it makes is said before the first step."""
    called = HEADS.called(layout.name)
    if taken := layout.options.keys() & {*field_kinds(TrainConfig), "save_dtype"}:
        raise ConfigError(f"{called}: its option {min(taken)!r} is a setting of all training: give it another name")

    def build(making: Making, options: Options) -> Objective:
        made: Any = layout.objective(making, dict(options))
        if not isinstance(made, Objective) or type(made.head) is not layout.head:
            raise ConfigError(f"{called}: it made {made!r}; expected an Objective of a {layout.head.__name__}")
        with formats.blamed(layout), TemporaryDirectory() as folder:  # at the end, all that was learned would be lost
            formats.save(made.head, Path(folder) / "head", layout.name)
            if formats.detect(Path(folder) / "head") is not layout:
                raise ValueError("a directory that it wrote is taken for one of another layout: define claims")
            formats.load(Path(folder) / "head")
        outcome = made.outcome

        @formats.blamed(layout)
        def checked(*given: Any, **named: Any) -> Outcome:
            if not isinstance(found := outcome(*given, **named), Outcome):
                raise TypeError(f"outcome returned {found!r}, expected an Outcome")
            return found

        made.outcome = checked  # type: ignore[method-assign]
        return made

    return Recipe(build, dict(layout.options))


def labelled(method: str) -> Callable[..., dict[str, Any]] | None:
    """For a head that learns from labels, not from distributions: (target, file of labels, directory to write, settings
    by keyword)
    -> figures. None for all others."""
    found: Any = load_reference(builtin.TRAINING[method]) if method in builtin.TRAINING else recipe_of(method)
    return None if isinstance(found, Recipe) else found


def check(method: str, given: Mapping[str, Any], *, init: str | None = None) -> tuple[Options, Options]:
    """(the method's settings, those of training), before anything is loaded. Raises ConfigError."""
    recipe = recipe_of(method)
    config = field_kinds(TrainConfig)
    own = {key: option_kind(key, default) for key, default in recipe.options.items()}
    kinds = {**config, "save_dtype": str | None, **own}
    check_keys(given, kinds, f"for training {method!r}")
    given = {key: value_of(value, kinds[key], key) for key, value in given.items()}
    if recipe.needs_init and init is None:
        raise ConfigError(f"{method} needs --init DIR: the model to begin from")
    parse_dtype(given.get("save_dtype"))
    options = {**recipe.options, **{key: value for key, value in given.items() if key in recipe.options}}
    if method in builtin.TRAINING:  # a package gives names a meaning of its own
        check_options(options)
    training = {**recipe.config, **{key: value for key, value in given.items() if key in config}}
    TrainConfig(**training)
    return options, training


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
    given, recipe = dict(given or {}), recipe_of(method)
    options, training = check(method, given, init=init)
    if recipe.needs_init:
        check_vocabularies(init, target_name)
    if "lr" not in training:
        training["lr"] = round(2e-3 * min(1.0, (256 / model.spec.hidden_size) ** 0.5), 8)
    config = TrainConfig(**training)
    texts = responses.cut(config.max_length)
    learned, _ = texts.split(config.held_out)  # what is held out decides nothing: no vocabulary, no scale
    longest = int(texts.length.max())
    objective = recipe.build(Making(model, learned, config.seed, init, given, longest), options)
    _check_savable(objective, model, method)
    dtype = parse_dtype(given.get("save_dtype")) or torch.float32

    def save(out: Path) -> None:
        _save(objective, out, dtype, init, model, target_name)

    return Prepared(method, objective, config, {**options, "save_dtype": str(dtype)[6:]}, save, recipe.finish)


def _check_savable(objective: Objective, model: CausalModel, method: str) -> None:
    """Raise ConfigError or ModelError for a head that could not be trained or, at the end of it, not be written."""
    head = objective.head
    if not any(parameter.requires_grad for parameter in head.parameters()):
        raise ConfigError(f"this {method} head has no weights to learn: give it layers, or a linear layer of its own")
    if isinstance(head, Head):
        head.check_target(model.spec, name="the head to be trained")
        formats.default_layout(head)
        if head.taps:
            check_layer_ids(head.taps, name="the head to be trained", source="its settings")


def _save(
    objective: Objective, out: Path, dtype: torch.dtype, init: str | None, model: CausalModel, target_name: str | None
) -> None:
    """Final weights: parameters in dtype, buffers (maps, calibration) as they are. Raises OSError."""
    head = copy.deepcopy(objective.head)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
        if not bool(parameter.data.isfinite().all()):
            raise TrainError(
                f"save_dtype = {str(dtype)[6:]!r} has no room for the largest weights, so nothing was saved; the "
                "checkpoint has them: go on with --resume and save_dtype 'bfloat16' or 'float32'"
            )
    if isinstance(head, Head):
        formats.save(head, out, target=model.spec, target_name=target_name)
        return
    module: Any = head
    module.config.dtype = dtype
    module.save_pretrained(str(out))
    for name in (init, target_name):  # a draft is trained on the target's tokens: either tokenizer is right
        try:
            if name is not None:
                load_tokenizer(name).save_pretrained(str(out))
                return
        except ModelError:
            continue  # weights without a tokenizer are of use for token ids, and lost otherwise


def check_vocabularies(init: str | None, target_name: str | None) -> None:
    """Raise ConfigError where a draft model to be trained has other tokens than the target at the same ids. Models without
    a tokenizer are not compared."""
    try:
        if init is None or target_name is None:
            return
        ours, theirs = load_tokenizer(target_name).get_vocab(), load_tokenizer(init).get_vocab()
    except ModelError:
        return
    found = differences(ours, theirs)
    if found is not None:
        raise ConfigError(
            f"--init {init} has another vocabulary than target {target_name} (first differences: {'; '.join(found)}), and "
            "it is trained on the target's tokens: give a model of the same vocabulary"
        )
