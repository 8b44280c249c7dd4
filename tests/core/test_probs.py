"""``logits_to_probs`` against plain decoding in naive Python, node by node and row by row; and drawing from what it
returns."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretell.core.errors import ConfigError
from foretell.core.noise import Noise
from foretell.core.params import SamplingParams
from foretell.core.probs import (
    History,
    Paths,
    Processors,
    _top_p,
    logits_to_probs,
    one_hot_argmax,
    one_hot_argmax_reference,
)
from foretell.core.tree import chain_tree, layout
from foretell.kernels.small import invert_cdf
from foretell.verify import Coupled, Evidence, Exact, Rejection, draw

V = 11
CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan
PARENT = [-1, 0, 0, 1, 1, 3, -1]  # a branching tree, and one padding node
PATHS = [[], [1], [2], [1, 3], [1, 4], [1, 3, 5], []]


def naive(
    logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int], end_ids: Sequence[int]
) -> list[float]:
    """What plain decoding would sample from after prompt and output: scalar Python, in float64."""
    x = [-INF if math.isnan(value) else value for value in logits]
    for token in set(prompt + output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in params.banned_token_ids:
        x[token] = -INF
    if len(output) < params.min_new_tokens:
        for token in {*end_ids, *params.stop_token_ids}:
            x[token] = -INF
    if params.logits_processor is not None:
        x = params.logits_processor(torch.tensor(prompt + output), torch.tensor(x, dtype=torch.float64)).tolist()
    if params.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    x = [value / params.temperature for value in x]
    if params.top_k:
        edge = sorted(x, reverse=True)[min(params.top_k, len(x)) - 1]
        x = [value if value >= edge else -INF for value in x]
    probs = [math.exp(value - max(x)) for value in x]
    probs = [chance / sum(probs) for chance in probs]
    if params.top_p < 1:
        before, edge = 0.0, 1.0
        for chance in sorted(probs, reverse=True):
            if before >= params.top_p:
                break
            before, edge = before + chance, chance
        probs = [chance if chance >= edge else 0.0 for chance in probs]
    probs = [chance if chance >= params.min_p * max(probs) else 0.0 for chance in probs]
    return [chance / sum(probs) for chance in probs]


def reverse_of_last(ids: Tensor, logits: Tensor) -> Tensor:
    """A user's processor that looks at the whole text: favours the sum of all ids, and bans the last one."""
    out = logits.clone()
    out[int(ids.sum()) % len(out)] += 1.5
    out[ids[-1]] = -INF
    return out


# Values that float32 holds exactly (temperatures: and their inverses), so that float64 distributions can be compared
# closely.
EACH: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=3),
    "top_k 1": SamplingParams(top_k=1),
    "top_k above V": SamplingParams(top_k=1000),
    "top_p": SamplingParams(top_p=0.75),
    "min_p": SamplingParams(min_p=0.25),
    "min_p 1": SamplingParams(min_p=1.0),
    "repetition": SamplingParams(repetition_penalty=1.75),
    "repetition below 1": SamplingParams(repetition_penalty=0.5),
    "presence": SamplingParams(presence_penalty=0.75),
    "frequency": SamplingParams(frequency_penalty=-0.5),
    "logit_bias": SamplingParams(logit_bias={3: 2.0, 7: -4.0, 0: -INF}),
    "banned": SamplingParams(banned_token_ids=(1, 5)),
    "min_new": SamplingParams(min_new_tokens=4, stop_token_ids=(4,)),
    "user": SamplingParams(logits_processor=reverse_of_last),
    "all": SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.875,
        min_p=0.0625,
        repetition_penalty=1.25,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={2: 1.0},
        banned_token_ids=(6,),
        min_new_tokens=3,
        logits_processor=reverse_of_last,
    ),
    "all greedy": SamplingParams(
        temperature=0.0,
        top_k=2,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        min_new_tokens=4,
        banned_token_ids=(6,),
    ),
}
TEXTS: list[tuple[list[int], list[int]]] = [([3, 3, 8], [9, 1, 9]), ([1], []), ([0, 10, 4, 4], [4, 2])]
END = (10, 2)


