"""Rows that come while others are being decoded: what a joined drafter guesses is what drafters of one row each guess.

Two worlds run the same script. In one every row has a drafter of its own for ever; in the other drafters are joined, rows
dropped and reordered, and known text read ahead. What is kept of a tree is drawn by the row's name and length alone, so
the texts stay the same as long as the trees do.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch

from foretell import SamplingParams
from foretell.core.noise import Noise
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, TokenTree, layout, root_tree
from foretell.draft.base import Commit, Context, Drafter, Method, PromptChunk
from foretell.draft.ngram import Ngram, NgramDrafter
from foretell.draft.none import NoMethod
from foretell.draft.prediction import Prediction, PredictionDrafter
from foretell.draft.shapes import Chain, parse_shape
from foretell.draft.suffix import Library, Suffix, SuffixDrafter
from foretell.methods.dflash.drafter import DFlash, DFlashDrafter
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.methods.eagle.drafter import Eagle1, Eagle3, EagleDrafter
from foretell.methods.hybrid.drafter import Hybrid
from foretell.methods.kangaroo.drafter import Kangaroo, KangarooDrafter
from foretell.methods.medusa.drafter import Medusa, MedusaDrafter
from foretell.model.cache import KVCache
from foretell.model.hf.adapter import TransformersModel
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target
from tests.engine.harness import TreeMethod, audit_table, foresight, table
from tests.methods.dflash.test_drafter import random_head as dflash
from tests.methods.eagle.eagles import EAGLE1, EAGLE3, random_head
from tests.methods.kangaroo.test_head import random_head as adapter
from tests.methods.medusa.test_drafter import trained as medusa
from tests.model.tiny import tiny_module

CAPACITY = 128
ALPHABET = 7  # few tokens: texts repeat themselves
JOIN, KEEP = KVCache.join, KVCache.keep  # of the target, also where a test spoils those of the drafters


@dataclass
class Row:
    """One text; what becomes of it depends on its name, its length and the trees that it is given."""

    name: str
    ids: list[int]
    params: SamplingParams
    prediction: list[int]
    depth_limit: int = 9

    def choose(self, tokens: list[int], parent: list[int]) -> tuple[list[int], list[int]]:
        """(kept path, emitted tokens) of a tree."""
        dice = random.Random(f"{self.name}/{len(self.ids)}")
        path = [0]
        while dice.random() < 0.8:
            below = [node for node, above in enumerate(parent) if above == path[-1]]
            if not below:
                break
            path.append(dice.choice(below))
        bonus = (
            self.prediction[len(self.ids) % len(self.prediction)] if dice.random() < 0.5 else dice.randrange(ALPHABET)
        )
        return path, [*(tokens[node] for node in path[1:]), bonus]


LENGTHS = {"a": 9, "b": 1, "c": 30, "d": 2, "e": 17, "f": 1, "g": 12}
PARAMS = {
    "a": SamplingParams(temperature=0.8),
    "b": SamplingParams(),
    "c": SamplingParams(temperature=0.0),
    "d": SamplingParams(presence_penalty=0.5),
    "e": SamplingParams(temperature=1.2, top_k=9),
    "f": SamplingParams(temperature=0.7),
    "g": SamplingParams(),
}


def row(name: str, seed: int) -> Row:
    dice = random.Random(f"{name}/{seed}")
    ids, prediction = ([dice.randrange(ALPHABET) for _ in range(count)] for count in (LENGTHS[name], 20))
    return Row(name, ids, PARAMS[name], prediction)


def context_of(rows: Sequence[Row], vocab_size: int) -> Context:
    lengths = [len(row.ids) - 1 for row in rows]
    params = [row.params for row in rows]
    return Context(
        history=History([row.ids for row in rows], [LENGTHS[row.name] for row in rows]),
        processors=Processors(params, vocab_size=vocab_size, end_token_ids=(), device=torch.device("cpu")),
        length=torch.tensor(lengths),
        lengths=lengths,
        pending=torch.tensor([row.ids[-1] for row in rows]),
        predictions=[row.prediction for row in rows],
        depth_limit=[row.depth_limit for row in rows],
    )


class Lane:
    """Rows of one drafter and one target."""

    def __init__(self, model: CausalModel, method: Method, rows: list[Row], capacity: int) -> None:
        self.rows, self.method, self.model = rows, method, model
        self.target = Target(model, len(rows), capacity)
        self.drafter = method.open(self.context, capacity, self.target)
        self.capacity = capacity
        known = [row.ids[:-1] for row in rows]
        feed(
            self.target, known, [0] * len(rows), head=False, taps=method.prompt_taps,
            on_chunk=lambda start, count, taps: self.drafter.read_prompt(PromptChunk(start, count, taps)),
        )  # fmt: skip

    @property
    def context(self) -> Context:
        return context_of(self.rows, self.model.spec.vocab_size)

    def propose(self, shape: str, draws: DrawMode) -> TokenTree:
        context, parsed = self.context, parse_shape(shape, 4)
        context.depth_limit = [min(limit, parsed.depth) for limit in context.depth_limit]
        seeds = torch.tensor([ord(row.name) for row in self.rows])
        tree = self.drafter.propose(context, parsed, draws, Noise(seeds, context.length))
        tree.check()
        return tree

    def observe(self, tree: TokenTree, ended: Sequence[str]) -> None:
        length = self.context.length
        plan = layout(tree.parent, length, self.capacity)
        out = self.target.forward(
            tree.tokens, plan, layers=(tree.hidden_layer, self.model.spec.num_layers), hidden=tree.hidden,
            taps=self.method.taps,
        )  # fmt: skip
        assert out.logits is not None
        trees = zip(self.rows, tree.tokens.tolist(), tree.parent.tolist(), strict=True)
        chosen = [row.choose(tokens, parent) for row, tokens, parent in trees]
        paths, emitted = [path for path, _ in chosen], [tokens for _, tokens in chosen]
        width = max(map(len, paths))
        nodes = torch.tensor([path + list(range(len(path), width)) for path in paths])
        self.target.commit(length[:, None] + nodes, length[:, None] + torch.arange(width))
        for row, tokens in zip(self.rows, emitted, strict=True):
            row.ids += tokens
        ends = [row.name in ended for row in self.rows]
        self.drafter.observe(Commit(tree, length, paths, emitted, out.taps, ends))

    def join(self, other: "Lane") -> None:
        JOIN(self.target.cache, other.target.cache, max(other.context.lengths))
        self.rows = self.rows + other.rows
        self.drafter.join(other.drafter, self.context)

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        KEEP(self.target.cache, torch.tensor(rows), max(self.context.lengths))
        self.drafter.keep(rows)


Guesses = list[tuple[tuple[int, ...], int]]
"""Of every node of a tree, in order: the tokens from the root to it, and its distribution. (Padding may lie between
them.)"""


Seen = list[dict[str, Guesses]]
"""Of every step: the guesses of each row."""


def guesses(tree: TokenTree) -> list[Guesses]:
    found = []
    for tokens, parent, label in zip(tree.tokens.tolist(), tree.parent.tolist(), tree.drawn_by.tolist(), strict=True):
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for node, above in enumerate(parent):
            if node == 0 or above >= 0:
                paths[node] = (*paths[above], tokens[node])
        found.append([(path, label[node]) for node, path in paths.items() if node >= 0])
    return found


@dataclass
class World:
    model: CausalModel
    method: Method
    shape: str
    draws: DrawMode
    joined: bool
    seed: int = 0
    lanes: list[Lane] = field(default_factory=list)
    seen: Seen = field(default_factory=list)

    def open(self, *names: str) -> None:
        """Rows of one new drafter; the first one has more slots than those that join it."""
        rows = [row(name, self.seed) for name in names]
        for some in [rows] if self.joined else [[one] for one in rows]:
            self.lanes.append(Lane(self.model, self.method, some, CAPACITY - 16 * bool(self.lanes)))

    def step(self, *ended: str, idle: str = "") -> None:
        """One step of every drafter, those of one row at the same time as that of many. Rows ``idle`` have no room."""
        for lane in self.lanes:
            for one in lane.rows:
                one.depth_limit = 0 if one.name in idle else 9
        trees = [lane.propose(self.shape, self.draws) for lane in self.lanes]
        self.seen.append({})
        for lane, tree in zip(self.lanes, trees, strict=True):
            self.seen[-1].update(zip((one.name for one in lane.rows), guesses(tree), strict=True))
        for lane, tree in zip(self.lanes, trees, strict=True):
            lane.observe(tree, ended)
            if isinstance(lane.drafter, ModelDrafter):
                audit_table(lane.drafter.target, lane.context, lane.drafter.filled)  # type: ignore[arg-type]

    def join(self) -> None:
        if self.joined:
            first, *others = self.lanes
            for other in others:
                first.join(other)
            self.lanes = [first]

    def keep(self, names: str) -> None:
        if self.joined:
            (lane,) = self.lanes
            here = [one.name for one in lane.rows]
            lane.keep([here.index(name) for name in names])
        else:
            by_name = {lane.rows[0].name: lane for lane in self.lanes}
            self.lanes = [by_name[name] for name in names]

    def catch_up(self, name: str, most: int) -> None:
        for lane in self.lanes if self.joined else []:
            for index, one in enumerate(lane.rows):
                if one.name == name:
                    before = lane.drafter.num_unread(lane.context)
                    left = lane.drafter.catch_up(lane.context, index, most)
                    after = lane.drafter.num_unread(lane.context)
                    assert left == after[index] == max(0, before[index] - most)
                    assert after[:index] + after[index + 1 :] == before[:index] + before[index + 1 :]


def script(world: World) -> None:
    """Rows come at once and one by one, before their first step and after some; are reordered, dropped, idle for a while;
    a prompt of one token comes right behind its opening, one of many after a look ahead."""
    world.open("a")
    world.step()
    world.open("b")
    world.step()
    world.step(idle="b")
    world.join()  # ab
    world.step()
    world.open("c")
    world.catch_up("c", 11)
    world.step(idle="c")
    world.catch_up("c", 7)
    world.join()  # abc
    world.catch_up("c", 5)
    world.step(idle="a")
    world.step()
    world.keep("cab")
    world.open("d", "e")
    world.step(idle="d")
    world.step(idle="dc")
    world.join()  # cabde
    world.catch_up("d", 100)
    world.step(idle="e")
    world.step(idle="ae")
    world.step(idle="ae")
    world.catch_up("e", 2)
    world.step()
    world.step("c")
    world.keep("eadb")
    world.open("f")
    world.join()  # eadbf
    world.step()
    world.step("a", "d")
    world.keep("bfe")
    world.open("g")
    world.join()  # bfeg
    world.catch_up("g", 100)
    world.step(idle="bf")
    world.step()
    world.keep("ge")
    world.step()
    world.keep("eg")
    world.step()
    world.step()


# -- the methods ---------------------------------------------------------------------------------------------------------


@lru_cache
def tiny() -> CausalModel:
    return TransformersModel(tiny_module("llama"))


def target() -> CausalModel:
    return table(num_layers=3)


def draft(**options: Any) -> Method:
    model = table(blur=0.3, num_layers=2, **options)
    return DraftModel(model, foresight(model))


def several() -> Hybrid:
    """Heads of other taps beside each other, and looked-up guesses."""
    first, others = Eagle3(random_head(EAGLE3), tiny()), [Ngram(), Medusa(medusa(tiny()), tiny())]  # type: ignore[arg-type]
    return Hybrid(Suffix(), first, shape=Chain(3), discount=1.0, others=others)


MODELS: dict[str, Callable[[], CausalModel]] = dict.fromkeys(("medusa", "eagle1", "eagle3", "kangaroo", "dflash"), tiny)
METHODS: dict[str, Callable[[], Method]] = {
    "none": NoMethod,
    "ngram": Ngram,
    "prediction": Prediction,
    "suffix": Suffix,
    "draft_model": draft,
    "draft_model, short": lambda: draft(max_positions=30),
    "medusa": lambda: Medusa(medusa(tiny()), tiny()),
    "eagle1": lambda: Eagle1(random_head(EAGLE1), tiny()),  # type: ignore[arg-type]
    "eagle3": lambda: Eagle3(random_head(EAGLE3), tiny()),  # type: ignore[arg-type]
    "kangaroo": lambda: Kangaroo(adapter(), tiny()),
    "dflash": lambda: DFlash(dflash(tiny()), tiny()),
    "dflash, all": lambda: DFlash(
        dflash(tiny(), causal=True, markov_rank=6, sample_from_anchor=True, confidence=True), tiny()
    ),
    "several": lambda: several().isolated(),
}
MODELS["dflash, all"] = MODELS["several"] = tiny
CASES = [(name, "chain", DrawMode.FIXED) for name in METHODS]
CASES += [(name, "chain", DrawMode.COUPLED) for name in list(METHODS)[4:]]
CASES += [
    (name, "static/branching=2x2x1", DrawMode.COUPLED)
    for name in ("draft_model", "medusa", "eagle1", "kangaroo", "dflash")
]
CASES += [("suffix", "opt_tree/size=7", DrawMode.FIXED)]
CASES += [
    ("draft_model", "dyspec/size=7/width=3", DrawMode.COUPLED), ("draft_model", "chain", DrawMode.IID),
    ("several", "chain", DrawMode.IID),
    ("draft_model", "eagle2/size=7/width=3", DrawMode.FIXED), ("draft_model", "opt_tree/size=7/threshold=0",
        DrawMode.COUPLED),
    ("draft_model", "specdec/threshold=0.6", DrawMode.COUPLED), ("draft_model", "adaptive/threshold=0.3", DrawMode.COUPLED),
    ("eagle3", "eagle2/size=7/width=3", DrawMode.COUPLED),
    ("dflash, all", "specdec/threshold=0.6", DrawMode.COUPLED),
]  # fmt: skip


def run(name: str, shape: str, draws: DrawMode, seed: int, *, joined: bool) -> Seen:
    """What is guessed in each step of the script."""
    with torch.inference_mode():
        world = World(MODELS.get(name, target)(), METHODS[name](), shape, draws, joined, seed)
        script(world)
    return world.seen


@lru_cache
def apart(name: str, shape: str, draws: DrawMode, seed: int = 0) -> Seen:
    """By drafters of one row each."""
    return run(name, shape, draws, seed, joined=False)


def together(name: str, shape: str, draws: DrawMode, seed: int = 0) -> Seen:
    """By joined ones."""
    return run(name, shape, draws, seed, joined=True)


def opened(name: str, *rows: str) -> Lane:
    """One drafter of some rows, before its first step."""
    world = World(MODELS.get(name, target)(), METHODS[name](), "chain", DrawMode.COUPLED, True)
    world.open(*rows)
    return world.lanes[0]


@pytest.mark.parametrize(("name", "shape", "draws"), CASES)
def test_a_joined_row_is_guessed_as_alone(name: str, shape: str, draws: DrawMode) -> None:
    expected = apart(name, shape, draws)
    assert together(name, shape, draws) == expected
    num_guesses = sum(len(found) - 1 for step in expected for found in step.values())
    assert (num_guesses > 20) == (name != "none")


def test_an_adapter_that_lacks_a_state_in_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of a join, with and without rows that kept a leaf, a row without any committed token among them."""
    sides: set[tuple[bool, bool]] = set()
    mixed: list[bool] = []
    join, read_root = KangarooDrafter.join, KangarooDrafter.read_root

    def joined(self: KangarooDrafter, other: Drafter, context: Context) -> None:
        assert isinstance(other, KangarooDrafter)
        sides.update((mine, theirs) for mine in self.lacking for theirs in other.lacking)
        join(self, other, context)

    def read(self: KangarooDrafter, hidden: Any, plan: Any) -> Any:
        if any(self.lacking) and not all(self.lacking):
            mixed.append(bool((plan.length == 0).any()))
        return read_root(self, hidden, plan)

    monkeypatch.setattr(KangarooDrafter, "join", joined)
    monkeypatch.setattr(KangarooDrafter, "read_root", read)
    for seed in (1, 2):
        assert together("kangaroo", "chain", DrawMode.COUPLED, seed) == apart(
            "kangaroo", "chain", DrawMode.COUPLED, seed
        )
    assert len(sides) == 4
    assert True in mixed
    assert False in mixed


