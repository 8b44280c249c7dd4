"""The unmodified transformers model as a ``CausalModel``: it runs nearly every architecture, and is the reference for
the fast implementations.

Nothing of transformers is patched or copied. Trees use its own interface: 4-D masks, explicit positions and a custom
cache object. A configuration does not show whether a model ignores positions or masks, so ``probe.py`` runs every model
once over a small tree before it is used.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from foretell.checkpoints import ends
from foretell.checkpoints.files import WeightFiles, weight_files
from foretell.checkpoints.source import is_file, open_weights, read_config, read_generation
from foretell.core.errors import ConfigError, ModelError, first_line
from foretell.core.tree import Plan
from foretell.model.cache import KVCache
from foretell.model.hf.attention import LayerMemory, SlotCache, mask_recipe
from foretell.model.hf.one_layer import answering, drop_towers, find_layers, layer_range, towers
from foretell.model.hf.own import own_arguments, replaced
from foretell.model.hf.probe import check_branches, check_chain, check_tree, first_position, inspect_layers
from foretell.model.hf.reading import StateCache
from foretell.model.hf.recurrent.mixers import mixing
from foretell.model.hf.refusals import check_config, context_length, needs_tower
from foretell.model.hf.runner import ModuleRunner, capture, evaluating
from foretell.model.recurrent import RecurrentCache
from foretell.model.target import WHOLE, CausalModel, ModelSpec, Output, PassOptions

logger = logging.getLogger(__name__)


class TransformersModel(CausalModel):
    """Any decoder-only transformers model. One pass at a time: layer ranges change the module while they run."""

    def __init__(self, module: PreTrainedModel, *, name: str | None = None) -> None:
        """Wrap a model in memory, which stays as it is: one in training mode is in eval mode during passes alone.

        Runs it a few times over a handful of tokens. Raises ModelError where it cannot be decoded over trees: the
        message says what was found and what was expected.
        """
        name = name or getattr(module.config, "_name_or_path", "") or type(module).__name__
        check_config(module.config, name=name, model_class=type(module))
        model: Any = module
        self.module: PreTrainedModel = model if module.training else model.eval()  # with all of its parts
        with evaluating(module):
            self._examine(name)

    def _examine(self, name: str) -> None:
        """Find the module's layers and what they remember, and check them."""
        module = self.module
        model: Any = module  # transformers leaves much of a model untyped
        self._decoder, self._layers = find_layers(module, name=name)
        config: Any = self._decoder.config
        self._recipe = mask_recipe(self._decoder, config, module.dtype, name=name)
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._owns = own_arguments(self._decoder, self._layers, config)
        self._flat_mask = any(own.flat_mask for own in self._owns)
        found = inspect_layers(module, self._layers, self._device, name=name)
        self._first_position = first_position(module, self._device)
        self._tuples, self._shares = found.tuples, found.shares
        self._memory: list[LayerMemory] = found.memory
        self._mixers = found.mixers
        self._tokenwise = False
        self._runners = ModuleRunner(module), ModuleRunner(self._decoder)
        self._has_attention = any(layer.num_heads for layer in self._memory)
        generation = getattr(module, "generation_config", None)
        length, cut = context_length(config)
        self.spec = ModelSpec(
            name=name,
            architecture=type(module).__name__,
            implementation="transformers",
            vocab_size=found.vocab_size,
            num_layers=len(self._layers),
            hidden_size=found.hidden_size,
            max_positions=length - self._first_position,
            cut=cut,
            dtype=module.dtype,
            device=self._device,
            weight_bytes=weight_bytes(module),
            eos_token_ids=ends.of_configs(generation, module.config.get_text_config(), module.config),
        )
        if not self._mixers:
            check_tree(self, module)
            return
        reason = f"the recurrent layers of {type(module).__name__} are of no kind whose states can be taken up"
        if self._mixers[0].rewind is not None:
            try:
                check_chain(self, module)
                self._read_trees(module)
                return
            except ModelError as error:  # its scan is another than that of this name
                reason = f"a check at loading failed: {error}"
                logger.warning("%s: accepted guesses are read again, which is slower: %s", name, reason)
                self._mixers = [mixer.reading_again() for mixer in self._mixers]
        try:
            check_chain(self, module)
        except ModelError as error:  # some models take up a state again for one token at a time only
            reason += f"; and it reads token by token, since otherwise {error}"
            self._tokenwise = True
            check_chain(self, module)
        because = "its layers read accepted guesses again, as a line"
        self.spec = replace(self.spec, reads_again=reason, chains_only=_chains_only(name, module, because))

    def _read_trees(self, module: PreTrainedModel) -> None:
        """Of a model whose scans are known: whether it reads trees as well."""
        name = self.spec.name
        try:
            check_branches(self, module)
        except ModelError as error:
            logger.warning("%s: lines of guesses are read, and no trees: %s", name, error)
            self.spec = replace(
                self.spec, chains_only=_chains_only(name, module, f"a check at loading failed: {error}")
            )

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

        sharding is transformers' DistributedConfig, for this process's part of a model (``model/parallel.py``). Raises
        ModelError where weights are missing, damaged or not those of the configuration.
        """
        name = name or str(path)
        placed = {"device_map": device_map} if sharding is None else {"distributed_config": sharding}
        code = {"trust_remote_code": trust_remote_code}
        # With "ignored" sizes the report names all tensors, which ``refuse_mismatch`` then does; else the error names none.
        report: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            if is_file(Path(path)):
                kind, given = _unpacked(Path(path), dtype, name)
                module, info = kind.from_pretrained(None, dtype=dtype, **report, **given, **placed)
            else:
                config = AutoConfig.from_pretrained(str(path), local_files_only=True, **code)
                auto: Any = AutoModelForImageTextToText if needs_tower(config) else AutoModelForCausalLM
                given = {"pretrained_model_name_or_path": str(path), "local_files_only": True, **code}
                stored = weight_files(Path(path), name=name)
                if stored.strays(name=name):  # transformers would take them, from whichever file comes last
                    auto, given = _as_indexed(auto, config, stored, name, code)
                module, info = auto.from_pretrained(dtype=dtype, **report, **given, **placed)
                if "state_dict" in given:
                    module.generation_config = read_generation(Path(path), name=name) or module.generation_config
        except ModelError:
            raise
        except Exception as error:  # transformers, safetensors, accelerate and quantizers raise all kinds
            raise ModelError(f"{name}: transformers could not load it: {first_line(error)}") from error
        refuse_mismatch(info, name=name)
        ends.drop_default(module.config, Path(path))
        in_place = device_map is not None or sharding is not None
        drop_towers(module, name=name)
        return cls(module if in_place else module.to(device), name=name)

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> "TransformersModel":
        """See ``CausalModel.rebuilt``."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(dict(tensors))
        return TransformersModel(module, name=self.spec.name)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """See ``CausalModel.new_cache``; each layer's memory lies on that layer's device."""
        shapes = [(layer.num_heads, layer.key_dim) for layer in self._memory]
        dtype = next((layer.dtype for layer in self._memory if layer.num_heads), self._memory[0].dtype)
        devices, dims = [layer.device for layer in self._memory], [layer.value_dim for layer in self._memory]
        if not self._mixers:
            return KVCache(num_rows, capacity, shapes, dtype, devices, dims)
        layouts = [mixer.layout for mixer in self._mixers]
        return RecurrentCache(num_rows, capacity, shapes, dtype, devices, dims, layouts=layouts)

    @torch.no_grad()
    def forward(self, tokens: Tensor, plan: Plan, cache: KVCache, options: PassOptions = WHOLE) -> Output:
        """See ``CausalModel.forward``. Runs without autograd. Raises ConfigError for an invalid range or tap."""
        first, stop = self._range(options)
        # The head is run by the wrapper (which knows how its logits are scaled or capped), everything else by the base.
        with_head = options.head and stop == self.spec.num_layers
        run = self._runners[0 if with_head else 1]
        with (
            evaluating(self.module),
            replaced(self._owns, plan, self._recipe, cache),
            layer_range(self._layers, first, stop, options.hidden, tuples=self._tuples),
            capture(self._layers, {*options.taps, stop - 1}) as outputs,
            self._memory_of(cache, plan) as memory,
        ):
            result = run(tokens, plan.positions + self._first_position, memory, self._masks(plan))
        return Output(
            logits=result.logits.to(self._device) if with_head else None,
            hidden=outputs[stop - 1].to(self._device),
            taps=torch.cat([outputs[i].to(self._device) for i in options.taps], dim=-1) if options.taps else None,
        )

    @contextmanager
    def _memory_of(self, cache: KVCache, plan: Plan) -> Iterator[SlotCache]:
        """The cache object of one pass."""
        if not self._mixers:
            yield SlotCache(cache, plan)
            return
        assert isinstance(cache, RecurrentCache)
        states = StateCache(cache, plan)
        if states.reading.branches and self.spec.chains_only:
            raise ConfigError(f"a tree of guesses was given, and {self.spec.chains_only}: choose shape 'chain'")
        with mixing(self._mixers, states, tokenwise=self._tokenwise):
            yield states

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.logits``. Follows the caller's grad mode, so that exits and draft heads can be trained.

        The whole model runs with every layer skipped: the final norm, the head and whatever scales or caps its logits
        (Gemma 2, Cohere, Granite) are the model's own code, so no list of architectures is needed.
        """
        logits: Tensor = self._without_layers(self._runners[0], hidden).logits
        return logits.to(self._device)

    def _without_layers(self, runner: ModuleRunner, hidden: Tensor) -> Any:
        """What runner (the model, or its decoder) makes of a residual stream, every layer skipped."""
        anything = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)  # ids that nothing reads
        num_layers = self.spec.num_layers
        with evaluating(self.module), layer_range(self._layers, num_layers, num_layers, hidden, tuples=self._tuples):
            mask = torch.ones_like(anything) if self._flat_mask else None
            if self._has_attention and mask is None:
                mask = anything.new_ones(1, 1, 1, 1, dtype=torch.bool)
            return runner(anything, anything, None, mask)

    def _masks(self, plan: Plan) -> Tensor | dict[str, Tensor | None] | None:
        """What the model is given for masks."""
        if self._flat_mask:
            return torch.ones(len(plan.slots), plan.span, dtype=torch.int64, device=self._device)
        return self._recipe.masks(plan) if self._has_attention else None

    def embed(self, tokens: Tensor) -> Tensor:
        """See ``CausalModel.embed``; scaled where the model's own embedding module scales, and where (Granite) what calls
        it does."""
        model: Any = self.module
        embedded: Tensor = model.get_input_embeddings()(tokens)
        scale = getattr(self._decoder.config, "embedding_multiplier", None) or 1.0
        return (embedded if scale == 1.0 else embedded * scale).to(self._device)

    def normed(self, hidden: Tensor) -> Tensor:
        """See ``CausalModel.normed``. Follows the caller's grad mode, as ``logits`` does."""
        normed: Tensor = self._without_layers(self._runners[1], hidden).last_hidden_state
        return normed.to(self._device)

    def head(self, normed: Tensor) -> Tensor:
        """See ``CausalModel.head``. Follows the caller's grad mode.

        The whole model runs, without its layers and with ``normed`` in the place of what its final norm returns, so that
        what scales or caps the logits stays its own.
        """
        with answering(self._decoder, normed):
            logits: Tensor = self._without_layers(self._runners[0], normed).logits
        return logits.to(self._device)

    def _range(self, options: PassOptions) -> tuple[int, int]:
        first, stop = options.range(self.spec.num_layers)
        if first == stop:
            raise ConfigError(f"layers {first, stop}: no layer would run")
        if self._shares and (first, stop) != (0, self.spec.num_layers):
            raise ConfigError(
                f"layers {first, stop}: upper layers of {self.spec.name} read keys and values of lower ones, so it runs "
                "whole; use a method that does not run some of the layers"
            )
        return first, stop


