"""Draft vocabularies: a head guesses the target's most frequent tokens alone (EAGLE-3, FR-Spec 2502.14856), by two maps.

``d2t`` [DV] int64 holds offsets (target id = i + d2t[i]), ``t2d`` [V] bool which target ids there are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError
from foretell.heads.config_keys import check_ids


def draft_vocabulary(counts: Tensor | Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """(d2t [size] int64 offsets, t2d [V] bool) of the ``size`` most frequent ids by counts [V], ties to the lower id.

    Ids stand in ascending order: the draft's column i is target id i + d2t[i]. Raises ModelError where size is not
    between 1 and V.
    """
    counts = torch.as_tensor(counts)
    if not 1 <= size <= len(counts):
        raise ModelError(f"a draft vocabulary has 1 to {len(counts)} ids, as many as the target at most; given {size}")
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    t2d[chosen] = True
    return chosen - torch.arange(size, device=counts.device), t2d


def spread(logits: Tensor, ids: Tensor, size: int) -> Tensor:
    """[..., size] of logits [..., DV] of the tokens ids [DV]: -inf at all others."""
    return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy_(-1, ids, logits)


class ReducedHead(nn.Module):
    """A head with the two maps, which begin as the first ids."""

    d2t: Tensor
    t2d: Tensor

    def add_maps(self, size: int, total: int) -> None:
        """Of ``size`` of ``total`` ids."""
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(total) < size)

    def take_maps(self, vocabulary: tuple[Tensor, Tensor] | None) -> None:
        """Those that ``draft_vocabulary`` returned, where there are some."""
        if vocabulary is not None:
            self.d2t.copy_(vocabulary[0])
            self.t2d.copy_(vocabulary[1])

    @property
    def target_ids(self) -> Tensor:
        """[DV] int64 the target's id of each output."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def complete_vocabulary(tensors: dict[str, Tensor], size: int, total: int, *, name: str) -> None:
    """Add d2t and t2d of ``size`` of ``total`` ids where they follow; raise ModelError where they contradict each other or
    the sizes."""
    if "d2t" not in tensors and size == total:
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    if "d2t" not in tensors or tensors["d2t"].shape != (size,):
        return  # missing, or of a wrong shape: reported with all others
    if tensors["d2t"].is_floating_point():
        raise ModelError(f"{name}: d2t holds {str(tensors['d2t'].dtype)[6:]} numbers, expected whole ones")
    ids = tensors["d2t"].long() + torch.arange(size)
    check_ids(ids, size, total, name=name, of="d2t", hint=": it must hold offsets, the target's id is i + d2t[i]")
    if "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(total, dtype=torch.bool).index_fill_(0, ids, True)
    if tensors["t2d"].shape == (total,):
        known = tensors["t2d"].bool()
        if int(known.sum()) != size or not bool(known[ids].all()):
            raise ModelError(f"{name}: t2d and d2t name different draft vocabularies; both belong to one checkpoint")
