"""``specdec`` on EAGLE and Kangaroo: what decoding shows the acceptance head is what training showed it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell import ConfigError, Engine, Request, SamplingParams
from foretell.core.errors import ModelError
from foretell.core.tree import Plan
from foretell.draft.base import Context, Method
from foretell.heads import formats
from foretell.heads.head import Head
from foretell.heads.pair_head import PairHead
from foretell.heads.teacher import LabeledBatch, Teacher, TeacherBatch
from foretell.methods.acceptance.head import AcceptanceHead
from foretell.methods.acceptance.objective import AcceptanceObjective, GuessPlaces
from foretell.methods.acceptance.reading import AdapterReader, DraftReader, PairReader, Reading
from foretell.methods.eagle.drafter import Eagle1, Eagle2, Eagle3, EagleDrafter
from foretell.methods.kangaroo.drafter import Kangaroo, KangarooDrafter
from foretell.model.hf.adapter import TransformersModel
from foretell.model.target import CausalModel
from tests.engine.harness import foresight
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.methods.kangaroo.test_head import random_head as random_adapter
from tests.model.tiny import VOCAB, tiny_module

TARGET = TransformersModel(tiny_module("llama").requires_grad_(False))
HEADS: dict[str, Any] = {
    "eagle1": random_head(EAGLE1),
    "eagle2": random_head(EAGLE1),
    "eagle3": random_head(EAGLE3),
    "eagle3.1": random_head(replace(EAGLE3, fc_norm=True, norm_output=True, draft_vocab_size=VOCAB)),
    "kangaroo": random_adapter(),
}
METHODS: dict[str, type[Method]] = {
    "eagle1": Eagle1, "eagle2": Eagle2, "eagle3": Eagle3, "eagle3.1": Eagle3, "kangaroo": Kangaroo,
}  # fmt: skip
DEPTH = 4


def method_of(name: str, acceptance: AcceptanceHead | None) -> Method:
    make: Any = METHODS[name]
    found: Method = make(HEADS[name], TARGET, acceptance)
    return found


def sight(name: str) -> AcceptanceHead:
    """A random acceptance head on the hidden states of this drafter."""
    return foresight(TARGET, drafter=HEADS[name].method)


def reader_of(head: Head) -> DraftReader:
    if isinstance(head, PairHead):
        return PairReader(head, DEPTH)
    adapter: Any = head
    return AdapterReader(adapter)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(9)
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 9, 4, 13)]
    return [
        Request(text, SamplingParams(max_new_tokens=14 - row, seed=row, temperature=(1.0, 0.0, 0.8, 1.2)[row]))
        for row, text in enumerate(texts)
    ]


def plainly() -> list[list[int]]:
    """The tokens of plain decoding, a row at a time."""
    engine = Engine(TARGET, None, speculative={"method": "none"})
    return [one.token_ids for one in engine.generate_batch(requests(), batch_size=1)]


@dataclass
class Seen:
    """A guess that was read while decoding."""

    ids: list[int]  # the text up to it
    depth: int  # from 1
    told: Tensor  # [V] logits of the distribution that it was drawn from
    hidden: Tensor  # [H] after it was read


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[Any], late: int) -> list[Seen]:
    """Keep what drafters of this kind read; a node lies ``late`` positions before its token's."""
    seen: list[Seen] = []
    texts: list[list[int]] = []
    told: list[Tensor] = []
    depths: list[int] = []
    begin, logits = kind.begin, kind.logits

    def watched_begin(drafter: Any, context: Context, limits: Sequence[int]) -> Any:
        out, base = begin(drafter, context, limits)
        texts[:] = [list(ids) if limit else [] for ids, limit in zip(context.history.ids, limits, strict=True)]
        told[:], depths[:] = list(out[:, 0]), [0] * len(texts)
        return out, base

    def watched_logits(drafter: Any, tokens: Tensor, plan: Plan) -> Tensor:
        out: Tensor = logits(drafter, tokens, plan)
        assert drafter.chance.shape == tokens.shape
        for row, ids in enumerate(texts):
            if ids and int(plan.positions[row, 0]) == len(ids) - late:  # a row that has no room is padded at its root
                ids.append(int(tokens[row, 0]))
                depths[row] += 1
                seen.append(Seen(list(ids), depths[row], told[row], drafter.hidden[row, 0].clone()))
                told[row] = out[row, 0]
        return out

    monkeypatch.setattr(kind, "begin", watched_begin)
    monkeypatch.setattr(kind, "logits", watched_logits)
    return seen


