"""Heads at native speed: what all of them need to run through the C kernels beside a native target.

The torch modules stay the slow twins. A head runs here where the target is a ``NativeModel``, its weights have the target's
type and its sizes are ones the kernels have; ``refusal`` says why not. Guesses and distributions are the twin's up to
rounding: sums have another order, and numbers between two matrices are not rounded to bfloat16.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from foretell.checkpoints.packed import Packed
from foretell.checkpoints.weights import TensorWeights
from foretell.core.noise import token_table
from foretell.heads.config_keys import check_ids
from foretell.heads.head import Head
from foretell.heads.modules import Attention, rotations
from foretell.heads.pair_head import PairHead
from foretell.kernels import heads, structures
from foretell.kernels.build import warn_once
from foretell.kernels.functions import check, huge_pages, native_functions
from foretell.kernels.native import need
from foretell.model.cache import BoundCache
from foretell.model.llama.read.matrices import read_matrices
from foretell.model.llama.run.native import HEAD_DIMS, NativeModel, supports
from foretell.model.target import CausalModel

_Made = TypeVar("_Made")
WEIGHTS = ("auto", "same", "int8")
"""How a native head holds its matrices: as the checkpoint has them, or rounded to 8 bits; "auto" rounds those in bfloat16.
Guesses from rounded weights are as sound: the distribution that is reported is the one that they were drawn from."""


def beside(
    kind: Callable[[Any, NativeModel, str], _Made], head: Head, model: CausalModel, weights: str = "auto"
) -> tuple[_Made | None, str | None]:
    """A head as ``kind``, which runs it through the native kernels beside this target, or None and why not. Beside a native
    target, which could be guessed for faster, that is said once. weights: one of ``WEIGHTS``."""
    reason = _refusal(head, model)
    if reason is None and isinstance(head, PairHead) and (own := head.family_layer()) is not None:
        reason = supports(own.config, head.dtype, model.spec.device)
    if reason is not None and isinstance(model, NativeModel):
        warn_once(f"the drafter's head runs by torch, which is slower: {reason}", reason)
    if reason is not None:
        return None, reason
    assert isinstance(model, NativeModel)
    return kind(head, model, rounding(weights, model)), None


def _refusal(head: Head, model: CausalModel) -> str | None:
    if not isinstance(model, NativeModel):
        return f"the target runs as {model.spec.implementation!r}, and native heads need a native one"
    dtypes = {parameter.dtype for parameter in head.parameters()}
    if dtypes != {model.spec.dtype}:
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}, and the target's {model.spec.dtype}"
    dim = getattr(head.config, "head_dim", HEAD_DIMS[0])
    if dim not in HEAD_DIMS:
        return f"head dimension {dim}; implemented: {', '.join(map(str, HEAD_DIMS))}"
    return heads.library()[1]


def rounding(weights: str, model: CausalModel) -> str:
    """What "auto" means beside this target: "int8" where the model is not in float32."""
    return weights if weights != "auto" else "same" if model.spec.dtype == torch.float32 else "int8"


def runs_as(reason: str | None, head: Head) -> str:
    """``Method.runs_as`` of a head, given why it does not run natively."""
    kinds = "+".join(sorted({matrix.kind for matrix in head.packed.values()}))
    if reason is None:
        return f"native, {kinds}" if kinds else "native"
    return f"torch: {reason}" + (f"; its {kinds} matrices are dequantised" if kinds else "")


class Memory:
    """Tensors and structures that C knows by address, and scratch; one pass at a time."""

    def __init__(self, head: nn.Module, weights: str = "same") -> None:
        """Put a head's matrices into one stretch of huge pages, in the order in which they are listed.

        weights: one of ``WEIGHTS``. "same": as they are: those of ``Head.packed`` in their blocks, of others the module's
        parameters become views, so that nothing is stored twice. "int8": rounded as Q8_0 is, but for those of ``packed``,
        and for embeddings, of which a row is read; the module keeps its own."""
        self.functions, self._native = heads.head_functions(), native_functions()
        self.lock = threading.Lock()
        self._kept: list[object] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._matrices: dict[int, structures.Matrix] = {}
        self.weights = weights
        embeddings = {id(module.weight) for module in head.modules() if isinstance(module, nn.Embedding)}
        matrices = {name: each for name, each in head.named_parameters() if each.dim() == 2}
        blocks: Mapping[str, Packed] = head.packed if isinstance(head, Head) else {}
        for kind in ("auto", *(["int8"] if weights == "int8" else [])):
            chosen = {
                name: each
                for name, each in matrices.items()
                if id(each) not in embeddings and (name in blocks) == (kind == "auto")
            }
            if not chosen:
                continue
            source, dtype = InBlocks(chosen, blocks), next(iter(matrices.values())).dtype
            made = read_matrices(source, list(chosen), weights=kind, dtype=dtype, allocate=huge_pages)
            self._kept.append(made)
            self._matrices |= {id(each): made.held[name] for name, each in chosen.items()}
        plain = [each for each in matrices.values() if id(each) not in self._matrices]
        sizes = [-(-each.nbytes // 64) * 64 for each in plain]
        arena = huge_pages(sum(sizes))
        self._kept.append(arena)
        for each, part in zip(plain, torch.split(arena, sizes), strict=True):
            place = part[: each.nbytes].view(each.dtype).view(each.shape)
            place.copy_(each.data)
            each.data = place
            self._matrices[id(each)] = structures.Matrix.of(place)
        need(matrix.format for matrix in self._matrices.values())

    def head_of(self, model: NativeModel) -> structures.Matrix:
        """The target's output head for this head to read: rounded too where this is."""
        return model.rounded_head() if self.weights == "int8" else model.head_matrix

    def keep(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor, which lives as long as this."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def vector(self, values: Tensor | None) -> int | None:
        """The address of a float32 copy; None of None."""
        return None if values is None else self.keep(values.detach().float().contiguous())

    def matrix(self, linear: nn.Linear | nn.Embedding) -> structures.Matrix:
        """A module's weight."""
        return self._matrices[id(linear.weight)]

    def product(self, matrix: structures.Matrix, x: Tensor, size: int) -> Tensor:
        """[..., size] float32: x [..., columns] times the first ``size`` rows of a matrix."""
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], size)
        rows = x.numel() // matrix.columns
        check(
            self._native.product(
                ctypes.addressof(matrix), size, x.data_ptr(), rows, out.data_ptr(), size, torch.get_num_threads()
            )
        )
        return out

    def scratch(self, num_bytes: int) -> int:
        """The address of ``num_bytes`` bytes, aligned for vectors; valid until the next call. Under the lock."""
        if num_bytes + 64 > self._scratch.numel():
            self._scratch = huge_pages(num_bytes + 64)
        address = self._scratch.data_ptr()
        return address + -address % 64


