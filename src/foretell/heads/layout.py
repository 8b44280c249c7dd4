"""The interface of heads' layouts, and the checks that they share."""

import dataclasses
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foretell.core.errors import ConfigError, ModelError
from foretell.heads.config_keys import Keys
from foretell.heads.directories import WEIGHTS
from foretell.heads.head import Head, HeadConfig
from foretell.heads.teacher import Objective

MARKER = "foretell"
"""The key of config.json under which this library says what is in a directory; others ignore it."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def marker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """This library's marker in a directory; empty in directories of other tools."""
    found = config.get(MARKER)
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class TargetInfo:
    """Facts about the target that are saved with a head. Some layouts have keys for it."""

    name: str | None = None
    architecture: str | None = None
    num_layers: int | None = None
    max_positions: int | None = None


@dataclass(frozen=True)
class FoundLayout:
    """A checkpoint as it lies on disk, its names already the head's own."""

    name: str  # as given by the user: begins every message
    keys: Keys
    tensors: dict[str, Tensor]
    num_layers: int | None  # of the target, where the caller knows

    def shape(self, tensor: str) -> Sequence[int]:
        """Shape of a matrix that the layout requires."""
        if tensor not in self.tensors:
            raise ModelError(f"{self.name}: the weights lack {tensor}; found {some(self.tensors)}")
        shape = self.tensors[tensor].shape
        if len(shape) != 2:
            raise ModelError(f"{self.name}: {tensor} is {list(shape)}, expected a matrix")
        return shape


class Layout(ABC):
    """A way of writing one kind of head: names of tensors, and a config.json; of a package's heads, also how they are
    trained."""

    name: ClassVar[str]
    """Its name for ``--to``."""
    summary: ClassVar[str]
    """Which engines read it, in a few words."""
    head: ClassVar[type[Head]]
    architectures: ClassVar[tuple[str, ...]] = ()
    """Values of "architectures" by which it is known; the first is written."""
    speculators: ClassVar[str | None] = None
    """"speculators_model_type" of the layout, where it is one of the speculators library."""
    weights: ClassVar[str] = WEIGHTS
    ignored: ClassVar[tuple[str, ...]] = ()
    """Tensors of the target's own that some trainers store too: frozen copies, never read."""
    options: ClassVar[Mapping[str, bool | int | float | str]] = {}
    """Own settings of training, by name, with their defaults."""

    def objective(self, making: Any, options: dict[str, Any]) -> Objective:
        """What ``foretell train`` trains, with its loss: ``making.head(kind, fresh)``, the head of ``--init`` where that is
        given. making: a ``train.making.Making``. foretell's own heads have recipes (``train/recipes.py``) instead."""
        raise NotImplementedError

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Whether a directory is in this layout: of the speculators library the type decides, not the architecture."""
        if self.speculators is not None:
            return config.get("speculators_model_type") == self.speculators
        return architecture(config) in self.architectures

    def suits(self, head: Head) -> str | None:
        """Why this head cannot be written in this layout; None where it can."""
        return (
            None
            if head.method == self.head.method
            else f"it holds {self.head.method} heads, and this is {an(head.method)}"
        )

    def outward(self, name: str, config: Any) -> str:
        """The stored name of a tensor of the head."""
        return name

    def inward(self, name: str) -> str:
        """The head's name of a stored tensor; the head's own where it is stored under that."""
        return name

    @abstractmethod
    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """config.json of a head, less the marker."""

    @abstractmethod
    def parse(self, found: FoundLayout) -> HeadConfig:
        """The head's configuration. Raises ModelError, naming the key, where it does not follow."""

    def build(self, config: HeadConfig, found: FoundLayout) -> Head:
        """A head of a configuration to be filled, whose tensors have shapes and no memory: what the file holds is compared
        with them before anything is allocated."""
        build: Any = self.head
        with torch.device("meta"), _ShapesAlone():
            head: Head = build(config)
        return head


_INITS = frozenset(("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"))


class _ShapesAlone(TorchFunctionMode):
    """Without values that a head begins with and its file replaces: on device "meta" torch computes their shapes by Python
    code, whose import (torch._dynamo, sympy) takes 1.5 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", None)
        if name in ("lt", "__lt__"):
            return torch.empty(args[0].shape, dtype=torch.bool)
        if name in _INITS:
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange and len(args) == 1 and not kwargs:
            return torch.empty(args[0], dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def architecture(config: Mapping[str, Any]) -> str | None:
    """The first of config.json's "architectures"."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def describe_speculators(kind: str, proposal: Mapping[str, Any], target: TargetInfo) -> dict[str, Any]:
    """What speculators writes of every kind of head."""
    verifier = {"name_or_path": target.name, "architectures": [target.architecture] if target.architecture else []}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", **proposal}],
            "verifier": verifier,
        },
    }


