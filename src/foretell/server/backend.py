"""Common state of all routes: the service, its tokenizer, output constraints, and metrics."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.core.errors import ConfigError, PromptError
from foretell.engine.request.conversation import Messages, content_ids, render, template_of
from foretell.engine.request.request import token_ids
from foretell.engine.structured.format import Formats
from foretell.engine.structured.thoughts import Family, Thoughts, family_named, family_of
from foretell.server.errors import ApiError, bad, of_engine
from foretell.server.logs import log
from foretell.server.metrics import Metrics
from foretell.server.options import ServerOptions
from foretell.server.texts.fill import Fill
from foretell.server.texts.tokens import TokenTexts

if TYPE_CHECKING:
    from foretell.engine.structured.constraint import Constraints
    from foretell.service.service import Service

LATEST = ":latest"
_NAMES = "add_generation_prompt chat_template continue_final_message conversation documents messages tokenize tools"
RESERVED = frozenset(_NAMES.split())
"""Names of a template that ``chat_template_kwargs`` may not give: they are set by other fields, or reserved."""


class Backend:
    """One per server. Methods that read texts are slow: they run on ``worker``, a separate thread, never on the event
    loop."""

    def __init__(self, service: "Service", options: ServerOptions) -> None:
        self.service, self.options = service, options
        spec = service.engine.model.spec
        given, loras = options.served_model_name, service.engine.model.loras
        self.takes_any = "*" in given
        own = [name for name in given if name != "*"] or [spec.display_name]
        self.name = own[0]
        self.names = (*own, *loras)
        """What requests may give as model: the target's names, then its adapters'."""
        if twice := [name for name in own if name in loras]:
            raise ConfigError(f"an adapter is named {twice[0]!r} as the model is: give it another name")
        self.created = int(time.time())
        self.tokenizer: Any = service.engine.tokenizer
        self.vocab_size, self.eos_token_ids = spec.vocab_size, frozenset(spec.eos_token_ids)
        self.max_model_len = min(service.options.max_model_len or spec.max_positions, spec.max_positions)
        self.context = spec.context(self.max_model_len)
        self.formats = Formats(self.tokenizer, self.vocab_size, self.eos_token_ids)
        self.texts = TokenTexts(self.tokenizer)
        self.metrics = Metrics(service, self.name)
        # One thread: tokenizers are not safe to share, and a huge prompt must not take every core.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="foretell-tokens")
        # Another: a large grammar takes up to seconds, which texts must not wait for.
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="foretell-grammars")
        self._thoughts: dict[str, Thoughts | None] = {}
        if options.reasoning_parser not in ("auto", "none"):
            self.thoughts("")  # a parser that does not fit is refused at the start
        self.embedding = asyncio.Lock()
        self.is_explaining = False  # a step of some request: one at a time; read and set on the event loop alone

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 for a model that is not served."""
        if name not in self.names and not self.takes_any:
            shown = name if len(name) <= 128 else name[:125] + "..."
            message = f"the model {shown!r} does not exist; this server has {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def served(self, name: str | None) -> tuple[str, str | None]:
        """A checked name as clients read it, and the adapter of that name, if it is one. Ollama's may have its default
        tag; None and "": the target."""
        tagged = {each.removesuffix(LATEST): each for each in reversed(self.names)}
        other = name if name and self.takes_any else self.name
        found = name if name in self.names else tagged.get((name or "").removesuffix(LATEST), other)
        return found, found if found in self.service.engine.model.loras else None

    def encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, by default with the tokenizer's own special tokens. Raises ApiError 400."""
        return self._checked(text, param, lambda: token_ids(text, self.tokenizer, add_special_tokens=special))

    def encode_content(self, text: str, param: str) -> list[int]:
        """Token ids of what a message holds. Raises ApiError 400."""
        parse = self.options.parse_special
        return self._checked(text, param, lambda: content_ids(text, self.tokenizer, parse_special=parse))

    def encode_chat(
        self,
        messages: Messages,
        param: str = "messages",
        *,
        extra: Mapping[str, Any] | None = None,
        until: str = "",
        **options: Any,
    ) -> tuple[str, list[int]]:
        """(text, token ids) of a conversation by the model's chat template. extra: further values of it; until: see
        ``Rendered.ids``; options: see ``render``. Raises ApiError 400."""
        reserved = sorted(RESERVED & (extra or {}).keys())
        if reserved:
            raise bad(f"chat_template_kwargs may not give {reserved[0]!r}", "chat_template_kwargs")
        parse = self.options.parse_special
        try:
            made = render(messages, self.tokenizer, self.name, extra=extra, parse_special=parse, **options)
        except ConfigError as error:
            raise bad(f"{str(error).partition(':')[0]}: use /v1/completions", param) from None
        except PromptError as error:
            log("template refused", level="warning", error=error)
            reason, kind = str(error.__cause__), type(error.__cause__).__name__
            told = f": {reason.splitlines()[0][:200]}" if kind in ("TemplateError", "PromptError") and reason else ""
            raise bad(f"the model's chat template refuses these messages{told}", param) from None
        return made.text, self._checked(made.text, param, lambda: made.ids(until))

    def _checked(self, text: str, param: str, encode: Callable[[], list[int]]) -> list[int]:
        """The tokens of a text, by ``encode``. Raises ApiError 400."""
        if self.tokenizer is None:
            raise bad("this model has no tokenizer: give token ids to /v1/completions", param)
        # A token covers a bounded piece of text, so what is far too long is refused without tokenizing megabytes of it.
        if len(text) > 2 * self.longest_token * self.max_model_len:
            raise bad(
                f"the text has {len(text)} characters, and this server takes {self.max_model_len} tokens: shorten it",
                param,
            )
        try:
            return encode()
        except PromptError as error:
            raise of_engine(error, param) from None
        except Exception as error:  # tokenizers raise various errors for unknown characters
            log("not tokenized", level="warning", error=error)
            raise bad("the text cannot be put into tokens of this model", param) from None

    def template(self, *, tools: bool = False) -> str:
        """The source of the chat template for conversations with or without tools, "" where there is none."""
        return template_of(self.tokenizer, tools=tools) or ""

    def special(self, name: str) -> str:
        """A special token of the tokenizer by its role, "" where it has none."""
        return str(getattr(self.tokenizer, name, None) or "")

    def thoughts(self, template: str) -> Thoughts | None:
        """How the model of a chat template marks what it thinks; None where it does not think, or nothing is to be told
        apart. Raises ConfigError where the family that was chosen does not fit the tokenizer."""
        chosen = self.options.reasoning_parser
        family = family_of(template) if chosen == "auto" else None if chosen == "none" else family_named(chosen)
        if family is None or self.tokenizer is None:
            if family is not None and chosen != "auto":
                raise ConfigError(f"--reasoning-parser {chosen} needs a tokenizer, and this model has none")
            return None
        if family.name not in self._thoughts:
            self._thoughts[family.name] = self._made(family)
        return self._thoughts[family.name]

    def _made(self, family: Family) -> Thoughts | None:
        try:
            return Thoughts(family, self.tokenizer, self.vocab_size)
        except ConfigError as error:
            if self.options.reasoning_parser != "auto":
                raise
            log("thoughts stay in the text", level="warning", error=error)
            return None

    @property
    def constraints(self) -> "Constraints":
        """The factory of constraints; reading the vocabulary takes up to a second. Raises ConfigError."""
        return self.formats.constraints

    @property
    def beginning(self) -> list[int]:
        """The token that a text without any other begins with: BOS, or what models without one were taught texts with.
        Empty where there is none."""
        known: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        first = getattr(self.tokenizer, "bos_token_id", None)
        first = known.get("<|endoftext|>", min(self.eos_token_ids, default=None)) if first is None else first
        return [] if first is None or not 0 <= first < self.vocab_size else [first]

    @cached_property
    def fill(self) -> Fill:
        """What fills gaps."""
        return Fill(self.tokenizer, self.vocab_size)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        known: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return max(map(len, known), default=64)

    def close(self) -> None:
        """Stop the threads."""
        self.worker.shutdown(wait=False, cancel_futures=True)
        self.compiler.shutdown(wait=False, cancel_futures=True)
        self.formats.close()
