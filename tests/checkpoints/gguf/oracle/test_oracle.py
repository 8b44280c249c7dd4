"""The fixtures are what they say: the weights are the checkpoints', transformers computes llama.cpp's logits from them, and
the tokenizers that checkpoints come with split text as llama.cpp does."""

import gguf
import numpy as np
import pytest
import torch

from tests.checkpoints.gguf.oracle import case, checkpoint, labels
from tests.checkpoints.gguf.oracle.table import ARCHITECTURES, VOCAB
from tests.checkpoints.gguf.oracle.tokens import SPECIAL, TEXTS, tokenizer_of

ROUGH = ("tekken", "gpt-4o", "minimax-m2")  # llama.cpp's patterns for these leave out the marks of Devanagari
CLOSE = 1e-4  # of the largest logit
TABLE = (
    1e-2  # the same for Gemma and StarCoder 2: llama.cpp reads GELU from a table of float16, whose steps layers enlarge
)
SAME = {"gemma4moe": "gemma4", "deepseek2-v2": "deepseek2"}  # checkpoints of one architecture


@pytest.mark.parametrize("label", labels(quantised=False))
def test_transformers_computes_llama_cpp_s_logits(label: str) -> None:
    kept = case(label)
    bound = (TABLE if label.startswith("gemma") else TABLE / 10 if label == "starcoder2" else CLOSE) * kept.largest
    assert kept.noise < bound
    with torch.no_grad():
        for index, tokens in enumerate(kept.sequences):
            logits = checkpoint(kept.name)(input_ids=torch.tensor([tokens])).logits[0]
            assert kept.apart(index, logits) < bound
            assert kept.apart(index, logits.roll(1, 0)) > 30 * bound  # a check that can fail


@pytest.mark.parametrize("label", labels())
def test_files_are_what_they_are_named(label: str) -> None:
    """Architecture, kinds of blocks, vocabulary, ends; a quantised file's rounding is more than its noise."""
    kept = case(label)
    reader = gguf.GGUFReader(kept.path)
    assert reader.fields["general.architecture"].contents() == SAME.get(kept.name, kept.name)
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert (kinds == {"F32"}) == (label == kept.name)
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == VOCAB
    assert SPECIAL.index("<|im_end|>") in kept.ends
    assert max(map(max, kept.sequences)) < VOCAB
    assert kept.rounding > kept.noise if kinds != {"F32"} else kept.rounding == 0


@pytest.mark.parametrize("name", sorted({case(label).name for label in labels()}))
def test_tokens_of_texts(name: str) -> None:
    """What a checkpoint's tokenizer gives for TEXTS is what llama.cpp gives, in every file of it."""
    tokenizer = tokenizer_of(ARCHITECTURES[name].pre)
    expected = [tokenizer(text)["input_ids"] for text in TEXTS]
    rough = ARCHITECTURES[name].pre in ROUGH
    for label in labels():
        if case(label).name == name:
            found = list(case(label).texts)
            # Gemma 4's texts are taken apart at line ends there: published pieces never cross them, those of few texts do.
            assert [text == other for text, other in zip(found, expected, strict=True)] == [
                not (rough and "\u0928" in text) and not (name.startswith("gemma4") and ":\n" in text) for text in TEXTS
            ]


def test_a_blocks_logits_are_exact_apart_from_its_rounding() -> None:
    """``exact`` reads other numbers than llama.cpp's, as far apart as the file says."""
    kept = case("qwen35-q8_0")
    part = kept._kept["exact/0"] - kept._kept["logits/0"]
    assert 0 < float(part.abs().max()) <= kept.rounding * 1.01
    assert np.isfinite(kept.rounding)
