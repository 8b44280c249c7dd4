"""Every dense and mixed architecture: llama.cpp's files against transformers' modules of the same weights, and against
llama.cpp's own logits, tokens and ends.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from foretell.checkpoints.directories import check_files
from foretell.checkpoints.gguf.config import end_ids, read_config
from foretell.checkpoints.gguf.families import mixtures
from foretell.checkpoints.gguf.families.architectures import ARCHITECTURES as KNOWN
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.tokenizer import read_tokenizer
from foretell.checkpoints.gguf.weights import GGUFWeights
from foretell.core.errors import ModelError
from foretell.model.llama.read.split import split_weights
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import read_shape
from foretell.model.load import load_model, unsupported
from tests.checkpoints.gguf.change import change
from tests.checkpoints.gguf.oracle import Case, case, checkpoint, labels
from tests.checkpoints.gguf.oracle.table import ARCHITECTURES
from tests.checkpoints.gguf.oracle.tokens import TEXTS, tokenizer_of
from tests.checkpoints.gguf.test_load import logits
from tests.checkpoints.gguf.test_tokenizer import texts

NATIVE = (
    "gemma2", "phi3", "glm4", "glm4moe", "smollm3", "olmo2", "granite", "mistral3", "gpt-oss", "deepseek2", "deepseek2-v2",
    "arcee", "cohere2", "command-r", "ernie4_5", "ernie4_5-moe", "exaone4", "hunyuan-dense", "minimax-m2", "seed_oss",
    "starcoder2",
)  # fmt: skip
MODULES = ("gemma4", "gemma4moe")
"""Those that transformers alone runs."""
NAMES = tuple(name for name in (*NATIVE, *MODULES) if name in labels(quantised=False))
CLOSE = 1e-4  # of the largest logit
GELU = 1e-2  # llama.cpp reads it from a table in float16, which does not explain all of Gemma 4's
MARKS = 2  # the text of ``TEXTS`` with combining marks, which llama.cpp's form of these patterns takes for no letters
CASED = ("gpt-4o", "tekken", "minimax-m2")


def look(path: Path) -> None:
    """What is read of a file before its weights."""
    check_files(path, name="x")
    read_config(open_gguf(path, name="x"))


def tokens_of(kept: Case) -> torch.Tensor:
    """The longer text: past windows, past the context before YaRN."""
    return torch.tensor(max(kept.sequences, key=len))


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss with YaRN's bounds rounded, as llama.cpp and the oracle's checkpoint have it."""
    monkeypatch.setattr(mixtures, "_ROUNDS_BOUNDS", True)


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize("implementation", ["native", "lean", "transformers"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, implementation: str) -> None:
    kept = case(name)
    if implementation != "transformers":
        config = read_config(open_gguf(kept.path, name=name))
        reason = unsupported(implementation, config, torch.float32, torch.device("cpu"))
        if name in MODULES:
            assert reason is not None
            assert config.architectures[0] in reason
            return
        if reason is not None and implementation == "native":
            pytest.skip("no native decoder on this machine")
    model = load_model(str(kept.path), implementation=implementation, dtype="float32")
    assert model.spec.implementation == implementation
    module = checkpoint(name)
    for index, sequence in enumerate(kept.sequences):
        tokens = torch.tensor(sequence)
        found = logits(model, tokens)
        with torch.no_grad():
            expected = module(tokens[None]).logits[0]
        assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())
        assert kept.apart(index, found) < (GELU if name.startswith(("gemma", "starcoder")) else CLOSE) * kept.largest


