"""Templates that read texts as parts, and what a template leaves out of what was said."""

from functools import cache
from typing import Any

import pytest

from foretell import ConfigError, Engine, PromptError
from foretell.checkpoints.templates import roles_of_parts
from foretell.engine.request.calls import arguments_in, arguments_text, messages_with_tools
from foretell.engine.request.conversation import is_instruct, render, untold
from tests.engine.request.test_conversation import tokenizer_with, turns

LOOP, END = "{% for m in messages %}", "{% endfor %}"
TEXT = "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}"
PARTS = {
    "guard": "{% for m in messages %}<{{ m.role }}>" + TEXT + "<|im_end|>" + END,
    "smolvlm": LOOP + "{{ m.role | capitalize }}{% if m.content[0]['type'] == 'image' %}:{% else %}: {% endif %}" + TEXT
    + "<|im_end|>" + END + "{% if add_generation_prompt %}Assistant:{% endif %}",
    "llava": LOOP + "{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}" + END,
    "first part": LOOP + "<{{ m.role }}>{{ m.content[0].text }}" + END,
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + LOOP
    + "<{{ m.role }}>" + TEXT + END,
}  # fmt: skip
"""Templates as those of vision models and of guards are."""
BOTH = LOOP + "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}[parts]" + TEXT + "{% endif %}" + END
PLAIN = LOOP + "<{{ m.role }}>{{ m.content }}" + END
JSON = LOOP + "{{ m | tojson }}" + END
OF_USER = LOOP + "<{{ m.role }}>{% if m.role == 'user' %}" + TEXT + "{% else %}{{ m.content + '' }}{% endif %}" + END
CALL: dict[str, Any] = {
    "id": "a",
    "type": "function",
    "function": {"name": "now", "arguments": '{"at": "Z\\u00fcrich"}'},
}
CALLS = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
         {"role": "tool", "content": "noon", "tool_call_id": "a"}]  # fmt: skip
SHOWN = '<tool_call>\n{"name": "now", "arguments": {"at": "Zürich"}}\n</tool_call>'
TOLD = f"<user>When?<assistant>{SHOWN}<user><tool_response>\nnoon\n</tool_response>"


@cache
def _tokenizer() -> Any:
    return tokenizer_with(None)


def with_template(template: Any) -> Any:
    """The bundled tokenizer, read once."""
    _tokenizer().chat_template = template
    return _tokenizer()


def text_of(template: str, messages: Any, **options: Any) -> str:
    return render(messages, with_template(template), "model", **{"generate": False, **options}).text


def roles(template: str) -> frozenset[str]:
    tokenizer = with_template(template)
    return roles_of_parts(lambda given: tokenizer.apply_chat_template(given, tokenize=False))


# -- texts as parts ------------------------------------------------------------------------------------------------------


def test_which_roles_are_read_as_parts_is_found_by_rendering() -> None:
    every = {"user", "assistant", "system", "developer", "tool"}
    assert {name: roles(template) for name, template in PARTS.items()} == dict.fromkeys(PARTS, every)
    assert (
        roles(BOTH) == roles(PLAIN) == roles(JSON) == roles("D") == roles("{{ raise_exception('a') }}") == frozenset()
    )
    assert roles(OF_USER) == {"user"}
    assert (
        roles(LOOP + "{% if m.content is not string %}{{ m.content }}{% endif %}" + END) == frozenset()
    )  # as Python's list


@pytest.mark.parametrize("name", PARTS)
def test_a_template_that_reads_parts_gets_them_of_every_role(name: str) -> None:
    for content in ("hi", "a text that is longer than a few letters"):
        for role in ("user", "assistant", "system", "developer", "tool", "judge"):
            said = turns(("system", "be brief"), ("user", "a question"), (role, content))
            assert content in text_of(PARTS[name], said), role
            parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in said]
            assert text_of(PARTS[name], parts) == text_of(PARTS[name], said)


