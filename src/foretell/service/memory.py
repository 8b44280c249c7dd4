"""How much memory is free for keys and values."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

import torch

from foretell.core.errors import ConfigError, PromptError
from foretell.core.platform import free_memory, own_function
from foretell.draft.base import Method
from foretell.engine.drafters.lazy import MOST_TAP_BYTES
from foretell.engine.engine import Engine
from foretell.engine.request.row import Submission
from foretell.engine.speculation import Speculation
from foretell.model.cache import SPARE
from foretell.model.prefill import round_up
from foretell.model.target import CausalModel
from foretell.service.choices import MARGIN
from foretell.service.options import ServiceOptions


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
    # A model without attention holds nothing for a token
    return max(1, model.new_cache(0, 1).bytes_per_slot + together)


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


logger = logging.getLogger(__name__)

PREFIX_SHARE = 0.25
"""Of the KV budget, what kept prefixes may take beside it."""


@dataclass(frozen=True)
class Sizes:
    """The limits of one service on its machine."""

    max_model_len: int  # tokens of prompt and output together
    capacity: int  # slots of a row
    max_rows: int  # decoded or read together
    kv_tokens: int  # whose keys and values may be held at once
    prefix_bytes: int  # that the prefix store may hold


def sizes_of(engine: Engine, guessing: Sequence[Speculation], options: ServiceOptions) -> Sizes:
    """The sizes for an engine and its guessing methods, logged. Raises ConfigError where not even one row fits."""
    spec = engine.model.spec
    longest = min(options.max_model_len or spec.max_positions, spec.max_positions)
    width = engine.width
    capacity = round_up(longest + max(MARGIN, width), 512 if width else 64)
    methods = [choice.method for choice in guessing]
    slot, states = bytes_per_token(engine.model, methods), bytes_per_row(engine.model, methods)
    several = options.models_at_once  # they share the KV budget; prompts of each are kept as of one alone
    given_gib = options.kv_memory_gib
    if given_gib is None and engine.model.memory_left is not None:  # a half of it is for passes
        given_gib = engine.model.memory_left * SHARE / several / 2**30
    rows, budget = options.max_num_seqs, budget_bytes(spec.device, given_gib)
    if engine.model.has_blocks:  # those are the target's: a drafter's rows are whole
        own = bytes_per_token(engine.model, [])
        slot, states = own, states + (slot - own) * (capacity + SPARE)
        rows = whole_rows(budget_bytes(spec.device, given_gib, several), states, rows, capacity * own)
    kv_tokens = kv_budget(
        engine.model, slot, given_gib=given_gib, row_tokens=capacity, max_rows=rows, bytes_per_row=states,
        models=several,
    )  # fmt: skip
    kv_tokens = engine.model.share(kv_tokens)
    if spec.device.type != "cpu" and not engine.model.has_blocks:  # a pool is allocated whole there
        rows = max(1, min(rows, kv_tokens // (capacity + SPARE)))
    logger.info(
        "KV memory: %d tokens (%.2f GiB) for up to %d requests of up to %d tokens; %s of free memory",
        kv_tokens, kv_tokens * slot / 2**30, rows, longest,
        "as given" if given_gib is not None else f"{SHARE / several:.0%}",
    )  # fmt: skip
    # Of what was given, not of what these rows can use: one agent alone keeps its conversation too.
    return Sizes(longest, capacity, rows, kv_tokens, int(budget * PREFIX_SHARE))


def check_submission(submission: Submission, choice: Speculation, engine: Engine, max_model_len: int) -> None:
    """Raises ConfigError and PromptError. max_model_len: tokens of prompt and output together."""
    width, model = engine.width, engine.model
    if 0 < width < choice.config.max_nodes:
        raise ConfigError(
            f"{choice.config.method!r} may guess {choice.config.max_nodes - 1} tokens a step, and every pass here has "
            f"width {width}: ask for at most {width - 1}"
        )
    if model.is_shared and submission.params.logits_processor is not None:  # a format is one by now
        raise ConfigError(
            "a logits processor or a grammar cannot be sent to the other processes of a tensor-parallel service: "
            "leave it out, or serve with device_map"
        )
    if model.is_shared and submission.watch is not None:
        raise ConfigError("the steps of a tensor-parallel service cannot be watched: serve with device_map")
    count = len(submission.prompt_ids)
    if count > max_model_len - submission.write:
        left = ", of which at least one must be left for the output" if submission.write else ""
        raise PromptError(
            f"the prompt has {count} tokens, and this service takes texts of {model.spec.context(max_model_len)}{left}: "
            "shorten the prompt"
        )
    size = model.spec.vocab_size
    for token in (*submission.params.logit_bias, *submission.params.banned_token_ids):
        if not 0 <= token < size:
            raise ConfigError(f"token id {token} in logit_bias or banned_token_ids: ids are 0 to {size - 1}")
    if (given := submission.num_prompt_logprobs) is not None and given < 0:
        raise ConfigError(f"num_prompt_logprobs = {given} must be at least 0")


IDLE_S = 1.0
"""Seconds without work after which memory is returned."""
BUSY_S = 60.0
"""Seconds between two calls while work goes on without a pause."""


def trim_heap() -> bool:
    """Return all free pages of the C library's heaps to the system. False where ``malloc_trim`` does not exist."""
    function = own_function("malloc_trim")
    return function is not None and bool(function(0))


HELD_S = 0.5  # at most, by a thread that has just answered


def collect(model: Callable[[], object] | None = None) -> None:
    """Give back what a model that was closed has left, circles of objects too, also of those that were frozen: a command
    freezes what its start has made. model: a weak reference; where it has gone with its last reference nobody looks for
    circles, which would hold up all threads of the process."""
    until = monotonic() + HELD_S
    while model is not None and model() is not None and monotonic() < until:
        sleep(0.01)
    if model is None or model() is not None:
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
    torch.cuda.empty_cache()  # where a device is in use
    trim_heap()


class HeapKeeper:
    """Decides when to trim. Not thread-safe.

    glibc returns only the end of a heap by itself, never pages before a block in use. Long prompts and many
    connections leave hundreds of MiB there. ``malloc_trim`` returns whole free pages between blocks, in
    milliseconds.
    """

    def __init__(self, trim: Callable[[], object] = trim_heap, clock: Callable[[], float] = monotonic) -> None:
        """clock returns seconds."""
        self._trim, self._clock = trim, clock
        self._since = clock()  # when work was last begun or memory last given back
        self._has_worked = False

    def worked(self) -> None:
        """To be called after work was done."""
        now = self._clock()
        if not self._has_worked:
            self._has_worked, self._since = True, now
        elif now - self._since >= BUSY_S:
            self._since = now
            self._trim()

    def rested(self) -> None:
        """To be called when no work came for ``IDLE_S`` seconds."""
        if self._has_worked:
            self._has_worked = False
            self._trim()
