"""Tokenizers out of files against the ones they were made of, on thousands of texts."""

import random
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foretell import bundled
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.tokenizer import SPLITTINGS, read_tokenizer
from foretell.core.errors import ModelError
from tests.checkpoints.gguf.make import _add, _tokens
from tests.cli import checkpoint

CODE = Path(__file__).read_text(encoding="utf-8")
SPECIAL = (
    "<|im_start|>user\nhi<|im_end|>\n",
    "  1   22\n\n 333",
    "I'LL don't it's",
    "e\u0301 \u00e9",
    " <end> x",
    "\t\t x\r\n\r\n",
)


def texts(count: int = 1500) -> list[str]:
    """Pieces of code, and mixtures of letters, digits, spaces, marks, ideographs and emoji."""
    draw = random.Random(7)
    found = list(SPECIAL)
    for _ in range(count):
        at = draw.randrange(len(CODE))
        found.append(CODE[at : at + draw.randrange(1, 120)])
        kinds = (
            (32, 127),
            (32, 33),
            (48, 58),
            (10, 11),
            (0xA0, 0x3000),
            (0x4E00, 0x9FFF),
            (0x1F600, 0x1F640),
            (0x660, 0x66A),
        )
        letters = [chr(draw.randrange(*draw.choice(kinds))) for _ in range(draw.randrange(1, 40))]
        found.append("".join(letters))
    return found


def put(path: Path, metadata: dict[str, Any]) -> Path:
    """A file with a vocabulary and no tensors."""
    writer = GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal(found: Any, own: Any, what: list[str]) -> None:
    for text in what:
        ids = own.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids) == own.decode(ids)
        assert found.decode(ids, skip_special_tokens=True) == own.decode(ids, skip_special_tokens=True)


def test_the_bundled_one(tmp_path: Path) -> None:
    """8,192 tokens, special tokens, chat template."""
    own = AutoTokenizer.from_pretrained(bundled.path("target"))
    metadata = _tokens(own, 8192)
    found = read_tokenizer(open_gguf(put(tmp_path / "x.gguf", metadata), name="x"))
    what = texts()
    inner = str(own.backend_tokenizer.pre_tokenizer)
    splits_as_gpt2 = "Digits" not in inner and "Split" not in inner
    if not splits_as_gpt2:  # the rule is the vocabulary's own: compare by the same rule
        own.backend_tokenizer.pre_tokenizer = found.backend_tokenizer.pre_tokenizer
    assert_equal(found, own, what)
    assert found.get_vocab() == own.get_vocab()
    assert (found.eos_token_id, found.pad_token_id) == (own.eos_token_id, own.pad_token_id)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    for options in ({"add_generation_prompt": True}, {}):
        assert found.apply_chat_template(messages, tokenize=False, **options) == own.apply_chat_template(
            messages, tokenize=False, **options
        )


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, "D"),
        ({"tokenizer.chat_template.tool_use": "T"}, {"default": "D", "tool_use": "T"}),
        ({"tokenizer.chat_template.tool_use": "T", "tokenizer.chat_template": None}, {"tool_use": "T"}),
    ],
)
def test_named_templates(tmp_path: Path, more: dict[str, Any], wanted: Any) -> None:
    named = {"tokenizer.chat_template": "D", "tokenizer.chat_templates": ["tool_use"]}
    metadata = {**_tokens(checkpoint.tokenizer(), 400), **named, **more}
    assert read_tokenizer(open_gguf(put(tmp_path / "x.gguf", metadata), name="x")).chat_template == wanted


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_rule_of_splitting(tmp_path: Path, pre: str) -> None:
    """Against a tokenizer with the steps that llama.cpp and the models' own files name, on a trained vocabulary."""
    own = checkpoint.tokenizer()
    inner = own.backend_tokenizer
    inner.add_tokens([AddedToken("<tool>", normalized=False)])
    metadata = _tokens(own, len(own)) | {"tokenizer.ggml.pre": pre}
    found = read_tokenizer(open_gguf(put(tmp_path / "x.gguf", metadata), name="x"))
    splitting = SPLITTINGS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    if splitting.digits:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif splitting.pattern:
        from tokenizers import Regex

        patterns = (*splitting.before, splitting.pattern)
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    else:
        inner.pre_tokenizer = byte_level
    if splitting.nfc:
        inner.normalizer = normalizers.NFC()
    assert_equal(found, own, [*texts(150), "a<tool>b", "def return self the"])


