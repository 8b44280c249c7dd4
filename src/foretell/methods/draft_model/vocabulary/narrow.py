"""A draft model that guesses the most frequent tokens alone: FR-Spec (2502.14856, section 3).

The head is a large part of a small model with a large vocabulary (27 % of Qwen2.5-0.5B's weights), and a guess needs few
of its rows. Which tokens are frequent is known without data where the vocabulary was made by merging pairs: an earlier
merge is a more frequent one, so the lowest ids are taken, and the tokens that end a text. Other tokens have
probability 0 under q, which every verifier allows: they are never guessed, and the target still writes them.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from foretell.checkpoints.weights import TensorWeights
from foretell.core.errors import ConfigError
from foretell.core.tree import Plan
from foretell.heads.draft_vocabulary import spread
from foretell.heads.stored_outputs import LinearHead
from foretell.kernels.functions import check, huge_pages
from foretell.methods.medusa.head import head_weight
from foretell.model.cache import KVCache
from foretell.model.llama.read.matrices import read_matrices
from foretell.model.llama.run.native import NativeModel
from foretell.model.target import WHOLE, CausalModel, Output, PassOptions, WrappedModel


def frequent_tokens(model: CausalModel, size: int) -> Tensor:
    """[size or a few more] int64 ids in ascending order: the lowest, and those that end a text. Raises ConfigError."""
    spec = model.spec
    if not 1 <= size <= spec.vocab_size:
        raise ConfigError(
            f"draft_vocab_size = {size} must be between 1 and {spec.vocab_size}, the vocabulary of draft model "
            f"{spec.name!r}"
        )
    return torch.tensor(
        sorted({*range(size), *(id for id in spec.eos_token_ids if id < spec.vocab_size)}), dtype=torch.int64
    )


class NarrowModel(WrappedModel):
    """The same model, whose logits are -inf outside a set of tokens, and cost what these alone cost."""

    def __init__(self, inner: CausalModel, tokens: Tensor) -> None:
        """tokens [n] int64: ids in ascending order."""
        super().__init__(inner)
        self.tokens = tokens.to(inner.spec.device)
        rest = inner.spec.vocab_size - len(tokens)
        row_bytes = inner.spec.hidden_size * inner.spec.dtype.itemsize
        self.spec = replace(inner.spec, weight_bytes=max(0, inner.spec.weight_bytes - rest * row_bytes))
        self._columns = (
            _native_columns(inner, tokens) if isinstance(inner, NativeModel) else _columns(inner, self.tokens)
        )

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> "NarrowModel":
        """See ``CausalModel.rebuilt``: the same tokens of the other weights."""
        return NarrowModel(self.inner.rebuilt(tensors), self.tokens.cpu())

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel``."""
        out = self.inner.forward(tokens, plan, cache, replace(options, head=False))
        ends = options.layers is None or options.layers[1] == self.spec.num_layers
        return replace(out, logits=self.logits(out.hidden)) if options.head and ends else out

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel``; float32."""
        return self.head(self.inner.normed(hidden))

    def head(self, normed: Tensor) -> Tensor:
        """See ``CausalModel``; float32."""
        found = self._columns(normed.reshape(-1, normed.shape[-1]))
        return spread(found, self.tokens, self.spec.vocab_size).view(*normed.shape[:-1], -1)


def _columns(model: CausalModel, tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Logits [n, tokens] float32 of the normed hidden states [n, H], by torch."""
    head = LinearHead(model, head_weight(model))
    return lambda normed: head.of_normed(normed, tokens)


def _native_columns(model: NativeModel, tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """The same by the native kernels: these rows of the head as a matrix of their own, plain or in 4 bits where the head
    is (whose rounding again changes nothing), else in 8."""
    name = model.head_name
    table = model.matrices.plain.get(name)
    if table is not None:
        rows = table[tokens].contiguous()
    else:
        rows = torch.empty(len(tokens), model.spec.hidden_size)
        model.native.rows(ctypes.addressof(model.matrices.held[name]), tokens.data_ptr(), len(tokens), rows.data_ptr())
    weights = "auto" if table is not None else "int4" if model.matrices.kinds.get(name) == "int4" else "int8"
    held = read_matrices(TensorWeights({"": rows}), [""], weights=weights, dtype=rows.dtype, allocate=huge_pages)
    matrix, count = held.held[""], len(tokens)

    def columns(normed: Tensor) -> Tensor:
        assert held  # its memory lives as long as this function
        x = normed.detach().float().contiguous()
        out = torch.empty(len(x), count)
        check(
            model.native.product(
                ctypes.addressof(matrix), count, x.data_ptr(), len(x), out.data_ptr(), count, torch.get_num_threads()
            )
        )
        return out

    return columns
