"""Medusa heads: in their authors' layout, and in vLLM's (up to 0.32; 0.33 reads no Medusa at all)."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foretell.core.errors import ModelError
from foretell.heads.config_keys import check_ids
from foretell.heads.directories import MEDUSA_WEIGHTS, WEIGHTS
from foretell.heads.head import Head, HeadConfig
from foretell.heads.layout import MARKER, FoundLayout, Layout, TargetInfo, architecture
from foretell.methods.eagle.formats import last_layer
from foretell.methods.medusa.head import MedusaHead, MedusaHeadConfig


class MedusaAuthors(Layout):
    """FasterDecoding's: medusa_lm_head.safetensors (or .pt), and a config.json without sizes.

    Sizes are those of the tensors, and so is the number of heads: published directories say 2 and hold 5.
    """

    name = "medusa"
    summary = "Medusa, its authors'"
    head = MedusaHead
    weights = MEDUSA_WEIGHTS

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """There is no architecture in it."""
        return "medusa_num_heads" in config or "medusa_num_layers" in config

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class; with the sizes beside, which readers of old files ignore."""
        config: MedusaHeadConfig = head.config
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": target.name,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            MARKER: {"tap_layer": config.tap_layer},
        }

    def parse(self, found: FoundLayout) -> HeadConfig:
        """See the class."""
        num_layers = found.keys.integer("medusa_num_layers", 1)
        held = {int(key.split(".")[0]) for key in found.tensors if re.match(r"\d+\.\d+\.", key)}
        said = found.keys.size("medusa_num_heads", 1)
        if len(held) < said:
            raise ModelError(
                f"{found.name}: medusa_num_heads is {said} in config.json, and the weights hold {len(held)} heads (tensors "
                "0.0.linear.weight and so on)"
            )
        absent = sorted(set(range(max(held) + 1 if max(held) < 2 * len(held) else len(held))) - held)
        if absent:
            raise ModelError(f"{found.name}: the weights hold {len(held)} heads, and none of number {absent[0]}")
        return self.sizes(found, len(held), num_layers)

    def sizes(self, found: FoundLayout, num_heads: int, num_layers: int) -> MedusaHeadConfig:
        """The sizes of the tensors. Every head, and every block of the first, must be there before a module is made."""
        if num_layers < 0:
            raise ModelError(f"{found.name}: {num_layers} blocks a head in config.json, expected 0 or more")
        for layer in range(num_layers):
            found.shape(f"0.{layer}.linear.weight")
        name = f"0.{num_layers}.weight"
        last = found.shape(name) if name in found.tensors else None
        hidden = found.shape("0.0.linear.weight" if num_layers else name)[1]
        keys = found.keys
        columns = keys.size("vocab_size") if last is None else last[0]
        # Without a map column i is token i. Old files do not give the size of the vocabulary.
        vocab = keys.size("vocab_size", columns) if "token_map" in found.tensors else columns
        return MedusaHeadConfig(
            hidden_size=hidden,
            vocab_size=vocab,
            num_heads=num_heads,
            num_layers=num_layers,
            tap_layer=last_layer(found),
            draft_vocab_size=columns,
            own_lm_head=last is not None,
        )

    def build(self, config: HeadConfig, found: FoundLayout) -> Head:
        """The ids of a reduced vocabulary's columns are checked: decoding writes to these places."""
        assert isinstance(config, MedusaHeadConfig)
        if "token_map" in found.tensors and config.draft_vocab_size < config.vocab_size:
            ids = found.tensors["token_map"]
            check_ids(ids, config.draft_vocab_size, config.vocab_size, name=found.name, of="token_map")
        return super().build(config, found)


class MedusaVLLM(MedusaAuthors):
    """``MedusaModel`` of vLLM. It drafts only a chain of each head's first choice.

    vLLM has keys for a reduced vocabulary (truncated_vocab_size, token_map), but its linear layers are as wide as the whole
    one and refuse to load fewer rows (read and seen in 0.32): such heads are read here and not written.
    """

    name = "medusa_vllm"
    summary = "Medusa, of vLLM up to 0.32"
    architectures = ("MedusaModel",)
    weights = WEIGHTS

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """By architecture or type."""
        return architecture(config) in self.architectures or config.get("model_type") == "medusa"

    def suits(self, head: Head) -> str | None:
        """Only with linear layers of their own: vLLM shares none with the target."""
        reason = super().suits(head)
        if reason is not None or not isinstance(head, MedusaHead):
            return reason
        if not head.config.own_lm_head:
            return "these heads end in the target's own head, which vLLM's Medusa does not share"
        size, total = head.config.draft_vocab_size, head.config.vocab_size
        if size < total:
            return (
                f"they guess {size} of {total} tokens, and vLLM 0.32 stops at an assertion for less than all of them: "
                f"train with 'draft_vocab_size' {total}"
            )
        return None

    def outward(self, name: str, config: Any) -> str:
        """Under medusa_heads, but for the map of a reduced vocabulary."""
        return f"medusa_heads.{name}" if name[:1].isdigit() else name

    def inward(self, name: str) -> str:
        """vLLM's own modules too: blocks.{i}.layers.{j}; lm_heads.{i} is left for ``build``, which knows the depth."""
        if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            return f"{match[1]}.{match[2]}.linear.{match[3]}"
        return name.removeprefix("medusa_heads.")

    def describe(self, head: Any, target: TargetInfo) -> dict[str, Any]:
        """See the class."""
        config: MedusaHeadConfig = head.config
        return {
            "architectures": [self.architectures[0]],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "truncated_vocab_size": config.draft_vocab_size,
            "base_model_name_or_path": target.name,
            MARKER: {"tap_layer": config.tap_layer},
        }

    def parse(self, found: FoundLayout) -> HeadConfig:
        """Sizes are checked against config.json."""
        keys = found.keys
        num_layers = keys.integer("num_hidden_layers", 1)
        for key in [key for key in found.tensors if re.fullmatch(r"lm_heads\.\d+\.weight", key)]:
            found.tensors[f"{key.split('.')[1]}.{num_layers}.weight"] = found.tensors.pop(key)
        keys.only("original_lm_head", allowed=False)
        return self.sizes(found, keys.size("num_heads"), num_layers)
