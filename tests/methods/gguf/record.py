"""Writes ``data/``: tiny draft heads and MTP modules in GGUF files of llama.cpp's own converter.
``python -m tests.methods.gguf.record SOURCE [NAME ...]``

SOURCE is llama.cpp's directory (that of llama-cpp-python 0.3.36's source distribution), with what its converter imports.
"""

import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretell.heads import formats
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.head import Head
from foretell.heads.layout import TargetInfo
from foretell.heads.modules import RopeScaling
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from tests.checkpoints.gguf.oracle import checkpoint
from tests.checkpoints.gguf.oracle.tokens import tokenizer_of
from tests.methods.mtp import checkpoints
from tests.model.tiny import VOCAB

DATA = Path(__file__).with_name("data")
MODULES = {
    "qwen35": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
}
"""architecture of a file -> (family of ``checkpoints``, class)."""
WHOLE = "qwen35-whole"
"""A target's file with its module inside, as people download it."""
HEADS = ("eagle3", "dflash", "dspark")
HIDDEN, DRAFT_VOCAB, MASK = 32, 40, 3
TARGET = TargetInfo("target", "Qwen3ForCausalLM", num_layers=6, max_positions=8192)
SIZES: dict[str, Any] = {"intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
_CONVERT = """
import sys
source, folder, out, *options = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "qwen2"
sys.argv = ["convert", folder, "--outfile", out, "--outtype", "f32", *options]
convert_hf_to_gguf.main()
"""


def head_of(name: str) -> Head:
    """One of HEADS, with weights of few values: they pack well, and are the same in every dtype."""
    generator = torch.Generator().manual_seed(5)
    vocabulary = draft_vocabulary(torch.randperm(VOCAB, generator=generator), DRAFT_VOCAB)
    head: Head
    if name == "eagle3":
        scaling = RopeScaling("llama3", 8.0, 4096, 1.0, 4.0)
        options: dict[str, Any] = {"norm_before_residual": True, "rope_theta": 50000.0, "rope_scaling": scaling}
        own = {"draft_vocab_size": DRAFT_VOCAB, "layer_ids": (1, 2, 4), "own_embedding": True}
        head = Eagle3Head(Eagle3HeadConfig(HIDDEN, VOCAB, **SIZES, **options, **own))
    else:
        spark: dict[str, Any] = {"markov_rank": 8, "confidence": True, "sample_from_anchor": True}
        options = {**spark, "draft_vocab_size": DRAFT_VOCAB} if name == "dspark" else {}
        sizes = {**SIZES, "num_layers": 2, "block_size": 5, "layer_ids": (1, 4), "mask_token_id": MASK}
        head = DFlashHead(DFlashHeadConfig(HIDDEN, VOCAB, **sizes, **options))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 2).round() / 4)
        for key, tensor in zip(("d2t", "t2d"), vocabulary, strict=True):
            if key in head.state_dict():
                head.get_buffer(key).copy_(tensor)
    return head.requires_grad_(requires_grad=False)


def save_target(path: Path) -> None:
    """The directory of a target: its configuration and tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 6,
        "vocab_size": VOCAB, "max_position_embeddings": 8192,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_tokenizer(path)


def save_tokenizer(path: Path) -> None:
    """A vocabulary of single characters."""
    inner = Tokenizer(models.BPE({chr(48 + index): index for index in range(VOCAB - 5)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["[gMASK]", "<|endoftext|>", "<|user|>", "<|observation|>"])  # GLM's converter asks
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)


def save_module(path: Path, family: str) -> None:
    """``checkpoints.save`` with weights of few values, and of the target what their converter asks."""
    config = checkpoints.config_of(family)
    size, vocab = config.hidden_size, config.vocab_size
    trunk = {"model.embed_tokens.weight": (vocab, size), "model.norm.weight": (size,), "lm_head.weight": (vocab, size)}
    checkpoints.save(path, family, config, more={name: torch.zeros(shape) for name, shape in trunk.items()})
    _round(path / "model.safetensors")


def save_whole(path: Path) -> None:
    """The oracle's checkpoint of Qwen3.5 with a module beside its layers."""
    target = checkpoint("qwen35")
    trunk = {name: tensor.contiguous() for name, tensor in target.state_dict().items() if name != "lm_head.weight"}
    checkpoints.save(path, "qwen3_5", target.config, more=trunk)
    _round(path / "model.safetensors", lambda name: name.startswith("mtp."))
    tokenizer_of("qwen35").save_pretrained(path)
    _say(path, architectures=["Qwen3_5ForCausalLM"], mtp_num_hidden_layers=1)


def _round(file: Path, chosen: Callable[[str], bool] = lambda _: True) -> None:
    tensors = load_file(file)
    few = {name: (tensor * 8).round() / 8 if chosen(name) else tensor for name, tensor in tensors.items()}
    save_file(few, file, metadata={"format": "pt"})


def _say(folder: Path, **more: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def open_data(name: str, folder: Path) -> Path:
    """A recorded file, unpacked into folder."""
    out = folder / f"{name}.gguf"
    out.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    return out


def main() -> None:
    """Convert."""
    source, *names = sys.argv[1:]
    DATA.mkdir(exist_ok=True)
    for name in names or (*MODULES, WHOLE, *HEADS):
        with tempfile.TemporaryDirectory() as made:
            folder, out, target = Path(made) / "dir", Path(made) / "out.gguf", Path(made) / "target"
            if name in MODULES:
                family, class_name = MODULES[name]
                save_module(folder, family)
                save_tokenizer(folder)
                _say(folder, architectures=[class_name], num_nextn_predict_layers=1)
                options = ["--mtp"]
            elif name == WHOLE:
                save_whole(folder)
                options = []
            else:
                formats.save(head_of(name), folder, target=TARGET)
                save_target(target)
                options = ["--target-model-dir", str(target)]
            subprocess.run([sys.executable, "-c", _CONVERT, source, str(folder), str(out), *options], check=True)
            (DATA / f"{name}.gguf.xz").write_bytes(lzma.compress(out.read_bytes(), preset=9))


if __name__ == "__main__":
    main()