def _chains_only(name: str, module: PreTrainedModel, because: str) -> str:
    kind = getattr(module.config, "model_type", type(module).__name__)
    return (
        f"{name} keeps a recurrent state ({kind}) that cannot follow the branches of a tree (lines of guesses it reads), "
        f"since {because}"
    )


def _unpacked(path: Path, dtype: torch.dtype, name: str) -> tuple[Any, dict[str, Any]]:
    """Class, and configuration and weights, of a GGUF file; transformers' own reader leaves out RoPE scaling."""
    config, source = read_config(path, name=name), open_weights(path, name=name)
    tensors: dict[str, Tensor] = {}
    for key in source.names:
        tensor, place = source.read(key, dtype, torch.device("cpu")), key.partition(".experts.")
        if key.endswith("shared_expert_gate.weight"):  # llama.cpp keeps it as a vector
            tensors[key] = tensor.view(1, -1)
        elif tensor.dim() == 3 and place[2].endswith(".weight"):  # transformers stacks them itself, as of checkpoints
            tensors |= {f"{place[0]}.experts.{index}.{place[2]}": one for index, one in enumerate(tensor)}
        else:
            tensors[key] = tensor
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], {"config": config, "state_dict": tensors}


def _as_indexed(
    auto: Any, config: Any, stored: WeightFiles, name: str, code: dict[str, bool]
) -> tuple[Any, dict[str, Any]]:
    """Class, and configuration and weights, of a checkpoint whose files hold tensors that its index assigns to others."""
    with torch.device("meta"):
        kind = type(auto.from_config(config, **code))
    tensors: dict[str, Tensor] = {}
    for key, (file, _) in stored.tensors(name=name).items():
        with safe_open(file, "pt") as opened:
            tensors[key] = opened.get_tensor(key)
    return kind, {"pretrained_model_name_or_path": None, "config": config, "state_dict": tensors}


