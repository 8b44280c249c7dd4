"""Block drafters as their authors write them: DFlashLayout (z-lab; with JetSpec's causal option) and DSparkLayout
(DeepSpec); and both as the speculators library does.

Layer ids of the first two are numbered by outputs, as here: "target_layer_ids" is ``config.layer_ids``. Those of
speculators count hidden states, j = i + 1, as for EAGLE-3: "aux_hidden_state_layer_ids".
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from foretell.core.errors import ModelError
from foretell.heads.config_keys import Keys, rope_theta
from foretell.heads.draft_vocabulary import complete_vocabulary
from foretell.heads.head import Head, HeadConfig
from foretell.heads.layer_keys import HARMLESS, describe_layers, layer_sizes, refuse_unknown, windows
from foretell.heads.layout import FoundLayout, Layout, TargetInfo, check_layer_ids, describe_speculators
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig, spread_layers

BIAS = "confidence_head.proj.bias"
HARMLESS_DFLASH = ("confidence_head_alpha", "projector_type")
"""Keys of "dflash_config" that only training reads, or that the tensors say, too."""


def _holder(places: Sequence[Keys], key: str) -> Keys:
    """The first place that has a key, else the last. All of them count as read."""
    held = [place for place in places if key in place]
    return held[0] if held else places[-1]


class DFlashLayout(Layout):
    """``DFlashDraftModel``: a Qwen3 configuration, block_size, and dflash_config."""

    name = "dflash"
    summary = "DFlashLayout, its authors' (vLLM, SGLang)"
    head = DFlashHead
    architectures: ClassVar[tuple[str, ...]] = ("DFlashDraftModel",)
    ignored: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")
    anchor_predicts = False  # what an absent "sample_from_anchor" means
    has_heads = False  # DSpark's
    has_causal = True
    has_vocabulary = False  # a draft vocabulary

    def suits(self, head: Head) -> str | None:
        """Where it has keys for all that the head has, and the head what the layout is for."""
        reason = super().suits(head)
        if reason is not None or not isinstance(head, DFlashHead):
            return reason
        config, kind = head.config, "_speculators" if self.has_vocabulary else ""
        heads = config.markov_rank > 0 or config.confidence
        if config.draft_vocab_size is not None and not self.has_vocabulary:
            return f"it has no place for a draft vocabulary; use {'dspark' if heads else 'dflash'}_speculators"
        if heads and not self.has_heads:
            return f"it has no place for a Markov head or a confidence head; use dspark{kind}"
        if self.has_heads and not heads:
            return f"this head has neither a Markov head nor a confidence head; use dflash{kind}"
        if config.causal and not self.has_causal:
            return "its block is causal, for which this layout has no key"
        return None

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: DFlashHeadConfig = head.config
        inner = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.layer_ids),
            "causal_head": config.causal,
            "sample_from_anchor": config.sample_from_anchor,
        }
        out: dict[str, Any] = {
            "architectures": [self.architectures[0]],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": config.block_size,
            "dflash_config": inner,
            "rope_theta": config.rope_theta,
            "layer_types": ["full_attention"] * config.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            **describe_layers(config, target),
        }
        if config.windows or config.causal:
            inner["causal_head"] = out["is_causal"] = config.causal  # JetSpec's key, and vLLM's
            if not config.causal and config.windows_causal:
                del inner["causal_head"], out["is_causal"]  # what says no kind of layer is that by layers
        if target.num_layers is not None:
            out["num_target_layers"] = target.num_layers
        return out

    def parse(self, found: FoundLayout) -> HeadConfig:
        """Later checkpoints keep some keys outside dflash_config, or block_size inside: both are read."""
        keys, inner = found.keys, found.keys.inner("dflash_config")
        keys.only("hidden_act", "silu")
        keys.only("attention_bias", False)
        num_layers = keys.layers("num_hidden_layers")
        inner.only("attention_mode", "gqa")
        where = partial(_holder, (inner, keys))
        hidden = keys.size("hidden_size")
        config = DFlashHeadConfig(
            **layer_sizes(keys),
            num_layers=num_layers,
            block_size=where("block_size").integer("block_size"),
            layer_ids=self._layer_ids(found, where("target_layer_ids"), hidden),
            mask_token_id=where("mask_token_id").integer("mask_token_id"),
            rope_theta=rope_theta(keys),
            **self._sights(keys, inner, num_layers),
            sample_from_anchor=where("sample_from_anchor").flag("sample_from_anchor", self.anchor_predicts),
            **self.extras(found, inner),
        )
        keys.only("target_hidden_size", hidden)
        keys.only("draft_vocab_size", config.vocab_size)
        refuse_unknown(keys)
        refuse_unknown(inner, HARMLESS_DFLASH)
        return config

    def _sights(self, keys: Keys, inner: Keys, num_layers: int) -> dict[str, Any]:
        """What rows of a block see. JetSpec's key, or the authors' and vLLM's of later heads, without which layers with a
        window alone are causal."""
        sizes = windows(keys, num_layers, qwen=True)
        held = [
            place.flag(key) for key in ("causal_head", "is_causal", "causal") for place in (inner, keys) if key in place
        ]
        if len(set(held)) > 1:
            raise ModelError(f"{keys.name}: causal_head, is_causal and causal in config.json contradict each other")
        return {
            "causal": held == [True] * max(1, len(held)),
            "windows": sizes,
            "windows_causal": not sizes or not held or held[0],
        }

    def extras(self, found: FoundLayout, inner: Keys) -> dict[str, Any]:
        """What only DSparkLayout has."""
        return {}

    def _layer_ids(self, found: FoundLayout, keys: Keys, hidden: int) -> tuple[int, ...]:
        if "target_layer_ids" in keys:
            ids = keys.integers("target_layer_ids")
        else:
            count, rest = divmod(found.shape("fc.weight")[1], hidden)
            total = found.keys.integer("num_target_layers", found.num_layers or 0)
            if rest or not total:
                raise ModelError(
                    f"{found.name}: config.json has no dflash_config.target_layer_ids, and the number of the target's "
                    "layers, from which the authors' default follows, is unknown; write the ids into config.json"
                )
            ids = spread_layers(total, count)
        check_layer_ids(ids, name=found.name, source="target_layer_ids")
        return ids


def _heads_of(config: DFlashHeadConfig) -> dict[str, Any]:
    """DSpark's keys for the Markov and confidence heads."""
    return {
        "markov_head_type": "vanilla",
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.markov_rank > 0,
    }


