"""Hybrids in GGUF files: files of llama.cpp's converter hold the weights, sizes, tokens and ends of the checkpoints that
they were made of, and transformers computes the same logits from either."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import foretell
from foretell.checkpoints.gguf.config import end_ids, read_values
from foretell.checkpoints.gguf.families.hybrids import HYBRIDS
from foretell.checkpoints.gguf.file import GGUFFile, open_gguf
from foretell.checkpoints.gguf.weights import GGUFWeights
from foretell.checkpoints.packed import BLOCK_KINDS
from foretell.kernels.dequantise import dequantise_into
from foretell.model.llama.run.native import NativeModel
from foretell.model.load import load_config, load_model, load_tokenizer, unsupported
from tests.checkpoints.gguf.change import change
from tests.checkpoints.gguf.oracle import case, checkpoint, labels
from tests.checkpoints.gguf.oracle.table import ARCHITECTURES, VOCAB
from tests.checkpoints.gguf.oracle.tokens import tokenizer_of
from tests.checkpoints.gguf.test_load import logits

REASON = unsupported("native", checkpoint("lfm2").config, torch.float32, torch.device("cpu"))
LABELS = [label for label in labels() if case(label).name in HYBRIDS]
NAMES = [label for label in LABELS if case(label).name == label]
CLOSE = 1e-4  # of the largest logit
PIECES = (
    "'s", "'LL", "don't", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "a", "Ab", "word", "Größe", "e\u0301", "n\u0303o",
    "अच्छा", "漢字", "Привет", "안녕", "1", "1234", "3.14", "²", "٣٤", "!", "...", "_", "(x)", "=>", "🙂", "\u200d", "ſ",
    "<|im_end|>", "<|im_start|>", "def f(x):", "    return", " the",
)  # fmt: skip


def opened(label: str) -> GGUFFile:
    return open_gguf(case(label).path, name=label)


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers saves of a checkpoint; experts of a layer in one stack, as files have them."""
    checkpoint(name).save_pretrained(folder)
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        prefix, _, rest = key.partition(".experts.")
        if rest:
            index, part = rest.split(".", 1)
            stacks.setdefault(f"{prefix}.experts.{part}", {})[int(index)] = tensor
        else:
            found[key] = tensor
    return found | {key: torch.stack([each[at] for at in sorted(each)]) for key, each in stacks.items()}


