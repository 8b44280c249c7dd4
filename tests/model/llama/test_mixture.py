"""Mixtures of experts: the router's choice, checkpoints' layouts, what a pass reads, and equal texts with guesses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foretell import Engine, Request, SamplingParams
from foretell.checkpoints.weights import ModuleWeights, SafetensorsWeights
from foretell.core.tree import layout
from foretell.draft.none import NoMethod, NoneConfig
from foretell.draft.prediction import Prediction, PredictionConfig
from foretell.engine.calibrate import Bench
from foretell.engine.speculation import Speculation
from foretell.model.llama import mixture
from foretell.model.llama.mixture import ExpertWeights, Mixture, expert_names, mixture_of, route
from foretell.model.llama.run import native, pack as experts
from foretell.model.llama.run.lean import LeanModel
from foretell.model.llama.run.native import NativeModel
from foretell.model.llama.shape import read_shape
from foretell.model.target import CausalModel
from tests.model.llama.family import CAPACITY, SPARSE, VOCABULARY, chain, make_model

CPU = torch.device("cpu")
REASON = native.supports(make_model("qwen3moe").config, torch.float32, CPU)
needs_native = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def tokens_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model: CausalModel, tokens: Tensor, width: int | None = None) -> Tensor:
    """[B, n, V], so many tokens a pass."""
    cache, (rows, count), seen = model.new_cache(tokens.shape[0], CAPACITY), tokens.shape, []
    for start in range(0, count, width or count):
        part = tokens[:, start : start + (width or count)]
        plan = layout(chain(*part.shape), torch.full((rows,), start), CAPACITY)
        logits = model.forward(part, plan, cache).logits
        assert logits is not None
        seen.append(logits)
    return torch.cat(seen, 1)


def twins(module: Any) -> list[CausalModel]:
    return [LeanModel.from_hf(module), *([] if REASON else [NativeModel.from_hf(module)])]


def by_hand(module: Any, layer: int, x: Tensor) -> Tensor:
    """[n, H] of a sparse layer of Qwen3-MoE for normed rows: every expert on every row, most of them with weight 0."""
    state, sizes = module.state_dict(), mixture_of(module.config)
    prefix = f"model.layers.{layer}.mlp."
    shares = torch.softmax(x @ state[f"{prefix}gate.weight"].T, -1)
    kept = shares >= shares.sort(-1, descending=True).values[:, sizes.num_chosen - 1 : sizes.num_chosen]
    shares = torch.where(kept, shares, 0.0)
    if sizes.sums_over_chosen:
        shares = shares / shares.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in range(sizes.num_experts):
        gate, up = (x @ state[f"{prefix}experts.gate_up_proj"][expert].T).chunk(2, -1)
        total += shares[:, expert, None] * ((F.silu(gate) * up) @ state[f"{prefix}experts.down_proj"][expert].T)
    return total


@pytest.mark.parametrize("kind", ["qwen3moe", "qwen3moe-dense-between"])
def test_a_layer_is_the_sum_over_all_experts(kind: str) -> None:
    """Against the formula, with weights that are renormalised and that are not; the module is no oracle of itself here."""
    module = make_model(kind, num_hidden_layers=1, mlp_only_layers=[])
    tokens = tokens_of(1, 9)
    with torch.no_grad():
        seen: list[tuple[Tensor, Tensor]] = []
        hook = module.model.layers[0].mlp.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        expected = module(tokens, use_cache=False).logits
        hook.remove()
        torch.testing.assert_close(by_hand(module, 0, seen[0][0][0]), seen[0][1][0], atol=1e-5, rtol=1e-5)
    for model in twins(module):
        torch.testing.assert_close(logits_of(model, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chosen", [1, 2])
def test_of_equal_logits_the_lower_number_is_read(chosen: int) -> None:
    """A router of zeros: all experts tie. Those behind the first change nothing, at any width; the first do (control)."""
    module = make_model("qwen3moe", num_experts_per_tok=chosen)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.mlp.gate.weight.zero_()
    tokens = tokens_of(2, 11)
    before = [logits_of(model, tokens) for model in twins(module)]
    with torch.no_grad():
        for layer in module.model.layers:
            layer.mlp.experts.gate_up_proj[chosen:] = 7.0
            layer.mlp.experts.down_proj[chosen:] = 7.0
    for was, model in zip(before, twins(module), strict=True):
        assert torch.equal(logits_of(model, tokens), was)
        if isinstance(model, NativeModel):
            assert all(torch.equal(logits_of(model, tokens, width), was) for width in (1, 3))
    with torch.no_grad():
        module.model.layers[0].mlp.experts.down_proj[chosen - 1] += 1.0
    assert all(not torch.equal(logits_of(m, tokens), was) for was, m in zip(before, twins(module), strict=True))


def test_route_by_example() -> None:
    """Largest first, of equal ones the lower number; weights of all, or of the chosen."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 3.0, 3.0]])
    for over_chosen in (False, True):
        sizes = Mixture(4, 2, 8, 0, over_chosen, frozenset((0,)))
        chosen, weights = route(logits, sizes)
        assert chosen.tolist() == [[1, 2], [0, 2]]
        shares = torch.softmax(logits, -1).gather(-1, chosen)
        torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True) if over_chosen else shares)