@pytest.mark.parametrize("name", [name for name in NAMES if name != "deepseek2-v2"])  # llama.cpp joins its digits
def test_tokenizer(name: str) -> None:
    """500 texts: the checkpoint's tokens, text and chat; TEXTS: llama.cpp's tokens; and its ends end."""
    kept = case(name)
    file = open_gguf(kept.path, name=name)
    found, own = read_tokenizer(file), tokenizer_of(ARCHITECTURES[kept.name].pre)
    pre = ARCHITECTURES[kept.name].pre
    # Of Gemma 4 the converter marks those special tokens alone that have a purpose.
    for text in [text for text in texts(250) if pre != "gemma4" or "<|im_start|>" not in text]:
        ids = own.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids) == own.decode(ids)
    for index, (text, ids) in enumerate(zip(TEXTS, kept.texts, strict=True)):
        is_apart = pre == "gemma4" and "\n" in text  # llama.cpp joins no pieces over the end of a line
        if not is_apart and (pre not in CASED or index != MARKS):
            assert found.encode(text) == list(ids)
    assert set(kept.ends) <= set(end_ids(file) or ())
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for prompt in (True, False):
        asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        assert found.apply_chat_template(messages, **asked) == own.apply_chat_template(messages, **asked)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("phi3", "glm4")])
def test_parts_of_fused_matrices_stay_packed(name: str, tmp_path: Path) -> None:
    """Rows of q, k, v, gate and up, those of q and k in another order: blocks as the file has them, of the same values."""
    path = change(case(name).path, tmp_path / "x.gguf", kind="Q8_0")
    file = open_gguf(path, name=name)
    shape = read_shape(read_config(file))
    whole = GGUFWeights(file)
    parts = split_weights(whole, shape, name=name)
    own = checkpoint(name).state_dict()
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        key = f"model.layers.1.{part}.weight"
        packed = parts.packed(key)
        assert packed is not None
        assert packed.kind == "Q8_0"
        values = torch.from_numpy(dequantize(packed.data.numpy(), GGMLQuantizationType.Q8_0).copy())
        assert torch.equal(values, parts.read(key, torch.float32, torch.device("cpu")))
        if part == "self_attn.q_proj" and name == "glm4":  # pairs (2i, 2i + 1) of the rotated half become (i, i + 8)
            assert torch.allclose(values[:5], own[key][[0, 2, 4, 6, 8]], atol=0.02)
            assert torch.allclose(values[8:12], own[key][[1, 3, 5, 7]], atol=0.02)


