"""The base class of learned heads."""

import dataclasses
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from foretell.checkpoints.packed import Packed
from foretell.core.errors import ModelError
from foretell.heads.config_keys import check_sizes
from foretell.heads.modules import Attention
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel, ModelSpec
from foretell.model.windows import DraftWindow


@dataclass(frozen=True)
class HeadConfig:
    """The sizes that all heads share. Layer numbers everywhere: i is the *output* of target layer i, from 0."""

    hidden_size: int  # H of the target whose hidden states are read
    vocab_size: int  # V of the target

    def __post_init__(self) -> None:
        """Refuse sizes of other types and out of range: see ``sizes``. A subclass that checks more calls this first."""
        check_sizes(self)

    def as_dict(self) -> dict[str, Any]:
        """Field names and values; tuples as lists, as JSON has them."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()
        }


class Head(nn.Module, ABC):
    """A learned head. ``state_dict`` names are those of its authors' checkpoints (see ``heads.formats``)."""

    method: ClassVar[str]
    """The name by which configurations and the command line know it."""
    config: HeadConfig
    max_positions: int | None = None
    """Positions that its checkpoint names as the most; None: it names none."""
    trained_length: int | None = None
    """Tokens of the longest texts that it was trained on; None: its directory does not say it."""
    window: DraftWindow | None = None
    """See ``limit``."""
    packed: Mapping[str, Packed] = MappingProxyType({})
    """Matrices in a file's blocks, which native heads decode, by the names of the parameters that hold their values."""

    lent: tuple[str, ...] = ()
    """Parameters that are the target's own rows, held by no file: zeros until ``borrow``."""

    def borrow(self, model: CausalModel) -> None:
        """Fill what is ``lent``, which a kind of head that has it knows how to."""
        raise NotImplementedError(f"{type(self).__name__} borrows nothing")

    def limit(self, window: DraftWindow) -> None:
        """Read so much of a text alone when guessing; training sees what it saw. Positions have no end then."""
        self.window = window
        for module in self.modules():
            if isinstance(module, Attention) and window.narrows(module.shape.window):
                module.shape = replace(module.shape, limit=window)
        if self.max_positions is not None and window.most <= self.max_positions:
            self.max_positions = None

    @property
    def bytes_per_token(self) -> int:
        """What a drafter holds of each token of a row: keys and values, a feature that it has not read; 0: nothing."""
        return 0

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache of its layers, of a head that has attention: slot is position, tree nodes follow."""
        config: Any = self.config
        shapes = [(config.num_kv_heads, config.head_dim)] * getattr(config, "num_layers", 1)
        device = next(self.parameters()).device
        return KVCache(num_rows, capacity, shapes, self.dtype, [device] * len(shapes))

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the head reads, in the order in which they are concatenated."""
        return ()

    def check_target(self, spec: ModelSpec, *, name: str) -> None:
        """Raise ModelError where the head was not made for a target of this size."""
        for key, mine, its in (
            ("hidden size", self.config.hidden_size, spec.hidden_size),
            ("vocabulary", self.config.vocab_size, spec.vocab_size),
        ):
            if mine != its:
                raise ModelError(
                    f"{name}: this {self.method} head was trained for a target of {key} {mine}, and {spec.name!r} has "
                    f"{its}: train one for this target with 'foretell train {self.method}'"
                )
        beyond = [tap for tap in self.taps if not 0 <= tap < spec.num_layers]
        if beyond:
            raise ModelError(
                f"{name}: this {self.method} head reads the output of target layer {beyond[0]}, and {spec.name!r} has "
                f"layers 0 to {spec.num_layers - 1}"
            )

    @property
    def num_parameters(self) -> int:
        """How many numbers are its own."""
        return sum(parameter.numel() for name, parameter in self.named_parameters() if name not in self.lent)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of what is computed."""
        return next(self.parameters()).dtype


AnyHead = TypeVar("AnyHead", bound=Head)
