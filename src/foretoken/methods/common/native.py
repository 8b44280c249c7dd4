"""Heads at native speed: what all of them need to run through the C kernels beside a native target.

The torch modules stay the slow twins. A head runs here where the target is a ``NativeModel``, its weights have the target's
type and its sizes are ones the kernels have; ``refusal`` says why not. Guesses and distributions are the twin's up to
rounding: sums have another order, and numbers between two matrices are not rounded to bfloat16.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.core.noise import Noise, token_table
from foretoken.core.probs import Processors
from foretoken.core.tree import DrawnBy, TokenTree, chain_tree
from foretoken.draft.base import Context
from foretoken.draft.shapes import Chain, Shape
from foretoken.kernels import heads, structures
from foretoken.methods.common.head import Head
from foretoken.model.llama.matrices import read_matrices
from foretoken.model.llama.native import HEAD_DIMS, NativeModel, check, huge_pages
from foretoken.model.llama.weights import TensorWeights
from foretoken.model.target import CausalModel

WEIGHTS = ("auto", "same", "int8")
"""How a native head holds its matrices: as the checkpoint has them, or rounded to 8 bits; "auto" rounds those in bfloat16.
Guesses from rounded weights are as sound: the distribution that they were drawn from is the one that is told."""

_HOW = {DrawnBy.FIXED: 0, DrawnBy.COUPLED: 1, DrawnBy.IID: 2}


def refusal(head: Head, model: CausalModel) -> str | None:
    """Why a head cannot run through the native kernels beside this target; None where it can."""
    if not isinstance(model, NativeModel):
        return f"the target runs as {model.spec.implementation!r}, and native heads need a native one"
    dtypes = {parameter.dtype for parameter in head.parameters()}
    if dtypes != {model.spec.dtype}:
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}, and the target's {model.spec.dtype}"
    dim = getattr(head.config, "head_dim", HEAD_DIMS[0])
    if dim not in HEAD_DIMS:
        return f"head dimension {dim}; implemented: {', '.join(map(str, HEAD_DIMS))}"
    return None


def rounding(weights: str, model: CausalModel) -> str:
    """What "auto" means beside this target: "int8" where the model is not in float32."""
    return weights if weights != "auto" else "same" if model.spec.dtype == torch.float32 else "int8"


def runs_as(reason: str | None) -> str:
    """``Method.runs_as`` of a head, given why it does not run natively."""
    return "native" if reason is None else f"torch: {reason}"


class Memory:
    """Tensors and structures that C knows by address, and scratch; one pass at a time."""

    def __init__(self, head: nn.Module, weights: str = "same") -> None:
        """Put a head's matrices into one stretch of huge pages, in the order in which they are listed.

        weights: one of ``WEIGHTS``. "same": as they are; the module's parameters become views, so nothing is stored twice.
        "int8": rounded as Q8_0 is, but for embeddings, of which a row is read; the module keeps its own."""
        self.functions = heads.head_functions()
        self.lock = threading.Lock()
        self._kept: list[object] = []
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._matrices: dict[int, structures.Matrix] = {}
        self.weights = weights
        embeddings = {id(module.weight) for module in head.modules() if isinstance(module, nn.Embedding)}
        matrices = {name: each for name, each in head.named_parameters() if each.dim() == 2}
        if weights == "int8":
            rounded = {name: each for name, each in matrices.items() if id(each) not in embeddings}
            dtype = next(iter(matrices.values())).dtype
            made = read_matrices(
                TensorWeights(rounded), list(rounded), weights="int8", dtype=dtype, allocate=huge_pages
            )
            self._kept.append(made)
            self._matrices = {id(each): made.held[name] for name, each in rounded.items()}
        plain = [each for each in matrices.values() if id(each) not in self._matrices]
        sizes = [-(-each.nbytes // 64) * 64 for each in plain]
        arena = huge_pages(sum(sizes))
        self._kept.append(arena)
        for each, part in zip(plain, torch.split(arena, sizes), strict=True):
            place = part[: each.nbytes].view(each.dtype).view(each.shape)
            place.copy_(each.data)
            each.data = place
            self._matrices[id(each)] = structures.Matrix.of(place)

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
            self.functions.product(
                ctypes.addressof(matrix), size, x.data_ptr(), rows, out.data_ptr(), size, torch.get_num_threads()
            )
        )
        return out

    def scratch(self, num_bytes: int) -> int:
        """The address of so many bytes, aligned for vectors; valid until the next call. Under the lock."""
        if num_bytes + 64 > self._scratch.numel():
            self._scratch = huge_pages(num_bytes + 64)
        address = self._scratch.data_ptr()
        return address + -address % 64


def layer_of(
    memory: Memory, attention: nn.Module, mlp: nn.Module | None, window: int, **norms: Tensor | None
) -> structures.Layer:
    """A decoder layer of ``methods.common.layers``; norms by the names of ``structures.Layer``."""
    layer = structures.Layer(window=window)
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
    """The tokens of a head's outputs: all V of them, or those of ``ids`` [DV], ascending."""

    def __init__(self, ids: Tensor | None, size: int, memory: Memory) -> None:
        self.num_outputs = size if ids is None else len(ids)
        self.size = size
        self.ascending = ids is None or bool((ids[1:] > ids[:-1]).all())
        self.address = None if ids is None else memory.keep(ids.contiguous())
        table = token_table(size, torch.device("cpu"))
        self.table = table if ids is None else table[ids]

    def draws(self, context: Context, shape: Shape) -> bool:
        """Whether C can draw a whole proposal of this shape: a chain, of distributions that no penalty, bias or
        processor of the user's changes, and nobody asks for their logits."""
        processors = context.processors
        return (
            type(shape) is Chain
            and context.draft_logits is None
            and self.ascending
            and processors.vocab_size == self.size
            and not processors.reads_history
            and processors.bias is None
        )


