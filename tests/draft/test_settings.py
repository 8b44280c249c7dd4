"""Settings of drafters and shapes that make no sense, from JSON, a text or Python: one clear error each."""

import math
from typing import Any

import pytest

from foretell import ConfigError, speculative_config
from foretell.draft import shapes
from foretell.draft.ngram import Ngram
from foretell.draft.suffix import SuffixOptions

NONSENSE: tuple[Any, ...] = (math.nan, math.inf, -math.inf, -1, 10**30, True, "x", ["x"], {})
KEYS = {
    "ngram": ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_min_token_prob", "suffix_decoding_max_cached_tokens",
    ),
    "draft_model": ("draft_vocab_size",),
}  # fmt: skip


@pytest.mark.parametrize("method", KEYS)
def test_keys_of_methods(method: str) -> None:
    for key in KEYS[method]:
        for value in NONSENSE:
            if (method, value) == ("draft_model", 10**30):
                continue  # compared with the draft's own vocabulary
            with pytest.raises(ConfigError, match=key.partition("_")[0]):
                speculative_config({"method": method, key: value})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Chain", {"depth": 2.5}), ("Chain", {"depth": True}), ("Adaptive", {"threshold": math.inf}),
        ("Adaptive", {"threshold": math.nan}), ("Adaptive", {"threshold": "x"}), ("Static", {"branching": (2.5, 1)}),
        ("Static", {"branching": 2}), ("Static", {"branching": (True,)}), ("Sequoia", {"acceptance": (0.5, math.nan)}),
        ("Sequoia", {"size": 2.5}), ("DySpec", {"threshold": math.nan}),
        ("OptTree", {"width": True}), ("OptTree", {"threshold": math.inf}), ("SpecDec", {"min": 1.5}),
        ("SpecDec", {"threshold": math.nan}), ("Eagle2Shape", {"width": 2.5}),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_made_in_python(kind: str, options: dict[str, Any]) -> None:
    """Half a node, and a threshold that nothing reaches, were taken."""
    with pytest.raises(ConfigError, match=f"^{next(iter(options))} = "):
        getattr(shapes, kind)(**options)


def test_methods_made_in_python() -> None:
    for value in (2.5, True, "2", math.nan):
        with pytest.raises(ConfigError, match="prompt_lookup_m"):
            Ngram(min_ngram=value, max_ngram=4)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="suffix_decoding_max_cached_tokens"):
            SuffixOptions(max_cached_tokens=value)  # type: ignore[arg-type]


def test_a_library_too_small_for_a_half() -> None:
    """Of one token it remembered nothing, silently."""
    with pytest.raises(ConfigError, match=r"suffix_decoding_max_cached_tokens = 1 must be 0 .* or between 2 and"):
        SuffixOptions(max_cached_tokens=1)
