"""EAGLE heads alone: the unrolled forward against a loop over positions written from the papers, names, vocabularies."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.core.errors import ModelError
from foretell.core.tree import layout
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.heads.pair_head import PairHead
from foretell.methods.eagle.eagle1 import Eagle1Head, Eagle1HeadConfig
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head

H, VOCAB = EAGLE3.hidden_size, EAGLE3.vocab_size
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"fc_norm": True},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True, "own_embedding": True},
]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector [d] at one position: pairs (i, i + d/2) turned by position * theta ** (-2i/d)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2.0 * i / len(x))
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Line:
    """A chain of pairs, read one after the other from the weights alone: what decoding a chain must compute."""

    def __init__(self, head: PairHead) -> None:
        self.weights = {name: value.detach() for name, value in head.state_dict().items()}
        self.config: Any = head.config
        self.keys: list[Tensor] = []  # [kv heads, d] of each pair
        self.values: list[Tensor] = []

    def attend(self, x: Tensor, prefix: str) -> Tensor:
        c, w = self.config, self.weights
        position = len(self.keys)
        q = (w[prefix + "q_proj.weight"] @ x).view(c.num_heads, c.head_dim)
        k = (w[prefix + "k_proj.weight"] @ x).view(c.num_kv_heads, c.head_dim)
        self.keys.append(torch.stack([turned(one, position, c.rope_theta) for one in k]))
        self.values.append((w[prefix + "v_proj.weight"] @ x).view(c.num_kv_heads, c.head_dim))
        out = []
        for head in range(c.num_heads):
            kv = head // (c.num_heads // c.num_kv_heads)
            mine = turned(q[head], position, c.rope_theta)
            scores = torch.stack([mine @ key[kv] for key in self.keys]) / math.sqrt(c.head_dim)
            out.append(sum(s * value[kv] for s, value in zip(scores.softmax(0), self.values, strict=True)))
        return w[prefix + "o_proj.weight"] @ torch.cat(out)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        w = self.weights
        gate = w[prefix + "gate_proj.weight"] @ x
        return w[prefix + "down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w[prefix + "up_proj.weight"] @ x))

    def read(self, embed: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """(fed on, read) of the next pair, both [H]."""
        return (self.eagle3 if isinstance(self.config, Eagle3HeadConfig) else self.eagle1)(embed, feature)

    def eagle3(self, embed: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        w, layer = self.weights, "midlayer."
        normed = rms(feature, w[layer + "hidden_norm.weight"])
        x = torch.cat([rms(embed, w[layer + "input_layernorm.weight"]), normed])
        h = (normed if self.config.norm_before_residual else feature) + self.attend(x, layer + "self_attn.")
        h = h + self.mlp(rms(h, w[layer + "post_attention_layernorm.weight"]), layer + "mlp.")
        read = rms(h, w["norm.weight"])
        return (read if self.config.norm_output else h), read

    def eagle1(self, embed: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        w, layer = self.weights, "layers.0."
        x = w["fc.weight"] @ torch.cat([embed, feature]) + w["fc.bias"]
        h = x + self.attend(x, layer + "self_attn.")
        h = h + self.mlp(rms(h, w[layer + "post_attention_layernorm.weight"]), layer + "mlp.")
        return h, h


@pytest.mark.parametrize("config", [EAGLE1, *(replace(EAGLE3, **options) for options in OPTIONS)])
def test_unrolling_is_a_chain_behind_every_position(config: Eagle1HeadConfig | Eagle3HeadConfig) -> None:
    head = random_head(config).double()
    torch.manual_seed(1)
    embeds, features = torch.randn(2, 5, H).double(), torch.randn(2, 5, H).double()
    with torch.no_grad():
        steps = head.unroll(embeds, features, 4)
    compared = 0
    for row in range(2):
        for anchor in range(5):
            line = Line(head)
            for before in range(anchor):
                line.read(embeds[row, before], features[row, before])
            feature = features[row, anchor]
            for step, (fed_on, read) in enumerate(steps):
                if anchor + step >= 5:
                    break
                feature, expected = line.read(embeds[row, anchor + step], feature)
                torch.testing.assert_close(fed_on[row, anchor], feature, rtol=0, atol=1e-6)  # angles are float32
                torch.testing.assert_close(read[row, anchor], expected, rtol=0, atol=1e-6)  # angles are float32
                compared += 1
    assert compared == 2 * (4 + 4 + 3 + 2 + 1)


class Counted(TorchDispatchMode):
    """Counts torch operations, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("config", "most"), [(EAGLE1, 64), (EAGLE3, 66)])
