"""Adapters (``checkpoints/lora.py``) of the Llama family: merged into a checkpoint, or beside each layer's linears."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.lora import Lora, LoraError, LowRank
from foretell.checkpoints.packed import Located, Packed
from foretell.checkpoints.weights import TensorWeights, WeightSource
from foretell.core.tree import Plan
from foretell.kernels import structures
from foretell.kernels.functions import huge_pages
from foretell.model.llama.read.contents import linear_sizes
from foretell.model.llama.read.parts import Part, PartWeights
from foretell.model.llama.read.split import split_weights
from foretell.model.llama.run.pack import Linear
from foretell.model.llama.shape import LlamaShape, layer_names

KINDS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linears that can have an adapter, in the order of ``native/lora.h``."""
_LINE = 64  # bytes; every matrix begins at a line of the cache


class MergedWeights(PartWeights):
    """Another source's tensors with an adapter added: W + scale * B A in float32, then rounded to what is read."""

    def __init__(self, source: WeightSource, lora: Lora) -> None:
        """Raises LoraError for an adapter that does not fit."""
        super().__init__(source, {name: Part(name, None) for name in (*source.names, *source.apart)})
        self._terms = {f"{module}.weight": term for module, term in lora.modules.items()}
        for name, term in self._terms.items():
            wanted = source.shape(name) if name in source.names else None
            _check_fits(lora, name.removesuffix(".weight"), term, wanted)

    @property
    def apart(self) -> Collection[str]:
        """See ``WeightSource.apart``: not of what an adapter changes as a whole, such as ``kv_b_proj``."""
        changed = {name.removesuffix("kv_b_proj.weight") for name in self._terms if name.endswith("kv_b_proj.weight")}
        return tuple(name for name in self._source.apart if name.rpartition("_b_proj")[0][:-1] not in changed)

    def read_into(self, name: str, out: Tensor) -> None:
        """See ``WeightSource.read_into``."""
        if name not in self._terms:
            super().read_into(name, out)
            return
        whole = torch.empty(self.shape(name))
        self._source.read_into(name, whole)
        out.copy_(whole + self._terms[name].product)

    def shared(self, name: str) -> Tensor | None:
        """See ``WeightSource.shared``."""
        return None if name in self._terms else self._source.shared(name)

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``: a sum is not as the file holds it."""
        return None if name in self._terms else self._source.packed(name, rows)

    def located(self, name: str, rows: tuple[int, int] | None = None) -> Located | None:
        """See ``WeightSource.located``: no file has a sum."""
        return None if name in self._terms else self._source.located(name, rows)

    def reader(self, name: str) -> Callable[[int, int], Tensor]:
        """See ``WeightSource.reader``."""
        read, term = self._source.reader(name), self._terms.get(name)
        if term is None:
            return read
        return lambda start, stop: read(start, stop).float() + term.b[start:stop] @ term.a * term.scale


def merged_weights(source: WeightSource, lora: Lora | None) -> WeightSource:
    """``MergedWeights``; the source itself without an adapter."""
    return source if lora is None else MergedWeights(source, lora)


def terms_of(lora: Lora, shape: LlamaShape, *, name: str) -> list[dict[str, LowRank]]:
    """Of each layer what an adapter adds to its linears, by KINDS: of fused ones (qkv_proj) to each part.

    Raises LoraError where it does not fit the model of this name.
    """
    if shape.hybrid:
        raise LoraError(
            f"{lora.path}: {name} has recurrent layers ({shape.architecture}), where adapters do not run: merge it into "
            "the model"
        )
    raised = split_weights(
        TensorWeights({f"{module}.weight": term.b for module, term in lora.modules.items()}),
        shape, name=str(lora.file), any_width=True,
    )  # fmt: skip
    sizes, found, used = linear_sizes(shape), list[dict[str, LowRank]](), set[str]()
    for index in range(shape.num_layers):
        names, terms = layer_names(index, shape.traits), dict[str, LowRank]()
        for key in shape.linears(index):
            if key not in KINDS or names[key] not in raised.names:
                continue
            module = raised.called(names[key]).removesuffix(".weight")
            whole = lora.modules[module]
            term = LowRank(whole.a, raised.read(names[key], torch.float32, torch.device("cpu")), whole.scale)
            _check_fits(lora, module, term, sizes[key])
            terms[key] = term
            used.add(module)
        found.append(terms)
    for module in sorted(lora.modules.keys() - used):
        if shape.traits.latent is not None and module.endswith("_b_proj"):
            raise LoraError(
                f"{lora.file}: it changes {module}, which can have no adapter of its own: merge it into the model"
            )
        _check_fits(lora, module, lora.modules[module], None)
    return found


def placed(
    layers: Sequence[Mapping[str, LowRank]], dtype: torch.dtype
) -> tuple[list[dict[str, structures.LowRank]], Tensor]:
    """What ``terms_of`` returns as the C code reads it, in dtype, and the memory that it lies in, in the order of use."""
    order = [
        (index, kind, half)
        for index, terms in enumerate(layers)
        for together in (KINDS[:3], KINDS[3:4], KINDS[4:6], KINDS[6:])
        for half in ("a", "b")
        for kind in together
        if kind in terms
    ]

    def values(index: int, kind: str, half: str) -> Tensor:
        term = layers[index][kind]
        if half == "a":
            return term.a
        return F.pad(term.b, (0, 0, 0, -len(term.b) % 16)).view(-1, 16, len(term.a)).transpose(1, 2)

    sizes = [-(-values(*one).numel() * dtype.itemsize // _LINE) * _LINE for one in order]
    memory, addresses = huge_pages(max(sum(sizes), 1)), dict[tuple[int, str, str], int]()
    for one, part in zip(order, torch.split(memory, sizes) if sizes else (), strict=True):
        whole = values(*one)
        part[: whole.numel() * dtype.itemsize].view(dtype).view(whole.shape).copy_(whole)
        addresses[one] = part.data_ptr()
    return [
        {
            kind: structures.LowRank(*(addresses[index, kind, half] for half in "ab"), *term.a.shape, term.scale)
            for kind, term in terms.items()
        }
        for index, terms in enumerate(layers)
    ], memory


def _check_fits(lora: Lora, module: str, term: LowRank, wanted: tuple[int, ...] | None) -> None:
    """wanted: the linear's shape; None: no linear is of this name."""
    if wanted is None:
        raise LoraError(
            f"{lora.file}: it changes {module}, which is no linear of the model that can have an adapter; expected those "
            "of attention and of an MLP without experts"
        )
    for part, tensor, expected in (
        ("A", term.a, (len(term.a), wanted[1])), ("B", term.b, (wanted[0], len(term.a))),
    ):  # fmt: skip
        if tuple(tensor.shape) != expected:
            raise LoraError(
                f"{lora.file}: {module}.lora_{part}.weight has shape {tuple(tensor.shape)}, expected {expected}: the "
                "adapter is of another model"
            )


