"""transformers' ``generate(custom_generate=...)`` over an engine that guesses, for batches of any size.

::

    generate = Speculative("suffix")                       # or {"method": ..., ...}, or draft=a loaded draft model
    model.generate(**inputs, custom_generate=generate, max_new_tokens=100, do_sample=True)

The verifier is "coupled" where none is named: the text is then a function of the prompt, the settings and torch's seed, so
that ``Speculative("none")`` after the same ``torch.manual_seed`` writes the same tokens, one at a time.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from math import inf
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.params import MAX_SEED, LogitsProcessor, SamplingParams
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
_HELD = "_foretell_engines"


class Speculative:
    """A decoding loop for ``generate``. Each model that calls it keeps one engine for it."""

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
        self._last: ref[Engine] | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine of the last call, whose recorder has the figures; None where there is none, or its model is gone."""
        return None if self._last is None else self._last()

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
        seen = torch.ones_like(input_ids) if mask is None else mask
        check_settings(generation_config, input_ids.shape[0], streamer)
        check_calls(logits_processor, stopping_criteria)
        if bool((seen[:, 1:] < seen[:, :-1]).any()):
            raise ConfigError("prompts must be padded on the left: give the tokenizer padding_side='left'")
        check_inputs(kwargs, seen)
        engine = self._engine(model)
        ends = _end_ids(generation_config)
        room = int(generation_config.max_length) - input_ids.shape[1]
        if room < 1:
            raise ConfigError(
                f"max_length = {generation_config.max_length} leaves no token to write: give max_new_tokens"
            )
        _check_context(engine, int(seen.sum(1).max()), room)
        shared = _sampling(logits_processor, does_sample=bool(generation_config.do_sample))
        # One draw from torch's generator a row, so that torch.manual_seed governs these texts as it does others.
        seeds = torch.randint(MAX_SEED + 1, (input_ids.shape[0],)).tolist()
        requests = []
        for row, (ids, reals, seed) in enumerate(zip(input_ids.tolist(), seen.tolist(), seeds, strict=True)):
            prompt = [token for token, real in zip(ids, reals, strict=True) if real]
            mine = [] if shared is not None else [_of_row(one, row, input_ids.shape[0]) for one in logits_processor]
            processor = _processor(mine, ids[: len(ids) - len(prompt)]) if mine else None
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
        """The engine of this loop for a model, which holds it: whoever lets go of the model lets go of both."""
        held = vars(model).get(_HELD)
        if not isinstance(held, _Engines):
            held = _Engines()
            vars(model)[_HELD] = held
        if self not in held.of:
            held.of[self] = Engine.load(model, speculative=self.speculative, draft=self.draft)
        self._last = ref(held.of[self])
        return held.of[self]


class _Engines:
    """The engines of a model, by the loop that made each. A copy of the model has none of them."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[Speculative, Engine] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def _check_context(engine: Engine, longest: int, room: int) -> None:
    """Raises ConfigError where the longest prompt and room for new tokens are more than the model's context."""
    spec = engine.model.spec
    if longest + room > spec.max_positions:
        raise ConfigError(
            f"{longest} tokens of the prompt and {room} new ones are more than the context of {spec.name!r}, "
            f"{spec.context()}: give max_new_tokens = {max(0, spec.max_positions - longest)} at most, or shorten it"
        )


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
        if value is None or _ignores_prompt(one) or _keeps_more(one):
            return None
        found[name] = value
    return found if does_sample else {**found, "temperature": 0.0}


def _ignores_prompt(penalty: Any) -> bool:
    """Whether a repetition penalty leaves (part of) the prompt out. A length for each row is that of its padding, which
    this engine never sees."""
    length = getattr(penalty, "prompt_ignore_length", None)
    return length is not None and not isinstance(length, Tensor) and length > 0


def _keeps_more(cut: Any) -> bool:
    """Whether a processor keeps several tokens whatever they are, or strikes none out."""
    return getattr(cut, "min_tokens_to_keep", 1) > 1 or getattr(cut, "filter_value", -inf) != -inf


