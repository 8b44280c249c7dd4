"""The unmodified transformers model behind the seam: a node's logits are those of a plain forward of its path."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor

from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import Plan, layout
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.attention import MaskRecipe
from foretell.model.llama.shape import read_shape
from foretell.model.target import PassOptions
from tests.model.tiny import ACCEPTED, ARCHITECTURES, BUSHY, WINDOW, Rows, largest_error, plain_logits, tiny_module

EXACT = 1e-4  # of the logits' standard deviation, in float32
LOOSE = {torch.bfloat16: 0.15, torch.float16: 0.02}
K = 2  # the layer that ranges are split at


def rows_of(name: str, **changes: Any) -> Rows:
    """Prefilled rows behind a tiny model."""
    module = tiny_module(name, **changes)
    rows = Rows(TransformersModel(module, name=name), module)
    rows.prefill()
    return rows


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tree_logits_are_path_logits(name: str) -> None:
    """Before and after ragged commits in which side branches move KV."""
    rows = rows_of(name)
    for paths in ACCEPTED:
        tokens, parent = rows.tree()
        output = rows.target.forward(tokens, rows.plan(parent))
        assert output.logits.isfinite().all(), "padding nodes must stay finite"
        assert largest_error(output, rows.expected(tokens, parent)) < EXACT
        rows.accept(tokens, paths)


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_tree_logits_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Within rounding; the negative controls below are five times and more above this bound."""
    rows = rows_of(name, dtype=dtype)
    for paths in ACCEPTED:
        tokens, parent = rows.tree()
        output = rows.target.forward(tokens, rows.plan(parent))
        assert output.logits.dtype == dtype
        assert largest_error(output, rows.expected(tokens, parent)) < LOOSE[dtype]
        rows.accept(tokens, paths)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_span_does_not_matter(name: str) -> None:
    """Attention over the used slots only gives what attention over all of them gives."""
    rows = rows_of(name)
    tokens, parent = rows.tree()
    wide = rows.target.forward(tokens, rows.plan(parent)).logits
    narrow = rows.target.forward(tokens, rows.plan(parent, span=int(rows.length.max()) + len(BUSHY[0]))).logits
    torch.testing.assert_close(narrow, wide, atol=1e-5, rtol=1e-5)


def sees_everything_before(plan: Plan) -> Plan:
    """Wrong: a tree read as if it were a chain."""
    size = plan.ancestry.shape[2]
    return replace(plan, ancestry=torch.ones(size, size, dtype=torch.bool).tril().expand_as(plan.ancestry))


def positions_are_slots(plan: Plan) -> Plan:
    """Wrong: slot taken for position."""
    return replace(plan, positions=plan.slots, tree_positions=plan.slots)


def slots_are_shifted(plan: Plan) -> Plan:
    """Wrong: the tree written one slot too early, over the last committed token."""
    return replace(plan, slots=plan.slots - 1)


