"""Families that make positions, masks or biases of their own: the plan's are given to their layers instead."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel

from foretell.core.errors import ConfigError, ModelError
from foretell.core.tree import Plan
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.attention import MaskRecipe
from foretell.model.hf.own import Alibi, LocalAttention, OwnAttention, Positions, RowBiases
from tests.model.survey import check_logits
from tests.model.tiny import COMMON, Rows, largest_error, plain_logits
from tests.model.zoo import zoo_module

KINDS = {"bloom": Alibi, "mpt": RowBiases, "gpt_neo": LocalAttention, "bart": Positions, "blenderbot": Positions}


def falcon(implementation: str) -> PreTrainedModel:
    """Falcon with ALiBi, as in Falcon-RW."""
    torch.manual_seed(5)
    options = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    config = FalconConfig(**options, alibi=True, new_decoder_architecture=False, multi_query=False, bias=True)
    config._attn_implementation = implementation
    module: PreTrainedModel = FalconForCausalLM(config)
    return module.eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_falcon_with_alibi(implementation: str) -> None:
    """Its biases are rounded to bfloat16 and, in eager attention, added twice: both are its own and are kept."""
    module = falcon(implementation)
    check_logits(TransformersModel(module), module, branches=True)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_replacement_the_model_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what the family makes by itself would be wrong in a tree, and the probe sees it."""
    module = zoo_module(kind)
    assert [type(own) for own in TransformersModel(module)._owns] == [KINDS[kind]]
    monkeypatch.setattr("foretell.model.hf.adapter.own_arguments", lambda *args: [])
    with pytest.raises(ModelError, match=r"masks of its own|cannot be run over a tree"):
        TransformersModel(module)


@pytest.mark.parametrize("own", [Positions, Alibi, LocalAttention, RowBiases])
def test_the_module_is_left_as_it_was(own: type[OwnAttention]) -> None:
    """After passes, one of them failing, the model alone gives the logits that it gave before, and no hook is left."""
    kind = next(kind for kind, kinds in KINDS.items() if kinds is own)
    module: Any = zoo_module(kind)
    before = plain_logits(module, list(range(20, 32)))
    rows = Rows(TransformersModel(module), module)
    rows.prefill()
    tokens, parent = rows.tree()
    with pytest.raises((RuntimeError, IndexError)):
        rows.target.forward(tokens + 1000, rows.plan(parent))
    assert torch.equal(plain_logits(module, list(range(20, 32))), before)
    assert not any(x._forward_hooks or x._forward_pre_hooks or "forward" in x.__dict__ for x in module.modules())


def test_local_attention_by_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that counts slots, not positions, gives other logits."""
    module = zoo_module("gpt_neo")
    rows = Rows(TransformersModel(module), module)
    rows.prefill()
    tokens, parent = rows.tree()
    plan = rows.plan(parent)
    expected = rows.expected(tokens, parent)
    assert largest_error(rows.target.forward(tokens, plan), expected) < 1e-4
    honest = MaskRecipe._mask

    def by_slot(recipe: MaskRecipe, kind: str, plan: Plan) -> Tensor:
        return honest(recipe, kind, replace(plan, positions=plan.slots))

    monkeypatch.setattr(MaskRecipe, "_mask", by_slot)
    assert largest_error(rows.target.forward(tokens, plan), expected) > 0.01


def test_positions_of_the_roberta_family_begin_behind_its_padding() -> None:
    """Two rows of the table are not positions: they are neither used nor counted as context."""
    model = TransformersModel(zoo_module("roberta"))
    assert model.spec.max_positions == 128 - 1
    assert model._first_position == 1  # pad_token_id 0


def test_shared_keys_and_values_run_whole() -> None:
    """Gemma 4's upper layers read what lower ones kept in the same pass: a part of the layers is refused with a reason."""
    module = zoo_module("gemma4_text")
    rows = Rows(TransformersModel(module), module)
    rows.prefill()
    tokens, parent = rows.tree()
    assert [len(key[0]) for key in rows.target.cache.keys] == [2, 2, 0, 0], "shared layers take no memory"
    with pytest.raises(ConfigError, match="it runs whole"):
        rows.target.forward(tokens, rows.plan(parent), layers=(0, 2))


def test_doge_ends_where_it_begins_to_choose_keys() -> None:
    """Equal tokens tie in its choice, so beyond the window a text would depend on slots."""
    module: Any = zoo_module("doge")
    module.config.keep_window_size = 100
    assert TransformersModel(module).spec.max_positions == 100
