"""MTP modules of checkpoints through the native kernels, against transformers' own layer: the same logits and guesses."""

from pathlib import Path

import pytest
import torch

from foretell import Engine
from foretell.core.tree import DrawMode
from foretell.methods.mtp import checkpoint
from foretell.methods.mtp.drafter import MTP
from foretell.methods.mtp.head import CheckpointMTPHead
from foretell.model.hf.one_layer import text_config
from foretell.model.llama.run import native
from foretell.model.llama.run.native import NativeModel
from tests.methods.decoding import Decoding, prompts
from tests.methods.eagle.eagles import same_trees
from tests.methods.eagle.test_drafter import Recorded, decoded
from tests.methods.eagle.test_native import LENGTHS, Levels, Rounded, Whole, distance
from tests.methods.gguf.record import WHOLE, open_data, save_whole
from tests.methods.gguf.rewrite import rewrite
from tests.methods.mtp.checkpoints import config_of, save
from tests.model.tiny import tiny_module

MODULE = tiny_module("qwen3", head_dim=16, num_hidden_layers=2)
REASON = native.supports(MODULE.config, torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FAMILIES = ("glm4_moe", "mimo", "qwen3_5", "qwen3_next")
"""With experts and without, gated or not; what is fed on normed or not, the projection's halves in both orders."""


def pair(family: str, path: Path, dtype: torch.dtype = torch.float32) -> tuple[CheckpointMTPHead, NativeModel]:
    model = NativeModel.from_hf(tiny_module("qwen3", head_dim=16, num_hidden_layers=2, dtype=dtype))
    save(path, family, config_of(family))
    config = text_config(path, name="dir")
    return CheckpointMTPHead(checkpoint.read(path, name="dir"), config, model.spec, name="dir"), model


@pytest.mark.parametrize("family", FAMILIES)
@LENGTHS
def test_passes_of_chains_and_trees_are_the_twins(family: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    head, model = pair(family, tmp_path)
    twin = decoded(head, model, lengths)
    assert twin.drafter.native is None
    assert distance(decoded(head, model, lengths, drafter_class=Levels), twin) < 2e-5


def apart(head: CheckpointMTPHead, model: NativeModel) -> float:
    """How far the logits after a prompt are from the twin's where matrices are rounded to 8 bits."""
    rounded, twin = (decoded(head, model, (7,), drafter_class=kind).drafter.passes[0] for kind in (Rounded, Recorded))
    assert rounded.text == twin.text
    return float((rounded.logits - twin.logits).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_to_8_bits_it_guesses_nearly_the_same(family: str, tmp_path: Path) -> None:
    assert 1e-4 < apart(*pair(family, tmp_path)) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_chain_is_the_twins(family: str, tmp_path: Path) -> None:
    head, model = pair(family, tmp_path)
    found = []
    for kind in (Recorded, Whole):
        decoding = Decoding(model, head, prompts((5, 12, 2)), drafter_class=kind)
        with torch.inference_mode():
            found.append([decoding.step("chain", DrawMode.COUPLED) for _ in range(4)])
    assert decoding.drafter.num_chains == 4
    same_trees(*found)


def test_experts_chosen_by_bias_in_bfloat16(tmp_path: Path) -> None:
    """A router's float32 correction beside bfloat16 weights."""
    head, model = pair("glm4_moe", tmp_path, torch.bfloat16)
    assert MTP(head, model).runs_as == "native, int8: the checkpoint's own Glm4MoeDecoderLayer"
    assert apart(head, model) < 0.2


def test_latent_attention_runs_by_torch_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = MTP(*pair("deepseek_v3", tmp_path))
    assert "head runs by torch, which is slower" in caplog.text
    assert head.runs_as.startswith("torch: ")
    assert head.runs_as.endswith("DeepseekV3DecoderLayer")


def test_blocks_of_a_file_are_kept(tmp_path: Path) -> None:
    """A quantised file's module is read in its blocks, not rounded again."""
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    kinds = {f"blk.3.{name}.weight": "Q4_0" for name in names}
    path = rewrite(open_data(WHOLE, tmp_path), tmp_path / "q.gguf", kinds=kinds)
    engine = Engine.load(str(path), speculative="mtp", dtype="float32")
    assert engine.resolved()["head"] == "native, Q4_0: the checkpoint's own Qwen3_5DecoderLayer"
    asked = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    found = engine.generate([5, 9, 33, 7], **asked)
    assert found.token_ids == engine.with_method("none").generate([5, 9, 33, 7], **asked).token_ids
    assert found.num_draft_tokens > 20
    save_whole(tmp_path / "dir")
    plain = Engine.load(str(tmp_path / "dir"), speculative="mtp", dtype="float32")
    assert plain.resolved()["head"] == "native, float32: the checkpoint's own Qwen3_5DecoderLayer"