def test_tokens_around_a_gap(tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(bundled.path("target"))
    named = {
        "tokenizer.ggml.fim_pre_token_id": 5,
        "tokenizer.ggml.fim_suf_token_id": 6,
        "tokenizer.ggml.fim_mid_token_id": 9000,
    }
    found = read_tokenizer(open_gguf(put(tmp_path / "x.gguf", _tokens(own, 8192) | named), name="x"))
    assert found.fill_ids == {"pre": 5, "suf": 6}


def test_spaces_before_digits(tmp_path: Path) -> None:
    """SmolLM's rule: every digit apart, so that the spaces before one stay together (GPT-2's rule parts them)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)} | {"ĠĠ": 256}
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list(vocab), "tokenizer.ggml.token_type": [1] * 257,
        "tokenizer.ggml.merges": ["Ġ Ġ"],
    }  # fmt: skip
    smollm = put(tmp_path / "a.gguf", metadata | {"tokenizer.ggml.pre": "smollm"})
    gpt2 = put(tmp_path / "b.gguf", metadata | {"tokenizer.ggml.pre": "gpt-2"})
    assert read_tokenizer(open_gguf(smollm, name="x")).tokenize("x  1") == ["x", "ĠĠ", "1"]
    assert read_tokenizer(open_gguf(gpt2, name="x")).tokenize("x  1") == ["x", "Ġ", "Ġ", "1"]


def sentencepiece() -> tuple[dict[str, Any], PreTrainedTokenizerFast]:
    """A vocabulary of pieces with scores, and Llama's tokenizer of it (tokenizer.json of Llama 2), merges from scores."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁t", "he", "▁the", "in", "▁d", "▁de", "f", "▁def", "er", "▁▁", "▁▁▁▁", "re", "ret", "▁self"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz ABC(){}=:.,'\"0123456789_é"]
    pieces += [*words, *dict.fromkeys(letters)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces) - 259)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    vocab = {piece: index for index, piece in enumerate(pieces)}
    pairs = [(word[:cut], word[cut:]) for word in words for cut in range(1, len(word))]
    merges = [(left, right) for left, right in pairs if left in vocab and right in vocab]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return metadata, PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_sentencepiece(tmp_path: Path) -> None:
    """Pieces, bytes for what has none, a space before every text, BOS unless the file says otherwise."""
    metadata, own = sentencepiece()
    found = read_tokenizer(open_gguf(put(tmp_path / "x.gguf", metadata), name="x"))
    for text in texts(300):
        assert found.encode(text) == [1, *own.encode(text)]
        assert found.encode(text, add_special_tokens=False) == own.encode(text)
        assert found.decode(own.encode(text)) == own.decode(own.encode(text))
    without = metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    ends = read_tokenizer(open_gguf(put(tmp_path / "y.gguf", without), name="x"))
    assert ends.encode("the") == [*own.encode("the"), 2]


def test_an_absent_rule_is_llama_cpp_s_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of before tokenizer.ggml.pre: punctuation apart, digits by threes (GPT-2's rule: both as they come), and a
    line that says so. A file that states the rule gets it without one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["! !", "! a", "1 2", "12 3", "123 4"]
    vocab = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": vocab, "tokenizer.ggml.token_type": [1] * len(vocab),
        "tokenizer.ggml.merges": merges,
    }  # fmt: skip
    absent = read_tokenizer(open_gguf(put(tmp_path / "a.gguf", metadata), name="old"))
    assert absent.tokenize("!!a 1234") == ["!!", "a", "Ġ", "123", "4"]
    (record,) = caplog.records
    assert "old: a.gguf does not say how its tokenizer splits text (tokenizer.ggml.pre)" in record.getMessage()
    for pre, expected in (("default", ["!!", "a", "Ġ", "123", "4"]), ("gpt-2", ["!!", "a", "Ġ", "1234"])):
        stated = put(tmp_path / f"{pre}.gguf", metadata | {"tokenizer.ggml.pre": pre})
        assert read_tokenizer(open_gguf(stated, name="x")).tokenize("!!a 1234") == expected
    assert len(caplog.records) == 1