def largest_errors(reader: DraftReader, seen: Sequence[Seen]) -> tuple[float, float]:
    """Of hidden states, as a share of the largest number in one where that is above 1, and of labels: of what training
    computes at the last token of each text."""
    length = torch.tensor([len(one.ids) for one in seen])
    tokens = torch.tensor([one.ids + [0] * (int(length.max()) - len(one.ids)) for one in seen])
    batch, teacher = TeacherBatch(tokens, length, length - 1), Teacher(TARGET)
    objective = AcceptanceObjective(
        foresight(TARGET, drafter=reader.drafter), reader, rule="rejection", target_share=1.0, everywhere=True
    )  # nothing is drawn: the texts are the mixed ones
    labeled = teacher.label(batch, objective.taps)
    places = objective.places(labeled, teacher, torch.Generator().manual_seed(0))
    # Depth after depth, of each the texts that are long enough: a pair of depth j needs j tokens before the guess's parent.
    depths = range(1, DEPTH + 1) if isinstance(reader, PairReader) else (0,)
    found = [(row, depth) for depth in depths for row, one in enumerate(seen) if len(one.ids) - 2 >= depth]
    assert len(found) == len(places.labels)
    hidden_error, label_error, compared = 0.0, 0.0, 0
    for (row, depth), hidden, label in zip(found, places.hidden, places.labels.tolist(), strict=True):
        one = seen[row]
        if depth in (0, one.depth):
            compared += 1
            p, q = labeled.logits[row, len(one.ids) - 2].softmax(-1), one.told.softmax(-1)
            expected = min(1.0, float(p[one.ids[-1]] / q[one.ids[-1]]))
            scale = max(1.0, float(one.hidden.abs().max()))
            hidden_error = max(hidden_error, float((hidden - one.hidden).abs().max()) / scale)
            label_error = max(label_error, abs(label - expected))
    assert compared == len(seen)
    return hidden_error, label_error


def decoded(monkeypatch: pytest.MonkeyPatch, name: str, batch_size: int = 4) -> list[Seen]:
    """What was read while four ragged rows were decoded, whose text is that of plain decoding."""
    pair = isinstance(HEADS[name], PairHead)
    seen = watch(monkeypatch, EagleDrafter if pair else KangarooDrafter, late=int(pair))
    config = {"method": METHODS[name].name, "shape": "specdec/threshold=0.5", "num_speculative_tokens": DEPTH + 1}
    engine = Engine(TARGET, None, speculative=config, method=method_of(name, sight(name)))
    completions = engine.generate_batch(requests(), batch_size=batch_size)
    assert [one.token_ids for one in completions] == plainly()
    drafted = [sum(sum(one.num_draft_tokens_per_pos[k : k + 1]) for one in completions) for k in range(DEPTH + 1)]
    assert 0 < drafted[-1] < drafted[0], "some steps stop early"
    assert {one.depth for one in seen} == set(range(1, DEPTH + 1))
    return seen


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", HEADS)
def test_the_head_reads_what_it_was_trained_on(monkeypatch: pytest.MonkeyPatch, name: str, batch_size: int) -> None:
    """Hidden states, and the distributions that labels come from, at every depth, in rows that are ragged and dropped
    on the way; and the text is that of plain decoding."""
    seen = decoded(monkeypatch, name, batch_size)
    assert len(seen) > 30
    assert max(largest_errors(reader_of(HEADS[name]), seen)) < 1e-5


# -- planted mistakes ------------------------------------------------------------------------------------------------


class Shallow(PairReader):
    """The hidden state is that before the guess was read."""

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        readings = super().read(labeled, model, first=first)
        return [replace(one, hidden=one.features) for one in readings]


class Beside(PairReader):
    """The hidden state is that of the next anchor."""

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        return [replace(one, hidden=one.hidden.roll(-1, 1)) for one in super().read(labeled, model, first=first)]


class OneDepth(PairReader):
    """Every guess is read as if it were the first behind its anchor."""

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        readings = super().read(labeled, model, first=first)
        features, hidden = readings[0].features, readings[0].hidden
        return [Reading(features.roll(1 - one.back, 1), hidden.roll(1 - one.back, 1), one.back) for one in readings]


class Late(AdapterReader):
    """The hidden state is that before the guess was read."""

    def read(self, labeled: LabeledBatch, model: CausalModel, *, first: bool = False) -> list[Reading]:
        return [replace(one, hidden=one.features) for one in super().read(labeled, model, first=first)]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        *((name, mistake) for name in ("eagle1", "eagle3") for mistake in (Shallow, Beside, OneDepth)),
        ("kangaroo", Late),
    ],
)
def test_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, mistake: type[Any]) -> None:
    seen = decoded(monkeypatch, name)
    reader = mistake(HEADS[name]) if name == "kangaroo" else mistake(HEADS[name], DEPTH)
    assert largest_errors(reader, seen)[0] > 1e-2


# -- tokens that are drawn -------------------------------------------------------------------------------------------


def mixed(name: str, **options: Any) -> tuple[TeacherBatch, Tensor, GuessPlaces]:
    """A batch, the tokens that the target read in their place, and the places."""
    length = torch.tensor([9, 6, 3])
    tokens = torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))
    batch = TeacherBatch(tokens, length, torch.tensor([1, 4, 2]))
    read: list[Tensor] = []

    class Watching(Teacher):
        def label(self, batch: TeacherBatch, taps: Sequence[int]) -> LabeledBatch:
            read.append(batch.tokens)
            return super().label(batch, taps)

    objective = AcceptanceObjective(sight(name), reader_of(HEADS[name]), **options)
    labeled = Teacher(TARGET).label(batch, objective.taps)
    places = objective.places(labeled, Watching(TARGET), torch.Generator().manual_seed(1))
    (changed,) = read
    return batch, changed, places


