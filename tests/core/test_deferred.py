"""Draws from logits against the slow twin: distributions of all nodes by ``logits_to_probs``, and ``race``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core import deferred as module, probs as probs_module
from foretell.core.deferred import Deferred
from foretell.core.noise import Stream, exponentials, race, stream_keys
from foretell.core.params import SamplingParams
from foretell.core.probs import History, Paths, Processors, logits_to_probs
from foretell.core.tree import layout
from foretell.kernels.build import BuildError, load_library, typed, variants_of
from foretell.kernels.small import FUNCTIONS

V, CPU, INF = 1311, torch.device("cpu"), math.inf  # two whole blocks of the kernel and a part
PARENT = [-1, 0, 0, 1, 1, 3]
PARAMS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 7.0},
    "top_p": {"top_p": 0.6},
    "narrow": {"top_p": 0.05},
    "top_k": {"top_k": 5},
    "many": {"top_k": 700},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_new_tokens": 9},
    "bias": {"logit_bias": {7: 6.0, 8: -INF}, "banned_token_ids": (3,), "top_p": 0.8},
}


def variants() -> list[str]:
    try:
        return variants_of("race")
    except BuildError:
        return []


def use(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    library = typed(load_library("race", variant), FUNCTIONS) if variant else None
    monkeypatch.setattr(module, "race_library", lambda: library)


def made(
    params: Sequence[dict[str, Any]], seed: int = 0, vocab_size: int = V
) -> tuple[Deferred, Callable[[], Tensor], Tensor]:
    """(what is tested, the slow twin, keys [B, N]) for one tree a row."""
    torch.manual_seed(seed)
    logits = torch.randn(len(params), len(PARENT), vocab_size) * 2
    logits[..., : min(40, vocab_size)] += 5 * torch.rand(*logits.shape[:2], min(40, vocab_size))
    parent = torch.tensor([PARENT] * len(params))
    tokens = torch.randint(vocab_size, parent.shape)
    length = torch.full((len(params),), 5)
    paths = Paths(tokens, layout(parent, length, 64).ancestry, parent)
    rows = [SamplingParams(**row) for row in params]
    processors = Processors(rows, vocab_size=vocab_size, end_token_ids=[2], device=CPU)
    ids = [torch.randint(vocab_size, (6,)).tolist() for _ in params]
    num_prompt = [1 + row % 5 for row in range(len(params))]  # no two neighbours have as many
    history = History(ids, num_prompt)
    keys = stream_keys(torch.arange(len(params))[:, None] + seed, torch.arange(len(PARENT))[None], Stream.COUPLED)
    deferred = Deferred(logits, processors, history, paths)
    frozen = History([list(text) for text in ids], num_prompt)
    return deferred, lambda: logits_to_probs(logits, processors, frozen, paths), keys


def all_draws(deferred: Deferred, keys: Tensor) -> list[tuple[int, bool]]:
    num_rows, num_nodes = keys.shape
    rows = [row for row in range(num_rows) for _ in range(num_nodes)]
    return deferred.draw(rows, list(range(num_nodes)) * num_rows, keys.flatten().tolist())


def assert_same(deferred: Deferred, twin: Callable[[], Tensor], keys: Tensor) -> None:
    p = twin()
    drawn = race(p, keys)
    sound = p.gather(2, drawn[..., None])[..., 0] > 0
    found = all_draws(deferred, keys)
    assert [has for _, has in found] == sound.flatten().tolist()
    for (token, has), expected in zip(found, drawn.flatten().tolist(), strict=True):
        assert token == expected or not has


@pytest.mark.parametrize("variant", [*variants(), ""])
def test_the_tokens_of_the_slow_twin(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filter in one batch, each with 12 trees' worth of draws; alone a row draws the same."""
    use(monkeypatch, variant)
    for seed in range(12 if variant else 2):
        deferred, twin, keys = made(list(PARAMS.values()), seed)
        assert_same(deferred, twin, keys)
        part = deferred.slice(seed % 10, seed % 10 + 2)
        assert all_draws(part, keys[seed % 10 : seed % 10 + 2]) == [
            deferred.draw([row], [node], [int(keys[row, node])])[0]
            for row in (seed % 10, seed % 10 + 1)
            for node in range(len(PARENT))
        ]


@pytest.mark.parametrize("name", PARAMS)
def test_most_draws_need_no_probabilities(name: str) -> None:
    if not variants():
        pytest.skip("needs the C kernels")
    if name == "many":
        pytest.skip("more than 256 kept tokens are left to torch")
    tokens = []
    for seed in range(10):
        deferred, _, keys = made([PARAMS[name]], seed)
        nodes = list(range(len(PARENT)))
        tokens += deferred._quick([0] * len(nodes), nodes, keys[0].tolist())
    assert sum(token < 0 for token in tokens) <= 2