def test_a_plain_pass_takes_no_more_operations_than_before_there_were_options(
    config: Eagle1HeadConfig | Eagle3HeadConfig, most: int
) -> None:
    """A drafted token is worth few operations: their number is most of its cost."""
    head = random_head(config)
    cache = head.new_cache(1, 16)
    plan = layout(torch.tensor([[-1]]), torch.tensor([5]), 16)
    embeds, features = torch.randn(1, 1, H), torch.randn(1, 1, H)
    with torch.inference_mode():
        head.advance(embeds, features, plan, cache)  # frequencies are computed once
        plan = layout(torch.tensor([[-1]]), torch.tensor([6]), 16)
        with Counted() as counted:
            head.advance(embeds, features, plan, cache)
    assert 0 < counted.count <= most


def test_padding_on_the_right_changes_nothing() -> None:
    head = random_head(EAGLE3)
    torch.manual_seed(1)
    embeds, features = torch.randn(1, 6, H), torch.randn(1, 6, H)
    with torch.no_grad():
        short = head.unroll(embeds[:, :4], features[:, :4], 2)
        long = head.unroll(embeds, features, 2)
    for step, (a, b) in enumerate(zip(short, long, strict=True)):
        torch.testing.assert_close(a[1][:, : 4 - step], b[1][:, : 4 - step])


def test_more_steps_than_pairs_is_no_error() -> None:
    head = random_head(EAGLE3)
    with torch.no_grad():
        assert len(head.unroll(torch.randn(1, 2, H), torch.randn(1, 2, H), 5)) == 5


def test_each_tapped_layer_is_normed_by_itself() -> None:
    head = random_head(replace(EAGLE3, fc_norm=True))
    taps = torch.randn(3 * H)
    parts = [rms(taps[i * H : (i + 1) * H], head.state_dict()[f"fc_norm.{i}.weight"]) for i in range(3)]
    torch.testing.assert_close(head.fuse(taps), head.fc.weight @ torch.cat(parts))


