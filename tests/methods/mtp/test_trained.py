"""MTP modules trained here: training's lines of guesses are decoding's, and the text is the target's own."""

from pathlib import Path

import torch
from torch import Tensor

from foretell import Engine, Request
from foretell.core.tree import chain_parent, layout
from foretell.heads import formats
from foretell.methods.mtp.objective import MTPObjective
from foretell.methods.mtp.trained import MTPHead, MTPHeadConfig
from foretell.model.llama.run.lean import LeanModel
from tests.engine.harness import ToyTokenizer, mixed_params, outcome
from tests.methods.mtp import reference
from tests.model.tiny import VOCAB, tiny_module

TARGET = LeanModel.from_hf(tiny_module("qwen3", num_hidden_layers=2))
SIZE = TARGET.spec.hidden_size


def random_head() -> MTPHead:
    config = MTPHeadConfig(
        SIZE, VOCAB, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, tap_layer=1, rope_theta=100.0
    )
    head = MTPHead.fresh(config, torch.Generator().manual_seed(5), final_norm=torch.ones(SIZE))
    for index, (name, parameter) in enumerate(head.named_parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.data += 0.2 * noise if "norm" in name else 0.1 * noise
    return head.eval().requires_grad_(requires_grad=False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_reference_says_the_same() -> None:
    """The module of the papers, with a Llama's layer (MiMo's, without biases), Qwen's order and names."""
    head = random_head()
    embeds, features = random(7, SIZE), random(7, SIZE, seed=1)
    tensors = head.state_dict()
    block = {key.removeprefix("layers.0."): tensor for key, tensor in tensors.items()}
    norm = {"eps": head.config.rms_norm_eps}
    pair = (
        reference.rms(embeds, tensors["pre_fc_norm_embedding.weight"], **norm),
        reference.rms(features, tensors["pre_fc_norm_hidden.weight"], **norm),
    )
    x = torch.cat(pair, -1) @ tensors["fc.weight"].T
    here = reference.rms(x, block["input_layernorm.weight"], **norm)
    q, k, v = (reference.heads(reference.projected(block, name, here), 8) for name in "qkv")
    mixed = reference.attended(reference.rotated(q, 100.0, 8), reference.rotated(k, 100.0, 8), v)
    x = x + mixed @ block["self_attn.o_proj.weight"].T
    x = x + reference.mlp(block, "mlp.", reference.rms(x, block["post_attention_layernorm.weight"], **norm))
    wanted = reference.rms(x, tensors["norm.weight"], **norm)
    plan = layout(chain_parent(7, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 16)
    fed, read = head.advance(embeds[None], features[None], plan, head.new_cache(1, 16))
    assert torch.allclose(read[0], wanted, atol=1e-5)
    assert torch.equal(fed, read)


def test_training_unrolls_what_decoding_drafts() -> None:
    head, count = random_head(), 9
    embeds, features = random(1, count, SIZE), random(1, count, SIZE, seed=1)
    steps = head.unroll(embeds, features, 3)
    for anchor in range(count - 2):
        cache = head.new_cache(1, 32)
        plan = layout(chain_parent(anchor + 1, torch.device("cpu"))[None], torch.zeros(1, dtype=torch.int64), 32)
        fed, read = head.advance(embeds[:, : anchor + 1], features[:, : anchor + 1], plan, cache)
        fed, read = fed[:, -1:], read[:, -1:]
        chain = layout(chain_parent(3, torch.device("cpu"))[None], torch.tensor([anchor]), 32)
        for step in range(3):
            if step:
                fed, read = head.advance(embeds[:, anchor + step, None], fed, chain.nodes(step, step + 1), cache)
            assert torch.allclose(read[0, 0], steps[step][1][0, anchor], atol=1e-5), (anchor, step)


def test_from_its_directory_the_text_is_the_targets_own(tmp_path: Path) -> None:
    formats.save(random_head(), tmp_path, target=TARGET.spec)
    tokenizer = ToyTokenizer([b"w"] * VOCAB, special=(2,))
    rng = torch.Generator().manual_seed(1)
    asked = [
        Request(torch.randint(3, VOCAB, (length,), generator=rng).tolist(), params)
        for length, params in zip((2, 9, 3, 30, 5, 17, 4, 12), mixed_params(14), strict=True)
    ]
    plain = Engine(TARGET, tokenizer)
    expected = [outcome(plain.generate(request.prompt, request.params)) for request in asked]
    for shape in ("chain", "sequoia/size=6"):
        engine = Engine(TARGET, tokenizer, speculative={"method": "mtp", "model": str(tmp_path), "shape": shape})
        assert [outcome(completion) for completion in engine.generate_batch(asked, batch_size=4)] == expected
    assert engine.resolved()["head"] == "torch: the target runs as 'lean', and native heads need a native one"


def test_three_guesses_of_falling_weight() -> None:
    objective = MTPObjective(random_head())
    assert objective.taps == (1,)
    assert (objective.num_slots, objective.decay) == (3, 0.6)
