"""A model's own answers, and their laws as the model gives them."""

from pathlib import Path

import pytest
import torch
from recipes.own_answers import Writer, answer, chunks, laws
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN = 120, 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=[0, 2],
        bos_token_id=1, pad_token_id=None, initializer_range=0.25,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    r = torch.Generator().manual_seed(seed)
    sizes = sorted(torch.randint(3, 9, (count,), generator=r).tolist())
    return [torch.randint(3, VOCAB, (size,), generator=r).tolist() for size in sizes]


needs_packing = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 products here")


@needs_packing
def test_answers_and_their_laws(folder: Path) -> None:
    """What is written at temperature 0 is the most probable token of the law that is kept with it, row by row, also where
    rows have left the batch; and that law is the target's own."""
    writer, given = Writer(folder), prompts(12)
    temperatures = torch.tensor([0.0, 1.0] * 6)
    texts, hidden, sums = answer(writer, given, temperatures, 20, torch.Generator().manual_seed(1))
    assert [ids[:start] for ids, start in texts] == given
    sizes = [len(ids) - start for ids, start in texts]
    assert len(set(sizes)) > 1, "some must have ended"
    assert sum(sizes) == len(hidden) == len(sums)
    again, sums_again = laws(writer, texts)
    assert float((hidden.float() - again.float()).abs().max()) < 0.1
    assert float((sums - sums_again).abs().max()) < 0.05
    module = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    at = 0
    for (ids, start), size, temperature in zip(texts, sizes, temperatures.tolist(), strict=True):
        with torch.no_grad():
            expected = module(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
        found = hidden[at : at + size].float() @ writer.embedding.float().T - sums[at : at + size, None]
        assert float((found.exp() - expected.exp()).abs().max()) < 0.05
        if not temperature:
            said = found[torch.arange(size), torch.tensor(ids[start:])]
            assert float((found.max(-1).values - said).max()) < 0.1
        at += size


@needs_packing
def test_draws_follow_the_law(folder: Path) -> None:
    """First tokens of 4,000 equal prompts at temperature 1: total variation from the law; another law is far away."""
    writer, count = Writer(folder), 4000
    texts, hidden, sums = answer(writer, [[5, 6, 7]] * count, torch.ones(count), 1, torch.Generator().manual_seed(3))
    law = (hidden[0].float() @ writer.embedding.float().T - sums[0]).exp()
    drawn = torch.bincount(torch.tensor([ids[-1] for ids, _ in texts]), minlength=VOCAB) / count
    # The expected distance of 4,000 draws over 120 tokens is below sqrt(120 / (2 pi 4000)) = 0.07.
    assert 0.5 * float((law - drawn).abs().sum()) < 0.09
    assert 0.5 * float((law.flip(0) - drawn).abs().sum()) > 0.3


def test_rows_in_pieces() -> None:
    lengths = [3, 3, 50, 50, 50, 2]
    parts = chunks(lengths, tokens=100)
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(6))
    assert all(max(lengths[begin:end]) * (end - begin) <= 100 for begin, end in parts)
