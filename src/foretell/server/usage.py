"""Figures of a response: usage in OpenAI's shape, speculation in vLLM's."""

from collections.abc import Sequence
from typing import Any

from foretell.draft.prediction import Prediction
from foretell.engine.request.result import Completion


def usage(
    completions: Sequence[Completion], *, num_choices: int, num_predicted: int, num_thought: int = 0
) -> dict[str, Any]:
    """Tokens of a request. completions: of all choices, prompt by prompt, num_choices each, whose prompt counts once;
    num_thought: tokens of thoughts."""
    firsts = completions[::num_choices]
    prompt = sum(one.num_prompt_tokens for one in firsts)
    written = sum(one.num_tokens for one in completions)
    # Of the client's prediction; tokens of other drafters count as neither.
    kept = [sum(piece.source == f"draft:{Prediction.name}" for piece in one.pieces) for one in completions]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": num_thought,
            "accepted_prediction_tokens": sum(kept),
            "rejected_prediction_tokens": sum(max(0, num_predicted - accepted) for accepted in kept),
        },
    }


def metrics(completions: Sequence[Completion]) -> dict[str, Any]:
    """``metrics`` of a response. A step that guessed nothing is not counted, as in vLLM."""
    steps = [(drafted, accepted) for one in completions for drafted, accepted in one.steps if drafted]
    longest = max(*map(_planned, completions), *(drafted for drafted, _ in steps), 0, 0)
    accepted_tokens = sum(accepted for _, accepted in steps)
    drafted_tokens = sum(one.num_draft_tokens for one in completions)
    by_length: dict[int, list[int]] = {}
    for drafted, accepted in steps:
        by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
    histogram = [sum(accepted == count for _, accepted in steps) for count in range(longest + 1)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted_tokens / len(steps) if steps else 1.0,
            "draft_acceptance_rate": accepted_tokens / drafted_tokens if drafted_tokens else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {
                str(length): counts for length, counts in sorted(by_length.items())
            },
            "num_spec_steps": len(steps),
            "num_accepted_draft_tokens": accepted_tokens,
            "num_draft_tokens": drafted_tokens,
            "num_spec_tokens": longest,
            "plain_reason": next((one.plain_reason for one in completions if one.plain_reason), None),
        }
    }


def _planned(completion: Completion) -> int:
    """K of a completion's method."""
    speculative = completion.config.get("speculative") or {}
    return int(speculative.get("num_speculative_tokens", 0)) if speculative.get("method", "none") != "none" else 0
