"""EAGLE heads: EAGLE-3 in both layouts in use, and EAGLE-1.

Three ways of numbering the layers that EAGLE-3 reads are in use, and no file says which one it uses:

==================================================  ====================================================
here: output of layer i                             ``Eagle3HeadConfig.layer_ids``
vLLM, speculators: hidden_states[j], j = i + 1      "eagle_aux_hidden_state_layer_ids" of the top level
SGLang, SpecForge: i                                the same key inside "eagle_config"
==================================================  ====================================================

The native layout holds both, so that one directory is right in both engines.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from foretell.core.errors import ModelError
from foretell.heads.config_keys import Keys
from foretell.heads.draft_vocabulary import complete_vocabulary
from foretell.heads.head import Head, HeadConfig
from foretell.heads.layer_keys import describe_layers, describe_rope, layer_sizes, refuse_unknown, rope, windows
from foretell.heads.layout import (
    MARKER,
    FoundLayout,
    Layout,
    TargetInfo,
    architecture,
    check_layer_ids,
    describe_speculators,
    marker,
)
from foretell.heads.pair_head import PairConfig
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig

IDS = "eagle_aux_hidden_state_layer_ids"


SPECULATIVE_TOKENS = 3  # in a line, where a file must name a number: the engines' own default


QWEN3 = "Eagle3Qwen3ForCausalLM"


HARMLESS_EAGLE = ("parallel_draft_heads_num_layers", "parallel_draft_step")
"""Keys of "eagle_config" that belong to modelopt's parallel drafting; its tensors would be refused as unexpected."""


def _said(config: Eagle3HeadConfig) -> dict[str, Any]:
    """What both layouts of EAGLE-3 say under the same keys."""
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {**{name: getattr(config, name) for name in names}, IDS: [layer + 1 for layer in config.layer_ids]}


