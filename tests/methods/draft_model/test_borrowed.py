"""A draft without an embedding of its own: the target's table and head, the same text, one clear line for what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from foretell import ConfigError, Engine, ModelError, speculative_config
from foretell.core.tree import chain_tree, layout
from foretell.kernels.native import library
from foretell.learn.options import LearnOptions, check_configs
from foretell.methods.draft_model.borrowed import borrowing, likeness, load_borrowed, sample_of, save_borrowed
from foretell.methods.draft_model.config import DraftModelConfig
from foretell.model.load import from_module, load_model
from foretell.model.target import CausalModel, Target

VOCAB, HIDDEN = 96, 32
IDS = torch.tensor([0, 3, 4, 17, 40, 41, 95])
Save = Callable[..., Path]


def llama(layers: int, *, seed: int = 0, hidden: int = HIDDEN, vocab: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=0,
        bos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def target(tmp_path: Path) -> LlamaForCausalLM:
    module = llama(3)
    module.save_pretrained(tmp_path / "target")
    return module


@pytest.fixture
def save(target: LlamaForCausalLM, tmp_path: Path) -> Save:
    """A draft of one layer for the target; whole: the model that it stands for."""

    def made(whole: LlamaForCausalLM | None = None, tokens: torch.Tensor = IDS) -> Path:
        module = whole or llama(1, seed=5)
        module.lm_head.weight.data = module.model.embed_tokens.weight.data = target.model.embed_tokens.weight.data
        layers = {k: v for k, v in module.state_dict().items() if "embed" not in k and "lm_head" not in k}
        embedding = target.model.embed_tokens.weight
        save_borrowed(layers, tokens, module.config, embedding, tmp_path / "draft", target="little")
        return tmp_path / "draft"

    return made


def logits(model: CausalModel) -> torch.Tensor:
    """[1, 6, V] of a text, the way a drafter reads it."""
    tokens = torch.tensor([[5, 9, 30, 17, 2, 44]])
    tree = chain_tree(tokens, torch.tensor([6]))
    out = Target(model, 1, 64).forward(tokens, layout(tree.parent, torch.tensor([0]), 64)).logits
    assert out is not None
    return out.float()


@pytest.mark.parametrize("implementation", ["transformers", "lean", "native"])
def test_it_is_the_whole_model_on_its_tokens(
    implementation: str, save: Save, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    if implementation == "native" and library()[1] is not None:
        pytest.skip("no native decoder here")
    whole = llama(1, seed=5)
    folder = save(whole)
    assert "model.embed_tokens.weight" not in load_file(folder / "model.safetensors")
    for parameter in whole.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as the file has them
    whole.model.embed_tokens.weight.data = target.model.embed_tokens.weight.data
    whole.lm_head.weight = whole.model.embed_tokens.weight
    beside = load_model(tmp_path / "target", implementation=implementation, dtype="float32")
    draft = load_borrowed(folder, beside, name=str(folder))
    found, expected = logits(draft), logits(from_module(whole))
    assert float((found[..., IDS] - expected[..., IDS]).abs().max()) < 1e-4
    rest = torch.ones(VOCAB, dtype=torch.bool)
    rest[IDS] = False
    assert bool((found[..., rest] == -torch.inf).all())
    assert draft.spec.name == str(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same(temperature: float, save: Save, target: LlamaForCausalLM, tmp_path: Path) -> None:
    """The draft is the target itself here, on all tokens: every guess is kept."""
    folder = save(llama(3), torch.arange(VOCAB))
    texts, kept = [], []
    for config in (
        {"method": "none"},
        {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3},
        {"method": "hybrid", "second": "draft_model", "second_shape": "chain", "model": str(folder)},
    ):
        engine = Engine(load_model(tmp_path / "target", dtype="bfloat16"), speculative=config)
        found = [
            engine.generate([5, 9, 30 + seed], max_new_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(3)
        ]
        texts.append([one.token_ids for one in found])
        kept.append(sum(one.num_accepted_tokens for one in found))
    assert texts[0] == texts[1] == texts[2]
    assert kept[0] == 0
    assert min(kept[1:]) > 40


def test_a_quantised_target_is_known_again(save: Save, target: LlamaForCausalLM) -> None:
    folder = save()
    sample = sample_of(target.model.embed_tokens.weight)
    table = target.model.embed_tokens.weight.data
    step = table.abs().amax(1, keepdim=True).clamp_min(1e-6) / 15  # five bits
    rounded = llama(3)
    rounded.model.embed_tokens.weight.data = (table / step).round() * step
    assert 0.9 < likeness(from_module(rounded), sample) < 1.0
    load_borrowed(folder, from_module(rounded), name="draft")


def test_another_target_is_refused(save: Save) -> None:
    folder = save()
    with pytest.raises(ModelError, match=r"embedding of little, and that of target .* is another \(correlation"):
        load_borrowed(folder, from_module(llama(3, seed=1)), name="draft")
    with pytest.raises(ModelError, match=r"embedding of little \(vocabulary and width \(96, 32\)\), and target"):
        load_borrowed(folder, from_module(llama(3, vocab=64)), name="draft")


def test_damage_is_named(save: Save, target: LlamaForCausalLM) -> None:
    model, file = from_module(target), save() / "model.safetensors"
    whole, key = load_file(file), "model.layers.0.self_attn.q_proj.weight"
    for tensors, message in (
        ({k: v for k, v in whole.items() if k != "draft_tokens"}, "has no list 'draft_tokens'"),
        ({**whole, "draft_tokens": torch.tensor([4, 3])}, "'draft_tokens' must be ascending"),
        ({**whole, "draft_tokens": torch.tensor([4, 96])}, "does not lead to 2 different ids of a vocabulary of 96"),
        ({**whole, "draft_tokens": torch.tensor([4.0, 5.0])}, r"'draft_tokens' is \[2\] of float32"),
        ({**whole, key: whole[key][:, :-1].contiguous()}, r"q_proj.weight of .* is \[32, 31\] of .* says \[32, 32\]"),
        ({**whole, key: whole[key][:16].contiguous()}, r"q_proj.weight of .* is \[16, 32\] of .* says \[32, 32\]"),
        ({**whole, key: whole[key].int()}, r"q_proj.weight of .* is \[32, 32\] of int32"),
        ({**whole, key: whole[key] * torch.nan}, r"q_proj.weight of .* finite numbers"),
        (
            {**whole, "model.layers.1.mlp.up_proj.weight": whole[key].clone()},
            r"holds model\.layers\.1\.mlp\.up_proj\.weight, which",
        ),
        ({k: v for k, v in whole.items() if "down_proj" not in k}, r"lacks 1 tensors, model.layers.0.mlp.down_proj"),
    ):
        save_file(tensors, file)
        with pytest.raises(ModelError, match=message):
            load_borrowed(file.parent, model, name="draft")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ModelError, match="download it again"):
        load_borrowed(file.parent, model, name="draft")
    file.unlink()
    with pytest.raises(ModelError, match=r"no weights in .*; expected model\.safetensors"):
        load_borrowed(file.parent, model, name="draft")


@pytest.mark.parametrize(
    "about",
    [None, "little", {}, {"target": "little"}, {"target": "little", "sample": []}, {"target": 3, "sample": [0.1] * 64},
     {"target": "little", "sample": [0.1] * 63}, {"target": "little", "sample": ["x"] * 64},
     {"target": "little", "sample": [float("nan")] * 64}],
)  # fmt: skip
def test_a_damaged_note_of_its_target(save: Save, target: LlamaForCausalLM, about: Any) -> None:
    file = save() / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "borrows": about}))
    with pytest.raises(
        ModelError, match=r"borrows in config\.json must name the target and hold a sample of 64 numbers"
    ):
        load_borrowed(file.parent, from_module(target), name="draft")


def test_what_does_not_go_together(save: Save, target: LlamaForCausalLM) -> None:
    folder = str(save())
    for keys, message in (
        ({"vocabulary": "tli"}, "is for drafts of another vocabulary"),
        ({"draft_vocab_size": 5}, "guesses the tokens that it was made for"),
        ({"shape": "specdec"}, "needs an acceptance head"),
        ({"draft_weights": "bf16"}, "the draft's table is its target's, in torch.float32"),
        ({"draft_weights": "int8"}, "needs the native implementation, and the target runs by transformers"),
    ):
        config: dict[str, Any] = {"method": "draft_model", "model": folder, **keys}
        with pytest.raises(ConfigError, match=message):
            Engine(target, speculative=speculative_config(config))
    with pytest.raises(ModelError, match=r"no model by itself: give it as the draft of method 'draft_model'.*little"):
        load_model(folder)


def test_which_directories_it_claims(save: Save, tmp_path: Path, target: LlamaForCausalLM) -> None:
    assert borrowing(str(save())) == tmp_path / "draft"
    assert borrowing(str(tmp_path / "target")) is None
    assert borrowing("bundled/draft") is None
    assert borrowing("owner/name") is None
    about = json.loads((tmp_path / "draft" / "config.json").read_text())["borrows"]
    assert about["target"] == "little"
    assert len(about["sample"]) == 64


def test_it_does_not_learn_while_serving(save: Save) -> None:
    config = DraftModelConfig(model=str(save()))
    with pytest.raises(ConfigError, match="has its target's embedding and head, and cannot learn while serving"):
        check_configs([config], LearnOptions())
