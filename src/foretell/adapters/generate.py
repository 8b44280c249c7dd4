"""transformers' ``generate(custom_generate=...)`` over an engine that guesses, for batches of any size.

::

    generate = Speculative("suffix")                       # or {"method": ..., ...}, or draft=a loaded draft model
    model.generate(**inputs, custom_generate=generate, max_new_tokens=100, do_sample=True)

The verifier is "coupled" where none is named: the text is then a function of the prompt, the settings and torch's seed, so
that ``Speculative("none")`` after the same ``torch.manual_seed`` writes the same tokens, one at a time.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.params import LogitsProcessor, SamplingParams
from foretell.draft.config import MethodConfig
from foretell.engine.engine import Engine, Request

KNOWN_PROCESSORS = {
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
"""Processors of transformers that ``SamplingParams`` has too, in its order: their attribute, and its field."""
STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that are read from the generation configuration."""
REFUSED = {
    "output_scores": "scores are not kept",
    "output_logits": "logits are not kept",
    "output_attentions": "attention weights are not kept",
    "output_hidden_states": "hidden states are not kept",
    "return_dict_in_generate": "the sequences alone are returned",
}


class Speculative:
    """A decoding loop for ``generate``. It keeps one engine for each model that calls it."""

    def __init__(
        self,
        speculative: MethodConfig | Mapping[str, Any] | str | None = None,
        *,
        draft: Any = None,
        batch_size: int | None = None,
        streamer: Any = None,
    ) -> None:
        """speculative: as ``Engine`` takes it. draft: a loaded draft model. batch_size: rows decoded together; None: all.
        streamer: one of transformers', which shows a single text; given here, because ``generate`` keeps its own
        ``streamer`` and ``assistant_model`` from loops that are not its own.

        Raises ConfigError."""
        if isinstance(speculative, str):
            speculative = {"method": speculative}
        if isinstance(speculative, Mapping) or speculative is None:
            method = {"method": "draft_model"} if speculative is None and draft is not None else {}
            speculative = {"verify": "coupled", **method, **(speculative or {})}
        self.speculative, self.draft, self.batch_size = speculative, draft, batch_size
        self.streamer = streamer
        self._engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()
        self.engine: Engine | None = None  # of the last call: its recorder has the figures

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        generation_config: Any,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
        **kwargs: Any,
    ) -> Tensor:
        """What ``generate`` calls. input_ids [B, L] int64, padded on the left where kwargs' attention_mask [B, L] is 0.
        (transformers takes names of this signature for settings of this loop, so the mask is none of them.)

        Returns [B, L + T] int64, padded on the right. Raises ConfigError for what cannot be kept.
        """
        streamer, mask = self.streamer, kwargs.get("attention_mask")
        _check(generation_config, stopping_criteria, kwargs, input_ids, streamer)
        seen = torch.ones_like(input_ids) if mask is None else mask
        if bool((seen[:, 1:] < seen[:, :-1]).any()):
            raise ConfigError("prompts must be padded on the left: give the tokenizer padding_side='left'")
        engine = self.engine = self._engine(model)
        ends = _end_ids(generation_config)
        room = int(generation_config.max_length) - input_ids.shape[1]
        if room < 1:
            raise ConfigError(
                f"max_length = {generation_config.max_length} leaves no token to write: give max_new_tokens"
            )
        shared = _sampling(logits_processor, does_sample=bool(generation_config.do_sample))
        # One draw from torch's generator a row, so that torch.manual_seed governs these texts as it does others.
        seeds = torch.randint(2**62, (input_ids.shape[0],)).tolist()
        requests = []
        for row, (ids, reals, seed) in enumerate(zip(input_ids.tolist(), seen.tolist(), seeds, strict=True)):
            prompt = [token for token, real in zip(ids, reals, strict=True) if real]
            processor = _processor(logits_processor, row, len(ids) - len(prompt), ids) if shared is None else None
            given: dict[str, Any] = {"temperature": 1.0 if generation_config.do_sample else 0.0, **(shared or {})}
            params = SamplingParams(
                **given,
                max_new_tokens=room,
                seed=seed,
                ignore_eos=True,
                stop_token_ids=ends,
                logits_processor=processor,
            )
            requests.append(Request(prompt, params))
        if streamer is not None:
            written = [_streamed(engine, requests[0], input_ids, streamer)]
        else:
            done = engine.generate_batch(requests, batch_size=self.batch_size or len(requests))
            written = [completion.token_ids for completion in done]
        return _padded(input_ids, written, _pad_id(generation_config, ends))

    def _engine(self, model: Any) -> Engine:
        if model not in self._engines:
            self._engines[model] = Engine.load(model, speculative=self.speculative, draft=self.draft)
        return self._engines[model]


