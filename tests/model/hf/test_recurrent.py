"""Recurrent and hybrid models over lines of guesses: whatever is rejected, every logit is that of a fresh forward."""

import random
from typing import Any

import pytest
import torch

import foretell.model.hf.recurrent.again as again
import foretell.model.hf.recurrent.rewind as rewind
import foretell.model.hf.recurrent.scans as scans
from foretell import Engine
from foretell.core.errors import ModelError
from foretell.core.tree import Plan, chain_tree, layout
from foretell.doctor.machine import look
from foretell.doctor.warn import about_run
from foretell.model.hf.adapter import TransformersModel
from foretell.model.hf.probe import chain_error
from foretell.model.recurrent import BASE, LIVE, RecurrentCache
from foretell.model.target import Target
from tests.model.recurrent import AGAIN, FAMILIES, TOKENWISE, UNKNOWN, assert_states, family_model, family_module
from tests.model.tiny import VOCAB, plain_logits, tiny_module

CAPACITY = 96
TOLERANCE = 3e-3
"""Largest difference of a logit, in standard deviations: rounding of chunked scans. A wrong state gives 0.1 to 5."""
WARNINGS = pytest.mark.filterwarnings("ignore")  # transformers tells which kernels are not installed
pytestmark = WARNINGS


@pytest.fixture(scope="module", params=(*FAMILIES, *AGAIN))
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return family_model(request.param)


class Walk:
    """Rows of text behind a target; every pass is compared with plain runs of the same text."""

    def __init__(self, model: TransformersModel, lengths: tuple[int, ...], seed: int = 0) -> None:
        self.model, self.random = model, random.Random(seed)
        self.target = Target(model, len(lengths), CAPACITY)
        self.texts = [self.draw(length) for length in lengths]  # the last token is pending
        self.worst = 0.0

    def draw(self, count: int) -> list[int]:
        return [self.random.randrange(3, VOCAB) for _ in range(count)]

    def behind(self, guesses: list[list[int]]) -> list[list[int]]:
        """The pending tokens, and guesses behind them."""
        return [[text[-1], *line] for text, line in zip(self.texts, guesses, strict=True)]

    def line(self, lines: list[list[int]]) -> tuple[torch.Tensor, Plan]:
        """Tokens of lines of one length that begin with the pending ones, and where they stand."""
        tokens = torch.tensor(lines)
        begin = torch.tensor([len(text) - 1 for text in self.texts])
        return tokens, layout(chain_tree(tokens).parent, begin, CAPACITY)

    def run(self, lines: list[list[int]], filled: list[int], target: Target | None = None) -> None:
        """One pass over lines[b] at filled[b]; an empty line is padding alone."""
        width = max(map(len, lines))
        counts = torch.tensor([len(line) for line in lines])
        tokens = torch.tensor([line + [0] * (width - len(line)) for line in lines])
        plan = layout(chain_tree(tokens, counts).parent, torch.tensor(filled), CAPACITY)
        logits = (target or self.target).forward(tokens, plan).logits
        assert logits is not None
        for row, (line, at) in enumerate(zip(lines, filled, strict=True)):
            if line:
                expected = plain_logits(self.model.module, self.texts[row][:at] + line)[at:]
                self.worst = max(self.worst, float((logits[row, : len(line)] - expected).abs().max() / expected.std()))

    def compare(self, logits: torch.Tensor, texts: list[list[int]]) -> None:
        """Logits [B, n, V] of the last n tokens of these texts."""
        for found, text in zip(logits, texts, strict=True):
            expected = plain_logits(self.model.module, text)[-len(found) :]
            assert (found - expected).abs().max() < TOLERANCE * expected.std()

    def prefill(self, chunk: int = 100) -> None:
        for start in range(0, max(map(len, self.texts)) - 1, chunk):
            lines = [text[:-1][start : start + chunk] for text in self.texts]
            self.run(lines, [min(start, len(text) - 1) for text in self.texts])

    def step(self, most: int = 5) -> None:
        """Guesses of random number in each row, of which a random number is kept."""
        guesses = [self.draw(self.random.randint(0, most)) for _ in self.texts]
        self.run(self.behind(guesses), [len(text) - 1 for text in self.texts])
        for text, line in zip(self.texts, guesses, strict=True):
            text += [*line[: self.random.randint(0, len(line))], *self.draw(1)]

    def keep(self, rows: list[int]) -> None:
        self.target.keep(torch.tensor(rows))
        self.texts = [self.texts[row] for row in rows]


def test_every_family_reads_lines(model: TransformersModel) -> None:
    assert bool(model.spec.chains_only) == (model.spec.name in UNKNOWN)
    assert model._tokenwise == (model.spec.name in TOKENWISE)
    assert all((mixer.rewind is None) == (model.spec.name in UNKNOWN) for mixer in model._mixers)
    assert bool(model.spec.reads_again) == (model.spec.name in UNKNOWN)
    assert ("reads token by token" in model.spec.reads_again) == model._tokenwise
    assert chain_error(model, model.module) < 1e-4


