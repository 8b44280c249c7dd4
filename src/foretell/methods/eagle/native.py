"""EAGLE's heads and MTP modules through the C kernels (``kernels/native/pair.h``): a pass over pairs, or a whole
chain or tree of guesses, is one call. ``PairHead`` is the slow twin."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretell.core.noise import Noise
from foretell.core.probs import Processors
from foretell.core.tree import DrawnBy, Plan, TokenTree
from foretell.heads.native import Memory, NativeHead, Vocabulary, address, layer_of
from foretell.heads.pair_head import FamilyLayer, PairHead
from foretell.kernels import heads, structures
from foretell.kernels.functions import check
from foretell.methods.chains import Draws
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.model.cache import BoundCache
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import EMBEDDING, read_shape


class NativePair(NativeHead):
    """A pair head beside a native target."""

    def __init__(self, head: PairHead, model: NativeModel, weights: str = "same") -> None:
        """weights: see ``Memory``."""
        super().__init__(head, model)
        self.size, self.vocab_size = head.config.hidden_size, model.spec.vocab_size
        own = head.family_layer()
        self._family: NativeModel | None = None  # the decoder layer, where it is of a target's family
        if own is None:
            self.memory = Memory(head, weights)
            self.vocabulary = Vocabulary(head.vocabulary, self.vocab_size, self.memory)
            self.view = self._describe()
        else:
            self.memory = Memory(own.projection, weights)
            self.vocabulary = Vocabulary(None, self.vocab_size, self.memory)
            self.view = self._describe_family(own, weights)
        self.address = ctypes.addressof(self.view)

    def _describe(self) -> heads.Pair:
        head, model, memory, config = self.head, self.model, self.memory, self.head.config
        layers = (structures.Layer * config.num_layers)()
        for index, layer in enumerate(head.decoder):
            layers[index] = layer_of(
                memory, layer.self_attn, layer.mlp,
                mlp_norm=layer.post_attention_layernorm.weight,
                input_norm=layer.input_layernorm.weight if index else None,
            )  # fmt: skip
        embedding = memory.matrix(head.embed_tokens) if head.own_embedding else model.embedding_matrix
        final_norm: int | None = None
        pair = heads.Pair(num_outputs=self.vocabulary.num_outputs, ids=self.vocabulary.address)
        if isinstance(head, Eagle3Head):
            self._fusion = memory.matrix(head.fc)
            out, final_norm = memory.matrix(head.lm_head), memory.vector(head.norm.weight)
            pair.token_norm = memory.vector(head.midlayer.input_layernorm.weight)
            pair.feature_norm = memory.vector(head.midlayer.hidden_norm.weight)
            pair.normed_residual = head.config.norm_before_residual
            pair.normed_output = head.config.norm_output
        else:
            assert isinstance(head, Eagle1Head)
            out = memory.head_of(model)
            pair.fc, pair.fc_bias = memory.matrix(head.fc), memory.vector(head.fc.bias)
        pair.model = structures.Model(
            head.dtype == torch.bfloat16, config.num_layers, config.vocab_size, config.hidden_size,
            config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps,
            embedding, out, final_norm, layers,
        )  # fmt: skip
        if not head.own_embedding:
            pair.model.embedding_scale = model.embedding_scale
        if not isinstance(head, Eagle3Head):
            model.lend_outputs(pair.model)
        return pair

    def _describe_family(self, own: FamilyLayer, weights: str) -> heads.Pair:
        """A module for further tokens: its decoder layer is read as that of a model."""
        memory, model = self.memory, self.model
        kind, name = "int8" if weights == "int8" and not own.in_blocks else "auto", f"the MTP head of {model.spec.name}"
        shape = replace(read_shape(own.config), tied=True)
        if self.head.window is not None:
            shape = shape.limited(self.head.window, name=name)
        one = NativeModel(shape, own.weights, dtype=self.head.dtype, name=name, weights=kind)
        self._family, offset = one, shape.traits.norm_offset
        pair = heads.Pair(num_outputs=self.vocabulary.num_outputs, ids=None, normed_output=own.feeds_normed)
        pair.model = structures.Model.from_buffer_copy(structures.Model.from_address(one.address))
        pair.model.vocab, pair.model.embedding = self.vocab_size, model.embedding_matrix
        pair.model.embedding_scale, pair.model.head = model.embedding_scale, memory.head_of(model)
        model.lend_outputs(pair.model)
        pair.fc = memory.matrix(own.projection)
        pair.token_norm, pair.feature_norm, pair.model.final_norm = (
            memory.vector(norm + offset) for norm in (own.token_norm, own.feature_norm, own.last_norm)
        )
        return pair

    @property
    def label(self) -> str:
        """How the matrices of the layers are held: "int8", "Q4_K+Q6_K", ..."""
        if self._family is None:
            return self.memory.weights
        held = self._family.matrices.kinds
        return "+".join(sorted({kind for name, kind in held.items() if name != EMBEDDING}))

    def new_cache(self, num_rows: int, capacity: int) -> BoundCache:
        """See ``PairHead.new_cache``."""
        if self._family is not None:
            own = self._family.shape
            sizes, rope = [(own.num_kv_heads, own.head_dim)], self._family.rotations(capacity)
            return BoundCache(num_rows, capacity, sizes, self.head.dtype, rope)
        return super().new_cache(num_rows, capacity)

    def features(self, taps: Tensor) -> Tensor:
        """See ``PairHead.features``; taps [B, n, T * H] -> [B, n, H]."""
        head = self.head
        if isinstance(head, Eagle3Head):
            if head.config.norm_before_fc or head.config.fc_norm:
                taps = head.normed_taps(taps.to(head.dtype))
            return self.memory.product(self._fusion, taps, self.size)
        return self.model.normed(taps)

    def run(self, tokens: Tensor, features: Tensor, plan: Plan, cache: BoundCache) -> Tensor:
        """[B, n, H] the outputs at pairs tokens [B, n], features [B, n, H]; their keys and values go to the cache."""
        return self._pass(tokens, features, plan, cache, None, None)

    def level(self, tokens: Tensor, plan: Plan, cache: BoundCache, outputs: Tensor) -> Tensor:
        """Logits [B, W, V] of W nodes, each fed on what outputs [B, columns, H] holds of its parent
        in the plan; their own outputs are put there too."""
        logits = torch.empty(*tokens.shape, self.vocab_size)
        self._pass(tokens, None, plan, cache, outputs, logits)
        return logits

    def _pass(
        self, tokens: Tensor, features: Tensor | None, plan: Plan, cache: BoundCache, outputs: Tensor | None,
        logits: Tensor | None,
    ) -> Tensor:  # fmt: skip
        num_rows, num_nodes = tokens.shape
        features = None if features is None else features.float().contiguous()
        tokens, slots, positions, length = (
            tokens.contiguous(), plan.slots.contiguous(), plan.positions.contiguous(), plan.length.contiguous(),
        )  # fmt: skip
        ancestry, threads = plan.ancestry, torch.get_num_threads()
        hidden = torch.empty(num_rows, num_nodes, self.size)
        with self.memory.lock:
            problem = self.memory.functions.pair(
                self.address, cache.address, threads, num_rows, num_nodes, ancestry.shape[2], tokens.data_ptr(),
                length.data_ptr(), slots.data_ptr(), positions.data_ptr(), ancestry.data_ptr(), *ancestry.stride(),
                address(features), address(outputs), 0 if outputs is None else outputs.shape[1], hidden.data_ptr(),
                address(logits), self.vocab_size, self._scratch(cache, num_rows, tokens.numel(), tokens.numel()),
            )  # fmt: skip
        check(problem)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, n, V] of outputs [B, n, H]; -inf outside the draft vocabulary."""
        hidden = hidden.contiguous()
        logits = torch.empty(*hidden.shape[:2], self.vocab_size)
        rows = hidden.shape[0] * hidden.shape[1]
        with self.memory.lock:
            self.memory.functions.pair_logits(
                self.address, torch.get_num_threads(), rows, hidden.data_ptr(), logits.data_ptr(), self.vocab_size,
                self._scratch(None, rows, rows, rows),
            )  # fmt: skip
        return logits

    def chain(
        self, ids: Sequence[Sequence[int]], features: Tensor, starts: Sequence[int], limits: Sequence[int],
        cache: BoundCache, processors: Processors, label: DrawnBy, noise: Noise,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """limits[b] guesses of row b in one call; rows with none cost nothing. First the pairs not yet read: ids[b] and
        the first of features [B, n, H], in slots starts[b] and on.

        Returns (guesses [B, D], q [B, D + 1, V] or None)."""
        num_rows, width, depth = len(ids), features.shape[1], max(limits)
        features = features.contiguous()
        tokens = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
        start, count, limit = torch.tensor((starts, [len(row) for row in ids], limits)).unbind()
        draws = Draws.of(self.vocabulary, processors, label, noise, depth)
        guesses, hidden = torch.empty(num_rows, depth, dtype=torch.int64), torch.empty(num_rows, 1, self.size)
        with self.memory.lock:
            problem = self.memory.functions.pair_chain(
                self.address, cache.address, torch.get_num_threads(), num_rows, width, tokens.data_ptr(),
                features.data_ptr(), start.data_ptr(), count.data_ptr(), limit.data_ptr(), depth,
                ctypes.addressof(draws.view), guesses.data_ptr(), hidden.data_ptr(),
                self._scratch(cache, num_rows, *_asked(ids, limits)),
            )  # fmt: skip
        check(problem)
        return guesses, draws.q

    def tree(
        self, ids: Sequence[Sequence[int]], features: Tensor, starts: Sequence[int], limits: Sequence[int],
        cache: BoundCache, processors: Processors, pending: Tensor, growth: heads.Growth, label: DrawnBy, noise: Noise,
    ) -> TokenTree:  # fmt: skip
        """The tree of this growth after pending [B], no node of row b deeper than limits[b], in one call; ids, features
        and starts as in ``chain``. It is the one that ``growing.dynamic`` grows from the same logits."""
        num_rows, width, size = len(ids), features.shape[1], growth.size + 1
        features, pending = features.contiguous(), pending.contiguous()
        read = torch.tensor([list(row) + [0] * (width - len(row)) for row in ids])
        start, count, limit = torch.tensor((starts, [len(row) for row in ids], limits)).unbind()
        draws = Draws.of(self.vocabulary, processors, label, noise, growth.depth)
        found = torch.zeros(3, num_rows, size, dtype=torch.int64)  # tokens, parents, labels
        num_nodes = (ctypes.c_int64 * num_rows)()
        threads, view, at, row_bytes = (
            torch.get_num_threads(),
            ctypes.addressof(growth),
            found.data_ptr(),
            8 * num_rows * size,
        )
        with self.memory.lock:
            scratch = self.memory.scratch(
                self.memory.functions.pair_tree_scratch(
                    self.address, cache.address, num_rows, *_asked(ids, limits), view, threads
                )
            )
            problem = self.memory.functions.pair_tree(
                self.address, cache.address, threads, num_rows, width, read.data_ptr(), features.data_ptr(),
                start.data_ptr(), count.data_ptr(), limit.data_ptr(), ctypes.addressof(draws.view), view, int(label),
                pending.data_ptr(), at, at + row_bytes, at + 2 * row_bytes, num_nodes, scratch,
            )  # fmt: skip
        check(problem)
        tokens, parent, drawn_by = found[:, :, : max(num_nodes)].unbind()
        return TokenTree(tokens, parent, drawn_by)

    def _scratch(self, cache: BoundCache | None, num_rows: int, chosen: int, rows: int) -> int:
        need = self.memory.functions.pair_scratch(
            self.address, None if cache is None else cache.address, num_rows, rows, chosen, torch.get_num_threads()
        )
        return self.memory.scratch(need)


def _asked(ids: Sequence[Sequence[int]], limits: Sequence[int]) -> tuple[int, int]:
    """How many rows guess, and how many pairs they read first."""
    pairs = [max(len(row), 1) for row, limit in zip(ids, limits, strict=True) if limit > 0]
    return len(pairs), sum(pairs)
