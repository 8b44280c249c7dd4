"""The tokenizer of a GGUF file: its vocabulary, merges, special tokens and chat template, put together by the tokenizers
library.

Built here and not by transformers' ``gguf_file=``, which splits text by GPT-2's rule wherever it does not know the file's
(SmolLM's among them: "  1" comes out as other tokens), leaves out Qwen's normalisation, and takes half a minute for
150,000 tokens. A rule that is not known is refused: tokens that are nearly right give text that is nearly right.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foretell.checkpoints.gguf.config import end_ids, token_id
from foretell.checkpoints.gguf.file import GGUFFile, listed
from foretell.checkpoints.gguf.values import say
from foretell.checkpoints.tokenizer import PlainTokenizer
from foretell.core.errors import ModelError

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (  # words in which small letters follow capitals (o200k, tekken): what may follow a word, digits of a number
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS = (  # code points of alphabets with small and capital letters, as DeepSeek 2's tokenizer.json lists them
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f "
    "104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943 "
)


def _as_class(points: str) -> str:
    """A class of characters of code points and ranges of them, in hexadecimal."""
    return "[" + re.sub("[0-9a-f]+", lambda found: rf"\x{{{found[0]}}}", points).replace(" ", "") + "]"


DEEPSEEK2 = (
    r"[\r\n]",
    rf"\s?{_as_class(_LETTERS)}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
"""One after the other; digits by themselves follow."""
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""llama.cpp's for files that do not say their rule; one after the other."""
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""One after the other."""


UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # token types (llama.cpp, ``llama_token_type``)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_MARKED = (  # Qwen3.5: a letter's marks are part of its word
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Splitting:
    """How a byte-level vocabulary splits text before it merges."""

    pattern: str | None = None  # None: GPT-2's
    before: tuple[str, ...] = ()  # patterns by which text is split before that, one after the other
    digits: bool = False  # every digit apart, before all else
    nfc: bool = False  # normalised first
    whole: bool = False  # a piece that is a token is taken whole, whatever the merges
    bos: bool = False  # texts begin with BOS where the file does not say


_LLAMA3 = Splitting(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole=True, bos=True)
_SPLITTINGS = {  # the names of ``tokenizer.ggml.pre``; patterns as in the models' own tokenizer.json
    ("gpt-2", "olmo", "mpt", "exaone4"): Splitting(),
    ("smollm", "starcoder", "refact", "command-r", "codeshell"): Splitting(digits=True),
    ("lfm2", "falcon-h1"): _LLAMA3,
    ("qwen35",): Splitting(_MARKED, nfc=True),
    ("qwen2",): Splitting(rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True),
    ("seed-coder",): Splitting(rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
    ("deepseek-r1-qwen", "hunyuan"): Splitting(rf"{_WORDS}|\p{{N}}|{_REST}"),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"): _LLAMA3,
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): Splitting(_LLAMA3.pattern),
    ("tekken",): Splitting(CASED % ("", "", ""), whole=True, bos=True),
    ("gpt-4o", "minimax-m2"): Splitting(CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")),
    ("deepseek-llm",): Splitting(r"\p{N}", DEEPSEEK2),
    ("deepseek-v3", "hunyuan-dense"): Splitting(DEEPSEEK3[-1], DEEPSEEK3[:-1]),
    ("default",): Splitting(DEFAULT[-1], DEFAULT[:-1]),
}
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's special tokens after which white space stays
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # as a file and as transformers call them
SPLITTINGS = {name: splitting for names, splitting in _SPLITTINGS.items() for name in names}


def read_tokenizer(file: GGUFFile) -> PlainTokenizer:
    """The tokenizer. Raises ModelError where the file has none, or one of a kind that is not known."""
    tokens = listed(file, "tokens", str)
    if not tokens:
        raise ModelError(f"{file.where} holds no tokenizer (tokenizer.ggml.tokens)")
    types = listed(file, "token_type", int) or [1] * len(tokens)
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else len(tokens)
    if len(types) != len(tokens) or len(tokens) > rows:
        counts = f"{len(tokens)} tokens, {len(types)} token types and {rows} rows of the embedding"
        raise ModelError(f"{file.where} is damaged: it has {counts}")
    ends = set(end_ids(file) or ())  # special whatever their type: they are no part of a text
    types = [CONTROL if index in ends else type_ for index, type_ in enumerate(types)]
    kind = file.get("tokenizer.ggml.model")
    if kind == "gpt2":
        inner, bos = _byte_level(file, tokens, types)
    elif kind in ("llama", "gemma4"):
        inner, bos = _sentencepiece(file, tokens, types), True
    else:
        raise ModelError(f"{file.name}: its tokenizer is of kind {kind!r}; known: gpt2 (byte-level), llama and gemma4")
    vocab = inner.get_vocab(with_added_tokens=False)
    is_phi3 = kind == "llama" and file.get("general.architecture") == "phi3"

    def strips(token: str) -> bool:
        """Whether white space after a special token is dropped: Phi-3's tokenizer.json says so, files do not."""
        return is_phi3 and token not in _PHI3_KEEPS

    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        chosen = [token for token, type_ in zip(tokens, types, strict=True) if type_ == wanted and token in vocab]
        added = [AddedToken(token, normalized=False, special=special, rstrip=strips(token)) for token in chosen]
        (inner.add_special_tokens if special else inner.add_tokens)(added)
    ids = {key: token_id(file, key) for key in _NAMES}
    named = {key: None if index is None else tokens[index] for key, index in ids.items()}
    begins = kind == "gemma4" or file.get("tokenizer.ggml.add_bos_token", bos)  # Gemma 4's files say it wrongly
    first = named["bos"] if begins else None
    if begins and first is None:
        say(f"{file.where} wants a BOS before every text, and names none (bos_token_id): there is none")
    if suppressed := file.get("tokenizer.ggml.suppress_tokens"):
        say(f"{file.where} names tokens that are never to be sampled, {suppressed!r:.60}: they can be here")
    last = named["eos"] if file.get("tokenizer.ggml.add_eos_token", False) else None
    if first is not None or last is not None:
        edges = [(token, vocab[token]) for token in (first, last) if token is not None]
        template = [*([first] if first else []), "$A", *([last] if last else [])]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=edges)
    context = file.get("{arch}.context_length")
    special_tokens = {f"{_NAMES[key]}_token": token for key, token in named.items() if token is not None}
    named_ones = [
        AddedToken(token, normalized=False, special=True, rstrip=strips(token)) for token in special_tokens.values()
    ]
    inner.add_special_tokens(named_ones)
    made = PlainTokenizer(
        inner,
        special_tokens,
        _whole,
        chat_template=_chat_template(file),
        max_length=context if type(context) is int else 1 << 20,
    )
    fills = {key: token_id(file, f"fim_{key}") for key in ("pre", "suf", "mid", "rep", "sep")}
    made.fill_ids = {key: index for key, index in fills.items() if index is not None}
    return made