class Assigned(threading.local):
    """Which tokens of a thread's pass have which adapter."""

    places: Sequence[tuple[int, Tensor]] = ()
    """(adapter, counted from 0; int64 places in the stream, of all rows below each other)."""

    def assign(self, loras: Sequence[int], plan: Plan, num_nodes: int, width: int, device: torch.device) -> None:
        """loras: ``KVCache.loras``; num_nodes of a row, which in the stream are ``width`` apart unless the plan packs
        them."""
        places = []
        for lora in sorted({*loras} - {0}):
            rows = torch.tensor([row for row, each in enumerate(loras) if each == lora], device=device)
            if plan.real is None:
                at = (rows[:, None] * width + torch.arange(num_nodes, device=device)).flatten()
            else:
                at = torch.isin(plan.real // num_nodes, rows).nonzero()[:, 0]
            places.append((lora - 1, at))
        self.places = places


class AdaptedLinear:
    """A linear of the lean decoder, or several fused, with what adapters add: in float32, rounded once with the sum."""

    def __init__(self, linear: Linear, parts: Sequence[Sequence[tuple[int, LowRank]]], assigned: Assigned) -> None:
        """parts: of each adapter (first output, what is added from there on)."""
        self._linear, self._parts, self._assigned = linear, parts, assigned

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out = self._linear(x)
        for lora, places in self._assigned.places:
            if not self._parts[lora]:
                continue
            wide = torch.promote_types(x.dtype, torch.float32)
            mine, flat = x.flatten(0, -2)[places].to(wide), out.flatten(0, -2)
            sums = flat[places].to(wide)
            for start, term in self._parts[lora]:
                sums[:, start : start + len(term.b)] += mine @ term.a.t() * term.scale @ term.b.t()
            out = flat.index_copy(0, places, sums.to(out.dtype)).view(out.shape)
        return out


def parts_of(
    terms: Sequence[Mapping[str, LowRank]], keys: Sequence[str], sizes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype, device: torch.device,
) -> list[list[tuple[int, LowRank]]]:  # fmt: skip
    """``AdaptedLinear``'s parts of linears fused in the order of keys. terms: of each adapter, of one layer. A and B are
    rounded to dtype, as the native decoder has them."""
    starts, at = {}, 0
    for key in keys:
        starts[key], at = at, at + sizes[key][0]

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).to(device, torch.promote_types(dtype, torch.float32))

    return [
        [(starts[key], LowRank(rounded(one[key].a), rounded(one[key].b), one[key].scale)) for key in keys if key in one]
        for one in terms
    ]