class NativeHead:
    """A head with attention beside a native target. What it computes is float32 whatever the weights are."""

    def __init__(self, head: Any, model: NativeModel) -> None:
        self.head, self.model = head, model

    def new_cache(self, num_rows: int, capacity: int) -> BoundCache:
        """See ``Head.new_cache``."""
        config: Any = self.head.config
        shapes = [(config.num_kv_heads, config.head_dim)] * getattr(config, "num_layers", 1)
        rope = rotations(capacity, config.head_dim, config.rope_theta, getattr(config, "rope_scaling", None))
        return BoundCache(num_rows, capacity, shapes, self.head.dtype, rope)


class InBlocks(TensorWeights):
    """Parameters, some of which a file has in blocks."""

    def __init__(self, tensors: Mapping[str, Tensor], blocks: Mapping[str, Packed]) -> None:
        super().__init__(tensors)
        self._blocks = blocks

    def packed(self, name: str, rows: tuple[int, int] | None = None) -> Packed | None:
        """See ``WeightSource.packed``."""
        found = self._blocks.get(name)
        return None if found is None else found.part(rows)


def layer_of(memory: Memory, attention: nn.Module, mlp: nn.Module | None, **norms: Tensor | None) -> structures.Layer:
    """A decoder layer of ``heads.modules``; norms by the names of ``structures.Layer``."""
    assert isinstance(attention, Attention)
    shape, limit = attention.shape, attention.shape.limit
    layer = structures.Layer(window=shape.window if limit is None else limit.size, sinks=limit.sinks if limit else 0)
    for key in ("q", "k", "v", "o"):
        linear = attention.get_submodule(f"{key}_proj")
        assert isinstance(linear, nn.Linear)
        setattr(layer, key, memory.matrix(linear))
        setattr(layer, f"{key}_bias", memory.vector(linear.bias))
    for key in ("gate", "up", "down") if mlp is not None else ():
        assert mlp is not None
        linear = mlp.get_submodule(f"{key}_proj")
        assert isinstance(linear, nn.Linear)
        setattr(layer, key, memory.matrix(linear))
    for key in ("q_norm", "k_norm"):
        setattr(layer, key, memory.vector(getattr(getattr(attention, key, None), "weight", None)))
    for key, weight in norms.items():
        setattr(layer, key, memory.vector(weight))
    return layer