def _check(config: Any, criteria: Sequence[Any], kwargs: Mapping[str, Any], ids: Tensor, streamer: Any) -> None:
    """Refuse what would be lost."""
    for name, reason in REFUSED.items():
        if getattr(config, name, None):
            raise ConfigError(f"{name} is not for this loop: {reason}")
    if (getattr(config, "num_beams", 1) or 1) > 1:
        raise ConfigError("num_beams is not for this loop: texts are sampled, or greedy")
    for one in criteria:
        if type(one).__name__ not in STOPS:
            raise ConfigError(
                f"the stopping criterion {type(one).__name__} is not for this loop: cut the text afterwards"
            )
    if kwargs.get("assistant_model") is not None:
        raise ConfigError("give the draft model where the loop is made: Speculative(draft=model)")
    if kwargs.get("synced_gpus"):
        raise ConfigError("synced_gpus is not for this loop: the processes of a model would decode different steps")
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError("past_key_values is not for this loop: give the whole prompt")
    if kwargs.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not for this loop: give input_ids")
    if streamer is not None and ids.shape[0] > 1:
        raise ConfigError(f"a streamer shows one text, and {ids.shape[0]} were given")


def _end_ids(config: Any) -> tuple[int, ...]:
    given = config.eos_token_id
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(int(token) for token in given)


def _pad_id(config: Any, ends: Sequence[int]) -> int:
    pad = config.pad_token_id
    return int(pad) if pad is not None else ends[0] if ends else 0


def _sampling(processors: Sequence[Any], *, does_sample: bool) -> dict[str, Any] | None:
    """The processors as settings of ``SamplingParams``; None where one is of another kind, or in another order."""
    found: dict[str, Any] = {}
    order = list(KNOWN_PROCESSORS)
    places = [order.index(name) if (name := type(one).__name__) in order else -1 for one in processors]
    if -1 in places or places != sorted(set(places)):
        return None
    for one in processors:
        attribute, name = KNOWN_PROCESSORS[type(one).__name__]
        value = getattr(one, attribute, None)
        if value is None or _ignores_prompt(one):
            return None
        found[name] = value
    return found if does_sample else {**found, "temperature": 0.0}


def _ignores_prompt(penalty: Any) -> bool:
    """Whether a repetition penalty leaves (part of) the prompt out. A length for each row is that of its padding, which
    this engine never sees."""
    length = getattr(penalty, "prompt_ignore_length", None)
    return length is not None and not isinstance(length, Tensor) and length > 0


def _processor(processors: Sequence[Any], row: int, num_padding: int, ids: Sequence[int]) -> LogitsProcessor:
    """transformers' own processors, on the text with its padding, as ``generate`` calls them for one row."""
    padding = torch.tensor(ids[:num_padding], dtype=torch.int64)
    mine = []
    for one in processors:
        lengths = getattr(one, "prompt_ignore_length", None)
        if isinstance(lengths, Tensor):
            one = copy(one)
            one.prompt_ignore_length = lengths[row : row + 1]
        mine.append(one)

    def process(known: Tensor, logits: Tensor) -> Tensor:
        text = torch.cat([padding.to(known.device), known])[None]
        scores = logits[None].float()
        for one in mine:
            scores = one(text, scores)
        done: Tensor = scores[0].to(logits.dtype)
        return done

    return process


def _streamed(engine: Engine, request: Request, ids: Tensor, streamer: Any) -> list[int]:
    streamer.put(ids.cpu())
    written: list[int] = []
    for piece in engine.stream(request.prompt, request.params):
        written.append(piece.token_id)
        streamer.put(torch.tensor([piece.token_id]))
    streamer.end()
    return written


def _padded(input_ids: Tensor, written: Sequence[Sequence[int]], pad: int) -> Tensor:
    longest = max(map(len, written))
    rows = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in written]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], 1)