class Eagle3Native(Layout):
    """``LlamaForCausalLMEagle3``: a Llama configuration; the first layer is called midlayer. ``Eagle3Qwen3ForCausalLM``
    (vLLM's name) is the same with a Qwen3's norms of queries and keys."""

    name = "eagle3"
    summary = "EAGLE-3, its authors' (vLLM, SGLang)"
    head: ClassVar[type[Head]] = Eagle3Head
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", QWEN3)
    ignored = ("verifier_lm_head.weight", "verifier_norm.weight")

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """The authors' own checkpoints have the architecture LlamaForCausalLM: the layer's name identifies them."""
        mine = architecture(config) == "LlamaForCausalLM" and self.speculators is None
        return super().claims(config, tensors) or (mine and any(key.startswith("midlayer.") for key in tensors))

    def inward(self, name: str) -> str:
        """NeMo writes model.layers.0., others layers.0."""
        name = name.removeprefix("model.")
        return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: Eagle3HeadConfig = head.config
        return {
            "architectures": [QWEN3 if config.qk_norm else self.architectures[0]],
            **llama(config, target),
            **_said(config),
            "eagle_config": {"use_aux_hidden_state": True, IDS: list(config.layer_ids)},
        }

    def parse(self, found: FoundLayout) -> HeadConfig:
        """Norm flags that are absent are off, as in the authors' code; the architecture, not the model type, says of which
        kind the layers are, as in the engines."""
        qwen = architecture(found.keys.values) == QWEN3
        config = self.config(found, found.keys, found.keys.flag("norm_before_residual", default=False), qwen=qwen)
        refuse_unknown(found.keys)
        return config

    def config(self, found: FoundLayout, layer: Keys, norm_before_residual: bool, *, qwen: bool) -> Eagle3HeadConfig:
        """Keys of the head from the top level, keys of its layers from ``layer``."""
        keys, nested = found.keys, found.keys.inner("eagle_config")
        sizes = llama_sizes(layer, found.tensors, qwen=qwen)
        keys.only("target_hidden_size", sizes["hidden_size"])
        for part in (keys, nested):
            for key, allowed in (
                ("use_aux_hidden_state", True), ("use_input_layernorm_in_first_layer", True),
                ("use_last_layernorm", True), ("use_mtp_layernorm", False), ("next_layer_regular", True),
                ("parallel_drafting", False), ("bias", False),
            ):  # fmt: skip
                part.only(key, allowed)
        layer_ids = self._layer_ids(found, nested, sizes["hidden_size"])
        for key in ("num_aux_hidden_states", "num_aux_layers"):
            keys.only(key, len(layer_ids))
        vocab = keys.size("truncated_vocab_size", sizes["vocab_size"])
        config = Eagle3HeadConfig(
            **sizes,
            draft_vocab_size=keys.size("draft_vocab_size", vocab),
            layer_ids=layer_ids,
            norm_before_residual=norm_before_residual,
            norm_before_fc=_norm_before_fc(keys, nested),
            fc_norm=keys.flag("fc_norm", default=False),
            norm_output=keys.flag("norm_output", default=False),
            own_embedding="embed_tokens.weight" in found.tensors,
        )
        refuse_unknown(nested, HARMLESS_EAGLE)
        return config

    def _layer_ids(self, found: FoundLayout, nested: Keys, hidden: int) -> tuple[int, ...]:
        keys = found.keys
        ids, source = None, IDS
        for each in (keys, nested):
            each.read.update((IDS, "aux_hidden_state_layer_ids"))
        for key in (IDS, "aux_hidden_state_layer_ids"):
            if keys.values.get(key):
                ids, source = tuple(number - 1 for number in keys.integers(key)), f"{key} in config.json"
                break
        if nested.values.get(IDS):
            inner = nested.integers(IDS)
            if ids is not None and inner != ids:
                raise ModelError(
                    f"{found.name}: {IDS} is {[i + 1 for i in ids]} in config.json, which makes "
                    f"eagle_config.{IDS} {list(ids)} (it counts one less), and it is {list(inner)}: mend the wrong one"
                )
            ids, source = inner, f"eagle_config.{IDS} in config.json"
        if ids is None:
            ids, source = self._default_ids(found, hidden), "the default ids"
        check_layer_ids(ids, name=found.name, source=source)
        return ids

    def _default_ids(self, found: FoundLayout, hidden: int) -> tuple[int, ...]:
        """hidden_states 2, L // 2 and L - 3, where every engine would take them: three different ones, of three."""
        why = f"{found.name}: config.json has no {IDS}"
        count = found.shape("fc.weight")[1] / hidden
        if found.num_layers is None:
            raise ModelError(
                f"{why}, and the default (2, L/2, L-3) needs the number of the target's layers: name the target, or "
                "write the ids into config.json"
            )
        ids = (1, found.num_layers // 2 - 1, found.num_layers - 4)
        if count != 3 or not 0 <= ids[0] < ids[1] < ids[2]:
            raise ModelError(
                f"{why}, and for a target of {found.num_layers} layers the default is {[i + 1 for i in ids]}, which is "
                f"not {count:g} different layers, as fc expects: write the ids that it was trained on into config.json"
            )
        return ids

    def build(self, config: HeadConfig, found: FoundLayout) -> Head:
        """Vocabulary maps that follow from others may be absent."""
        assert isinstance(config, Eagle3HeadConfig)
        complete_vocabulary(found.tensors, config.draft_vocab_size, config.vocab_size, name=found.name)
        return super().build(config, found)


class Eagle3Speculators(Eagle3Native):
    """``Eagle3DraftModel`` of speculators 0.9: the layers' own configuration inside; the first is called layers.0."""

    name = "speculators"
    summary = "EAGLE-3, of the speculators library (vLLM)"
    architectures = ("Eagle3DraftModel", "Eagle3Speculator")
    speculators = "eagle3"

    def outward(self, name: str, config: Any) -> str:
        """See the class."""
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: Eagle3HeadConfig = head.config
        proposal = {"speculative_tokens": SPECULATIVE_TOKENS, "accept_tolerance": 0.0, "verifier_accept_k": 1}
        return {
            "architectures": [self.architectures[0]],
            **describe_speculators("eagle3", proposal, target),
            **_said(config),
            "transformer_layer_config": llama(config, target),
        }

    def parse(self, found: FoundLayout) -> HeadConfig:
        """An absent norm_before_residual is refused: vLLM takes it for true, the speculators library for false."""
        if "norm_before_residual" not in found.keys:
            raise ModelError(
                f"{found.name}: config.json has no 'norm_before_residual'; vLLM takes that for true and the speculators "
                "library for false: write into it what the head was trained with"
            )
        layer = found.keys.inner("transformer_layer_config")
        kind = layer.text("model_type", "llama")
        if kind not in ("llama", "qwen3"):
            raise ModelError(
                f"{found.name}: transformer_layer_config.model_type is {kind!r} in config.json; only layers of 'llama' and "
                "'qwen3' are supported"
            )
        config = self.config(found, layer, found.keys.flag("norm_before_residual"), qwen=kind == "qwen3")
        refuse_unknown(found.keys)
        refuse_unknown(layer)
        return config


class Eagle1Native(Layout):
    """The authors' EAGLE-1 (and EAGLE-2): a Llama configuration, fc and layers.0, without a name of its own.

    vLLM needs "LlamaForCausalLM" as architecture, which a whole model has, too: the marker, or fc, identifies the
    layout.
    """

    name = "eagle1"
    summary = "EAGLE-1 and EAGLE-2, their authors' (vLLM)"
    head = Eagle1Head
    architectures = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
    ignored = ("lm_head.weight",)

    def suits(self, head: Head) -> str | None:
        """With a Llama's layers."""
        reason = super().suits(head)
        if reason is None and isinstance(head, Eagle1Head) and head.config.qk_norm:
            return "its layers are Qwen3's, with norms of queries and keys, and this layout has Llama's alone"
        return reason

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """See the class."""
        return super().claims(config, tensors) and (
            marker(config).get("method") == "eagle1" or {"fc.weight", "model.fc.weight"} & tensors.keys() != set()
        )

    def inward(self, name: str) -> str:
        """With or without the prefix of a whole model."""
        return name.removeprefix("model.")

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: Eagle1HeadConfig = head.config
        out = {
            "architectures": [self.architectures[0]],
            **llama(config, target),
            MARKER: {"tap_layer": config.tap_layer},
        }
        # To the authors and to SGLang "bias" is that of fc, and true where it is absent; to vLLM it is the attention's, and
        # false where it is absent.
        return out if config.fc_bias else {**out, "bias": False}

    def parse(self, found: FoundLayout) -> HeadConfig:
        """The head reads the target's last layer: from the marker, or from the number of the target's layers."""
        fc_bias = "fc.bias" in found.tensors
        if "bias" in found.keys and found.keys.flag("bias") != fc_bias:
            raise ModelError(
                f"{found.name}: bias is {not fc_bias} in config.json, and the weights have {'a' if fc_bias else 'no'} "
                "fc.bias: mend or delete the key"
            )
        sizes = llama_sizes(found.keys, found.tensors, qwen=False)
        found.keys.only("draft_vocab_size", sizes["vocab_size"])
        config = Eagle1HeadConfig(
            **sizes, tap_layer=last_layer(found), fc_bias=fc_bias, own_embedding="embed_tokens.weight" in found.tensors
        )
        refuse_unknown(found.keys)
        return config


def _norm_before_fc(keys: Keys, nested: Keys) -> bool:
    """Of either place; vLLM prefers the inner one."""
    outer = keys.flag("norm_before_fc", default=False)
    inner = nested.flag("norm_before_fc", default=outer)
    if inner != outer and "norm_before_fc" in keys:
        raise ModelError(
            f"{keys.name}: norm_before_fc is {outer} in config.json and {inner} in its eagle_config: mend the wrong one"
        )
    return inner


def llama(config: PairConfig, target: TargetInfo) -> dict[str, Any]:
    """The configuration of the layers, as a Llama model's, or a Qwen3's."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        **describe_rope(config.rope_theta, config.rope_scaling),
        **describe_layers(config, target),
    }


def llama_sizes(keys: Keys, tensors: Mapping[str, Tensor], *, qwen: bool) -> dict[str, Any]:
    """Sizes and options of decoder layers, Qwen3's or Llama's, by the names that heads have for them.

    Raises ModelError, naming the key, for other layers.
    """
    num_layers = keys.layers("num_hidden_layers", 1)
    keys.only("hidden_act", "silu")
    for key, allowed in (
        ("mlp_bias", False), ("qkv_bias", False), ("is_causal", True), ("logit_scale", 1.0), ("use_qk_norm", qwen),
        ("position_embedding_type", "rope"), ("quantization_config", None),
    ):  # fmt: skip
        keys.only(key, allowed)
    theta, scaling = rope(keys)
    bias = keys.flag("attention_bias", default=False)
    return {
        **layer_sizes(keys, 128 if qwen else None),
        "rope_theta": theta,
        "num_layers": num_layers,
        "rope_scaling": scaling,
        "qk_norm": qwen,
        "attention_bias": bias,
        # One key stands for both in transformers; engines leave out that of the output for some layers.
        "output_bias": bias and any(name.endswith(".self_attn.o_proj.bias") for name in tensors),
        "windows": windows(keys, num_layers, qwen=qwen),
    }


def last_layer(found: FoundLayout) -> int:
    """The layer that a head of the final hidden state reads. Raises ModelError where it is unknown."""
    said = found.keys.inner(MARKER)
    if "tap_layer" in said:
        return said.integer("tap_layer")
    if found.num_layers is None:
        raise ModelError(
            f"{found.name}: this head reads the target's last layer, and its files do not say which that is: name the "
            "target"
        )
    return found.num_layers - 1
