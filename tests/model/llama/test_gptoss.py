"""gpt-oss: OpenAI's files of MXFP4 blocks against transformers' reading of them, the activation, and heads' own sinks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from foretell import Engine, Request, SamplingParams
from foretell.checkpoints.directories import check_files
from foretell.checkpoints.weights import SafetensorsWeights, ShapeError
from foretell.core.tree import layout
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.llama.mixture import ExpertWeights, expert_names, mixture_of
from foretell.model.llama.run import native
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.traits import clamped_swiglu
from foretell.model.load import load_model
from foretell.model.target import CausalModel
from tests.model.llama.family import CAPACITY, chain, make_model, tokens_of

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
REASON = native.supports(make_model("gptoss").config, torch.float32, CPU)
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def logits_of(model: CausalModel, tokens: Tensor, width: int | None = None) -> Tensor:
    cache, count, seen = model.new_cache(len(tokens), CAPACITY), tokens.shape[1], []
    for start in range(0, count, width or count):
        part = tokens[:, start : start + (width or count)]
        plan = layout(chain(*part.shape), torch.full((len(tokens),), start), CAPACITY)
        logits = model.forward(part, plan, cache).logits
        assert logits is not None
        seen.append(logits)
    return torch.cat(seen, 1)


def saved(folder: Path, seed: int, **change: Tensor) -> Any:
    """A checkpoint as OpenAI's are, of random blocks, in a folder; returns the module of the same values."""
    module, random = make_model("gptoss", **SIZES), torch.Generator().manual_seed(seed)
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        module.get_parameter(name).data.copy_(values.reshape(experts, columns, rows))
    save_file(tensors | change, folder / "model.safetensors")
    config = module.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return module


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_read_as_transformers_reads_them(seed: int, tmp_path: Path) -> None:
    """Values of every matrix exactly, whole and by rows; logits of the dequantised model; and blocks that stay packed."""
    module, tokens = saved(tmp_path, seed), tokens_of(2, 19, seed=seed)
    sizes = mixture_of(module.config)
    assert sizes is not None
    stored = ExpertWeights(SafetensorsWeights(tmp_path), sizes)
    assert check_files(tmp_path, name="x").is_quantised
    for expert in range(sizes.num_experts):
        for key, name in expert_names(1, expert, sizes).items():
            own = module.get_parameter(f"model.layers.1.mlp.experts.{'down' if key == 'down' else 'gate_up'}_proj")[
                expert
            ].T
            own = own if key == "down" else own[0 if key == "gate" else 1 :: 2]
            assert torch.equal(stored.read(name, torch.float32, CPU), own), name
            assert torch.equal(stored.reader(name)(3, 7), own[3:7])
            packed = stored.packed(name, (2, 9))
            assert packed is not None
            assert packed.kind == "MXFP4"
            assert packed.shape == (7, own.shape[1])
            whole = stored.packed(name)
            assert whole is not None
            assert torch.equal(packed.rows(1, 5), whole.rows(3, 7))
            assert torch.equal(whole.part((3, 7)).data, whole.rows(3, 7))
    with torch.no_grad():
        expected = module(tokens, use_cache=False).logits
    torch.testing.assert_close(
        logits_of(LeanModel.load(tmp_path, dtype=torch.float32), tokens), expected, atol=2e-4, rtol=2e-4
    )
    if REASON is not None:
        return
    plain = load_model(str(tmp_path), weights="fp32", implementation="native")
    torch.testing.assert_close(logits_of(plain, tokens), expected, atol=2e-4, rtol=2e-4)
    model = load_model(str(tmp_path), dtype="float32")
    assert isinstance(model, NativeModel)
    assert set(model.spec.weights.split("+")) == {"float32", "MXFP4"}
    for key, name in expert_names(2, 3, sizes).items():
        matrix, rows = model.matrices.held[name], model.matrices.num_bytes[name]
        assert rows < 0.6 * matrix.columns * 96, key  # 17 bytes of 32 values, with a little padding
    found = logits_of(model, tokens)
    assert torch.equal(found, logits_of(model, tokens, 1))
    assert torch.equal(found, logits_of(model, tokens, 5))
    assert (found - expected).abs().mean() < 0.06 * expected.abs().mean()  # of activations in int8


def test_a_stack_of_another_size_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    saved(tmp_path, 0, **{name: torch.zeros(4, 64, 3, 16, dtype=torch.uint8)})
    with pytest.raises(ShapeError, match=r"down_proj_blocks has shape \(4, 64, 3, 16\), expected \(5, any, any, 16\)"):
        LeanModel.load(tmp_path, dtype=torch.float32)