def fill(head: Head, tensors: Mapping[str, Tensor], *, name: str) -> None:
    """Put tensors into a head, in the dtypes that they have. Raises ModelError naming those that do not belong."""
    own = head.state_dict()
    faults = [
        *([f"missing: {some(own.keys() - tensors.keys())}"] if own.keys() - tensors.keys() else []),
        *([f"unexpected: {some(tensors.keys() - own.keys())}"] if tensors.keys() - own.keys() else []),
    ]
    wrong = [key for key in own if key in tensors and own[key].shape != tensors[key].shape]
    faults += [f"{key} is {list(tensors[key].shape)}, expected {list(own[key].shape)}" for key in wrong[:3]]
    faults += [f"{len(wrong) - 3} more have wrong shapes"] if len(wrong) > 3 else []
    faults += [
        f"{key} holds {str(tensors[key].dtype).removeprefix('torch.')} numbers"
        for key in own
        if key in tensors and own[key].is_floating_point() and tensors[key].dtype not in DTYPES
    ]
    if faults:
        raise ModelError(f"{name}: the weights are not those of this {head.method} head: {'; '.join(faults)}")
    broken = [key for key in own if tensors[key].is_floating_point() and not bool(tensors[key].isfinite().all())]
    if broken:
        raise ModelError(f"{name}: the weights hold numbers that are not finite: {some(broken)}; train the head again")
    kept = {
        key: tensor if own[key].is_floating_point() else tensor.to(own[key].dtype) for key, tensor in tensors.items()
    }
    head.load_state_dict(kept, assign=True)


def check_layer_ids(ids: Sequence[int], *, name: str, source: str) -> None:
    """Layer ids (i is the output of layer i) must be distinct and ascend: engines capture them in that order."""
    if not ids or list(ids) != sorted(set(ids)):
        raise ModelError(
            f"{name}: {source} name the target layers {list(ids)} (numbered by their outputs, from 0); they must be "
            "distinct and ascend, since engines collect each layer once, in the order in which they run"
        )
    if ids[0] < 0:
        raise ModelError(
            f"{name}: {source} name the embeddings (output {ids[0]}) among the layers to read; only outputs of layers "
            "can be read"
        )


def some(names: Iterable[str], most: int = 4) -> str:
    """The first names, and how many more."""
    known = sorted(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more if known else "nothing"


def an(word: str) -> str:
    """With its article."""
    return f"{'an' if word[:1] in 'aeiou' else 'a'} {word} head"


OURS = ("architectures", "dtype", "torch_dtype", MARKER)
"""Keys of config.json that are not the head's configuration."""


class FlatLayout(Layout):
    """A flat config.json, with the configuration's fields as its keys; named after its heads' ``method``."""

    config: ClassVar[type[HeadConfig]]

    def __init_subclass__(cls) -> None:
        """Name the layout after its heads."""
        cls.name = cls.head.method
        cls.architectures = (f"Foretell{cls.name.capitalize()}",)

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """Every field of the configuration."""
        return {"architectures": [self.architectures[0]], **head.config.as_dict()}

    def parse(self, found: FoundLayout) -> HeadConfig:
        """Every field, of its type; fields that have defaults may be absent."""
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        unknown = found.keys.values.keys() - fields.keys() - set(OURS)
        if unknown:
            raise ModelError(
                f"{found.name}: config.json has {some(unknown)}, which no {self.head.method} head knows; it may be of a "
                "later version of foretell"
            )
        types = typing.get_type_hints(self.config)
        values = {
            key: _read(found.keys, key, types[key])
            for key, field in fields.items()
            if key in found.keys
            or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        }
        try:
            return self.config(**values)
        except ConfigError as error:
            raise ModelError(f"{found.name}: {error}") from error


def _read(keys: Keys, key: str, kind: Any) -> Any:
    if kind is bool:
        return keys.flag(key)
    if kind is int:
        return keys.integer(key)
    if kind is float:
        return keys.number(key)
    if kind is str:
        return keys.text(key)
    if typing.get_origin(kind) is dict:
        return dict(keys.inner(key).values)
    return keys.integers(key)
