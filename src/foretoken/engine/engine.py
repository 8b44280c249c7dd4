"""The engine: requests in, completions out. ``step.py`` is the decoding; this file is what surrounds it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from foretoken.draft.base import Method, PromptChunk
from foretoken.draft.stopping import can_stop, check_stop
from foretoken.engine.config import speculative_config
from foretoken.engine.method import Loader, MethodConfig
from foretoken.engine.result import Completion, Timing
from foretoken.engine.state import Piece, Row, State
from foretoken.engine.step import step
from foretoken.engine.tapping import Tapping
from foretoken.engine.text import TextStream, Tokenizer
from foretoken.engine.vocabulary import check_vocabulary
from foretoken.errors import ConfigError, PromptError, nearest
from foretoken.model.load import load_model, load_tokenizer
from foretoken.model.prefill import feed, round_up
from foretoken.model.target import CausalModel, Target
from foretoken.noise import derive_seed
from foretoken.sampling import Processors, SamplingParams

Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True)
class Request:
    """One thing to complete."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    prediction: Prompt | None = None  # the caller's guess of the output, for the method ``prediction``


class Engine:
    """A target, a tokenizer, and a way of guessing. Batches run one after the other; one thread."""

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Tokenizer | None = None,
        *,
        speculative: MethodConfig | Mapping[str, Any] | str | None = None,
        method: Method | None = None,
        width: int = 0,
    ) -> None:
        """model is loaded; method, if given, is the loaded method of the configuration (else it is loaded here).

        width > 0 runs every decode pass with that many nodes a row (see ``step``). Raises ConfigError, ModelError.
        """
        self.model, self.tokenizer, self.width = model, tokenizer, width
        self.speculative = speculative_config(speculative)
        needed = self.speculative.max_nodes
        if width < 0 or 0 < width < needed:
            raise ConfigError(
                f"width = {width} must be 0 (off) or at least {needed}: the root and as many guesses as a step may make"
            )
        self.method = method if method is not None else self.speculative.load(Loader(model, self.load_draft))
        check_stop(self.method, self.speculative.proposal_shape)
        self.verifier = self.speculative.load_verifier(model)
        self.timing = Timing()

    @classmethod
    def load(
        cls,
        target: str = "bundled",
        *,
        speculative: MethodConfig | Mapping[str, Any] | str | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        implementation: str = "auto",
        tensor_parallel: bool = False,
        width: int = 0,
    ) -> "Engine":
        """Load a target by hub id or directory ("bundled": the one that comes with foretoken), and its drafter.

        tensor_parallel: this process's shard of the target, and the whole drafter; started by torchrun, every process
        makes the same calls (docs/parallel.md).
        """
        config = speculative_config(speculative)
        model = load_model(
            target,
            dtype=dtype,
            device=device,
            device_map=device_map,
            implementation=implementation,
            tensor_parallel=tensor_parallel,
        )
        return cls(model, load_tokenizer(target), speculative=config, width=width)

    def with_method(
        self, speculative: MethodConfig | Mapping[str, Any] | str | None, *, method: Method | None = None
    ) -> "Engine":
        """The same target and tokenizer with another way of guessing; a draft model of the same name is shared."""
        config = speculative_config(speculative)
        mine = self.speculative
        if (
            method is None
            and config.method == mine.method
            and getattr(config, "model", None) == getattr(mine, "model", None)
        ):
            reload = {"num_speculative_tokens", "verify", "shape", "draws", "judge"}
            changed = {key for key, value in config.resolved().items() if mine.resolved()[key] != value}
            method = self.method if changed <= reload else None
            if method is not None and not can_stop(method, config.proposal_shape):
                method = None  # loaded for a shape that asks no acceptance head
        return Engine(self.model, self.tokenizer, speculative=config, method=method, width=self.width)

    def load_draft(self, name: str) -> CausalModel:
        """A draft model by name or directory, its vocabulary compared with the target's. Raises ModelError."""
        spec = self.model.spec
        if self.tokenizer is not None:
            tokenizers: list[Any] = [self.tokenizer, load_tokenizer(name)]
            check_vocabulary(*tokenizers, target_name=spec.name, draft_name=name)
        dtype = str(spec.dtype).removeprefix("torch.")
        implementation = "transformers" if spec.implementation == "transformers" else "auto"
        return load_model(name, dtype=dtype, device=str(spec.device), implementation=implementation)

    # -- requests ------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, prediction: Prompt | None = None, **options: Any
    ) -> Completion:
        """Complete one prompt. options are fields of SamplingParams, e.g. ``temperature=0.7, seed=1``."""
        return self.generate_batch([Request(prompt, _params(params, options), prediction)])[0]

    def generate_batch(
        self,
        requests: Sequence[Request | Prompt],
        *,
        batch_size: int = 8,
        on_completion: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Complete many, at most batch_size at a time, in order. A request's tokens do not depend on company.

        on_completion(index of the request, completion) is called for each as soon as it has ended.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} must be at least 1")
        whole = [request if isinstance(request, Request) else Request(request) for request in requests]
        completions: list[Completion] = []
        for start in range(0, len(whole), batch_size):
            rows = [
                self.make_row(index, request) for index, request in enumerate(whole[start : start + batch_size], start)
            ]
            ended: dict[int, Completion] = {}
            for _ in self._decode(rows):
                for row in rows:
                    if row.finish_reason is not None and row.index not in ended:
                        ended[row.index] = self._completion(row)
                        if on_completion is not None:
                            on_completion(row.index, ended[row.index])
            completions += [ended[row.index] for row in rows]
        return completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, prediction: Prompt | None = None, **options: Any
    ) -> "Stream":
        """Complete one prompt, yielding a Piece a token; ``.completion`` is there at the end (and, partial, before)."""
        return Stream(self, self.make_row(0, Request(prompt, _params(params, options), prediction)))

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's chat template. Raises ConfigError where it has none."""
        template = getattr(self.tokenizer, "apply_chat_template", None)
        if template is None or getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(f"{self.model.spec.name!r} has no chat template: give the prompt as plain text")
        text = template(list(messages), tokenize=False, add_generation_prompt=True)
        return self._encode(text, add_special_tokens=False)

    def _encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ConfigError("a text was given to an engine without a tokenizer: give token ids")
        return list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def make_row(self, index: int, request: Request) -> Row:
        """A request as it is decoded: tokens, end tokens, seed, limits. Raises PromptError, ConfigError."""
        spec, params = self.model.spec, request.params
        ids = self._encode(request.prompt)
        guess = [] if request.prediction is None else self._encode(request.prediction, add_special_tokens=False)
        if not ids:
            raise PromptError("the prompt is empty: at least one token is needed")
        for token in (*ids, *guess):
            if not 0 <= token < spec.vocab_size:
                raise PromptError(
                    f"token id {token} is not in the vocabulary of {spec.name!r}: 0 to {spec.vocab_size - 1}"
                )
        if len(ids) >= spec.max_positions:
            raise PromptError(
                f"the prompt has {len(ids)} tokens; {spec.name!r} has a context of {spec.max_positions}, and at least one "
                "token of it must be left for the output: shorten the prompt"
            )
        seed = self.model.fresh_seed() if params.seed is None else params.seed
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else spec.eos_token_ids)}
        return Row(
            index=index,
            prompt_ids=ids,
            params=replace(params, seed=seed),  # reported, so that a fresh one can be given again
            seed=derive_seed(seed),
            end_ids=frozenset(end_ids),
            max_tokens=min(params.max_new_tokens, spec.max_positions - len(ids)),
            text=TextStream(self.tokenizer, params.stop),
            prediction=guess,
        )

    # -- decoding ------------------------------------------------------------------------------------------------

    def _decode(self, rows: list[Row]) -> Iterator[None]:
        """Decode rows together until all have ended; yields after every step."""
        spec = self.model.spec
        speculative = self.speculative
        shape, draws, verifier = speculative.proposal_shape, speculative.proposal_draws, self.verifier
        tapping = Tapping(self.method.taps, verifier.taps)
        grown = max(speculative.max_nodes, shape.max_grown + 1)
        need = max(len(row.prompt_ids) + row.max_tokens for row in rows) + max(self.width, grown)
        capacity = round_up(need, 512 if self.width else 64)
        processors = Processors(
            [row.params for row in rows],
            vocab_size=spec.vocab_size,
            end_token_ids=spec.eos_token_ids,
            device=spec.device,
        )
        with torch.inference_mode():
            begun = perf_counter()
            target = Target(self.model, len(rows), capacity)
            state = State.open(rows, processors, capacity, self.method.name)
            drafter = self.method.open(state, capacity, target)
            if any(state.lengths):
                span_multiple = 512 if self.width else 64
                known = [row.prompt_ids[:-1] for row in rows]
                feed(
                    target,
                    known,
                    [0] * len(rows),
                    head=False,
                    span_multiple=span_multiple,
                    taps=self.method.prompt_taps,
                    on_chunk=lambda start, count, taps: drafter.read_prompt(PromptChunk(start, count, taps)),
                )
            decoding = perf_counter()
            for row in rows:
                row.seconds_prefill = decoding - begun
        while True:
            with torch.inference_mode():
                report = step(state, target, drafter, verifier, shape, draws, width=self.width, tapping=tapping)
            self.timing.add(report)
            now = perf_counter()
            for row in state.rows:
                row.seconds_decode = now - decoding
            going = [index for index, row in enumerate(state.rows) if row.finish_reason is None]
            yield
            if not going:
                return
            if len(going) < len(state.rows):
                with torch.inference_mode():
                    state.keep(going)
                    target.keep(torch.tensor(going, device=spec.device))
                    drafter.keep(going)

    def _completion(self, row: Row) -> Completion:
        return Completion.of(row, self.resolved())

    def resolved(self) -> dict[str, Any]:
        """What runs: names, implementation, dtype, device, method and verifier, as --json reports it."""
        spec = self.model.spec
        return {
            "target": spec.name,
            "architecture": spec.architecture,
            "implementation": spec.implementation,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": str(spec.device),
            "width": self.width,
            "exact": self.speculative.verifier.exact,
            "speculative": self.speculative.resolved(),
        }


class Stream(Iterator[Piece]):
    """Pieces of one completion as they are made."""

    def __init__(self, engine: Engine, row: Row) -> None:
        self._engine, self._row = engine, row
        self._steps = engine._decode([row])
        self._given = 0

    def __next__(self) -> Piece:
        """The next token. Raises StopIteration after the last."""
        while self._given == len(self._row.pieces):
            next(self._steps)
        self._given += 1
        return self._row.pieces[self._given - 1]

    def close(self) -> None:
        """Stop decoding and free the cache."""
        self._steps.close()  # type: ignore[attr-defined]

    @property
    def completion(self) -> Completion:
        """The completion so far; whole once the iterator is exhausted."""
        return self._engine._completion(self._row)


def _params(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    known = SamplingParams.__dataclass_fields__
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown sampling option {key!r}{nearest(key, known)}")
    return replace(params or SamplingParams(), **options)
