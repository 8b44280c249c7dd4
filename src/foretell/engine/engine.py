"""The engine: requests in, completions out. ``request/request.py`` prepares them, ``step.py`` decodes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import torch

from foretell.checkpoints.ends import with_tokenizer
from foretell.checkpoints.lora import read_loras
from foretell.checkpoints.names import check_cuda_graphs
from foretell.core.errors import ConfigError, require
from foretell.core.params import SamplingParams, check_speculation, params_of
from foretell.core.places import tells_places
from foretell.core.progress import Lines, Listener, listening
from foretell.core.settings import check_keys, field_kinds, value_of
from foretell.costs.table import CostTable
from foretell.draft.base import Method
from foretell.draft.config import Loader, MethodConfig
from foretell.engine.captured import graphs_of
from foretell.engine.config import speculative_config, with_draft
from foretell.engine.event import Observer
from foretell.engine.failures import Failures, RaisedFailures
from foretell.engine.loop import Limits, Loop
from foretell.engine.methods import Methods, with_named_draft
from foretell.engine.planning import Planning
from foretell.engine.prefix import PrefixStore
from foretell.engine.recorder import Recorder
from foretell.engine.request.conversation import render
from foretell.engine.request.request import Prompt as Prompt, Request as Request, check_several, row_of, submission_of
from foretell.engine.request.result import Completion
from foretell.engine.request.row import Piece, Row, Submission
from foretell.engine.request.scoring import Scoring
from foretell.engine.request.text import Tokenizer
from foretell.engine.speculation import Speculation, check_together
from foretell.engine.structured.format import Formats
from foretell.model.load import LoraGiven, ModelInMemory, as_model, load_model, load_tokenizer, named_loras
from foretell.model.prefill import round_up
from foretell.planner.planner import Planner

DRAFTER_ERRORS: dict[str, type[Failures]] = {"plain": Failures, "raise": RaisedFailures}


class Engine:
    """A target, a tokenizer and a speculation method. Not thread-safe; every call decodes its requests before it
    returns.

    ``observers`` are called with the ``StepEvent`` of every step; ``recorder`` holds the totals of all steps.
    """

    @tells_places
    def __init__(
        self,
        model: ModelInMemory,
        tokenizer: Tokenizer | None = None,
        *,
        speculative: MethodConfig | Mapping[str, Any] | str | None = None,
        draft: ModelInMemory | None = None,
        draft_tokenizer: Tokenizer | None = None,
        method: Method | None = None,
        width: int = 0,
        prefix_memory_gib: float = 0.0,
        speculation: str = "on",
        drafter_errors: str = "plain",
        cuda_graphs: str = "auto",
        trust_remote_code: bool = False,
        lora: str | None = None,
    ) -> None:
        """model: a loaded model, of foretell or of transformers. draft: a loaded draft model, which the configuration
        names by ``draft.spec.name``. draft_tokenizer: as for ``load``; None: for a model in memory the target's. method:
        the loaded method of the configuration; None: load it here. lora: the adapter, one of ``model.loras``, of requests
        that name none. End tokens that the tokenizer or its chat template knows are added to ``model.spec``. All other
        options are those of ``load``; processes that share a model raise DrafterError whatever ``drafter_errors`` is.
        Raises ConfigError, ModelError.
        """
        width = value_of(width, int, "width")
        prefix_memory_gib = value_of(prefix_memory_gib, float, "prefix_memory_gib")
        self.model, self.tokenizer, self.width = as_model(model), tokenizer, width
        model = self.model
        check_cuda_graphs(cuda_graphs)
        self.cuda_graphs, self.lora = cuda_graphs, lora
        model.lora_of(lora)  # raises for one that is not loaded
        ends = with_tokenizer(model.spec.eos_token_ids, model.spec.vocab_size, tokenizer)
        model.spec = replace(model.spec, eos_token_ids=ends, cuda_graphs=cuda_graphs == "auto")
        given = None if draft is None else as_model(draft)
        self._methods = Methods(model, tokenizer, given, draft_tokenizer, trusts_code=trust_remote_code)
        check_speculation(speculation)
        require(drafter_errors in DRAFTER_ERRORS, "drafter_errors", drafter_errors, "'plain' or 'raise'")
        if speculation == "auto" and model.is_shared:
            raise ConfigError(
                "speculation = 'auto' measures what passes cost, each process by its own clock, so processes that share a "
                "model would decode different steps: give 'on'"
            )
        config = speculative_config(speculative)
        if given is not None and config.method == "draft_model" and getattr(config, "model", "") is None:
            config = with_named_draft(config, given.spec.name)  # not the bundled one in its place
        self.speculative = self._config(config)
        self._check_width(self.speculative)
        if method is not None:
            self._methods.hold(self.speculative, method)
        choice = self._methods.choice(self.speculative)
        self.method, self.verifier = choice.method, choice.verifier
        self.recorder = Recorder()
        self.observers: list[Observer] = []
        self.observes_draft_logits = False  # whether events carry the draft's logits: a copy a step
        if prefix_memory_gib < 0:
            raise ConfigError(f"prefix_memory_gib = {prefix_memory_gib} must not be negative; 0 keeps nothing")
        self._prefixes = PrefixStore(int(prefix_memory_gib * 2**30)) if prefix_memory_gib else None
        self.speculation, self.drafter_errors = speculation, drafter_errors
        # Processes that share a model draft the same guesses: one of them cannot go on without.
        self._failures = DRAFTER_ERRORS["raise" if model.is_shared else drafter_errors]()
        self._planning = Planning(model) if speculation == "auto" else None
        self.formats = Formats(tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)

    @classmethod
    @tells_places
    def load(
        cls,
        target: str | PathLike[str] | ModelInMemory = "bundled",
        *,
        speculative: MethodConfig | Mapping[str, Any] | str | None = None,
        draft: str | PathLike[str] | ModelInMemory | None = None,
        draft_tokenizer: Tokenizer | None = None,
        tokenizer: Tokenizer | None = None,
        device: str = "cpu",
        dtype: str | None = None,
        device_map: str | dict[str, Any] | None = None,
        implementation: str = "auto",
        tensor_parallel: bool = False,
        width: int = 0,
        prefix_memory_gib: float = 0.0,
        speculation: str = "on",
        drafter_errors: str = "plain",
        cuda_graphs: str = "auto",
        weights: str = "auto",
        kv: str = "auto",
        memory_gib: float | None = None,
        trust_remote_code: bool = False,
        lora: LoraGiven = None,
        progress: bool | Listener = False,
    ) -> "Engine":
        """Load a target and its drafter.

        target: a hub id, a directory, a GGUF file, a name of the catalogue ("bundled" comes with foretell), or a model in
            memory, of transformers or of foretell, which stays as it is.
        speculative: the method, verifier and shape, with vLLM's keys; a name alone is a method. None: no guesses.
        draft: the draft model, named as target is, or in memory; the method is then draft_model where none is named.
        draft_tokenizer: of a draft with another vocabulary (``DraftModelConfig.vocabulary``). None: the one beside it.
        tokenizer: None takes the one beside the target's files; of a model in memory texts need it given.
        device: "cpu", "cuda", "cuda:1", "mps", ...
        dtype: "float32", "bfloat16", "float16" or "auto", the checkpoint's own. None: that on accelerators, else float32.
        device_map: accelerate's, for a target larger than one device.
        implementation: "native", "lean", "transformers", or "auto", the fastest that runs this target here.
        tensor_parallel: this process's shard of the target, and the whole drafter; torchrun starts the processes, which
            make the same calls (docs/parallel.md).
        width: above 0 every decode pass has that many nodes a row, so that all passes agree bit for bit (``step``).
        prefix_memory_gib: how much KV of texts is kept for prompts that begin alike.
        speculation: "on" guesses as deep as ``speculative`` says; "auto" measures costs at the first call (seconds,
            remembered), and then decides before every step how deep guessing pays, or not at all.
        drafter_errors: where a drafter fails, "plain" warns in the log and goes on without guesses, with the same text
            (``Completion.plain_reason``; after several failures in a row the method rests); "raise" raises DrafterError.
        cuda_graphs: "auto" launches what a step asks of a CUDA device as captured graphs, where that can be; "off": not.
        weights: "auto", "fp32", "bf16", "int8", "int4" or "least" (``load_model``); with rounded ones the text follows the
            rounded model's distribution.
        kv: "auto", or "int8": rounded keys and values in about half the memory.
        memory_gib: for all of the target. A mixture that does not fit leaves experts in its files, and reads them as they
            are needed (``load_model``).
        trust_remote_code: run the Python code that models come with.
        lora: adapters of the target as peft saves them: {name: directory, ...}, of which each request may name one
            (``generate(..., lora=name)``), or one directory for all requests.
        progress: True writes to standard error what is loaded, its share and the time; a function is called with the first
            two (a share is 0 to 1).

        Raises ConfigError for options that do not fit together, ModelError for models that cannot be found or run.
        """
        with listening(Lines() if progress is True else progress or None):
            given = None if draft is None or isinstance(draft, str | PathLike) else as_model(draft)
            named = draft if isinstance(draft, str | PathLike) else None if given is None else given.spec.name
            config = with_named_draft(speculative, named)
            if isinstance(target, str | PathLike):
                name = fspath(target)
                model = load_model(
                    name, dtype=dtype, device=device, device_map=device_map, implementation=implementation,
                    tensor_parallel=tensor_parallel, weights=weights, kv=kv, memory_gib=memory_gib,
                    trust_remote_code=trust_remote_code, lora=lora,
                )  # fmt: skip
                if tokenizer is None:
                    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
            else:
                if (dtype, device_map, implementation, tensor_parallel, weights, kv, memory_gib) != (
                    None, None, "auto", False, "auto", "auto", None,
                ) or device != "cpu":  # fmt: skip
                    raise ConfigError(
                        "a target in memory stays as it is: leave out device, dtype, device_map, implementation, weights, "
                        "kv, memory_gib and tensor_parallel, or give its directory"
                    )
                model = as_model(target)
                if lora is not None and model.loras:
                    raise ConfigError(
                        f"the target in memory has adapters already ({', '.join(model.loras)}): leave out lora, and name "
                        "one of them in each request"
                    )
                if lora is not None:
                    model.add_loras(read_loras(named_loras(lora)))
            one = None if lora is None or isinstance(lora, Mapping) or not model.loras else model.loras[0]
            return cls(
                model, tokenizer, speculative=config, draft=given, draft_tokenizer=draft_tokenizer, width=width,
                prefix_memory_gib=prefix_memory_gib, speculation=speculation, drafter_errors=drafter_errors,
                cuda_graphs=cuda_graphs, trust_remote_code=trust_remote_code, lora=one,
            )  # fmt: skip

    @tells_places
    def with_method(
        self,
        speculative: MethodConfig | Mapping[str, Any] | str | None,
        *,
        method: Method | None = None,
        speculation: str | None = None,
        drafter_errors: str | None = None,
    ) -> "Engine":
        """An engine with the same target, tokenizer and kept prefixes and another method. A draft model of the same name is
        shared.
        speculation, drafter_errors: None keeps this engine's."""
        config = self._config(speculative)
        method = method or self._methods.held(config)
        made = Engine(
            self.model, self.tokenizer, speculative=config, draft=self._methods.given,
            draft_tokenizer=self._methods.given_tokenizer, method=method, width=self.width,
            speculation=speculation or self.speculation, drafter_errors=drafter_errors or self.drafter_errors,
            cuda_graphs=self.cuda_graphs, trust_remote_code=self._methods.trusts_code, lora=self.lora,
        )  # fmt: skip
        made.formats = self.formats
        made._prefixes = self._prefixes
        return made

    @property
    def loader(self) -> Loader:
        """What configurations load methods by."""
        return self._methods.loader

    # -- requests ------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, prediction: Prompt | None = None,
        lora: str | None = None, **options: Any,
    ) -> Completion:  # fmt: skip
        """Complete one prompt. lora: as in ``Request``; options are fields of SamplingParams, e.g. ``temperature=0.7,
        seed=1``."""
        return self.generate_batch([Request(prompt, _params(params, options), prediction, lora=lora)])[0]

    def generate_batch(
        self,
        requests: Sequence[Request | Prompt],
        params: SamplingParams | None = None,
        *,
        batch_size: int = 8,
        **options: Any,
    ) -> list[Completion]:
        """Complete many prompts, at most batch_size at a time, in order. A request's tokens do not depend on the other
        requests. params and options are of prompts that are no Request, as in ``generate``."""
        completions = dict(self.completions(requests, params, batch_size=batch_size, **options))
        return [completions[index] for index in range(len(completions))]

    def completions(
        self,
        requests: Sequence[Request | Prompt],
        params: SamplingParams | None = None,
        *,
        batch_size: int = 8,
        **options: Any,
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (index, completion) of each request as it ends. At most batch_size are decoded together; when one ends,
        the next takes its row. params and options are of prompts that are no Request, as in ``generate``. Raises
        ConfigError, PromptError before anything is decoded, ModelError where a request's probabilities are not finite."""
        require(value_of(batch_size, int, "batch_size") >= 1, "batch_size", batch_size, "at least 1")
        check_several(requests)
        shared = _params(params, options)
        whole = [request if isinstance(request, Request) else Request(request, shared) for request in requests]
        if (params is not None or options) and any(isinstance(request, Request) for request in requests):
            raise ConfigError("a Request has its own params: give the sampling options there, or give plain prompts")
        rows = [self.make_row(index, request) for index, request in enumerate(whole)]
        methods = {id(row.choice.method): row.choice.method for row in rows}.values()
        check_together(list(methods), [method.exit_layer for method in methods])
        return self._completions(rows, batch_size)

    def _completions(self, rows: Sequence[Row], batch_size: int) -> Iterator[tuple[int, Completion]]:
        if not rows:
            return
        for ended in self._decode(rows, batch_size):
            for row in ended:
                yield row.index, self._completion(row)

    def score(
        self, prompts: Sequence[Prompt], *, num_logprobs: int = 0, lora: str | None = None
    ) -> Iterator[list[Piece]]:
        """Yield the tokens of each prompt with the natural log of the model's own probability of each after those before
        it, before temperature and processors; the first has None. num_logprobs: of the most probable tokens, listed beside
        each. lora: as in ``Request``. A text is read alone and with no guesses, so its scores are the same with every
        method and batch. Of a text that begins like the one before it the beginning is not read again: sort many of them.

        Raises PromptError, ConfigError.
        """
        check_several(prompts)
        require(value_of(num_logprobs, int, "num_logprobs") >= 0, "num_logprobs", num_logprobs, "at least 0")
        made = [Request(prompt, lora=lora) for prompt in prompts]
        rows = [self.make_row(index, request, write=False) for index, request in enumerate(made)]
        return self._scores(rows, num_logprobs)

    def _scores(self, rows: Sequence[Row], num_logprobs: int) -> Iterator[list[Piece]]:
        last: Scoring | None = None
        for row in rows:
            last = Scoring(
                self.model, self.tokenizer, row.prompt_ids, num_logprobs, lora=row.submission.lora, after=last
            )
            with torch.inference_mode():
                while not last.read():
                    pass
            yield list(last.pieces)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, prediction: Prompt | None = None,
        lora: str | None = None, **options: Any,
    ) -> "Stream":  # fmt: skip
        """Complete one prompt, yielding a Piece per token. ``.completion`` is the completion so far, and whole at the
        end."""
        return Stream(self, self.make_row(0, Request(prompt, _params(params, options), prediction, lora=lora)))

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, parse_special: bool = False) -> list[int]:
        """Token ids of a conversation by the model's chat template. parse_special: markers such as ``<|im_end|>`` in
        messages count as tokens, not as text. Raises ConfigError where it has no template, PromptError where the template
        refuses the messages."""
        return render(messages, self.tokenizer, self.model.spec.name, parse_special=parse_special).ids()

    def make_row(self, index: int, request: Request, *, write: bool = True) -> Row:
        """A request as it is decoded. Raises PromptError, ConfigError, ModelError."""
        if request.lora is None and self.lora is not None:
            request = replace(request, lora=self.lora)
        submission = submission_of(str(index), request, self.tokenizer, write=write)
        choice = self.choice(request.speculative)
        self._check_width(choice.config)
        return self.row_of(index, submission, choice)

    def row_of(self, index: int, submission: Submission, choice: Speculation) -> Row:
        """See ``row_of``; the format of its parameters is compiled."""
        row = row_of(index, submission, choice, self.model, self.tokenizer)
        row.params = self.formats.applied(row.params, len(row.prompt_ids))
        return row

    def measure(self, num_rows: int = 1) -> CostTable | None:
        """With speculation="auto": measure now (seconds, remembered) what the first call would, for up to num_rows rows at
        once; None where nothing guesses. Else do nothing."""
        if self._planning is None:
            return None
        planner = self._planning.planner([Speculation(self.speculative, self.method, self.verifier)], num_rows)
        return None if planner is None else planner.costs

    # -- decoding ------------------------------------------------------------------------------------------------

    def _decode(self, rows: Sequence[Row], batch_size: int) -> Iterator[list[Row]]:
        """Decode rows, at most batch_size together; yields after every round those that ended in it."""
        num_rows = min(batch_size, len(rows))
        planner = None
        if self._planning is not None:
            planner = self._planning.planner([row.choice for row in rows], num_rows)
            for row in rows:
                row.choice = self._planning.used(row.choice)
        loop = self._loop(rows, num_rows, planner)
        for row in rows:
            loop.submit(row, None)
        while loop.has_work:
            with torch.inference_mode():
                ended = loop.tick()
            for row in ended:
                if row.error is not None:
                    raise row.error
            yield ended

    def _loop(self, rows: Sequence[Row], num_rows: int, planner: Planner | None) -> Loop:
        """A loop for these requests. Without a planner it reads no clock: its steps are a function of the requests."""
        grown = max(row.choice.num_nodes for row in rows)
        need = max(len(row.prompt_ids) + row.max_tokens for row in rows) + max(self.width, grown)
        capacity = round_up(need, 512 if self.width else 64)
        limits = Limits(num_rows, len(rows), (num_rows + 1) * capacity, capacity, stall_target_s=None)
        return Loop(
            self.model, limits, planner, prefixes=self._prefixes, width=self.width, observers=self.observers,
            draft_logits=self.observes_draft_logits, recorder=self.recorder, failures=self._failures, single_use=True,
        )  # fmt: skip

    def forget(self) -> None:
        """Drop what methods have learned from earlier requests; weights and settings stay. Not for the middle of a call."""
        self._methods.forget()
        if self.method.capabilities.learns:
            self.method = self.method.fresh()
            self._methods.hold(self.speculative, self.method)

    def choice(self, speculative: MethodConfig | Mapping[str, Any] | str | None = None) -> Speculation:
        """The method and verifier of a request: the engine's, or others, loaded at their first use.

        Raises ConfigError, ModelError.
        """
        config = self.speculative if speculative is None else self._config(speculative)
        if config == self.speculative:
            return Speculation(config, self.method, self.verifier)
        return self._methods.choice(config)

    def holds(self, config: MethodConfig) -> bool:
        """Whether the weights of a configuration are loaded."""
        return self._methods.held(self._config(config)) is not None

    def _config(self, speculative: MethodConfig | Mapping[str, Any] | str | None) -> MethodConfig:
        """With the draft model or head of this target, where none is named."""
        return with_draft(speculative_config(speculative), self.model.spec.name)

    def _check_width(self, config: MethodConfig) -> None:
        if self.width < 0 or 0 < self.width < config.max_nodes:
            raise ConfigError(
                f"width = {self.width} must be 0 (off) or at least {config.max_nodes}: the root and as many guesses as a "
                "step may make"
            )

    def _completion(self, row: Row) -> Completion:
        return Completion.of(row, self.resolved(row.choice))

    def resolved(self, choice: Speculation | None = None) -> dict[str, Any]:
        """What runs: names, implementation, dtype, device, method and verifier, as --json reports it."""
        choice = choice or self.choice()
        spec, config, head = self.model.spec, choice.config, choice.method.runs_as
        graphs = graphs_of(self.model, self.width)
        return {
            "target": spec.name,
            "architecture": spec.architecture,
            "implementation": spec.implementation,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "weights": spec.weights or str(spec.dtype).removeprefix("torch."),
            **({} if spec.kv == "auto" else {"kv": spec.kv}),
            "device": str(spec.device),
            "width": self.width,
            **({} if graphs is None else {"cuda_graphs": graphs}),
            "speculation": self.speculation,
            "exact": config.verifier.exact,
            "speculative": config.resolved(),
            **({} if head is None else {"head": head}),
            **({"reads_again": spec.reads_again} if spec.reads_again else {}),
            **({"loras": loras} if (loras := [*self.model.loras, *filter(None, [spec.merged])]) else {}),
        }


class Stream(Iterator[Piece]):
    """Pieces of one completion as they are made."""

    def __init__(self, engine: Engine, row: Row) -> None:
        self._engine, self._row = engine, row
        self._steps = engine._decode([row], 1)
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
    if params is not None and not isinstance(params, SamplingParams):
        raise ConfigError(f"params = {params!r} must be a SamplingParams, e.g. SamplingParams(temperature=0.7)")
    check_keys(options, field_kinds(SamplingParams), "in the sampling options")
    return params_of(options) if params is None else replace(params, **options)
