"""A request that cannot be is refused where it is handed in, with what was given and what is expected."""

from types import SimpleNamespace
from typing import Any

import pytest

from foretell.core.errors import ConfigError, PromptError
from foretell.core.params import SamplingParams
from foretell.engine.request.row import Submission
from foretell.service.memory import check_submission


def check(
    prompt: int = 3, *, width: int = 0, shared: bool = False, params: dict[str, Any] | None = None, **more: Any
) -> None:
    """A request of so many prompt tokens, to a service whose texts have at most 8, of a vocabulary of 5."""
    engine: Any = SimpleNamespace(
        width=width, model=SimpleNamespace(is_shared=shared, spec=SimpleNamespace(vocab_size=5, context=str))
    )
    choice: Any = SimpleNamespace(config=SimpleNamespace(method="ngram", max_nodes=4))
    submission = Submission("a", [1] * prompt, SamplingParams(**(params or {})), **more)
    check_submission(submission, choice, engine, 8)


@pytest.mark.parametrize(
    "fits",
    [
        {}, {"prompt": 7}, {"prompt": 8, "write": False}, {"width": 4}, {"params": {"logit_bias": {4: 1.0}}},
        {"num_prompt_logprobs": 0}, {"shared": True},
    ],
)  # fmt: skip
def test_what_fits_is_taken(fits: dict[str, Any]) -> None:
    assert check(**fits) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"prompt": 8}, PromptError, "8 tokens, and this service takes texts of 8, of which at least one must be left"),
        ({"prompt": 9, "write": False}, PromptError, "9 tokens, and this service takes texts of 8: shorten"),
        (
            {"width": 3},
            ConfigError,
            "'ngram' may guess 3 tokens a step, and every pass here has width 3: ask",
        ),
        (
            {"params": {"logit_bias": {5: 1.0}}},
            ConfigError,
            "token id 5 in logit_bias or banned_token_ids: ids are 0 to 4",
        ),
        ({"params": {"banned_token_ids": (7,)}}, ConfigError, "token id 7"),
        ({"num_prompt_logprobs": -2}, ConfigError, "num_prompt_logprobs = -2 must be at least 0"),
        ({"shared": True, "params": {"logits_processor": lambda ids, logits: logits}}, ConfigError, "device_map"),
        ({"shared": True, "watch": object()}, ConfigError, "cannot be watched"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        check(**given)