def test_bits_of_p_do_not_depend_on_the_other_rows_and_nodes() -> None:
    deferred, twin, _ = made(list(PARAMS.values()))
    deferred.logits[1, 2, 9] = math.nan  # its row is computed in another way: the others must not be
    p = twin()
    for row in range(len(PARAMS)):
        for node in range(len(PARENT)):
            assert torch.equal(deferred.at(row, node), p[row, node])
    assert torch.equal(deferred.probs, p)


def test_a_part_is_its_rows_whatever_they_have() -> None:
    """Each kind of parameters stands at each place of a part; the part's part too."""
    kinds = [
        PARAMS["penalties"],
        PARAMS["bias"],
        PARAMS["all"],
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 2.0},
    ]
    deferred, twin, keys = made(kinds * 2, vocab_size=150)
    p, drawn = twin(), all_draws(deferred, keys)
    for start in range(len(p)):
        for stop in {start + 1, min(start + 3, len(p)), len(p)}:
            part, nodes = deferred.slice(start, stop), len(PARENT)
            assert torch.equal(part.probs, p[start:stop])
            assert torch.equal(part.slice(stop - start - 1, stop - start).probs, p[stop - 1 : stop])
            assert all_draws(deferred.slice(start, stop), keys[start:stop]) == drawn[start * nodes : stop * nodes]


@pytest.mark.parametrize("variant", [*variants(), ""])
@pytest.mark.parametrize("name", ["greedy", "plain", "top_k", "top_p", "min_p"])
def test_logits_that_are_no_numbers(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, variant)
    deferred, twin, keys = made([PARAMS[name]])
    logits = deferred.logits[0]
    logits[0, 3] = math.nan
    logits[1, 700] = INF
    logits[2] = -INF
    logits[3] = math.nan
    logits[4, 1:] = -INF
    logits[5, 600:] = -INF
    assert_same(deferred, twin, keys)
    assert [has for _, has in all_draws(deferred, keys)] == [True, True, False, False, True, True]


def test_scores_that_nearly_tie_are_decided_by_the_probabilities() -> None:
    """Of two tokens each score is made equal but for the last bits: what wins depends on how p is rounded."""
    if not variants():
        pytest.skip("needs the C kernels")
    agreed = 0
    for seed in range(60):
        deferred, twin, keys = made([{}], seed)
        log_e = exponentials(keys, V).double().log()
        best = (deferred.logits.double() - log_e).max(-1).values + 1.0
        for token in (400 + seed, 1000 + seed):
            deferred.logits[..., token] = (best + log_e[..., token]).float()
        assert deferred._quick([0], [0], [int(keys[0, 0])]) == [-1]
        assert_same(deferred, twin, keys)
        agreed += int((deferred.logits.double() - log_e)[0, 0].argmax()) == all_draws(deferred, keys)[0][0]
    assert 0 < agreed < 60, "the logits alone would have drawn other tokens"


def test_the_edge_of_top_p_is_decided_by_the_probabilities() -> None:
    """Two tokens of one half each, the second of them a rounding away from being cut."""
    if not variants():
        pytest.skip("needs the C kernels")
    undecided = 0
    for seed in range(30):
        deferred, twin, keys = made([{"top_p": 0.5000001}, {"top_p": 0.4999999}], seed)
        deferred.logits.fill_(-INF)
        deferred.logits[..., 10] = 1.0
        deferred.logits[..., 900] = 1.0 - 1e-6
        assert_same(deferred, twin, keys)
        undecided += sum(token < 0 for token in deferred._quick([0, 1], [0, 0], keys[:, 0].tolist()))
    assert undecided > 15


@pytest.mark.parametrize("others", [{}, {"top_k": 2}, {"top_p": 0.999}, {"temperature": 0.7}, {"temperature": 1.9}])
@pytest.mark.parametrize("min_p", [0.5, 0.3, 0.9])
def test_the_edge_of_min_p_is_decided_by_the_probabilities(min_p: float, others: dict[str, float]) -> None:
    """Of two tokens the second has min_p of the first's probability, but for a rounding to either side."""
    if not variants():
        pytest.skip("needs the C kernels")
    undecided, kept = 0, []
    for seed in range(40):
        deferred, twin, keys = made([{"min_p": min_p, **others}] * 2, seed)
        deferred.logits.fill_(-INF)
        deferred.logits[..., 10] = 1.0
        below = 1.0 + math.log(min_p) * float(others.get("temperature", 1.0))
        apart = seed * 1e-8
        deferred.logits[0, :, 900], deferred.logits[1, :, 900] = below + apart, below - apart
        kept += (twin()[:, 0, 900] > 0).tolist()
        assert_same(deferred, twin, keys)
        undecided += sum(token < 0 for token in deferred._quick([0, 1], [0, 0], keys[:, 0].tolist()))
    assert set(kept) == {True, False}
    assert undecided > 8


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.7, 1e4])
@pytest.mark.parametrize("apart", [0, 1, 2, 64])
def test_the_edge_of_top_k_is_where_the_slow_twin_has_it(apart: int, temperature: float) -> None:
    """Tokens about the k-th are equal, or so many roundings apart that the temperature may make them equal."""
    if not variants():
        pytest.skip("needs the C kernels")
    drawn = set()
    for seed in range(40):
        deferred, twin, keys = made(
            [{"top_k": 2, "temperature": temperature}, {"top_k": 3, "temperature": temperature}], seed
        )
        deferred.logits.fill_(-INF)
        deferred.logits[..., 10] = 1.5
        edge = torch.tensor(1.3)
        for place, token in enumerate((900, 700, 1200, 20)):
            deferred.logits[..., token] = (edge.view(torch.int32) - place * apart).view(torch.float32)
        assert_same(deferred, twin, keys)
        drawn |= {token for token, _ in all_draws(deferred, keys)}
    assert {10, 900} < drawn


