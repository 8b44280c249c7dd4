"""Suffix decoding in the engine: same text, accepted guesses, and memory beyond a request."""

from collections.abc import Callable
from typing import Any

import pytest

from foretell import Completion, Engine, Request, SamplingParams, speculative_config
from foretell.core.tree import depths
from tests.engine.harness import ToyTokenizer, cycle, mixed_requests, outcome, outcomes, plain, sure, table

TARGET = table()
CONFIGS: list[dict[str, Any]] = [
    {"method": "suffix"},
    {"method": "suffix", "shape": "opt_tree", "suffix_decoding_max_cached_tokens": 40},
]  # fmt: skip


@pytest.fixture(scope="module", params=["coupled", "exact"])
def oracle(request: pytest.FixtureRequest) -> tuple[str, list[Completion]]:
    return request.param, plain(TARGET, mixed_requests(), verify=request.param)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "/".join(map(str, config.values())))
def test_the_text_is_that_of_plain_decoding(config: dict[str, Any], oracle: tuple[str, list[Completion]]) -> None:
    """Mixed requests, rows that end at different steps, and a memory that grows from round to round."""
    verify, expected = oracle
    engine = Engine(TARGET, ToyTokenizer(), speculative={**config, "verify": verify})
    steps = []
    for batch_size in (3, 8, 1):
        found = engine.generate_batch(mixed_requests(), batch_size=batch_size)
        assert outcomes(found) == outcomes(expected)
        assert sum(completion.num_accepted_tokens for completion in found) > 0
        steps.append(sum(completion.num_steps for completion in found))
    assert steps[1] < steps[0], "the second round has heard it all before"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "/".join(map(str, config.values())))
@pytest.mark.parametrize("width", [0, 24])
def test_greedy_rejection_and_padded_width(config: dict[str, Any], width: int) -> None:
    requests = [Request([3, 4, 5, 3, 4, k], SamplingParams(temperature=0.0, max_new_tokens=25)) for k in range(4)]
    expected = plain(TARGET, requests)
    engine = Engine(TARGET, ToyTokenizer(), speculative={**config, "verify": "rejection"}, width=width)
    for _ in range(2):
        assert outcomes(engine.generate_batch(requests)) == outcomes(expected)


def test_a_text_that_repeats_is_guessed() -> None:
    completion = Engine(cycle(), ToyTokenizer(), speculative="suffix").generate([0], max_new_tokens=80, temperature=0.0)
    assert completion.token_ids == [(k + 1) % 12 for k in range(80)]
    assert completion.num_steps <= 22


def test_longer_matches_give_longer_guesses(audited: list[Callable[..., None]]) -> None:
    drafted: list[int] = []
    audited.append(lambda state, target, drafter, report: drafted.append(report.commit.tree.num_nodes - 1))
    Engine(cycle(), ToyTokenizer(), speculative="suffix").generate([0], max_new_tokens=80, temperature=0.0)
    assert drafted[:12] == [0] * 12, "nothing has occurred before"
    growing = [most for most in drafted if 0 < most < 15]
    assert growing[0] == 1
    assert max(drafted) == 15


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "/".join(map(str, config.values())))
def test_no_guess_is_deeper_than_its_row_has_room(config: dict[str, Any], audited: list[Callable[..., None]]) -> None:
    deepest: list[tuple[int, int]] = []

    def auditor(state: Any, target: Any, drafter: Any, report: Any) -> None:
        for row, tokens, depth in zip(state.rows, report.commit.tokens, depths(report.commit.tree.parent), strict=True):
            deepest.append((int(depth.max()), row.depth_limit + len(tokens)))

    audited.append(auditor)
    requests = [Request([0], SamplingParams(temperature=0.0, max_new_tokens=most)) for most in (30, 45, 60)]
    Engine(cycle(), ToyTokenizer(), speculative=config).generate_batch(requests)
    assert all(depth <= depth_limit for depth, depth_limit in deepest)
    assert any(depth == depth_limit > 0 for depth, depth_limit in deepest), (
        "somewhere it is the room that ends the guesses"
    )


@pytest.mark.parametrize("cached", [1000, 0])
def test_outputs_of_ended_requests_are_remembered(cached: int) -> None:
    """The second request repeats the first one's output: only a shared memory can know it."""
    target = sure(lambda text: (2 * text[-1] + 3 * text[0] + 1) % 19, context=2)  # no pair twice in sixty tokens
    config = {"method": "suffix", "suffix_decoding_max_cached_tokens": cached}
    engine = Engine(target, ToyTokenizer(), speculative=config)
    params = SamplingParams(temperature=0.0, max_new_tokens=40)
    first, second = engine.generate([1, 2], params), engine.generate([1, 2], params)
    assert first.token_ids == second.token_ids
    if cached:
        assert second.num_steps < first.num_steps - 10
        assert second.num_accepted_tokens > first.num_accepted_tokens
    else:
        assert second.num_steps == first.num_steps


def library_tokens(engine: Engine) -> int:
    return sum(automaton.num_tokens for automaton in engine.method.library.automata)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_output_enters_the_library_once(batch_size: int) -> None:
    """Rows dropped in the middle of a batch, and those that end in its last step."""
    engine = Engine(TARGET, ToyTokenizer(), speculative="suffix")
    found = engine.generate_batch(mixed_requests(), batch_size=batch_size)
    assert library_tokens(engine) == sum(completion.num_tokens for completion in found)


def test_a_stream_that_is_left_enters_nothing() -> None:
    engine = Engine(TARGET, ToyTokenizer(), speculative="suffix")
    stream = engine.stream([1, 2, 3], max_new_tokens=20, seed=1)
    next(stream)
    stream.close()
    assert library_tokens(engine) == 0
    for _ in engine.stream([1, 2, 3], max_new_tokens=20, seed=1):
        pass
    assert library_tokens(engine) > 0


def test_two_streams_share_one_library() -> None:
    """Interleaved steps: one row reads while the other's output comes in."""
    engine = Engine(TARGET, ToyTokenizer(), speculative={"method": "suffix", "suffix_decoding_max_cached_tokens": 60})
    expected = [plain(TARGET, [request])[0] for request in mixed_requests()]
    for start in range(0, 8, 2):
        streams = [engine.stream(request.prompt, request.params) for request in mixed_requests()[start : start + 2]]
        going = list(streams)
        while going:
            for stream in list(going):
                if next(stream, None) is None:
                    going.remove(stream)
        for stream, one in zip(streams, expected[start:], strict=False):
            assert outcome(stream.completion) == outcome(one)
    assert 0 < library_tokens(engine) <= 60


def test_a_whole_number_stands_for_a_number() -> None:
    config = speculative_config({"method": "suffix", "suffix_decoding_min_token_prob": 1})
    assert config.resolved()["suffix_decoding_min_token_prob"] == 1.0
    assert isinstance(config.resolved()["suffix_decoding_min_token_prob"], float)
    assert speculative_config(config.resolved()) == config
