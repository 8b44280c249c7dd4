"""Draft vocabularies of block drafters: wrong maps are tried, and the right one is read from the output head's rows."""

import torch

from foretell import Engine
from foretell.doctor.remap import remapped
from foretell.doctor.variants import variants
from foretell.heads.draft_vocabulary import draft_vocabulary
from foretell.methods.dflash.head import DFlashHead, DFlashHeadConfig
from foretell.methods.medusa.head import head_weight
from foretell.model.hf.adapter import TransformersModel
from tests.model.tiny import VOCAB, tiny_module

SIZE = 20


def made() -> tuple[DFlashHead, Engine]:
    model = TransformersModel(tiny_module("qwen3"))
    config = DFlashHeadConfig(
        32, VOCAB, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=1, block_size=4,
        layer_ids=(0, 2), mask_token_id=VOCAB - 1, draft_vocab_size=SIZE,
    )  # fmt: skip
    maps = draft_vocabulary((torch.arange(VOCAB) * 7) % 11, SIZE)
    head = DFlashHead.fresh(config, model=model, vocabulary=maps, output=head_weight(model))
    return head.requires_grad_(requires_grad=False), Engine(model)


def test_a_map_that_the_rows_contradict() -> None:
    head, engine = made()
    right = head.target_ids.clone()
    assert remapped(head, engine) == []
    head.d2t.zero_()  # the first ids instead
    assert not torch.equal(head.target_ids, right)
    (found,) = remapped(head, engine)
    assert found.fault == "token_mapping"
    assert isinstance(found.head, DFlashHead)
    assert torch.equal(found.head.target_ids, right)
    assert not torch.equal(head.target_ids, right)  # the head itself stays as it is


def test_ids_where_offsets_are_read() -> None:
    head, engine = made()
    right = head.d2t.clone()
    head.d2t += torch.arange(SIZE)
    tried = [each.head for each in variants(head, engine.model.spec) if each.fault == "token_mapping"]
    assert any(isinstance(each, DFlashHead) and torch.equal(each.d2t, right) for each in tried)
