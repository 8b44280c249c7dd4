"""What an answer's text must look like: one wish, made into a constraint; by Engine, Service and server alike."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import torch

from foretell.core.errors import ConfigError
from foretell.core.params import LogitsProcessor, SamplingParams, expected_of

if TYPE_CHECKING:
    from foretell.engine.structured.constraint import Constraint, Constraints

Kind = Literal["json", "regex", "choice", "gbnf", "lark"]


@dataclass(frozen=True)
class OutputFormat:
    """A constraint of the text, before it is compiled."""

    field: str  # of the request, for errors
    kind: Kind
    given: Any  # a schema, a list of texts, or a text
    strict: bool = False  # refuse what cannot be enforced; else it is left out

    def constraint(self, constraints: "Constraints") -> "Constraint":
        """Compiled. Raises ConfigError with the reason."""
        if self.kind == "json":
            return constraints.json_schema(self.given, strict=self.strict)
        text = json.dumps(self.given) if self.kind == "choice" else str(self.given)
        return constraints.grammar(text, kind=self.kind)

    def left_out(self, constraints: "Constraints") -> tuple[str, ...]:
        """What is not enforced, as fields of the request."""
        return tuple(f"{self.field}.{key}" for key in self.constraint(constraints).left_out)

    def enforceable(self, constraints: "Constraints") -> "OutputFormat":
        """The same without what is left out. Raises ConfigError with the reason."""
        return replace(self, given=constraints.enforceable(self.given, strict=self.strict)[0])


def grammar_kind(text: str) -> Kind:
    """EBNF as llama.cpp and XGrammar write it has ``::=``; Lark's has not."""
    return "gbnf" if "::=" in text else "lark"


def format_of(params: SamplingParams) -> OutputFormat | None:
    """The format that sampling parameters ask for."""
    if params.json_schema is not None:
        return OutputFormat("json_schema", "json", params.json_schema, strict=not params.lenient_schema)
    if params.regex is not None:
        return OutputFormat("regex", "regex", params.regex)
    if params.grammar is not None:
        return OutputFormat("grammar", grammar_kind(params.grammar), params.grammar)
    return None if params.choice is None else OutputFormat("choice", "choice", list(params.choice))


class Formats:
    """Applies the formats of requests to one model. Reading its vocabulary, at the first, takes up to a second.
    Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._lock = Lock()
        self._made: Constraints | None = None

    @property
    def constraints(self) -> "Constraints":
        """What compiles them. Raises ConfigError where llguidance is not installed, or this tokenizer cannot be used."""
        with self._lock:
            if self._made is None:
                try:
                    from foretell.engine.structured.constraint import Constraints
                except ModuleNotFoundError as error:
                    if error.name is None or error.name.partition(".")[0] != "llguidance":
                        raise
                    raise ConfigError(
                        "answers are held to a format by the package llguidance, which is not installed: "
                        'pip install "foretell[serve]"'
                    ) from None
                self._made = Constraints(self.tokenizer, self.vocab_size, sorted(self.eos_token_ids))
            return self._made

    def close(self) -> None:
        """End the process that tries grammars; the next one starts another."""
        if self._made is not None:
            self._made.close()

    def applied(
        self, params: SamplingParams, num_prompt: int, guard: Callable[[LogitsProcessor], LogitsProcessor] | None = None
    ) -> SamplingParams:
        """The parameters with their format as a logits processor, after the caller's own. num_prompt: tokens of the
        prompt; guard: around each processor. Compiling takes milliseconds to a second. Raises ConfigError that names the
        field."""
        format, own = format_of(params), params.logits_processor
        if own is not None and guard is not None:
            own = guard(own)
        if format is None:
            return params if own is params.logits_processor else replace(params, logits_processor=own)
        if self.tokenizer is None:
            raise ConfigError(
                f"{format.field}: an engine without a tokenizer knows no texts: load it with tokenizer=..."
            )
        try:
            constraint = format.constraint(self.constraints)
        except ConfigError as error:
            raise ConfigError(f"{format.field}: {error}{_way_out(format)}") from None
        made: LogitsProcessor = constraint.processor(num_prompt)
        if guard is not None:
            made = guard(made)
        if own is not None:
            made = Both(own, made)
        return replace(
            params, logits_processor=made, json_schema=None, regex=None, grammar=None, choice=None, lenient_schema=False
        )


def _way_out(format: OutputFormat) -> str:
    if format.kind != "json" or not format.strict:
        return ""
    return " (lenient_schema=True leaves out what cannot be enforced, and names it in Completion.left_out)"


class Both:
    """Two logits processors in turn."""

    def __init__(self, first: LogitsProcessor, second: LogitsProcessor) -> None:
        """second: a constraint's, which permits an end where nothing is left of the first's result but ends."""
        self.first, self.second = first, second

    @property
    def error(self) -> str:
        """Why they permit nothing, where one of them says so."""
        return str(getattr(self.first, "error", "") or getattr(self.second, "error", ""))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Of the second."""
        return tuple(getattr(self.second, "left_out", ()))

    def expected(self, ids: Sequence[int]) -> Sequence[int]:
        """The second's."""
        return expected_of(self.second, ids)

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The second's result of the first's; where the first permits nothing, that."""
        made = self.first(ids, logits)
        if not isinstance(made, torch.Tensor) or made.shape != logits.shape or not bool((made > -torch.inf).any()):
            return made  # the engine reports it
        return self.second(ids, made)