def test_a_text_that_grows_is_read_as_it_was() -> None:
    deferred, twin, keys = made([PARAMS["penalties"]])
    for ids in deferred.history.ids:
        ids.extend([int(deferred.logits[0, 0].argmax())] * 3)
    assert torch.equal(deferred.at(0, 0), twin()[0, 0])
    assert torch.equal(deferred.probs, twin())
    assert_same(deferred, twin, keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("surplus", [-7, 0, 9])
def test_other_dtypes_and_widths(dtype: torch.dtype, surplus: int) -> None:
    for name in ("plain", "greedy", "all", "penalties"):
        deferred, _, keys = made([PARAMS[name]])
        wide = torch.nn.functional.pad(deferred.logits, (0, surplus)).to(dtype)
        given = Deferred(wide, deferred.processors, deferred.history, deferred.paths)
        p = logits_to_probs(wide, given.processors, given.history, given.paths)
        assert given.dtype == p.dtype
        assert given.shape == p.shape
        assert_same(given, lambda p=p: p, keys)  # type: ignore[misc]


def test_mass_of_the_drawn_token_and_of_others() -> None:
    deferred, twin, keys = made([PARAMS["top_k"]])
    ((token, has),) = deferred.draw([0], [1], [int(keys[0, 1])])
    assert has
    assert deferred.has_mass(0, 1, token)
    p = twin()[0, 1]
    assert not deferred.has_mass(0, 1, int(p.argmin()))
    assert deferred.has_mass(0, 1, int(p.argmax()))


@pytest.mark.parametrize("columns", [("repetition_penalty",), ("presence_penalty", "frequency_penalty"), ()])
def test_penalties_of_the_tokens_seen_are_those_of_all(columns: Sequence[str]) -> None:
    settings = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    chosen = {name: value for name, value in settings.items() if name in columns or not columns}
    deferred, _, _ = made([chosen, {}, {**chosen, "temperature": 0.5}], vocab_size=30)
    given = deferred.logits, deferred.processors, deferred.history, deferred.paths
    before = deferred.logits.clone()
    found = probs_module._penalise_seen(*given)
    assert torch.equal(found, probs_module._penalise_all(*given))
    assert not torch.equal(found, before)
    assert torch.equal(deferred.logits, before)


def test_a_long_text_is_sent_once_for_all_nodes_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tensor, which processors read at every node: of 16,000 tokens it takes half a millisecond to make."""
    made, seen = list[int](), list[list[int]]()
    whole = probs_module.tensor_on
    monkeypatch.setattr(
        probs_module, "tensor_on", lambda device, values, *how: made.append(len(values)) or whole(device, values, *how)
    )

    def note(ids: Tensor, logits: Tensor) -> Tensor:
        seen.append(ids.tolist())
        ids.fill_(-1)  # it is the processor's own
        return logits

    processors = Processors([SamplingParams(logits_processor=note)], vocab_size=9, end_token_ids=(), device=CPU)
    text = [*range(300)]
    history, parent = History([text], [300]), torch.tensor([[-1, 0, 1]])
    ancestry = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    made.clear()
    for step in range(3):
        tokens = torch.tensor([[text[-1], 7, 8]])
        deferred = Deferred(torch.zeros(1, 3, 9), processors, history, Paths(tokens, ancestry, parent))
        all_draws(deferred, torch.tensor([[1, 2, 3]]))
        assert seen[-3:] == [text, [*text, 7], [*text, 7, 8]]
        assert float(deferred.slice(0, 1).probs.sum()) == pytest.approx(3.0)
        text += [step, step]
        deferred.at(0, 2)  # an observer asks after the step
        assert seen[-1] == [*text[:-2], 7, 8]
    assert sorted(made) == [2, 2, 2, 300]
