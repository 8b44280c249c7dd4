"""The module for multi-token prediction inside a target's GGUF file: ``blk.N.nextn.*`` and the decoder layer of that block,
N the number of the target's own layers (llama.cpp's ``nextn_predict_layers``).

The layer is one of the target's own kinds, so its names are those of the architecture, and what their converter changes in
any tensor, the module's norms among them, the architecture undoes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Architecture
from foretell.checkpoints.gguf.families.architectures import architecture_of
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.checkpoints.gguf.heads import HeadTensors
from foretell.checkpoints.gguf.values import whole
from foretell.checkpoints.packed import BLOCK_KINDS, Packed
from foretell.core.errors import ModelError
from foretell.kernels.dequantise import can_dequantise

OWN = {
    "nextn.enorm.weight": "enorm",
    "nextn.hnorm.weight": "hnorm",
    "nextn.eh_proj.weight": "eh_proj",
    "nextn.shared_head_norm.weight": "shared_head.norm",
}
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # the target's own, as beside safetensors


@dataclass(frozen=True)
class NextnTensors:
    """The first module of a file, as floats on the CPU."""

    architecture: str  # the file's
    own: dict[str, Tensor]  # by the values of ``OWN``
    block: dict[str, Tensor]  # the decoder layer's, by transformers' names
    packed: dict[str, Packed]  # of those the matrices in blocks that are decoded, as the file holds them
    num_modules: int  # how many the file has, the others unread
    kinds: frozenset[str]  # block kinds of matrices that were dequantised: "Q4_K", ...


def has_trunk(file: GGUFFile) -> bool:
    """Whether the file holds the target too, not its module alone (their converter's ``--mtp``)."""
    return any(name.startswith("blk.0.") for name in file.tensors) and whole(file, "block_count") > whole(
        file, "nextn_predict_layers", 0
    )


def read_nextn(file: GGUFFile) -> NextnTensors:
    """Raises ModelError for a file without a module, and for tensors that are missing, unknown or cannot be read."""
    where = file.where
    count = whole(file, "nextn_predict_layers", 0)
    if not count:
        arch = file.get("general.architecture")
        raise ModelError(
            f"{where} has no MTP head: {arch}.nextn_predict_layers is not stated, so it has no blk.N.nextn tensors. Many "
            "files leave it out: give one that has it, or the original checkpoint's directory, as 'model', or choose "
            "another method"
        )
    architecture = architecture_of(file)
    layer = whole(file, "block_count") - count
    first = f"blk.{layer}."
    held = {name.removeprefix(first) for name in file.tensors if name.startswith(first)}
    inner = _layer_of(file, architecture, layer, held)
    known = {**{theirs: f"{first}{ours}.weight" for theirs, ours in OWN.items()}, **inner}
    strange = sorted(held - known.keys() - {*_COPIES})
    if strange:
        raise ModelError(f"{where} has tensor {first}{strange[0]}, which no MTP head of this architecture has here")
    missing = [
        f"{first}{theirs}" for theirs in known if theirs not in held and theirs != "nextn.shared_head_norm.weight"
    ]
    if missing:
        raise ModelError(f"{where} lacks tensor {missing[0]} of its MTP head; download it again")
    names = {f"{first}{theirs}": ours for theirs, ours in known.items() if theirs in held}
    if "nextn.shared_head_norm.weight" not in held:  # llama.cpp takes the model's final norm for it
        names["output_norm.weight"] = f"{first}shared_head.norm.weight"
    unread = [theirs for theirs in names if theirs not in file.tensors or not can_dequantise(file.tensors[theirs].kind)]
    if unread:
        raise ModelError(f"{where}: tensor {unread[0]} of its MTP head cannot be read")
    source = HeadTensors(file, names, architecture.adjust)
    found = {ours.removeprefix(first): source.stored(ours) for ours in source.names}
    own = {ours: found.pop(f"{ours}.weight") for ours in OWN.values()}
    packed = {ours: blocks for ours in found if (blocks := source.packed(f"{first}{ours}")) is not None}
    file.release()
    kinds = source.kinds & frozenset(BLOCK_KINDS)
    return NextnTensors(str(file.get("general.architecture")), own, _stacks(found), packed, count, kinds)


def _layer_of(file: GGUFFile, architecture: Architecture, layer: int, held: set[str]) -> Mapping[str, str]:
    """theirs -> ours of the block's decoder layer, without ``blk.N.``: of the target's own kinds of layers the one of which
    the fewest tensors are missing."""
    first = f"blk.{layer}."
    kinds: list[dict[str, str]] = []
    for index in range(max(layer, 1)):
        own = {} if architecture.some is None else architecture.some(file, index)
        kinds.append({**architecture.layer, **own})
    best = min(kinds, key=lambda kind: len(kind.keys() - held))
    may = {**architecture.may}
    return {
        theirs: f"{first}{ours}"
        for theirs, ours in {**best, **{theirs: ours for theirs, ours in may.items() if theirs in held}}.items()
    }


def _stacks(block: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers computes with them: gate and up [E, 2 I, H], down [E, H, I]; a gate as a matrix."""
    out = dict(block)
    for name in [name for name in block if name.endswith(".experts.gate_proj.weight")]:
        prefix = name.removesuffix("gate_proj.weight")
        gate, up = out.pop(name), out.pop(f"{prefix}up_proj.weight")
        out[f"{prefix}gate_up_proj"] = torch.cat([gate, up.to(gate.dtype)], 1)
        out[f"{prefix}down_proj"] = out.pop(f"{prefix}down_proj.weight")
    for name, tensor in out.items():
        if name.endswith("shared_expert_gate.weight") and tensor.dim() == 1:
            out[name] = tensor[None]
    return out
