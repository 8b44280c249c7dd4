"""Markers of a chat template, such as ``<|im_end|>``, in what people write: there they are text and end no turn.

A template is rendered to one text, and in it a marker that somebody wrote looks like one of the template's. So markers in
contents are hidden before rendering: a few characters that nobody used are put into each. Where that makes a difference,
the rendered text is read by a twin of the tokenizer, to which markers have secret names: the template's own are called by
these, and all others are text. The twin splits and merges as the tokenizer does, so nothing else of the text changes.
(transformers' ``sanitize_control_tokens`` reads a text in pieces instead, which changes tokens beside a marker.)
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from foretell.core.errors import PromptError
from foretell.engine.request.text import Tokenizer, known_of

LOOKS_LIKE_ONE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
PRIVATE = [chr(code) for code in range(0xE000, 0xF900)]
"""Characters without a meaning of their own (Unicode's private use area)."""


class Markers:
    """The markers of a tokenizer and of one of its templates: special tokens, and of the other added tokens those that the
    template writes or that look like markers. Added words, tags of HTML and runs of blanks are none: they are text."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """template: its source; "" for texts without one."""
        self.template = template
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        special = {token.content for token in added if token.special} | set(
            getattr(tokenizer, "all_special_tokens", ())
        )
        markers = [
            token
            for token in added
            if len(token.content) > 1
            and not token.content.isspace()
            and (token.content in special or token.content in template or LOOKS_LIKE_ONE.fullmatch(token.content))
        ]
        texts = [token.content for token in markers]
        self.names = {text: secrets.token_hex(16) for text in texts}  # to the twin; nobody can guess them
        self.pattern = _any_of(texts)
        # The assistant's own words may hold what the template looks for in them (``content.split('</think>')``).
        self.pattern_of_assistant = _any_of([text for text in texts if text in special or not _asks(template, text)])
        self.beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self.longest, self.letters = max(map(len, texts), default=1), {text[0] for text in texts}
        # Some markers are also found in what normalising makes of a text: of full-width letters, for example.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self.normal = normalizer.normalize_str if normalizer and any(token.normalized for token in markers) else None
        self._twin: Any = ()  # not made yet

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str) -> "Markers":
        """The same, made once."""
        known = known_of(_KNOWN, tokenizer)
        if template not in known:
            known[template] = cls(tokenizer, template)
        return known[template]

    def hide(self, text: str, mask: str, *, of_assistant: bool = False) -> str:
        """A text whose markers have the mask in them. The beginning of one at the end of the text gets it too: what comes
        after it in the template could complete the marker."""
        pattern = self.pattern_of_assistant if of_assistant else self.pattern
        hidden = pattern.sub(lambda found: found[0][:1] + mask + found[0][1:], text)
        if size := self.begun(hidden):
            at = len(hidden) - size + 1
            hidden = hidden[:at] + mask + hidden[at:]
        return hidden

    def begun(self, text: str) -> int:
        """How many characters at the end of a text are the beginning of a marker."""
        end = text[-self.longest :]
        if self.letters.isdisjoint(end):  # nearly always
            return 0
        return next((len(end) - at for at in range(len(end)) if end[at:] in self.beginnings), 0)

    def ids(self, tokenizer: Tokenizer, text: str, mask: str) -> list[int]:
        """Token ids of a text that has hidden markers, without the tokenizer's own special tokens. mask: "" where nothing
        is hidden. Raises PromptError where this tokenizer cannot read a marker as text."""
        plain = text.replace(mask, "") if mask else text
        if not self._makes_a_difference(text, plain, mask):
            return list(tokenizer.encode(plain, add_special_tokens=False))
        if self._twin == ():
            self._twin = _twin(tokenizer, self.names)
        if self._twin is None:
            written = Counter(self.pattern.findall(plain)) - Counter(self.pattern.findall(text))
            raise PromptError(
                f"a message holds {next(iter(written), 'a marker')!r}, a marker of this model, and its tokenizer cannot "
                "read it as text: leave it out"
            )
        named = self._named(text).replace(mask, "") if mask else self._named(text)
        return list(self._twin.encode(named, add_special_tokens=False).ids)

    def _makes_a_difference(self, text: str, plain: str, mask: str) -> bool:
        """Whether the tokenizer would find other markers in the plain text than the template's."""
        if mask and self._named(text).replace(mask, "") != self._named(plain):
            return True
        return self.normal is not None and self.pattern.findall(self.normal(plain)) != self.pattern.findall(plain)

    def _named(self, text: str) -> str:
        return self.pattern.sub(lambda found: self.names[found[0]], text)


class Hidden:
    """The markers in what one client wrote, hidden where there are any."""

    def __init__(self, markers: Markers | None, *given: Any) -> None:
        """given: all that the client wrote: JSON. markers: None where they are to count as tokens."""
        self.markers, self.mask = markers, ""
        if markers is None:
            return
        texts = [markers.template, *_texts(given)]
        if any(markers.begun(text) or markers.pattern.search(text) for text in texts[1:]):
            while not self.mask or any(self.mask in text or self._escaped in text for text in texts):
                self.mask = "".join(secrets.choice(PRIVATE) for _ in range(4))

    def hide(self, given: Any, *, of_assistant: bool = False) -> Any:
        """A value with its texts hidden, keys too. of_assistant: they keep what the template looks for."""
        if not self.mask or self.markers is None:
            return given
        if isinstance(given, str):
            return self.markers.hide(given, self.mask, of_assistant=of_assistant)
        if isinstance(given, Mapping):
            return {
                self.hide(key, of_assistant=of_assistant): self.hide(value, of_assistant=of_assistant)
                for key, value in given.items()
            }
        if isinstance(given, list | tuple):
            return [self.hide(value, of_assistant=of_assistant) for value in given]
        return given

    def shown(self, text: str) -> str:
        """A text as it was before."""
        return text.replace(self._escaped, "").replace(self.mask, "") if self.mask else text

    def ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Token ids of a text with hidden markers. Raises PromptError."""
        if self.markers is None:
            return list(tokenizer.encode(text, add_special_tokens=False))
        return self.markers.ids(tokenizer, text.replace(self._escaped, self.mask) if self.mask else text, self.mask)

    @property
    def _escaped(self) -> str:
        """The mask as JSON in ASCII has it, which some templates write."""
        return json.dumps(self.mask)[1:-1]


_KNOWN: WeakKeyDictionary[Tokenizer, dict[str, Markers]] = WeakKeyDictionary()


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile(_branches(texts) if texts else "(?!)")


def _branches(texts: Sequence[str]) -> str:
    """A pattern of these texts, the longest first: a branch for each letter, as some vocabularies have a thousand markers
    and a text may be full of their first letter."""
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(text[0], []).append(text[1:])
    parts = [re.escape(letter) + _branches(rest) for letter, rest in rests.items()]
    if "" in texts:
        return f"(?:{'|'.join(parts)})?" if parts else ""
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _asks(template: str, marker: str) -> bool:
    """Whether a template looks for a marker in a content: ``'</think>' in content``, ``content.split('</think>')``."""
    begun, rest = rf"['\"][^'\"]*{re.escape(marker)}", r"[^'\"]*['\"]\s*(not\s+)?in\b"
    return re.search(rf"{begun}{rest}|\.\w+\(\s*{begun}", template) is not None


def _texts(given: Any) -> Iterator[str]:
    left = [given]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value


def _twin(tokenizer: Tokenizer, names: Mapping[str, str]) -> Any:
    """A ``tokenizers.Tokenizer`` to which markers have other names; None where there can be none. It takes seconds where
    the vocabulary is large: it is made when a text needs it."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    try:
        twin = type(backend).from_str(json.dumps(_renamed(json.loads(backend.to_str()), names)))
        same = all(twin.token_to_id(name) == backend.token_to_id(text) for text, name in names.items())
    except Exception:  # of tokenizers of other kinds, and of those with parts that cannot be written down
        return None
    twin.no_truncation()
    twin.no_padding()
    return twin if same else None


def _renamed(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer, as its library writes it, with other names of some tokens. Merges that end in one are left out: they
    would make the token of its text."""
    model = state["model"]
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): index for text, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if left not in names and right not in names and left + right not in names
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return state
