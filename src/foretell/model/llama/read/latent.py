"""Tensors of latent attention as the decoders want them: what makes keys and what makes values of a vector by themselves,
and rotated numbers in halves."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from foretell.checkpoints.packed import Packed
from foretell.checkpoints.weights import WeightSource, expect_shape
from foretell.model.llama.latent import Latent
from foretell.model.llama.read.parts import Part, PartWeights, in_heads
from foretell.model.llama.traits import rotation_order

_CPU, _TINY = torch.device("cpu"), 1e-30
_BOTH = "kv_b_proj.weight"
KEYS, VALUES = "k_b_proj.weight", "v_b_proj.weight"


def latent_spread(source: WeightSource, names: Mapping[str, str], latent: Latent) -> Tensor:
    """[rank + rope] float32: what queries are multiplied by, and keys divided, before the latter are rounded, as
    ``cache.spread_of`` says.

    The vector, which is the value too, has 1; a rotated pair has its root mean square, of a normed stream, in parts of the
    vector's. names: those of ``layer_names``.
    """
    rotated = source.reader(names["k"])(latent.rank, latent.key).double()
    stream, vector = (source.read(names[key], torch.float32, _CPU).double() for key in ("input_norm", "k_norm"))
    squares = (rotated * stream).square().sum(1).view(2, -1).mean(0).repeat(2) / vector.square().mean()
    return torch.cat((torch.ones(latent.rank), squares.clamp(min=_TINY).sqrt().bfloat16().float()))


class LatentWeights(PartWeights):
    """Another source's tensors: ``kv_b_proj`` as KEYS [heads * rank, nope], each head's transposed, and VALUES
    [heads * value, rank]; of ``q_proj``, ``q_b_proj`` and ``kv_a_proj_with_mqa`` the rotated rows in halves.

    KEYS and VALUES of files that hold them by themselves stay as they are, quantised too. Blocks of a ``kv_b_proj`` cannot
    be transposed: KEYS are then plain numbers, or rounded anew.
    """

    def __init__(
        self, source: WeightSource, latent: Latent, heads: int, *, interleaved: bool, name: str, any_width: bool = False
    ) -> None:
        """Raises ShapeError, which names the model, for a ``kv_b_proj`` of another size."""
        self._latent, self._heads, self._joined = latent, heads, dict[str, str]()
        turned = torch.arange(latent.rope)
        if interleaved:
            turned = rotation_order(latent.rope, latent.rope, interleaved=True)
        query = torch.cat((torch.arange(latent.nope), latent.nope + turned))
        key = torch.cat((torch.arange(latent.rank), latent.rank + turned))
        queries = in_heads(query, heads * len(query))
        orders = {"q_b_proj" if latent.query_rank else "q_proj": queries, "kv_a_proj_with_mqa": key}
        each, apart = latent.nope + latent.value, source.apart
        values = in_heads(latent.nope + torch.arange(latent.value), heads * latent.value, of=each)
        parts = dict[str, Part]()
        for theirs in source.names:
            module = theirs.rpartition(".")[0].rpartition(".")[2]
            if module in ("k_b_proj", "v_b_proj"):  # parts that the source names too
                continue
            if not theirs.endswith(_BOTH):
                parts[theirs] = Part(theirs, orders.get(module) if interleaved else None)
                continue
            prefix = theirs.removesuffix(_BOTH)
            if prefix + KEYS in apart:
                parts[prefix + KEYS] = Part(prefix + KEYS, (0, heads * latent.rank))
                parts[prefix + VALUES] = Part(prefix + VALUES, (0, heads * latent.value))
                continue
            expect_shape(source, theirs, (heads * each, None if any_width else latent.rank), name)
            self._joined[prefix + KEYS] = theirs
            parts[prefix + KEYS] = Part(theirs)
            parts[prefix + VALUES] = Part(theirs, values)
        super().__init__(source, parts, lambda ours: re.sub(r"\.[kv]_b_proj\.", ".kv_b_proj.", ours))

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource.shape``."""
        if name in self._joined:
            return self._heads * self._latent.rank, self._latent.nope
        return super().shape(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        if name not in self._joined:
            super().read_into(name, out)
            return
        both = self._source.read(self._joined[name], torch.promote_types(out.dtype, torch.float32), _CPU)
        keys = both.view(self._heads, -1, self._latent.rank)[:, : self._latent.nope]
        out.copy_(keys.mT.reshape(out.shape))

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``."""
        return None if name in self._joined else super().shared(name)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``: of the transposed the whole."""
        return WeightSource.reader(self, name) if name in self._joined else super().reader(name)

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``."""
        return None if name in self._joined else super().packed(name, rows)
