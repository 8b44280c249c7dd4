"""Suffix guesses and predicted outputs inside vLLM, through its interface for proposers of other packages.

::

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                                            "model": "foretell.adapters.vllm.Proposer"}'

vLLM checks the guesses itself: they change its speed, not its text. The proposer is given the texts of the batch and no
more, so it knows a request by its last tokens. With ``--worker-cls foretell.adapters.vllm.Worker`` it reads requests as
well, and a request may bring its ``PREDICTION`` (vLLM's ``vllm_xargs``): a guess of the whole output.

vLLM itself is imported by ``Worker`` alone.
"""

import importlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretell.core.errors import ConfigError
from foretell.draft.native import new_automaton
from foretell.draft.prediction import PredictionFollower
from foretell.draft.suffix import MAX_MATCH, Library, SuffixConfig, SuffixRow, best_of_sources

PREDICTION = "foretell_prediction"
"""Key of a request's extra arguments: a text, or its token ids."""
OPTIONS = "foretell"
"""Key of vLLM's ``additional_config``: a mapping of options of the method "suffix"."""
TAIL = 64
"""Last tokens by which a text is found again. Two texts of one length that end in as many equal tokens may be taken for
each other: a guess is then worse, never wrong."""
MAX_PARKED, MAX_PARKED_TOKENS = 256, 1 << 18
"""Texts that are kept though their requests are not in the batch, and their tokens together (some 500 bytes each): vLLM may
have set them aside for a while."""

WORKERS = {"cpu": ("vllm.v1.worker.cpu_worker", "CPUWorker"), "cuda": ("vllm.v1.worker.gpu_worker", "Worker")}
"""vLLM's own workers: module and class."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Named:
    """What is known of a request where vLLM's own requests can be read."""

    name: str
    num_prompt: int
    prediction: Sequence[int] | str | None = None


