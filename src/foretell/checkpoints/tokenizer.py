"""Tokenizers without transformers, whose import takes seconds: a tokenizer.json as the tokenizers library runs it, and the
special tokens and chat template beside it.

What is not understood here (another class, an option, special tokens that tokenizer.json has not) is left to transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from foretell.checkpoints.configs import stated
from foretell.checkpoints.templates import render_chat

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ENDLESS = int(1e30)  # ``model_max_length`` where nothing is said of it, as transformers has it
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_TYPES = frozenset((
    "llama", "qwen3", "qwen3_moe", "qwen2_moe", "gemma", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3",
    "olmoe", "granitemoe",
))  # fmt: skip
"""Model types with which transformers runs a tokenizer.json of _CLASSES as it is (Phi-3 and Qwen2 have a class of their
own, Mistral one that reads another file)."""
_QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_QWEN_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_NAMED = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
"""transformers' class for Qwen splits text so, and has these special tokens where nothing is said."""
_READ = frozenset((
    *NAMED, "backend", "tokenizer_class", "clean_up_tokenization_spaces", "extra_special_tokens", "model_max_length",
    "additional_special_tokens", "added_tokens_decoder", "chat_template", "add_bos_token", "add_eos_token", "is_local",
    "local_files_only", "name_or_path", "padding_side", "truncation_side", "model_input_names", "legacy",
    "add_prefix_space", "use_default_system_prompt", "sp_model_kwargs", "errors", "split_special_tokens",
))  # fmt: skip
"""Keys of tokenizer_config.json that are read, or that change nothing here."""
_PLAIN = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}