def tree_of(num_rows: int) -> tuple[Tensor, Paths]:
    """(tokens, paths) of PARENT in every row, with tokens of its own in each."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, V, (num_rows, len(PARENT)), generator=generator)
    parent = torch.tensor(PARENT).expand(num_rows, -1)
    return tokens, Paths(tokens, layout(parent, torch.zeros(num_rows, dtype=torch.int64), 16).ancestry, parent)


def compare(
    rows: Sequence[tuple[SamplingParams, tuple[list[int], list[int]]]], *, dtype: torch.dtype, atol: float
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = (torch.randn(len(rows), len(PARENT), V, generator=generator, dtype=torch.float64) * 2).to(dtype)
    tokens, paths = tree_of(len(rows))
    history = History([prompt + output for _, (prompt, output) in rows], [len(prompt) for _, (prompt, _) in rows])
    processors = Processors([params for params, _ in rows], vocab_size=V, end_token_ids=END, device=CPU)
    before = logits.clone()
    probs = logits_to_probs(logits, processors, history, paths)
    assert torch.equal(logits, before), "the logits given are left alone"
    assert probs.shape == (len(rows), len(PARENT), V)
    for b, (params, (prompt, output)) in enumerate(rows):
        for node, path in enumerate(PATHS):
            if PARENT[node] < 0 < node:
                continue
            text = output + tokens[b, path].tolist()
            expected = naive(before[b, node].tolist(), params, prompt, text, END)
            assert torch.allclose(probs[b, node].double(), torch.tensor(expected, dtype=torch.float64), atol=atol), (
                b,
                node,
            )


@pytest.mark.parametrize("name", EACH)
def test_each_processor_at_every_node(name: str) -> None:
    """Item 6.7: processors at a draft position see the prefix and the path, in trees too."""
    compare([(EACH[name], text) for text in TEXTS], dtype=torch.float64, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_row_has_its_own_parameters(dtype: torch.dtype) -> None:
    """Items 6.7 (index mapping of batches) and 6.9 (half precision is widened before anything is done)."""
    rows = [(params, TEXTS[i % 3]) for i, params in enumerate(EACH.values())]
    compare(rows, dtype=dtype, atol=1e-12 if dtype == torch.float64 else 2e-6)
    compare(rows[::-1], dtype=dtype, atol=1e-12 if dtype == torch.float64 else 2e-6)


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4, 10]),
    top_p=st.sampled_from([0.125, 0.5, 0.9375, 1.0]),
    min_p=st.sampled_from([0.0, 0.0625, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([{}, {0: 3.0, 10: -1.0}]),
    banned_token_ids=st.sampled_from([(), (0, 3)]),
    min_new_tokens=st.sampled_from([0, 2, 5]),
    logits_processor=st.sampled_from([None, reverse_of_last]),
)


@given(st.lists(st.tuples(params_of_any_kind, st.sampled_from(TEXTS)), min_size=1, max_size=4))
def test_any_mixture_of_rows(rows: list[tuple[SamplingParams, tuple[list[int], list[int]]]]) -> None:
    compare(rows, dtype=torch.float64, atol=1e-12)


def alone(logits: Tensor, params: SamplingParams, vocab_size: int | None = None) -> Tensor:
    """Law of logits [V] under params, with no history to speak of."""
    processors = Processors([params], vocab_size=vocab_size or len(logits), end_token_ids=(), device=CPU)
    paths = Paths(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool))
    return logits_to_probs(logits[None, None], processors, History([[0]], [1]), paths)[0, 0]


def hf(logits: Tensor, params: SamplingParams) -> Tensor:
    """transformers' warpers, in the order in which it chains them."""
    chain: Any = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    out: Tensor = chain(torch.tensor([[0]]), logits[None].clone())
    return torch.softmax(out, -1)[0]


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_warpers_of_transformers(seed: int) -> None:
    """Item 6.8: order and renormalisation of filters."""
    generator = torch.Generator().manual_seed(seed)
    size = [7, 200, 1000][seed % 3]
    logits = torch.randn(size, generator=generator, dtype=torch.float64) * (1 + seed % 4)

    def pick(*values: float) -> float:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    params = SamplingParams(
        temperature=pick(1.0, 0.5, 0.25, 2.0),
        top_k=int(pick(0, 1, 5, 50, 2000)),
        top_p=pick(1.0, 0.25, 0.875, 0.984375),
        min_p=pick(0.0, 0.0625, 0.25),
        repetition_penalty=pick(1.0, 1.25),
    )
    ours, theirs = alone(logits, params), hf(logits, params)
    assert torch.equal(ours > 0, theirs > 0)
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("top_p", [0.5, 0.875, 0.9990234375, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
def test_top_p_beyond_the_first_tokens_sorted(top_p: float, spread: float) -> None:
    """The fallback: flat distributions need far more than the 64 tokens sorted first."""
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(torch.randn(2, 3, 2000, generator=generator, dtype=torch.float64) * spread, -1)
    column = torch.tensor([[[top_p]], [[0.25]]])
    few, all_at_once = _top_p(probs, column, first=4), _top_p(probs, column, first=2000)
    assert torch.equal(few, all_at_once)
    mass = few.sum(-1, keepdim=True)
    assert bool((mass >= column.double() - 1e-9).all())
    if top_p == 1.0:
        assert torch.equal(few[0], probs[0])
    if spread > 0:
        smallest = torch.where(few > 0, few, 1.0).amin(-1, keepdim=True)
        assert bool(((mass - smallest < column) | (column >= 1)).all()), "the smallest such set"


def test_ties_are_kept_or_go_to_the_lowest_id() -> None:
    """Item 6.9."""
    tied = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert alone(tied, SamplingParams(temperature=0.0)).tolist() == [0, 1, 0, 0, 0]
    assert alone(tied, SamplingParams(top_k=1)).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert alone(tied, SamplingParams(top_p=0.25)).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    many = torch.zeros(50_000, dtype=torch.bfloat16)
    many[[40_000, 777, 30_001]] = 8.0
    assert int(alone(many, SamplingParams(temperature=0.0)).argmax()) == 777
    wide = torch.zeros(4, 3, 50_000)
    wide[..., 123::1000] = 1.0
    assert bool((one_hot_argmax(wide).argmax(-1) == 123).all())


def test_a_greedy_choice_passes_over_nan_in_its_own_row_alone() -> None:
    nan, inf = math.nan, math.inf
    rows = torch.tensor([[1.0, 3.0, 3.0], [nan, 2.0, 1.0], [nan, -inf, -inf], [nan, 1.0, inf], [-inf, -inf, -inf]])
    chosen = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert one_hot_argmax(rows).tolist() == chosen
    assert [one_hot_argmax(row).tolist() for row in rows] == chosen


@pytest.mark.parametrize("vocab_size", [1, 7, 512, 513, 1500])
def test_the_greedy_choice_in_c_is_that_of_torch(vocab_size: int) -> None:
    """Ties within blocks and between them, NaN and infinities, views, and rows without any choice."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 4, (40, 3, vocab_size + 2), generator=generator).float()
    for value in (math.nan, -math.inf, math.inf):
        logits[torch.rand(logits.shape, generator=generator) < 2 / (3 * vocab_size)] = value
    logits[0], logits[1], logits[2] = math.nan, -math.inf, -1e38
    for rows in (logits, logits[..., 1 : vocab_size + 1], logits[7, 1], logits.transpose(0, 1)):
        assert torch.equal(one_hot_argmax(rows), one_hot_argmax_reference(rows))
    assert one_hot_argmax(logits[:2]).sum() == 0
    assert (one_hot_argmax(logits[2])[:, 0] == 1).all()


def test_temperature_0_is_one_hot_after_all_other_processors() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, 1.0])
    probs = alone(logits, SamplingParams(temperature=0.0, banned_token_ids=(0,), logit_bias={2: 1.5}, top_p=0.5))
    assert probs.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38])
def test_tiny_temperatures_tend_to_greedy(temperature: float) -> None:
    for shift in (-30.0, 0.0, 30.0):
        probs = alone(torch.tensor([1.0, 3.0, 2.0, 0.0]) + shift, SamplingParams(temperature=temperature))
        assert probs.tolist() == [0.0, 1.0, 0.0, 0.0]


FILTERS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.5),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.5),
    "min_p": SamplingParams(min_p=0.5),
    "all": SamplingParams(temperature=0.5, top_k=3, top_p=0.9375, min_p=0.0625),
    "greedy": SamplingParams(temperature=0.0),
    "bias": SamplingParams(logit_bias={1: INF}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_nan_logits_count_as_minus_infinity(name: str) -> None:
    """Item 6.5: degenerate rows have defined outcomes, whatever filters are on."""
    params = FILTERS[name]
    logits = torch.tensor([NAN, 1.0, 2.0, NAN, 0.5])
    expected = alone(torch.where(logits.isnan(), -INF, logits), params)
    assert torch.allclose(alone(logits, params), expected)
    assert bool((expected[[0, 3]] == 0).all())
    assert float(expected.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", FILTERS)
def test_infinite_logits_take_all(name: str) -> None:
    probs = alone(torch.tensor([1.0, INF, 2.0, -INF, NAN]), FILTERS[name])
    assert probs.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "bias"])
@pytest.mark.parametrize("bad", [-INF, NAN])
def test_rows_without_any_token_are_reported_and_harm_no_other(name: str, bad: float) -> None:
    """Item 6.5: never a uniform distribution over banned tokens, never a crash; ``draw`` says sound = False."""
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.5], [bad] * 4, [0.0, 2.0, 1.0, 0.5]])[:, None]
    processors = Processors([FILTERS[name]] * 3, vocab_size=4, end_token_ids=(), device=CPU)
    root = torch.zeros(3, 1, dtype=torch.int64)
    probs = logits_to_probs(
        logits, processors, History([[0]] * 3, [1] * 3), Paths(root, torch.ones(3, 1, 1, dtype=torch.bool))
    )
    assert not bool(torch.isfinite(probs[1]).all()) or float(probs[1].sum()) == 0.0
    for row in (0, 2):
        assert torch.equal(probs[row, 0], alone(logits[row, 0], FILTERS[name]))
    noise = Noise(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    for verifier in (Coupled(), Exact(), Rejection()):
        verdict = draw(verifier, Evidence(chain_tree(root), probs, noise))
        assert verdict.sound.tolist() == [True, False, True], verifier.name


def test_everything_banned_is_reported() -> None:
    probs = alone(torch.zeros(3), SamplingParams(banned_token_ids=(0, 1, 2)))
    assert not bool(torch.isfinite(probs).all()) or float(probs.sum()) == 0.0


def test_narrower_and_wider_logits() -> None:
    """Item 6.11: vocabularies of unequal width; the target's extra mass stays reachable."""
    logits = torch.tensor([0.5, 1.5, 1.0, 0.0])
    for params in (*FILTERS.values(), SamplingParams(logit_bias={3: 9.0}, repetition_penalty=1.5)):
        if 3 in params.logit_bias:
            narrow = alone(logits[:3], SamplingParams(logit_bias={3: 9.0}, repetition_penalty=1.5), 4)
            assert float(narrow[3]) == 0.0
            continue
        narrow = alone(logits[:3], params, 4)
        assert narrow.shape == (4,)
        assert float(narrow[3]) == 0.0
        assert torch.allclose(narrow[:3], alone(logits[:3], params))
        wide = alone(torch.cat([logits, torch.tensor([99.0, NAN])]), params, 4)
        assert torch.equal(wide, alone(logits, params))


# The user's own processor


def test_user_processors_get_exactly_prefix_and_path_of_every_valid_node() -> None:
    calls: list[list[int]] = []

    def spy(ids: Tensor, logits: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        assert logits.shape == (V,)
        calls.append(ids.tolist())
        return logits

    tokens, paths = tree_of(2)
    history = History([[7, 8, int(tokens[0, 0])], [9, int(tokens[1, 0])]], [2, 1])
    processors = Processors(
        [SamplingParams(logits_processor=spy), SamplingParams()], vocab_size=V, end_token_ids=(), device=CPU
    )
    logits_to_probs(torch.zeros(2, len(PARENT), V), processors, history, paths)
    wanted = [history.ids[0] + tokens[0, path].tolist() for node, path in enumerate(PATHS) if node != 6]
    assert sorted(calls) == sorted(wanted)


def test_user_processors_are_asked_nothing_behind_a_token_that_they_forbid() -> None:
    """A constraint may have no answer there, and plain decoding never asks."""
    parent = torch.tensor([[-1, 0, 1, 2, 1, 0]])  # 5 and what follows 1, 5 may not be written
    tokens = torch.tensor([[3, 1, 5, 2, 4, 5]])
    ancestry = torch.zeros(1, 6, 6, dtype=torch.bool)
    for node, above in enumerate(parent[0].tolist()):
        ancestry[0, node] = ancestry[0, above] if node else False
        ancestry[0, node, node] = True
    calls: list[list[int]] = []

    def no_five(ids: Tensor, logits: Tensor) -> Tensor:
        assert 5 not in ids.tolist()
        calls.append(ids.tolist())
        return logits.index_fill(0, torch.tensor([5]), -math.inf)

    processors = Processors([SamplingParams(logits_processor=no_five)], vocab_size=V, end_token_ids=(), device=CPU)
    paths = Paths(tokens, ancestry, parent, is_tree=True)
    probs = logits_to_probs(torch.zeros(1, 6, V), processors, History([[3]], [1]), paths)
    assert calls == [[3], [3, 1], [3, 1, 4]]
    assert float(probs[0, [0, 1, 4], 5].sum()) == 0


def test_user_processors_that_write_do_not_leak() -> None:
    """Item 6.6: purity; what a processor does to its argument reaches no other node and not the model's logits."""

    def vandal(ids: Tensor, logits: Tensor) -> Tensor:
        out = logits * 2
        logits.fill_(NAN)
        ids.fill_(-1)
        return out

    tokens, paths = tree_of(1)
    logits = torch.randn(1, len(PARENT), V, generator=torch.Generator().manual_seed(0))
    before, ids = logits.clone(), [4, 5, 6]
    processors = Processors([SamplingParams(logits_processor=vandal)], vocab_size=V, end_token_ids=(), device=CPU)
    probs = logits_to_probs(logits, processors, History([ids], [3]), paths)
    assert torch.equal(logits, before)
    assert ids == [4, 5, 6]
    assert torch.equal(probs[0, :6], torch.softmax(before * 2, -1)[0, :6])
    assert torch.equal(tokens, tree_of(1)[0])


def test_user_processors_that_return_nonsense_are_refused() -> None:
    for made in (torch.zeros(3), None, [0.0] * V):
        params = SamplingParams(logits_processor=lambda ids, logits, made=made: made)  # type: ignore[misc]
        with pytest.raises(ConfigError, match="logits_processor returned"):
            alone(torch.zeros(V), params)


def test_min_new_tokens_lifts_inside_a_chain() -> None:
    """Item 6.7: counted in tokens, not in steps."""
    tokens = torch.tensor([[0, 1, 1, 1]])
    paths = Paths(tokens, torch.ones(4, 4, dtype=torch.bool).tril()[None])
    processors = Processors([SamplingParams(min_new_tokens=3)], vocab_size=3, end_token_ids=(2,), device=CPU)
    probs = logits_to_probs(torch.zeros(1, 4, 3), processors, History([[0, 0]], [1]), paths)
    # One token is out: banned after nodes 0 and 1 (second and third token), free from then on.
    assert (probs[0, :, 2] > 0).tolist() == [False, False, True, True]


def test_end_tokens_outside_the_vocabulary_are_no_error() -> None:
    params = SamplingParams(min_new_tokens=3, stop_token_ids=(99, -1))
    assert torch.allclose(alone(torch.zeros(3), params), torch.full((3,), 1 / 3))


def test_processors_keep() -> None:
    rows = [SamplingParams(temperature=0.5), SamplingParams(top_k=2), SamplingParams(temperature=0.0)]
    kept = Processors(rows, vocab_size=5, end_token_ids=(1,), device=CPU).keep([2, 0])
    assert kept.params == (rows[2], rows[0])
    assert kept.end_ids == [[1], [1]]
    assert kept.num_greedy == 1


# Validation


IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, NAN, INF), "top_k": (-1,), "top_p": (0.0, 1.5, NAN), "min_p": (-0.5, 2.0, NAN),
    "repetition_penalty": (0.0, INF), "presence_penalty": (NAN,), "frequency_penalty": (INF,), "max_new_tokens": (0,),
    "min_new_tokens": (-1, 500), "stop": (("a", ""),), "logit_bias": ({3: NAN},),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_values_that_cannot_be_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("token", [-1, 5])
def test_ids_outside_the_vocabulary_are_named(token: int) -> None:
    for params in (SamplingParams(logit_bias={token: 1.0}), SamplingParams(banned_token_ids=(token,))):
        with pytest.raises(ConfigError, match=f"token id {token} "):
            Processors([params], vocab_size=5, end_token_ids=(), device=CPU)


def test_reads_history() -> None:
    assert not SamplingParams(temperature=0.3, top_k=4, logit_bias={1: 1.0}, banned_token_ids=(2,)).reads_history
    for params in (EACH["repetition"], EACH["presence"], EACH["frequency"], EACH["min_new"], EACH["user"]):
        assert params.reads_history
    assert replace(EACH["user"], logits_processor=None).reads_history is False


# Drawing


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0, 7.5]), min_size=1, max_size=9), st.floats(0.0, 1.0))
def test_invert_cdf_never_draws_mass_0(weights: list[float], uniform: float) -> None:
    if sum(weights) == 0:
        weights[-1] = 1.0
    u = min(max(uniform, 2.0**-53), 1.0 - 2.0**-53)
    for dtype in (torch.float32, torch.float64):
        probs = torch.tensor([weights, [x * 1e-12 for x in weights]], dtype=dtype)
        token = invert_cdf(probs, torch.tensor([u, u], dtype=torch.float64))
        assert bool((probs.gather(1, token[:, None]) > 0).all())


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9), st.floats(0.01, 0.99))
def test_invert_cdf_is_scale_free_and_the_first_above(weights: list[int], uniform: float) -> None:
    if sum(weights) == 0:
        weights[0] = 1
    probs = torch.tensor([weights], dtype=torch.float64)
    u = torch.tensor([uniform], dtype=torch.float64)
    point, expected = uniform * sum(weights), 0
    while sum(weights[: expected + 1]) <= point:
        expected += 1
    for scale in (1.0, 2.0**-40, 2.0**20):
        assert int(invert_cdf(probs * scale, u)) == expected


def test_invert_cdf_at_the_extremes() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    low, high = 2.0**-53, 1.0 - 2.0**-53
    assert int(invert_cdf(probs, torch.tensor([low], dtype=torch.float64))) == 1
    assert int(invert_cdf(probs, torch.tensor([high], dtype=torch.float64))) == 3
    rare = torch.tensor([[1.0, 1e-15]])  # summed in float64: below float32's resolution
    assert int(invert_cdf(rare, torch.tensor([high], dtype=torch.float64))) == 1
    empty = invert_cdf(torch.tensor([[0.0, 0.0], [NAN, 1.0]]), torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert bool(((empty >= 0) & (empty < 2)).all())
