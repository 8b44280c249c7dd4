"""What architectures with recurrent layers share: the decay, which is kept as another number, and shapes that
llama.cpp's converter drops or adds."""

from functools import partial
from math import prod

import torch
from torch import Tensor

from foretell.checkpoints.gguf.families.architecture import Change
from foretell.checkpoints.gguf.families.gemmas import less_one
from foretell.checkpoints.gguf.file import GGUFFile
from foretell.core.errors import ModelError


def recurrent(file: GGUFFile, ours: str, theirs: tuple[str, ...]) -> Change | None:
    """What the converter changes in recurrent layers: A_log is kept as -exp(A_log), a convolution [C, 1, K] as [C, K], and
    the vectors A_log, D and the gated norm as matrices.

    The exponential was rounded: A_log comes back within 1e-7 or one unit in its last place, whichever is more.
    """
    shape = file.tensors[theirs[0]].shape
    if ours.endswith(".A_log"):
        return Change(undo=partial(_logarithm, file, theirs[0]), shape=(prod(shape),))
    if ours.endswith(("conv1d.weight", ".conv.conv.weight")):
        return Change(shape=(shape[0], 1, shape[-1]))
    is_vector = ours.endswith(".D") or theirs[0].endswith("ssm_norm.weight")
    return Change(shape=(prod(shape),)) if is_vector and len(shape) > 1 else None


def _logarithm(file: GGUFFile, name: str, parts: list[Tensor]) -> Tensor:
    if not bool((parts[0] < 0).all()):
        raise ModelError(f"{file.name}: {file.path.name} is damaged: tensor {name} has values that are not below 0")
    return torch.log(-parts[0].double()).float().reshape(-1)


def less_one_in_norms(ours: str) -> Change | None:
    """Norms of Qwen, to which the converter adds the 1 that transformers' code adds. The sum was rounded: values come back
    within 6e-8, of those that are larger within one unit in the last place."""
    return Change(undo=less_one) if ours.endswith("norm.weight") else None


def count_rows(file: GGUFFile, theirs: tuple[str, ...], change: Change) -> None:
    """Raise ModelError where tensors have not the rows or columns that a change puts in order."""
    shapes = [file.tensors[name].shape for name in theirs]
    rows = sum(prod(shape[: max(1, len(shape) - 1)]) for shape in shapes)
    for what, found, order in (("rows", rows, change.order), ("columns", shapes[0][-1], change.columns)):
        if order is not None and found != len(order):
            raise ModelError(
                f"{file.name}: tensor {' and '.join(theirs)} has {found} {what}; the heads that {file.path.name} states "
                f"have {len(order)}"
            )
