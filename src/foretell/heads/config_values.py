"""What the numbers of a head's configuration may be, whether they come from a config.json or from the settings of training.

A size is looked at before anything is allocated: a damaged config.json costs one line, not the machine's memory.
"""

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError, ModelError
from foretell.core.settings import settle

RANGES: dict[str, tuple[int, int]] = {
    "hidden_size": (1, 2**20), "vocab_size": (1, 2**26), "draft_vocab_size": (1, 2**26), "columns": (1, 2**20),
    "intermediate_size": (1, 2**22), "num_heads": (1, 2**12), "num_kv_heads": (1, 2**12), "head_dim": (1, 2**12),
    "num_layers": (0, 2**10), "block_size": (1, 2**10), "markov_rank": (0, 2**16), "tap_layer": (0, 2**16),
    "layer": (0, 2**16), "exit_layer": (1, 2**16), "mask_token_id": (0, 2**26),
}  # fmt: skip
"""Least and largest value by a field's name: beyond every model known, and small enough that products of a few of them fit
into 64 bits."""
SHARES = {"rms_norm_eps": (0.0, 1.0), "eps": (0.0, 1.0), "rope_theta": (1.01, 1e11)}
"""Least and largest of numbers that need not be whole."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_sizes(config: Any) -> None:
    """Bring the fields of a head's configuration to their types, and raise ModelError for the first that is of another one,
    not finite or out of range."""
    try:
        settle(config)
    except ConfigError as error:
        raise ModelError(str(error)) from None
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None:  # where its type allows that
            continue
        if name in RANGES:
            least, most = RANGES[name]
            if not least <= value <= most:
                raise ModelError(f"{name} = {value!r} must be between {least} and {most}")
        elif isinstance(value, float):
            low, high = SHARES.get(name, (-sys.float_info.max, sys.float_info.max))
            if not low <= value <= high:
                raise ModelError(f"{name} = {value!r} must be a number between {low:g} and {high:g}")
        elif name in ("layer_ids", "windows"):
            _check_all(value, name, 2**16 if name == "layer_ids" else 2**40)


def _check_all(values: Iterable[int], name: str, most: int) -> None:
    values = list(values)
    if not all(0 <= value <= most for value in values):
        raise ModelError(f"{name} = {values!r} must be numbers between 0 and {most}")


def check_ids(ids: Tensor, size: int, vocab_size: int, *, name: str, of: str, hint: str = "") -> None:
    """Raise ModelError unless ids [size], of an integer dtype, are different tokens of a vocabulary: native code writes at
    these places unchecked. name: of the checkpoint; of: the tensor that holds them; hint: how it does."""
    if ids.shape != (size,) or ids.dtype not in _INTEGERS:
        kind = str(ids.dtype).removeprefix("torch.")
        raise ModelError(f"{name}: {of} is {list(ids.shape)} of {kind}, expected [{size}] whole numbers{hint}")
    found = ids.long().sort().values
    if not size or int(found[0]) < 0 or int(found[-1]) >= vocab_size or not bool((found[1:] > found[:-1]).all()):
        raise ModelError(
            f"{name}: {of} does not lead to {size} different ids of a vocabulary of {vocab_size}{hint}; it is damaged, or "
            "of another target"
        )


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ModelError where attention's sizes do not go together."""
    if head_dim % 2 or num_heads % num_kv_heads:
        raise ModelError(
            f"num_heads = {num_heads} must be a multiple of num_kv_heads = {num_kv_heads}, and head_dim = {head_dim} even"
        )