class PlainTokenizer:
    """A tokenizer with the methods that foretell reads; any other of a transformers tokenizer is looked up on one, which is
    loaded then."""

    is_fast = True

    def __init__(
        self,
        inner: Tokenizer,
        named: Mapping[str, str],
        whole: Callable[["PlainTokenizer"], Any],
        *,
        extra: Sequence[str] = (),
        chat_template: str | dict[str, str] | None = None,
        cleans: bool = False,
        max_length: int = _ENDLESS,
    ) -> None:
        """named: key of NAMED -> token; extra: further special tokens; cleans: decoded text loses spaces before marks, of
        vocabularies other than BPE; whole: loads the transformers tokenizer of this one."""
        self.backend_tokenizer = inner
        self.chat_template = chat_template
        self.clean_up_tokenization_spaces = cleans
        self.model_max_length = max_length
        self.special_tokens_map = {key: named[key] for key in NAMED if key in named}
        self.extra_special_tokens = list(extra)
        self.fill_ids: dict[str, int] = {}  # tokens around a gap, where a file names them: see ``FillTokens.of``
        self._whole = whole
        self._loaded: Any = None
        self._cleans = cleans and type(inner.model).__name__ != "BPE"
        for key in NAMED:
            token = named.get(key)
            setattr(self, key, token)
            setattr(self, f"{key}_id", None if token is None else inner.token_to_id(token))

    def encode(self, text: Any, text_pair: Any = None, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Token ids of a text."""
        if options or text_pair is not None or not isinstance(text, str):
            ids: list[int] = self.whole.encode(text, text_pair, add_special_tokens=add_special_tokens, **options)
            return ids
        found: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of an id or of ids; of lists of ids a list of texts."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if clean_up_tokenization_spaces is not None or (ids and not isinstance(ids[0], int)):
            options = {"clean_up_tokenization_spaces": clean_up_tokenization_spaces}
            return self.whole.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return _cleaned(text) if self._cleans else text

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **values: Any,
    ) -> Any:
        """The text of a conversation (tokenize=False) by a template, or by the tokenizer's own. See ``render_chat``."""
        are_turns = isinstance(conversation, list | tuple) and all(isinstance(turn, Mapping) for turn in conversation)
        last = conversation[-1].get("content") if are_turns and conversation else None
        is_read = are_turns and (
            not continue_final_message or (continue_final_message is True and isinstance(last, str | list))
        )
        is_plain = not _OPTIONS & values.keys() and all(
            given is None or all(isinstance(one, Mapping) for one in given) for given in (tools, documents)
        )
        if tokenize or not is_read or not is_plain:
            return self.whole.apply_chat_template(
                conversation, tools, documents, chat_template, add_generation_prompt, continue_final_message, tokenize,
                **values,
            )  # fmt: skip
        return render_chat(
            self.get_chat_template(chat_template, tools), conversation, tools=tools, documents=documents,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            **{**self.special_tokens_map, **values},
        )  # fmt: skip

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The source of the template that is used. Raises ValueError where there is none."""
        own = self.chat_template
        if isinstance(own, Mapping):
            default = "tool_use" if tools is not None and "tool_use" in own else "default"
            found = own.get(default) if chat_template is None else own.get(chat_template, chat_template)
        else:
            found = chat_template or own
        if found is None:
            raise ValueError("the tokenizer has no chat template, or several of which none is the default: name one")
        return found

    @property
    def all_special_tokens(self) -> list[str]:
        """Special tokens, each once."""
        return list(dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens)))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        return [self.convert_tokens_to_ids(token) for token in self.all_special_tokens]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> token of those that are no part of the vocabulary proper."""
        found: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_added_vocab(self) -> dict[str, int]:
        """Token -> id of the same, by id."""
        return {token.content: index for index, token in sorted(self.added_tokens_decoder.items())}

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, of all tokens."""
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    @property
    def vocab(self) -> dict[str, int]:
        """The same."""
        return self.get_vocab()

    @property
    def vocab_size(self) -> int:
        """How many tokens there are without added ones."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, that of the unknown one where there is none; of several a list."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        index = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if index is None else index

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The token of an id; of several a list."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(int(index)) for index in ids if int(index) not in skipped]

    @property
    def whole(self) -> Any:
        """This tokenizer as transformers has it, loaded when it is first asked for."""
        if self._loaded is None:
            self._loaded = self._whole(self)
        self._loaded.chat_template = self.chat_template
        return self._loaded

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As a transformers tokenizer."""
        return self.whole(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name.endswith(("_token", "_token_id")) or "_whole" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.whole, name)


_OPTIONS = frozenset((
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens",
))  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that no template reads."""


def read_tokenizer(path: Path, whole: Callable[[PlainTokenizer], Any]) -> PlainTokenizer | None:
    """The tokenizer of a directory; None where transformers has to read it."""
    settings, about = stated(path / "tokenizer_config.json"), stated(path / "config.json")
    content = stated(path / "tokenizer.json")
    if settings is None or about is None or content is None:
        return None
    others = ("added_tokens.json", "tekken.json", "additional_chat_templates")
    if any((path / other).exists() for other in others):
        return None
    is_qwen = str(settings.get("tokenizer_class")).removesuffix("Fast") == "Qwen2Tokenizer" and _is_qwen(content)
    if is_qwen and about.get("model_type") in _QWEN and not settings.get("add_prefix_space"):
        settings = {**_QWEN_NAMED, **settings}
    elif settings.get("tokenizer_class") not in _CLASSES or about.get("model_type") not in _TYPES:
        return None
    if not settings.keys() <= _READ or settings.get("split_special_tokens"):
        return None
    if content.get("truncation") is not None or content.get("padding") is not None:
        return None
    special = _special(settings, content, path)
    template = _template(settings, path)
    length = settings.get("model_max_length", _ENDLESS)
    if special is None or template == {} or type(length) not in (int, float):
        return None
    try:
        inner = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception:  # tokenizers raises bare exceptions; transformers says what is wrong
        return None
    named, extra = special
    cleans = settings.get("clean_up_tokenization_spaces", False)
    return PlainTokenizer(
        inner, named, whole, extra=extra, chat_template=template or None, cleans=bool(cleans), max_length=length
    )


def _is_qwen(content: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is what transformers' class for Qwen makes of its vocabulary and merges."""
    model, splits, decoder = (content.get(key) or {} for key in ("model", "pre_tokenizer", "decoder"))
    try:
        first, second = splits["pretokenizers"]
        plain = not any(model.get(key) for key in _UNUSED)
        return bool(
            plain
            and (model["type"], decoder["type"], content["normalizer"]) == ("BPE", "ByteLevel", {"type": "NFC"})
            and first == {"type": "Split", "pattern": {"Regex": _QWEN_SPLITS}, "behavior": "Isolated", "invert": False}
            and (second["type"], second["add_prefix_space"], second["use_regex"]) == ("ByteLevel", False, False)
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


_UNUSED = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
)  # fmt: skip
"""Options of BPE that Qwen's class leaves off."""


def _special(
    settings: Mapping[str, Any], content: Mapping[str, Any], path: Path
) -> tuple[dict[str, str], list[str]] | None:
    """Special tokens by name, and the others; None where tokenizer.json has them otherwise."""
    added = content.get("added_tokens")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        return None
    known = {str(token.get("content")): token for token in added}
    by_id = settings.get("added_tokens_decoder")
    if by_id is None and (path / "special_tokens_map.json").exists():
        listed = stated(path / "special_tokens_map.json")
        if listed is None or not all(key in settings and _same(value, settings[key]) for key, value in listed.items()):
            return None
    elif by_id is not None and by_id != {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
    }:
        return None
    named = {key: _text(settings[key]) for key in NAMED if settings.get(key) is not None}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if not isinstance(extra, list) or not all(
        known.get(str(name), {}).get("special") is True for name in named.values()
    ):
        return None
    objects = [settings[key] for key in NAMED if isinstance(settings.get(key), dict)]
    if not all(_agrees(token, known.get(str(token.get("content")), {})) for token in objects):
        return None
    texts = [token if isinstance(token, str) else "" for token in extra]
    if not all(_agrees(_PLAIN, known.get(token, {})) for token in texts):
        return None
    return {key: str(value) for key, value in named.items()}, texts


def _agrees(token: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(entry.get(key) == value for key, value in token.items() if key != "__type")


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return list(map(_text, one)) == list(map(_text, other))
    return bool(_text(one) == _text(other))


def _template(settings: Mapping[str, Any], path: Path) -> Any:
    """The chat template; None without one, {} where it is not understood."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return {}
    found = settings.get("chat_template")
    found = processors_template(path) if found is None else found
    return found if found is None or isinstance(found, str) else {}


def processors_template(path: Path) -> str | None:
    """The template of ``chat_template.json``, where models that read images had it before 2025; None without one."""
    found = (stated(path / "chat_template.json") or {}).get("chat_template")
    return found if isinstance(found, str) else None


def _cleaned(text: str) -> str:
    for mark in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(mark, mark.strip())
    return text
