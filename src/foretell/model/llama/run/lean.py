"""One decoder for the Llama family in plain torch: a fast equivalent of the transformers module, on every device.

Against the module: QKV and gate-up are one product each, linears are prepacked on the CPU, keys and values live in
preallocated slots, attention reads ``plan.span`` of them, queries of one key-value head share a product (so keys are
never repeated), and nothing is read on the host, so that a step can be captured in a CUDA graph. Mixtures of experts are
the exception, and run on the CPU alone: ``pack.py``.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foretell.checkpoints.config_defaults import HYBRIDS
from foretell.checkpoints.directories import resolve
from foretell.checkpoints.lora import Lora
from foretell.checkpoints.source import open_weights
from foretell.checkpoints.weights import ModuleWeights, TensorWeights, WeightSource
from foretell.core.errors import ConfigError
from foretell.core.progress import tell
from foretell.core.tree import Plan
from foretell.kernels.gpu.ops import MOST_NODES, ops
from foretell.model.blocks import BlockCache
from foretell.model.cache import KVCache
from foretell.model.llama import latent as latents, shape as llama
from foretell.model.llama.mixture import ExpertWeights, mixture_of
from foretell.model.llama.read.contents import check_contents, linear_sizes
from foretell.model.llama.read.split import split_weights
from foretell.model.llama.read.ternary import ternary_weights
from foretell.model.llama.run.layer import LatentParts, Layer, LayerReader
from foretell.model.llama.run.loras import AdaptedLinear, Assigned, merged_weights, parts_of, terms_of
from foretell.model.llama.run.pack import MIN_ROWS, Experts, GatedMLP, Linear, bucket, make_linear, packing_unsupported
from foretell.model.llama.shape import LlamaShape
from foretell.model.llama.traits import capped, normed as normed_by
from foretell.model.target import WHOLE, CausalModel, Output, PassOptions
from foretell.model.windows import DraftWindow, sunk_attention, weights_of

_MIN_ROWS = MIN_ROWS  # bf16 attention is slower at one row, too


def supports(config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ``LeanModel`` cannot run this transformers configuration so; None where it can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"dtype {dtype} is not a float type"
    if dtype == torch.float16 and device.type == "cpu":
        return "float16 on the CPU is slower than float32 and bfloat16"
    reason = llama.unsupported(config)
    if reason is None and config.model_type in HYBRIDS:
        return "layers with recurrent states"
    if reason is None and device.type != "cpu" and config.model_type in latents.TYPES:
        return "attention over latent vectors is implemented for the CPU alone"
    if reason is None and device.type != "cpu" and mixture_of(config) is not None:
        return "experts are grouped on the host: transformers' kernels are faster on an accelerator"
    return reason


@dataclass(frozen=True)
class _Pass:
    """What all layers of one pass share. n counts padded rows; r of them are real.

    The stream is [B, n, H]; or [1, T, H], flat, where T is more than the nodes (a bucket's) or fewer (the real nodes of all
    rows, packed, and a bucket's): then only attention sees [B, n].
    """

    turns: dict[int, tuple[Tensor, Tensor]]
    """cos [B, n, 1, head_dim], flat [1, T, 1, head_dim], and sin, the same, its first half negated."""
    growths: dict[int, Tensor]
    """Of rotations whose queries grow with their positions: by what, [B, n, 1, 1], flat [1, T, 1, 1]."""
    masks: dict[int | DraftWindow | None, Tensor]  # by ``_sight_of``, [B, 1, G * n, S] additive
    slots: Tensor  # [B, r]; packed [r]; where no kernel writes, ``KVCache.places`` of them
    span: int
    shape: tuple[int, int] | None = None  # flat: (B, n)
    real: Tensor | None = None  # packed: [r] flat indices of the real nodes in [B, n]
    rows: Tensor | None = None  # packed: [r] their rows
    plan: Plan | None = None  # where attention reads it in the place of masks
    sight: Tensor | None = None  # ``KVCache.sight``, where attention reads masks
    back: Tensor | None = None  # [B, n] of a draft with a window: see ``DraftWindow.back``

    @property
    def width(self) -> int:
        """Columns of the stream that are nodes, and not padding."""
        if self.real is not None:
            return len(self.real)
        return self.slots.shape[1] if self.shape is None else prod(self.shape)


class LeanModel(CausalModel):
    """See the module's docstring. Weights are read only; one model serves any number of caches."""

    def __init__(
        self, shape: LlamaShape, source: WeightSource, *, dtype: torch.dtype, device: torch.device, name: str,
        pack: bool | None = None, kv: str = "auto",
    ) -> None:  # fmt: skip
        """pack=None prepacks wherever that is possible; pack=False keeps plain weights (the packed ones' twin). kv="int8",
        on the CPU alone, is the native one's twin, and slow: every pass converts all that it reads."""
        assert kv == "auto" or device.type == "cpu"
        self.shape = shape
        self.spec = shape.spec(name, "lean", dtype, device, kv=kv)
        self.has_blocks = device.type != "cpu"
        self.packed = packing_unsupported(dtype, device) is None if pack is None else pack
        traits = shape.traits
        own = dtype != torch.float64 and traits.qk_norm != "all" and not (traits.is_layer_norm or traits.norms_last)
        self._gpu = ops(device.type) if own else None  # Triton's kernels between the products
        self._group = shape.num_heads // shape.num_kv_heads
        ropes = list(dict.fromkeys(shape.ropes))
        self._frequencies = [torch.tensor(rope.frequencies, device=device).repeat(2) for rope in ropes]  # [head_dim]
        self._growths = [rope.growth for rope in ropes]
        self._rope_scales = [torch.tensor(rope.scales, device=device).repeat(2) for rope in ropes]
        source = split_weights(ternary_weights(source, shape), shape, name=name)
        if shape.mixture is not None:
            source = ExpertWeights(source, shape.mixture, name=name)
        contents = check_contents(source, shape, name=name)
        self._embedding = source.read(llama.EMBEDDING, dtype, device)
        scale = traits.embedding_scale
        # The factor is rounded to the weights' dtype first, as the modules do.
        self._scale = None if scale == 1.0 else self._embedding.new_tensor(scale)
        reader = LayerReader(shape, source, contents.biases, dtype, device, self.packed, kv)
        self._layers = []
        for index in range(shape.num_layers):
            tell(name, index / shape.num_layers)
            self._layers.append(reader.layer(index))
        self._final_norm = reader.norm(llama.FINAL_NORM)
        # A tied head is packed too, beside the table that tokens are looked up in: the one weight held twice.
        tied = contents.head == llama.EMBEDDING
        head = self._embedding if tied else source.read(llama.HEAD, dtype, device)
        self._head = make_linear(head, None, packed=self.packed)
        self._assigned = Assigned()

    @classmethod
    def load(
        cls, path_or_name: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu",
        name: str | None = None, pack: bool | None = None, kv: str = "auto", merged: Lora | None = None,
    ) -> "LeanModel":  # fmt: skip
        """Read a Hugging Face directory or hub id, or a GGUF file, tensor by tensor. merged: an adapter that is added to
        the weights. Raises ModelError where it cannot be run."""
        path, name = resolve(str(path_or_name)), name or str(path_or_name)
        shape = llama.read_local(path, name=name)
        source = merged_weights(open_weights(path, name=name), merged)
        return cls(shape, source, dtype=dtype, device=torch.device(device), name=name, pack=pack, kv=kv)

    @classmethod
    def from_hf(cls, model: Any, *, name: str | None = None, pack: bool | None = None, kv: str = "auto") -> "LeanModel":
        """The equivalent of a loaded transformers module; unpacked, unfused weights are shared with it, not copied."""
        shape = llama.read_shape(model.config, model.generation_config)
        name = name or getattr(model.config, "_name_or_path", "") or shape.architecture
        source = ModuleWeights(model)
        return cls(shape, source, dtype=model.dtype, device=model.device, name=name, pack=pack, kv=kv)

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> "LeanModel":
        """See ``CausalModel.rebuilt``."""
        spec = self.spec
        return LeanModel(
            self.shape, TensorWeights(tensors), dtype=spec.dtype, device=spec.device, name=spec.name, pack=self.packed,
            kv=spec.kv,
        )  # fmt: skip

    def add_loras(self, loras: Mapping[str, Lora]) -> None:
        """See ``CausalModel.add_loras``."""
        assert not self.loras
        sizes, assigned, spec = linear_sizes(self.shape), self._assigned, self.spec
        terms = [terms_of(lora, self.shape, name=spec.name) for lora in loras.values()]
        for index, of_each in enumerate(zip(*terms, strict=True)):

            def adapted(linear: Linear, *keys: str, of_each: Any = of_each) -> Linear:
                parts = parts_of(of_each, keys, sizes, spec.dtype, spec.device)
                return AdaptedLinear(linear, parts, assigned) if any(parts) else linear

            layer = self._layers[index]
            mlp = layer.mlp
            if isinstance(mlp, GatedMLP):
                gate_up = adapted(mlp.gate_up, *("gate", "up")[-mlp.parts :])
                mlp = replace(mlp, gate_up=gate_up, down=adapted(mlp.down, "down"))
            qkv, out = adapted(layer.qkv, "q", "k", "v"), adapted(layer.out, "o")
            self._layers[index] = replace(layer, qkv=qkv, out=out, mlp=mlp)
        self.loras = tuple(loras)

    def limited(self, limit: DraftWindow) -> "LeanModel":
        """See ``CausalModel.limited``."""
        if self._gpu is not None:
            raise ConfigError(
                f"draft_window = {limit.size}: on {self.spec.device.type} a draft's kernels read all slots; drop it"
            )
        made = copy(self)
        made.shape = self.shape.limited(limit, name=self.spec.name)
        made.spec = replace(self.spec, max_positions=made.shape.max_positions)
        made._layers = [replace(layer, limit=made.shape.limits(index)) for index, layer in enumerate(self._layers)]
        return made

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """An empty cache on the model's device."""
        devices = [self.spec.device] * self.shape.num_layers
        return KVCache(num_rows, capacity, self._heads, self.spec.kv_dtype, devices, self.shape.value_dims)

    def new_pool(self, num_rows: int, capacity: int, slots: int | None) -> KVCache:
        """See ``CausalModel.new_pool``."""
        if not self.has_blocks:
            return self.new_cache(num_rows, capacity)
        return BlockCache(num_rows, capacity, slots, self._heads, self.spec.dtype, self.spec.device)

    @property
    def _heads(self) -> list[tuple[int, int]]:
        return [(self.shape.num_kv_heads, self.shape.head_dim)] * self.shape.num_layers

    @torch.no_grad()
    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel.forward``."""
        first, stop = options.range(self.shape.num_layers)
        hidden, taps = options.hidden, options.taps
        if hidden is None:
            x = self.embed(tokens)  # [B, n, H]
        else:
            x = hidden.to(self.spec.dtype)
        num_rows, num_nodes = x.shape[:2]
        real, padding = plan.real, self._row_padding(num_rows, num_nodes) if plan.real is None else 0
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        count = num_rows * x.shape[1] if real is None else len(real)
        more = self._bucket(count) - count
        if flat := more > 0 or real is not None:
            x = x.flatten(0, 1)
            x = F.pad(x if real is None else x[real], (0, 0, 0, more))[None]  # [1, T, H]
        shared = self._prepare(plan, cache, padding, more, first, stop)
        self._assigned.assign(cache.loras, plan, num_nodes, num_nodes + padding, x.device)

        def shaped(stream: Tensor) -> Tensor:
            """[B, n, *] of a stream's; zero where it had no node."""
            if not flat:
                return stream[:, :num_nodes]
            if real is None:
                return stream[0, :count].view(num_rows, num_nodes, -1)
            out = stream.new_zeros(num_rows * num_nodes, stream.shape[-1])
            return out.index_copy_(0, real, stream[0, :count]).view(num_rows, num_nodes, -1)

        tapped: dict[int, Tensor] = {}
        for index in range(first, stop):
            x = self._run_layer(index, x, shared, cache)
            if index in taps:
                tapped[index] = shaped(x)
        logits = shaped(self._logits(x)) if options.head and stop == self.shape.num_layers else None
        tap = torch.cat([tapped[i] for i in taps], -1) if taps else None
        return Output(logits, shaped(x), tap)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.logits``."""
        return self._padded(self._logits, hidden)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """See ``CausalModel.embed``."""
        embedded = F.embedding(tokens, self._embedding)
        return embedded if self._scale is None else embedded * self._scale

    @torch.no_grad()
    def normed(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.normed``."""
        return self._norm(hidden.to(self.spec.dtype), self._final_norm)

    @torch.no_grad()
    def head(self, normed: Tensor) -> Tensor:
        """See ``CausalModel.head``."""
        return self._padded(self._read_out, normed)

    def _row_padding(self, num_rows: int, num_nodes: int) -> int:
        """Nodes that each row of a small pass has too few."""
        few = self.spec.device.type == "cpu" and num_rows * num_nodes < _MIN_ROWS
        return -(-_MIN_ROWS // num_rows) - num_nodes if few else 0

    def _bucket(self, count: int) -> int:
        """Rows of the stream of a pass over count nodes."""
        count = max(count, _MIN_ROWS) if self.spec.device.type == "cpu" else count
        return bucket(count) if self.packed else count

    def _padded(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of each node's state, applied to states [B, n, H] as a pass would."""
        flat = x.flatten(0, 1).to(self.spec.dtype)
        count = len(flat)
        out = function(F.pad(flat, (0, 0, 0, self._bucket(count) - count))[None])
        return out[0, :count].view(*x.shape[:2], -1)

    def _logits(self, x: Tensor) -> Tensor:
        return self._read_out(self._norm(x, self._final_norm))

    def _read_out(self, normed: Tensor) -> Tensor:
        return self.shape.traits.finished(self._head(normed))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        if self._gpu is not None:
            normed: Tensor = self._gpu.norm(x, weight, self.shape.norm_eps)
            return normed
        return normed_by(x.to(weight.dtype), weight, self.shape.norm_eps).to(x.dtype)

    def _add(self, x: Tensor, part: Tensor, norm: Tensor | None) -> Tensor:
        """The stream with what attention or MLP returned."""
        part = self._norm(part, norm)
        scale = self.shape.traits.residual_scale
        return x + part if scale == 1.0 else x + part * scale

    def _prepare(self, plan: Plan, cache: KVCache, padding: int, more: int, first: int, stop: int) -> _Pass:
        """padding: nodes added to each row; more: to the flat stream."""
        num_rows, num_nodes = plan.slots.shape
        real = plan.real
        if real is not None:
            positions = F.pad(plan.positions.flatten()[real], (0, more))[None]
        elif more:
            positions = F.pad(plan.positions.flatten(), (0, more))[None]
        else:
            positions = F.pad(plan.positions, (0, padding))
        dtype, half = self.spec.dtype, len(self._frequencies[0]) // 2
        turns: dict[int, tuple[Tensor, Tensor]] = {}
        for rope in {layer.rope for layer in self._layers[first:stop]}:
            angles = positions[..., None, None].float() * self._frequencies[rope]  # [B, n, 1, head_dim]
            sin = angles.sin() * self._rope_scales[rope]
            sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            turns[rope] = (angles.cos() * self._rope_scales[rope]).to(dtype), sin.to(dtype)
        growths = {
            rope: llama.growth_of(positions[..., None, None], growth).to(dtype)
            for rope, growth in enumerate(self._growths)
            if growth is not None
        }
        if self._gpu is not None and num_nodes <= MOST_NODES:
            return _Pass(turns, growths, {}, plan.slots, plan.span, plan=plan)
        masks: dict[int | DraftWindow | None, Tensor] = {}
        for window in {_sight_of(layer) for layer in self._layers[first:stop]}:
            visible = plan.mask  # [B, 1, n, S]
            if isinstance(window, DraftWindow):
                visible = window.sight(plan)
            elif (
                window is not None and window < plan.span
            ):  # positions are below the span: a wider window hides nothing
                distance = plan.positions[:, None, :, None] - plan.key_positions[:, None, None, :]
                visible = visible & (distance < window)
            mask = torch.zeros(visible.shape, dtype=self.spec.dtype, device=visible.device)
            mask.masked_fill_(~visible, float("-inf"))
            # Padded nodes see everything: any finite result will do, and a node that sees nothing would be NaN.
            masks[window] = F.pad(mask, (0, 0, 0, padding)).repeat(1, 1, self._group, 1)
        limit = self.shape.limit
        back = None if limit is None else F.pad(limit.back(plan.positions), (0, padding))
        if real is not None:
            rows, slots = real // num_nodes, plan.slots.flatten()[real]
            return _Pass(turns, growths, masks, slots, plan.span, (num_rows, num_nodes), real, rows, back=back)
        slots = plan.slots if self._gpu is not None else cache.places(plan.slots)
        shape, sight = (num_rows, num_nodes) if more else None, cache.sight(plan.span)
        return _Pass(turns, growths, masks, slots, plan.span, shape, sight=sight, back=back)

    def _run_layer(self, index: int, x: Tensor, shared: _Pass, cache: KVCache) -> Tensor:
        layer, shape = self._layers[index], self.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = layer.qkv(self._norm(x, layer.input_norm))
        cos, sin = shared.turns[layer.rope]
        if self._gpu is not None:
            query: Tensor = self._gpu.place(
                qkv, layer.qk_norm, shape.norm_eps, cos, sin, shared.growths.get(layer.rope), shared.slots,
                cache.table, cache.keys[index], cache.values[index],
            )  # fmt: skip
            return self._after(layer, x, self._seen(index, query, shared, cache), shared)
        last = shape.traits.norms_last
        if layer.latent is not None:
            qk = self._absorbed(layer.latent, qkv)
            value = qk[:, :, heads:, :0]
        else:
            qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, dim)
            qk, value = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if layer.qk_norm is not None and not last:
            qk = self._norm_heads(qk, layer.qk_norm)
        qk = _turned(qk, cos, sin)
        if layer.qk_norm is not None and last:
            qk = self._norm_heads(qk, layer.qk_norm)
        if layer.rope in shared.growths:
            qk = torch.cat((qk[:, :, :heads] * shared.growths[layer.rope], qk[:, :, heads:]), 2)
        if layer.spread is not None:
            spread = torch.cat((layer.spread.repeat_interleave(self._group, 0), 1.0 / layer.spread))
            qk = (qk * spread).to(qk.dtype)
        mixed = self._mix(index, qk, value, shared, cache)
        if layer.latent is not None:
            values = layer.latent.values
            mixed = torch.einsum("bnhr,hvr->bnhv", mixed.view(*mixed.shape[:2], heads, -1), values).flatten(2)
        return self._after(layer, x, mixed, shared)

    def _absorbed(self, parts: LatentParts, made: Tensor) -> Tensor:
        """[B, n, heads + 1, head_dim] of what the first product made: queries as latent keys meet them and the key, before
        they are rotated."""
        latent, heads = self.shape.traits.latent, self.shape.num_heads
        assert latent is not None
        query, vector, key = torch.split(made, [made.shape[-1] - latent.key, latent.rank, latent.rope], -1)
        if parts.query is not None and parts.query_norm is not None:
            query = parts.query(F.rms_norm(query, (latent.query_rank,), parts.query_norm, latent.eps))
        query = query.reshape(*query.shape[:2], heads, -1)
        still, turned = query[..., : latent.nope], query[..., latent.nope :]
        query = torch.cat((torch.einsum("bnhd,hrd->bnhr", still, parts.keys), turned), -1)
        vector = F.rms_norm(vector, (latent.rank,), parts.key_norm, latent.eps)
        return torch.cat((query, torch.cat((vector, key), -1)[:, :, None]), 2)

    def _seen(self, index: int, query: Tensor, shared: _Pass, cache: KVCache) -> Tensor:
        """[B, n, heads * head_dim] of queries [B, heads, n, head_dim]: attention on an accelerator."""
        plan, traits = shared.plan, self.shape.traits
        if plan is None:
            grouped = query.view(len(query), self.shape.num_kv_heads, -1, query.shape[-1])
            return self._attend(index, grouped, shared, cache)
        assert self._gpu is not None
        mixed: Tensor = self._gpu.attend(
            query, cache.table, cache.keys[index], cache.values[index], plan.ancestry, plan.length, plan.positions,
            plan.tree_positions, plan.span, self._layers[index].window or 0,
            traits.score_scale or self.shape.head_dim**-0.5, traits.score_cap or 0.0,
        )  # fmt: skip
        return mixed

    def _after(self, layer: Layer, x: Tensor, mixed: Tensor, shared: _Pass) -> Tensor:
        """The stream after a layer: what attention has mixed is added, and then the MLP's part."""
        before = self._norm(x, layer.input_norm) if self.shape.traits.is_parallel else None
        x = self._add(x, layer.out(self._norm(mixed, layer.mixed_norm)), layer.attention_after)
        normed = self._norm(x, layer.mlp_norm) if before is None else before
        if isinstance(layer.mlp, Experts):  # padding would read experts of its own
            part = F.pad(layer.mlp(normed[:, : shared.width]), (0, 0, 0, x.shape[1] - shared.width))
        else:
            part = layer.mlp(normed)
        return self._add(x, part, layer.mlp_after)

    def _norm_heads(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Queries and keys [B, n, heads, head_dim], normed."""
        shape, wide = self.shape, qk.to(weight.dtype)
        if shape.traits.qk_norm == "heads":
            return (F.rms_norm(wide, (shape.head_dim,), None, shape.norm_eps) * weight).to(qk.dtype)
        parts = torch.split(wide, [shape.num_heads, shape.num_kv_heads], 2)
        normed = [F.rms_norm(x.flatten(2), (x.shape[2] * x.shape[3],), None, shape.norm_eps) for x in parts]
        return (torch.cat(normed, -1) * weight).view(qk.shape).to(qk.dtype)

    def _mix(self, index: int, qk: Tensor, value: Tensor, shared: _Pass, cache: KVCache) -> Tensor:
        """Write a stream's keys and values and return what its queries find: [B, n, heads * head_dim], or flat."""
        heads, shape, real = self.shape.num_heads, shared.shape, shared.real
        length = qk.shape[1]
        if real is not None:
            assert shape is not None
            assert shared.rows is not None
            count = len(real)
            cache.write_packed(index, shared.rows, shared.slots, qk[0, :count, heads:], value[0, :count])
            query = qk.new_zeros(prod(shape), heads, qk.shape[-1]).index_copy_(0, real, qk[0, :count, :heads])
            query = self._grouped(query.view(*shape, heads, -1))
            mixed = self._attend(index, query, shared, cache).flatten(0, 1)[real]
            return F.pad(mixed, (0, 0, 0, length - count))[None]
        if shape is not None:
            qk, value = (part[0, : prod(shape)].view(*shape, *part.shape[2:]) for part in (qk, value))
        written = shared.slots.shape[1]
        key = qk[:, :written, heads:]
        cache.write(index, shared.slots, key.transpose(1, 2), value[:, :written].transpose(1, 2))
        mixed = self._attend(index, self._grouped(qk[:, :, :heads]), shared, cache)
        return mixed if shape is None else F.pad(mixed.flatten(0, 1), (0, 0, 0, length - prod(shape)))[None]

    def _attend(self, index: int, query: Tensor, shared: _Pass, cache: KVCache) -> Tensor:
        """[B, n, heads * head_dim] of queries [B, kv heads, G * n, head_dim] over the slots of one layer."""
        num_rows, kv_heads, length, dim = query.shape
        num_nodes = length // self._group
        keys, values = cache.seen(index, shared.span, shared.sight, query.dtype)
        layer, traits = self._layers[index], self.shape.traits
        if traits.latent is not None:
            values = keys[..., : traits.latent.rank]
        mask = shared.masks[_sight_of(layer)]
        if layer.limit is not None:
            mixed = self._sink(layer, layer.limit, query, keys, values, mask, shared)
        elif traits.score_cap is None and layer.sinks is None:
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=traits.score_scale)
        else:
            scores = query @ keys.transpose(-1, -2) * (traits.score_scale or dim**-0.5)
            scores = (scores if traits.score_cap is None else capped(scores, traits.score_cap)) + mask
            mixed = weights_of(scores.float(), self._sink_scores(layer, length)).to(query.dtype) @ values
        mixed = mixed.view(num_rows, kv_heads, self._group, num_nodes, values.shape[-1]).permute(0, 3, 1, 2, 4)
        return mixed.reshape(num_rows, num_nodes, -1)

    def _sink(
        self, layer: Layer, limit: DraftWindow, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, shared: _Pass
    ) -> Tensor:
        assert shared.back is not None
        # [B, 1, G * n, d]
        angles = shared.back.repeat(1, self._group)[:, None, :, None] * self._frequencies[layer.rope]
        still = query.shape[-1] - angles.shape[-1]
        turned, half = query[..., still:], angles.shape[-1] // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        turned = (turned * angles.cos() + swapped * angles.sin()).to(query.dtype)
        sunk = torch.cat((query[..., :still], turned), -1) if still else turned
        traits = self.shape.traits
        scale = traits.score_scale or query.shape[-1] ** -0.5
        learned = self._sink_scores(layer, query.shape[2])
        return sunk_attention(query, sunk, keys, values, mask, scale, limit.sinks, traits.score_cap, learned)

    def _sink_scores(self, layer: Layer, length: int) -> Tensor | None:
        """[kv heads, G * n, 1] scores of the heads' own sinks, of queries as ``_grouped`` has them."""
        if layer.sinks is None:
            return None
        each = layer.sinks.view(self.shape.num_kv_heads, self._group, 1)
        return each.expand(-1, -1, length // self._group).reshape(self.shape.num_kv_heads, length, 1)

    def _grouped(self, query: Tensor) -> Tensor:
        """Queries [B, n, heads, head_dim], those of one key-value head below each other: [B, kv heads, G * n, head_dim]."""
        num_rows, num_nodes, _, dim = query.shape
        query = query.reshape(num_rows, num_nodes, self.shape.num_kv_heads, self._group, dim)
        return query.permute(0, 2, 3, 1, 4).reshape(num_rows, self.shape.num_kv_heads, -1, dim)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] with its last numbers, as many as cos has, rotated."""
    still, half = x.shape[-1] - cos.shape[-1], cos.shape[-1] // 2
    if still:
        return torch.cat((x[..., :still], _turned(x[..., still:], cos, sin)), -1)
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin)


def _sight_of(layer: Layer) -> int | DraftWindow | None:
    """What decides which slots a layer sees."""
    return layer.window if layer.limit is None else layer.limit