def refuse_mismatch(info: dict[str, Any], *, name: str) -> None:
    """Raise ModelError where transformers' loading report says that weights and configuration are not of one model.

    transformers would fill missing weights with random numbers and go on. Surplus ones (a vision tower, old buffers)
    are common and harmless; surplus layers are found by ``checkpoint.check_layers``.
    """
    absent = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    absent += [
        f"{key} has shape {tuple(given)}, expected {tuple(expected)}"
        for key, given, expected in sorted(info["mismatched_keys"])
    ]
    if absent or info["error_msgs"]:
        what = "; ".join(absent[:4] or info["error_msgs"][:1]) + ("; ..." if len(absent) > 4 else "")
        raise ModelError(
            f"{name}: the weights do not match config.json: {len(absent)} missing or of another shape ({what}); "
            "expected the weights and the config.json of one checkpoint"
        )


def weight_bytes(module: PreTrainedModel) -> int:
    """Bytes of weights that one decode pass reads.

    Every parameter once. A tied embedding is read as the head; an untied one, and learned positions, are looked up row
    by row and cost nothing, as does what reads images. All experts of a mixture are counted, though one token reads only
    its own few: a tree with a batch soon reads them all. Of a model that is divided among processes, the part that lies
    here.
    """
    model: Any = module
    head_weight = getattr(model.get_output_embeddings(), "weight", None)
    unread = {id(x.weight) for x in module.modules() if isinstance(x, nn.Embedding) and x.weight is not head_weight}
    unread |= {id(p) for tower in towers(module, name="") for p in tower.parameters()}
    read: list[Any] = [p for p in module.parameters() if id(p) not in unread]
    here = (p.to_local() if hasattr(p, "to_local") else p for p in read)  # a DTensor counts all parts as its own
    return sum(p.numel() * p.element_size() for p in here)