@pytest.mark.parametrize("name", HEADS)
def test_drawn_tokens_are_first_guesses(name: str) -> None:
    """At temperature 0, where every token of the response is replaced: each by the best first guess of a drafter that has
    read the text before it. A pair needs a token before the pending one."""
    batch, changed, places = mixed(name, target_share=0.0, temperatures=(0.0,))
    head, pair, count = HEADS[name], isinstance(HEADS[name], PairHead), 0
    features = Teacher(TARGET).label(batch, head.taps).taps
    for row in range(3):
        for at in range(9):
            here = max(int(batch.start[row]), 2 if pair else 1) <= at < int(batch.length[row])
            if not here:
                assert changed[row, at] == batch.tokens[row, at]
                continue
            count += min(at - 1, DEPTH) if pair else 1
            with torch.no_grad():
                if pair:
                    embeds = TARGET.embed(batch.tokens[row : row + 1, 1:at])
                    known = head.features(features[row : row + 1, : at - 1], TARGET)
                    probs = head.logits(head.unroll(embeds, known, 1)[0][1], TARGET)[0, -1]
                    best = int(probs.argmax()) if head.vocabulary is None else int(head.vocabulary[probs.argmax()])
                else:
                    mask = torch.ones(1, 1, at, at, dtype=torch.bool).tril()
                    best = int(
                        TARGET.head(head(features[row : row + 1, :at], torch.arange(at)[None], mask))[0, -1].argmax()
                    )
            assert changed[row, at] == best
    assert len(places.labels) >= 0.8 * count, "few are impossible as later guesses"


def test_tokens_that_cannot_be_guessed_teach_nothing() -> None:
    """Of the whole response, those outside the draft vocabulary are left out, at every depth."""
    batch, changed, places = mixed("eagle3", target_share=1.0, everywhere=True)
    assert torch.equal(batch.tokens, changed)
    known = HEADS["eagle3"].t2d
    rows, before = batch.supervised.nonzero(as_tuple=True)
    said = known[batch.tokens[rows, before + 1]]
    counts = [int((said & (before >= depth)).sum()) for depth in range(1, DEPTH + 1)]
    assert sum(counts) < int(sum((before >= depth).sum() for depth in range(1, DEPTH + 1)))
    assert len(places.labels) == len(places.hidden) == sum(counts)


# -- refusals and loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle1", "eagle2", "eagle3", "kangaroo"])
def test_from_directories(tmp_path: Path, name: str) -> None:
    """Heads that were saved run; without one the shape is refused in words, and no other shape reads it."""
    formats.save(HEADS[name], tmp_path / "head", target=TARGET.spec)
    formats.save(sight(name), tmp_path / "acceptance")
    config = {"method": name, "model": str(tmp_path / "head"), "num_speculative_tokens": 3, "shape": "chain"}
    specdec = {**config, "shape": "specdec"}
    with pytest.raises(ConfigError, match=r"none is given for .*head: train one with"):
        Engine(TARGET, None, speculative=specdec)
    with pytest.raises(ConfigError, match="bundled/"):
        Engine(TARGET, None, speculative={"method": name, "shape": "specdec"})
    engine = Engine(TARGET, None, speculative={**config, "acceptance": "absent"})
    with pytest.raises(ConfigError, match="none is given"):
        engine.with_method(specdec)
    given = engine.with_method({**specdec, "acceptance": str(tmp_path / "acceptance")})
    assert given.speculative.resolved()["acceptance"] == str(tmp_path / "acceptance")
    assert given.with_method({**given.speculative.resolved(), "shape": "chain"}).method is given.method
    assert [one.token_ids for one in given.generate_batch(requests())] == plainly()


def test_refusals(tmp_path: Path) -> None:
    for name in HEADS:
        with pytest.raises(ConfigError, match="acceptance head"):
            Engine(
                TARGET,
                None,
                speculative={"method": METHODS[name].name, "shape": "specdec"},
                method=method_of(name, None),
            )
        with pytest.raises(ModelError, match="'draft_model'"):
            method_of(name, foresight(TARGET))
    with pytest.raises(ModelError, match="'eagle1'"):
        method_of("eagle3", sight("eagle1"))
    with pytest.raises(ConfigError, match="unknown key 'acceptance' for method 'medusa'"):
        Engine(TARGET, None, speculative={"method": "medusa", "acceptance": "x"})
    for name in ("early_exit", "medusa"):
        with pytest.raises(ConfigError, match="cannot grow the shape 'specdec'"):
            Engine(TARGET, None, speculative={"method": name, "shape": "specdec"})
