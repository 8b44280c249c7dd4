"""Rows of one batch with several ways of guessing: each row draws with its own seed, whatever stands above it.

Under a rule that reads q the text depends on the draft's own draws. So a row whose drafter drew with another row's seed
has another text than alone, though not a wrong distribution: no statistical test of one row sees it.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell import Completion, Engine, Request, SamplingParams, Service, ServiceOptions, Submission, Update
from foretell.core.noise import Noise
from foretell.core.params import FORMATS
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawnBy, TokenTree, chain_tree, root_tree
from foretell.draft.base import Commit, Context
from foretell.engine.drafters.groups import GroupedDrafter
from foretell.engine.drafters.lazy import part
from foretell.engine.event import StepEvent
from foretell.engine.loop import Limits, Loop
from foretell.engine.request.result import StepTrace
from foretell.engine.state import Tapping
from foretell.service.memory import bytes_per_token
from foretell.verify import VERIFIERS, Coupled
from foretell.verify.base import Evidence, RowVerifiers, Verdict
from foretell.verify.drawing import draw
from tests.engine.harness import EOS, VOCAB, restless, started, table_engine
from tests.engine.integrity import check_loop, check_service
from tests.service.test_service import Mailbox

PAIR = {"method": "draft_model", "model": "table", "verify": "rejection"}
WAYS: tuple[dict[str, Any], ...] = (
    {**PAIR, "num_speculative_tokens": 4},
    {**PAIR, "shape": "static/branching=3x1"},
    {**PAIR, "shape": "static/branching=2x1", "draws": "iid"},
    {**PAIR, "num_speculative_tokens": 3, "verify": "block"},
)
"""No two of them can be guessed by one drafter and judged by one verifier, so each is a group of its own."""


def together(
    requests: list[tuple[dict[str, Any], Request]], *, kv_tokens: int = 0, preempted: bool = False
) -> list[list[int]]:
    """The tokens of requests that run in one batch: the first holds the engine's thread until all have been sent.
    kv_tokens: the memory of all rows; 0: enough. preempted: whether some had to give their rows up for a while."""
    served = table_engine(WAYS[0])
    memory = kv_tokens * bytes_per_token(served.model, [served.method]) / 2**30 if kv_tokens else 0.05
    service = Service(served, ServiceOptions(max_num_seqs=8, max_model_len=128, speculation="on", kv_memory_gib=memory))
    chosen = [service.method(way) for way, _ in requests]
    sent, box = threading.Event(), Mailbox()

    def sink(update: Update) -> None:
        assert sent.wait(30)
        box.hear(update)

    with started(service):
        for number, ((_, request), config) in enumerate(zip(requests, chosen, strict=True)):
            submission = Submission(str(number), list(request.prompt), request.params, speculative=config)
            service.submit(submission, sink)
        sent.set()
        found = [box.last(str(number)).completion.token_ids for number in range(len(requests))]
        assert (service.snapshot().num_preemptions > 0) == preempted
        check_service(service)
    return found


@pytest.mark.parametrize("same_prompt", [True, False])
def test_a_row_of_any_group_has_its_solo_text(same_prompt: bool) -> None:
    requests = []
    for number, way in enumerate(WAYS * 2):
        prompt = [3, 1, 4, 1, 5] if same_prompt else [number, 3, 1, 4, *range(number)]
        params = SamplingParams(seed=100 + number, max_new_tokens=24, ignore_eos=True)
        requests.append((way, Request(prompt, params)))
    found = together(requests)
    alone = [table_engine(way).generate(request.prompt, request.params).token_ids for way, request in requests]
    assert found == alone
    assert len({tuple(tokens) for tokens in found}) == len(found), "seeds matter"


MIXED: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "ngram", "verify": "rejection"},
    {**PAIR, "shape": "static/branching=3x1"},
    {**PAIR, "verify": "traversal", "shape": "static/branching=2x2", "draws": "iid"},
    {**PAIR, "verify": "block", "num_speculative_tokens": 3},
    {"method": "suffix", "verify": "exact", "shape": "opt_tree/size=6"},
    {"method": "suffix", "verify": "rejection"},
    {**PAIR, "verify": "coupled", "shape": "sequoia/size=7"},
)
"""Narrow groups stand before wide ones, those that draw nothing before those that do."""


@pytest.mark.parametrize("kv_tokens", [0, 224])
def test_mixed_methods_and_rules_keep_their_solo_texts_through_preemption(kv_tokens: int) -> None:
    """A row that gave up its place reads its text again, with a drafter opened anew, beside others than before. Under a
    rule that reads q the text depends on every guess, so the drafter has to stand exactly where it stood."""
    requests: list[tuple[dict[str, Any], Request]] = []
    for number, way in enumerate(MIXED * 2):
        params = SamplingParams(seed=100 + number, max_new_tokens=40, ignore_eos=True)
        requests.append((way, Request([number, 3, 1, 4, *range(number)] * 2, params)))
    found = together(requests, kv_tokens=kv_tokens, preempted=bool(kv_tokens))
    alone = [table_engine(way).generate(request.prompt, request.params) for way, request in requests]
    assert found == [one.token_ids for one in alone]
    assert all(one.num_accepted_tokens > 0 for (way, _), one in zip(requests, alone, strict=True) if "model" in way)


# -- what belongs to one row, whatever group it stands in --------------------------------------------------------------

GROUPS: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "ngram", "verify": "rejection", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    {**PAIR, "shape": "static/branching=2x2"},
    {"method": "prediction", "verify": "greedy_block", "num_speculative_tokens": 4},
    {**PAIR, "verify": "coupled", "num_speculative_tokens": 3},
    {"method": "prediction", "verify": "exact", "num_speculative_tokens": 4},
)
"""None of them learns from other requests, so that each step is the same alone."""

OWN: dict[str, tuple[Any, ...]] = {
    "temperature": (0.3, 1.0, 0.0, 1.8),
    "top_k": (0, 1, 3, 2),
    "top_p": (0.4, 1.0, 0.7, 0.2),
    "min_p": (0.0, 0.5, 0.2, 0.9),
    "repetition_penalty": (2.5, 1.0, 0.5, 4.0),
    "presence_penalty": (9.0, -9.0, 4.0, 20.0),
    "frequency_penalty": (-9.0, 9.0, 4.0, 20.0),
    "logit_bias": ({3: 4.0}, {}, {5: 3.0, 6: -4.0}, {7: 9.0}),
    "banned_token_ids": ((0, 1, 2, 3, 4, 5, 6), (), (7, 8, 9, 10, 11, 12), (13, 14, 15, 16, 17, 18, 19)),
    "min_new_tokens": (9, 0, 5, 13),
    "max_new_tokens": (14, 3, 9, 6),
    "stop": (("a", "b", " "), (), ("the", "."), ("0", "1", "x", "y", "c")),
    "stop_token_ids": (tuple(range(9)), tuple(range(5, 15)), (), tuple(range(12, 22))),
    "ignore_eos": (True, False),
    "seed": (1, 2, 3, 4, 5, 6, 7),
    "logits_processor": (restless, None),
    "logprobs": (None, 0, 3, 1),
}
"""Values that rows of one batch have side by side, of every parameter but the formats (``test_structured.py``)."""
BESIDE: dict[str, Callable[[int], dict[str, Any]]] = {
    "min_new_tokens": lambda number: {"stop_token_ids": tuple(range(number % 2, VOCAB, 2))},
    "ignore_eos": lambda number: {"logit_bias": {EOS: 5.0}},
}
"""What a parameter of a row has no effect without, by the row's number."""