class Vocabulary:
    """The tokens of a head's outputs: all V of them, or those of ``ids`` [DV]."""

    def __init__(self, ids: Tensor | None, size: int, memory: Memory) -> None:
        """Raises ModelError for ids that are no tokens: C writes at these places."""
        if ids is not None:
            check_ids(ids, len(ids), size, name="the draft head", of="the map of its vocabulary")
        self.num_outputs = size if ids is None else len(ids)
        self.size = size
        self.ascending = ids is None or bool((ids[1:] > ids[:-1]).all())
        self.address = None if ids is None else memory.keep(ids.contiguous())
        table = token_table(size, torch.device("cpu"))
        self.table = table if ids is None else table[ids]


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor, which must outlive the use."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def addresses(matrices: Sequence[structures.Matrix]) -> "ctypes.Array[structures.Matrix]":
    """An array of structures."""
    return (structures.Matrix * len(matrices))(*matrices)


class NativeBlocks:
    """Heads side by side: of each some blocks, and a linear layer or none. Outputs are float32."""

    def __init__(
        self, memory: Memory, blocks: Sequence[Sequence[nn.Linear]], outs: Sequence[nn.Linear], size: int,
        vocabulary: Vocabulary | None = None,
    ) -> None:  # fmt: skip
        """blocks[k]: the linear layers [size, size] of head k; outs[k]: its last one, or none at all. vocabulary: the
        tokens of the outputs; None: they are no tokens."""
        self.memory, self.size = memory, size
        linears = [linear for head in blocks for linear in head]
        self._blocks = addresses([memory.matrix(linear) for linear in linears])
        self._outs = addresses([memory.matrix(linear) for linear in outs])
        self._biases = _pointers([memory.vector(linear.bias) for linear in linears])
        self._out_biases = _pointers([memory.vector(linear.bias) for linear in outs])
        num_outputs = outs[0].out_features if outs else 0
        self.width = size if not outs else num_outputs if vocabulary is None else vocabulary.size
        self.view = heads.Blocks(
            len(blocks), len(blocks[0]), size, num_outputs, self._blocks, self._biases,
            self._outs if outs else None, self._out_biases, None if vocabulary is None else vocabulary.address,
        )  # fmt: skip
        self.address = ctypes.addressof(self.view)

    def __call__(self, x: Tensor, num_heads: int = 1) -> Tensor:
        """x [B, size] -> outputs [B, num_heads, width] of the first heads; -inf at tokens that no output has."""
        x, threads, functions = x.float().contiguous(), torch.get_num_threads(), self.memory.functions
        out = torch.empty(len(x), num_heads, self.width)
        with self.memory.lock:
            scratch = self.memory.scratch(functions.blocks_scratch(self.address, len(x), num_heads, threads))
            functions.blocks(
                self.address, threads, len(x), num_heads, x.data_ptr(), out.data_ptr(), self.width, scratch
            )
        return out


def _pointers(places: Sequence[int | None]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(places))(*places)
