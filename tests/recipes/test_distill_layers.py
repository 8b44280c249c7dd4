"""A draft cut out of its target: laws as the target gives them, the loss's gradient, the measure, a run that goes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes.distill_layers import Data, cut_out, frequent, measure, pull, read
from recipes.own_answers import Writer, answer, chunks, keep, laws
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from foretell.kernels.native import library
from foretell.methods.draft_model.borrowed import load_borrowed
from foretell.model.load import load_model
from recipes import distill_layers

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


@pytest.mark.parametrize("tv", [0.0, 0.4])
def test_the_gradient(tv: float) -> None:
    """Against autograd, in pieces larger and smaller than one: KL of the renormalised law, weighed by its mass."""
    torch.manual_seed(2)
    mine, theirs = torch.randn(600, 16), torch.randn(600, 16)
    whole = torch.randn(40, 16) * 0.6
    mine, theirs, whole = (x.bfloat16().float() for x in (mine, theirs, whole))
    head = whole[:25]
    sums = (theirs @ whole.T).logsumexp(-1)
    leaf = mine.clone().requires_grad_()
    p = (theirs @ head.T - sums[:, None]).exp()
    log_q = F.log_softmax(leaf @ head.T, -1)
    inside = p / p.sum(-1, keepdim=True)
    kl = (p * (inside.log() - log_q)).sum(-1).mean()
    kept = torch.minimum(p, log_q.exp()).sum(-1).mean()
    ((1 - tv) * kl - tv * kept).backward()
    grad, found_kl, found_kept = pull(mine.bfloat16(), theirs.bfloat16(), sums, head.bfloat16(), tv)
    assert found_kl == pytest.approx(kl.item(), abs=0.02)
    assert found_kept == pytest.approx(kept.item(), abs=0.01)
    assert leaf.grad is not None
    assert float(F.cosine_similarity(grad.flatten(), leaf.grad.flatten(), dim=0)) > 0.995
    assert float(grad.norm() / leaf.grad.norm()) == pytest.approx(1.0, abs=0.03)


def test_which_tokens() -> None:
    data = Data([([9, 9, 7, 7, 7, 4], 2), ([9, 5], 1)], [], [], [])
    vocab, share = frequent(data, 12, 4, [11])
    assert vocab.tolist() == [4, 5, 7, 11], "the end stands for itself; the prompt's tokens do not count"
    assert share == 1.0
    vocab, share = frequent(data, 12, 2, [11])
    assert vocab.tolist() == [7, 11]
    assert share == pytest.approx(0.6)


def test_the_target_itself_keeps_everything(folder: Path) -> None:
    """All layers at full width are the target: nothing is lost but the mass of tokens that it does not guess."""
    texts = [([*prompt, 7, 8, 9, 10, 11], len(prompt)) for prompt in prompts(6)]
    draft, embedding = cut_out(folder, [0, 1, 2], 64, [ids for ids, _ in texts])
    hidden, sums = [], []
    with torch.no_grad():
        for ids, start in texts:
            states = draft(input_ids=torch.tensor([ids])).last_hidden_state[0, start - 1 : -1].bfloat16()
            hidden.append(states)
            sums.append((states.float() @ embedding.float().T).logsumexp(-1))
    data = Data(texts, hidden, sums, [True, False] * 3)
    every = measure(draft, data, embedding, torch.arange(VOCAB))
    assert every["kept"] > 0.95
    assert every["mass_of_draft_tokens"] == pytest.approx(1.0, abs=0.02)
    half = measure(draft, data, embedding, torch.arange(VOCAB // 2))
    assert half["mass_of_draft_tokens"] < 0.8
    assert half["kept"] <= half["mass_of_draft_tokens"] + 1e-3
    narrow, _ = cut_out(folder, [0, 2], 24, [ids for ids, _ in texts])
    assert narrow.layers[1].mlp.down_proj.weight.shape == (HIDDEN, 24)
    assert measure(narrow, data, embedding, torch.arange(VOCAB))["kept"] < every["kept"]


@needs_packing
@pytest.mark.slow
def test_a_run_learns_and_is_loaded(folder: Path, tmp_path: Path) -> None:
    """The whole way: texts with laws, two layers trained for seconds, the directory beside the target."""
    writer = Writer(folder)
    (tmp_path / "laws").mkdir()
    for number in range(3):
        given = prompts(64, seed=number)
        texts, hidden, sums = answer(writer, given, torch.ones(64), 24, torch.Generator().manual_seed(number))
        keep(tmp_path / "laws" / f"{number}.pt", texts, hidden, sums, [1.0] * 64)
    learn, out = read(tmp_path / "laws", 48)
    assert len(learn.texts) + len(out.texts) == 192
    assert out.texts
    assert not {tuple(ids[:start]) for ids, start in learn.texts} & {tuple(ids[:start]) for ids, start in out.texts}
    command = [sys.executable, "-m", distill_layers.__name__, "--target", str(folder), "--laws", str(tmp_path / "laws")]
    command += [
        "--out",
        str(tmp_path / "run"),
        "--layers",
        "0",
        "2",
        "--width",
        "48",
        "--vocab",
        "100",
        "--batch",
        "512",
    ]
    subprocess.run([*command, "--minutes", "0.06", "--lr", "0.003"], check=True, timeout=120)
    lines = [json.loads(line) for line in (tmp_path / "run" / "loss.jsonl").read_text().splitlines()]
    assert lines[-1]["kl"] < 0.8 * lines[0]["kl"]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["result"]["num_tokens"] == out.num_tokens
    if library()[1] is None:
        draft = load_borrowed(tmp_path / "run" / "model", load_model(folder, dtype="bfloat16"), name="mine")
        assert len(draft.tokens) == 100
        assert draft.spec.num_layers == 2