def test_route_with_a_bias_and_groups_by_example() -> None:
    """The bias and the groups change the choice and no weight; weights sum to the factor, or are the scores times it."""
    scores = torch.tensor([[0.9, 0.2, 0.6, 0.5, 0.8, 0.1]])
    sizes = Mixture(6, 2, 8, 0, True, frozenset((0,)), is_sigmoid=True, epsilon=0.1, scale=2.0)
    for bias, groups, chosen, over in (
        (None, (1, 1), [0, 4], True),
        (None, (1, 1), [0, 4], False),
        ([0.0, 0.0, 0.0, 0.45, 0.0, 0.0], (1, 1), [3, 0], True),
        (None, (3, 1), [0, 1], True),  # sums of two: 1.1, 1.1, 0.9: of equal ones the first
        ([0.0, 0.0, 0.0, 0.05, 0.0, 0.0], (3, 1), [2, 3], False),
        (None, (3, 2), [0, 2], True),
    ):
        some = replace(sizes, groups=groups, sums_over_chosen=over, has_bias=bias is not None)
        found, weights = route(scores.logit(), some, None if bias is None else torch.tensor(bias))
        assert found.tolist() == [chosen], (bias, groups)
        own = scores[:, chosen]
        torch.testing.assert_close(weights, own / (own.sum() + 0.1) * 2.0 if over else own * 2.0)


@needs_native
@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0.5}, {"scale": 1.0}, {"sums_over_chosen": False}, {"groups": (2, 1)}, {"groups": (1, 1)},
        {"group_best": 1},
        {"has_bias": False}, {"is_sigmoid": False, "has_bias": False},
        {"is_sigmoid": False, "has_bias": False, "sums_over_chosen": False}, {"num_chosen": 1},
    ],
    ids=str,
)  # fmt: skip
def test_every_field_of_a_router_means_the_same_in_c(change: dict[str, Any]) -> None:
    module = make_model("glm4moe")
    shape, tokens = read_shape(module.config), tokens_of(2, 17)
    assert shape.mixture is not None
    other = replace(shape, mixture=replace(shape.mixture, **change))
    dtype, source = torch.float32, ModuleWeights(module)
    lean = logits_of(LeanModel(other, source, dtype=dtype, device=CPU, name="x"), tokens)
    torch.testing.assert_close(
        logits_of(NativeModel(other, source, dtype=dtype, name="x"), tokens), lean, atol=1e-4, rtol=1e-4
    )
    with torch.no_grad():
        assert not torch.allclose(lean, module(tokens, use_cache=False).logits, atol=1e-3)  # the change is seen