def test_gpt_oss_is_openai_s() -> None:
    if "gpt-oss" in NAMES:
        rope = read_config(open_gguf(case("gpt-oss").path, name="x")).rope_parameters
        assert rope["truncate"] is False


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0", "Q5_1"])
def test_experts_of_gpt_oss_stay_packed(kind: str, tmp_path: Path) -> None:
    """Blocks are the file's own bytes; passes differ from those of dequantised weights by rounded activations, which come
    near llama.cpp's. Its own file has experts in MXFP4 and the rest in Q8_0."""
    kept = case("gpt-oss-mxfp4_moe" if kind == "MXFP4" else "gpt-oss")
    path = kept.path if kind == "MXFP4" else change(kept.path, tmp_path / "x.gguf", kind=kind)
    file = open_gguf(path, name="x")
    reason = unsupported("native", read_config(file), torch.float32, torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    packed, plain = (
        load_model(str(path), implementation="native", dtype="float32", weights=weights) for weights in ("auto", "fp32")
    )
    assert isinstance(packed, NativeModel)
    kinds = {key: stored for key, stored in packed.matrices.kinds.items() if ".experts." in key}
    assert len(kinds) == 3 * 4 * 3
    assert set(kinds.values()) == {kind}
    part = GGUFWeights(file).packed("model.layers.1.mlp.experts.up_proj.weight", (64, 128))
    assert part is not None
    assert np.shares_memory(part.data.numpy(), file.data)
    for index, sequence in enumerate(kept.sequences):
        tokens = torch.tensor(sequence)
        found, near = logits(packed, tokens), logits(plain, tokens)
        assert torch.nn.functional.cosine_similarity(found, near).mean() > 0.98
        if kind == "MXFP4":
            assert kept.apart(index, near, exact=True) < CLOSE * kept.largest
            assert kept.apart(index, found) < 3 * kept.rounding


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("phi3", {"dropped": ["blk.1.attn_qkv.weight"]}, r"the first: blk\.1\.attn_qkv\.weight"),
        ("glm4", {"dropped": ["blk.2.post_ffw_norm.weight"]}, r"the first: blk\.2\.post_ffw_norm\.weight"),
        (
            "glm4",
            {"metadata": {"glm4.rope.dimension_count": 7}},
            "dimension_count = 7; expected an even number up to 16",
        ),
        ("deepseek2", {"dropped": ["blk.1.attn_k_b.weight"]}, r"the first: blk\.1\.attn_k_b\.weight"),
        ("deepseek2", {"metadata": {"deepseek2.attention.kv_lora_rank": None}}, "kv_lora_rank = None; expected a pos"),
        ("gpt-oss", {"dropped": ["blk.0.attn_sinks.weight"]}, r"the first: blk\.0\.attn_sinks\.weight"),
        ("gpt-oss", {"metadata": {"gpt-oss.attention.sliding_window": None}}, "sliding_window = None; expected a pos"),
        ("glm4moe", {"renamed": {"blk.1.exp_probs_b.bias": "blk.1.new.bias"}}, r"lacks 1 .*blk\.1\.exp_probs_b\.bias"),
        ("glm4moe", {"metadata": {"glm4moe.expert_gating_func": 1}}, "gating_func = 1; expected 2, GLM-4.5's sigmoid"),
        ("granite", {"metadata": {"granite.residual_scale": -1.0}}, "residual_scale = -1.0; expected a positive"),
        ("mistral3", {"metadata": {"mistral3.rope.scaling.type": "new"}}, "RoPE scaling 'new' is unknown here"),
        ("gemma4", {"dropped": ["rope_freqs.weight"]}, r"lacks tensor rope_freqs\.weight"),
        (
            "gemma4",
            {"metadata": {"gemma4.attention.shared_kv_layers": 5}},
            "sliding_window_pattern = .*; expected both",
        ),
        ("olmo2", {"metadata": {"general.architecture": "olmo9"}}, "architecture 'olmo9'"),
    ],
)
def test_what_cannot_be_used_is_said(name: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    """One line that names the tensor or the key."""
    if name not in NAMES:
        pytest.skip("no such file")
    path = change(case(name).path, tmp_path / "x.gguf", **options)
    with pytest.raises(ModelError, match=said) as caught:
        look(path)
    assert "\n" not in str(caught.value)


def test_parts_of_different_sizes_are_said(tmp_path: Path) -> None:
    path = case("glm4moe").path
    part = torch.zeros(4, 31, 32).numpy()
    path = change(path, tmp_path / "x.gguf", replaced={"blk.1.ffn_up_exps.weight": part})
    with pytest.raises(
        ModelError, match=r"ffn_up_exps\.weight has shape \(4, 31, 32\); expected \(4, 32, 32\), that of"
    ):
        check_files(path, name="x")


def test_deepseek_s_whole_matrix_of_older_files(tmp_path: Path) -> None:
    """Files of before the split hold kv_b as transformers does."""
    kept = case("deepseek2")
    own = checkpoint("deepseek2").state_dict()
    replaced, dropped = {}, []
    for layer in range(3):
        replaced[f"blk.{layer}.attn_k_b.weight"] = own[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
        dropped.append(f"blk.{layer}.attn_v_b.weight")
    renamed = {name: name.replace("k_b", "kv_b") for name in replaced}
    path = change(kept.path, tmp_path / "x.gguf", replaced=replaced, dropped=dropped, renamed=renamed)
    found = logits(load_model(str(path)), tokens_of(kept))
    assert kept.apart(kept.sequences.index(tokens_of(kept).tolist()), found) < CLOSE * kept.largest


def test_names_are_read_once() -> None:
    """No architecture has two modules that read it."""
    from foretell.checkpoints.gguf.families.decoders import DECODERS
    from foretell.checkpoints.gguf.families.gemma4 import GEMMAS
    from foretell.checkpoints.gguf.families.latent import LATENT
    from foretell.checkpoints.gguf.families.mixtures import MIXTURES

    families = [DECODERS, GEMMAS, MIXTURES, LATENT]
    assert sum(map(len, families)) == len({name for family in families for name in family}) <= len(KNOWN)
