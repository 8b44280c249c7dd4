"""Stopping by an acceptance head: where it stops, the distribution of the text, and that the head reads what it was
trained on."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine, Request, SamplingParams
from foretell.core.errors import ModelError
from foretell.core.probs import History
from foretell.core.tree import DrawMode, DrawnBy, Plan, TokenTree
from foretell.draft.base import Context
from foretell.draft.config import check_stop
from foretell.draft.growing import grow as grow_module
from foretell.draft.growing.grow import grow
from foretell.draft.shapes import Chain, SpecDec, parse_shape
from foretell.heads.teacher import Teacher, TeacherBatch
from foretell.methods.acceptance.head import distribution_inputs, predicted
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.model.hf.adapter import TransformersModel
from foretell.verify import VERIFIERS
from tests.draft.growing.grown import TableExpander, error, noise_for, rows
from tests.engine.harness import foresight, table
from tests.model.tiny import tiny_module
from tests.verify.enumerate import Tables, tables

VOCAB, DEPTH = 3, 3


@dataclass
class Seer(TableExpander):
    """Tables whose guesses are kept with the chance that a function of the row and its path says."""

    chances: Sequence[Tensor] = ()  # of each depth from 1: [B, V ** depth] or [1, V ** depth]
    chance: Tensor | None = None
    asked: int = 0
    path: Tensor = field(default_factory=lambda: torch.zeros(0))

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.path, self.depth = torch.zeros(context.num_rows, 1, dtype=torch.int64), 0
        return super().begin(context, limits)

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        self.path, self.depth = self.path * self.distributions[0].shape[1] + tokens, self.depth + 1
        self.chance = self.chances[self.depth - 1].expand(len(tokens), -1).gather(1, self.path)
        return super().logits(tokens, plan)


def by_row(chances: Tensor, vocab_size: int) -> list[Tensor]:
    """chances [B, G] of each row's k-th guess, whatever its token."""
    return [chances[:, k, None].expand(-1, vocab_size ** (k + 1)) for k in range(chances.shape[1])]


def grown(
    shape: Any, chances: Tensor, depth_limit: list[int], draws: DrawMode = DrawMode.COUPLED
) -> tuple[TokenTree, Seer]:
    context = rows([SamplingParams()] * len(depth_limit), 6, depth_limit=depth_limit)
    distributions = [probs.float() for probs in tables(6, 4, seed=5).q]
    seer = Seer(distributions, chances=by_row(chances, 6))
    limits = [min(shape.depth, space) for space in depth_limit]
    return grow(seer, context, limits, shape, draws, noise_for(context)).tree, seer


CHANCES = torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.99, 0.5, 0.9, 0.9], [0.6, 0.9, 0.9, 0.9], [1.0, 0.8, 0.8, 0.8]])


@pytest.mark.parametrize(
    ("text", "depth_limit", "expected"),
    [
        ("specdec/threshold=0", [4, 4, 4, 4], [1, 1, 1, 2]),  # nothing is certain but row 3's first guess
        ("specdec/threshold=1", [4, 4, 4, 4], [4, 4, 4, 4]),
        ("specdec/threshold=0.3", [4, 4, 4, 4], [4, 2, 1, 3]),
        ("specdec/threshold=0.3/min=2", [4, 4, 4, 4], [4, 2, 2, 3]),
        ("specdec/threshold=0.3/min=4", [4, 4, 4, 4], [4, 4, 4, 4]),
        ("specdec/threshold=0.3", [2, 4, 3, 0], [2, 2, 1, 0]),
        ("specdec/threshold=0.3/min=3", [2, 1, 4, 4], [2, 1, 3, 3]),
    ],
)
@pytest.mark.parametrize("draws", [DrawMode.COUPLED, DrawMode.IID, DrawMode.FIXED])
def test_where_it_stops(text: str, depth_limit: list[int], expected: list[int], draws: DrawMode) -> None:
    """Behind the first guess at which 1 - product exceeds the threshold, which stays; each row on its own."""
    shape = parse_shape(text, 4)
    tree, seer = grown(shape, CHANCES, depth_limit, draws)
    tree.check()
    assert (tree.valid.sum(1) - 1).tolist() == expected
    whole, _ = grown(Chain(depth=4), CHANCES, depth_limit, draws)
    kept = tree.valid
    assert torch.equal(tree.tokens[kept], whole.tokens[:, : tree.num_nodes][kept]), "the chain of Chain, cut"
    assert seer.num_passes <= min(max(expected) + 1, 4), "no pass beyond the one that judges the last guess"


