"""The unmodified transformers model as a ``CausalModel``: it runs nearly every architecture, and is the reference for
the fast implementations.

Nothing of transformers is patched or copied. Trees use its own interface: 4-D masks, explicit positions and a custom
cache object. A configuration does not show whether a model ignores positions or masks, so ``probe.py`` runs every model
once over a small tree before it is used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.tree import Plan
from foretoken.model.cache import KVCache
from foretoken.model.hf.attention import LayerMemory, SlotCache, mask_recipe
from foretoken.model.hf.probe import check_tree, first_line, inspect_layers
from foretoken.model.hf.refusals import check_config, context_length
from foretoken.model.hf.split import answering, find_layers, layer_range
from foretoken.model.hf.taps import capture
from foretoken.model.source import is_file, open_weights, read_config
from foretoken.model.target import CausalModel, ModelSpec, Output


class TransformersModel(CausalModel):
    """Any decoder-only transformers model. One pass at a time: layer ranges change the module while they run."""

    def __init__(self, module: PreTrainedModel, *, name: str | None = None) -> None:
        """Wrap a model in memory; it is put in eval mode and otherwise unchanged.

        Runs it a few times over a handful of tokens. Raises ModelError where it cannot be decoded over trees: the
        message says what was found and what was expected.
        """
        name = name or getattr(module.config, "_name_or_path", "") or type(module).__name__
        check_config(module.config, name=name, model_class=type(module))
        model: Any = module  # transformers leaves much of a model untyped
        self.module: PreTrainedModel = model.eval()
        self._decoder, self._layers = find_layers(module, name=name)
        config: Any = self._decoder.config
        self._recipe = mask_recipe(self._decoder, config, module.dtype, name=name)
        self._device: torch.device = model.get_input_embeddings().weight.device
        found = inspect_layers(module, self._layers, self._device, name=name)
        self._tuples = found.tuples
        self._memory: list[LayerMemory] = found.memory
        self.spec = ModelSpec(
            name=name,
            architecture=type(module).__name__,
            implementation="transformers",
            vocab_size=found.vocab_size,
            num_layers=len(self._layers),
            hidden_size=found.hidden_size,
            max_positions=context_length(config),
            dtype=module.dtype,
            device=self._device,
            weight_bytes=weight_bytes(module),
            eos_token_ids=eos_token_ids(module),
        )
        check_tree(self, module)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        device_map: str | dict[str, Any] | None = None,
        sharding: Any = None,
        name: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a checkpoint directory or a GGUF file. With device_map (accelerate's) the layers may lie on several devices.

        sharding is transformers' DistributedConfig, for this process's part of a model (``parallel.py``). Raises
        ModelError where weights are missing, damaged or not those of the configuration.
        """
        name = name or str(path)
        auto: Any = AutoModelForCausalLM
        placed = {"device_map": device_map} if sharding is None else {"distributed_config": sharding}
        try:
            if is_file(Path(path)):
                kind, given = _unpacked(Path(path), dtype, name)
                module, info = kind.from_pretrained(None, dtype=dtype, output_loading_info=True, **given, **placed)
            else:
                module, info = auto.from_pretrained(
                    str(path),
                    dtype=dtype,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=trust_remote_code,
                    **placed,
                )
        except ModelError:
            raise
        except Exception as error:  # transformers, safetensors, accelerate and quantizers raise all kinds
            raise ModelError(f"{name}: transformers could not load it: {first_line(error)}") from error
        refuse_mismatch(info, name=name)
        in_place = device_map is not None or sharding is not None
        return cls(module if in_place else module.to(device), name=name)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """See ``CausalModel.new_cache``; each layer's memory lies on that layer's device."""
        return KVCache(
            num_rows,
            capacity,
            [(layer.num_heads, layer.key_dim) for layer in self._memory],
            self._memory[0].dtype,
            [layer.device for layer in self._memory],
            [layer.value_dim for layer in self._memory],
        )

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        plan: Plan,
        cache: KVCache,
        *,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        taps: Sequence[int] = (),
        head: bool = True,
    ) -> Output:
        """See ``CausalModel.forward``. Runs without autograd. Raises ConfigError for an invalid range or tap."""
        first, stop = self._range(layers, hidden, taps)
        # The head is run by the wrapper (which knows how its logits are scaled or capped), everything else by the base.
        with_head = head and stop == self.spec.num_layers
        runner: Any = self.module if with_head else self._decoder
        with (
            layer_range(self._layers, first, stop, hidden, tuples=self._tuples),
            capture(self._layers, {*taps, stop - 1}) as outputs,
        ):
            result = runner(
                input_ids=tokens,
                attention_mask=self._recipe.masks(plan),
                position_ids=plan.positions,
                past_key_values=SlotCache(cache, plan),
                use_cache=True,
            )
        return Output(
            logits=result.logits.to(self._device) if with_head else None,
            hidden=outputs[stop - 1].to(self._device),
            taps=torch.cat([outputs[i].to(self._device) for i in taps], dim=-1) if len(taps) else None,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.logits``. Follows the caller's grad mode, so that exits and draft heads can be trained.

        The whole model runs with every layer skipped: the final norm, the head and whatever scales or caps its logits
        (Gemma 2, Cohere, Granite) are the model's own code, so no list of architectures is needed.
        """
        logits: Tensor = self._without_layers(self.module, hidden).logits
        return logits.to(self._device)

    def _without_layers(self, runner: Any, hidden: Tensor) -> Any:
        """What runner (the model, or its decoder) makes of a residual stream, every layer skipped."""
        anything = _zeros(hidden)
        num_layers = self.spec.num_layers
        with layer_range(self._layers, num_layers, num_layers, hidden, tuples=self._tuples):
            return runner(
                input_ids=anything,
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),
                position_ids=anything,
                use_cache=False,
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``CausalModel.embed``; scaled where the model's own embedding module scales."""
        model: Any = self.module
        embedded: Tensor = model.get_input_embeddings()(tokens)
        return embedded.to(self._device)

    def normed(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.normed``. Follows the caller's grad mode, as ``logits`` does."""
        normed: Tensor = self._without_layers(self._decoder, hidden).last_hidden_state
        return normed.to(self._device)

    def head(self, normed: Tensor) -> Tensor:
        """See ``CausalModel.head``. Follows the caller's grad mode.

        The whole model runs, without its layers and with ``normed`` in the place of what its final norm returns, so that
        what scales or caps the logits stays its own.
        """
        with answering(self._decoder, normed):
            logits: Tensor = self._without_layers(self.module, normed).logits
        return logits.to(self._device)

    def _range(self, layers: tuple[int, int] | None, hidden: Tensor | None, taps: Sequence[int]) -> tuple[int, int]:
        first, stop = layers or (0, self.spec.num_layers)
        if not 0 <= first < stop <= self.spec.num_layers:
            raise ConfigError(f"layers {first, stop}: {self.spec.name} has layers (0, {self.spec.num_layers})")
        if (hidden is None) != (first == 0):
            raise ConfigError(f"layers {first, stop}: hidden must be given iff the first layer is not 0")
        for tap in taps:
            if not first <= tap < stop:
                raise ConfigError(f"tap {tap} is not among the layers {first, stop} that run")
        return first, stop


def _zeros(hidden: Tensor) -> Tensor:
    """[B, n] int64 for a stream [B, n, H]: token ids and positions that nothing reads."""
    return torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)


def _unpacked(path: Path, dtype: torch.dtype, name: str) -> tuple[Any, dict[str, Any]]:
    """Class, and configuration and weights, of a GGUF file; transformers' own reader leaves out RoPE scaling."""
    config, source = read_config(path, name=name), open_weights(path, name=name)
    tensors = {key: source.read(key, dtype, torch.device("cpu")) for key in source.names}
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], {"config": config, "state_dict": tensors}


