"""Templates that take no system's turn, want turns to alternate, or have names; and texts that begin with BOS."""

from typing import Any

import pytest
from tokenizers import processors

from foretell import ConfigError, Engine, PromptError
from foretell.engine.request.conversation import render, template_of
from foretell.engine.request.request import Request, token_ids
from foretell.model.load import load_tokenizer

ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
WRITE = "<{{ m.role }}>{{ m.content }}"
TEMPLATES = {
    "plain": "{% for m in messages %}" + WRITE + "{% endfor %}",
    "no system, alternating": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}" + ALTERNATE + WRITE + "{% endfor %}",
    "alternating": "{% for m in messages %}" + ALTERNATE + WRITE + "{% endfor %}",
    "drops system": "{% for m in messages if m.role != 'system' %}" + WRITE + "{% endfor %}",
    "system first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}" + WRITE + "{% endfor %}",
    "drops later system": "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + WRITE + "{% endif %}"
    "{% endfor %}",
}
FOLDED = "<user>be brief\n\na<assistant>b<user>and brief\n\nc"
LATER = "<system>be brief<user>a<assistant>b<user>and brief\n\nc"


def tokenizer_with(template: Any) -> Any:
    tokenizer = load_tokenizer("bundled")
    tokenizer.chat_template = template
    return tokenizer


def turns(*given: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in given]


def text_of(template: str, *given: tuple[str, str]) -> str:
    return render(turns(*given), tokenizer_with(TEMPLATES[template]), "model").text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("plain", "<system>be brief<user>a<assistant>b<system>and brief<user>c"),
        ("no system, alternating", FOLDED),
        ("alternating", FOLDED),
        ("drops system", FOLDED),
        ("system first", LATER),
        ("drops later system", LATER),
    ],
    ids=TEMPLATES,
)
def test_what_the_system_says_is_told_by_every_template(template: str, text: str) -> None:
    given = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("system", "and brief"), ("user", "c")]
    assert text_of(template, *given) == text


def test_only_what_must_be_is_changed() -> None:
    assert text_of("plain", ("user", "a"), ("user", "b")) == "<user>a<user>b"
    assert text_of("alternating", ("user", "a"), ("user", "b")) == "<user>a\n\nb"
    assert text_of("alternating", ("user", "a"), ("assistant", "b"), ("assistant", "c")) == "<user>a<assistant>b\n\nc"
    assert text_of("drops system", ("system", " "), ("user", "a")) == "<user>a"
    assert text_of("drops system", ("system", "a"), ("user", "a")) == "<user>a\n\na"
    assert text_of("no system, alternating", ("system", "a")) == "<user>a"
    upper = tokenizer_with("{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}")
    long = "a text that is longer than a few letters"
    assert render(turns(("system", long), ("user", "b")), upper, "model").text == f"<system>{long.upper()}<user>B"


def test_what_cannot_be_mended_is_refused_for_what_is_left() -> None:
    with pytest.raises(PromptError, match=r"refuses these messages \(roles must alternate\)"):
        text_of("no system, alternating", ("system", "a"), ("user", "b"), ("other", "c"), ("other", "d"))
    names = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "b", "name": "Bob"}]
    with pytest.raises(PromptError, match="alternate"):  # one name would be lost
        render(names, tokenizer_with(TEMPLATES["alternating"]), "model")
    with pytest.raises(PromptError, match="must be a list"):
        render("a", tokenizer_with(TEMPLATES["plain"]), "model")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="half a surrogate"):
        render(turns(("user", "a\ud83d")), tokenizer_with(TEMPLATES["plain"]), "model").ids()


def test_named_templates_as_transformers_takes_them() -> None:
    default, with_tools = (name + "{{ messages[0].content }}" for name in "DT")
    tokenizer = tokenizer_with({"default": default, "tool_use": with_tools})
    assert (template_of(tokenizer), template_of(tokenizer, tools=True)) == (default, with_tools)
    assert render(turns(("user", "a")), tokenizer, "model").text == "Da"
    assert render(turns(("user", "a")), tokenizer, "model", tools=[]).text == "Ta"
    assert template_of(tokenizer_with({"default": default, "rag": "R"}), tools=True) == default
    with pytest.raises(ConfigError, match=r"no chat template for these messages \('tool_use' alone\)"):
        render(turns(("user", "a")), tokenizer_with({"tool_use": with_tools}), "model")
    with pytest.raises(ConfigError, match="'model' has no chat template: "):
        render(turns(("user", "a")), tokenizer_with(None), "model")


def beginning_with(*first: str) -> Any:
    """The bundled tokenizer, which then puts these tokens before a text."""
    tokenizer = load_tokenizer("bundled")
    edges = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|pad|>", "<|im_end|>")]
    parts = [*first, "$A", "<|im_end|>"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=edges)
    return tokenizer


@pytest.mark.parametrize("first", [("<|im_start|>",), ("<|pad|>", "<|im_start|>")])
def test_a_text_that_begins_with_bos_gets_no_second_one(first: tuple[str, ...]) -> None:
    tokenizer, begun = beginning_with(*first), "".join(first)
    wanted = tokenizer.encode("a cat")
    assert tokenizer.decode(wanted) == f"{begun}a cat<|im_end|>"
    assert token_ids("a cat", tokenizer) == wanted
    assert token_ids(f"{begun}a cat", tokenizer) == wanted
    assert token_ids(f"{begun}{begun}a cat", tokenizer) == [*wanted[: len(first)], *wanted]  # as it was written
    assert token_ids(f"a cat {begun}", tokenizer) == tokenizer.encode(f"a cat {begun}")
    bare = load_tokenizer("bundled")
    assert token_ids("<|im_start|><|im_start|>a", bare) == bare.encode("<|im_start|><|im_start|>a")


def test_bos_by_the_engine() -> None:
    engine = Engine.load("bundled")
    engine.tokenizer = beginning_with("<|im_start|>")
    one, other = (engine.make_row(0, Request(text)).prompt_ids for text in ("a", "<|im_start|>a"))
    assert one == other
    engine.tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}"
    assert engine.chat_prompt(turns(("user", "a"))) == one[:-1]