class DSparkLayout(DFlashLayout):
    """``DSparkDraftModel``: DFlashLayout with a Markov head, a confidence head, and an anchor that predicts.

    The keys of the heads are written inside dflash_config (SpecForge), in a dspark_config beside it (SpecForge, later) and
    outside of both (DeepSpec, vLLM).
    """

    name = "dspark"
    summary = "DFlashLayout with DSpark's Markov and confidence heads (vLLM, SGLang)"
    architectures = ("DSparkDraftModel", "Qwen3DSparkModel")
    anchor_predicts = True
    has_heads = True

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: DFlashHeadConfig = head.config
        out = super().describe(head, target)
        both = _heads_of(config)
        inner = {**out["dflash_config"], **both, "projector_type": "dspark", "attention_mode": "gqa"}
        outside = {key: inner[key] for key in ("mask_token_id", "target_layer_ids")}
        return {**out, **both, **outside, "dflash_config": inner}

    def extras(self, found: FoundLayout, inner: Keys) -> dict[str, Any]:
        """Of any of the three places."""
        beside = found.keys.inner("dspark_config")
        where = partial(_holder, (inner, beside, found.keys))
        where("markov_head_type").only("markov_head_type", "vanilla")
        rank = where("markov_rank").integer("markov_rank", 0)
        confidence = where("enable_confidence_head").flag("enable_confidence_head", default=False)
        if confidence:
            where("confidence_head_with_markov").only("confidence_head_with_markov", rank > 0, default=rank > 0)
        else:
            where("confidence_head_with_markov")
        refuse_unknown(beside, HARMLESS_DFLASH)
        return {"markov_rank": rank, "confidence": confidence}

    def build(self, config: HeadConfig, found: FoundLayout) -> Head:
        """A confidence head stored without a bias has a bias of 0."""
        if "confidence_head.proj.weight" in found.tensors and BIAS not in found.tensors:
            found.tensors[BIAS] = torch.zeros(1, dtype=found.tensors["confidence_head.proj.weight"].dtype)
        return super().build(config, found)


AUX = "aux_hidden_state_layer_ids"
HARMLESS_TRAINING = (
    "auf", "ce_loss_alpha", "confidence_head_alpha", "emb_dim", "gru_hidden_dim", "l1_loss_alpha",
    "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma", "num_anchors", "pure_draft_prefix_len",
)  # fmt: skip
"""Keys that only training reads, or the domino projector, which is refused."""


