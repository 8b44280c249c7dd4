"""The requests of a certificate: temperatures, processors, seeds."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from foretell.core.noise import derive_seed
from foretell.core.params import MAX_SEED, SamplingParams
from foretell.engine.engine import Prompt, Request


def unquiet(ids: Tensor, logits: Tensor) -> Tensor:
    """A user's processor that reads prefix and path: it lowers the last token, and raises the one whose id is their sum
    modulo V."""
    out = logits.clone()
    out[ids[-1]] -= 3.0
    out[int(ids.sum()) % len(out)] += 2.0
    return out


def conditions(temperature: float, max_new_tokens: int) -> list[SamplingParams]:
    """One of each kind: no processor, penalties, filters, rules. Prompts take them in turn."""
    base = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    return [
        SamplingParams(**base),  # type: ignore[arg-type]
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, **base),  # type: ignore[arg-type]
        SamplingParams(top_p=0.9, top_k=50, min_p=0.01, **base),  # type: ignore[arg-type]
        SamplingParams(min_new_tokens=max_new_tokens // 2, logits_processor=unquiet, **base),  # type: ignore[arg-type]
    ]


NAMES = ("plain", "penalties", "filters", "rules")


def requests(prompts: Sequence[Prompt], temperature: float, max_new_tokens: int, seed: int) -> list[Request]:
    """A request a prompt, each with a seed of its own: with equal seeds draws would not be independent."""
    kinds = conditions(temperature, max_new_tokens)
    return [
        Request(prompt, replace(kinds[index % len(kinds)], seed=request_seed(seed, temperature, index)))
        for index, prompt in enumerate(prompts)
    ]


def request_seed(seed: int, temperature: float, index: int) -> int:
    """A seed in [0, ``MAX_SEED``] that no other prompt or temperature has."""
    return derive_seed(seed, int(temperature * 1_000_000), index) & MAX_SEED
