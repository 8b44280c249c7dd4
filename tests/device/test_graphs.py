"""Captured graphs (``core/graphs.py``) on the pretend device: a launch of one is the recorded operators, run again.

The same steps launch by launch are the oracle: equal tokens, and the same guesses of them kept.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.core import graphs
from foretell.core.graphs import Feed, Graphs, bucket
from foretell.core.spec import method_words
from foretell.core.upload import tensor_on
from foretell.engine.captured import READS_HISTORY, CapturedSteps
from foretell.engine.event import StepEvent
from foretell.model import blocks
from foretell.model.load import load_tokenizer
from tests.device.counting import PROMPTS, Run, engine_on, requests, run
from tests.device.pretend import METER, NAME, PretendRecorder, device
from tests.device.test_tokens import DRAFT, FAST, OPTIONS, SHORT, SLOW
from tests.service.test_service import Mailbox

LONG = SamplingParams(max_new_tokens=32, ignore_eos=True)
ROWS = [LONG, replace(LONG, temperature=0.0), replace(LONG, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=16)]
QUICK = ("none", "draft_model")
WARM = {"warm", "captured", "launched"}
WAITING = ("greedy_block",)
HOST = {f"the rule {name!r} reads values on the host" for name in WAITING}
DRAFTS = {
    "a draft model reads a long text",
    "a head reads a long text",
    "the acceptance head reads temperatures on the host",
}
"""Why a step of these configurations is not one graph: no reason but these."""

Launched = Callable[..., tuple[Run, Counter[str]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """A run with captured graphs, and how its steps ran, those of targets and drafts together."""

    def decode(config: Any, given: list[Request], batch_size: int = 8, **options: Any) -> tuple[Run, Counter[str]]:
        made: list[Graphs] = []
        begin = Graphs.__init__

        def keep(self: Graphs, device: torch.device) -> None:
            begin(self, device)
            made.append(self)

        with monkeypatch.context() as patch:
            patch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
            patch.setattr(Graphs, "__init__", keep)
            found = run(engine_on(NAME, config, **options), given, batch_size)
        return found, sum((one.steps for one in made), Counter())

    return decode


def assert_same(launched: Launched, config: Any, given: list[Request], batch_size: int = 8) -> Counter[str]:
    """Tokens and kept guesses are those of launch by launch; how the steps ran."""
    expected = run(engine_on(NAME, config), given, batch_size)
    found, steps = launched(config, given, batch_size)
    assert found.tokens == expected.tokens
    assert [step.shape[1:] for step in found.steps] == [step.shape[1:] for step in expected.steps]
    return steps


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAST, *SLOW) if name not in QUICK)]
)
def test_graphs_write_the_same_tokens(launched: Launched, name: str) -> None:
    """Of every method, shape and verifier; of few kinds, most steps are launched."""
    rows = ROWS if name not in QUICK else [replace(row, max_new_tokens=16) for row in ROWS[:2]]
    steps = assert_same(launched, (FAST | SLOW)[name], requests(rows))
    assert steps.keys() <= WARM | HOST | DRAFTS
    assert steps["launched"] > 5 or name.endswith(WAITING)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("none", 0),
        ("draft_model:4", 3),
        pytest.param("draft_model:dyspec/size=8", 3, marks=pytest.mark.slow),
        pytest.param("draft_model:rejection:4", 3, marks=pytest.mark.slow),
        pytest.param("eagle3:4", 6, marks=pytest.mark.slow),
        pytest.param("eagle3:eagle2/size=8", 6, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_two_graphs(launched: Launched, words: str, most: int) -> None:
    """The draft's, with an upload that does not wait and a copy before it; the target's, with a copy before it and one
    behind it, and the read."""
    found, _ = launched(method_words(words)[0], requests([replace(LONG, max_new_tokens=30)]))
    lean = [step for step in found.steady if step.launches["target"] == 0 and step.launches["draft"] <= most]
    assert len(lean) >= 4
    for step in lean:
        assert step.launches.total() - step.launches["draft"] == 4
        assert step.reads.total() == 1
        assert not step.uploads


def test_longer_texts_need_graphs_of_more_slots(launched: Launched) -> None:
    """A graph that attends to 64 slots does not serve a longer text; plain decoding shows every token."""
    given = requests([replace(LONG, max_new_tokens=22)], ["x = 1; " * 12])
    assert assert_same(launched, "none", given)["captured"] == 2


def test_rows_of_other_parameters_take_the_place_of_rows_that_ended(launched: Launched) -> None:
    """One memory holds the parameters that a graph reads."""
    given = requests([replace(LONG, max_new_tokens=6, temperature=temperature) for temperature in (0.5, 1.5, 1.0)])
    steps = assert_same(launched, "none", given, batch_size=1)
    assert steps["launched"] > 10


def test_no_address_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values, and what a graph puts out, lie where they lay."""
    monkeypatch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
    engine, seen = engine_on(NAME, DRAFT), list[tuple[int, ...]]()

    def watch(event: StepEvent) -> None:
        seen.append((event.logits.shape[1], event.logits.data_ptr(), event.evidence.tree.tokens.data_ptr()))

    engine.observers.append(watch)
    engine.generate_batch(requests([LONG]))
    whole = [places for places in seen if places[0] == 5]
    assert len(whole) > 4
    assert len(set(whole[2:])) == 1


