"""GGUF files as targets and drafts: the logits are the original module's, in every implementation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import foretell
from foretell.checkpoints.directories import check_files
from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import chain_parent, layout
from foretell.model.load import load_config, load_model, load_tokenizer, unsupported
from foretell.model.target import CausalModel
from tests.checkpoints.gguf.make import random_model, write
from tests.cli import checkpoint
from tests.model.tiny import tiny_module

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def logits(model: CausalModel, tokens: torch.Tensor) -> torch.Tensor:
    """[n, V] of one text."""
    count = tokens.numel()
    cache = model.new_cache(1, count + 1)
    plan = layout(chain_parent(count, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), count + 1)
    out = model.forward(tokens[None], plan, cache).logits
    assert out is not None
    return out[0]


@pytest.mark.parametrize("implementation", ["native", "lean", "transformers"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3", "qwen3_moe", "qwen2_moe"])
def test_logits(tmp_path: Path, arch: str, implementation: str) -> None:
    """Twenty tokens, past Gemma's windows."""
    more: dict[str, Any] = {"head_dim": 16} if arch in ("qwen3", "gemma3", "qwen3_moe") else {"hidden_size": 64}
    if arch == "gemma3":
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        more |= {"num_hidden_layers": 6, "layer_types": layers, "query_pre_attn_scalar": 16}
    if arch.startswith("qwen2"):
        more["use_sliding_window"] = False
    if arch == "qwen3_moe":
        more["norm_topk_prob"] = True  # what a file does not say
    module = random_model(tiny_module(arch, **more))
    path = write(tmp_path / "x.gguf", module)
    config = load_config(path, name="x")
    if implementation != "transformers" and unsupported(implementation, config, torch.float32, torch.device("cpu")):
        pytest.skip("no native decoder on this machine")
    model = load_model(str(path), implementation=implementation)
    assert model.spec.implementation == implementation
    tokens = torch.arange(20) * 7 % 61
    with torch.no_grad():
        expected = module(tokens[None]).logits[0]
    assert torch.allclose(logits(model, tokens), expected, atol=2e-4 * float(expected.abs().max()))


def test_llama_3_s_rope(tmp_path: Path) -> None:
    """Factors of frequencies reach the decoder: without them the logits differ."""
    module = tiny_module("llama", rope_parameters=LLAMA3, head_dim=8)
    plain = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    scaled = module.model.rotary_emb.inv_freq.double()
    factors = {"rope_freqs.weight": ((plain / scaled).float().numpy(), "F32")}
    tokens = torch.arange(60) % 61
    with torch.no_grad():
        expected = module(tokens[None]).logits[0]
    bound = 2e-4 * float(expected.abs().max())
    for index, replaced in enumerate((factors, None)):
        path = write(tmp_path / f"{index}.gguf", module, replaced=replaced)
        close = torch.allclose(logits(load_model(str(path), implementation="lean"), tokens), expected, atol=bound)
        assert close == (replaced is not None)


def test_quantised_in_bfloat16(tmp_path: Path) -> None:
    """ "auto" is bfloat16 for quantised files and the file's own dtype for others; float32 on the CPU without a word."""
    module = tiny_module("llama", intermediate_size=64)
    for kind, expected in (
        ("Q8_0", torch.bfloat16),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F32", torch.float32),
    ):
        path = write(tmp_path / f"{kind}.gguf", module, kind=kind)
        assert check_files(path, name="x").dtype == expected
        assert load_config(path, name="x").dtype == expected
        assert load_model(str(path), implementation="lean").spec.dtype == torch.float32


@pytest.mark.parametrize(
    "kind", ["IQ4_NL", "IQ4_XS", "Q2_K", "Q3_K", "MXFP4", "IQ1_M", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0"]
)
def test_logits_of_blocks_that_stay_packed(tmp_path: Path, kind: str) -> None:
    """Native passes differ from those of the dequantised weights, here and in transformers, by rounded activations."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    path = write(tmp_path / "x.gguf", random_model(tiny_module("llama", **sizes)), kind=kind)
    if reason := unsupported("native", load_config(path, name="x"), torch.float32, torch.device("cpu")):
        pytest.skip(reason)
    tokens = torch.arange(20) * 7 % 61
    packed = load_model(str(path), implementation="native", dtype=torch.float32)
    assert packed.spec.weights == kind
    plain = load_model(str(path), implementation="native", weights="fp32")
    theirs = logits(load_model(str(path), implementation="transformers", dtype=torch.float32), tokens)
    expected = logits(plain, tokens)
    assert torch.allclose(theirs, expected, atol=2e-4 * float(expected.abs().max()))
    found = logits(packed, tokens)
    assert (found - expected).abs().mean() < 0.06 * expected.abs().mean()
    assert not torch.equal(found, expected)


def test_layers_and_configuration_disagree(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny_module("llama"), metadata={"llama.block_count": 3})
    with pytest.raises(ModelError, match="has 9 tensors that no llama model has here"):
        load_model(str(path))


def test_tensor_parallel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.gguf", tiny_module("llama"))
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is a GGUF file"):
        load_model(str(path), tensor_parallel=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory, and GGUF files of it and of a draft."""
    root = tmp_path_factory.mktemp("pair")
    made: dict[str, Path] = {"directory": checkpoint.save(root / "target")}
    for name, noise in (("target", 0.0), ("draft", 0.03)):
        folder = checkpoint.save(root / f"{name}-hf", noise=noise)
        module = AutoModelForCausalLM.from_pretrained(folder)
        made[name] = write(root / f"{name}.gguf", module, load_tokenizer(str(folder)))
    return made


def test_engine_decodes_the_same_as_from_the_directory(pair: dict[str, Path]) -> None:
    """Tokens, texts and chat prompts; with a GGUF draft too."""
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 24}
    own = foretell.Engine.load(str(pair["directory"]), implementation="lean")
    plain = foretell.Engine.load(str(pair["target"]), implementation="lean")
    draft = {"method": "draft_model", "model": str(pair["draft"]), "num_speculative_tokens": 3}
    guessing = foretell.Engine.load(str(pair["target"]), speculative=draft, implementation="lean")
    expected = own.generate("def the self", **options)
    for engine in (plain, guessing):
        found = engine.generate("def the self", **options)
        assert found.token_ids == expected.token_ids
        assert found.text == expected.text
    assert guessing.generate("def the self", **options).num_steps < 24
    messages = [{"role": "user", "content": "hi"}]
    assert plain.chat_prompt(messages) == own.chat_prompt(messages)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tiny_module("llama"))
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(str(path))