@dataclass(frozen=True)
class Draws:
    """How a chain's tokens are drawn, as C sees it, and the tensors that hold it."""

    view: heads.Draw
    q: Tensor | None  # [B, depth + 1, V] float32, filled by the draws; None where no verifier reads it
    held: Sequence[Tensor | None]

    @classmethod
    def of(cls, vocabulary: Vocabulary, processors: Processors, label: DrawnBy, noise: Noise, depth: int) -> "Draws":
        """The draws of a chain of up to depth guesses a row."""
        inverse = torch.tensor([1.0 / row.temperature if row.temperature else 0.0 for row in processors.params])
        keys = uniforms = q = None
        if label == DrawnBy.COUPLED:  # the verifier's depths too: hashed once
            keys = noise.coupled_keys(depth + 1)[:, :depth].contiguous()
        elif label == DrawnBy.IID:
            uniforms = noise.draft_nodes(1, depth)
            q = torch.zeros(len(inverse), depth + 1, vocabulary.size)
        top_k = torch.tensor(processors.top_k) if any(processors.top_k) else None
        top_p, min_p = processors.top_p, processors.min_p  # [B, 1, 1], or None
        held = (inverse, keys, vocabulary.table, uniforms, top_k, top_p, min_p, q)
        places = (None if tensor is None else tensor.data_ptr() for tensor in held)
        return cls(heads.Draw(_HOW[label], depth, vocabulary.size, *places), q, held)


def draw_block(
    memory: Memory, vocabulary: Vocabulary, logits: Tensor, pending: Tensor, limits: Sequence[int],
    processors: Processors, label: DrawnBy, noise: Noise, markov: heads.Markov | None = None,
) -> TokenTree:  # fmt: skip
    """The chain ``grow.chain`` would draw, limits[b] guesses of row b after pending [B], in one call.

    logits [B, D, V], float32: of guess d + 1 whatever the guesses before it are, but for what markov adds for the token
    before it."""
    depth = max(limits)
    given = logits[:, :depth].contiguous().clone()  # drawing overwrites it
    draws = Draws.of(vocabulary, processors, label, noise, depth)
    guesses, limit = torch.empty(len(given), depth, dtype=torch.int64), torch.tensor(list(limits))
    view, bigram = ctypes.addressof(draws.view), None if markov is None else ctypes.addressof(markov)
    threads, pending = torch.get_num_threads(), pending.contiguous()
    with memory.lock:
        scratch = memory.scratch(memory.functions.draw_scratch(bigram, len(given), given.shape[2], threads))
        problem = memory.functions.draw(
            view, bigram, len(given), given.shape[2], threads, None, limit.data_ptr(), pending.data_ptr(),
            given.data_ptr(), guesses.data_ptr(), scratch,
        )  # fmt: skip
    check(problem)
    tokens = torch.cat([pending[:, None], guesses], 1)
    return chain_tree(tokens, row_counts(limits), drawn_by=label, q=draws.q)


def row_counts(limits: Sequence[int]) -> Tensor | None:
    """[B] nodes of each row of a chain, the root included; None where all have the same."""
    return None if min(limits) == max(limits) else torch.tensor(limits) + 1


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor, which must outlive the use."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def addresses(matrices: Sequence[structures.Matrix]) -> "ctypes.Array[structures.Matrix]":
    """An array of structures."""
    return (structures.Matrix * len(matrices))(*matrices)
