"""How much a service holds at once: rows, their slots, and the KV of all of them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.core.errors import ConfigError, PromptError
from foretell.engine.engine import Engine
from foretell.engine.request.submission import Submission
from foretell.engine.speculation import Speculation
from foretell.model.cache import SPARE
from foretell.model.prefill import round_up
from foretell.service.choices import MARGIN
from foretell.service.memory import SHARE, budget_bytes, bytes_per_row, bytes_per_token, kv_budget, whole_rows
from foretell.service.options import ServiceOptions

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
    rows, budget = options.max_num_seqs, budget_bytes(spec.device, options.kv_memory_gib)
    if engine.model.has_blocks:  # those are the target's: a drafter's rows are whole
        own = bytes_per_token(engine.model, [])
        slot, states = own, states + (slot - own) * (capacity + SPARE)
        rows = whole_rows(budget_bytes(spec.device, options.kv_memory_gib, several), states, rows, capacity * own)
    kv_tokens = kv_budget(
        engine.model, slot, given_gib=options.kv_memory_gib, row_tokens=capacity, max_rows=rows, bytes_per_row=states,
        models=several,
    )  # fmt: skip
    kv_tokens = engine.model.share(kv_tokens)
    if spec.device.type != "cpu" and not engine.model.has_blocks:  # a pool is allocated whole there
        rows = max(1, min(rows, kv_tokens // (capacity + SPARE)))
    logger.info(
        "KV memory: %d tokens (%.2f GiB) for up to %d requests of up to %d tokens; %s of free memory",
        kv_tokens, kv_tokens * slot / 2**30, rows, longest,
        "as given" if options.kv_memory_gib is not None else f"{SHARE / several:.0%}",
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
