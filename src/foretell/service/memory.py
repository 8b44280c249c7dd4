"""How much memory is free for keys and values."""

from collections.abc import Sequence

import torch

from foretell.core.errors import ConfigError
from foretell.core.platform import free_memory
from foretell.draft.base import Method
from foretell.engine.drafters.waiting import MOST_TAP_BYTES
from foretell.model.target import CausalModel


class TooLittleMemoryError(ConfigError):
    """Not even one text finds memory for its keys and values."""


SHARE = 0.5
"""Fraction of the memory free after loading that KV may use. The rest is for passes, drafters and other programs."""


def free_bytes(device: torch.device) -> int:
    """Free bytes on a device: the machine's, or less where a container's limit is lower."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def bytes_per_token(model: CausalModel, methods: Sequence[Method]) -> int:
    """Greatest KV bytes that one token of a row may take in the target and in a drafter, over all methods.

    A row has one method at a time. On a CPU the memory of a removed row is freed, so the largest method counts. On
    other devices a drafter keeps it, and rows of other methods may follow, so the methods are added up.
    """
    drafters = [method.bytes_per_token for method in {id(method): method for method in methods}.values()]
    together = max(drafters, default=0) if model.spec.device.type == "cpu" else sum(drafters)
    return max(
        1, model.new_cache(0, 1).bytes_per_slot + together
    )  # a model without attention holds nothing for a token


def bytes_per_row(model: CausalModel, methods: Sequence[Method]) -> int:
    """Greatest bytes that a row takes whatever its length, in the target and in a drafter: recurrent states, and what waits
    to be read."""
    drafters = [method.bytes_per_row + (MOST_TAP_BYTES if method.taps else 0) for method in methods]
    return model.new_cache(0, 1).bytes_per_row + max(drafters, default=0)


def budget_bytes(device: torch.device, given_gib: float | None, models: int = 1) -> int:
    """Bytes that rows may take together: given_gib, or a model's part of ``SHARE`` of what is free."""
    return int(free_bytes(device) * SHARE / models) if given_gib is None else int(given_gib * 2**30)


def whole_rows(budget: int, bytes_per_row: int, most: int, text: int) -> int:
    """Rows, at most ``most`` and at least one, whose bytes_per_row take half of the budget or less, and leave the bytes of
    one whole ``text``: the rest is for what grows with texts."""
    return max(1, min(most, min(budget // 2, budget - text) // max(1, bytes_per_row)))


def kv_budget(
    model: CausalModel,
    bytes_per_token: int,
    *,
    given_gib: float | None,
    row_tokens: int,
    max_rows: int,
    bytes_per_row: int = 0,
    models: int = 1,
) -> int:
    """Tokens whose keys and values may be held at once: given_gib, or ``SHARE`` of what is free, without bytes_per_row of
    each row; no more than max_rows rows of row_tokens can use. models: that share it, of which each may have one such row
    even so. Raises TooLittleMemoryError where not even one fits."""
    for share in (models, 1):
        budget = max(0, budget_bytes(model.spec.device, given_gib, share) - max_rows * bytes_per_row)
        tokens = min(budget // bytes_per_token, max_rows * row_tokens)
        if tokens >= row_tokens:
            return tokens if share == models else row_tokens
    raise TooLittleMemoryError(
        f"{budget / 2**30:.2f} GiB of KV memory hold {tokens} tokens of {model.spec.name!r}, and one request may have "
        f"{row_tokens}: give a smaller max_model_len, or more with kv_memory_gib"
    )