def test_every_parameter_has_values() -> None:
    assert {*OWN, *FORMATS, "lenient_schema"} == {each.name for each in fields(SamplingParams)}


def own_requests(*names: str, default: bool = False) -> list[Request]:
    """Two rows for each way of guessing. Lengths, seeds and predictions differ, and so do values of the parameters, within
    a way as between the ways. default: the parameters are as they are where none gives them."""
    found = []
    for number, way in enumerate(GROUPS * 2):
        given: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "seed": 40 + number}
        for name in names:
            values = OWN[name]
            place = number if len(values) > 2 else number + number // 6
            given |= BESIDE.get(name, lambda _: {})(number) | ({} if default else {name: values[place % len(values)]})
        given["max_new_tokens"] = max(given["max_new_tokens"], given.get("min_new_tokens", 0))
        prompt = [3, 1, 4, *range(9), 3, 1, 4][: 5 + 4 * number % 7]
        prediction = [4, 1, number, 5, 9, 2, 6, 5, 3, 5]
        found.append(Request(prompt, SamplingParams(**given), prediction, speculative=way))
    return found


@dataclass
class Heard:
    """All that one request was told, and its watcher."""

    updates: list[Update]
    watched: list[tuple[Any, ...]]

    @property
    def completion(self) -> Completion:
        done = self.updates[-1].completion
        assert done is not None
        return done

    def told(self) -> list[Any]:
        """But for times."""
        done = {each.name: getattr(self.completion, each.name) for each in fields(Completion)}
        kept = {key: value for key, value in done.items() if "second" not in key and key != "num_preemptions"}
        pieces = [(update.pieces, update.tail, rounded(update.trace)) for update in self.updates]
        return [kept, pieces, self.watched]