class Text:
    """One request's tokens so far, and where guesses for it come from."""

    def __init__(self, tokens: Sequence[int], num_prompt: int, prediction: Sequence[int] | None, window: int) -> None:
        self.suffix = SuffixRow(list(tokens), num_prompt, new_automaton(window))
        self.suffix.read()
        self.follower = None if prediction is None else PredictionFollower(prediction)
        self.entered = num_prompt  # up to here the output is in the library
        if self.follower is not None:
            self.follower.extend(self.suffix.text[num_prompt:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that vLLM has emitted."""
        self.suffix.text.extend(tokens)
        self.suffix.read()
        if self.follower is not None:
            self.follower.extend(tokens)

    def output(self) -> list[int]:
        """What the library has not got yet."""
        fresh = self.suffix.text[self.entered :]
        self.entered = len(self.suffix.text)
        return fresh


class Guesser:
    """The texts of a batch from step to step, and the outputs that have ended."""

    def __init__(self, config: SuffixConfig) -> None:
        self.options, self.most = config.options, config.num_speculative_tokens
        self.library = Library(self.options.max_cached_tokens, MAX_MATCH)
        self.texts: dict[Hashable, list[Text]] = {}  # by what they are found by; equal ones may be several
        self.parked: dict[Hashable, Text] = {}

    def step(self, rows: Sequence[tuple[NDArray[np.integer[Any]], int, Named | None]], room: int) -> list[list[int]]:
        """Guesses for each row, at most ``num_speculative_tokens`` and as many as leave one of ``room`` tokens free.

        rows: (tokens [L], how many of them were emitted in this step, what is known of the request). A row with none
        emitted is still reading its prompt and gets no guess.
        """
        going: dict[Hashable, list[Text]] = {}
        found: list[Text | None] = []
        for tokens, num_new, named in rows:
            text = self._text(tokens, num_new, named) if num_new else None
            found.append(text)
            if text is not None:
                going.setdefault(_key(tokens, len(tokens), named), []).append(text)
        # What is not in the batch has ended, or waits: its output is remembered now, and it may come back.
        for key, texts in self.texts.items():
            for text in texts:
                self.library.add(text.output())
                self.parked[key] = text
        held = sum(len(text.suffix.text) for text in self.parked.values())
        for key in list(self.parked):
            if len(self.parked) <= MAX_PARKED and held <= MAX_PARKED_TOKENS:
                break
            held -= len(self.parked.pop(key).suffix.text)
        self.texts = going
        return [[] if text is None else self._guess(text, room) for text in found]

    def _text(self, tokens: NDArray[np.integer[Any]], num_new: int, named: Named | None) -> Text:
        """The text of a row, with the tokens of this step."""
        before = len(tokens) - num_new
        key = _key(tokens, before, named)
        same = self.texts.get(key)
        text = same.pop() if same else self.parked.pop(key, None)
        if text is None or len(text.suffix.text) != before:
            num_prompt = before if named is None else min(named.num_prompt, before)
            prediction = None if named is None else named.prediction
            assert not isinstance(prediction, str)
            text = Text(tokens[:before].tolist(), num_prompt, prediction, MAX_MATCH)
        text.extend(tokens[before:].tolist())
        return text

    def _guess(self, text: Text, room: int) -> list[int]:
        most = min(self.most, room - len(text.suffix.text) - 1)
        if most < 1:
            return []
        predicted = text.follower.guess(most) if text.follower is not None else []
        if predicted:
            return predicted
        nodes, _ = best_of_sources(text.suffix, self.library, self.options, depth=most, size=most, width=1)
        return [token for _, token in nodes]


def _key(tokens: NDArray[np.integer[Any]], length: int, named: Named | None) -> Hashable:
    """By what the text is found that has so many of the tokens."""
    return named.name if named is not None else (length, tokens[max(0, length - TAIL) : length].tobytes())


class Proposer:
    """What vLLM makes from ``{"method": "custom_class", "model": "foretell.adapters.vllm.Proposer"}``."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises ConfigError for options that are not those of the method "suffix"."""
        model = vllm_config.model_config
        self.guesser = Guesser(config_of(vllm_config))
        self.max_model_len, self.vocab_size = int(model.max_model_len), int(model.get_vocab_size())
        self._model_config = model
        self._named: Callable[[int], Named | None] = lambda _: None
        self._refused: set[str] = set()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def bind(self, runner: Any) -> None:
        """Read requests from vLLM's runner: see ``Worker``."""
        self._named = lambda row: self._request(runner, row)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """At most ``num_speculative_tokens`` guesses a row.

        sampled_token_ids: of each row the tokens of this step, none while its prompt is read. num_tokens_no_spec [R]:
        tokens of each row, those of this step too. token_ids_cpu [R, max_model_len]: the rows' tokens.
        """
        rows = []
        for row, new in enumerate(sampled_token_ids):
            tokens = np.asarray(token_ids_cpu[row, : int(num_tokens_no_spec[row])])
            rows.append((tokens, len(new), self._named(row) if len(new) else None))
        return self.guesser.step(rows, self.max_model_len)

    def _request(self, runner: Any, row: int) -> Named | None:
        name = runner.input_batch.req_ids[row]
        request = runner.requests[name]
        params = request.sampling_params
        given = (getattr(params, "extra_args", None) or {}).get(PREDICTION)
        if name in self.guesser.texts or given is None:
            return Named(name, int(request.num_prompt_tokens))
        return Named(name, int(request.num_prompt_tokens), self._prediction(given, name))

    def _prediction(self, given: Any, name: str) -> list[int] | None:
        """The prediction's token ids; None, with a warning, for what cannot be one: an error here would end the server."""
        ids = given
        if isinstance(given, str):
            try:
                given.encode()  # tokenizers raise a TypeError for half a surrogate pair
                ids = self._tokenizer().encode(given, add_special_tokens=False)
            except UnicodeEncodeError:
                ids = None
        if not isinstance(ids, Sequence) or not all(type(one) is int and 0 <= one < self.vocab_size for one in ids):
            if name not in self._refused:
                logger.warning("request %s: %s must be a text or its token ids: it is not used", name, PREDICTION)
            self._refused = {name}
            return None
        return list(ids[: self.max_model_len])

    def _tokenizer(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self._model_config)


def config_of(vllm_config: Any) -> SuffixConfig:
    """The options of vLLM's configuration. Raises ConfigError."""
    extra = getattr(vllm_config, "additional_config", None) or {}
    given = extra.get(OPTIONS, {}) if isinstance(extra, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"additional_config[{OPTIONS!r}] must be a mapping of options; got {given!r:.80}")
    known = [name for name in SuffixConfig.__dataclass_fields__ if name.startswith("suffix_decoding_")]
    for name in given:
        if name not in known:
            raise ConfigError(f"additional_config[{OPTIONS!r}]: unknown option {name!r}; there are {', '.join(known)}")
    return SuffixConfig(num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens, **given)


def __getattr__(name: str) -> Any:
    """``Worker``, made when vLLM asks for it: a subclass of the platform's own."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vllm.platforms import current_platform
    except ImportError:
        raise ConfigError("foretell.adapters.vllm.Worker runs inside vLLM, which is not installed here") from None
    found = globals()["Worker"] = worker_class(current_platform)
    return found


def worker_class(platform: Any) -> type:
    """The platform's worker, which shows its requests to the proposer once the models are loaded."""
    module, name = WORKERS["cpu" if platform.is_cpu() else "cuda"]
    base: type = getattr(importlib.import_module(module), name)
    return type("Worker", (base,), {"__module__": __name__, "load_model": _load_and_bind(base)})


def _load_and_bind(base: Any) -> Callable[..., None]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        base.load_model(self, *args, **kwargs)
        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, Proposer):
            raise ConfigError(
                f"--worker-cls {__name__}.Worker needs the proposer of {__name__}: give that in --speculative-config"
            )
        drafter.bind(self.model_runner)

    return load_model
