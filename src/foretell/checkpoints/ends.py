"""The tokens that end an answer. Configurations, tokenizers, chat templates and GGUF files each name some of them, and are
often wrong alone: a model that was tuned for chats keeps the end of a text and closes its turns with another token. So
what the sources name is joined; no source replaces another.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.checkpoints.configs import stated
from foretell.checkpoints.templates import as_parts, roles_of_parts

MARKERS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "▁<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<turn|>", "<|tool_response>", "[e~[",
)  # fmt: skip
"""Tokens that end an answer in every vocabulary that has them, whatever its metadata say of them: those by which llama.cpp
recognises one."""
SPECIAL_MARKERS = ("</s>", "<eos>", "[EOS]")
"""The same, where they are special tokens: Gemma's ``</s>`` is a word of HTML."""
_MESSAGE_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""A vocabulary that has these ends one message of an answer with ``<|end|>``, and goes on with the next."""
_SAID = "foretell answers"
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


def joined(*sources: Any) -> tuple[int, ...]:
    """The ids that sources name, each once, in their order. A source is an id, ids, or None; what is no id is left out."""
    found: dict[int, None] = {}
    for source in sources:
        ids = source if isinstance(source, Iterable) and not isinstance(source, str) else (source,)
        found |= dict.fromkeys(id for id in ids if type(id) is int and id >= 0)
    return tuple(found)


def of_configs(generation: Any, *configs: Any) -> tuple[int, ...]:
    """The ids that a generation configuration (or None) and model configurations name."""
    return joined(*(getattr(config, "eos_token_id", None) for config in (generation, *configs)))


def drop_default(config: Any, path: Path) -> Any:
    """config without the ends that are defaults of its classes, where the files name others: Llama's is 2, which is any
    token in another vocabulary. Returns config."""
    # Files that cannot be read say nothing: others complain of them.
    about, generation = (stated(path / file) or {} for file in ("config.json", "generation_config.json"))
    text = config.get_text_config()
    levels: list[tuple[Any, dict[str, Any]]] = [(config, about)]
    if text is not config:
        levels.append((text, next((about[key] for key in about if getattr(config, key, None) is text), {})))
    if generation.get("eos_token_id") is None and not any("eos_token_id" in says for _, says in levels):
        return config  # all that there is
    for level, says in levels:
        if "eos_token_id" not in says:
            level.eos_token_id = None
    return config


def marked(known: Mapping[str, int], is_special: Callable[[int], bool]) -> list[int]:
    """The ids of a vocabulary's end markers, known by their text. known: token -> id, of MARKERS and SPECIAL_MARKERS."""
    texts = [text for text in MARKERS if text in known]
    if any(ends <= known.keys() for ends in _MESSAGE_ENDS):
        texts = [text for text in texts if text != "<|end|>"]
    texts += [text for text in SPECIAL_MARKERS if text in known and is_special(known[text])]
    return [known[text] for text in texts]


def with_tokenizer(model: tuple[int, ...], vocab_size: int, tokenizer: Any) -> tuple[int, ...]:
    """The ends that the model names, with those that its tokenizer knows: the tokens that it names, markers of its
    vocabulary, and what its chat template closes an answer with. All are below vocab_size."""
    ids = getattr(tokenizer, "convert_tokens_to_ids", None)
    if ids is None:
        return model
    unknown = getattr(tokenizer, "unk_token_id", None)
    added = getattr(tokenizer, "added_tokens_decoder", {})

    def find(text: str) -> int | None:
        index = ids(text)
        is_one = type(index) is int and (index != unknown or text == str(tokenizer.unk_token))
        return index if is_one else None

    names = [getattr(tokenizer, f"{name}_token", None) for name in ("eos", "eot", "eom")]
    named = [find(str(name)) for name in names if name]
    known = {text: index for text in (*MARKERS, *SPECIAL_MARKERS) if (index := find(text)) is not None}
    ends = joined(model, named, marked(known, lambda index: bool(getattr(added.get(index), "special", False))))
    closing = _closing(tokenizer, {str(token): index for index, token in added.items()}, find)
    if not set(closing) & set(ends):
        ends = joined(ends, closing[:1])
    return tuple(index for index in ends if index < vocab_size)


def _closing(tokenizer: Any, added: Mapping[str, int], find: Callable[[str], int | None]) -> list[int]:
    """The tokens that the chat template writes right after an answer, blanks aside; none where there is no template, or it
    writes anything else."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    turns = [{"role": "user", "content": "foretell asks"}, {"role": "assistant", "content": _SAID}]

    def write(turns: Sequence[Mapping[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(turns, tokenize=False))

    in_parts = roles_of_parts(write)
    try:
        text = write([as_parts(turn, in_parts) for turn in turns])
    except Exception:  # templates raise their own errors, and any other by what they read
        return []
    rest = text.rpartition(_SAID)[2].lstrip() if _SAID in text else ""
    found = []
    while rest:
        tag = _TAG.match(rest)
        texts = [token for token in added if token and rest.startswith(token)] + ([tag[0]] if tag else [])
        token = max(texts, key=len, default="")
        index = added.get(token, find(token)) if token else None
        if index is None:
            break
        found.append(index)
        rest = rest[len(token) :].lstrip()
    return found
