"""Train the byte-level BPE tokenizer (8,192 entries) and write it as Hugging Face tokenizer files.

Byte level means that every text has tokens and decoding gives it back exactly. Digits are split one by one, so that
arithmetic is about digits and not about which numbers were frequent. Runs of spaces stay together: indentation is one
token.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.mix import chat_text, read_documents
from recipes.problems import problem

VOCABULARY_SIZE = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]  # ids 0 to 3
MAX_LENGTH = 4096
# Contraction | optional space or sign + letters | one digit | optional space + other signs | line ends | spaces.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sample_texts(data: Path, *, characters: int, seed: int = 0) -> Iterator[str]:
    """A sample of the training documents and of the generated problems, about `characters` long."""
    r = random.Random(seed)
    documents = read_documents(data / "train.jsonl")
    r.shuffle(documents)
    # Prose is scarcer than code: take half of the sample from each, so that its words are merged too.
    for category, share in (("code", 0.5), ("prose", 0.4)):
        left = int(characters * share)
        for document in documents:
            if document.category == category and left > 0:
                left -= len(document.text)
                yield document.text
    for index in range(int(characters * 0.1 / 200)):
        yield chat_text(problem("tokenizer", index))


def train(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of the bundled models, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token=None,
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    """Command line: documents in, tokenizer files out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=12_000_000)
    args = parser.parse_args()
    tokenizer = train(sample_texts(args.data, characters=args.characters))
    tokenizer.save_pretrained(args.out)
    # The name that every transformers release knows, instead of the one that only the newest writes.
    config = json.loads((args.out / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    check = "def f(x):\n        return x + 12345  # naïve\n\n\n"
    ids = tokenizer(check)["input_ids"]
    assert tokenizer.decode(ids) == check, "byte-level BPE must give the text back"
    print(json.dumps({"size": len(tokenizer), "check": tokenizer.convert_ids_to_tokens(ids)}))


if __name__ == "__main__":
    main()