def test_padding_is_written_behind_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows run as four: the fourth has no block, so what it writes is lost; it reads and writes no other's."""
    monkeypatch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
    engine, held, steps = engine_on(NAME, "none"), list[CapturedSteps](), list[list[torch.Tensor]]()
    block = blocks.BLOCK
    begin = CapturedSteps.__init__

    def keep(self: CapturedSteps, *args: Any) -> None:
        begin(self, *args)
        held.append(self)

    def watch(event: StepEvent) -> None:
        if len(event.rows) == 3:
            steps.append([keys.cpu().clone() for keys in held[0].pool._all_keys])

    monkeypatch.setattr(CapturedSteps, "__init__", keep)
    engine.observers.append(watch)
    engine.generate_batch(requests([replace(SHORT, max_new_tokens=count) for count in (8, 8, 8, 2)]))
    assert len(steps) == 6
    for first, last in zip(steps[0], steps[-1], strict=True):
        changed = (first != last).any(-1).any(0).view(-1, block).any(1).tolist()
        assert changed[:2] == [False, False] or changed[:2] == [True, False]
        assert sum(changed[2:]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("config", ["none", DRAFT], ids=["none", "draft_model"])
def test_rows_of_a_service_come_and_go(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """Beside rows that are decoded others' prompts are read, piece by piece: padding is written over none of them."""
    texts = [PROMPTS[0], PROMPTS[2], PROMPTS[2] + "1", PROMPTS[1] * 8]
    prompts, found, sure = [load_tokenizer("bundled/target").encode(text) for text in texts], [], []
    for graph in ("off", "auto"):
        if graph == "auto":
            monkeypatch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
        begun = METER.graphs
        options = ServiceOptions(max_num_seqs=4, max_model_len=256, speculation="on", stall_target_s=1e-9)
        service, box = Service(engine_on(NAME, config), options), Mailbox()
        service.start()
        for number, prompt in enumerate(prompts):
            while number == 3 and graph == "auto" and METER.graphs < begun + 2:  # three are decoded
                time.sleep(0.01)
            params = replace(SHORT, seed=number, max_new_tokens=10 if number == 3 else 32, logprobs=1)
            service.submit(Submission(str(number), prompt, params), box.hear)
        done = [box.last(str(number), 200.0).completion for number in range(len(prompts))]
        service.close()
        assert (METER.graphs > begun + 4) == (graph == "auto")
        found.append([None if each is None else each.token_ids for each in done])
        sure.append([piece.logprob for each in done for piece in (each.pieces if each else ())])
    assert None not in found[0]
    assert found[0] == found[1]
    assert sure[0] == pytest.approx(sure[1], abs=1e-3), "keys and values are those of the text"


@pytest.mark.parametrize("name", [*OPTIONS, "groups", "width", "off"])
def test_what_cannot_be_captured_is_said(launched: Launched, name: str) -> None:
    """And decoded launch by launch."""
    given, config, options = requests([SHORT]), "none", {}
    if name in OPTIONS:
        given = requests([replace(SHORT, max_new_tokens=8, **OPTIONS[name])])
    elif name == "groups":
        given = [
            replace(one, speculative=each) for one, each in zip(requests([SHORT] * 2), ("none", "ngram"), strict=True)
        ]
    else:
        options = {"width": 8} if name == "width" else {"cuda_graphs": "off"}
    expected = run(engine_on(NAME, config, **({"width": 8} if name == "width" else {})), given)
    found, steps = launched(config, given, **options)
    assert found.tokens == expected.tokens
    said = {
        "groups": "rows of one batch are guessed or judged in several ways",
        **dict.fromkeys(("penalties", "bias", "processor"), READS_HISTORY),
    }  # fmt: skip
    if name in said:
        assert steps[said[name]] > 1
        assert not steps["captured"]
    else:
        assert bool(steps) == (name == "filters")


class Tried:
    """``Graphs`` of the pretend device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(graphs.RECORDERS, NAME, PretendRecorder)
        self.graphs = Graphs(device())

    def on(self, *values: Any) -> torch.Tensor:
        return tensor_on(device(), list(values))


def test_padding_never_holds_what_an_earlier_step_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch)
    for count in (4, 3, 2, 4, 1):
        given = tried.on(*range(1, count + 1))
        found = tried.graphs.run("a", [Feed(given, (4,), -1)], lambda x: x * 2)
        assert found.tolist() == [2 * k for k in range(1, count + 1)] + [-2] * (4 - count)
    assert tried.graphs.steps == {"warm": 1, "captured": 1, "launched": 3}


def test_a_constant_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch)
    first, second = tried.on(1, 2), tried.on(3, 4)
    for given in (first, first, first, second, second):
        found = tried.graphs.run("a", [Feed(given, (2,), constant=True)], lambda x: x + 1)
        assert found.tolist() == [x + 1 for x in given.tolist()]
        METER.reset()
    tried.graphs.run("a", [Feed(second, (2,), constant=True)], lambda x: x + 1)
    assert METER.launches.total() == 1


def test_a_graph_that_comes_to_something_else_is_never_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch)
    monkeypatch.setattr(PretendRecorder, "capture", lambda self, function: (lambda: None, function() + 1))
    for _ in range(4):
        found = tried.graphs.run("a", [Feed(tried.on(1), (1,))], lambda x: x + 1, outcome=lambda out: out)
        assert found.tolist() == [2]
    assert tried.graphs.steps == {"warm": 1, "the first launch of its graph came to another outcome": 3}


@pytest.mark.parametrize("how", ["upload", "read"])
def test_the_host_has_no_part_in_a_graph(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """What would be sent once and read by every launch, or waited for, is refused; the function runs as it is."""
    tried, number = Tried(monkeypatch), 0

    def asks(x: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return x + (tensor_on(x.device, [number]) if how == "upload" else x.sum().item())

    for _ in range(4):
        expected = number + 2 if how == "upload" else 2
        found = tried.graphs.run("a", [Feed(tried.on(1), (1,))], asks).tolist()
        assert found == [2] if how == "read" else found[0] >= expected
    (reason,) = tried.graphs.steps.keys() - {"warm"}
    assert reason.startswith("cannot be captured: ")
    assert tried.graphs.steps == {"warm": 1, reason: 3}


def test_the_kind_unused_longest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch)
    monkeypatch.setattr(graphs, "MOST_KINDS", 2)
    for key in "aabbacca":
        tried.graphs.run(key, [Feed(tried.on(1), (1,))], lambda x: x + 1)
    assert tried.graphs.steps == {"warm": 3, "captured": 3, "launched": 2}
    tried.graphs.run("b", [Feed(tried.on(1), (1,))], lambda x: x + 1)
    assert tried.graphs.steps["warm"] == 4


def test_buckets() -> None:
    assert [bucket(count) for count in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]
    assert [bucket(count, 64) for count in (1, 64, 65, 200)] == [64, 64, 128, 256]