@needs_native
def test_the_activation_in_c_is_that_in_torch() -> None:
    """A layer whose gates and ups are far beyond the limit and near zero; what is not finite stays so."""
    module = make_model("gptoss", **SIZES, num_hidden_layers=1, layer_types=["full_attention"], swiglu_limit=7.0)
    with torch.no_grad():
        module.model.layers[0].mlp.experts.gate_up_proj_bias.mul_(60.0)
    tokens = tokens_of(1, 24)
    torch.testing.assert_close(
        logits_of(NativeModel.from_hf(module), tokens), module(tokens, use_cache=False).logits, atol=2e-3, rtol=2e-3
    )
    gate, up = torch.tensor([9.0, -90.0, 0.5]), torch.tensor([-9.0, 9.0, 0.25])
    wide = torch.tensor(
        [7 * torch.sigmoid(torch.tensor(7 * 1.702)) * -6, 0.0, 0.5 * torch.sigmoid(torch.tensor(0.851)) * 1.25]
    )
    torch.testing.assert_close(clamped_swiglu(gate, up, 1.702, 7.0), wide)
    with torch.no_grad():
        module.model.layers[0].mlp.experts.gate_up_proj_bias[:, 4] = torch.nan
    assert not logits_of(NativeModel.from_hf(module), tokens).isfinite().any()


@needs_native
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_sinks_of_every_size(kv: str) -> None:
    """Far above all scores a sink takes everything; far below it is as if there were none; each head has its own."""
    module, tokens = make_model("gptoss"), tokens_of(2, 30)

    def both(*sinks: float) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for layer in module.model.layers:
                layer.self_attn.sinks.copy_(torch.tensor(sinks))
        return tuple(logits_of(of.from_hf(module, kv=kv), tokens) for of in (NativeModel, LeanModel))  # type: ignore[return-value]

    seen = []
    for sinks in ((500.0,) * 4, (-500.0,) * 4, (3.0, -2.0, 90.0, 1.0), (1.0, 90.0, -2.0, 3.0)):
        found, twin = both(*sinks)
        torch.testing.assert_close(found, twin, atol=2e-3, rtol=2e-3)
        if kv == "auto":
            torch.testing.assert_close(found, module(tokens, use_cache=False).logits, atol=5e-4, rtol=5e-4)
        seen.append(found)
    assert all(not torch.allclose(seen[0], other, atol=0.05) for other in seen[1:])
    assert not torch.allclose(seen[2], seen[3], atol=0.05)


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_texts_of_packed_experts_with_guesses_are_those_without(kv: str, temperature: float, tmp_path: Path) -> None:
    """Every method that needs no head, lines and trees, alone and in a batch."""
    saved(tmp_path, 1)
    model = load_model(str(tmp_path), dtype="float32", kv=kv)
    check_texts(model, NativeModel.from_hf(make_model("gptoss", **SIZES)), temperature)


def check_texts(model: CausalModel, draft: CausalModel, temperature: float) -> None:
    """Texts of every method that needs no head are those of plain decoding."""
    prompts = [tokens_of(5, seed=1).tolist() * 3, tokens_of(9, seed=2).tolist(), tokens_of(21, seed=3).tolist()]
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=14, temperature=temperature, seed=number, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    plain = Engine(model, speculative="none")
    expected = [plain.generate(one.prompt, one.params).token_ids for one in requests]
    drafted = 0
    for method, shape in (
        ("suffix", "chain"), ("ngram", "chain"), ("prediction", "chain"), ("draft_model", "chain"),
        ("draft_model", "opt_tree/size=9"), ("suffix", "opt_tree/size=9"),
    ):  # fmt: skip
        config = {"method": method, "num_speculative_tokens": 4, "shape": shape}
        own = {"method": DraftModel(draft)} if method == "draft_model" else {}
        guesses = [[*tokens[:9], 1] if method == "prediction" else None for tokens in expected]
        asked = [replace(one, prediction=guess) for one, guess in zip(requests, guesses, strict=True)]
        for size in (1, 3):
            engine = Engine(model, speculative=config, drafter_errors="raise", **own)
            found = engine.generate_batch(asked, batch_size=size)
            assert [one.token_ids for one in found] == expected, (method, shape, size)
            drafted += sum(one.num_draft_tokens for one in found)
    assert drafted > 100