def _of_row(one: Any, row: int, num_rows: int) -> Any:
    """A processor as transformers makes it for a whole batch, for one row of it. Raises ConfigError where that is not
    known how."""
    mine, kinds = copy(one), {kind.__name__ for kind in type(one).__mro__}
    lengths = getattr(one, "prompt_ignore_length", None)
    if isinstance(lengths, Tensor):
        mine.prompt_ignore_length = lengths[row : row + 1]
    if "PrefixConstrainedLogitsProcessor" in kinds:
        allowed = _made(one, "_prefix_allowed_tokens_fn")
        mine._prefix_allowed_tokens_fn = lambda _, text: allowed(row, text)
    if "EncoderRepetitionPenaltyLogitsProcessor" in kinds:
        texts = _made(one, "encoder_input_ids")
        text = row * len(texts) // num_rows  # there may be several rows for each
        mine.encoder_input_ids = texts[text : text + 1]
    if "EncoderNoRepeatNGramLogitsProcessor" in kinds:
        ngrams = _made(one, "generated_ngrams")
        mine.generated_ngrams, mine.batch_size = [ngrams[row * len(ngrams) // num_rows]], 1
    return mine


def _made(one: Any, name: str) -> Any:
    value = getattr(one, name, None)
    if value is None:
        raise ConfigError(
            f"{type(one).__name__} of this version of transformers is not for this loop: it has no {name}"
        )
    return value


def _processor(processors: Sequence[Any], padding: Sequence[int]) -> LogitsProcessor:
    """transformers' own processors of one row, on its text with its padding, as ``generate`` calls them."""
    begin = torch.tensor(padding, dtype=torch.int64)

    def process(known: Tensor, logits: Tensor) -> Tensor:
        text = torch.cat([begin.to(known.device), known])[None]
        scores = logits[None].float()
        for one in processors:
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


STOPS = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that are read from the generation configuration."""
SETTINGS = {
    "output_scores": "scores are not kept",
    "output_logits": "logits are not kept",
    "output_attentions": "attention weights are not kept",
    "output_hidden_states": "hidden states are not kept",
    "return_dict_in_generate": "the sequences alone are returned",
    "penalty_alpha": "contrastive search is another loop",
    "dola_layers": "DoLa is another loop",
    "constraints": "constrained beam search is another loop",
    "force_words_ids": "constrained beam search is another loop",
    "use_mtp": "name a method where the loop is made, e.g. Speculative('mtp')",
    "prompt_lookup_num_tokens": "name a method where the loop is made, e.g. Speculative('ngram')",
    "assistant_early_exit": "name a method where the loop is made, e.g. Speculative('kangaroo')",
}
"""Fields of a generation configuration that would change the output, and why not here."""
PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale needs a second pass over every text",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance needs a second row for every text",
    "SynthIDTextWatermarkLogitsProcessor": "a SynthID watermark remembers the calls before, and guesses are calls too",
}
"""Logits processors that are no function of one text and its scores."""
INPUTS = {
    "attention_mask", "position_ids", "past_key_values", "cache_params", "use_cache", "logits_to_keep", "inputs_embeds",
    "assistant_model", "synced_gpus", "token_type_ids", "mm_token_type_ids", *SETTINGS,
}  # fmt: skip
"""Inputs of a model that are read, or checked to say nothing."""


def check_settings(config: Any, num_rows: int, streamer: Any) -> None:
    """Raises ConfigError for a generation configuration that asks for another loop, or for what is not kept."""
    for name, reason in SETTINGS.items():
        if getattr(config, name, None):
            raise ConfigError(f"{name} is not for this loop: {reason}")
    for name in ("num_beams", "num_beam_groups"):
        if (getattr(config, name, 1) or 1) > 1:
            raise ConfigError(f"{name} is not for this loop: texts are sampled, or greedy")
    if "quantized" in str(getattr(config, "cache_implementation", "")):
        raise ConfigError("cache_implementation='quantized' is not for this loop: it keeps keys and values as they are")
    if streamer is not None and num_rows > 1:
        raise ConfigError(f"a streamer shows one text, and {num_rows} were given")


def check_calls(processors: Sequence[Any], criteria: Sequence[Any]) -> None:
    """Raises ConfigError for a logits processor or stopping criterion that cannot be asked about single texts."""
    for one in processors:
        for kind in type(one).__mro__:
            if kind.__name__ in PROCESSORS:
                raise ConfigError(f"{type(one).__name__} is not for this loop: {PROCESSORS[kind.__name__]}")
    for one in criteria:
        if type(one).__name__ not in STOPS:
            raise ConfigError(
                f"the stopping criterion {type(one).__name__} is not for this loop: cut the text afterwards"
            )


def check_inputs(given: Mapping[str, Any], mask: Tensor) -> None:
    """Raises ConfigError for a model's inputs that this loop would not hand on. mask [B, L] int64: 0 where padded."""
    if given.get("assistant_model") is not None:
        raise ConfigError("give the draft model where the loop is made: Speculative(draft=model)")
    if given.get("synced_gpus"):
        raise ConfigError("synced_gpus is not for this loop: the processes of a model would decode different steps")
    for name in ("past_key_values", "cache_params"):
        cache = given.get(name)
        if cache is None:
            continue
        if "Quantized" in type(cache).__name__:
            raise ConfigError(f"{type(cache).__name__} is not for this loop: it keeps keys and values as they are")
        if getattr(cache, "get_seq_length", lambda: 0)() > 0:
            raise ConfigError(f"{name} is not for this loop: give the whole prompt")
    if given.get("inputs_embeds") is not None:
        raise ConfigError("inputs_embeds is not for this loop: give input_ids")
    for name, value in given.items():
        if name not in INPUTS and value is not None:
            raise ConfigError(f"{name} is not for this loop: a model is given token ids and their mask alone")
    for name in ("token_type_ids", "mm_token_type_ids"):
        kinds = given.get(name)
        if kinds is not None and bool(kinds.any()):
            raise ConfigError(f"{name} is not for this loop: a model is given token ids and their mask alone")
    places, real = given.get("position_ids"), mask.bool()
    if places is not None and not torch.equal(
        places.expand(mask.shape)[real] if places.dim() == mask.dim() else places, (mask.cumsum(-1) - 1)[real]
    ):
        raise ConfigError("position_ids is not for this loop: positions count the tokens of a text from 0 on")