def rounded(trace: StepTrace | None) -> Any:
    """A table's p is float64; the softmax of other widths may round otherwise."""
    if trace is None:
        return None
    return trace.tokens, trace.parent, [round(each, 12) for each in trace.probability], trace.path, trace.bonus


def heard(served: Engine, requests: Sequence[Request], num_rows: int) -> list[Heard]:
    """What each request hears, where at most num_rows are decoded together."""
    loop = Loop(served.model, Limits(num_rows, 99, 4096, 96, None), None)
    made = []
    for number, request in enumerate(requests):
        mine = Heard([], [])

        def watch(event: StepEvent, row: int, watched: list[tuple[Any, ...]] = mine.watched) -> None:
            where = next(each for each in event.parts if each.start <= row < each.stop)
            watched.append((where.method, type(where.verifier).__name__, event.text(row), event.commit.tokens[row]))

        prediction = request.prediction or ()
        submission = Submission(
            str(number), list(request.prompt), request.params, list(prediction), trace=True, watch=watch
        )  # fmt: skip
        loop.submit(served.row_of(number, submission, served.choice(request.speculative)), mine.updates.append)
        made.append(mine)
    with torch.inference_mode():
        while loop.has_work:
            loop.tick()
            check_loop(loop)
    return made


@pytest.fixture(scope="module")
def walked() -> Engine:
    return table_engine(GROUPS[0])