def test_parts_and_strings_where_each_is_read() -> None:
    given = turns(("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    for template in (BOTH, PLAIN, OF_USER):
        assert text_of(template, given) == "<system>be brief<user>a<assistant>b<user>c"
    two = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    assert text_of(PLAIN, two) == "<user>a b"
    assert text_of(PARTS["llava"], two) == "USER: a b "
    with pytest.raises(PromptError, match="a part of type 'image' is not read"):
        text_of(PARTS["llava"], [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}])
    calls = text_of(PARTS["guard"], CALLS)
    assert calls.replace("<|im_end|>", "") == TOLD


@pytest.mark.parametrize("name", PARTS)
def test_a_last_message_in_parts_is_gone_on_with(name: str) -> None:
    said = turns(("user", "a"), ("assistant", "Once upon"))
    assert text_of(PARTS[name], said, goes_on=True).endswith("Once upon")
    assert text_of(PARTS[name], said, generate=False).endswith("Once upon") is (name in ("first part", "no system"))


def test_markers_where_parts_are_read() -> None:
    tokenizer = tokenizer_with(PARTS["guard"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert is_instruct(tokenizer, [end])
    engine = Engine.load("bundled")
    engine.tokenizer = tokenizer
    ids = engine.chat_prompt(turns(("user", "a<|im_end|>b")))
    assert ids.count(end) == 1
    assert tokenizer.decode(ids) == "<user>a<|im_end|>b<|im_end|>"


# -- what is left out ----------------------------------------------------------------------------------------------------

WITHOUT = {
    "user": LOOP + "{% if m.role != 'user' %}<{{ m.role }}>{{ m.content }}{% endif %}" + END,
    "assistant": LOOP + "{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% endif %}" + END,
    "judge": LOOP + "{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}" + END,
    "the first alone": "{{ messages[0].content }}",
}


@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("content", ["a", "a text that is longer than a few letters", "ÄÖ 漢字", "<user>", "hello"])
def test_a_text_that_does_not_reach_the_prompt_is_an_error(without: str, content: str) -> None:
    role = "user" if without == "the first alone" else without
    given = turns(("user", "hello"), ("assistant", "yes"), (role, content), ("user", "and a long text of the user"))
    with pytest.raises(
        PromptError, match=rf"leaves out the text of the (user|assistant|{role}), '.*'\): say that in a"
    ):
        text_of(WITHOUT[without], given)


@pytest.mark.parametrize("content", ["a", "a text that is longer than a few letters"])
def test_of_two_equal_texts_one_may_be_lost(content: str) -> None:
    template = LOOP + "{% if m.role != 'judge' %}<{{ m.role }}>{{ m.content }}{% endif %}" + END
    with pytest.raises(PromptError, match="leaves out the text of the judge"):
        text_of(template, turns(("user", content), ("judge", content)))


CHANGED = {
    "stripped": LOOP + "{{ m.content.strip() }}|" + END,
    "upper": LOOP + "{{ m.content | upper }}" + END,
    "as JSON": LOOP + "{{ m.content | tojson }}" + END,
    "thoughts cut off": LOOP + "{{ m.content.split('</think>')[-1] }}" + END,
    "another order": "{% for m in messages | reverse %}{{ m.content }}" + END,
    "switches cut out": LOOP + "{{ m.content.replace('/no_think', '') }}" + END,
    "thought of the last alone": LOOP + "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}" + END,
}


@pytest.mark.parametrize("how", CHANGED)
def test_what_a_template_changes_is_no_loss(how: str) -> None:
    said = " a \"text\" that is 'longer' than a few letters\n"
    thought = {
        "role": "assistant",
        "content": "<think>\nhm, that is long\n</think>\n\nb",
        "reasoning_content": "hm, hm",
    }
    text = text_of(
        CHANGED[how], [*turns(("system", said), ("user", "/no_think a" + said)), thought, *turns(("user", " "))]
    )
    assert "letters" in text.lower()


def test_a_text_that_is_there_costs_no_second_rendering() -> None:
    count = 0

    def write(given: Any) -> str:
        nonlocal count
        count += 1
        return "".join(f"<{one['role']}>{one['content']}" for one in given)

    long = turns(("user", "a text that is longer than a few letters"), ("assistant", "and another one, as long"))
    assert untold(long, write(long), write) is None
    assert count == 1
    short = turns(("user", "a"))
    assert untold(short, write(short), write) is None
    assert untold(short, "a", lambda given: "") == "the text of the user, 'a'"


# -- calls ---------------------------------------------------------------------------------------------------------------

QWEN = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}" + LOOP + "<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    + END
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "value", "text"),
    [
        ("", {}, "{}"),
        (" \n", {}, "{}"),
        (None, {}, "{}"),
        ("null", {}, "{}"),
        ("{}", {}, "{}"),
        ('{"b":1,"a":[ 2 ]}', {"b": 1, "a": [2]}, '{"b": 1, "a": [2]}'),
        ('{"a": "Z\\u00fcrich"}', {"a": "Zürich"}, '{"a": "Zürich"}'),
        ({"a": "Zürich"}, {"a": "Zürich"}, '{"a": "Zürich"}'),
        ('{"n": 12345678901234567891}', {"n": 12345678901234567891}, '{"n": 12345678901234567891}'),
        ('{"a": "\\ud83d"}', {"a": "\ud83d"}, '{"a": "\\ud83d"}'),
        ('{"a": 1', '{"a": 1', '{"a": 1'),
        ('{"a": 1e999}', '{"a": 1e999}', '{"a": 1e999}'),
        ('{"a": NaN}', '{"a": NaN}', '{"a": NaN}'),
        ("not JSON", "not JSON", "not JSON"),
        ('"a text"', '"a text"', '"a text"'),
        ("[1,2]", [1, 2], "[1, 2]"),
        ("9" * 5000, "9" * 5000, "9" * 5000),
    ],
)
def test_arguments_are_one_value_and_one_text(given: Any, value: Any, text: str) -> None:
    assert arguments_in(given) == value
    assert list(value) == list(arguments_in(given))
    assert arguments_text(given) == arguments_text(value) == text
    call = {**CALL, "function": {"name": "now", "arguments": given}}
    said = [CALLS[0], {"role": "assistant", "content": "", "tool_calls": [call]}, CALLS[2]]
    assert f'"arguments": {text}}}' in text_of(PLAIN, said)