def test_a_row_stops_for_good() -> None:
    """A chance above 1 cannot come from a head, and a stopped row would not start again even then."""
    tree, _ = grown(SpecDec(depth=4), torch.tensor([[0.5, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]), [4, 4])
    assert (tree.valid.sum(1) - 1).tolist() == [1, 4]


# -- the distribution of the text
# ---------------------------------------------------------------------------------------------


def every_chain(monkeypatch: pytest.MonkeyPatch, distributions: Tables, shape: SpecDec) -> tuple[TokenTree, Tensor]:
    """All chains that the shape can give, and their probabilities: a row for each whole path, cut where it stops."""
    paths = torch.tensor(list(itertools.product(range(VOCAB), repeat=DEPTH)))
    weight = torch.ones(len(paths), dtype=torch.float64)
    code = torch.zeros(len(paths), dtype=torch.int64)
    for depth in range(DEPTH):
        weight = weight * distributions.q[depth][code, paths[:, depth]]
        code = code * VOCAB + paths[:, depth]
    monkeypatch.setattr(grow_module, "choose", lambda probs, how, noise, *, depth, node: paths[:, depth])
    context = rows([SamplingParams()] * len(paths), VOCAB)
    context.history = History([[0]] * len(paths), [1] * len(paths))
    context.length, context.lengths = torch.zeros(len(paths), dtype=torch.int64), [0] * len(paths)
    generator = torch.Generator().manual_seed(1)
    chances = [torch.rand(1, VOCAB ** (k + 1), generator=generator) for k in range(DEPTH)]
    seer = Seer(distributions.q, chances=chances)
    return grow(seer, context, [DEPTH] * len(paths), shape, DrawMode.IID, noise_for(context)).tree, weight


def without_the_last(tree: TokenTree) -> TokenTree:
    """The mutant: a stop that drops the guess at which it stopped."""
    count = tree.valid.sum(1)
    last = (torch.arange(tree.num_nodes) == count[:, None] - 1) & (count[:, None] < DEPTH + 1)
    above = (torch.arange(tree.num_nodes) == count[:, None] - 2) & (count[:, None] < DEPTH + 1)
    return replace(
        tree,
        parent=tree.parent.masked_fill(last, -1),
        drawn_by=tree.drawn_by.masked_fill(last, int(DrawnBy.FIXED)),
        q=tree.q.masked_fill(above[:, :, None], 0.0),
    )


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("verify", ["rejection", "block", "traversal"])
def test_exact_by_enumeration(monkeypatch: pytest.MonkeyPatch, verify: str, threshold: float) -> None:
    """Chances that depend on the guesses' tokens: the text has the target's distribution; the mutant's has not."""
    probs = tables(VOCAB, DEPTH + 1, seed=2)
    tree, weight = every_chain(monkeypatch, probs, SpecDec(depth=DEPTH, threshold=threshold))
    tree.check()
    lengths = {int(count) - 1 for count in tree.valid.sum(1)}
    assert lengths == {0.0: {1}, 0.3: {1, 2}, 0.6: {1, 2, 3}, 1.0: {DEPTH}}[threshold]
    assert error(VERIFIERS[verify], tree, weight, probs, DEPTH) < 1e-12
    if 0 < threshold < 1:
        mutant = without_the_last(tree)
        mutant.check()
        assert error(VERIFIERS[verify], mutant, weight, probs, DEPTH) > 1e-3


# -- with models -----------------------------------------------------------------------------------------------------

V = 40
DRAFT = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": V, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def models() -> tuple[TransformersModel, TransformersModel]:
    """A target and a draft model."""
    target = tiny_module("llama", hidden_size=16, num_hidden_layers=2, vocab_size=V, num_attention_heads=2)
    return TransformersModel(target), TransformersModel(tiny_module("qwen3", **DRAFT))


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(9)
    texts = [torch.randint(3, V, (length,), generator=generator).tolist() for length in (1, 9, 4, 13)]
    return [
        Request(text, SamplingParams(max_new_tokens=12 - row, seed=row, temperature=(1.0, 0.0, 0.8, 1.2)[row]))
        for row, text in enumerate(texts)
    ]


@pytest.mark.parametrize("reads_law", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_head_reads_what_it_was_trained_on(
    models: tuple[TransformersModel, TransformersModel],
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    reads_law: bool,
) -> None:
    """Predictions of decoding are those of the training-time forward: of the draft model's hidden state *at the guess* (and
    of the distribution that it was drawn from, at its row's temperature), over the whole text, in rows that are ragged
    and dropped on the way; and the text is that of plain decoding."""
    target, draft = models
    head = foresight(draft, reads_law=reads_law)
    found: list[tuple[list[int], float, float]] = []
    logits = ModelDrafter.logits
    begin = ModelDrafter.begin
    texts: list[list[int]] = []
    temperatures: list[float] = []

    def watched_begin(drafter: Any, context: Context, limits: Sequence[int]) -> Any:
        texts[:] = [list(ids) if limit else [] for ids, limit in zip(context.history.ids, limits, strict=True)]
        temperatures[:] = [row.temperature for row in context.processors.params]
        return begin(drafter, context, limits)

    def watched_logits(drafter: ModelDrafter, tokens: Tensor, plan: Plan) -> Tensor:
        out = logits(drafter, tokens, plan)
        assert drafter.chance is not None
        for row, ids in enumerate(texts):
            if ids and int(plan.positions[row, 0]) == len(ids):  # a row that has no room is padded at its root
                ids.append(int(tokens[row, 0]))
                found.append((list(ids), temperatures[row], float(drafter.chance[row, 0])))
        return out

    monkeypatch.setattr(ModelDrafter, "begin", watched_begin)
    monkeypatch.setattr(ModelDrafter, "logits", watched_logits)
    config = {"method": "draft_model", "shape": "specdec/threshold=0.5", "num_speculative_tokens": 4}
    engine = Engine(target, None, speculative=config, method=DraftModel(draft, head))
    completions = engine.generate_batch(requests(), batch_size=batch_size)
    expected = Engine(target, None, speculative={"method": "none"}).generate_batch(requests(), batch_size=1)
    assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
    assert len(found) > 20
    assert len({round(chance, 4) for _, _, chance in found}) > 10, "it sees differences"
    assert {temperature for _, temperature, _ in found} == {0.0, 0.8, 1.0, 1.2}
    for ids, temperature, chance in found[::3]:
        batch = TeacherBatch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([1]))
        labeled = Teacher(draft).label(batch, ())
        probs = distribution_inputs(labeled.logits[0, -2], torch.tensor(ids[-1]), torch.tensor(temperature))
        with torch.no_grad():
            said = predicted(head, labeled.hidden[0, -1], probs if reads_law else None)
        assert abs(float(said) - chance) < 1e-5
    first, last = (sum(sum(one.num_draft_tokens_per_pos[k : k + 1]) for one in completions) for k in (0, 3))
    assert last < first, "some steps stop early"


def test_refusals() -> None:
    """Without a head the shape is refused: early where it is known, else when it is asked for."""
    draft = table(blur=0.3)
    shape = parse_shape("specdec", 4)
    check_stop(DraftModel(draft, foresight(draft)), shape)
    check_stop(DraftModel(draft), Chain(depth=4))
    with pytest.raises(ConfigError, match="acceptance head"):
        check_stop(DraftModel(draft), shape)
    config = {"method": "draft_model", "shape": "specdec"}
    with pytest.raises(ConfigError, match="acceptance head"):
        Engine(table(), None, speculative=config, method=DraftModel(draft)).generate([1, 2, 3])
    with pytest.raises(ModelError, match="'eagle3'"):
        DraftModel(draft, foresight(draft, drafter="eagle3"))
    for text in ("specdec/threshold=1.5", "specdec/min=0", "specdec/threshold=-1"):
        with pytest.raises(ConfigError, match="between"):
            parse_shape(text, 4)
