"""An inflated head says of the inflated target what the small head says of the small one."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.inflate import inflate
from recipes.inflate_heads import inflate_head, main
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.head import Head
from foretell.heads.modules import causal_mask
from foretell.heads.pair_head import PairHead
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.acceptance.head import AcceptanceHead, AcceptanceHeadConfig
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.methods.eagle.drafter import Eagle1
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.judge.head import JudgeHeadConfig, JudgeWeights
from foretell.methods.kangaroo.head import KangarooHead, KangarooHeadConfig
from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig
from foretell.model.hf.adapter import TransformersModel

H, V, T, LAYERS = 32, 61, 12, 3


def randomised(module: Any) -> Any:
    """The same module with weights of which every one matters, norms included."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in module.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1.0 + 0.3 * noise if weight.ndim == 1 else noise * weight.shape[1] ** -0.5)
    return module


@pytest.fixture(scope="module")
def small() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, num_hidden_layers=LAYERS, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return randomised(Qwen3ForCausalLM(config).eval())


@pytest.fixture(scope="module", params=[V, V + 6])
def big(small: Qwen3ForCausalLM, request: Any) -> Qwen3ForCausalLM:
    return inflate(small, hidden=96, layers=8, intermediate=144, heads=12, kv_heads=6, vocab=request.param)


SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LARGE_EPS = SIZES | {
    "rms_norm_eps": 1e-3
}  # where no norm of single attention heads shares it: theirs is not to be scaled


def eagle3(**options: Any) -> Eagle3Head:
    config = Eagle3HeadConfig(H, V, 40, draft_vocab_size=24, layer_ids=(0, 1, 2), **LARGE_EPS, **options)
    return Eagle3Head.fresh(config, torch.Generator(), vocabulary=draft_vocabulary(torch.arange(V) % 7, 24))


def dflash(**options: Any) -> DFlashHead:
    sizes = {"num_layers": 2, "block_size": 4, "layer_ids": (1, 2), "mask_token_id": 5, **SIZES}
    config = DFlashHeadConfig(H, V, 40, **sizes, **options)
    if config.draft_vocab_size is None:
        return DFlashHead(config)
    return DFlashHead.fresh(config, vocabulary=draft_vocabulary(torch.arange(V) % 7, config.draft_vocab_size))


HEADS: dict[str, Any] = {
    "kangaroo 1": lambda: KangarooHead(KangarooHeadConfig(H, V, 1, **LARGE_EPS)),
    "kangaroo 2": lambda: KangarooHead(KangarooHeadConfig(H, V, 2, **LARGE_EPS)),
    "eagle1": lambda: Eagle1Head(Eagle1HeadConfig(H, V, 40, tap_layer=2, **LARGE_EPS)),
    "eagle1 with an embedding": lambda: Eagle1Head(
        Eagle1HeadConfig(H, V, 40, tap_layer=2, fc_bias=False, own_embedding=True, **LARGE_EPS)
    ),
    "eagle3": eagle3,
    "eagle3.1": lambda: eagle3(fc_norm=True, norm_output=True, norm_before_residual=True, own_embedding=True),
    "medusa": lambda: MedusaHead(MedusaHeadConfig(H, V, 2, 2, tap_layer=2, draft_vocab_size=V)),
    "medusa of a reduced vocabulary": lambda: MedusaHead(
        MedusaHeadConfig(H, V, 2, 1, tap_layer=2, draft_vocab_size=20)
    ),
    "medusa on the target's head": lambda: MedusaHead(MedusaHeadConfig(H, V, 2, 1, 2, V, own_lm_head=False)),
    "dflash": dflash,
    "dspark": lambda: dflash(sample_from_anchor=True, markov_rank=3, confidence=True, causal=True),
    "dspark of a reduced vocabulary": lambda: dflash(markov_rank=3, confidence=True, draft_vocab_size=24),
    "judge": lambda: JudgeWeights(JudgeHeadConfig(H, V, layer=1, columns=H)),
}


@torch.no_grad()
def says(head: Head, model: TransformersModel) -> list[Tensor]:
    """All that a head says of two texts: logits of tokens below V, and whatever else it predicts."""
    tokens = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(1))
    length = torch.full((2,), T)
    labeled = Teacher(model).label(TeacherBatch(tokens, length, length), head.taps)
    if isinstance(head, KangarooHead):
        out = [model.head(head(labeled.taps, torch.arange(T)[None], causal_mask(length, T)))]
    elif isinstance(head, PairHead):
        steps = head.unroll(head.embed(tokens[:, 1:], model), head.features(labeled.taps, model)[:, :-1], 3)
        out = [head.logits(read, model) for _, read in steps]
    elif isinstance(head, MedusaHead):
        said = [head(model.normed(labeled.taps), index) for index in range(2)]
        out = said if head.config.own_lm_head else [model.head(one) for one in said]
    elif isinstance(head, DFlashHead):
        blocks = model.embed(torch.full((2, 3, 4), head.config.mask_token_id).flatten(1)).unflatten(1, (3, 4))
        normed = head(labeled.taps, blocks, torch.tensor([[2, 5, 9], [1, 3, 10]]))
        out = [head.logits(normed.flatten(1, 2), model)]
        if head.markov_head is not None:
            out += [head.bias(tokens), head.confidence(normed, torch.full((2, 3, 4), 7))]
    else:
        out = [head(labeled.taps)]
    return [one[..., :V] for one in out]


