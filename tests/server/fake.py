"""A service without a model: it says what its script says, two guesses and a bonus token a step, on threads of its own."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from foretell import speculative_config
from foretell.core.errors import ConfigError, ForetellError
from foretell.draft.config import MethodConfig
from foretell.engine.request.request import ends_of
from foretell.engine.request.result import Completion, Sink, StepTrace, Update
from foretell.engine.request.row import Piece, Row, Submission
from foretell.engine.request.text import TextStream
from foretell.model.target import ModelSpec
from foretell.service.options import ServiceOptions
from foretell.service.service import STATES
from foretell.service.snapshot import Snapshot

EOS, VOCAB = 256, 258
LIGHT = ("ngram", "none", "prediction", "suffix")


class ByteTokenizer:
    """A token a byte, and an end token."""

    chat_template = "each message as <role>content; knows developer"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [token for token in token_ids if token < 256]
        return bytes(kept).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<0x{token:02X}>" if token < 256 else "<end>"

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        shout: bool = False,
        continue_final_message: bool = False,
        enable_thinking: bool = True,
    ) -> str:
        assert not (continue_final_message and add_generation_prompt)
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        text += "" if enable_thinking else "<no thoughts>"
        return (text.upper() if shout else text) + ("<assistant>" if add_generation_prompt else "")


class Model(SimpleNamespace):
    """One that may be referred to weakly."""


def ended(reason: str) -> Any:
    """As much of a completion as readers of texts look at."""
    return SimpleNamespace(finish_reason=reason)


def told(submission: Submission) -> list[int]:
    """The default script: a text of several bytes a character, another one for each seed."""
    return [*f"Grüße! {submission.params.seed} € and more".encode(), EOS]


class FakeService:
    """See ``foretell.service.service.Service``."""

    def __init__(
        self,
        script: Callable[[Submission], list[int]] = told,
        *,
        held: bool = False,
        refusal: ForetellError | None = None,
        failure: ForetellError | None = None,
        max_model_len: int = 4096,
    ) -> None:
        """held: requests stop after their first step until they are cancelled. refusal: of submit; failure: told later."""
        self.script, self.held, self.refusal, self.failure = script, held, refusal, failure
        spec = ModelSpec(
            name="fake",
            architecture="Fake",
            implementation="table",
            vocab_size=VOCAB,
            num_layers=1,
            hidden_size=1,
            max_positions=max_model_len,
            dtype=torch.float32,
            device=torch.device("cpu"),
            weight_bytes=1,
            eos_token_ids=(EOS,),
        )
        self.default = speculative_config({"method": "ngram", "num_speculative_tokens": 2})
        self.engine = SimpleNamespace(
            tokenizer=ByteTokenizer(),
            model=Model(spec=spec, loras=()),
            speculative=self.default,
        )
        self.options = ServiceOptions()
        self.methods = sorted(LIGHT)
        self.resting: dict[str, float] = {}
        self.ready = self.healthy = True
        self.submitted: list[Submission] = []
        self.prepared: list[Submission] = []
        self.was_prepared = threading.Event()
        self.cancelled: list[str] = []
        self.ended = threading.Semaphore(0)  # one for each request that has ended
        self.begun = threading.Semaphore(0)  # one for each that has told its first step
        self._stops: dict[str, threading.Event] = {}

    def method(self, given: Mapping[str, Any] | str) -> MethodConfig:
        config = speculative_config({"method": "ngram", **given} if not isinstance(given, str) else {"method": given})
        if config.method not in LIGHT:
            raise ConfigError(f"method {config.method!r} is not loaded here")
        return config

    def submit(self, submission: Submission, sink: Sink) -> None:
        if self.refusal is not None and (len(self.submitted) or not self.held):
            raise self.refusal
        self.submitted.append(submission)
        self._stops[submission.request_id] = threading.Event()
        threading.Thread(target=self._run, args=(submission, sink), daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return not self._stops

    def prepare(self, submission: Submission) -> None:
        self.prepared.append(submission)
        self.was_prepared.set()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if request_id in self._stops:
            self._stops[request_id].set()

    @property
    def state(self) -> str:
        return "ready" if self.ready else "draining" if self.healthy else "stopped"

    @property
    def says(self) -> str:
        return STATES[self.state]

    def drain(self, timeout_s: float) -> bool:
        self.ready = False
        return True

    def close(self) -> None:
        self.ready = self.healthy = False

    def snapshot(self) -> Snapshot:
        return Snapshot()

    def _run(self, submission: Submission, sink: Sink) -> None:
        name = submission.request_id
        if self.failure is not None:
            self._stops.pop(name, None)
            sink(Update(name, error=self.failure))
            self.ended.release()
            return
        method = submission.speculative or self.default
        row = self._row(submission)
        script, stop = self.script(submission), self._stops[name]
        if submission.num_prompt_logprobs is not None:
            row.prompt_pieces = self._scored(submission, submission.num_prompt_logprobs)
            sink(Update(name, prompt_pieces=tuple(row.prompt_pieces)))
        if not submission.write:
            row.finish_reason = "length"
        while row.finish_reason is None:
            if stop.is_set():
                row.finish_reason = "cancelled"
                break
            at = len(row.token_ids)
            tokens = [script[place] if place < len(script) else EOS for place in range(at, at + 3)]
            guesses = self._guess(submission, at) if method.method == "prediction" else tokens[:2]
            accepted = 0
            if method.method != "none":
                while accepted < len(guesses) and guesses[accepted] == tokens[accepted]:
                    accepted += 1
            tokens = tokens[: accepted + 1]
            source = [f"draft:{method.method}"] * accepted + ["bonus" if method.method != "none" else "plain"]
            taken = row.emit(tokens, source)
            row.num_steps += 1
            row.steps.append((len(guesses) if method.method != "none" else 0, accepted))
            row.num_draft_tokens += row.steps[-1][0]
            row.num_accepted_tokens += accepted
            if (num_best := submission.params.logprobs) is not None:
                for place in range(at, at + taken):
                    token = row.pieces[place].token_id
                    best = tuple((other, -0.25 * rank) for rank, other in enumerate([token, 65, 0xC3]))
                    row.pieces[place] = replace(row.pieces[place], logprob=-0.5, top_logprobs=best[:num_best])
            count = len(tokens)
            trace = StepTrace(
                [0, *tokens[:-1]], list(range(-1, count - 1)), [1.0] * count, list(range(count)), tokens[-1]
            )
            if row.finish_reason is None:
                sink(Update(name, tuple(row.pieces[at:]), trace if submission.trace else None))
                if at == 0:
                    self.begun.release()
                if self.held:
                    timeout = submission.timeout_s
                    if not stop.wait(timeout):
                        row.finish_reason = "timeout"
                        row.text.finish()
            else:
                last = Update(
                    name, tuple(row.pieces[at:]), trace if submission.trace else None, self._completion(row, method)
                )
                self._stops.pop(name, None)
                sink(last)
                self.ended.release()
                return
        self._stops.pop(name, None)
        sink(Update(name, completion=self._completion(row, method)))
        self.ended.release()

    def _scored(self, submission: Submission, count: int) -> list[Piece]:
        text, made = TextStream(self.engine.tokenizer), list[Piece]()
        for place, token in enumerate(submission.prompt_ids):
            offset = len(text.text)
            text.push(token)
            best = ((token, -0.25 * place), (66, -9.0)) if place else ()
            score = -0.25 * place if place else None
            made.append(Piece(token, text.take(), "prompt", score, best[:count], offset))
        return made

    def _guess(self, submission: Submission, at: int) -> list[int]:
        return list(submission.prediction_ids[at : at + 2])

    def _row(self, submission: Submission) -> Row:
        params = submission.params
        end_ids, answer_ends, text = ends_of(submission, (EOS,), self.engine.tokenizer)
        return Row(
            index=0,
            submission=submission,
            choice=cast(Any, None),
            prompt_ids=list(submission.prompt_ids),
            params=params,
            seed=params.seed or 0,
            end_ids=end_ids,
            answer_ends=answer_ends,
            max_tokens=params.max_new_tokens,
            text=text,
        )

    def _completion(self, row: Row, method: MethodConfig) -> Completion:
        return Completion.of(row, {"target": "fake", "speculative": method.resolved()})