def test_sigmoid_routers_multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 too, as the module does: logits that were rounded would choose other experts."""
    module, seen, said = make_model("glm4moe").bfloat16(), list[Tensor](), list[Tensor]()
    model, layer = LeanModel.from_hf(module), module.model.layers[1].mlp
    hook = layer.gate.register_forward_hook(lambda _, args, out: seen.extend((args[0], out[0])))
    with torch.no_grad():
        module(tokens_of(1, 30), use_cache=False)
    hook.remove()

    def watched(logits: Tensor, sizes: Mixture, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        said.append(logits)
        return route(logits, sizes, bias)

    monkeypatch.setattr(experts, "route", watched)
    mlp = model._layers[1].mlp
    mlp(seen[0])
    torch.testing.assert_close(said[0], seen[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(said[0].bfloat16().float(), seen[1], atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("kind", ["glm4moe", "granitemoeshared"])
def test_routers_in_c_are_those_in_torch(kind: str) -> None:
    """An expert that changes changes the bits of the rows for which torch's router chooses it, and no others."""
    module = make_model(kind, num_hidden_layers=1, **({"first_k_dense_replace": 0} if kind == "glm4moe" else {}))
    sizes, tokens, inputs = mixture_of(module.config), tokens_of(1, 40, seed=3), list[Tensor]()
    assert sizes is not None
    block = module.model.layers[0].mlp if kind == "glm4moe" else module.model.layers[0].block_sparse_moe
    hook = block.register_forward_hook(lambda _, args, out: inputs.append(args[0]))
    with torch.no_grad():
        module(tokens, use_cache=False)
    hook.remove()
    router = block.gate if kind == "glm4moe" else block.router
    bias = router.e_score_correction_bias if kind == "glm4moe" else None
    chosen = route(inputs[0][0] @ router.weight.T, sizes, bias)[0]
    before = logits_of(NativeModel.from_hf(module), tokens)[0]
    for expert in range(sizes.num_experts):
        kept = block.experts.down_proj[expert].clone()
        with torch.no_grad():
            block.experts.down_proj[expert] += 1.0
            after = logits_of(NativeModel.from_hf(module), tokens)[0]
            block.experts.down_proj[expert] = kept
        assert torch.equal((after != before).any(-1), (chosen == expert).any(-1)), expert


@pytest.mark.parametrize("kind", SPARSE)
def test_a_checkpoint_on_disk_is_the_module(tmp_path: Path, kind: str) -> None:
    """transformers writes experts one by one, under each family's own names, or in stacks: the same tensors come back."""
    module = make_model(kind)
    module.save_pretrained(tmp_path)
    sizes = mixture_of(module.config)
    sources = [ExpertWeights(one, sizes) for one in (ModuleWeights(module), SafetensorsWeights(tmp_path))]
    layer = min(sizes.layers)
    names = [*expert_names(layer, 2, sizes).values(), *mixture.router_names(layer, sizes)]
    names += expert_names(layer, None, sizes).values() if sizes.shared_inner else []
    for name in names:
        first, second = (source.read(name, torch.float32, CPU) for source in sources)
        assert tuple(first.shape) == sources[0].shape(name) == sources[1].shape(name)
        assert torch.equal(first, second)
        assert torch.equal(sources[1].reader(name)(0, 1), first[:1])
    tokens = tokens_of(1, 7)
    loaded: list[CausalModel] = [LeanModel.load(tmp_path, dtype=torch.float32)]
    loaded += [] if REASON else [NativeModel.load(tmp_path, dtype=torch.float32)]
    for one, other in zip(loaded, twins(module), strict=True):
        assert torch.equal(logits_of(one, tokens), logits_of(other, tokens))
        assert one.spec.weight_bytes == other.spec.weight_bytes


def test_a_pass_is_counted_with_the_experts_of_one_token() -> None:
    module = make_model("qwen2moe")  # 3 layers, the second sparse: 6 experts of 40, 2 read, one shared of 56
    attention, dense, head = 4 * 64 * 64 - 2 * 64 * 32, 3 * 64 * 72, 61 * 64
    sparse = (6 + 1) * 64 + 3 * 64 * (2 * 40 + 56)
    for model in twins(module):
        assert model.spec.weight_bytes == 4 * (3 * attention + 2 * dense + sparse + head)