def test_random_walks(model: TransformersModel) -> None:
    """Ragged guesses and rejections, rows that leave and rows that join, prompts in pieces."""
    walk = Walk(model, (3, 12, 1, 7))
    walk.prefill(5)
    for _ in range(5):
        walk.step()
    walk.keep([3, 0, 1])
    for _ in range(3):
        walk.step()
    other = Walk(model, (9,), seed=1)
    other.prefill()
    for _ in range(2):
        other.step()
    walk.target.cache.join(other.target.cache, CAPACITY)
    walk.texts += other.texts
    for _ in range(4):
        walk.step(most=3)
    assert walk.worst < TOLERANCE
    assert other.worst < TOLERANCE


def test_one_row_and_wide_passes(model: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of unequal rows is read in groups, and longer passes than are held leave nothing to read again."""
    monkeypatch.setattr(again, "PAD_LIMIT", 6)
    monkeypatch.setattr(scans, "CHUNK", 20)
    for mixer in model._mixers:
        if mixer.rewind is not None and hasattr(mixer.rewind.scan, "chunk"):
            monkeypatch.setattr(mixer.rewind.scan, "chunk", 5)
    for module in (again, rewind):
        monkeypatch.setattr(module, "HELD_LIMIT", 8)
    for lengths in ((30,), (30, 4, 30, 11)):
        walk = Walk(model, lengths)
        walk.prefill(12)
        for _ in range(5):
            walk.step()
        assert walk.worst < TOLERANCE


def test_guesses_read_one_by_one(model: TransformersModel) -> None:
    """As a draft model or a self-drafter reads them: the states of guesses are never taken for committed ones."""
    walk = Walk(model, (6, 2))
    walk.prefill()
    for kept in ((0, 2), (4, 1), (3, 3), (0, 0), (4, 4)):
        guesses = [walk.draw(4) for _ in walk.texts]
        lines = walk.behind(guesses)
        tokens, plan = walk.line(lines)
        for node in range(5):
            out = walk.target.forward(tokens[:, node : node + 1], plan.nodes(node, node + 1)).logits
            assert out is not None
            walk.compare(out, [text[:-1] + line[: node + 1] for text, line in zip(walk.texts, lines, strict=True)])
        for text, line, count in zip(walk.texts, guesses, kept, strict=True):
            text += [*line[:count], *walk.draw(1)]


def test_a_pass_behind_a_root_that_was_read_as_a_guess(model: TransformersModel) -> None:
    """A drafter may have read its next root as a guess: its pass begins behind what is committed by now, and the committed
    state moves on in the same pass, under what is held of that root."""
    walk = Walk(model, (6, 3, 9))
    walk.prefill()
    for kept in ((1, 3, 2), (3, 0, 1), (0, 0, 2)):
        guesses = [walk.draw(4) for _ in walk.texts]
        walk.run(walk.behind(guesses), [len(text) - 1 for text in walk.texts])
        for text, line, count in zip(walk.texts, guesses, kept, strict=True):
            text += line[: count + 1]  # the last of them is the root now
        lines = [[text[-1], *walk.draw(2)] for text in walk.texts]
        tokens, plan = walk.line(lines)
        out = walk.target.forward(tokens[:, 1:], plan.nodes(1, 3)).logits
        assert out is not None
        walk.compare(out, [text[:-1] + line for text, line in zip(walk.texts, lines, strict=True)])


def test_layers_in_two_ranges(model: TransformersModel) -> None:
    """A self-drafter runs the lower layers guess by guess, the step the upper ones over all."""
    walk = Walk(model, (6, 3))
    walk.prefill()
    for kept in (0, 2, 1):
        tokens, plan = walk.line([[text[-1], *walk.draw(3)] for text in walk.texts])
        lower = [
            walk.target.forward(tokens[:, i : i + 1], plan.nodes(i, i + 1), layers=(0, 1), head=False).hidden.clone()
            for i in range(4)
        ]
        out = walk.target.forward(tokens, plan, layers=(1, model.spec.num_layers), hidden=torch.cat(lower, 1)).logits
        assert out is not None
        walk.compare(out, [text[:-1] + line for text, line in zip(walk.texts, tokens.tolist(), strict=True)])
        for row, text in enumerate(walk.texts):
            text += [*tokens[row, 1 : 1 + kept].tolist(), *walk.draw(1)]


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba"])
def test_saved_states_are_taken_up(family: str) -> None:
    model = TransformersModel(family_module(family))
    walk = Walk(model, (20,))
    walk.prefill()
    cache = walk.target.cache
    between = cache.save(18)
    assert between.position == 18, "every position of the last pass is known"
    saved = cache.save(19)
    assert saved.position == 19
    assert saved.num_bytes > 0
    again = Walk(model, (20,))
    assert again.texts == walk.texts
    fresh = again.target.cache
    for mine, theirs in zip((*fresh.keys, *fresh.values), (*cache.keys, *cache.values), strict=True):
        mine[:] = theirs
    fresh.load(saved)
    for _ in range(4):
        again.step()
    assert again.worst < TOLERANCE


def test_long_lags_are_read_in_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    advance = again.ReadingAgain._advance

    def spy(self: Any, counts: Any, meta: Any) -> None:
        moved.append(int(counts.max()))
        advance(self, counts, meta)

    monkeypatch.setattr(again.ReadingAgain, "_advance", spy)
    walk = Walk(family_model("qwen3_5/again"), (5, 9))
    walk.prefill()
    moved.clear()
    for _ in range(12):
        walk.step(most=4)
    assert max(moved) > again.LAG_LIMIT
    assert walk.worst < TOLERANCE


def test_full_acceptance_reads_nothing_again() -> None:
    walk = Walk(family_model("mamba2/again"), (5,))
    walk.prefill()
    for _ in range(3):
        line = walk.draw(3)
        walk.run([[walk.texts[0][-1], *line]], [len(walk.texts[0]) - 1])
        walk.texts[0] += [*line, *walk.draw(1)]
        cache = walk.target.cache
        assert (cache.states.meta[:, 0, LIVE] == len(walk.texts[0]) - 1).all()
        assert (cache.states.meta[:, 0, BASE] == len(walk.texts[0]) - 5).all()


def test_a_lag_that_is_not_read_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the states after rejected guesses are taken for committed ones."""
    held = again.ReadingAgain._held

    def forget(self: Any, rows: Any, count: int) -> Any:
        return torch.zeros_like(held(self, rows, count))

    monkeypatch.setattr(again.ReadingAgain, "_held", forget)
    with pytest.raises(ModelError, match="lines of guesses differ"):
        family_model("qwen3_next/again")


def test_a_scan_of_another_law_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where what is known of a scan proves wrong at loading, accepted inputs are read again, and that is said."""
    after = scans.OuterScan.after
    monkeypatch.setattr(
        scans.OuterScan, "after", lambda self, state, terms, count: 0.5 * after(self, state, terms, count)
    )
    model = TransformersModel(family_module("qwen3_next"), name="odd")
    assert all(mixer.rewind is None for mixer in model._mixers)
    assert "a check at loading failed: odd: logits of" in model.spec.reads_again
    (told,) = [one for one in caplog.records if one.levelname == "WARNING" and one.name.startswith("foretell")]
    assert "odd: accepted guesses are read again" in told.getMessage()
    assert model.spec.reads_again.partition("failed: ")[2] in told.getMessage()
    engine = Engine(model)
    assert engine.resolved()["reads_again"] == model.spec.reads_again
    machine = look(engine)
    (warned,) = [
        one
        for one in about_run(machine, None, looped=0.0, tokens=50.0, prompts=9, given=9, taken=0.0)
        if one.about == "reads_again"
    ]
    assert model.spec.reads_again in warned.text
    walk = Walk(model, (6, 2))
    walk.prefill()
    for _ in range(3):
        walk.step()
    assert walk.worst < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "mamba", "lfm2"])
def test_every_position_is_a_slice_of_the_slow_twin(family: str) -> None:
    """States taken up at any position are those that the module itself has left there, reading token by token."""
    walk, twin = Walk(TransformersModel(family_module(family)), (3,)), Walk(family_model(family + "/again"), (3,))
    text = walk.texts[0] + walk.draw(6)
    twin.texts = [list(text)]
    walk.texts = [list(text)]
    walk.run([text], [0])
    cache, other = walk.target.cache, twin.target.cache
    for count in range(1, len(text) + 1):
        twin.run([[text[count - 1]]], [count - 1])
        mine, theirs = cache.save(count), other.save(count)
        assert mine.position == theirs.position == count
        assert_states(mine, theirs)


def test_known_mixers_read_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token goes through a mixer once, whatever is rejected, in rows of unequal length too."""
    model = family_model("qwen3_5")
    read: list[tuple[int, ...]] = []
    call = model._mixers[0].rewind
    walk, run = Walk(model, (6, 3)), call.run
    monkeypatch.setattr(
        call, "run", lambda x, *args, **kwargs: (read.append(tuple(x.shape[:2])), run(x, *args, **kwargs))[1]
    )
    walk.prefill()
    for _ in range(8):
        before = len(read)
        walk.step(most=4)
        assert len(read) == before + 1
        assert read[-1][1] <= 5
    assert walk.worst < TOLERANCE


def test_a_position_that_was_left_behind_is_an_error() -> None:
    """States are never silently wrong: a pass that begins before the committed one has nothing to go on from."""
    walk = Walk(TransformersModel(family_module("mamba2")), (12,))
    walk.prefill()
    walk.step()
    with pytest.raises(RuntimeError, match="states are held from"):
        walk.run([[5, 6]], [4])


def test_attention_models_keep_trees() -> None:
    model = TransformersModel(tiny_module("llama"))
    assert model.spec.chains_only == ""
    assert not isinstance(model.new_cache(1, 8), RecurrentCache)


def test_spacing_of_states_follows_their_size() -> None:
    hybrid = TransformersModel(family_module("qwen3_next")).new_cache(0, 1)
    alone = TransformersModel(family_module("mamba2")).new_cache(0, 1)
    assert hybrid.spacing == 256
    assert alone.bytes_per_slot == 0
    assert alone.spacing == 2048
    assert hybrid.bytes_per_row > 0
