"""Outputs held to a grammar: JSON, a JSON schema, a regular expression, a Lark grammar; by llguidance, at every node.

A processor is pure: the forbidden tokens are a function of the output ``ids[num_prompt:]`` alone, so rejected guesses
have no effect and nodes may be evaluated in any order. Internally it moves one matcher: back to the common prefix of
the last output and the new one, then forward, which takes a few microseconds.

Where ``max_new_tokens`` ends a text early (finish_reason "length") the text is the beginning of a valid one and not valid
itself, as with OpenAI's API. Stop texts also cut the text where they are found.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from time import monotonic
from typing import Any, Literal

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.engine.structured.compiling import LIMITS, CompileCheck, as_text
from foretell.engine.structured.enforceable import Reduced, Schema, loosened, reduced
from foretell.engine.structured.expected import TAIL, ExpectedText
from foretell.engine.structured.keywords import HELD, NOT_HELD

GrammarKind = Literal["lark", "gbnf", "regex", "choice"]
"""A Lark grammar in llguidance's dialect, llama.cpp's GBNF, a regular expression (Rust's syntax), a JSON list of texts."""

_BLANK = r"( |\n[ \t]{0,32})"
"""White space between JSON's tokens: a space, or a new line and its indentation. Unbounded, as JSON permits it, an
uncertain model may write blanks until its limit."""
_TAIL, _MEMO = 64, 256  # a few steps of the largest trees
CULPRIT_S = 2.0
"""Seconds for finding which of the parts of a grammar is at fault."""
_COMPILED = 64
_COMPILED_CHARACTERS = 1 << 19
"""Of the grammars that are kept, together: compiled, a large one takes 45 bytes a character, 10 MiB for 226,000."""


class Constraints:
    """Makes constraints over one model's vocabulary. One an engine: reading the tokenizer costs up to a second.

    Thread-safe. Compiling takes milliseconds, for very large schemas up to a second: keep it off an event loop. A grammar
    that would take longer is refused: see ``CompileCheck``.
    The last constraints made are kept, so tools that come with every turn of a conversation are compiled once.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer is transformers' fast one; vocab_size is the model's V, which may be wider (padding) or narrower.

        eos_token_ids end a whole output and are permitted nowhere else. Raises ConfigError where there is none, or where
        the tokenizer is of another kind.
        """
        if not eos_token_ids or not all(0 <= token < vocab_size for token in eos_token_ids):
            raise ConfigError(
                f"eos_token_ids = {list(eos_token_ids)} must hold at least one id of 0 to {vocab_size - 1}: "
                "without an end token a constrained output could not end"
            )
        try:
            width, text, ends = max(vocab_size, len(tokenizer)), as_text(tokenizer), list(eos_token_ids)
            self._check = CompileCheck(text, width, ends)
            self._tokenizer: LLTokenizer = LLTokenizer(text, n_vocab=width, eos_token=ends)
        except Exception as error:  # llguidance passes on errors of its Rust code
            raise ConfigError(
                f"constrained outputs need a fast tokenizer, not {type(tokenizer).__name__}: {error}"
            ) from error
        self._limits, self._expected = LLParserLimits(**LIMITS), ExpectedText(self._tokenizer, vocab_size)
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._decode = tokenizer.decode
        self._added = [
            token for token in tokenizer.get_added_vocab().values() if self._tokenizer.is_special_token(token)
        ]
        self._made: OrderedDict[str, Constraint] = OrderedDict()
        self._lock = Lock()

    def close(self) -> None:
        """End the process that tries grammars."""
        self._check.close()

    def json_object(self, *, compact: bool = False) -> "Constraint":
        """Any JSON object. compact: without white space between its tokens; else a space, or a line's break and indent."""
        return self.json_schema({"type": "object"}, compact=compact)

    def json_schema(
        self, schema: Mapping[str, Any] | bool, *, strict: bool = False, compact: bool = False
    ) -> "Constraint":
        """JSON that a schema permits. Its properties come in the schema's order.

        strict: what cannot be enforced is refused: a keyword such as ``not``, a pattern that is no regular language
        (look-around, back references), a number that is no float, another document. Else it is left out, and its place is
        in ``Constraint.left_out``. Raises ConfigError with the reason for a schema that is malformed, that nothing
        satisfies, or that is too large.
        """
        kept, left_out = self.reduced(schema, strict=strict)

        def fewer() -> "Constraint":
            usable, more = self.enforceable(schema, strict=strict)
            return self._compile(json_grammar(usable, strict=strict, compact=compact), "JSON schema", more)

        return self._compile(json_grammar(kept, strict=strict, compact=compact), "JSON schema", left_out, fewer)

    def reduced(self, schema: Schema, *, strict: bool = False) -> Reduced:
        """A schema without the keywords that are known not to be held, and their places. strict: there may be none. Raises
        ConfigError."""
        kept, left_out = reduced(schema)
        if strict and left_out:
            named = ", ".join(f"#/{one}" for one in left_out[:8])
            more = f" and {len(left_out) - 8} others" if len(left_out) > 8 else ""
            raise ConfigError(f"the JSON schema cannot be enforced whole: no grammar holds {named}{more}")
        return kept, left_out

    def enforceable(self, schema: Schema, *, strict: bool = False) -> Reduced:
        """A schema of which a grammar can be made, and the places of what is left out. Raises as ``json_schema`` does."""
        kept, left_out = self.reduced(schema, strict=strict)
        error = self._error_of(kept, strict=strict)
        if not error:
            return kept, left_out

        def error_of(part: Mapping[str, Any]) -> str:
            try:
                return self._error_of(part, strict=strict)
            except ConfigError as slow:
                return str(slow)

        found = loosened(kept, error_of, CULPRIT_S, strict=strict)
        if found is None:
            raise ConfigError(f"the JSON schema cannot be used: {error}")
        return found[0], tuple(sorted({*left_out, *found[1]}))

    def _error_of(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        return _said(self._check.check(json_grammar(schema, strict=strict), "JSON schema"))

    def grammar(
        self,
        text: str,
        *,
        kind: GrammarKind = "lark",
        left_out: tuple[str, ...] = (),
        fewer: Callable[[], "Constraint"] | None = None,
    ) -> "Constraint":
        """Texts that a grammar permits. left_out: see ``Constraint``; fewer: makes what is used where it cannot be. Raises
        ConfigError with the reason where it is malformed."""
        if kind not in ("lark", "gbnf", "regex", "choice"):
            raise ConfigError(f"grammar kind {kind!r}: known are 'lark', 'gbnf', 'regex' and 'choice'")
        if kind == "gbnf":
            return self._compile(self._check.converted(text), "gbnf grammar")
        try:
            grammar = grammar_from(kind, text)
        except Exception as error:  # its converters raise various errors
            raise ConfigError(f"the {kind} grammar cannot be read: {error}") from error
        return self._compile(grammar, f"{kind} grammar", left_out, fewer)

    def culprit(self, schemas: Iterable[tuple[str, Mapping[str, Any], bool]]) -> tuple[str, str] | None:
        """Of schemas (name, schema, strict) the first that cannot be used, and why. None where each can, or where the
        time for asking is over: of a hundred that each take almost as long as one may, it would take minutes."""
        end = monotonic() + CULPRIT_S
        for name, schema, strict in schemas:
            if monotonic() > end:
                break
            try:
                self.json_schema(schema, strict=strict)
            except ConfigError as reason:
                return name, str(reason)
        return None

    def marker(self, text: str) -> str:
        """A Lark term for a text like ``<tool_call>``: its own token where it is one and can be read in the output.

        llguidance takes added tokens for special ones, which texts and patterns do not match. A token that decoding skips
        would be lost from the text, so there the marker is spelled.
        """
        ids = self._ids(text)
        single = len(ids) == 1 and ids[0] < self.vocab_size and self._tokenizer.is_special_token(ids[0])
        shown = single and self._decode(ids, skip_special_tokens=True) == text
        return f"<[{ids[0]}]>" if shown else json.dumps(text)

    def has_token(self, text: str) -> bool:
        """Whether a text is one special token of the vocabulary."""
        ids = self._ids(text)
        return len(ids) == 1 and ids[0] < self.vocab_size and bool(self._tokenizer.is_special_token(ids[0]))

    def token(self, text: str) -> str:
        """A Lark term for a mark that need not be read in the output: its own token where it is one, else it is spelled."""
        return f"<[{self._ids(text)[0]}]>" if self.has_token(text) else json.dumps(text)

    def free_tokens(self, *markers: str) -> str:
        """A Lark term for the added tokens (``<think>``, ...) that free text may hold: all but ends and markers; or ""."""
        barred = {*self.eos_token_ids, *(ids[0] for ids in map(self._ids, markers) if len(ids) == 1)}
        free = sorted(token for token in self._added if token not in barred and token < self.vocab_size)
        return f"<[{','.join(map(str, free))}]>" if free else ""

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.tokenize_str(text, parse_special=True)
        return ids

    def _compile(
        self, grammar: str, what: str, left_out: tuple[str, ...] = (), fewer: Callable[[], "Constraint"] | None = None
    ) -> "Constraint":
        key = "\n".join((grammar, *left_out))
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
                return made
        # What is too large, or takes too long, is refused whole: its parts would take longer.
        self._check.check(grammar, what)
        try:
            made = self._compiled(grammar, what, left_out)
        except ConfigError:
            if fewer is None:
                raise
            made = fewer()
        with self._lock:
            self._made[key] = made
            while len(self._made) > _COMPILED or sum(map(len, self._made)) > _COMPILED_CHARACTERS:
                self._made.popitem(last=False)
        return made

    def _compiled(self, grammar: str, what: str, left_out: tuple[str, ...]) -> "Constraint":
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # what cannot even begin is refused here, and its first states are found
        if first.is_error():
            raise ConfigError(f"the {what} cannot be used: {_said(first.get_error())}")
        more = _unnamed(map(str, matcher.get_grammar_warnings()), left_out)
        left_out = tuple(sorted({*left_out, *more}))
        return Constraint(matcher, self.vocab_size, self.eos_token_ids, left_out, self._expected)


def json_grammar(schema: Mapping[str, Any], *, strict: bool = False, compact: bool = False) -> str:
    """A schema of JSON's types as llguidance's grammar."""
    grammar: str = LLMatcher.grammar_from_json_schema(
        json.dumps(dict(schema)), overrides=json_options(strict=strict, compact=compact)
    )
    return grammar


def json_options(*, strict: bool, compact: bool) -> dict[str, Any]:
    """llguidance's options of a schema, as ``overrides`` or under its key ``x-guidance``. A oneOf that comes so far is one
    of schemas that exclude each other, or its place is named."""
    blank: dict[str, Any] = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _BLANK}
    return {"lenient": not strict, "coerce_one_of": True, **blank}


def _said(error: Any) -> str:
    """llguidance's words, without what it adds for its own developers."""
    return str(error).partition("<state>")[0].replace("<non-verbose/>", "").strip()


def _unnamed(warnings: Iterable[str], left_out: Sequence[str]) -> set[str]:
    """Keywords of which another version of llguidance says that it does not hold them. Its words are its own: what they
    name otherwise is no keyword."""
    named = {place.rpartition("/")[2] for place in left_out}
    said = {word for warning in warnings if "oneOf" not in warning for word in re.findall(r"[$\w]+", warning)}
    return (said & (HELD | NOT_HELD)) - named


class Constraint:
    """One compiled grammar. Immutable; any number of requests and choices may use it at once."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        left_out: tuple[str, ...],
        expected: ExpectedText,
    ) -> None:
        """matcher: at the beginning of an output, and never moved. left_out: places of the schema that are not
        enforced, JSON pointers without their first slash (``properties/to/pattern``). Made by ``Constraints``."""
        self._matcher, self.vocab_size, self.eos_token_ids = matcher, vocab_size, eos_token_ids
        self.left_out, self._expected = left_out, expected

    def processor(self, num_prompt: int) -> "ConstraintProcessor":
        """The ``SamplingParams.logits_processor`` of one request whose prompt has this many tokens."""
        fresh, ends = self._matcher.deep_copy, self.eos_token_ids
        return ConstraintProcessor(fresh, self.vocab_size, ends, num_prompt, self.left_out, self._expected)

    def permits(self, token_ids: Sequence[int]) -> bool:
        """Whether an output, end tokens aside, is whole: for tests and for checking finished texts."""
        matcher = self._matcher.deep_copy()
        return bool(matcher.try_consume_tokens(list(token_ids)) == len(token_ids) and matcher.is_accepting())


class ConstraintProcessor:
    """A pure LogitsProcessor: (ids int64 [L], logits [V]) -> logits [V], -inf where the grammar forbids the token.

    Called by one thread at a time. Where the grammar is complete only end tokens may follow, whatever ``min_new_tokens``,
    biases and bans say of them. After an end token, and after a forbidden token (never emitted), only an end is
    permitted. Where llguidance gives up (its limits on size) nothing is permitted, which the engine reports as that
    request's error; ``error`` has the reason.
    """

    def __init__(
        self,
        fresh: Any,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_prompt: int,
        left_out: tuple[str, ...] = (),
        expected: ExpectedText | None = None,
    ) -> None:
        """fresh makes a matcher that stands at the beginning. left_out: see ``Constraint``."""
        self.left_out, self._expected = left_out, expected
        self._fresh, self._matcher = fresh, fresh()
        self._path: NDArray[np.int64] = np.zeros(0, np.int64)  # what the matcher has consumed
        self._vocab_size, self._num_prompt = vocab_size, num_prompt
        self._end = sorted(set(eos_token_ids))
        self._is_end = frozenset(self._end)
        flags = np.zeros(vocab_size, np.uint8)
        flags[self._end] = 1
        self._end_bits = np.packbits(flags, bitorder="little")
        self._real_bits = np.packbits(np.ones(vocab_size, np.uint8), bitorder="little")
        self._memo: dict[bytes, NDArray[np.uint8] | None] = {}
        self._anchor: NDArray[np.int64] = np.zeros(0, np.int64)  # the memo's keys are what follows it
        self._known: tuple[NDArray[np.int64], Sequence[int]] | None = None  # the last text, and what comes after it
        self.error = ""
        self._is_stopped = False

    def stop(self, reason: str) -> None:
        """Permit nothing from now on: the engine ends the request. reason: for its client."""
        self.error, self._is_stopped = reason, True

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether an output can begin with these, no end among them."""
        return bool(self._fresh().try_consume_tokens(list(token_ids)) == len(token_ids))

    def expected(self, ids: Sequence[int]) -> Sequence[int]:
        """Tokens that the grammar leaves no choice about after a text, as guesses (``ExpectedText``)."""
        output = np.array(ids[self._num_prompt :], np.int64)
        if self._known is not None and np.array_equal(self._known[0], output):  # the planner asked
            return self._known[1]
        found: Sequence[int] = ()
        bits = None if self._expected is None or self._is_stopped else self._permitted(output)
        if self._expected is not None and bits is not None and self._moved(output) == len(output):
            found, moved = self._expected.read(self._matcher, output[-TAIL:].tolist(), bits)
            outside = next((at for at, token in enumerate(found) if token >= self._vocab_size), len(found))
            found = found[:outside]
            self._path = np.concatenate([output, np.array(moved, np.int64)])
        self._known = output, found
        return found

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """See the class. It never raises errors of a grammar: an exception would end the whole batch."""
        if self._is_stopped:
            return torch.full_like(logits, -torch.inf)
        bits = self._permitted(ids[self._num_prompt :].cpu().numpy())
        if bits is None:
            ended = torch.full_like(logits, -torch.inf)
            ended[self._end] = logits[self._end]
            if not bool((ended > -torch.inf).any()):
                ended[self._end[0]] = 0.0
            return ended
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.where(torch.from_numpy(allowed != 0).to(logits.device), logits, -torch.inf)

    def _permitted(self, output: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """``_follow``, once for each output."""
        key = self._key(output)
        if key not in self._memo:
            self._memo[key] = self._follow(output)
        return self._memo[key]

    def _key(self, output: NDArray[np.int64]) -> bytes:
        """What identifies an output among those of the memo: exact, and short however long the output is.

        The memo is of a few steps: drafter and target evaluate the same nodes one after the other.
        """
        start = len(self._anchor)
        near = start <= len(output) <= start + _TAIL and len(self._memo) < _MEMO
        if not near or not np.array_equal(output[:start], self._anchor):
            self._anchor, start = output.copy(), len(output)
            self._memo.clear()
        return output[start:].tobytes()

    def _follow(self, output: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        """The permitted tokens after an output, a bit each; None where only an end may follow."""
        for _ in range(2):
            taken = self._moved(output)
            if taken >= 0:
                if taken < len(output):
                    return None
                bits = self._mask()
                if not self._matcher.is_error():
                    return None if bits.any() and not (bits & ~self._end_bits).any() else bits
            # An error of a matcher is permanent: try once more with a fresh one, since the failure may depend on the
            # moves before.
            self.error = _said(self._matcher.get_error())
            self._matcher, self._path = self._fresh(), np.zeros(0, np.int64)
        return np.zeros_like(self._real_bits)

    def _moved(self, output: NDArray[np.int64]) -> int:
        """Move the matcher to after an output; how many of its tokens it took: none from an end, or what it forbids, on.
        -1: it failed."""
        common = min(len(output), len(self._path))
        differ = np.flatnonzero(output[:common] != self._path[:common])
        same = int(differ[0]) if len(differ) else common
        back = len(self._path) - same
        moved = back == 0 or self._matcher.rollback(back)
        ahead: list[int] = output[same:].tolist()
        until = next((place for place, token in enumerate(ahead) if token in self._is_end), len(ahead))
        taken = self._matcher.try_consume_tokens(ahead[:until]) if moved else 0
        self._path = output[: same + taken].copy()
        return len(self._path) if moved and not self._matcher.is_error() else -1

    def _mask(self) -> NDArray[np.uint8]:
        """As wide as the model's vocabulary: the tokenizer's surplus tokens are cut, and llguidance forbids the
        padding."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._real_bits)] & self._real_bits
