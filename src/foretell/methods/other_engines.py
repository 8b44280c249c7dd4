"""How to start other engines with a head: vLLM's ``--speculative-config`` and SGLang's flags, and what cannot run there.

Statements about vLLM were tested in 0.32 (EAGLE-1, EAGLE-3, Medusa) or read in the source of 0.32 and 0.33; those about
SGLang were read in its source.
"""

from dataclasses import dataclass, field
from typing import Any

from foretell.core.errors import ConfigError
from foretell.heads.head import Head
from foretell.heads.layout import Layout, TargetInfo
from foretell.heads.pair_head import PairConfig
from foretell.heads.rope import default_attention_factor
from foretell.methods.eagle.eagle1 import Eagle1Head
from foretell.methods.eagle.eagle3 import Eagle3Head
from foretell.methods.medusa.formats import MedusaVLLM
from foretell.methods.medusa.head import MedusaHead

DEFAULT_LENGTH = 3
"""Default of num_speculative_tokens: the value of both engines' documentation for EAGLE."""


@dataclass(frozen=True)
class Serving:
    """What to pass to each engine; None where it cannot run the head, and notes say why."""

    vllm: dict[str, Any] | None  # of --speculative-config
    sglang: list[str] | None  # flags
    notes: list[str] = field(default_factory=list)  # a line each


def serving(head: Head, layout: Layout, model: str, about: TargetInfo, length: int | None = None) -> Serving:
    """What to pass for a head that lies in directory or hub id ``model``, in a layout, to draft ``length`` tokens.

    Raises ConfigError for a length that the head, or the engine with it, does not support.
    """
    if length is not None and length < 1:
        raise ConfigError(f"num_speculative_tokens = {length} must be at least 1")
    if isinstance(head, Eagle3Head):
        return _eagle3(head, layout, model, about, length or DEFAULT_LENGTH)
    if isinstance(head, Eagle1Head):
        return _eagle1(head, model, about, length or DEFAULT_LENGTH)
    if isinstance(head, MedusaHead):
        return _medusa(head, layout, model, length)
    return Serving(None, None, [f"a head of kind {head.method!r} runs in foretell alone: neither engine has it"])


def _eagle3(head: Eagle3Head, layout: Layout, model: str, about: TargetInfo, length: int) -> Serving:
    config, notes = head.config, [*_positions(about), *_angles(head.config)]
    vllm: dict[str, Any] | None = {"method": "eagle3", "model": model, "num_speculative_tokens": length}
    sglang: list[str] | None = _tree_flags("EAGLE3", model, length)
    reason = _not_vllm(config)
    if reason is not None:
        vllm = None
        notes.append(reason)
    alien = [
        said
        for said, there in (
            ("several layers", config.num_layers > 1),
            ("norms of queries and keys", config.qk_norm),
            ("attention biases", config.attention_bias),
            ("windows", any(config.windows)),
            ("norm_before_fc", config.norm_before_fc),
        )
        if there
    ]
    if alien:
        sglang = None
        notes.append(f"SGLang's LlamaForCausalLMEagle3, as read, has no {', no '.join(alien)}: no flags for it")
    if layout.name == "speculators":
        sglang = None
        if not alien:
            notes.append("SGLang does not read the speculators layout: 'foretell export --to eagle3' first")
        if about.name is None:
            notes.append("no verifier is named, so 'vllm serve DIR' alone finds no target: export again with --target")
    if config.draft_vocab_size < config.vocab_size:
        notes.append(
            f"only {config.draft_vocab_size} of {config.vocab_size} tokens are ever drafted: d2t maps them in both engines"
        )
    if len(config.layer_ids) != 3:
        notes.append(f"it reads {len(config.layer_ids)} layers; engines may assume three")
    flags = [name for name in ("norm_before_residual", "fc_norm", "norm_output") if getattr(config, name)]
    if flags:
        notes.append(f"it was trained with {', '.join(flags)}: vLLM reads that; see that your SGLang does")
    return Serving(vllm, sglang, notes)


def _eagle1(head: Eagle1Head, model: str, about: TargetInfo, length: int) -> Serving:
    notes = [*_positions(about), *_angles(head.config)]
    notes.append('SGLang knows EAGLE-1 as "LlamaForCausalLMEagle": put that into "architectures" of a copy for it')
    if head.config.fc_bias:
        notes.append(
            "fc has a bias, as in the authors' checkpoints: vLLM 0.32 silently ignores it, and guesses differently"
        )
    config: dict[str, Any] | None = {"method": "eagle", "model": model, "num_speculative_tokens": length}
    reason = _not_vllm(head.config)
    if reason is not None:
        config = None
        notes.append(reason)
    return Serving(config, _tree_flags("EAGLE", model, length), notes)


def _not_vllm(config: PairConfig) -> str | None:
    """Why vLLM cannot run these layers; None where it can."""
    if any(config.windows) and not all(config.windows):
        return (
            "some layers have windows and some see all: vLLM 0.32 stops where a head's layers are not all of one kind"
        )
    if not config.attention_bias or config.output_bias != config.qk_norm:
        return None  # vLLM's Llama layers have a bias of the output exactly where they have the others, Qwen3's never
    has, its = ("a bias", "none") if config.output_bias else ("no bias", "one")
    kind = "Qwen3" if config.qk_norm else "Llama"
    return f"the attention's output has {has} here, and in vLLM's {kind} layers with attention_bias it has {its}"


def _angles(config: PairConfig) -> list[str]:
    scaling = config.rope_scaling
    if (
        scaling is None
        or scaling.kind != "yarn"
        or scaling.attention_factor == default_attention_factor(scaling.factor)
    ):
        return []
    return [f"its attention_factor is {scaling.attention_factor:g}; vLLM 0.32, as read, always takes YaRN's default"]


def _medusa(head: MedusaHead, layout: Layout, model: str, length: int | None) -> Serving:
    count = head.config.num_heads
    length = count if length is None else length
    if length > count:
        raise ConfigError(f"num_speculative_tokens = {length} must be at most {count}: each head guesses one token")
    notes = ["vLLM reads Medusa up to 0.32 alone (a chain, no tree); 0.33 dropped it; SGLang has none"]
    reason = MedusaVLLM().suits(head)
    if reason is not None:
        return Serving(None, None, [*notes, f"vLLM 0.32 does not run these: {reason}"])
    if layout.name != "medusa_vllm":
        return Serving(None, None, [*notes, "for vLLM 0.32, 'foretell export --to medusa_vllm' first"])
    return Serving({"method": "medusa", "model": model, "num_speculative_tokens": length}, None, notes)


def _tree_flags(algorithm: str, model: str, length: int) -> list[str]:
    """A chain, as vLLM drafts it: with one child each, length steps make length + 1 tokens to verify."""
    return [
        "--speculative-algorithm", algorithm, "--speculative-draft-model-path", model, "--speculative-num-steps",
        str(length), "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(length + 1),
    ]  # fmt: skip


def _positions(about: TargetInfo) -> list[str]:
    if about.max_positions is not None:
        return []
    return ["config.json has no max_position_embeddings, for which engines take 2048: export again with --target"]
