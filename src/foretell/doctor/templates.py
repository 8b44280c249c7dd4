"""Prompts in several formats: the tokenizer's own, plain text, and the chat templates that most models have."""

from collections.abc import Sequence

from foretell.bench.script import encode_item
from foretell.bench.suite import Item
from foretell.core.errors import ForetellError
from foretell.engine.engine import Engine
from foretell.engine.request.request import token_ids

TEMPLATES = {
    "ChatML": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    ),
    "Llama 3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "Vicuna": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
        "and polite answers to the user's questions. {% for m in messages %}{{ m['role'].upper() }}: {{ m['content'] }} "
        "{% endfor %}ASSISTANT:"
    ),
    "Zephyr": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}<|assistant|>\n",
}
"""By name, in Jinja."""
GIVEN, PLAIN = "given", "plain text"


def formats_of(engine: Engine, items: Sequence[Item]) -> dict[str, list[list[int]]]:
    """The prompts' token ids by the name of their format, the given one first; formats that come to the same are left
    out."""
    out = {GIVEN: [encode_item(engine, item) for item in items]}
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return out
    texts = [item.prompt for item in items]
    others = {PLAIN: [token_ids(text, tokenizer) for text in texts]}
    apply = getattr(tokenizer, "apply_chat_template", None)
    for name, template in TEMPLATES.items() if apply is not None else ():
        assert apply is not None
        try:
            rendered = [
                apply([{"role": "user", "content": text}], chat_template=template, tokenize=False) for text in texts
            ]
        except (ForetellError, ValueError, TypeError):
            continue
        others[name] = [list(tokenizer.encode(text, add_special_tokens=False)) for text in rendered]
    for name, ids in others.items():
        if ids not in out.values():
            out[name] = ids
    return out
