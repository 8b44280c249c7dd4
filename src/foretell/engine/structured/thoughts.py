"""Thoughts apart from answers: how families of models mark them, read along any path of tokens.

``read`` is the one reader: replies are cut by it as their text comes, and ``Thoughts`` walks it token by token, so that a
budget and a grammar know where a thought ends on every path of a tree of guesses.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from foretell.core.errors import ConfigError

Phase = Literal["before", "thought", "answer"]
Part = tuple[Phase, str]
BLANKS = " \t\r\nĠĊĉč▁"
"""White space, also as vocabularies spell it."""


@dataclass(frozen=True)
class Family:
    """How a family of models marks what it thinks."""

    name: str
    signs: tuple[str, ...]  # a chat template that writes one of them is of the family
    begins: tuple[str, ...]  # a text that begins otherwise is an answer without a thought
    marks: Mapping[Phase, tuple[tuple[str, Phase], ...]]  # texts that lead from a phase to another
    openers: tuple[str, ...]  # ways out of "before", the first one into a thought
    closer: str  # ends a thought, and begins the answer
    is_bare: bool = True  # an answer may come without any mark
    opened: tuple[str, ...] = ()  # further ends of prompts, beside the first opener, that have opened a thought


def _paired(name: str, opener: str, closer: str, *, sign: str = "", opened: tuple[str, ...] = ()) -> Family:
    marks: dict[Phase, tuple[tuple[str, Phase], ...]] = {
        "before": ((opener, "thought"),), "thought": ((closer, "answer"),), "answer": (),
    }  # fmt: skip
    return Family(name, (sign,) if sign else (opener, closer), (opener,), marks, (opener,), closer, opened=opened)


FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>",),
        ("<|channel|>", "<|start|>assistant", "<|message|>", "to=functions."),
        {
            "before": (("<|channel|>analysis<|message|>", "thought"), ("<|message|>", "answer")),
            "thought": (("<|end|>", "before"),),
            "answer": (("<|end|>", "before"),),
        },
        (
            "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
            "<|start|>assistant<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>",
        ),
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        is_bare=False,
    ),
    _paired("mistral", "[THINK]", "[/THINK]"),
    _paired("gemma", "<|channel>thought\n", "<channel|>", sign="<|channel>"),
    _paired("seed", "<seed:think>", "</seed:think>", opened=("<seed:think><seed:cot_budget_reflect>",)),
    _paired("think", "<think>", "</think>"),  # Qwen's, DeepSeek's, GLM's, SmolLM3's and most others'
)  # fmt: skip
NAMES = tuple(family.name for family in FAMILIES)


def family_of(template: str) -> Family | None:
    """The family whose marks a chat template writes or looks for; None where it has none."""
    return next((family for family in FAMILIES if any(sign in template for sign in family.signs)), None)


def family_named(name: str) -> Family:
    """A family by its name, one of NAMES."""
    return next(family for family in FAMILIES if family.name == name)


def read(family: Family, phase: Phase, held: str, text: str) -> tuple[Phase, str, list[Part]]:
    """A further piece of a text, of which ``held`` has been held back, in a phase.

    Returns the phase after it, what is held back now since it may belong to a mark, and the parts that are certain; a
    mark that was read is an empty part of the phase that it leads to; what stood before it in the phase "before", the head
    of a message, comes whole. However a text is cut, the parts joined are the same.
    """
    rest, parts = held + text, list[Part]()
    while True:
        if phase == "before" and not _may_begin(family, rest.lstrip()):
            phase = "answer"  # without a mark: white space before it is its own
        places = [(rest.find(mark), mark, then) for mark, then in family.marks[phase]]
        at, mark, then = min((place for place in places if place[0] >= 0), default=(-1, "", phase))
        if at < 0:
            break
        if at:
            parts.append((phase, rest[:at]))
        rest, phase = rest[at + len(mark) :], then
        parts.append((phase, ""))
    if phase == "before":
        return phase, rest, parts
    size = max((_begun(rest, mark) for mark, _ in family.marks[phase]), default=0)
    if len(rest) > size:
        parts.append((phase, rest[: len(rest) - size]))
    return phase, rest[len(rest) - size :], parts


def rest_of(family: Family, phase: Phase, held: str) -> list[Part]:
    """The parts of what is held back at the end of a text. The head of a message that was cut off is none."""
    if phase == "before":
        is_head = any(held.lstrip().startswith(begin) for begin in family.begins)
        return [] if is_head or not held else [("answer", held)]
    return [(phase, held)] if held else []


def _may_begin(family: Family, text: str) -> bool:
    return any(begin.startswith(text) or text.startswith(begin) for begin in family.begins)


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of the text that is the beginning of a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


@dataclass(frozen=True)
class ThoughtState:
    """Where an output stands after some of its tokens."""

    phase: Phase
    held: str = ""  # see ``read``
    num_tokens: int = 0
    since: int = 0  # tokens before the phase
    thought: int = 0  # tokens of thoughts, marks aside
    pending: int = 0  # tokens of a thought that may belong to the mark that ends it
    forced: int = 0  # tokens of the closer that a budget has forced
    blank: bool = False  # nothing but white space since a mark, which belongs to the form

    @property
    def is_answer(self) -> bool:
        """Whether the last token is of the answer: neither of a thought, nor of a mark and the white space after it."""
        return self.phase == "answer" and self.since < self.num_tokens and not self.blank


class Thoughts:
    """One family's thoughts in the tokens of one tokenizer. Immutable but for what it remembers of texts."""

    def __init__(self, family: Family, tokenizer: Any, vocab_size: int = sys.maxsize) -> None:
        """vocab_size: the model's, which may be narrower. Raises ConfigError where the marks cannot be written."""
        self.family, self._tokenizer, self._vocab_size = family, tokenizer, vocab_size
        self._texts: dict[int, str] = {}
        self.closer = self._ids(family.closer)
        self.openers = [self._ids(opener) for opener in family.openers]
        marks = {mark for marks in family.marks.values() for mark, _ in marks}
        ids = {token for text in (*marks, *family.openers, family.closer) for token in self._ids(text)}
        # Marks that texts leave out: they are put back where they stood.
        self.hidden = {
            token: self.text(token) for token in ids if not tokenizer.decode([token], skip_special_tokens=True)
        }
        for start, tokens, wanted in (("thought", self.closer, "answer"), ("before", self.openers[0], "thought")):
            state = ThoughtState(start)  # type: ignore[arg-type]
            for token in tokens:
                state = self.after(state, token)
            if state.phase != wanted or max(tokens) >= vocab_size:
                raise ConfigError(
                    f"this model cannot write the marks of thoughts, {family.openers[0]!r} and {family.closer!r}: "
                    "choose another --reasoning-parser, or 'none'"
                )

    def text(self, token: int) -> str:
        """The text of one token, special ones too."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = str(self._tokenizer.decode([token]))
        return found

    def start_of(self, prompt: str, *, continued: str | None = None) -> Phase:
        """The phase in which the output to a prompt begins: some templates open the thought, or close it at once.
        continued: the text of the model's that the prompt ends with."""
        if continued is not None:
            begun = continued.lstrip()
            return read(self.family, "before", "", begun)[0] if begun.startswith(self.family.begins) else "answer"
        end = prompt.rstrip()
        if end.endswith((self.family.openers[0].rstrip(), *self.family.opened)):
            return "thought"
        closers = [mark for mark, then in self.family.marks["thought"] if then == "answer"]
        return "answer" if any(map(end.endswith, closers)) else "before"

    def after(self, state: ThoughtState, token: int, budget: int | None = None) -> ThoughtState:
        """The state after one token more. budget: see ``forced_by``."""
        forced = self.forced_by(state, budget)
        num_forced = state.forced + 1 if token == forced else 0
        num_forced = 0 if num_forced == len(self.closer) else num_forced
        text = self.text(token)
        phase, held, parts = read(self.family, state.phase, state.held, text)
        count = state.num_tokens + 1
        marks = [place for place, (_, part) in enumerate(parts) if not part]
        since = count if marks else state.since
        rest = "".join(part for _, part in parts[marks[-1] :]) + held if marks else text
        blank = (bool(marks) or state.blank) and not rest.strip()
        made = replace(state, phase=phase, held=held, num_tokens=count, since=since, forced=num_forced, blank=blank)
        if state.phase != "thought":
            return made
        if phase != "thought":  # what was pending is the mark's, where it begins before this token
            before = len(parts[0][1]) if parts[0][0] == "thought" else 0
            return replace(made, thought=state.thought + (state.pending if before >= len(state.held) else 0), pending=0)
        if not held:
            return replace(made, thought=state.thought + state.pending + 1, pending=0)
        if held == state.held + text:
            return replace(made, pending=state.pending + 1)
        return replace(made, thought=state.thought + state.pending, pending=1)

    def forced_by(self, state: ThoughtState, budget: int | None) -> int | None:
        """The token that must come next: of the closer, once the thought has budget tokens; None: any may."""
        if state.forced:
            return self.closer[state.forced]
        spent = budget is not None and state.phase == "thought" and state.thought + state.pending >= budget
        return self.closer[0] if spent else None

    def count(self, token_ids: Sequence[int], start: Phase) -> int:
        """Tokens of an output that are thoughts, marks aside."""
        state, inner = ThoughtState(start), 0
        firsts = {mark[0] for mark, _ in self.family.marks["thought"]}
        for token in token_ids:
            if state.phase == "answer" and not self.family.marks["answer"]:
                break
            if state.phase == "thought" and not state.held and firsts.isdisjoint(self.text(token)):
                inner += 1  # nearly all: no mark is begun, or goes on
            else:
                state = self.after(state, token)
        return state.thought + state.pending + inner

    def opening(self, path: Sequence[int]) -> set[int]:
        """Tokens by which an opener can go on after these, all of the phase "before"."""
        begun = list(path)
        return {ids[len(begun)] for ids in self.openers if len(ids) > len(begun) and ids[: len(begun)] == begun}

    def overrunning(self, state: ThoughtState) -> list[int]:
        """Tokens that end a thought and go on with a text of the answer, which a grammar would not see."""
        found: list[int] = []
        for mark in [mark for mark, then in self.family.marks[state.phase] if then == "answer"]:
            rest = mark[_begun(state.held, mark) :]
            at = bisect_left(self._vocabulary, (rest, -1))
            while at < len(self._vocabulary) and self._vocabulary[at][0].startswith(rest):
                text, token = self._vocabulary[at]
                if text[len(rest) :].strip(BLANKS) and token < self._vocab_size:
                    found.append(token)
                at += 1
        return found

    @cached_property
    def _vocabulary(self) -> list[tuple[str, int]]:
        known: Mapping[str, int] = getattr(self._tokenizer, "get_vocab", dict)()
        return sorted(known.items())

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Thinking:
    """How the outputs of one request think."""

    thoughts: Thoughts
    start: Phase  # after the prompt


def reads(template: str, name: str) -> bool:
    """Whether a chat template reads a value of this name."""
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    return re.search(rf"(?<![\w.'\"]){name}\b(?!['\"])", code) is not None
