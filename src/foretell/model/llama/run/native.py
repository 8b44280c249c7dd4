"""One decoder for the Llama family as one C call (see ``kernels/native``): the fastest implementation on x86-64 CPUs.

Weights stay in the checkpoint's own [out, in] layout: read once from safetensors into huge pages, or shared with a
loaded transformers module. Every output is summed in one order whatever the number of rows, the tree, the batch and the
slots, so plain decoding, verification and prefill agree bit for bit, in float32 and in bfloat16 (whose order with AMX is
another than without).
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.directories import resolve
from foretell.checkpoints.lora import Lora
from foretell.checkpoints.source import open_weights
from foretell.checkpoints.weights import ModuleWeights, TensorWeights, WeightSource
from foretell.core.errors import ModelError
from foretell.core.measured import measured_now, of_passes
from foretell.core.noise import Stream, token_table
from foretell.core.probs import Processors
from foretell.core.tree import Plan, layout
from foretell.kernels import structures
from foretell.kernels.build import loaded_files
from foretell.kernels.functions import check, huge_pages, native_functions
from foretell.kernels.native import library
from foretell.kernels.small import race_library
from foretell.model.cache import KVCache, Shared, spread_of
from foretell.model.llama import mixers, shape as llama
from foretell.model.llama.mixture import ExpertWeights, bias_name, expert_names, read_biases, router_names, view_of
from foretell.model.llama.read.contents import check_contents
from foretell.model.llama.read.disk import DiskExperts, experts_on_disk
from foretell.model.llama.read.hybrid_weights import hybrid_weights
from foretell.model.llama.read.latent import latent_spread
from foretell.model.llama.read.matrices import Matrices, read_matrices
from foretell.model.llama.read.split import split_weights
from foretell.model.llama.read.ternary import ternary_weights
from foretell.model.llama.run import tuning as ahead
from foretell.model.llama.run.loras import KINDS, merged_weights, placed, terms_of
from foretell.model.llama.run.states import HybridCache, NativeCache
from foretell.model.llama.run.tuning import fewest_threads
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import normed as normed_by
from foretell.model.target import WHOLE, CausalModel, Decoded, DiskFigures, Output, PassOptions
from foretell.model.windows import DraftWindow

MOST_LATENT = 640  # MAX_DIM of ``native/common.h``
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
_LATENT_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
NO_ROOM = 7  # what foretell_forward returns where there is no room for the terms of a hybrid's nodes
MOST_PASSES = 4
"""Passes of plain decoding in one call at most: so many tokens come at once."""
BYTES_AT_ONCE = 10**9
"""Bytes of weights that such a call reads at most. What the engine does between two passes takes as long as reading some
15 MB, and the text of a call should come within a few hundredths of a second."""
_SMALL_PASS = 8
"""Rows of a pass up to which reading the weights takes most of its time; with more, threads are worth more too."""


@lru_cache(maxsize=256)
def _numbers(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """An array of C, read only: the same in every step."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _flat(shared: Shared) -> tuple[int, ...]:
    """``KVCache.shared`` as ``find_groups`` of the C code reads it."""
    sizes = [number for rows, slots in shared for number in (len(rows), slots)]
    return len(shared), *sizes, *(row for rows, _ in shared for row in rows)


