"""Tiny random checkpoints on disk: a byte-level tokenizer of about 300 tokens, and Qwen3 models that speak it."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ("the", "def", "return", "import", "class", "self")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


def tokenizer(*, reverse: bool = False, chat: bool = True) -> PreTrainedTokenizerFast:
    """All bytes and a few merges; reverse gives the bytes other ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    if chat:
        outer.chat_template = TEMPLATE
    return outer


def save(folder: Path, *, noise: float = 0.0, context: int = 16384, reverse: bool = False, chat: bool = True) -> Path:
    """A model directory. noise blurs the weights: such a model is a drafter that is right now and then."""
    speaks = tokenizer(reverse=reverse, chat=chat)
    config = Qwen3Config(
        vocab_size=len(speaks),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=speaks.eos_token_id,
        pad_token_id=speaks.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Qwen3ForCausalLM(config).eval()
        for weight in model.parameters():
            weight.data += noise * torch.randn_like(weight)
    model.save_pretrained(folder)
    speaks.save_pretrained(folder)
    return folder


def copy(source: Path, target: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(source, target)
    return target


def change_config(folder: Path, **changes: object) -> None:
    """Overwrite keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
