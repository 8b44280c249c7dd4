"""The verifier ``coupled`` inside vLLM: guesses race with the target's own noise, and equality accepts them.

::

    pip install 'foretell[vllm]'
    vllm serve MODEL --speculative-config '{"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4,
                                            "rejection_sample_method": "coupled"}'

The sampler of vLLM's model runner V2 is a Gumbel race whose noise is a function of a request's seed, the position and the
token; a salt keeps drafts from that noise. Here each row's token is what the plain sampler takes there, so the text is a
function of the seed and the target alone, and a guess stands where it is that token. Drafts that race with the same noise
are that token most often (``verify/exact.py`` has the law and its source).

``register`` is the entry point of the group ``vllm.general_plugins``. vLLM is imported where it runs, never here.
"""

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError

COUPLED = "coupled"
SUPPORTED = ("0.32.0", "0.33.0")
"""Releases of vLLM whose model runner V2 was read: what is replaced has these names and arguments there."""
VERIFIER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
OWN_NOISE = "DFlash2Speculator"
"""A drafter of vLLM that draws in a kernel of its own, and the base of others."""


def register() -> None:
    """Teach vLLM's configuration the word ``coupled``, and its workers what it means. A second call changes nothing.

    A request for it is refused with a ConfigError where vLLM is another release than ``SUPPORTED``, or takes its older
    runner. In other releases nothing else is touched: vLLM would not start if this raised.
    """
    config = import_module("vllm.config")
    if hasattr(config, "SpeculativeConfig"):  # else vLLM itself knows no such option
        _extend(config.SpeculativeConfig, "__init__", _admit)
    if _release() in SUPPORTED:
        _extend(config.VllmConfig, "__init__", _need_v2)
        _extend(import_module("vllm.v1.worker.worker_base").WorkerBase, "__init__", _couple_when_loaded)


def accept(winners: Tensor, guesses: Tensor, starts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Which of a batch's guesses are the tokens that the target's own race has.

    winners [N] int64: the token after each row; guesses [N]: the token in it, -1 for one that must not stand; starts
    [R + 1]: a request's rows are its pending token and then its guesses; most: the longest chain. Returns tokens
    [R, most + 1] int64 and how many of each line are emitted [R] int32, at least 1; nothing reads what lies behind
    them. The host waits for no result.
    """
    depth = torch.arange(most + 1, device=winners.device)
    rows = (starts[:-1, None] + depth).clamp(max=len(winners) - 1)
    tokens = winners[rows]
    right = (tokens[:, :-1] == guesses[rows[:, 1:]]) & (depth[1:] < starts.diff()[:, None])
    return tokens, (right.int().cumprod(1).sum(1) + 1).to(torch.int32)


def verify(
    verifier: Any, logits: Tensor, draft_logits: Any, tokens: Tensor, positions: Tensor, starts: Tensor,
    slots: Tensor, slots_np: Any, row_slots: Tensor, depths: Tensor, lengths: Any, guesses: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """In the place of ``RejectionSampler._verify``: (processed logits, tokens, how many), as it returns them.

    The arguments are vLLM's, in its order: logits [N, V] of the batch's rows, the tokens in them [N] and their positions
    [N], where requests start [R + 1]; guesses [N]: those tokens, -1 where a grammar or an unread prompt forbids one.
    """
    sampler = verifier.sampler
    states = sampler.sampling_states
    processed = sampler.apply_sampling_params(logits, row_slots, slots, slots_np, positions, tokens, depths, lengths)
    winners = _race(
        processed, row_slots, states.temperature.gpu, states.seeds.gpu, positions,
        apply_temperature=False, use_fp64=sampler.use_fp64_gumbel,
    )  # fmt: skip
    return processed, *accept(winners, guesses, starts, verifier.num_speculative_steps)


class TargetNoise:
    """What vLLM's drafters draw by: stands where a watermark's noise for drafts would."""

    def sample(
        self, logits: Tensor, slots: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *,
        apply_temperature: bool, use_fp64: bool, **unused: Any,
    ) -> Tensor:  # fmt: skip
        """One guess a row [N], by the noise that the target's race has there. No logits are kept: nothing reads them."""
        return _race(
            logits, slots, temperature, seeds, positions, apply_temperature=apply_temperature, use_fp64=use_fp64
        )


def couple(runner: Any) -> None:
    """Give a loaded model runner V2 this verifier, and its drafter the target's noise.

    Raises ConfigError where the model verifies by a class of its own. A rank of a pipeline that samples nothing is left
    alone.
    """
    verifier, drafter = runner.rejection_sampler, runner.speculator
    if verifier is None:
        return
    if type(verifier) is not import_module(VERIFIER).RejectionSampler:
        raise ConfigError(
            f"rejection_sample_method {COUPLED!r} replaces vLLM's own verifier, and this model brings "
            f"{type(verifier).__name__}: leave the option out"
        )
    verifier._verify = partial(verify, verifier)
    if hasattr(drafter, "draft_watermarker"):
        drafter.draft_watermarker = TargetNoise()
    if OWN_NOISE in [kind.__name__ for kind in type(drafter).__mro__]:
        import_module("vllm.logger").init_logger(__name__).warning(
            "coupled: %s draws by noise of its own: the text is the same, and fewer guesses are accepted",
            type(drafter).__name__,
        )


def _race(logits: Tensor, *args: Tensor, apply_temperature: bool, use_fp64: bool) -> Tensor:
    """vLLM's race [N] as its plain sampler runs it: without the salt of drafts, and without a seed for each step."""
    gumbel = import_module("vllm.v1.worker.gpu.sample.gumbel")
    winners: Tensor = gumbel.gumbel_sample(
        logits, *args, apply_temperature=apply_temperature, is_drafting=False, use_fp64=use_fp64
    )
    return winners


def _release() -> str:
    version: str = import_module("vllm").__version__
    return version.split("+")[0]


def _extend(cls: Any, name: str, extension: Callable[..., None]) -> None:
    """Let ``extension(original, self, *args, **kwargs)`` stand for a method, once."""
    original = getattr(cls, name)
    if getattr(original, "extension", None) is not extension:
        extended = wraps(original)(lambda self, *args, **kwargs: extension(original, self, *args, **kwargs))
        extended.extension = extension  # type: ignore[attr-defined]
        setattr(cls, name, extended)


def _admit(original: Callable[..., None], config: Any, *args: Any, **options: Any) -> None:
    """Build a ``SpeculativeConfig``; vLLM checks its options as if the verifier were its own standard one."""
    if options.get("rejection_sample_method") != COUPLED:
        return original(config, *args, **options)
    if _release() not in SUPPORTED:
        raise ConfigError(
            f"rejection_sample_method {COUPLED!r} is for vLLM {' and '.join(SUPPORTED)}, whose sampler it was written "
            f"for; this is vLLM {_release()}: install one of those, or leave the option out"
        )
    options = {"draft_sample_method": "probabilistic", **options, "rejection_sample_method": "standard"}
    original(config, *args, **options)
    config.rejection_sample_method = COUPLED
    return None


def _is_coupled(config: Any) -> bool:
    return config.speculative_config is not None and config.speculative_config.rejection_sample_method == COUPLED


def _need_v2(original: Callable[..., None], config: Any, *args: Any, **options: Any) -> None:
    """Build a ``VllmConfig``; the older runner would verify by another rule and not say so."""
    original(config, *args, **options)
    if _is_coupled(config) and not config.use_v2_model_runner:
        raise ConfigError(
            f"rejection_sample_method {COUPLED!r} needs vLLM's model runner V2, and vLLM takes V1 for this configuration "
            f"(method {config.speculative_config.method!r}; its log says why): take a method and a device that V2 has, "
            "or leave the option out"
        )


def _couple_when_loaded(
    original: Callable[..., None], worker: Any, vllm_config: Any, *args: Any, **options: Any
) -> None:
    """Build a worker whose models are coupled as soon as they are loaded."""
    original(worker, vllm_config, *args, **options)
    if _is_coupled(vllm_config):
        load = worker.load_model

        def load_model(*args: Any, **options: Any) -> None:
            load(*args, **options)
            couple(worker.model_runner)

        worker.load_model = load_model