class DFlashSpeculators(DFlashLayout):
    """speculators' DFlash: the layers' own configuration inside, all other keys outside."""

    name = "dflash_speculators"
    summary = "DFlash, of the speculators library (vLLM)"
    architectures = ("DFlashSpeculator", "DFlashDraftModel")
    speculators = "dflash"
    ignored = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
    has_causal = False
    has_vocabulary = True

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: DFlashHeadConfig = head.config
        layer = super().describe(head, target)
        inner = {
            key: value
            for key, value in layer.items()
            if key not in ("architectures", "block_size", "dflash_config", "is_causal")
        }
        return {
            "architectures": [self.architectures[0]],
            **describe_speculators(self.speculators, {"speculative_tokens": config.num_guesses}, target),
            "block_size": config.block_size,
            "draft_vocab_size": config.num_outputs,
            "mask_token_id": config.mask_token_id,
            AUX: [layer_id + 1 for layer_id in config.layer_ids],
            "sample_from_anchor": config.sample_from_anchor,
            # Of layers with windows alone, by its name; vLLM 0.32 makes all layers causal where it is false.
            "sliding_window_non_causal": not (config.windows and config.windows_causal),
            "transformer_layer_config": inner,
        }

    def parse(self, found: FoundLayout) -> HeadConfig:
        """Other projectors are refused by their keys. A window is the engines': it counts from each row's own position
        (training has one for the block, from its anchor)."""
        keys, layer = found.keys, found.keys.inner("transformer_layer_config")
        kind = layer.text("model_type", "qwen3")
        if kind != "qwen3":
            raise ModelError(
                f"{found.name}: transformer_layer_config.model_type is {kind!r} in config.json; only layers of 'qwen3' are "
                "supported"
            )
        num_layers = layer.layers("num_hidden_layers")
        for place, key, allowed in (
            (layer, "hidden_act", "silu"), (layer, "attention_bias", False),
            (keys, "projector_type", "dflash"), (keys, "shift_label", False),
        ):  # fmt: skip
            place.only(key, allowed)
        own = layer_sizes(layer, 128)
        vocab = own["vocab_size"]
        size = keys.size("draft_vocab_size", vocab)
        sizes = windows(layer, num_layers, qwen=True)
        keys.only("target_hidden_size", own["hidden_size"])
        ids = tuple(number - 1 for number in keys.integers(AUX))
        check_layer_ids(ids, name=found.name, source=f"{AUX} in config.json")
        config = DFlashHeadConfig(
            **own,
            num_layers=num_layers,
            block_size=keys.integer("block_size"),
            layer_ids=ids,
            mask_token_id=keys.integer("mask_token_id"),
            rope_theta=rope_theta(layer),
            sample_from_anchor=keys.flag("sample_from_anchor", self.anchor_predicts),
            draft_vocab_size=None if size == vocab else size,
            windows=sizes,
            windows_causal=not keys.flag("sliding_window_non_causal", default=False) or not sizes,
            **self.extras(found, Keys({}, found.name)),
        )
        refuse_unknown(keys, (*HARMLESS, *HARMLESS_TRAINING))
        refuse_unknown(layer)
        return config

    def build(self, config: HeadConfig, found: FoundLayout) -> Head:
        """Maps of a vocabulary that is the whole one say nothing, where they map each id to itself, and its output head is
        the target's."""
        assert isinstance(config, DFlashHeadConfig)
        if config.draft_vocab_size is not None:
            complete_vocabulary(found.tensors, config.draft_vocab_size, config.vocab_size, name=found.name)
            return super().build(config, found)
        found.tensors.pop("lm_head.weight", None)
        offsets, known = found.tensors.pop("d2t", None), found.tensors.pop("t2d", None)
        if (offsets is not None and bool(offsets.any())) or (known is not None and not bool(known.all())):
            raise ModelError(
                f"{found.name}: d2t and t2d do not map the whole vocabulary to itself, and draft_vocab_size says that they "
                "do: they, or draft_vocab_size, are of another head"
            )
        return super().build(config, found)


class DSparkSpeculators(DFlashSpeculators, DSparkLayout):
    """speculators' DSpark: the same with the keys of its heads."""

    name = "dspark_speculators"
    summary = "DSpark, of the speculators library (vLLM)"
    architectures = ("DSparkSpeculator", "DSparkDraftModel")
    speculators = "dspark"
    anchor_predicts = True

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: DFlashHeadConfig = head.config
        out = super().describe(head, target)
        both = _heads_of(config)
        for key in (*both, "mask_token_id", "target_layer_ids"):
            out["transformer_layer_config"].pop(key, None)
        return {**out, **both}