@pytest.mark.parametrize("first", range(4))
def test_every_parameter_is_its_own_rows_whatever_group_that_stands_in(walked: Engine, first: int) -> None:
    """A list that was read by the row's number within its group gave the second group the first one's values: 50 of 188
    texts had penalties that counted another row's prompt as output. Groups come, go and change places."""
    requests = own_requests(*list(OWN)[first::4])
    found = [one.told() for one in heard(walked, requests, 5)]
    assert found == [heard(walked, [request], 1)[0].told() for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_parameter_alone_has_an_effect_in_every_group(walked: Engine, name: str) -> None:
    requests = own_requests(name)
    alone = [heard(walked, [request], 1)[0].told() for request in requests]
    assert [one.told() for one in heard(walked, requests, len(requests))] == alone
    without = [heard(walked, [request], 1)[0].told() for request in own_requests(name, default=True)]
    changed = [one[:2] != other[:2] for one, other in zip(alone, without, strict=True)]
    assert all(changed[row] or changed[row + 6] for row in range(6))


def cut(value: Any, start: int, stop: int, num_rows: int) -> Any:
    """What rows [start, stop) have of a value of a batch: by its definition, whatever the field."""
    if isinstance(value, (list, tuple, torch.Tensor)) and len(value) == num_rows:
        return value[start:stop]
    if isinstance(value, Processors):
        return value.keep(range(start, stop)).params
    if is_dataclass(value):
        return {
            each.name: cut(getattr(value, each.name), start, stop, num_rows) for each in fields(value) if each.compare
        }
    return value


def shown(value: Any) -> Any:
    """A value for comparing: tensors as lists, dataclasses by field."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Processors):
        return value.params
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: shown(getattr(value, each.name)) for each in fields(value) if each.compare}
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    return value


def test_every_field_of_a_part_is_its_rows() -> None:
    """Of what a drafter reads, its tree and what it is told: whatever has a value for each row of the batch."""
    rows, numbers = 5, torch.arange(5)
    params = [SamplingParams(temperature=0.1 * row, seed=row) for row in range(rows)]
    context = Context(
        History([[row, 7, row] for row in range(rows)], [1 + row % 3 for row in range(rows)]),
        Processors(params, vocab_size=9, end_token_ids=[], device=numbers.device), numbers + 2, [2, 3, 4, 5, 6],
        numbers * 3, [[row] for row in range(rows)], [9, 8, 7, 6, 5], paid_limit=[1, 2, 3, 4, 5], least_chance=0.3,
    )  # fmt: skip
    shape = (rows, 3)
    tree = TokenTree(
        torch.arange(15).view(shape), torch.tensor([[-1, 0, 0]] * rows), torch.arange(15).view(shape) % 3,
        torch.rand(*shape, 9), torch.rand(*shape, 4), 2, 2, torch.arange(10).view(rows, 2),
    )  # fmt: skip
    commit = Commit(
        tree, numbers, [[0, row % 3] for row in range(rows)], [[row] for row in range(rows)], torch.rand(*shape, 4),
        [row % 2 == 0 for row in range(rows)], [3, 4, 5, 6, 7],
        [[row] for row in range(rows)],
    )  # fmt: skip
    assert all(getattr(commit, each.name) is not None for each in fields(commit)), "a new field: give it values by row"
    for start, stop in itertools.combinations(range(rows + 1), 2):
        group = SimpleNamespace(start=start, stop=stop, method=SimpleNamespace(taps=(1,)))
        grouped = GroupedDrafter([])
        grouped.tapping = Tapping((1,), ())
        for whole, found in (
            (context, part(context, start, stop)),
            (tree, tree.rows(start, stop)),
            (commit, grouped._own(commit, group)),  # type: ignore[arg-type]
        ):
            assert shown(found) == shown(cut(whole, start, stop, rows)), (type(whole), start, stop)


def two_trees() -> list[TokenTree]:
    """A chain, and a node with three children."""
    star = torch.tensor([[5, 1, 2, 3]])
    parent = torch.tensor([[-1, 0, 0, 0]])
    return [chain_tree(torch.tensor([[4, 1, 2]])), TokenTree(star, parent, torch.zeros_like(star), max_children=3)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_batch_is_as_wide_as_its_widest_group(order: tuple[int, int]) -> None:
    """The first group's number of children was once as good as another's to every test: the others lost their siblings."""
    trees = [two_trees()[k] for k in order]
    merged = GroupedDrafter([])._merge(trees, None)  # type: ignore[arg-type]
    merged.check()
    assert merged.max_children == 3
    unknown = [trees[0], TokenTree(trees[1].tokens, trees[1].parent, trees[1].drawn_by)]
    assert GroupedDrafter([])._merge(unknown, None).max_children is None  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("drawn", [0, 1])
def test_q_of_one_group_is_that_of_its_rows_alone(order: tuple[int, int], drawn: int) -> None:
    trees = two_trees()
    q = torch.zeros(1, trees[drawn].num_nodes, 8)
    q[0, 0] = 0.125
    labels = trees[drawn].drawn_by.clone()
    labels[0, 1] = int(DrawnBy.IID)
    with_q = TokenTree(trees[drawn].tokens, trees[drawn].parent, labels, q)
    found = GroupedDrafter([])._merge([with_q if k == drawn else trees[k] for k in order], None)  # type: ignore[arg-type]
    found.check()
    assert found.q is not None
    for row, k in enumerate(order):
        assert torch.equal(found.q[row, :3], q[0, :3] if k == drawn else torch.zeros(3, 8))


@dataclass(frozen=True)
class Reader(Coupled):
    """Notes which hidden states it is shown."""

    name = "reader"
    layers: tuple[int, ...] = ()
    seen: tuple[list[torch.Tensor | None], ...] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        return self.layers

    def walk(self, evidence: Evidence) -> Verdict | None:
        self.seen[0].append(evidence.taps)
        return super().walk(evidence)


def test_each_rule_of_a_batch_reads_its_own_layers() -> None:
    """All rules of a batch were once shown the layers of the first that reads any."""
    rules = [Reader(layers=layers, seen=([],)) for layers in ((7,), (5, 2), (2, 7))]
    panel = RowVerifiers((rules[0], VERIFIERS["rejection"], *rules[1:]), (1, 2, 3, 5))
    assert panel.taps == (7, 5, 2)
    taps = torch.arange(5 * 3.0).view(5, 1, 3)  # a channel of each layer
    noise = Noise(torch.arange(5), torch.full((5,), 9))
    draw(panel, Evidence(root_tree(torch.zeros(5, dtype=torch.int64)), torch.full((5, 1, 4), 0.25), noise, taps))
    shown = [rule.seen[0][0].tolist() for rule in rules]  # type: ignore[union-attr]
    assert shown == [[[[0.0]]], [[[7.0, 8.0]]], [[[11.0, 9.0]], [[14.0, 12.0]]]]
