"""The cache of a native hybrid: rows that are kept, joined, opened, viewed, saved and taken up go on with the same bits."""

import random

import pytest
import torch

from foretell.model.llama.run.native import NativeModel, supports
from foretell.model.recurrent import BASE, READ
from tests.model.llama.hybrid import KINDS, Plain, Texts, draw, hybrid_config, line, native_hybrid, step

REASON = supports(hybrid_config("lfm2"), torch.float32, torch.device("cpu"))
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.filterwarnings("ignore"),  # transformers tells which kernels are not installed
]
FEW = ("qwen3_5", "lfm2", "falcon_h1-norm")


@pytest.fixture(params=FEW)
def model(request: pytest.FixtureRequest) -> NativeModel:
    return native_hybrid(request.param)


def begun(model: NativeModel, lengths: tuple[int, ...], seed: int = 0, nodes: int = 5) -> tuple[Texts, random.Random]:
    """Rows whose prompts are read, one step on."""
    rng = random.Random(seed)
    rows = Texts(model, [draw(rng, count) for count in lengths])
    rows.read(16)
    step(rows, Plain(model), rng, nodes=nodes)
    return rows, rng


def test_rows_are_kept_in_any_order(model: NativeModel) -> None:
    rows, rng = begun(model, (3, 9, 5, 17))
    for kept in ([3, 0, 2], [2, 0], [1]):
        rows.cache.keep(torch.tensor(kept), max(rows.length))
        rows.texts, rows.length = [rows.texts[i] for i in kept], [rows.length[i] for i in kept]
        step(rows, Plain(model), rng, nodes=6)


@pytest.mark.parametrize("nodes", [(5, 70), (70, 5)], ids=["more-room", "less-room"])
def test_rows_join_with_terms_that_are_not_committed(model: NativeModel, nodes: tuple[int, int]) -> None:
    """The two caches have room for different numbers of terms, and their rows stand at different places of it."""
    rows, rng = begun(model, (3, 41), nodes=nodes[0])
    others, _ = begun(model, (30, 8, 1), seed=1, nodes=nodes[1])
    assert rows.hybrid.states.room(0) != others.hybrid.states.room(0)
    rows.cache.join(others.cache, max(others.length))
    rows.texts, rows.length = rows.texts + others.texts, rows.length + others.length
    for count in (4, 40):
        step(rows, Plain(model), rng, nodes=count)


def test_rows_are_opened_beyond_the_reserve_and_have_read_nothing(model: NativeModel) -> None:
    rows, rng = begun(model, (3, 9))
    reserve = rows.cache.reserve
    for _ in range(3):
        first = rows.cache.num_rows
        rows.cache.open_rows(2)
        rows.texts, rows.length = [*rows.texts, draw(rng, 4), draw(rng, 7)], [*rows.length, 0, 0]
        new = Texts(model, rows.texts[first:])
        new.cache = rows.cache.rows(first, first + 2)  # as the engine reads the prompts of rows that arrive
        new.read(3)
        rows.length[first:] = new.length
        step(rows, Plain(model), rng, nodes=4)
    assert rows.cache.reserve > reserve


def test_a_row_that_is_used_again_begins_with_nothing(model: NativeModel) -> None:
    rows, rng = begun(model, (3, 9))
    rows.cache.keep(torch.tensor([0]), max(rows.length))
    rows.cache.open_rows(1)
    rows.texts, rows.length = [rows.texts[0], draw(rng, 5)], [rows.length[0], 0]
    new = Texts(model, rows.texts[1:])
    new.cache = rows.cache.rows(1, 2)
    new.read(8)
    rows.length[1] = new.length[0]
    step(rows, Plain(model), rng, nodes=5)


def test_views_go_on_while_another_makes_room(model: NativeModel) -> None:
    rows, rng = begun(model, (3, 9, 20))
    views = []
    for row in range(3):
        view = Texts(model, [rows.texts[row]])
        view.cache, view.length = rows.cache.rows(row, row + 1), [rows.length[row]]
        views.append(view)
    room = rows.hybrid.states.room(0)
    for row, nodes in ((0, 3), (1, 90), (0, 5), (2, 4), (0, 100), (1, 200), (2, 7)):
        step(views[row], Plain(model), rng, nodes=nodes)
    assert rows.hybrid.states.room(0) > 4 * room
    rows.texts, rows.length = [view.texts[0] for view in views], [view.length[0] for view in views]
    step(rows, Plain(model), rng, nodes=6)


def test_the_room_for_terms_stays_while_texts_grow(model: NativeModel) -> None:
    rows, rng = begun(model, (3, 5))
    room = rows.hybrid.states.room(0)
    for _ in range(room // 2):
        step(rows, Plain(model), rng, nodes=6)
    assert min(rows.length) > room
    assert rows.hybrid.states.room(0) == room


@pytest.mark.parametrize("case", KINDS)
def test_states_are_saved_and_loaded_at_every_position(case: str) -> None:
    """From the committed one on, across the end of the ring; nothing before it is known."""
    model = native_hybrid(case)
    rows, rng = begun(model, (30,), nodes=6)
    step(rows, Plain(model), rng, nodes=20)
    meta = rows.hybrid.states.meta[0, 0]
    base, length = int(meta[BASE]), rows.length[0]
    assert base < length <= meta[READ]
    plain, text, ends = Plain(model), rows.texts[0], draw(rng, 2)
    before = [memory.clone() for tensors in rows.hybrid.states.tensors for memory in tensors.values()]
    assert rows.hybrid.save(base - 1) is None
    for position in range(base, length + 1):
        saved = rows.hybrid.save(position)
        assert saved.position == position
        again = Texts(model, [text[:position]])
        for mine, theirs in zip(
            (*again.cache.keys, *again.cache.values), (*rows.cache.keys, *rows.cache.values), strict=True
        ):
            mine[:, :, :position] = theirs[:, :, :position]
        again.hybrid.load(saved)
        again.length = [position]
        logits = again.logits([ends], [[-1, 0]])
        assert torch.equal(logits[0, 0], plain.after([*text[:position], ends[0]])), position
        assert torch.equal(logits[0, 1], plain.after([*text[:position], *ends])), position
    now = [memory for tensors in rows.hybrid.states.tensors for memory in tensors.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), "saving changes nothing"


def test_a_row_is_put_back_to_what_was_saved(model: NativeModel) -> None:
    rows, rng = begun(model, (12,))
    saved, text = rows.hybrid.save(rows.length[0]), list(rows.texts[0])
    for _ in range(3):
        step(rows, Plain(model), rng, nodes=5)
    rows.hybrid.load(saved)
    rows.texts, rows.length = [text], [saved.position]
    step(rows, Plain(model), rng, nodes=5)


def test_bytes_of_a_row_are_those_of_its_memory(model: NativeModel) -> None:
    cache = model.new_cache(4, 64)
    held = [
        memory for each in (cache.states.tensors, cache.states.held) for tensors in each for memory in tensors.values()
    ]
    assert 4 * cache.bytes_per_row == sum(memory.numel() * memory.element_size() for memory in held)


def test_layers_without_attention_keep_no_keys() -> None:
    model = native_hybrid("lfm2")
    cache = model.new_cache(1, 64)
    assert [bool(keys.numel()) for keys in cache.keys] == [False, True, False, False]
    rows = Texts(model, [[]])
    assert torch.isfinite(rows.logits([draw(random.Random(0), 4)], line(4).tolist())).all()
