"""Draft vocabularies: wrong maps are tried, and the right one is read from the output head's rows."""

import torch

from foretell import Engine
from foretell.doctor.remap import remapped
from foretell.doctor.variants import variants
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.methods.eagle.eagle3 import Eagle3Head, Eagle3HeadConfig
from foretell.methods.medusa.head import head_weight
from foretell.model.hf.adapter import TransformersModel
from tests.model.tiny import VOCAB, tiny_module

SIZE = 20


def made() -> tuple[Eagle3Head, Engine]:
    model = TransformersModel(tiny_module("qwen3"))
    config = Eagle3HeadConfig(
        32, VOCAB, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, layer_ids=(0, 1, 2),
        draft_vocab_size=SIZE,
    )  # fmt: skip
    maps = draft_vocabulary((torch.arange(VOCAB) * 7) % 11, SIZE)
    head = Eagle3Head.fresh(config, torch.Generator().manual_seed(0), vocabulary=maps)
    head.lm_head.weight.data = head_weight(model)[head.target_ids].clone()
    return head.requires_grad_(requires_grad=False), Engine(model)


def test_a_map_that_the_rows_contradict() -> None:
    head, engine = made()
    right = head.target_ids.clone()
    assert remapped(head, engine) == []
    head.d2t.zero_()  # the first ids instead
    assert not torch.equal(head.target_ids, right)
    (found,) = remapped(head, engine)
    assert found.fault == "token_mapping"
    assert isinstance(found.head, Eagle3Head)
    assert torch.equal(found.head.target_ids, right)
    assert not torch.equal(head.target_ids, right)  # the head itself stays as it is


def test_ids_where_offsets_are_read() -> None:
    head, engine = made()
    right = head.d2t.clone()
    head.d2t += torch.arange(SIZE)
    tried = [each.head for each in variants(head, engine.model.spec) if each.fault == "token_mapping"]
    assert any(isinstance(each, Eagle3Head) and torch.equal(each.d2t, right) for each in tried)
