"""Hidden states reach who asked for them: every position once, in order, equal to a plain pass over the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from foretell import Engine
from foretell.draft.base import Commit, Context, Drafter, PromptChunk
from foretell.engine.state import Tapping
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.model.prefill import feed
from foretell.model.target import Target
from foretell.verify.base import Evidence
from foretell.verify.exact import Coupled
from tests.engine.harness import ToyTokenizer, mixed_requests, outcomes, plain, table
from tests.model.table import TableLM

LAYERS = (1, 0)


def test_each_gets_its_own_layers_in_its_own_order() -> None:
    taps = torch.arange(24.0).view(1, 2, 12)  # three layers of four channels
    tapping = Tapping(drafter=(5, 2), verifier=(7, 5))
    assert tapping.layers == (5, 2, 7)
    assert torch.equal(tapping.for_drafter(taps), taps[..., :8])  # type: ignore[arg-type]
    assert torch.equal(tapping.for_verifier(taps), taps[..., [8, 9, 10, 11, 0, 1, 2, 3]])  # type: ignore[arg-type]
    assert Tapping(verifier=(3,)).for_drafter(taps) is None
    assert Tapping().layers == ()
    assert Tapping(drafter=(1, 2, 3)).for_drafter(taps) is taps, "nothing is copied where all of it is asked for"


class Spy(ModelDrafter):
    """Keeps every hidden state it is told, by row and position."""

    def __init__(self, model: TableLM, context: Context, capacity: int, told: list[dict[int, Tensor]]) -> None:
        super().__init__(model, context, capacity)
        self.rows, self.heard = list(range(len(told), len(told) + context.num_rows)), told
        told.extend({} for _ in self.rows)

    def read_prompt(self, chunk: PromptChunk) -> None:
        for row, start, count, taps in zip(self.rows, chunk.start, chunk.count, chunk.taps, strict=True):
            for at in range(count):
                assert start + at not in self.heard[row]
                self.heard[row][start + at] = taps[at].clone()

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        assert commit.taps is not None
        for index, (row, start) in enumerate(zip(self.rows, commit.length.tolist(), strict=True)):
            for at, node in enumerate(commit.path[index]):
                assert start + at not in self.heard[row]
                self.heard[row][start + at] = commit.taps[index, node].clone()

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.rows = [self.rows[row] for row in rows]

    def join(self, other: Drafter, context: Context) -> None:
        super().join(other, context)
        assert isinstance(other, Spy)
        self.rows += other.rows


class SpyMethod(DraftModel):
    capabilities = replace(DraftModel.capabilities, opens_late=False)

    def __init__(self, model: TableLM) -> None:
        super().__init__(model)
        self.told: list[dict[int, Tensor]] = []

    @property
    def taps(self) -> tuple[int, ...]:
        return LAYERS

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        assert isinstance(self.model, TableLM)
        return Spy(self.model, context, capacity, self.told)


@dataclass(frozen=True)
class ReadsLast(Coupled):
    """Coupled, and a look at the taps."""

    @property
    def taps(self) -> tuple[int, ...]:
        return (0,)

    def decide(self, evidence: Evidence) -> tuple[Tensor, Tensor] | None:
        assert evidence.taps is not None
        assert torch.equal(evidence.taps[..., 0].long(), evidence.tree.tokens), "a node's own state, of its own token"
        assert bool((evidence.taps[..., 1] == 1).all()), "after one layer"
        return super().decide(evidence)


@pytest.mark.parametrize("shape", ["chain", "static/branching=2x2"])
def test_every_position_is_told_once_and_rightly(shape: str) -> None:
    target, method = table(num_layers=2), SpyMethod(TableLM(table().spec.vocab_size, seed=5))
    config = {"method": "draft_model", "num_speculative_tokens": 3, "shape": shape}
    engine = Engine(target, ToyTokenizer(), speculative=config, method=method)
    engine.verifier = ReadsLast()
    requests = mixed_requests()
    found = engine.generate_batch(requests)
    assert outcomes(found) == outcomes(plain(target, requests))
    for request, completion, told in zip(requests, found, method.told, strict=True):
        ids = [*request.prompt, *completion.token_ids]
        known = len(ids) - 1  # the last token emitted was never read
        chunks: list[Tensor] = []
        fresh = Target(target, 1, len(ids))
        on_chunk = partial(lambda keep, start, count, taps: keep(taps), chunks.append)
        feed(fresh, [ids[:known]], [0], head=False, taps=LAYERS, on_chunk=on_chunk)
        assert sorted(told) == list(range(known))
        assert torch.equal(torch.stack([told[at] for at in range(known)]), torch.cat(chunks, 1)[0])


def test_replace_keeps_a_verifier_without_taps() -> None:
    assert replace(Coupled()).taps == ()