@pytest.mark.parametrize("tamper", [sees_everything_before, positions_are_slots, slots_are_shifted])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_negative_control(name: str, tamper: Any) -> None:
    """A wrong mask, position or slot is seen by the equality test, by a wide margin."""
    rows = rows_of(name)
    tokens, parent = rows.tree()
    output = rows.target.forward(tokens, tamper(rows.plan(parent)))
    assert largest_error(output, rows.expected(tokens, parent)) > 0.5


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_negative_control_window_by_slot(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that counts slots instead of positions is seen too."""

    def by_slot(recipe: MaskRecipe, kind: str, plan: Plan) -> Tensor:
        return honest(recipe, kind, positions_are_slots(plan))

    honest = MaskRecipe._mask
    rows = rows_of(name)
    monkeypatch.setattr(MaskRecipe, "_mask", by_slot)
    tokens, parent = rows.tree()
    output = rows.target.forward(tokens, rows.plan(parent))
    assert largest_error(output, rows.expected(tokens, parent)) > 0.1


def test_windows_bite() -> None:
    """The architectures tested with a window would give other logits without it (else those tests prove nothing)."""
    for name, key in (("mistral", "sliding_window"), ("gemma3", "sliding_window"), ("llama4", "attention_chunk_size")):
        tokens = list(range(3, 15))
        narrow, wide = (plain_logits(tiny_module(name, **{key: size}), tokens)[-1] for size in (WINDOW, 100))
        assert (narrow - wide).abs().max() > 0.1 * wide.std(), name


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_prefill_in_chunks(name: str, chunk: int) -> None:
    """A prompt in pieces leaves the KV, and gives the next logits, of a prompt in one piece."""
    whole = rows_of(name)
    pieces = Rows(TransformersModel(whole.module), whole.module)
    pieces.prefill(chunk)
    for row, length in enumerate(whole.length.tolist()):
        for one, other in zip(whole.target.cache.keys, pieces.target.cache.keys, strict=True):
            torch.testing.assert_close(other[row, :, :length], one[row, :, :length], atol=1e-4, rtol=1e-4)
    tokens, parent = whole.tree()
    one = whole.target.forward(tokens, whole.plan(parent))
    other = pieces.target.forward(tokens, pieces.plan(parent))
    torch.testing.assert_close(other.logits[0], one.logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layer_ranges(name: str) -> None:
    """Lower layers node by node, then upper layers once over all nodes: the same as one full pass."""
    rows, twin = rows_of(name), rows_of(name)
    tokens, parent = rows.tree()
    plan = rows.plan(parent)
    full = twin.target.forward(tokens, twin.plan(parent), taps=(K - 1,))
    lower = []
    for i in range(tokens.shape[1]):
        output = rows.target.forward(tokens[:, i : i + 1], plan.nodes(i, i + 1), layers=(0, K))
        assert output.logits is None
        lower.append(output.hidden)
    hidden = torch.cat(lower, dim=1)
    assert full.taps is not None
    assert full.logits is not None
    torch.testing.assert_close(hidden, full.taps, atol=1e-4, rtol=1e-4)
    layers = (K, rows.target.spec.num_layers)
    # Not the tokens of the tree: upper layers must live on hidden alone.
    upper = rows.target.forward(torch.zeros_like(tokens), plan, layers=layers, hidden=hidden)
    torch.testing.assert_close(upper.hidden, full.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(upper.logits, full.logits, atol=1e-4, rtol=1e-4)
    for one, other in zip(rows.target.cache.values, twin.target.cache.values, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_exit_is_the_models_own(name: str) -> None:
    """``logits(hidden)`` of the last residual is what the pass itself gave, scales and caps included."""
    rows = rows_of(name)
    tokens, parent = rows.tree()
    output = rows.target.forward(tokens, rows.plan(parent))
    torch.testing.assert_close(rows.target.model.logits(output.hidden), output.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "norm"),
    [("llama", "model.norm"), ("gpt2", "transformer.ln_f"), ("gemma2", "model.norm"), ("cohere", "model.norm")],
)
def test_taps_and_early_exit(name: str, norm: str) -> None:
    """Taps are transformers' hidden states shifted by one, in the order asked; an early exit is norm and head."""
    module = tiny_module(name)
    model = TransformersModel(module)
    call: Any = module
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        states = call(input_ids=tokens, output_hidden_states=True).hidden_states
    plan = layout(torch.arange(-1, 11)[None], torch.zeros(1, dtype=torch.int64), 16)
    cache = model.new_cache(1, 16)
    output = model.forward(tokens, plan, cache, PassOptions(taps=(2, 0)))
    assert output.taps is not None
    torch.testing.assert_close(output.taps, torch.cat((states[3], states[1]), dim=-1), atol=1e-4, rtol=1e-4)
    ranged = model.forward(tokens, plan, cache, PassOptions(layers=(0, 3), taps=(0, 2)))
    torch.testing.assert_close(ranged.taps, torch.cat((states[1], states[3]), dim=-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ranged.hidden, states[3], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        expected = module.lm_head(module.get_submodule(norm)(states[3]))
    if name == "gemma2":
        cap = module.config.final_logit_softcapping
        expected = torch.tanh(expected / cap) * cap
    if name == "cohere":
        expected = expected * module.config.logit_scale
    torch.testing.assert_close(model.logits(states[3]).detach(), expected, atol=1e-4, rtol=1e-4)


def test_logits_follow_the_callers_grad_mode() -> None:
    """A draft head can be trained through the target's exit; a pass itself never builds a graph."""
    rows = rows_of("llama")
    hidden = torch.randn(1, 2, 32, requires_grad=True)
    rows.target.model.logits(hidden).square().sum().backward()
    assert hidden.grad.abs().max() > 0
    tokens, parent = rows.tree()
    assert not rows.target.forward(tokens, rows.plan(parent)).hidden.requires_grad


def test_no_head_means_no_head() -> None:
    """A pass without logits does not run the head, and changes nothing else."""
    rows = rows_of("llama")
    calls = []
    module: Any = rows.module
    module.lm_head.register_forward_hook(lambda *args: calls.append(1))
    tokens, parent = rows.tree()
    without = rows.target.forward(tokens, rows.plan(parent), head=False)
    assert without.logits is None
    assert not calls
    within = rows.target.forward(tokens, rows.plan(parent))
    assert calls == [1]
    torch.testing.assert_close(without.hidden, within.hidden, atol=0, rtol=0)


def test_the_module_is_left_as_it_was() -> None:
    """No hook and no replaced forward survives a pass, not even one that fails."""
    rows = rows_of("llama")
    layers: Any = rows.module.get_submodule("model.layers")
    tokens, parent = rows.tree()
    rows.target.forward(tokens, rows.plan(parent), layers=(0, 2), taps=(0, 1))
    with pytest.raises(RuntimeError):
        rows.target.forward(tokens, rows.plan(parent), layers=(2, 4), hidden=torch.zeros(3, 7, 31))
    assert all(not layer._forward_hooks and "forward" not in layer.__dict__ for layer in layers)
    assert largest_error(rows.target.forward(tokens, rows.plan(parent)), rows.expected(tokens, parent)) < EXACT


def test_ranges_under_accelerate_hooks() -> None:
    """Accelerate keeps its forward where layer ranges put theirs: both must live together."""
    module = tiny_module("llama")
    layers: Any = module.get_submodule("model.layers")
    for layer in layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    hooked = [layer.forward for layer in layers]
    rows = Rows(TransformersModel(module), module)
    rows.prefill()
    tokens, parent = rows.tree()
    plan = rows.plan(parent)
    hidden = rows.target.forward(tokens, plan, layers=(0, K)).hidden
    output = rows.target.forward(tokens, plan, layers=(K, 4), hidden=hidden)
    assert largest_error(output, rows.expected(tokens, parent)) < EXACT
    assert [layer.forward for layer in layers] == hooked


def test_a_pass_writes_only_its_own_slots() -> None:
    """Committed slots, and slots behind the tree, keep their exact bytes; padding nodes included."""
    rows = rows_of("gemma3")
    cache = rows.target.cache
    before = [memory.clone() for memory in (*cache.keys, *cache.values)]
    tokens, parent = rows.tree()
    rows.target.forward(tokens, rows.plan(parent))
    for memory, old in zip((*cache.keys, *cache.values), before, strict=True):
        for row, length in enumerate(rows.length.tolist()):
            assert torch.equal(memory[row, :, :length], old[row, :, :length])
            assert torch.equal(memory[row, :, length + 7 :], old[row, :, length + 7 :])
            assert not torch.equal(memory[row, :, length], old[row, :, length])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_keep_rows(name: str) -> None:
    """Rows that are kept, in a new order, go on as if nothing had happened."""
    rows = rows_of(name)
    rows.keep([2, 0])
    for paths in ([[0, 2, 5], [0]], [[0, 1], [0, 2, 4]]):
        tokens, parent = rows.tree(BUSHY[:2])
        output = rows.target.forward(tokens, rows.plan(parent))
        assert largest_error(output, rows.expected(tokens, parent)) < EXACT
        rows.accept(tokens, paths)
    assert rows.target.cache.num_rows == 2


def test_spec() -> None:
    """The specification counts what a decode pass reads: no untied embedding, a tied one once."""
    llama = tiny_module("llama")
    spec = TransformersModel(llama, name="somebody/llama").spec
    total = sum(p.numel() for p in llama.parameters())
    assert spec.weight_bytes == 4 * (total - 61 * 32)
    assert (spec.name, spec.architecture, spec.implementation) == ("somebody/llama", "LlamaForCausalLM", "transformers")
    assert (spec.vocab_size, spec.num_layers, spec.hidden_size, spec.max_positions) == (61, 4, 32, 128)
    assert spec.eos_token_ids == (2,)
    qwen = tiny_module("qwen3", dtype=torch.bfloat16, eos_token_id=[2, 5])
    spec = TransformersModel(qwen).spec
    assert spec.weight_bytes == 2 * sum(p.numel() for p in qwen.parameters())
    assert spec.dtype == torch.bfloat16
    assert spec.eos_token_ids == (2, 5)


def test_longrope_context_ends_before_its_switch() -> None:
    """Past that point transformers rescales all rows of a pass at once, so a row's logits would depend on others."""
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    module = tiny_module("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    spec = TransformersModel(module).spec
    assert spec.max_positions == 64
    assert spec.cut.startswith("of the 128 that it states: a longer text has LongRoPE's other frequencies")
    assert read_shape(module.config).spec(
        name="x", implementation="lean", dtype=torch.float32, device=torch.device("cpu")
    ).cut == spec.cut  # fmt: skip
    assert spec.context() == spec.context(64) == f"64 ({spec.cut})"
    assert spec.context(10) == "10", "a limit that somebody has set has no other reason"
    assert TransformersModel(tiny_module("llama")).spec.context().isdigit()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"layers": (0, 5)}, "are not a range of 0 to 4"),
        ({"layers": (2, 2), "hidden": torch.zeros(3, 7, 32)}, "no layer would run"),
        ({"layers": (2, 4)}, "hidden must be given"),
        ({"hidden": torch.zeros(3, 7, 32)}, "hidden must be given"),
        ({"layers": (0, 2), "taps": (2,)}, "tap 2"),
    ],
)
def test_ranges_that_cannot_be(options: dict[str, Any], complaint: str) -> None:
    """A wrong range or tap is a ConfigError that names it."""
    rows = rows_of("llama")
    tokens, parent = rows.tree()
    with pytest.raises(ConfigError, match=complaint):
        rows.target.forward(tokens, rows.plan(parent), **options)


def test_the_probe_refuses_a_model_with_positions_of_its_own() -> None:
    """A model that ignores the positions it is given is found out at loading, whatever its configuration says."""
    module = tiny_module("llama")
    rotary: Any = module.get_submodule("model.rotary_emb")
    honest = rotary.forward
    rotary.forward = lambda x, position_ids: honest(x, torch.arange(x.shape[1])[None].expand_as(position_ids))
    with pytest.raises(ModelError, match=r"(?s)LlamaForCausalLM over a tree differ from plain decoding"):
        TransformersModel(module)


def test_flash_attention_is_refused() -> None:
    """An attention implementation that takes no 4-D mask is named, and the way out with it."""
    module = tiny_module("llama")
    module.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ModelError, match=r"flash_attention_2.*set_attn_implementation\('sdpa'\)"):
        TransformersModel(module)


def test_overflow_is_refused() -> None:
    """Logits that are not finite are refused with the dtype's name."""
    module: Any = tiny_module("llama", dtype=torch.float16)
    with torch.no_grad():
        module.lm_head.weight.fill_(60000.0)
    with pytest.raises(ModelError, match=r"not finite in torch\.float16"):
        TransformersModel(module)