def refuse_mismatch(info: dict[str, Any], *, name: str) -> None:
    """Raise ModelError where transformers' loading report says that weights and configuration are not of one model.

    transformers would fill missing weights with random numbers and go on. Surplus ones (a vision tower, old buffers)
    are common and harmless; surplus layers are found by ``checkpoint.check_layers``.
    """
    absent = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if absent or info["error_msgs"]:
        what = ", ".join(absent[:4] or info["error_msgs"][:1]) + (", ..." if len(absent) > 4 else "")
        raise ModelError(
            f"{name}: the weights do not match config.json: {len(absent)} missing or of another shape ({what}); "
            "expected the weights and the config.json of one checkpoint"
        )


def weight_bytes(module: PreTrainedModel) -> int:
    """Bytes of weights that one decode pass reads.

    Every parameter once. A tied embedding is read as the head; an untied one, and learned positions, are looked up row
    by row and cost nothing. All experts of a mixture are counted, though one token reads only its own few: a tree with
    a batch soon reads them all. Of a model that is divided among processes, the part that lies here.
    """
    model: Any = module
    head_weight = getattr(model.get_output_embeddings(), "weight", None)
    looked_up = {id(x.weight) for x in module.modules() if isinstance(x, nn.Embedding) and x.weight is not head_weight}
    read: list[Any] = [p for p in module.parameters() if id(p) not in looked_up]
    here = (p.to_local() if hasattr(p, "to_local") else p for p in read)  # a DTensor counts all parts as its own
    return sum(p.numel() * p.element_size() for p in here)


def eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a text: the generation configuration's, else the model configuration's."""
    for config in (getattr(module, "generation_config", None), module.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
