"""The figures of a completion: a line for people and an object for programs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foretell import __version__
from foretell.cli.output import RESET, TINT

if TYPE_CHECKING:
    from foretell import Completion, SamplingParams

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def figures(completion: "Completion", params: "SamplingParams", *, tint: bool, interrupted: bool = False) -> str:
    """One line: configuration, speed and acceptance; tint adds the legend of the tinted text."""
    config: Mapping[str, Any] = completion.config
    speculative: Mapping[str, Any] = config["speculative"]
    method = speculative["method"]
    parts = ["interrupted"] if interrupted else []
    parts += [
        f"{config['implementation']} {held(config)}",
        f"{completion.num_tokens} tokens in {completion.seconds_prefill + completion.seconds_decode:.2f} s",
    ]
    if completion.num_tokens:
        parts.append(f"{completion.tokens_per_second:.1f} tokens/s")
    if method == "none":
        parts.append("plain decoding")
    else:
        parts += [
            f"mean acceptance length {completion.mean_acceptance_length:.2f}",
            f"acceptance rate {completion.acceptance_rate:.0%} "
            f"({completion.num_accepted_tokens} of {completion.num_draft_tokens} guesses)",
        ]
    parts.append(f"{completion.num_steps} steps")
    parts += [cut(completion, params)] if completion.num_tokens < params.max_new_tokens else []
    if completion.left_out:
        parts.append(f"not enforced of the schema: {', '.join(completion.left_out)}")
    if not config["exact"]:
        parts.append(f"{speculative['verify']} is lossy")
    if params.temperature > 0:
        parts.append(f"seed {completion.seed}")
    if tint and method != "none":
        parts.append(f"{TINT}tinted{RESET}: guessed by {method} and accepted")
    return " · ".join(filter(None, parts))


def cut(completion: "Completion", params: "SamplingParams") -> str:
    """Why a text ends that did not end by itself; "" where it did."""
    if completion.finish_reason != "length":
        return ""
    if completion.num_tokens == params.max_new_tokens:
        return f"cut: max_new_tokens = {params.max_new_tokens}"
    return f"the model's context of {completion.num_prompt_tokens + completion.num_tokens} tokens is full"


def held(config: Mapping[str, Any]) -> str:
    """How the target is held: a quantised one is another distribution, which is said."""
    dtype, weights = (SHORT.get(config[key], config[key]) for key in ("dtype", "weights"))
    kv = config.get("kv", dtype)
    return (
        str(dtype) if weights == dtype == kv else f"{weights} weights, {kv} cache: the quantised model's distribution"
    )


def as_object(completion: "Completion", params: "SamplingParams") -> dict[str, Any]:
    """The completion's fields, how it was sampled, and the version that made it."""
    sampling = asdict(params)
    del sampling["logits_processor"]
    made = {**completion.to_dict(), "sampling": sampling, "foretell": __version__}
    if params.logprobs is not None:
        made["logprobs"] = [
            {"token_id": one.token_id, "text": one.text, "logprob": one.logprob, "top_logprobs": one.top_logprobs}
            for one in completion.pieces
        ]
    return made