def supports(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``NativeModel`` cannot run this transformers configuration so; None where it can. Builds the library."""
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it runs float32 and bfloat16, not {dtype}: give one of them as dtype"
    reason = llama.unsupported(config)
    if reason is not None:
        return reason
    return _other_heads(llama.read_shape(config)) or library()[1]


def _other_heads(shape: LlamaShape) -> str | None:
    if (latent := shape.traits.latent) is not None:
        parts = latent.rank, latent.rope, latent.nope, latent.value, latent.query_rank
        if latent.key <= MOST_LATENT and not any(part % 16 for part in parts):
            return None
        named = ", ".join(f"{name} {size}" for name, size in zip(_LATENT_SIZES, parts, strict=True))
        return (
            f"latent attention of {named}; implemented: multiples of 16, of which the first two are at most {MOST_LATENT} "
            "together"
        )
    if shape.head_dim in HEAD_DIMS:
        return None
    return f"head dimension {shape.head_dim}; implemented: {', '.join(map(str, HEAD_DIMS))}"


def _limit(layer: structures.Layer, limit: DraftWindow | None) -> None:
    if limit is not None:
        layer.window, layer.sinks = limit.size, limit.sinks


class NativeModel(CausalModel):
    """See the module's docstring. Logits, hidden states and taps are float32 whatever the weights are."""

    def __init__(
        self, shape: LlamaShape, source: WeightSource, *, dtype: torch.dtype, name: str, weights: str = "auto",
        kv: str = "auto", memory: int | None = None,
    ) -> None:  # fmt: skip
        """dtype: of keys, values and plain matrices; weights: one of ``matrices.WEIGHTS``; kv: one of ``names.KV``; memory:
        bytes for all, of which experts that find no room stay in files; None: what is free."""
        if (reason := _other_heads(shape)) is not None:  # attention would read behind its rows
            raise ModelError(f"{name}: {reason}; load it as 'lean'")
        self.native = native_functions()
        self.shape = shape
        self._weights = weights
        self._dequantised: Tensor | None = None
        self._rounded: Matrices | None = None  # the head in int8
        self._tensors: list[Tensor] = []  # keeps alive what the C structures point to
        self._experts: list[structures.Experts] = []  # the same
        self._mixers: list[structures.Mixer] = []  # the same
        self._low_rank: list[Any] = []  # the same
        self._lock = threading.Lock()  # one pass at a time: the scratch is shared
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._turned: dict[int, tuple[Tensor, Tensor]] = {}  # ``rotations`` by capacity
        self._threads_for: dict[int, int] = {}  # threads that torch has: threads of a small pass
        self.matrices = Matrices()
        self._disk: DiskExperts | None = None
        self._view = self._read(source, dtype, weights, kv, name, memory)
        if memory is not None:
            self.memory_left = max(0, memory - sum(held.numel() * held.itemsize for held in self.matrices.memory))
        self.spec = shape.spec(
            name,
            "native",
            dtype,
            torch.device("cpu"),
            weight_bytes=self._bytes_of_a_pass(),
            weights=self.matrices.label,
            kv=kv,
        )
        if self._disk is not None:
            self.spec = replace(self.spec, held_bytes=self._disk.held)
        self.address = ctypes.addressof(self._view)
        if not shape.mixers and race_library() is not None:  # a mixer's states cannot be taken back
            self.most_passes = min(MOST_PASSES, max(1, BYTES_AT_ONCE // self.spec.weight_bytes))

    @classmethod
    def load(
        cls,
        path_or_name: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        name: str | None = None,
        weights: str = "auto",
        kv: str = "auto",
        merged: Lora | None = None,
        memory: int | None = None,
    ) -> "NativeModel":
        """Read a Hugging Face directory or hub id, or a GGUF file, tensor by tensor. merged: an adapter that is added to
        the weights. memory: see the constructor. Raises ModelError where it cannot be run."""
        assert torch.device(device).type == "cpu"
        path, name = resolve(str(path_or_name)), name or str(path_or_name)
        source = merged_weights(open_weights(path, name=name), merged)
        shape = llama.read_local(path, name=name)
        model = cls(shape, source, dtype=dtype, name=name, weights=weights, kv=kv, memory=memory)
        model._threads(1, remembered=True)  # here, and not within the first request
        ahead.choose(model, model.native)
        return model

    @classmethod
    def from_hf(cls, model: Any, *, name: str | None = None, weights: str = "auto", kv: str = "auto") -> "NativeModel":
        """The equivalent of a loaded transformers module on the CPU; linears and embedding are shared with it, not
        copied."""
        shape = llama.read_shape(model.config, model.generation_config)
        name = name or getattr(model.config, "_name_or_path", "") or shape.architecture
        return cls(shape, ModuleWeights(model), dtype=model.dtype, name=name, weights=weights, kv=kv)

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> "NativeModel":
        """See ``CausalModel.rebuilt``; quantised matrices are rounded again, to 4 bits or to 8."""
        spec = self.spec
        rounded = self._weights if self._weights in ("int4", "int8", "least") else "int8"
        weights = rounded if spec.is_quantised else "auto"
        cast = {name: tensor.to(spec.dtype).contiguous() for name, tensor in tensors.items()}
        source = TensorWeights(cast)
        return NativeModel(self.shape, source, dtype=spec.dtype, name=spec.name, weights=weights, kv=spec.kv)

    def add_loras(self, loras: Mapping[str, Lora]) -> None:
        """See ``CausalModel.add_loras``. A and B are held in the type of activations."""
        assert not self.loras
        terms = [terms_of(lora, self.shape, name=self.spec.name) for lora in loras.values()]
        for index in range(self.shape.num_layers):
            self._low_rank.append((structures.LowRank * (len(KINDS) * len(loras)))())
            self._view.layers[index].loras = self._low_rank[-1]
        for number, layers in enumerate(terms):
            held, memory = placed(layers, self.spec.dtype)
            self._tensors.append(memory)
            for index, at in enumerate(held):
                for kind, one in at.items():
                    self._low_rank[index][number * len(KINDS) + KINDS.index(kind)] = one
                    self._view.low_rank = max(self._view.low_rank, one.rank)
        self.loras = tuple(loras)

    def limited(self, limit: DraftWindow) -> "NativeModel":
        """See ``CausalModel.limited``: the same weights and lock."""
        made = copy(self)
        made.shape = self.shape.limited(limit, name=self.spec.name)
        made.spec = replace(self.spec, max_positions=made.shape.max_positions)
        count = made.shape.num_layers
        layers = (structures.Layer * count)(*(self._view.layers[index] for index in range(count)))
        for index, layer in enumerate(layers):
            _limit(layer, made.shape.limits(index))
        made._view = structures.Model.from_buffer_copy(self._view)
        made._view.layers = layers
        made._tensors = [*self._tensors]
        made._threads_for, made._scratch = {}, torch.empty(0, dtype=torch.uint8)
        made.address = ctypes.addressof(made._view)
        return made

    def new_cache(self, num_rows: int, capacity: int) -> NativeCache:
        """An empty cache; only caches made here can be used with this model."""
        made = (self.shape, self.spec.kv_dtype, self.rotations(capacity), self._move)
        if self.shape.mixers:
            return HybridCache(*made, self._fold, num_rows, capacity)
        return NativeCache(*made, num_rows, capacity)

    def _move(self, *given: int) -> int:
        return self.native.move(self.address, *given)

    def _fold(self, *given: int | None) -> int:
        return self.native.states(self.address, *given)

    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel.forward``; cache: one of this model's own. Raises RuntimeError for tokens, slots or positions
        out of range."""
        assert isinstance(cache, NativeCache)
        hidden, taps = options.hidden, options.taps
        first, stop = options.range(self.shape.num_layers)
        slots, positions, ancestry, length, known = plan.slots, plan.positions, plan.ancestry, plan.length, plan.known
        num_rows, num_nodes = slots.shape
        real = None if plan.real is None else plan.real.contiguous()
        num_run = num_rows * num_nodes if real is None else len(real)
        assert num_rows == cache.num_rows
        size = self.shape.hidden_size
        if hidden is None:
            assert (tokens.shape, tokens.dtype) == (slots.shape, torch.int64)
            residual = _blank(real is not None, num_rows, num_nodes, size)
        else:
            assert hidden.shape == (num_rows, num_nodes, size)
            residual = hidden.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        tapped = _blank(real is not None, num_rows, num_nodes, len(taps) * size) if taps else None
        head = options.head and stop == self.shape.num_layers
        logits = _blank(real is not None, num_rows, num_nodes, self.shape.vocab_size) if head else None
        # Kept in names until the call returns: a contiguous copy must outlive the use of its address.
        tokens, slots, positions, length = (
            tokens.contiguous(), slots.contiguous(), positions.contiguous(), length.contiguous(),
        )  # fmt: skip
        threads = self._threads(num_run)

        def run() -> int:
            return self.native.forward(
                self.address, cache.address, threads, num_rows, num_nodes, ancestry.shape[2],
                tokens.data_ptr(), length.data_ptr(), slots.data_ptr(), positions.data_ptr(),
                ancestry.data_ptr(), *ancestry.stride(),
                None if real is None else real.data_ptr(), num_run, None if known is None else known.data_ptr(),
                first, stop, residual.data_ptr(),
                _numbers(tuple(taps)) if taps else None, len(taps),
                None if tapped is None else tapped.data_ptr(), None if logits is None else logits.data_ptr(),
                *self._beside(num_rows, num_run, threads, cache),
            )  # fmt: skip

        with self._lock:
            if isinstance(cache, HybridCache):
                cache.bind()
            problem = run()
            if problem == NO_ROOM and isinstance(cache, HybridCache):
                cache.make_room(slots)
                problem = run()
            self._settle(problem)
        return Output(logits, residual, tapped)

    def decode(
        self, pending: Tensor, length: Tensor, cache: KVCache, processors: Processors, seeds: Tensor, most: int,
        taps: Sequence[int] = (),
    ) -> Decoded:  # fmt: skip
        """See ``CausalModel.decode``."""
        assert isinstance(cache, NativeCache)
        num_rows, vocab_size = len(pending), self.shape.vocab_size
        threads, draws = self._threads(num_rows), race_library()
        assert draws is not None
        tokens, lengths = torch.empty(2, most, num_rows, dtype=torch.int64).unbind()
        tokens[0], lengths[0] = pending, length
        residual, logits = torch.empty(num_rows, 1, self.shape.hidden_size), torch.empty(num_rows, 1, vocab_size)
        ends, drawn = processors.all_ends, (ctypes.c_int64 * (3 * num_rows))()
        tapped = torch.empty(most, num_rows, 1, len(taps) * self.shape.hidden_size) if taps else None
        seeds = seeds.contiguous()
        with self._lock:
            made = self.native.decode(
                self.address, cache.address, threads, num_rows, most, tokens.data_ptr(), lengths.data_ptr(),
                draws.foretell_walk, processors.warps, token_table(processors.vocab_size, pending.device).data_ptr(),
                min(vocab_size, processors.vocab_size), seeds.data_ptr(), int(Stream.COUPLED), _numbers(ends), len(ends),
                drawn, _numbers(tuple(taps)) if taps else None, len(taps), None if tapped is None else tapped.data_ptr(),
                residual.data_ptr(), logits.data_ptr(), *self._beside(num_rows, num_rows, threads, cache),
            )  # fmt: skip
            self._settle(-min(made, 0))
        last = None if tapped is None else tapped[made - 1]
        return Decoded(
            Output(logits, residual, last), tokens[:made], lengths[:made], None if tapped is None else tapped[:made],
            drawn[1::3] if all(drawn[::3]) else None,
        )  # fmt: skip

    def _settle(self, problem: int) -> None:
        """Raise for what a pass returned, if it is not 0, and for files that have changed meanwhile."""
        if self._disk is not None:
            self._disk.settle(problem)
        check(problem)

    @property
    def disk(self) -> DiskFigures | None:
        """See ``CausalModel.disk``."""
        return None if self._disk is None else self._disk.figures

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.logits``."""
        residual = hidden.detach().to(torch.float32).contiguous()
        num_rows, num_nodes = residual.shape[:2]
        logits = torch.empty(num_rows, num_nodes, self.shape.vocab_size)
        threads = self._threads(num_rows * num_nodes)
        with self._lock:
            self.native.forward(
                self.address, None, threads, num_rows, num_nodes, 0, None, None, None, None, None, 0, 0, 0, None, 0, None,
                0, 0,
                residual.data_ptr(), None, 0, None, logits.data_ptr(),
                self._scratch_address(num_rows, num_rows * num_nodes, threads, None), None, None,
            )  # fmt: skip
        return logits

    def rotations(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [rotations, capacity, head_dim / 2] of the layers' different rotations: those of keys, and
        after them those of queries that differ. All caches of a capacity share them: for long texts they take as long as
        a pass of a small model."""
        if capacity not in self._turned:
            self._turned = {capacity: self._tables(capacity)}  # the latest alone: a loop asks for one
        return self._turned[capacity]

    def _tables(self, capacity: int) -> tuple[Tensor, Tensor]:
        device = self.spec.device
        tables = [llama.rope_table(rope, capacity, device) for rope in self._ropes]
        tables += [llama.rope_table(rope, capacity, device, of_queries=True) for rope in self._growing]
        cos, sin = (torch.stack(each) for each in zip(*tables, strict=True))
        return cos, sin

    @property
    def embedding_scale(self) -> float:
        """The factor of the embedding's rows, as ``structures.Model`` has it."""
        scale: float = self._view.embedding_scale
        return scale

    def lend_outputs(self, view: structures.Model) -> None:
        """Let a head that reads the output head's matrix make logits of its products as this model does."""
        for name in structures.OUTPUTS:
            setattr(view, name, getattr(self._view, name))

    def finished(self, products: Tensor) -> Tensor:
        """Products [..., V] float32 with the output head as logits, in place."""
        traits = self.shape.traits
        if traits.logit_scale != 1.0 or traits.logit_cap is not None:
            assert products.is_contiguous()
            self.native.finish(self.address, products.data_ptr(), products.numel() // products.shape[-1])
        return products

    @property
    def embedding_matrix(self) -> structures.Matrix:
        """The embedding as C sees it, for heads that share it."""
        matrix: structures.Matrix = self._view.embedding
        return matrix

    @property
    def head_name(self) -> str:
        """Which matrix is the output head."""
        return llama.HEAD if llama.HEAD in self.matrices.held else llama.EMBEDDING

    @property
    def head_matrix(self) -> structures.Matrix:
        """The output head as C sees it."""
        matrix: structures.Matrix = self._view.head
        return matrix

    def rounded_head(self) -> structures.Matrix:
        """The output head for drafters that read it once a guess: a copy in int8, made at the first call, where it is
        plain."""
        name = self.head_name
        table = self.matrices.plain.get(name)
        if table is None:
            return self.head_matrix
        if self._rounded is None:
            source = TensorWeights({name: table})
            self._rounded = read_matrices(source, [name], weights="int8", dtype=table.dtype, allocate=huge_pages)
        return self._rounded.held[name]

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``CausalModel.embed``."""
        table, scale = self.matrices.plain.get(llama.EMBEDDING), self.embedding_scale
        if table is not None:
            embedded = F.embedding(tokens, table)
            return embedded * scale if scale else embedded
        ids = tokens.contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape.vocab_size:
            raise IndexError(f"a token is outside the vocabulary of {self.shape.vocab_size}")
        out = torch.empty(*ids.shape, self.shape.hidden_size)
        embedding = self.matrices.held[llama.EMBEDDING]
        self.native.rows(ctypes.addressof(embedding), ids.data_ptr(), ids.numel(), out.data_ptr())
        return out * scale if scale else out

    def head_rows(self, ids: Tensor) -> Tensor:
        """See ``CausalModel.head_rows``: read, not computed."""
        name = self.head_name
        table, ids = self.matrices.plain.get(name), ids.contiguous()
        out = torch.empty(len(ids), self.shape.hidden_size) if table is None else table[ids].float()
        if table is None:
            self.native.rows(ctypes.addressof(self.matrices.held[name]), ids.data_ptr(), len(ids), out.data_ptr())
        return out * self.shape.traits.logit_scale

    def normed(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.normed``; in float32."""
        return normed_by(hidden.float(), self._final_norm, self.shape.norm_eps)

    def head(self, normed: Tensor) -> Tensor:
        """See ``CausalModel.head``; float32. By torch, in the weights' dtype, where a gradient is wanted."""
        name = self.head_name
        if normed.requires_grad and torch.is_grad_enabled():
            weight = self.matrices.plain.get(name)
            weight = self._head_values(name) if weight is None else weight
            return self.shape.traits.finished(F.linear(normed.to(weight.dtype), weight))
        x = normed.detach().float().contiguous()
        out = torch.empty(*x.shape[:-1], self.shape.vocab_size)
        problem = self.native.product(
            ctypes.addressof(self.matrices.held[name]), self.shape.vocab_size, x.data_ptr(), x.numel() // x.shape[-1],
            out.data_ptr(), self.shape.vocab_size, torch.get_num_threads(),
        )  # fmt: skip
        check(problem)
        return self.finished(out)

    def _head_values(self, name: str) -> Tensor:
        """[V, H] float32: a quantised head's values, made once."""
        if self._dequantised is None:
            ids = torch.arange(self.shape.vocab_size)
            self._dequantised = torch.empty(self.shape.vocab_size, self.shape.hidden_size)
            matrix = ctypes.addressof(self.matrices.held[name])
            self.native.rows(matrix, ids.data_ptr(), len(ids), self._dequantised.data_ptr())
        return self._dequantised

    def _threads(self, rows: int, *, remembered: bool = False) -> int:
        """Threads of a pass: as many as torch has; of small passes no more than make them faster on this machine."""
        most = torch.get_num_threads()
        if most == 1 or rows > _SMALL_PASS:
            return most
        if most not in self._threads_for:
            token, root = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), -1)
            cache, plan = self.new_cache(1, 8), layout(root, torch.zeros(1, dtype=torch.int64), 8)

            def run(threads: int) -> None:
                self._threads_for[most] = threads
                self.forward(token, plan, cache)

            subject = {"of": "threads", "kernels": loaded_files(), "model": self.spec.described}
            keep = partial(of_passes, subject) if remembered else measured_now
            self._threads_for[most] = fewest_threads(run, most, keep)
        return self._threads_for[most]

    def _scratch_address(self, num_rows: int, num_run: int, threads: int, cache: NativeCache | None) -> int:
        # Asked for each pass: fewer rows may need more, for of few rows every thread keeps copies.
        cache_address = None if cache is None else cache.address
        need = self.native.scratch(self.address, cache_address, num_rows, num_run, threads) + 64
        if need > self._scratch.numel():
            self._scratch = huge_pages(need)
        address = self._scratch.data_ptr()
        return address + -address % 64

    def _beside(self, num_rows: int, num_run: int, threads: int, cache: NativeCache) -> tuple[Any, ...]:
        """The last arguments of a pass: its scratch, the rows' adapters, and the slots that rows share."""
        loras = _numbers(tuple(cache.loras)) if any(cache.loras) else None
        shared = _numbers(_flat(cache.shared)) if cache.shared else None
        return self._scratch_address(num_rows, num_run, threads, cache), loras, shared

    def _bytes_of_a_pass(self) -> int:
        """All matrices but an embedding that is not the head, of which one row is read; of experts, those of one token."""
        held, mixture = self.matrices.num_bytes, self.shape.mixture
        read = {name: size for name, size in held.items() if name != llama.EMBEDDING or llama.HEAD not in held}
        experts = sum(size for name, size in read.items() if ".experts." in name)
        chosen = experts * mixture.num_chosen // mixture.num_experts if mixture else 0
        return sum(read.values()) - experts + chosen

    def _read(
        self, source: WeightSource, dtype: torch.dtype, weights: str, kv: str, name: str, memory: int | None
    ) -> structures.Model:
        shape, cpu = self.shape, torch.device("cpu")
        if shape.hybrid:
            source = hybrid_weights(source, shape, name=name)
        source = split_weights(ternary_weights(source, shape), shape, name=name)
        if shape.mixture is not None:
            source = ExpertWeights(source, shape.mixture, name=name)
        contents = check_contents(source, shape, name=name)
        matrices = list(dict.fromkeys((llama.EMBEDDING, contents.head)))
        routers: list[str] = []
        for index in range(shape.num_layers):
            names = llama.layer_names(index, shape.traits)
            matrices += [names[key] for key in shape.linears(index)]
            mixer = shape.mixer(index)
            matrices += mixer.matrix_names(index) if mixer is not None else []
            if shape.mixture is not None and shape.is_sparse(index):
                mixture = shape.mixture
                routers += router_names(index, mixture)
                matrices += [name for each in mixture.experts for name in expert_names(index, each, mixture).values()]
        sparse = [index for index in range(shape.num_layers) if shape.is_sparse(index)]
        disk = self._disk = experts_on_disk(
            source, shape.mixture, sparse, matrices, routers, weights=weights, dtype=dtype, memory=memory, name=name
        )
        on_disk = frozenset[str]() if disk is None else disk.names
        made = read_matrices(
            source,
            [*(each for each in matrices if each not in on_disk), *routers],
            weights=weights,
            dtype=dtype,
            allocate=huge_pages,
            plain=routers,
            told=name,
        )
        if disk is not None:
            disk.hold(made, huge_pages)
        self.matrices, read = made, made.held

        def vector(name: str, offset: float = 0.0) -> int:
            values = source.read(name, torch.float32, cpu)
            self._tensors.append(values + offset if offset else values)
            return self._tensors[-1].data_ptr()

        traits = shape.traits

        def norm(name: str) -> int:
            address = vector(name, traits.norm_offset)
            if not traits.is_layer_norm:
                return address
            weight = self._tensors[-1]
            bias = source.read(llama.bias_name(name), torch.float32, cpu) if traits.norm_biases else None
            self._tensors[-1] = torch.stack((weight, torch.zeros_like(weight) if bias is None else bias))
            return self._tensors[-1].data_ptr()

        self._ropes = list(dict.fromkeys(shape.ropes))
        self._growing = [rope for rope in self._ropes if rope.growth is not None]

        layers = (structures.Layer * shape.num_layers)()
        for index, layer in enumerate(layers):
            names = llama.layer_names(index, traits)
            for key in shape.linears(index):
                setattr(layer, key, read[names[key]])
                if key in contents.biases:
                    setattr(layer, f"{key}_bias", vector(llama.bias_name(names[key])))
            if shape.mixture is not None and shape.is_sparse(index):
                bias = vector(bias_name(index)) if shape.mixture.has_bias else None
                each: list[Tensor] = []
                if shape.mixture.has_biases:
                    each = read_biases(source, index, shape.hidden_size, shape.mixture, torch.float32)
                    self._tensors += each
                self._experts.append(view_of(shape.mixture, index, read, bias, each))
                if disk is not None:
                    disk.enter(self._experts[-1], index)
                layer.experts = ctypes.pointer(self._experts[-1])
            if kv == "int8" and (traits.latent or ("k" in contents.biases and shape.attends(index))):
                if traits.latent is not None:
                    spread = latent_spread(source, names, traits.latent)
                else:
                    spread = spread_of(source.read(llama.bias_name(names["k"]), torch.float32, cpu), shape.num_kv_heads)
                self._tensors += [spread, unspread := 1.0 / spread]
                layer.spread, layer.unspread = spread.data_ptr(), unspread.data_ptr()
            for key in shape.norms(index):
                setattr(layer, key, norm(names[key]))
            layer.sink_logits = vector(names["sinks"]) if traits.has_sinks else None
            mixer = shape.mixer(index)
            if mixer is not None:
                self._mixers.append(mixers.view_of(mixer, index, source, read, self._tensors))
                layer.mixer = ctypes.pointer(self._mixers[-1])
            rope = shape.ropes[index]
            layer.window, layer.rope = shape.windows[index] or 0, self._ropes.index(rope)
            _limit(layer, shape.limits(index))
            grows = rope.growth is not None
            layer.query_rope = len(self._ropes) + self._growing.index(rope) if grows else layer.rope
        final_norm = norm(llama.FINAL_NORM)
        self._final_norm = self._tensors[-1]
        return structures.Model(
            dtype == torch.bfloat16, shape.num_layers, shape.vocab_size, shape.hidden_size, shape.intermediate_size,
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.norm_eps,
            read[llama.EMBEDDING], read[contents.head], final_norm, layers,
            {"gelu": 1, "gated_relu2": 2}.get(traits.activation, 0), traits.qk_norm == "all",
            # The factor is rounded to the weights' type first, as the modules do.
            0.0 if traits.embedding_scale == 1.0 else torch.tensor(traits.embedding_scale, dtype=dtype).item(),
            traits.score_scale or 0.0, traits.score_cap or 0.0,
            0.0 if traits.residual_scale == 1.0 else traits.residual_scale,
            0.0 if traits.logit_scale == 1.0 else traits.logit_scale, traits.logit_cap or 0.0,
            *(shape.mixture.sizes if shape.mixture is not None else (0, 0, 0)),
            traits.is_gated, *mixers.sizes_of(shape.mixers),
            *(0.0 if x == 1.0 else x for x in (traits.attention_scale, traits.gate_scale, traits.mlp_scale)),
            0, *(traits.swiglu or (0.0, 0.0)), None if disk is None else disk.view,
            *((x.rank, x.rope, x.nope, x.value, x.query_rank, x.eps) if (x := traits.latent) is not None else (0,) * 6),
            traits.is_layer_norm, traits.is_parallel, traits.norms_last,
        )  # fmt: skip


def _blank(has_padding: bool, *shape: int) -> Tensor:
    """Room for what a pass writes, with numbers also where it writes none: pages of a large tensor that nobody touches cost
    nothing, as they come from the system with zeros in them."""
    return torch.from_numpy(np.zeros(shape, np.float32)) if has_padding else torch.empty(shape)
