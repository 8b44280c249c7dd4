"""Tokenizers and chat templates read without transformers against its own: ids, texts, special tokens, rendered chats."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from foretell import bundled
from foretell.checkpoints.tokenizer import PlainTokenizer
from foretell.model.load import load_tokenizer

TEXTS = (
    "", " ", "  hello  world", "def f(x):\n\treturn x  # one", "I'll don't it's .", "e\u0301 \u00e9 \U0001f600",
    "<s>x</s> y<end>",
    "<|im_start|>user\nhi<|im_end|>\n", "\ufffd\x00", "a , b ! c ? n't", "zzz \u4e2d\u6587", "the the<tool>the <tool> ",
)  # fmt: skip
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = "abcdefghijklmnopqrstuvwxyz"


TRUNCATION = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


def byte_level() -> Tokenizer:
    vocab = {symbol: index for index, symbol in enumerate(ALPHABET)} | {"th": 256, "the": 257}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<end>"])
    inner.add_tokens([AddedToken("<tool>", normalized=False)])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    return inner


def metaspace() -> Tokenizer:
    """As sentencepiece: a space before every text, Unigram."""
    pieces = ["<unk>", "<s>", "<end>", "\u2581the", "\u2581", *LETTERS, *LETTERS.upper(), ".", ","]
    inner = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], 0, False))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["<unk>", "<s>", "<end>"])
    inner.add_tokens([AddedToken("<tool>", lstrip=True)])
    return inner


def wordpiece() -> Tokenizer:
    """Lower case, pieces after the first with ##."""
    words = [
        "<unk>",
        "<s>",
        "<end>",
        "the",
        "hello",
        "##lo",
        *LETTERS,
        *(f"##{letter}" for letter in LETTERS),
        ".",
        ",",
        "!",
        "'",
    ]
    inner = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=False)
    inner.add_special_tokens(["<unk>", "<s>", "<end>"])
    return inner


def saved(folder: Path, inner: Tokenizer, **options: Any) -> Path:
    unknown = {"unk_token": "<unk>"} if inner.token_to_id("<unk>") is not None else {}
    named = {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<end>", **unknown}
    PreTrainedTokenizerFast(tokenizer_object=inner, **{**named, **options}).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def both(folder: Path) -> tuple[Any, Any]:
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


def assert_same(found: Any, own: Any) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = own.encode(text, add_special_tokens=special)
            assert found.encode(text, add_special_tokens=special) == ids, text
            for skips in (True, False):
                assert found.decode(ids, skip_special_tokens=skips) == own.decode(ids, skip_special_tokens=skips), text
        assert [found.decode(index) for index in ids] == [own.decode([index]) for index in ids]
        assert found.convert_ids_to_tokens(ids) == own.convert_ids_to_tokens(ids)
    for name in (
        "all_special_tokens", "all_special_ids", "special_tokens_map", "extra_special_tokens", "bos_token", "bos_token_id",
        "eos_token", "eos_token_id", "unk_token", "unk_token_id", "pad_token_id", "mask_token", "chat_template",
        "vocab_size", "model_max_length", "clean_up_tokenization_spaces", "is_fast",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(own, name), name
    assert found.get_vocab() == own.get_vocab()
    assert found.get_added_vocab() == own.get_added_vocab()
    assert {key: repr(token) for key, token in found.added_tokens_decoder.items()} == {
        key: repr(token) for key, token in own.added_tokens_decoder.items()
    }
    assert len(found) == len(own)
    tokens = ["the", "<s>", "<end>", "<unk>", "never seen", "<|im_end|>"]
    assert found.convert_tokens_to_ids(tokens) == own.convert_tokens_to_ids(tokens)
    assert (
        found.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
        or found.backend_tokenizer.post_processor is None
    )


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_bundled_ones(name: str) -> None:
    found, own = both(Path(bundled.path(name)))
    assert isinstance(found, PlainTokenizer)
    assert_same(found, own)


@pytest.mark.parametrize("kind", [byte_level, metaspace, wordpiece])
@pytest.mark.parametrize("cleans", [False, True])
def test_made_up_ones(tmp_path: Path, kind: Callable[[], Tokenizer], cleans: bool) -> None:
    found, own = both(saved(tmp_path, kind(), clean_up_tokenization_spaces=cleans))
    assert isinstance(found, PlainTokenizer)
    assert_same(found, own)


def qwen(folder: Path, kind: str, **options: Any) -> Path:
    """As Qwen2's repositories have it."""
    vocab = {symbol: index for index, symbol in enumerate(ALPHABET)} | {"th": 256, "the": 257}
    own = Qwen2Tokenizer(vocab=vocab, merges=[("t", "h"), ("th", "e")], **options)
    own.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    own.add_tokens([AddedToken("<tool>", normalized=False)])
    own.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"eos_token": "<|im_end|>", "unk_token": None}])
