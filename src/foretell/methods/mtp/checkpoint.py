"""Finding the MTP tensors of a checkpoint, which transformers drops, and reading them straight from its safetensors.

======================  ==========================  ==========================================================
layout                  prefix                      norms of embedding and hidden state, projection, last norm
======================  ==========================  ==========================================================
DeepSeek-V3, GLM-4.5    ``model.layers.<L>.``       enorm, hnorm, eh_proj, shared_head.norm
Qwen3-Next, Qwen3.5     ``mtp.``                    pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm
MiMo                    ``model.mtp_layers.0.``     token_layernorm, hidden_layernorm, input_proj, final_layernorm
======================  ==========================  ==========================================================

L is the number of the target's own layers. What remains under the prefix (Qwen: under ``mtp.layers.0.``) is one decoder
layer of the family. Copies of embedding and output head that lie beside it are the target's own and are not read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretell.checkpoints.files import weight_files
from foretell.checkpoints.gguf.file import open_gguf
from foretell.checkpoints.gguf.nextn import OWN, read_nextn
from foretell.checkpoints.packed import Packed
from foretell.checkpoints.source import is_file
from foretell.core.errors import ModelError


@dataclass(frozen=True)
class MTPLayout:
    """Names of one kind of MTP module, without the prefix and ".weight"."""

    families: str
    prefix: str  # regular expression of the first module's prefix, before the projection's name
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    block: str = ""  # before the names of the decoder layer
    hidden_first: bool = False  # the projection reads [hidden state; embedding], else [embedding; hidden state]
    feeds_normed: bool = True  # a further guess feeds on what the output head reads, else on the stream before its norm

    @property
    def own(self) -> tuple[str, ...]:
        """Names beside the decoder layer's."""
        return self.embedding_norm, self.hidden_norm, self.projection, self.last_norm


MTP_LAYOUTS = (
    MTPLayout(
        "DeepSeek-V3, GLM-4.5", r"(?:.*\.)?layers\.(\d+)\.", "enorm", "hnorm", "eh_proj", "shared_head.norm",
        feeds_normed=False,
    ),
    MTPLayout(
        "Qwen3-Next, Qwen3.5", r"(?:.*\.)?mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm",
        block="layers.0.",
    ),
    MTPLayout(
        "MiMo", r"(?:.*\.)?mtp_layers\.(\d+)\.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        hidden_first=True,
    ),
)  # fmt: skip
_DEEPSEEK, _QWEN, _ = MTP_LAYOUTS
_AS_QWEN = ("qwen3next", "qwen35", "qwen35moe")
"""GGUF architectures whose module feeds on its normed output; all files have DeepSeek's names."""
_COPIES = re.compile(r"embed_tokens\.weight|shared_head\.head\.weight|lm_head\.weight|.*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class MTPTensors:
    """The first MTP module of a checkpoint."""

    layout: MTPLayout
    own: dict[str, Tensor]  # by the layout's names, each a ".weight"
    block: dict[str, Tensor]  # the decoder layer's, by its own names
    num_modules: int  # how many the checkpoint has, the others unread
    # Of the layer's matrices those in blocks, as a file has them.
    packed: Mapping[str, Packed] = field(default_factory=dict)
    dequantised: str = ""  # the block kinds of all matrices of that file: "Q4_K+Q6_K"


def find(names: Iterable[str]) -> tuple[MTPLayout, str, int] | None:
    """The layout of the MTP tensors among a checkpoint's names, the first module's prefix and the number of modules; None
    where there are none."""
    names = list(names)
    for layout in MTP_LAYOUTS:
        pattern = re.compile(f"({layout.prefix}){re.escape(layout.projection)}\\.weight")
        found = [match for match in map(pattern.fullmatch, names) if match]
        if not found:
            continue
        prefix = min(found, key=lambda match: int(match[2]) if pattern.groups > 1 else 0)[1]
        blocks = {name[len(prefix) :].split(".")[1] for name in names if name.startswith(f"{prefix}layers.")}
        return layout, prefix, max(len(found), len(blocks))
    return None


def read(path: Path, *, name: str) -> MTPTensors:
    """The tensors of the first MTP module of a directory or GGUF file, as they are stored. Raises ModelError where it has
    none, and where
    tensors are missing, damaged, or of a kind that is not read."""
    if is_file(path):
        return _read_gguf(path, name=name)
    files = _files(path, name=name)
    found = find(files)
    if found is None:
        known = "; ".join(f"{layout.families}: '{_example(layout)}'" for layout in MTP_LAYOUTS)
        raise ModelError(
            f"{name} has no MTP head: none of its {len(files)} tensors is a projection of one ({known}). Many checkpoints "
            "drop it: give the original one's directory as 'model', or choose another method"
        )
    layout, prefix, count = found
    own: dict[str, Tensor] = {}
    block: dict[str, Tensor] = {}
    for key, file in sorted(files.items()):
        inner = key.removeprefix(prefix)
        if inner == key or _COPIES.fullmatch(inner):
            continue
        tensor_name = inner.removesuffix(".weight")
        if tensor_name in layout.own:
            own[tensor_name] = _read(file, key, name=name)
        elif inner.startswith(layout.block) or not layout.block:
            block[inner.removeprefix(layout.block)] = _read(file, key, name=name)
        elif not re.match(r"layers\.\d+\.", inner):  # of a further module
            raise ModelError(f"{name}: tensor {key} is unknown in an MTP head of kind {layout.families}")
    missing = [f"{prefix}{key}.weight" for key in layout.own if key not in own]
    if missing:
        raise ModelError(f"{name}: its MTP head lacks tensor {missing[0]}; download the checkpoint again")
    return MTPTensors(layout, own, block, count)


def _read_gguf(path: Path, *, name: str) -> MTPTensors:
    """Those of ``blk.N.nextn``, by the names of the family's layout."""
    found = read_nextn(open_gguf(path, name=name))
    layout = _QWEN if found.architecture in _AS_QWEN else _DEEPSEEK
    names = layout.embedding_norm, layout.hidden_norm, layout.projection, layout.last_norm
    own = {ours: found.own[theirs] for ours, theirs in zip(names, OWN.values(), strict=True)}
    return MTPTensors(layout, own, found.block, found.num_modules, found.packed, "+".join(sorted(found.kinds)))


def _example(layout: MTPLayout) -> str:
    prefix = layout.prefix.replace(r"(?:.*\.)?", "").replace("\\", "").replace("(d+)", "0")
    return f"{prefix}{layout.projection}.weight"


def _files(path: Path, *, name: str) -> dict[str, Path]:
    """The file of each tensor. Raises ModelError."""
    stored = weight_files(path, name=name) if path.is_dir() else None
    if stored is None or not stored.is_safetensors:
        raise ModelError(f"{name}: no model.safetensors in {path}; an MTP head is read from a directory of safetensors")
    return {key: file for key, (file, _) in stored.tensors(name=name).items()}


def _read(file: Path, key: str, *, name: str) -> Tensor:
    try:
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{name}: tensor {key} cannot be read from {file.name} ({error}); download it again"
        ) from error
    if tensor.dtype.itemsize < 2 or not tensor.dtype.is_floating_point:
        raise ModelError(
            f"{name}: tensor {key} of its MTP head is stored as {str(tensor.dtype).removeprefix('torch.')}; expected "
            "bfloat16, float16 or float32: quantised MTP heads are not read"
        )
    return tensor