def _whole(tokenizer: PlainTokenizer) -> Any:
    """The same tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        **tokenizer.special_tokens_map,
        clean_up_tokenization_spaces=False,
        model_max_length=tokenizer.model_max_length,
    )


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """The chat template; by their names where there are further ones, as transformers has them."""
    default = file.get("tokenizer.chat_template")
    names = file.get("tokenizer.chat_templates")
    found = {"default": default}
    for name in names if isinstance(names, list) else ():
        found.setdefault(str(name), file.get(f"tokenizer.chat_template.{name}"))
    known = {name: template for name, template in found.items() if isinstance(template, str)}
    return known.get("default") if known.keys() <= {"default"} else known


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether texts begin with BOS by default."""
    pre = file.get("tokenizer.ggml.pre")
    if pre is None:  # files of before May 2024
        pre = "default"
        say(
            f"{file.where} does not say how its tokenizer splits text (tokenizer.ggml.pre): llama.cpp's "
            "rule for such files is taken, which few models were trained with; convert the model again for its own"
        )
    splitting = SPLITTINGS.get(str(pre))
    merges = listed(file, "merges", str)
    if splitting is None or not merges:
        what = f"splits text by rule {pre!r}; known: {', '.join(SPLITTINGS)}" if merges else "lists no merges"
        raise ModelError(f"{file.name}: its tokenizer {what}")
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    inner = Tokenizer(_bpe(file, vocab, [_pair(merge) for merge in merges], ignore_merges=splitting.whole))
    if splitting.nfc:
        inner.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    patterns = (*splitting.before, *([] if splitting.pattern is None else [splitting.pattern]))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    return inner, splitting.bos


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """BPE over characters with bytes to fall back on. Most files have no merges: they follow from the scores of the pieces
    (sentencepiece: of two adjacent pieces those are joined whose whole has the best score). Gemma 4's have them."""
    gemma = str(file.get("general.architecture")).startswith("gemma")
    listed_merges = listed(file, "merges", str)
    if gemma:  # the order of pieces, not their scores, is that of merges
        scores = [-float(index) for index in range(len(tokens))]
    else:
        scores = [float(score) for score in listed(file, "scores", float, int)]
    if len(scores) != len(tokens):
        raise ModelError(f"{file.name}: its tokenizer has {len(tokens)} tokens and {len(scores)} scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    merges = [_pair(merge) for merge in listed_merges] or _merges(vocab, scores)
    inner = Tokenizer(_bpe(file, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    prefix = file.get("tokenizer.ggml.model") == "llama" and bool(file.get("tokenizer.ggml.add_space_prefix", True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return inner


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # the first piece may begin with one
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, "")


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece, best first; ties as transformers' converter breaks them."""
    found = []
    for piece, index in vocab.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [entry[3:] for entry in found]


def _bpe(file: GGUFFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # tokenizers raises bare exceptions, e.g. for a merge of unknown tokens
        raise ModelError(f"{file.name}: its tokenizer is damaged ({error})") from error
