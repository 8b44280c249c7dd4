"""Writes ``data/``: the MTP modules of checkpoints.py's families in GGUF files of llama.cpp's own converter.
``python -m tests.methods.mtp.record SOURCE``

SOURCE is llama.cpp's directory (that of llama-cpp-python 0.3.36's source distribution), with what its converter imports.
"""

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.methods.mtp.checkpoints import config_of, save
from tests.model.tiny import VOCAB

DATA = Path(__file__).with_name("data")
FAMILIES = {
    "qwen3_5": ("qwen35", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("qwen3next", "Qwen3NextForCausalLM"),
    "glm4_moe": ("glm4moe", "Glm4MoeForCausalLM"),
}
"""family -> (architecture of its files, class)."""
_CONVERT = """
import sys
source, folder, out = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "qwen2"
sys.argv = ["convert", folder, "--outfile", out, "--outtype", "f32", "--mtp"]
convert_hf_to_gguf.main()
"""


def coarse(path: Path, family: str) -> None:
    """``checkpoints.save`` with weights of few values, which pack well."""
    config = config_of(family)
    save(path, family, config, more=trunk(config))
    file = path / "model.safetensors"
    few = {name: (tensor * 8).round() / 8 for name, tensor in load_file(file).items()}
    save_file(few, file, metadata={"format": "pt"})


def trunk(config: Any) -> dict[str, Tensor]:
    """Embedding, final norm and head of the target: what the converter keeps beside a module."""
    size, vocab = config.hidden_size, config.vocab_size
    return {
        "model.embed_tokens.weight": torch.zeros(vocab, size),
        "model.norm.weight": torch.zeros(size),
        "lm_head.weight": torch.zeros(vocab, size),
    }


def main() -> None:
    """Convert."""
    (source,) = sys.argv[1:]
    DATA.mkdir(exist_ok=True)
    for family, (arch, class_name) in FAMILIES.items():
        with tempfile.TemporaryDirectory() as made:
            folder, out = Path(made) / "dir", Path(made) / "out.gguf"
            coarse(folder, family)
            known = {chr(48 + index): index for index in range(VOCAB - 4)}
            inner = Tokenizer(models.BPE(known, []))
            inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            inner.add_special_tokens(["[gMASK]", "<|endoftext|>", "<|user|>", "<|observation|>"])  # GLM's converter asks
            PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
            path = folder / "config.json"
            said = {**json.loads(path.read_text()), "architectures": [class_name], "num_nextn_predict_layers": 1}
            path.write_text(json.dumps(said))
            subprocess.run([sys.executable, "-c", _CONVERT, source, str(folder), str(out)], check=True)
            (DATA / f"{arch}.gguf.xz").write_bytes(lzma.compress(out.read_bytes(), preset=9))


if __name__ == "__main__":
    main()