def test_what_a_file_wants_and_does_not_have_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A BOS that is not named, and tokens that other programs never sample."""
    more = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.suppress_tokens": [5, 6]}
    metadata = _tokens(checkpoint.tokenizer(), 300) | more
    found = read_tokenizer(open_gguf(put(tmp_path / "x.gguf", metadata), name="bare"))
    assert found.encode("ab") == found.encode("ab", add_special_tokens=False)
    said = sorted(record.getMessage() for record in caplog.records)
    assert [line.partition("x.gguf ")[2][:20] for line in said] == ["names tokens that ar", "wants a BOS before e"]


def test_scores_of_whole_numbers_and_gemma_4_s_bos(tmp_path: Path) -> None:
    """What llama.cpp's reader takes: scores of whole numbers, spaces before texts unless the file says otherwise, and a BOS
    for Gemma 4 whatever it says."""
    metadata, _ = sentencepiece()
    whole = metadata | {"tokenizer.ggml.scores": [int(score) for score in metadata["tokenizer.ggml.scores"]]}
    tokenizers = [
        read_tokenizer(open_gguf(put(tmp_path / f"{index}.gguf", one), name="x")) for index, one in enumerate((
            metadata, whole, whole | {"general.architecture": "gemma2"},
            whole | {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False},
        ))
    ]  # fmt: skip
    ids = [one.encode("the self") for one in tokenizers]
    assert ids[0] == ids[1]
    assert ids[0][0] == ids[3][0] == 1
    assert tokenizers[2].tokenize("the")[0] == "▁the"
    assert not tokenizers[3].tokenize("the")[0].startswith("▁")


def test_gemma_keeps_runs_of_spaces(tmp_path: Path) -> None:
    """Its runs of spaces are user-defined tokens, matched whole, the longest first; no space is put before a text."""
    metadata, _ = sentencepiece()
    tokens = [*metadata["tokenizer.ggml.tokens"], "  ", "   "]
    types = [*metadata["tokenizer.ggml.token_type"], 4, 4]
    scores = [*metadata["tokenizer.ggml.scores"], 0.0, 0.0]
    given = metadata | {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores,
        "general.architecture": "gemma3", "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    found = read_tokenizer(open_gguf(put(tmp_path / "x.gguf", given), name="x"))
    assert found.tokenize("a     b") == ["a", "   ", "  ", "b"]
    assert found.decode(found.encode("a     b c"), skip_special_tokens=True) == "a     b c"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "splits text by rule 'klingon'; known: gpt-2"),
        ({"tokenizer.ggml.model": "t5"}, "of kind 't5'; known: gpt2"),
        ({"tokenizer.ggml.merges": None}, "lists no merges"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "tokenizer is damaged"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "is damaged: it has"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.tokens": 7}, r"tokenizer\.ggml\.tokens is 7; expected a list of str"),
        ({"tokenizer.ggml.token_type": 3.5}, "token_type is 3.5; expected a list of int"),
        ({"tokenizer.ggml.merges": [1, 2]}, r"merges is \[1, 2\]; expected a list of str"),
        ({"tokenizer.ggml.pre": [1]}, r"splits text by rule \[1\]"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    metadata = _tokens(checkpoint.tokenizer(), 300) | change
    with pytest.raises(ModelError, match=said) as caught:
        read_tokenizer(open_gguf(put(tmp_path / "x.gguf", metadata), name="x"))
    assert "\n" not in str(caught.value)
