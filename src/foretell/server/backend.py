"""Common state of all routes: the service, its tokenizer, output constraints, and metrics."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from foretell.server.constraint import Constraints
from foretell.server.errors import ApiError, bad
from foretell.server.logs import log
from foretell.server.metrics import Metrics
from foretell.server.options import ServerOptions
from foretell.server.tokens import TokenTexts

if TYPE_CHECKING:
    from foretell.engine.service import Service

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)
"""Names of a template that ``chat_template_kwargs`` may not give: they are set by other fields, or reserved."""


class Backend:
    """One per server. Methods that read texts are slow: they run on ``worker``, a separate thread, never on the event
    loop."""

    def __init__(self, service: "Service", options: ServerOptions) -> None:
        self.service, self.options = service, options
        spec = service.engine.model.spec
        self.name = options.served_model_name or spec.display_name
        self.created = int(time.time())
        self.tokenizer: Any = service.engine.tokenizer
        self.vocab_size, self.eos_token_ids = spec.vocab_size, frozenset(spec.eos_token_ids)
        self.max_model_len = min(service.options.max_model_len or spec.max_positions, spec.max_positions)
        self.texts = TokenTexts(self.tokenizer)
        self.metrics = Metrics(service, self.name)
        # One thread: tokenizers are not safe to share, and a huge prompt must not take every core.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="foretell-tokens")
        # Another: a large grammar takes up to seconds, which texts must not wait for.
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="foretell-grammars")
        self.is_explaining = False  # a step of some request: one at a time; read and set on the event loop alone

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 for any other model."""
        if name != self.name:
            shown = name if len(name) <= 128 else name[:125] + "..."
            message = f"the model {shown!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def encode(self, text: str, param: str, *, special: bool) -> list[int]:
        """Token ids. special: add the tokenizer's special tokens. Raises ApiError 400."""
        if self.tokenizer is None:
            raise bad("this model has no tokenizer: give token ids to /v1/completions", param)
        # A token covers a bounded piece of text, so what is far too long is refused without tokenizing megabytes of it.
        if len(text) > 2 * self.longest_token * self.max_model_len:
            raise bad(
                f"the text has {len(text)} characters, and this server takes {self.max_model_len} tokens: shorten it",
                param,
            )
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=special))
        except Exception as error:  # tokenizers raise various errors for unknown characters
            log("not tokenized", level="warning", error=error)
            raise bad("the text cannot be put into tokens of this model", param) from None

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        generate: bool,
        goes_on: bool = False,
        extra: Mapping[str, Any],
    ) -> str:
        """A conversation by the model's chat template. generate: with the beginning of a reply; goes_on: ending in the
        middle of the last message. Raises ApiError 400."""
        template = getattr(self.tokenizer, "apply_chat_template", None)
        if template is None or getattr(self.tokenizer, "chat_template", None) is None:
            raise bad("this model has no chat template: use /v1/completions", "messages")
        reserved = sorted(RESERVED & extra.keys())
        if reserved:
            raise bad(f"chat_template_kwargs may not give {reserved[0]!r}", "chat_template_kwargs")
        given = {**({"continue_final_message": True} if goes_on else {}), **extra}
        try:
            text = template(list(messages), tools=tools, tokenize=False, add_generation_prompt=generate, **given)
        except Exception as error:  # templates raise their own exceptions, and any others through defects
            log("template refused", level="warning", error=error)
            reason = str(error).splitlines()[0][:200] if type(error).__name__ == "TemplateError" and str(error) else ""
            message = f"the model's chat template refuses these messages{': ' + reason if reason else ''}"
            raise bad(message, "messages") from None
        return str(text)

    @property
    def template(self) -> str:
        """The text of the chat template, "" where there is none."""
        template = getattr(self.tokenizer, "chat_template", None)
        return template if isinstance(template, str) else ""

    @cached_property
    def constraints(self) -> Constraints:
        """The factory of constraints; reading the vocabulary takes up to a second. Raises ConfigError."""
        return Constraints(self.tokenizer, self.vocab_size, sorted(self.eos_token_ids))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        known: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return max(map(len, known), default=64)

    def close(self) -> None:
        """Stop the threads."""
        self.worker.shutdown(wait=False, cancel_futures=True)
        self.compiler.shutdown(wait=False, cancel_futures=True)
        made = self.__dict__.get("constraints")  # of a cached property
        if made is not None:
            made.close()
