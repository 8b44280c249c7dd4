"""Give a small model the cost of a large one without changing what it computes.

Speculative decoding only pays where a pass of the target is expensive, and a target small enough to ship is not. An
inflated target computes the same function with the arithmetic and the memory traffic of, say, 350M parameters:

* The residual stream is widened by channels that are zero at all times. Rows that would write into them are zero,
  columns that read from them are random: they multiply zeros, at full price. A norm over H channels of which h are in
  use sees h/H of the mean square, so its weight is scaled by sqrt(h/H) and its epsilon by h/H, which makes it exact:
  (x / sqrt(S/H + e*h/H)) * sqrt(h/H) = x / sqrt(S/h + e).
* Added attention heads and MLP channels have random inputs and zero output columns. Every key-value head of the large
  model serves the same number of query heads; a real query head is placed in the group of its own key-value head.
* Added layers compute random attention and MLPs and add zero: their output projections are zero. Real layers are
  spread evenly among them.
* Added vocabulary rows (``--vocab``) are random embeddings, so the *text* of such a model is random: it is for the time
per pass only, as its config says.

Zero weights cost what other weights cost: no kernel here looks at their value.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

TIME_ONLY = (
    "foretell_time_per_pass_only"  # key in the config of a model whose added vocabulary makes its text meaningless
)


def real_layers(real: int, total: int) -> list[int]:
    """Where `real` layers stand among `total`: spread evenly, strictly increasing."""
    return [(2 * i + 1) * total // (2 * real) for i in range(real)]


def real_heads(heads: int, kv_heads: int, big_heads: int, big_kv_heads: int) -> tuple[list[int], list[int]]:
    """Large-model places of the query heads and of the key-value heads, groups kept together.

    Where the large model's groups are smaller than the small one's, a key-value head is stored several times.
    `kv[i]` is then the small model's head at place i, so the second list is indexed by place: -1 marks a free place.
    """
    group, big_group = heads // kv_heads, big_heads // big_kv_heads
    copies = -(-group // big_group)  # places that one key-value head needs
    if copies * kv_heads > big_kv_heads:
        raise ValueError(
            f"{kv_heads} key-value heads in groups of {group} do not fit {big_kv_heads} groups of {big_group}"
        )
    places = [(h // group * copies + h % group // big_group) * big_group + h % group % big_group for h in range(heads)]
    kv = [i // copies if i < kv_heads * copies else -1 for i in range(big_kv_heads)]
    return places, kv


def widened_config(
    config: Qwen3Config, *, hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int, vocab: int
) -> Qwen3Config:
    """The configuration of the inflated model; refuses shapes that are smaller than the real ones."""
    if config.model_type != "qwen3":
        raise ValueError(f"inflate knows qwen3 models, not {config.model_type!r}")
    asked = {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
    }  # fmt: skip
    for name, value in asked.items():
        if value < getattr(config, name):
            raise ValueError(f"{name}: {value} is smaller than the model's own {getattr(config, name)}")
    big = copy.deepcopy(config)
    for name, value in asked.items():
        setattr(big, name, value)
    big.rms_norm_eps = config.rms_norm_eps * config.hidden_size / hidden
    big.layer_types = ["full_attention"] * layers
    if vocab != config.vocab_size:
        setattr(big, TIME_ONLY, True)
    return big


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.02


def _fill_layer(big: dict[str, Tensor], small: dict[str, Tensor], places: list[int], kv: list[int], head: int) -> None:
    """Put a real layer's weights (`small`) into a layer of random ones (`big`), both by name inside the layer."""
    scale = (small["input_layernorm.weight"].numel() / big["input_layernorm.weight"].numel()) ** 0.5
    h = small["input_layernorm.weight"].numel()
    m = small["mlp.gate_proj.weight"].size(0)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        big[name][:h] = small[name] * scale
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        big[name].copy_(small[name])

    def rows(place: int) -> slice:
        return slice(place * head, (place + 1) * head)

    for real, place in enumerate(places):
        big["self_attn.q_proj.weight"][rows(place), :h] = small["self_attn.q_proj.weight"][rows(real)]
    for place, real in enumerate(kv):
        if real >= 0:
            for name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
                big[name][rows(place), :h] = small[name][rows(real)]
    for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        big[name][:m, :h] = small[name]
    # What writes into the residual stream: zero rows for unused channels, zero columns for unused heads and MLP
    # channels.
    output = torch.zeros_like(big["self_attn.o_proj.weight"])
    for real, place in enumerate(places):
        output[:h, rows(place)] = small["self_attn.o_proj.weight"][:, rows(real)]
    big["self_attn.o_proj.weight"].copy_(output)
    big["mlp.down_proj.weight"].zero_()[:h, :m] = small["mlp.down_proj.weight"]


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    *,
    hidden: int = 1024,
    layers: int = 26,
    intermediate: int = 3072,
    heads: int = 16,
    kv_heads: int = 8,
    vocab: int | None = None,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """A Qwen3 model of the given size that computes the same logits as `model` (float32: within 1e-4), dtype kept.

    `vocab` above the model's own adds random rows: such a model is for timing only.
    """
    config = model.config
    big_config = widened_config(
        config, hidden=hidden, layers=layers, intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        vocab=vocab or config.vocab_size,
    )  # fmt: skip
    if config.num_key_value_heads > kv_heads or config.hidden_size > hidden:
        raise ValueError("the inflated model must be at least as large as the model in every direction")
    places, kv = real_heads(config.num_attention_heads, config.num_key_value_heads, heads, kv_heads)
    big = Qwen3ForCausalLM(big_config).float()
    generator = torch.Generator().manual_seed(seed)
    small_state = {k: v.float() for k, v in model.state_dict().items()}
    state = big.state_dict()  # views of the parameters: writing here writes the model
    for name, weight in state.items():
        is_norm = name.endswith("norm.weight")
        weight.copy_(1 + _random(weight.shape, generator) if is_norm else _random(weight.shape, generator))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()

    def layer(of: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        return {k[len(prefix) :]: v for k, v in of.items() if k.startswith(prefix)}

    for real, place in enumerate(real_layers(config.num_hidden_layers, layers)):
        _fill_layer(layer(state, place), layer(small_state, real), places, kv, config.head_dim)
    h, v = config.hidden_size, config.vocab_size
    # The embedding fills the residual stream, so its extra channels are zero; tied, the head's are zero too.
    state["model.embed_tokens.weight"][:, h:] = 0
    state["model.embed_tokens.weight"][:v, :h] = small_state["model.embed_tokens.weight"]
    if not config.tie_word_embeddings:
        state["lm_head.weight"][:v, :h] = small_state["lm_head.weight"]
    state["model.norm.weight"][:h] = small_state["model.norm.weight"] * (h / hidden) ** 0.5
    big.generation_config = copy.deepcopy(model.generation_config)
    return big.to(model.dtype).eval()


def main() -> None:
    """Command line: a model directory in, an inflated one out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="bundled", help='"bundled" or a Hugging Face directory of a Qwen3 model')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, help="more vocabulary rows, random: for the time per pass only")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    source = args.target
    if source == "bundled":
        from foretell import bundled

        source = bundled.path("target")
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    big = inflate(
        small, hidden=args.hidden, layers=args.layers, intermediate=args.intermediate, heads=args.heads,
        kv_heads=args.kv_heads, vocab=args.vocab,
    )  # fmt: skip
    tokens = torch.arange(4, min(68, small.config.vocab_size))[None]
    with torch.no_grad():
        difference = (big(tokens).logits[..., : small.config.vocab_size] - small(tokens).logits).abs().max().item()
    big = big.to(getattr(torch, args.dtype))
    big.config.dtype = getattr(torch, args.dtype)
    big.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(source).save_pretrained(args.out)
    parameters = sum(p.numel() for p in big.parameters())
    print(json.dumps({"parameters": parameters, "largest_logit_difference": difference, "out": str(args.out)}))


if __name__ == "__main__":
    main()