def test_qwen_s_own_class(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    found, own = both(qwen(tmp_path, kind, **options))
    assert isinstance(found, PlainTokenizer)
    assert type(own) is Qwen2Tokenizer
    assert_same(found, own)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("normalizer", {"type": "NFKC"}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}),
        ("normalizer", None),
    ],
)
def test_a_file_that_qwen_s_class_would_not_make_is_left_to_it(tmp_path: Path, key: str, value: Any) -> None:
    folder = qwen(tmp_path, "qwen2")
    changed(folder, "tokenizer.json", {key: value})
    found, own = both(folder)
    assert type(found) is type(own) is Qwen2Tokenizer
    assert found.encode("the \ufb01 1234") == own.encode("the \ufb01 1234")


def test_further_special_tokens(tmp_path: Path) -> None:
    inner = byte_level()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder = saved(tmp_path, inner, extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    found, own = both(folder)
    assert isinstance(found, PlainTokenizer)
    assert_same(found, own)


def changed(folder: Path, file: str, change: dict[str, Any]) -> None:
    path = folder / file
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**content, **change}), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"a_key_of_tomorrow": 1}),
        ("tokenizer_config.json", {"eos_token": "<new>"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<tool>"]}),
        ("tokenizer_config.json", {"image_token": "<s>"}),
        ("tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "<end>", "lstrip": True}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "x"}]}),
        ("tokenizer.json", {"truncation": TRUNCATION}),
        ("special_tokens_map.json", {"eos_token": "<s>"}),
        ("added_tokens.json", {"<more>": 261}),
        ("config.json", {"model_type": "qwen2"}),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_left_to_transformers(tmp_path: Path, file: str, change: dict[str, Any]) -> None:
    folder = saved(tmp_path, byte_level())
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if file == "special_tokens_map.json":
        settings.pop("added_tokens_decoder", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert isinstance(load_tokenizer(str(folder)), PlainTokenizer)
    changed(folder, file, change)
    found, own = both(folder)
    assert type(found) is type(own)
    assert found.encode("the <tool> x<end>") == own.encode("the <tool> x<end>")


def test_without_settings_transformers_reads_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level())
    (folder / "tokenizer_config.json").unlink()
    assert not isinstance(load_tokenizer(str(folder)), PlainTokenizer)


@pytest.mark.parametrize("reader", ["ours", "transformers"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [('{"chat_template": "{{ messages[0].content }}!"}', "hi!"), ('{"chat_template": 7}', None), ("[", None)],
)
def test_the_template_of_a_processor(tmp_path: Path, reader: str, content: str, expected: str | None) -> None:
    """``chat_template.json`` alone is read; a template that the tokenizer names, or a file of its own, goes before."""
    folder = saved(tmp_path, byte_level())
    if reader == "transformers":
        (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.json").write_text(content, encoding="utf-8")
    found = load_tokenizer(str(folder))
    assert isinstance(found, PlainTokenizer) == (reader == "ours")
    chat = [{"role": "user", "content": "hi"}]
    assert (found.apply_chat_template(chat, tokenize=False) if found.chat_template else None) == expected
    (folder / "chat_template.jinja").write_text("own", encoding="utf-8")
    assert load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False) == "own"


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <b> & 'x' \u00e9"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\n"},
        {"role": "assistant", "content": " b "},
    ],
    [{"role": "user", "content": None, "name": "x"}, {"role": "assistant", "content": "y", "reasoning": "because"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": "", "thinking": "z"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "<\u00e9>"}}}]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n  {{ m['content'] | trim }}|\n{% endfor %}",
    "{% for m in messages %}{% generation %}{% set x = 'in' %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}",
    "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}{{ documents is none }}",
    "{% set ns = namespace(n=0, self=2) %}{% for m in tools or [1] %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}{{ ns.self }}",
    "{% set ns = namespace(_x=1) %}", "{% set ns = namespace() %}{% set ns._x = 1 %}", "{{ ''.__class__ }}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}{% endfor %}",
    "{{ raise_exception('no ' + messages[0].role) }}", "{{ strftime_now('%Y') }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}",
    "{{ messages.append(1) }}", "{{ messages[0].content.x.y }}",
    "{% for m in messages %}{{ m.content.strip() }}x{% endfor %}",
    "{% if", "{{ extra }}{{ flag is sameas true }}{{ pad_token }}{{ unk_token is defined }}", "{{ dict.__class__ }}",
    "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "{{ messages[0].content | tojson }}",
)  # fmt: skip


def attempt(render: Callable[[], Any]) -> tuple[str, str]:
    """The text, or the kind of the error."""
    try:
        return "text", render()
    except Exception as error:
        return "error", type(error).__name__


@pytest.mark.parametrize("template", TEMPLATES, ids=map(str, range(len(TEMPLATES))))
def test_chats(tmp_path: Path, template: str) -> None:
    found, own = both(saved(tmp_path, byte_level()))
    found.chat_template = own.chat_template = template
    loaded: list[Any] = []
    found._whole = loaded.append
    count = 0
    for chat in CHATS:
        for options in (
            {}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"continue_final_message": True},
            {"extra": "e", "flag": True},
            {"extra": {"x": object}, "eos_token": "E"}, {"tools": TOOLS, "documents": [{"title": "t"}]},
        ):  # fmt: skip
            if options.get("continue_final_message") and not isinstance(chat[-1].get("content"), str):
                continue
            expected = attempt(lambda c=chat, o=options: own.apply_chat_template(c, tokenize=False, **o))  # type: ignore[misc]
            got = attempt(lambda c=chat, o=options: found.apply_chat_template(c, tokenize=False, **o))  # type: ignore[misc]
            assert got == expected, (chat, options)
            count += 1
    assert count > 20
    assert loaded == []


def test_it_can_be_copied_and_sent(tmp_path: Path) -> None:
    found, own = both(saved(tmp_path, byte_level(), chat_template=TEMPLATES[0]))
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert_same(other, own)
        assert other.tokenize("the x") == own.tokenize("the x")


def test_templates_by_name(tmp_path: Path) -> None:
    found, own = both(saved(tmp_path, byte_level()))
    for given in ({"default": "D", "tool_use": "T"}, {"tool_use": "T"}, {"default": "D"}, None, "X"):
        found.chat_template = own.chat_template = given
        for options in ({}, {"tools": TOOLS}, {"chat_template": "tool_use"}, {"chat_template": "Y"}):
            expected = attempt(lambda o=options: own.apply_chat_template(CHATS[0], tokenize=False, **o))  # type: ignore[misc]
            assert attempt(lambda o=options: found.apply_chat_template(CHATS[0], tokenize=False, **o)) == expected  # type: ignore[misc]


def test_other_methods_are_those_of_transformers(tmp_path: Path) -> None:
    found, own = both(saved(tmp_path / "a", byte_level(), chat_template=TEMPLATES[0]))
    assert found("the x")["input_ids"] == own("the x")["input_ids"]
    assert found.tokenize("the x") == own.tokenize("the x")
    assert found.apply_chat_template(CHATS[0])["input_ids"] == own.apply_chat_template(CHATS[0])["input_ids"]
    assert found.decode([[257, 32], [1]]) == own.decode([[257, 32], [1]])
    assert not hasattr(found, "eot_token")
    assert found._loaded is not None
    found.chat_template = "changed"
    found.save_pretrained(tmp_path / "b")
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "b")
    again = load_tokenizer(str(tmp_path / "b"))
    assert isinstance(again, PlainTokenizer)
    assert (again.chat_template, again.encode("the x")) == ("changed", own.encode("the x"))
    assert found.encode("the x y", max_length=3, truncation=True) == own.encode(
        "the x y", max_length=3, truncation=True
    )
