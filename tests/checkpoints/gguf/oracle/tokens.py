"""Small tokenizers that split text as the models' own: the patterns of their ``tokenizer.json``, bytes and a few
merges.

The merges are counted on text that is not split at all, so that a wrong split of other text shows in its tokens.
"""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints.gguf.oracle.table import VOCAB

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<pad>", "<bos>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>", "<unk>",
)  # fmt: skip
TEXTS = (
    "The sum of 1234 and 56789 isn't 58022; it's 58023! They'LL see, I'm sure.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 3))  # 5\n",
    "Größe, façade, naïve and São Paulo; 漢字とかな, Привет мир, नमस्ते दुनिया, 안녕하세요.",
    "  leading,\t\ttabs   and trailing   \n\n  \n",
    "x=[1,2,3];y={'a':10,'b':200}... <<end>> http://example.org/a/b?c=1&d=2",
)
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_LETTERS = (  # of Latin, Greek, Cyrillic and the like: deepseek-llm has no class for them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK = (
    "[\r\n]", f"\\s?[{_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+",
)  # fmt: skip
PATTERNS: dict[str, tuple[str, ...]] = {
    "llama-bpe": (_LLAMA3,), "lfm2": (_LLAMA3,), "pixtral": (_LLAMA3,), "falcon-h1": (_LLAMA3,), "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,), "glm4": (_LLAMA3,),
    "qwen2": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}",),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (_CASED % ("", "", ""),),
    "gpt-4o": (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),),
    "refact": (),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "minimax-m2": (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),),
    "exaone4": (),
    "seed-coder": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
}  # fmt: skip
"""How a byte-level vocabulary of each ``tokenizer.ggml.pre`` splits text; "refact": each digit, then GPT-2's rule."""


@cache
def _counted() -> Tokenizer:
    """A vocabulary of bytes and merges, with the special tokens in front of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 4,  # rows of the embedding that no token has
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=6,
    )
    tokenizer.train_from_iterator([text * 3 for text in TEXTS], trainer)
    return tokenizer


def byte_level(pre: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a ``tokenizer.ggml.pre``."""
    tokenizer = Tokenizer.from_str(_counted().to_str())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("refact", "exaone4"))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[pre]]
    if pre == "refact":
        splits = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    return _named(
        tokenizer, bos=pre in ("llama-bpe", "lfm2", "pixtral", "falcon-h1", "tekken", "deepseek-llm", "deepseek-v3")
    )


_PIECES = (
    "\n", "'", ",", ".", "/", "0", "1", "2", "3", "5", "8", ":", "=", "a", "b", "d", "e", "f", "i", "l", "n",
    "o", "r", "s", "t", "u", "\u2581", "\u2581\u2581", ",\u2581", "\u2581a", "d\u2581", "nd\u2581", "\n\n",
    "58", "ad", "e,\u2581", "in", "\u2581s", "\u2581and\u2581", "':", "'\u2581s", ",\u2581\u2581", "..", "02",
    "=1", "e.", "ur", "\u2581e", "\u2581i", "\u258158", "\u2581\u2581\u2581", "\u25815802", "\n\u2581\u2581",
    "\nr", "'a",
)  # fmt: skip
"""By rank, as counted once: training chooses among letters as frequent as each other in no fixed order."""


def pieces() -> tuple[str, ...]:
    """Gemma's kind of vocabulary: special tokens, bytes to fall back on, pieces by rank; a token for every row."""
    return (*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES)


def by_pieces() -> PreTrainedTokenizerFast:
    """Gemma's kind of tokenizer: of two neighbours those are joined whose whole comes first in the vocabulary."""
    vocab = {piece: index for index, piece in enumerate(pieces())}
    joins = sorted(
        (index, piece[:cut], piece[cut:])
        for piece, index in vocab.items()
        if index >= len(SPECIAL) + 256
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    )
    merges = [(left, right) for _, left, right in joins]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _named(tokenizer, bos=True)


def tokenizer_of(pre: str) -> PreTrainedTokenizerFast:
    """The tokenizer that a checkpoint of the table comes with."""
    return by_pieces() if pre.startswith("gemma") else byte_level(pre)


def _named(tokenizer: Tokenizer, *, bos: bool) -> PreTrainedTokenizerFast:
    if bos:
        edges = [("<bos>", SPECIAL.index("<bos>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=edges)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>",
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip
