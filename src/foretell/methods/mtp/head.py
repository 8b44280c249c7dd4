"""The MTP module of a checkpoint (DeepSeek-V3, 2412.19437, section 2.2): h' = W [norm e(x); norm h], one decoder layer of
the target's own family, a norm, and the target's output head.

It is a head over pairs like EAGLE's: pair t is the target's normed last hidden state of position t with token t + 1, at
rotary position t. The decoder layer is transformers' own module, run over the drafter's cache; where the native kernels
have that kind of layer, ``eagle.native`` runs it, and this is the slow twin.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretell.core.errors import ModelError, first_line
from foretell.core.tree import Plan
from foretell.heads.head import HeadConfig
from foretell.heads.native import InBlocks
from foretell.heads.pair_head import FamilyLayer, PairHead, PairLayer
from foretell.methods.mtp.checkpoint import MTPLayout, MTPTensors
from foretell.model.cache import KVCache
from foretell.model.hf.attention import FULL, LayerMemory, RecordingCache, SlotCache, mask_recipe
from foretell.model.hf.one_layer import one_layer
from foretell.model.target import CausalModel, ModelSpec


class CheckpointMTPHead(PairHead):
    """An MTP module with a decoder layer of any family that transformers has."""

    method = "mtp"
    config: HeadConfig  # type: ignore[assignment]

    def __init__(self, tensors: MTPTensors, config: Any, spec: ModelSpec, *, name: str) -> None:
        """config: the text configuration of the checkpoint. spec: of the target, whose dtype and device it takes. Raises
        ModelError where the decoder layer's tensors are not those of config's family."""
        super().__init__()
        self.config = HeadConfig(spec.hidden_size, spec.vocab_size)
        self.layout: MTPLayout = tensors.layout
        self.dequantised = tensors.dequantised
        self._last = spec.num_layers - 1
        own = {key: tensor.to(spec.device, spec.dtype) for key, tensor in tensors.own.items()}
        width = spec.hidden_size
        if tuple(own[self.layout.projection].shape) != (width, 2 * width):
            raise ModelError(
                f"{name}: its MTP projection is {tuple(own[self.layout.projection].shape)}, and target {spec.name!r} of "
                f"hidden size {width} needs {(width, 2 * width)}: give the directory of this target's own checkpoint"
            )
        for key, tensor in own.items():
            shape = (width, 2 * width) if key == self.layout.projection else (width,)
            if tuple(tensor.shape) != shape or not bool(tensor.isfinite().all()):
                raise ModelError(
                    f"{name}: tensor {key}.weight of its MTP head is {list(tensor.shape)}, expected {list(shape)} finite "
                    "numbers"
                )
        broken = [key for key, tensor in tensors.block.items() if not bool(tensor.isfinite().all())]
        if broken:
            raise ModelError(f"{name}: tensor {broken[0]} of its MTP head holds numbers that are not finite")
        decoder, layer = one_layer(config, tensors.block, spec, name=name)
        self.layer, self._config = layer, decoder.config
        self.module = f"the checkpoint's own {type(layer).__name__}"
        self.module += f", the first of {tensors.num_modules}" if tensors.num_modules > 1 else ""
        self._blocks = tensors.packed
        self.rotary: Any = decoder.rotary_emb
        norm: Any = type(decoder.norm)
        eps = float(config.rms_norm_eps)
        self.norms = nn.ModuleDict()
        for key in (self.layout.embedding_norm, self.layout.hidden_norm, self.layout.last_norm):
            one = norm(width, eps=eps)
            one.weight = nn.Parameter(own[key], requires_grad=False)
            self.norms[key.replace(".", "_")] = one
        self.projection = nn.Parameter(own[self.layout.projection], requires_grad=False)
        self._recipe = mask_recipe(decoder, decoder.config, spec.dtype, name=name)
        self.eval()
        self._memory = self._probe(spec, name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the projection: routers may be kept in float32."""
        return self.projection.dtype

    @property
    def taps(self) -> tuple[int, ...]:
        """The last layer alone."""
        return (self._last,)

    @property
    def decoder(self) -> Sequence[PairLayer]:
        """None of EAGLE's: the decoder layer is transformers' own."""
        return ()

    def features(self, taps: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: what the target's output head reads."""
        return model.normed(taps.to(model.spec.dtype)).to(self.dtype)

    def logits(self, read: Tensor, model: CausalModel) -> Tensor:
        """See ``PairHead``: the target's output head."""
        return model.head(read.to(model.spec.dtype))

    def enter(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``: both are h'."""
        embedded, hidden = self._norm(self.layout.embedding_norm, embeds), self._norm(self.layout.hidden_norm, features)
        pair = (hidden, embedded) if self.layout.hidden_first else (embedded, hidden)
        x = nn.functional.linear(torch.cat(pair, -1), self.projection)
        return x, x

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        normed = self._norm(self.layout.last_norm, hidden)
        return (normed if self.layout.feeds_normed else hidden), normed

    def _norm(self, name: str, x: Tensor) -> Tensor:
        normed: Tensor = self.norms[name.replace(".", "_")](x)
        return normed

    def family_layer(self) -> FamilyLayer:
        """See ``PairHead``."""
        layout, width = self.layout, self.config.hidden_size
        tensors = {f"model.layers.0.{key}": tensor for key, tensor in self.layer.state_dict().items()}
        tensors["model.embed_tokens.weight"] = torch.zeros(self._config.vocab_size, width)  # neither is read
        tensors["model.norm.weight"] = torch.ones(width)
        blocks = {f"model.layers.0.{key}": packed for key, packed in self._blocks.items()}
        projection = nn.Linear(2 * width, width, bias=False, dtype=self.dtype)
        projection.weight.data = self.projection.roll(width, 1) if layout.hidden_first else self.projection.clone()
        keys = layout.embedding_norm, layout.hidden_norm, layout.last_norm
        token_norm, feature_norm, last_norm = (
            self.norms.get_parameter(f"{key.replace('.', '_')}.weight") for key in keys
        )
        return FamilyLayer(
            self._config, InBlocks(tensors, blocks), bool(blocks), projection, token_norm, feature_norm, last_norm,
            layout.feeds_normed,
        )  # fmt: skip

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """What one layer of the family keeps for each pair."""
        memory = self._memory
        return KVCache(
            num_rows, capacity, [(memory.num_heads, memory.key_dim)], memory.dtype, [memory.device], [memory.value_dim]
        )

    def advance(self, embeds: Tensor, features: Tensor, plan: Plan, cache: KVCache) -> tuple[Tensor, Tensor]:
        """See ``PairHead``."""
        x, _ = self.enter(embeds, features)
        masks = self._recipe.masks(plan)
        mask = masks[FULL] if isinstance(masks, dict) else masks
        return self.leave(self._run(x, mask, plan.positions, SlotCache(cache, plan)))

    def _run(self, x: Tensor, mask: Tensor | None, positions: Tensor, memory: Any) -> Tensor:
        """The decoder layer on a stream [B, n, H]."""
        rotated = positions.expand(3, *positions.shape) if hasattr(self.rotary, "mrope_section") else positions
        out = self.layer(
            x,
            position_embeddings=self.rotary(x, rotated),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=memory,
            use_cache=True,
        )
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden

    @torch.no_grad()
    def _probe(self, spec: ModelSpec, name: str) -> LayerMemory:
        """Run three pairs and note what the layer keeps. Raises ModelError where it cannot be run so."""
        memory = RecordingCache()
        x = torch.zeros(1, 3, spec.hidden_size, dtype=spec.dtype, device=spec.device)
        mask = torch.ones(3, 3, dtype=torch.bool, device=spec.device).tril()[None, None]
        if self._recipe.additive is not None:
            lowest = torch.finfo(self._recipe.additive).min
            mask = torch.zeros(mask.shape, dtype=self._recipe.additive, device=spec.device).masked_fill(~mask, lowest)
        positions = torch.arange(3, device=spec.device)[None]
        try:
            self._run(x, mask, positions, memory)
        except Exception as error:
            raise ModelError(
                f"{name}: the decoder layer of its MTP head ({type(self.layer).__name__}) cannot be run with given "
                f"positions and cache ({first_line(error)})"
            ) from error
        if 0 not in memory.seen:
            raise ModelError(f"{name}: the decoder layer of its MTP head keeps no keys and values of its own")
        return memory.seen[0]