def test_names_are_those_of_the_published_checkpoints() -> None:
    layer = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {
        f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    norms = {f"{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    plain = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | {f"midlayer.{x}" for x in layer | norms}
    assert set(random_head(EAGLE3).state_dict()) == plain
    both = random_head(replace(EAGLE3, own_embedding=True, fc_norm=True)).state_dict()
    assert set(both) == plain | {"embed_tokens.weight"} | {f"fc_norm.{i}.weight" for i in range(3)}
    one = {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"} | {f"layers.0.{x}" for x in layer}
    assert set(random_head(EAGLE1).state_dict()) == one
    assert "fc.bias" not in random_head(replace(EAGLE1, fc_bias=False)).state_dict()


def test_shapes_are_those_of_the_published_checkpoints() -> None:
    state = random_head(EAGLE3).state_dict()
    assert state["fc.weight"].shape == (H, 3 * H)
    assert state["midlayer.self_attn.q_proj.weight"].shape == (EAGLE3.num_heads * EAGLE3.head_dim, 2 * H)
    assert state["midlayer.self_attn.k_proj.weight"].shape == (EAGLE3.num_kv_heads * EAGLE3.head_dim, 2 * H)
    assert state["lm_head.weight"].shape == (EAGLE3.draft_vocab_size, H)
    assert state["d2t"].dtype == torch.int64
    assert state["t2d"].dtype == torch.bool


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "num_layers = 0 must be at least 1"),
        ({"head_dim": 7}, "head_dim = 7 even"),
        ({"num_kv_heads": 3}, "a multiple of num_kv_heads = 3"),
        ({"windows": (4, 4)}, r"windows = \[4, 4\] must be one size of at least 0 for each layer"),
        ({"windows": (-1,)}, r"windows = \[-1\] must be"),
        ({"windows": (4, 3), "num_layers": 2}, "all windows of a head are of one size"),
    ],
)
@pytest.mark.parametrize("config", [EAGLE1, EAGLE3])
def test_layers_that_cannot_be_are_refused(
    config: Eagle1HeadConfig | Eagle3HeadConfig, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        replace(config, **changes)


@pytest.mark.parametrize("ids", [(0, 1, 1), (), (-1, 0, 1)])
def test_layer_ids_must_be_distinct_layers(ids: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="layer_ids"):
        replace(EAGLE3, layer_ids=ids)


def test_a_draft_vocabulary_is_no_larger_than_the_targets() -> None:
    with pytest.raises(ModelError, match="draft_vocab_size"):
        replace(EAGLE3, draft_vocab_size=VOCAB + 1)


# -- draft vocabulary ------------------------------------------------------------------------------------------------


def test_the_draft_vocabulary_is_the_most_frequent_ids_in_order() -> None:
    d2t, t2d = draft_vocabulary([5, 0, 9, 5, 1, 5], 3)
    assert (d2t + torch.arange(3)).tolist() == [0, 2, 3]  # of the three fives the two lower ids
    assert d2t.tolist() == [0, 1, 1]
    assert t2d.tolist() == [True, False, True, True, False, False]


def test_a_whole_draft_vocabulary_needs_no_mapping() -> None:
    d2t, t2d = draft_vocabulary(torch.randint(0, 9, (VOCAB,)), VOCAB)
    assert not d2t.any()
    assert t2d.all()
    config = replace(EAGLE3, draft_vocab_size=VOCAB)
    assert Eagle3Head.fresh(config, torch.Generator(), vocabulary=(d2t, t2d)).vocabulary is None
    assert random_head(EAGLE3).vocabulary is not None


@pytest.mark.parametrize("size", [0, 7])
def test_a_draft_vocabulary_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ModelError, match="draft vocabulary"):
        draft_vocabulary([1] * 6, size)


# -- fresh heads -----------------------------------------------------------------------------------------------------


def test_a_fresh_head_starts_from_the_targets_rows_and_is_reproducible() -> None:
    vocabulary = draft_vocabulary(torch.arange(VOCAB), EAGLE3.draft_vocab_size)
    target = torch.randn(VOCAB, H)

    def made(seed: int) -> Eagle3Head:
        generator = torch.Generator().manual_seed(seed)
        return Eagle3Head.fresh(EAGLE3, generator, vocabulary=vocabulary, head=target)

    head = made(1)
    assert torch.equal(head.lm_head.weight, target[-EAGLE3.draft_vocab_size :])
    assert torch.equal(head.target_ids, torch.arange(VOCAB)[-EAGLE3.draft_vocab_size :])
    assert torch.equal(head.fc.weight, made(1).fc.weight)
    assert not torch.equal(head.fc.weight, made(2).fc.weight)


def test_a_fresh_head_brings_streams_of_any_size_to_one() -> None:
    """Features begin near the last tapped layer's output over its scale."""
    scale, generator = [3.0, 40.0, 11.0], torch.Generator().manual_seed(0)
    head = Eagle3Head.fresh(EAGLE3, generator, tap_scale=scale, final_norm=torch.full((32,), 1.5))
    streams = [size * torch.randn(500, 32, generator=generator) for size in scale]
    features = head.fuse(torch.cat(streams, -1)).detach()
    assert 0.9 < float(features.pow(2).mean().sqrt()) < 1.4
    assert float(torch.cosine_similarity(features, streams[-1], -1).mean()) > 0.8
    assert torch.equal(head.norm.weight.detach(), torch.full((32,), 1.5))
    loud = Eagle3Head.fresh(EAGLE3, generator).fuse(torch.cat(streams, -1))
    assert float(loud.detach().pow(2).mean().sqrt()) > 10


def test_a_fresh_eagle1_head_may_bring_its_own_embedding() -> None:
    embedding = torch.randn(VOCAB, H)
    head = Eagle1Head.fresh(replace(EAGLE1, own_embedding=True), torch.Generator(), embedding=embedding)
    assert torch.equal(head.embed_tokens.weight, embedding)
    assert not head.fc.bias.any()