@pytest.mark.parametrize("rows", [1, 3])
def test_lean_reads_no_experts_for_padding(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """One token a row: at most two experts each, whatever kernels pad to."""
    model, seen = LeanModel.from_hf(make_model("qwen3moe")), []

    def watched(logits: Tensor, sizes: Mixture, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return route(logits, sizes, bias)

    monkeypatch.setattr(experts, "route", watched)
    logits_of(model, tokens_of(rows, 1))
    assert seen == [rows] * 3


@needs_native
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_routers_are_not_rounded(weights: str) -> None:
    model = NativeModel.from_hf(make_model("qwen2moe"), weights=weights)
    sizes = model.shape.mixture
    assert sizes is not None
    for name in mixture.router_names(1, sizes):
        assert model.matrices.held[name].format == 0
    assert model.matrices.held[expert_names(1, 0, sizes)["gate"]].format > 1
    assert set(model.spec.weights.split("+")) <= {"int8", "int4"}


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("qwen3moe", {"num_experts_per_tok": 7}, "a token reads 7 of 6 experts"),
        ("qwen3moe", {"num_experts": 2000}, "2000 experts a layer; at most 1024"),
        ("glm4moe", {"topk_group": 5}, "8 experts in 4 groups, of which 5 can be chosen from"),
        ("glm4moe", {"head_dim": 18}, "9 of 18 values of a head are rotated, an odd number"),
        ("glm4moe", {"n_group": 0}, "8 experts in 0 groups, of which 2 can be chosen from"),
        ("glm4moe", {"n_group": 8}, "8 experts in 8 groups, of which 2 can be chosen from"),
        ("glm4moe", {"topk_group": 1}, "a token reads 3 of 2 experts"),
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv 3.0"),
    ],
)
def test_what_is_not_covered_is_refused(kind: str, change: dict[str, Any], reason: str) -> None:
    config = make_model(kind).config
    for key, value in change.items():
        setattr(config, key, value)
    said = native.supports(config, torch.float32, CPU)
    assert said is not None
    assert reason in said


@needs_native
@pytest.mark.parametrize("kind", ["qwen3moe", "qwen2moe", "gptoss"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_with_guesses_are_those_without(kind: str, temperature: float) -> None:
    """Chains and trees, alone and in a batch, with the drafters that need no weights and with a draft model."""
    model = NativeModel.from_hf(make_model(kind))
    prompts = [tokens_of(5, seed=1).tolist() * 3, tokens_of(9, seed=2).tolist()]
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=14, temperature=temperature, seed=number, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    plain = Engine(model, speculative="none")
    expected = [plain.generate(one.prompt, one.params).token_ids for one in requests]
    drafted = 0
    for config in ({"method": "suffix"}, {"method": "ngram"}):
        engine = Engine(model, speculative={"num_speculative_tokens": 4, **config})
        for size in (1, 2):
            found = engine.generate_batch(requests, batch_size=size)
            assert [one.token_ids for one in found] == expected, config
            drafted += sum(one.num_draft_tokens for one in found)
    assert drafted > 20


@needs_native
def test_long_prompts_are_grouped_in_parts() -> None:
    """More rows than are grouped at a time (512): the bits of single tokens, with a residual scale and without."""
    for kind in ("qwen2moe", "granitemoe", "gptoss"):
        model = NativeModel.from_hf(make_model(kind))
        text = tokens_of(9, 60, seed=4)
        whole = logits_of(model, text)
        assert torch.equal(whole[:, :12], logits_of(model, text[:, :12], 1))
        assert torch.equal(whole[8:, 40:], logits_of(model, text[8:])[:, 40:])


def test_measured_steps_read_more_experts_than_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``auto`` measures are passes whose nodes hold different tokens: their experts are in the costs."""
    model, read = LeanModel.from_hf(make_model("qwen3moe")), []

    def watched(logits: Tensor, sizes: Mixture, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        found = route(logits, sizes, bias)
        read.append(len(found[0].unique()))
        return found

    monkeypatch.setattr(experts, "route", watched)
    config = PredictionConfig(num_speculative_tokens=4)
    plain = Speculation(NoneConfig(), NoMethod(), NoneConfig().load_verifier(model))
    bench = Bench(model, plain, [Speculation(config, Prediction(), config.load_verifier(model))])

    def experts_of(method: str, depth: int) -> list[int]:
        bench.step(method, 1, depth)
        read.clear()
        assert bench.step(method, 1, depth).rows == 1 + depth
        return read.copy()

    assert set(experts_of("none", 0)) == {2}
    assert sum(experts_of("prediction", 4)) > 3 * 3  # of three layers