def folded(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of Falcon-H1 times the multipliers that the converter folds into it; others as they are."""
    if name != "falcon-h1" or tensor.dim() != 2:
        return tensor
    config = checkpoint(name).config
    inputs, gate_down = config.attention_in_multiplier, config.mlp_multipliers
    if key.endswith("mamba.in_proj.weight"):
        inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([inner, inner, shared, shared, config.mamba_n_heads])
        rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)
        return tensor * config.ssm_in_multiplier * rows[:, None]
    factors = {
        "gate_proj": gate_down[0], "down_proj": gate_down[1], "q_proj": inputs, "k_proj": inputs * config.key_multiplier,
        "v_proj": inputs, "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    return tensor * factors.get(key.split(".")[-2], 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_checkpoint_s(tmp_path: Path, name: str) -> None:
    """By the names and in the shapes that transformers saves; to the bit but where the converter's number was rounded."""
    source, expected = GGUFWeights(opened(name)), saved(name, tmp_path)
    assert set(source.names) == set(expected)
    for key, tensor in expected.items():
        assert source.shape(key) == tuple(tensor.shape)
        found, wanted = source.read(key, torch.float32, torch.device("cpu")), folded(name, key, tensor)
        if key.endswith("A_log"):
            assert torch.allclose(found, wanted, rtol=2**-23, atol=1e-7)
        elif wanted is tensor:
            assert torch.equal(found, wanted), key
        else:
            assert torch.allclose(found, wanted, rtol=1e-6, atol=0), key
        assert torch.equal(source.read(key, torch.bfloat16, torch.device("cpu")), found.bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_configuration(name: str) -> None:
    """All that a file says is what the checkpoint says, but for what the converter does not keep."""
    config, values = checkpoint(name).config.to_dict(), read_values(opened(name))
    found = load_config(case(name).path, name=name).to_dict()
    lost = {"architectures", "dtype", "eos_token_id"}
    if name.startswith(("granite", "nemotron")):
        lost |= {"max_position_embeddings", "position_embedding_type"}
        assert found["max_position_embeddings"] == 1 << 20
    if name in ("qwen3next", "lfm2moe") or name.startswith("nemotron"):
        lost |= {"intermediate_size"}  # one that no layer reads may be missing
    if name == "falcon-h1":  # multipliers are in the weights
        assert {found[key] for key in found if key.endswith("_multiplier")} == {1.0}
    for key in values.keys() - lost:
        assert found.get(key) == config.get(key), key


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("label", LABELS)
def test_logits(label: str, implementation: str) -> None:
    """llama.cpp's, and the original module's where nothing was quantised."""
    if implementation == "native" and REASON:
        pytest.skip(str(REASON))
    kept = case(label)
    model = load_model(str(kept.path), implementation=implementation, dtype=torch.float32, weights="fp32")
    bound = CLOSE * kept.largest
    for index, tokens in enumerate(kept.sequences):
        found = logits(model, torch.tensor(tokens))
        assert kept.apart(index, found, exact=True) < bound
        if label == kept.name:
            with torch.no_grad():
                expected = checkpoint(kept.name)(torch.tensor([tokens])).logits[0]
            assert float((found - expected).abs().max()) < bound


@pytest.mark.parametrize("label", [label for label in LABELS if label not in NAMES])
def test_packed_rows_are_in_transformers_order(label: str) -> None:
    """Blocks taken apart are what is read; matrices whose blocks are torn apart are none."""
    file = opened(label)
    source, found = GGUFWeights(file), set()
    for key in source.names:
        packed = source.packed(key)
        if packed is not None:
            values = torch.empty(packed.shape)
            dequantise_into(packed.kind, packed.data.contiguous().numpy().reshape(-1), values)
            assert torch.equal(values, source.read(key, torch.float32, torch.device("cpu")).view(packed.shape))
            found.add(key)
    blocks = {key for key in source.names if file.tensors[source.called(key)].kind in BLOCK_KINDS}
    assert blocks - found == {key for key in blocks if key.endswith("linear_attn.out_proj.weight")}
    assert found or not source.kinds & BLOCK_KINDS.keys()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("name", ["lfm2moe", "nemotron_h_moe", "granitehybrid", "glm4moe", "qwen35moe"])
def test_blocks_of_experts_stay_packed(name: str, tmp_path: Path) -> None:
    """Every expert's matrices as the file has them, the router as floats; gate and up of a stack are not copied."""
    path = change(case(name).path, tmp_path / "x.gguf", kind="Q8_0")
    model = load_model(str(path), implementation="native", dtype=torch.float32)
    assert isinstance(model, NativeModel)
    experts = {key: kind for key, kind in model.matrices.kinds.items() if "expert" in key}
    assert len(experts) >= 4 * 2
    assert set(experts.values()) == {"Q8_0"}
    assert not any(key.endswith("mlp.gate.weight") for key in model.matrices.kinds)
    near = load_model(str(path), implementation="native", dtype=torch.float32, weights="fp32")
    tokens = torch.tensor(case(name).sequences[0])
    found, expected = logits(model, tokens), logits(near, tokens)
    assert torch.nn.functional.cosine_similarity(found, expected).mean() > 0.98
    assert not torch.equal(found, expected)
    file = open_gguf(path, name=name)
    source = GGUFWeights(file)
    stacks = [key for key in source.names if len(source.shape(key)) == 3 and source.shape(key)[1] > 1]
    for stack in stacks:
        rows, whole = (
            source.packed(stack, (32, 64)),
            source.packed(stack),
        )  # of the first expert's up, or of the second one
        assert rows is not None
        assert whole is not None
        assert np.shares_memory(rows.data.numpy(), file.data)
        assert torch.equal(rows.data, whole.data[32:64])
        assert torch.equal(source.reader(stack)(32, 64), source.reader(stack)(0, 128)[32:64])
    assert len(stacks) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_tokens_template_and_ends(name: str) -> None:
    """500 texts, a chat, and what ends an answer."""
    ours, theirs = load_tokenizer(str(case(name).path)), tokenizer_of(ARCHITECTURES[name].pre)
    draw = random.Random(11)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(500)]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert [ours.encode(text, add_special_tokens=False) for text in texts] == expected
    assert [ours.decode(ids) for ids in expected] == [theirs.decode(ids) for ids in expected]
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    ends = end_ids(opened(name))
    assert ends is not None
    assert set(case(name).ends) <= set(ends)


@pytest.mark.parametrize("name", [name for name in ("lfm2", "qwen35") if name in NAMES])
def test_the_engine_s_text_is_the_directory_s(tmp_path: Path, name: str) -> None:
    checkpoint(name).save_pretrained(tmp_path)
    tokenizer_of(ARCHITECTURES[name].pre).save_pretrained(tmp_path)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12}
    found = [
        foretell.Engine.load(str(path), implementation="transformers").generate("def the self", **options)
        for path in (tmp_path, case(name).path)
    ]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].text == found[1].text
    assert max(found[0].token_ids) < VOCAB