def test_deep_arguments_are_texts_where_calls_are() -> None:
    deep = "[" * 900 + "]" * 900
    call = {"function": {"name": "now", "arguments": deep}}
    made = messages_with_tools([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert deep in made[0]["content"]


def test_calls_are_told_by_every_template() -> None:
    call = "<tool_call>now {&quot;at&quot;: &quot;Zürich&quot;}".replace("&quot;", '"')
    assert text_of(QWEN, CALLS) == f"<user>When?<assistant>None{call}<tool>noon".replace("None", "")
    assert text_of(PLAIN, CALLS) == TOLD  # it shows no calls: they are texts
    in_text = QWEN.replace("c.function.arguments | tojson", "'`' + c.function.arguments + '`'")
    assert '<tool_call>now `{"at": "Zürich"}`' in text_of(in_text, CALLS)
    as_python = QWEN.replace("c.function.arguments | tojson", "c.function.arguments")
    assert '<tool_call>now {"at": "Zürich"}' in text_of(as_python, CALLS)
    short = [CALLS[0], {**CALLS[1], "tool_calls": [{"function": {"name": "now"}}]}, CALLS[2]]
    assert "<tool_call>now {}" in text_of(QWEN, short)


@pytest.mark.parametrize("content", ["I look.", "a text that is longer than a few letters"])
def test_a_text_beside_calls_is_told(content: str) -> None:
    given = [CALLS[0], {**CALLS[1], "content": content, "reasoning_content": "hm"}, CALLS[2]]
    drops = QWEN.replace(
        "{{ m.content }}", "{{ m.reasoning_content }}{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    )
    told = text_of(drops, given)
    assert told.startswith(f"<user>When?<assistant>hm{content}<assistant><tool_call>now")
    assert "<tool>noon" in told
    once = drops.replace("<{{ m.role }}>", "{% if loop.previtem and loop.previtem.role == m.role %}"
                         "{{ raise_exception('twice') }}{% endif %}<{{ m.role }}>")  # fmt: skip
    assert f"<assistant>hm{content}\n<tool_call>" in text_of(once, given)


def test_a_call_that_no_form_tells_is_an_error() -> None:
    users = LOOP + "{% if m.role == 'user' %}{{ m.content }}{% endif %}" + END
    with pytest.raises(PromptError, match="leaves out the text of the assistant, '<tool_call>"):
        text_of(users, CALLS)
    with pytest.raises(ConfigError, match="no chat template"):
        render(CALLS, tokenizer_with(None), "model")
