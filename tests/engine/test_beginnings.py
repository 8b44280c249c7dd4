"""Rows whose prompts begin alike: which share slots, and that no token changes by it."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.checkpoints.lora import read_lora
from foretell.engine.beginnings import PIECE, beginnings, shared
from foretell.methods.draft_model.drafter import DraftModel
from foretell.model.cache import Shared
from foretell.model.llama.run.native import NativeModel
from tests.model.adapters import write_adapter
from tests.model.tiny import VOCAB, tiny_module


def test_groups_spare_as_many_slots_as_they_can() -> None:
    """Against all ways of parting a few rows, of which each group shares what all its texts begin with."""
    owner = (None, None)

    def spared(texts: list[list[int]], groups: list[list[int]]) -> int:
        total = 0
        for rows in groups:
            pieces = [
                [texts[row][at : at + PIECE] for at in range(0, len(texts[row]) // PIECE * PIECE, PIECE)]
                for row in rows
            ]
            same = 0
            while all(len(each) > same and each[same] == pieces[0][same] for each in pieces):
                same += 1
            total += (len(rows) - 1) * same * PIECE
        return total

    def partings(rows: list[int]) -> list[list[list[int]]]:
        if not rows:
            return [[]]
        return [
            way
            for rest in partings(rows[1:])
            for way in (
                [[rows[0]], *rest],
                *([*rest[:i], [rows[0], *rest[i]], *rest[i + 1 :]] for i in range(len(rest))),
            )
        ]

    for seed in range(30):
        random = Random(seed)
        texts = [
            [each for _ in range(random.randint(0, 4)) for each in [random.randint(0, 1)] * PIECE] + [7]
            for _ in range(5)
        ]
        found = shared([beginnings(text, owner) for text in texts])
        rows = [list(group) for group, _ in found]
        assert sum((len(group) - 1) * slots for group, slots in found) == spared(texts, rows)
        assert spared(texts, rows) == max(spared(texts, way) for way in partings(list(range(5))))
    text = [5] * 600
    assert len(beginnings(text, owner)) == 2
    assert shared([beginnings(text, ("a", None)), beginnings(text, ("b", None)), beginnings(text, ("a", "lora"))]) == ()


def test_texts_are_those_of_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tree of guesses, of two adapters, as rows come and go; beginnings that are computed, and that are kept."""
    module = tiny_module("llama", head_dim=16, eos_token_id=None, max_position_embeddings=1024)
    model = NativeModel.from_hf(module)
    model.add_loras({"one": read_lora(write_adapter(tmp_path / "one", module.state_dict(), seed=1, rank=2))})
    text = torch.randint(3, VOCAB, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [
        Request(
            text[: PIECE * (1 + at % 2)] + text[600 + 5 * at : 640],  # from 40 tokens to none
            SamplingParams(temperature=float(at % 3 == 0), seed=at, max_new_tokens=6 + 5 * (at % 3)),
            lora=(None, "one")[at // 2 % 2],
        )
        for at in range(10)
    ]
    alone = [Engine(model, speculative="none").generate_batch([one])[0].token_ids for one in asked]
    passes: list[Shared] = []

    def seen(tokens: Any, plan: Any, cache: Any, *given: Any, forward: Any = model.forward) -> Any:
        passes.append(cache.shared)
        for rows, slots in cache.shared:
            assert len({cache.loras[row] for row in rows}) == 1
            for memory in (*cache.keys, *cache.values):
                read = min(slots, *plan.length[list(rows)].tolist())
                assert all(torch.equal(memory[row, :, :read], memory[rows[0], :, :read]) for row in rows)
        return forward(tokens, plan, cache, *given)

    monkeypatch.setattr(model, "forward", seen)
    config = {"method": "draft_model", "num_speculative_tokens": 3, "shape": "static/branching=2x2x1"}
    draft = DraftModel(NativeModel.from_hf(module))
    engine = Engine(model, speculative=config, method=draft, prefix_memory_gib=0.1)
    for _ in range(2):
        found = engine.generate_batch(asked, batch_size=6)
        assert [one.token_ids for one in found] == alone
        assert {slots for groups in passes for _, slots in groups} == {PIECE, 2 * PIECE}
        assert any(len(groups) > 1 for groups in passes)
        passes.clear()