@pytest.mark.parametrize("name", ["ngram", "prediction", "suffix", "draft_model", "medusa", "eagle3", "dflash"])
def test_steps_in_which_a_drafter_is_not_asked(name: str) -> None:
    """It is told what came of them all the same, and guesses as if it had been asked and had had no room."""
    found = []
    for ask in (True, False):
        with torch.inference_mode():
            world = World(MODELS.get(name, target)(), METHODS[name](), "chain", DrawMode.COUPLED, True)
            world.open("a", "b", "e")
            world.step()
            for _ in range(3):
                if ask:
                    world.step(idle="abe")
                else:
                    (lane,) = world.lanes
                    lane.observe(root_tree(lane.context.pending), ())
            world.step()
            world.step()
            found.append(world.seen[-2:])
    assert found[0] == found[1]
    assert any(len(guessed) > 1 for step in found[0] for guessed in step.values())


# -- reading ahead -------------------------------------------------------------------------------------------------------


def memory_of(drafter: Any) -> KVCache:
    cache: KVCache = drafter.target.cache if isinstance(drafter, ModelDrafter) else drafter.cache
    return cache


@pytest.mark.parametrize(("name", "pending"), [("draft_model", 0), ("eagle1", 1), ("eagle3", 1), ("dflash", 0)])
def test_reading_ahead(name: str, pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row reads, the others' memory stays as it is; then a proposal reads one node a row, a block drafter its block."""
    with torch.inference_mode():
        lane = opened(name, "a", "b", "c", "e")
        drafter, context = lane.drafter, lane.context
        lengths = [max(0, length - pending) for length in context.lengths]
        assert lengths == [8 - pending, 0, 29 - pending, 16 - pending]
        assert drafter.num_unread(context) == lengths
        before = [memory.clone() for memory in memory_of(drafter).keys]
        assert drafter.catch_up(context, 2, 5) == lengths[2] - 5
        assert drafter.num_unread(context) == [lengths[0], 0, lengths[2] - 5, lengths[3]]
        for old, new in zip(before, memory_of(drafter).keys, strict=True):
            assert torch.equal(old[[0, 1, 3]], new[[0, 1, 3]])
            assert not torch.equal(old[2, :, :5], new[2, :, :5])
            assert torch.equal(old[2, :, 5:CAPACITY], new[2, :, 5:CAPACITY])
        assert drafter.catch_up(context, 2, 0) == lengths[2] - 5
        assert [drafter.catch_up(context, row, 1000) for row in range(4)] == [0] * 4
        assert [drafter.catch_up(context, row, 1000) for row in range(4)] == [0] * 4, "nothing is left"
        widths: list[int] = []
        write = KVCache.write

        def spied(self: KVCache, layer: int, slots: Any, *rest: Any) -> None:
            widths.append(slots.shape[1])
            write(self, layer, slots, *rest)

        monkeypatch.setattr(KVCache, "write", spied)
        lane.propose("chain", DrawMode.COUPLED)
        assert set(widths) == {5 if name == "dflash" else 1}


def test_a_draft_model_whose_context_is_at_its_end() -> None:
    """It will not guess there again: nothing is worth reading, and nothing would have a place."""
    with torch.inference_mode():
        lane = opened("draft_model, short", "a", "c")  # 8 and 29 tokens before the pending one, of 30
        assert lane.drafter.num_unread(lane.context) == [8, 0]
        assert lane.drafter.catch_up(lane.context, 1, 9) == 0
        assert lane.drafter.filled == [0, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["none", "ngram", "prediction", "suffix", "medusa", "kangaroo"])
def test_drafters_that_read_as_they_are_told(name: str) -> None:
    with torch.inference_mode():
        lane = opened(name, "a", "c")
        assert lane.drafter.num_unread(lane.context) == [0, 0]
        assert lane.drafter.catch_up(lane.context, 1, 9) == 0


def test_a_drafter_that_cannot_take_rows_says_so() -> None:
    with torch.inference_mode():
        model, method = target(), TreeMethod(lambda ids, depth: [])
        lanes = [Lane(model, method, [row(name, 0)], CAPACITY) for name in "ab"]
        with pytest.raises(RuntimeError, match="TreeDrafter was joined though its can_join is False"):
            lanes[0].join(lanes[1])


# -- negative controls ---------------------------------------------------------------------------------------------------

Fault = Callable[[Callable[[], None], Any, Any, Context], None]
"""(the right join, ready to be called; these rows' drafter; the other; the joined context)"""


def forgets_memory(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    for memory in memory_of(other).keys:
        memory.zero_()
    join()


def counts_unread_text(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    other.filled = context.lengths[len(mine.filled) :]
    join()


def forgets_filled(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    other.filled = [filled - 1 for filled in other.filled]
    join()


def forgets_last(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    mine.last = other.last = None
    join()


def all_lack(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    join()
    if mine.last is not None:
        mine.lacking = [True] * context.num_rows


def forgets_features(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    other.feature = torch.zeros_like(other.feature)
    join()


def swaps(name: str) -> Fault:
    def fault(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
        join()
        setattr(mine, name, getattr(mine, name)[::-1])

    return fault


def swaps_features(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    join()
    mine.features.rows.reverse()
    mine.filled.reverse()


def leaves_library(join: Callable[[], None], mine: Any, other: Any, context: Context) -> None:
    join()
    mine.library = Library(65536, 64)


FAULTS: list[tuple[str, type[Drafter], Fault]] = [
    ("ngram", NgramDrafter, swaps("rows")),
    ("prediction", PredictionDrafter, swaps("rows")),
    ("suffix", SuffixDrafter, swaps("rows")),
    ("suffix", SuffixDrafter, leaves_library),
    ("draft_model", ModelDrafter, forgets_memory),
    ("draft_model", ModelDrafter, counts_unread_text),
    ("draft_model", ModelDrafter, swaps("filled")),
    ("medusa", MedusaDrafter, forgets_features),
    ("eagle3", EagleDrafter, forgets_memory),
    ("eagle3", EagleDrafter, forgets_filled),
    ("eagle1", EagleDrafter, swaps_features),
    ("kangaroo", KangarooDrafter, forgets_memory),
    ("kangaroo", KangarooDrafter, forgets_last),
    ("kangaroo", KangarooDrafter, all_lack),
    ("dflash", DFlashDrafter, forgets_memory),
]


def is_caught(name: str) -> bool:
    """Whether the worlds differ, or a drafter notices by itself."""
    case = (name, "chain", DrawMode.COUPLED if name in list(METHODS)[4:] else DrawMode.FIXED)
    expected = apart(*case)
    try:
        return together(*case) != expected
    except (AssertionError, RuntimeError, IndexError):
        return True


@pytest.mark.parametrize(("name", "drafter", "fault"), FAULTS)
def test_a_wrong_join_is_seen(name: str, drafter: Any, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    right = drafter.join

    def wrong(self: Any, other: Any, context: Context) -> None:
        fault(lambda: right(self, other, context), self, other, context)

    monkeypatch.setattr(drafter, "join", wrong)
    assert is_caught(name)


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "kangaroo", "dflash"])
def test_slots_that_do_not_survive_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that change places, or join, with one slot too few."""
    monkeypatch.setattr(KVCache, "keep", lambda self, rows, used: KEEP(self, rows, used - 1))
    assert is_caught(name)
    monkeypatch.setattr(KVCache, "keep", KEEP)
    monkeypatch.setattr(KVCache, "join", lambda self, other, used, kept: JOIN(self, other, max(0, used - 1), kept))
    assert is_caught(name)


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "dflash"])
def test_reading_ahead_wrongly_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the memory of another row."""
    rows = KVCache.rows
    monkeypatch.setattr(KVCache, "rows", lambda self, start, stop: rows(self, 0, 1))
    assert is_caught(name)