@pytest.mark.parametrize("name", HEADS)
def test_the_same_guesses(name: str, small: Qwen3ForCausalLM, big: Qwen3ForCausalLM) -> None:
    head = randomised(HEADS[name]())
    large = inflate_head(head, small.config, big.config)
    before, after = says(head, TransformersModel(small)), says(large, TransformersModel(big))
    large.check_target(TransformersModel(big).spec, name="large")
    for expected, found in zip(before, after, strict=True):
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if not isinstance(head, JudgeWeights):
        assert large.num_parameters > 3 * head.num_parameters
        assert all((weight != 0).any() for weight in large.parameters())


def test_a_wrong_norm_is_seen(small: Qwen3ForCausalLM, big: Qwen3ForCausalLM) -> None:
    """Negative control: the bound is tight enough."""
    head = randomised(HEADS["kangaroo 2"]())
    large = inflate_head(head, small.config, big.config)
    with torch.no_grad():
        large.norm.weight *= 1.001
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            says(large, TransformersModel(big)), says(head, TransformersModel(small)), atol=1e-4, rtol=1e-4
        )


def test_who_reads_the_last_layer_still_does(small: Qwen3ForCausalLM, big: Qwen3ForCausalLM) -> None:
    """The last real layer is number 6 of 0 to 7; an eagle1 head must read the last, and the engine refuses another."""
    large = inflate_head(HEADS["eagle1"](), small.config, big.config)
    assert isinstance(large, Eagle1Head)
    assert Eagle1(large, TransformersModel(big)).taps == (7,)
    three = inflate_head(HEADS["eagle3"](), small.config, big.config)
    assert three.taps == (1, 4, 7)


def test_an_exit_in_proportion(small: Qwen3ForCausalLM, big: Qwen3ForCausalLM) -> None:
    """Layers 0, 1, 2 stand at 1, 4, 6 of 8: exits after one and two of three are placed behind 3 and 5."""
    exits = [inflate_head(HEADS[f"kangaroo {k}"](), small.config, big.config).config for k in (1, 2)]
    assert [config.exit_layer for config in exits if isinstance(config, KangarooHeadConfig)] == [3, 5]


def test_an_acceptance_head_stays(small: Qwen3ForCausalLM, big: Qwen3ForCausalLM) -> None:
    head = randomised(AcceptanceHead(AcceptanceHeadConfig(16, V, 1, normalize=True, drafter="draft_model")))
    hidden = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(inflate_head(head, small.config, big.config)(hidden), head(hidden))
    with pytest.raises(ValueError, match="'eagle3' cannot be inflated"):
        inflate_head(
            AcceptanceHead(AcceptanceHeadConfig(H, V, 1, normalize=True, drafter="eagle3")), small.config, big.config
        )


def test_refuses_the_head_of_another_target(small: Qwen3ForCausalLM, big: Qwen3ForCausalLM) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        inflate_head(KangarooHead(KangarooHeadConfig(16, V, 1, **SIZES)), small.config, big.config)
    with pytest.raises(ValueError, match="vocabulary of 7"):
        inflate_head(KangarooHead(KangarooHeadConfig(H, 7, 1, **SIZES)), small.config, big.config)


def test_command_line(
    tmp_path: Path, small: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from foretell.heads import formats

    inflated = inflate(small, hidden=64, layers=6, intermediate=96, heads=8, kv_heads=4)
    small.save_pretrained(tmp_path / "small")
    inflated.save_pretrained(tmp_path / "big")
    for name in ("kangaroo 2", "eagle3"):
        formats.save(randomised(HEADS[name]()), tmp_path / "heads" / name)
    heads = map(str, (tmp_path / "heads").iterdir())
    arguments = ["--target", tmp_path / "small", "--inflated", tmp_path / "big", "--out", tmp_path / "out", "--heads"]
    monkeypatch.setattr(sys, "argv", ["inflate_heads", *map(str, arguments), *heads])
    main()
    assert capsys.readouterr().out.count('"parameters"') == 2
    for name in ("kangaroo 2", "eagle3"):
        large = formats.load(tmp_path / "out" / name, num_layers=6)
        expected = says(randomised(HEADS[name]()), TransformersModel(small))
        torch.testing.assert_close(says(large, TransformersModel(inflated)), expected, atol=1e-4, rtol=1e-4)
