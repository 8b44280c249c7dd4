"""Keyed noise: the hash and its twins, uniformity and independence in every direction, and golden values."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor

from foretell.core import noise as module_noise
from foretell.core.noise import Noise, Stream, derive_seed, exponentials, mix, mix_int, race, stream_keys, uniforms
from foretell.kernels import build, small as module
from foretell.kernels.build import BuildError

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
FALSE_ALARM = 1e-6
"""Of each statistical test below; the keys are fixed, so a test that passes once always passes."""

STREAMS = list(Stream)


def unsigned(x: int) -> int:
    return x & ((1 << 64) - 1)


def naive_key(seed: int, position: int, stream: int, index: int) -> int:
    """The keys as documented, in Python's integers."""
    golden, multiplier = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    key = mix_int(mix_int(seed + golden) ^ unsigned(stream * 0x94D049BB133111EB))
    return mix_int(mix_int(key ^ mix_int(position + golden)) ^ unsigned(index * multiplier))


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch twins of the C kernels."""
    monkeypatch.setattr(module_noise, "race_library", lambda: None)


@given(st.lists(INT64, min_size=1, max_size=20))
def test_mix_equals_its_integer_twin(values: list[int]) -> None:
    assert [unsigned(x) for x in mix(torch.tensor(values)).tolist()] == [mix_int(x) for x in values]


@given(INT64, INT64, st.sampled_from(STREAMS), st.integers(0, 1 << 40))
def test_keys_equal_their_integer_twin(seed: int, position: int, stream: Stream, index: int) -> None:
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    expected = naive_key(seed, position, int(stream), index)
    assert unsigned(int(stream_keys(seeds, positions, stream, index))) == expected
    assert unsigned(int(stream_keys(seeds, positions, stream, torch.tensor([index])))) == expected


@given(st.integers(-1000, 1000), st.integers(0, 100_000))
def test_c_and_torch_keys_agree(seed: int, position: int) -> None:
    seeds, positions = torch.tensor([[seed], [seed + 1]]), torch.arange(position, position + 5)
    fast = [stream_keys(seeds, positions, stream, index) for stream in STREAMS for index in (0, 3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_noise, "race_library", lambda: None)
        slow = [stream_keys(seeds, positions, stream, index) for stream in STREAMS for index in (0, 3)]
    assert fast[0].shape == (2, 5)
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))


@given(INT64, st.integers(0, 1 << 40))
def test_a_key_on_the_host_is_that_of_the_tensor(seed: int, position: int) -> None:
    given = torch.tensor([7, seed]), torch.tensor([3, position])
    keys = Noise(*given).coupled_keys(4)
    asked = Noise(*given)
    assert [[asked.coupled_key(row, depth) for depth in range(4)] for row in range(2)] == keys.tolist()
    asked.coupled_keys(2)  # from here on from memory, as far as that goes
    assert [asked.coupled_key(1, depth) for depth in range(4)] == keys[1].tolist()


def test_golden_values() -> None:
    """Pinned: a change here changes every text of every user's seed."""
    seeds, positions = torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 1, 5, 10**6])
    keys = stream_keys(seeds, positions, Stream.COUPLED)
    assert keys.tolist() == GOLDEN_KEYS
    noise = Noise(seeds, positions)
    assert noise.stop().tolist() == pytest.approx(GOLDEN_STOP, rel=1e-15)
    assert noise.draft(3).tolist() == pytest.approx(GOLDEN_DRAFT, rel=1e-15)
    assert exponentials(keys[:2], 3).flatten().tolist() == pytest.approx(GOLDEN_E, rel=1e-6)
    assert [derive_seed(7), derive_seed(7, 0), derive_seed(-7, 1)] == GOLDEN_SEEDS


GOLDEN_KEYS: list[int] = [1050478848580918981, -1274534145372028990, -2412660014428653135, 7170694627838871347]
GOLDEN_STOP: list[float] = [0.14077675493852848, 0.38448412377881225, 0.2757202858014537, 0.7187775950745526]
GOLDEN_DRAFT: list[float] = [0.7398870257434326, 0.4496880114906209, 0.3833021149399517, 0.6281245203222047]
GOLDEN_E: list[float] = [0.54190749, 0.81452811, 0.98718017, 1.9758976, 8.3627062, 0.099137358]
GOLDEN_SEEDS: list[int] = [-4925803042550070224, -4433217931538707517, 8670872197758335745]


def test_keys_are_distinct_over_a_big_grid() -> None:
    """Adjacent seeds and positions, all streams, many nodes: no two keys are equal (item 6.10)."""
    seeds = torch.arange(-20, 20)[:, None, None]
    positions = torch.arange(0, 100)[None, :, None]
    index = torch.arange(0, 16)
    keys = [stream_keys(seeds, positions, stream, index).flatten() for stream in STREAMS]
    together = torch.cat(keys)
    assert len(together) == 40 * 100 * 16 * len(Stream)
    assert len(together.unique()) == len(together)


def test_derived_seeds_are_distinct_and_keep_the_order_of_parts() -> None:
    seeds = {derive_seed(a, b) for a in range(-50, 50) for b in range(50)} | {derive_seed(a) for a in range(-50, 50)}
    assert len(seeds) == 100 * 50 + 100
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)


def test_uniforms_lie_strictly_inside() -> None:
    extreme = uniforms(torch.tensor([0, -1, 1, (1 << 63) - 1, -(1 << 63), -4096, 4095]))
    assert bool((extreme > 0).all())
    assert bool((extreme < 1).all())
    assert float(extreme[0]) == 2.0**-53
    assert float(extreme[1]) == 1.0 - 2.0**-53


def test_exponentials_are_never_0_or_infinite() -> None:
    """The extremes of the hash, by solving for the key that yields them."""
    table = module_noise.token_table(1, torch.device("cpu"))
    for bits in (0, (1 << 64) - 1, (1 << 63), 1 << 32):
        key = next(x for x in [inverse_mix(bits) - int(table[0])])
        signed = unsigned(key) - (1 << 64 if unsigned(key) >> 63 else 0)
        value = exponentials(torch.tensor([signed]), 1)
        assert unsigned(int(mix(torch.tensor([signed]) + table)[0])) == bits
        w = ((bits >> 32) + 0.5) * 2.0**-32
        expected = -math.log1p(-min(w, 1 - 2.0**-24))
        assert 0 < float(value) < 17
        assert float(value) == pytest.approx(expected, rel=1e-6)


def inverse_mix(y: int) -> int:
    """The x with mix_int(x) == y."""
    y ^= (y >> 31) ^ (y >> 62)
    y = unsigned(y * pow(0x94D049BB133111EB, -1, 1 << 64))
    y ^= (y >> 27) ^ (y >> 54)
    y = unsigned(y * pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    return y ^ (y >> 30) ^ (y >> 60)


def test_small_exponentials_have_full_relative_precision() -> None:
    """They decide races: E near 0 must be exact, not rounded to a grid."""
    keys = stream_keys(torch.tensor(5), torch.arange(200_000), Stream.COUPLED)
    values = exponentials(keys, 4)
    bits = mix(keys[:, None] + module_noise.token_table(4, torch.device("cpu")))
    w = (((bits >> 32) & 0xFFFFFFFF).double() + 0.5) * 2.0**-32
    exact = -torch.log1p(-w)
    small = exact < 1
    assert bool(((values.double() - exact).abs()[small] <= 2e-7 * exact[small]).all())
    assert int((exact < 1e-5).sum()) > 2


def uniformity(x: Tensor) -> float:
    """p-value of a chi-square test for 64 equal bins of (0, 1)."""
    counts = torch.histc(x.double(), 64, 0.0, 1.0).numpy()
    return float(stats.chisquare(counts).pvalue)


def independence(x: Tensor, y: Tensor) -> float:
    """p-value of a chi-square test of independence of 12 x 12 bins."""
    joint = torch.bincount((x * 12).long() * 12 + (y * 12).long(), minlength=144).view(12, 12)
    return float(stats.chi2_contingency(joint.numpy()).pvalue)


N = 60_000
FAMILIES: dict[str, Callable[[Stream], tuple[Tensor, Tensor]]] = {
    "adjacent positions": lambda s: (
        stream_keys(torch.tensor(7), torch.arange(N), s),
        stream_keys(torch.tensor(7), torch.arange(N) + 1, s),
    ),
    "adjacent seeds": lambda s: (
        stream_keys(torch.arange(N), torch.tensor(7), s),
        stream_keys(torch.arange(N) + 1, torch.tensor(7), s),
    ),
    "seed and position exchanged": lambda s: (
        stream_keys(torch.arange(N), torch.tensor(7), s),
        stream_keys(torch.tensor(7), torch.arange(N), s),
    ),
    "seed one up, position one down": lambda s: (
        stream_keys(torch.arange(N), torch.arange(N) + 9, s),
        stream_keys(torch.arange(N) + 1, torch.arange(N) + 8, s),
    ),
    "neighbouring nodes": lambda s: (
        stream_keys(torch.tensor(7), torch.arange(N), s, 1),
        stream_keys(torch.tensor(7), torch.arange(N), s, 2),
    ),
    "node one up, position one down": lambda s: (
        stream_keys(torch.tensor(7), torch.arange(N) + 1, s, 1),
        stream_keys(torch.tensor(7), torch.arange(N), s, 2),
    ),
    "another stream": lambda s: (
        stream_keys(torch.tensor(7), torch.arange(N), s),
        stream_keys(torch.tensor(7), torch.arange(N), Stream(int(s) % 4 + 1)),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_uniform_and_independent(name: str) -> None:
    for stream in STREAMS:
        left, right = (uniforms(keys) for keys in FAMILIES[name](stream))
        assert uniformity(left) > FALSE_ALARM
        assert uniformity(right) > FALSE_ALARM
        assert independence(left, right) > FALSE_ALARM


def test_control_added_parts_are_caught() -> None:
    """Negative control: with seed + position, adjacent seeds share a shifted stream."""
    position = torch.arange(N)
    shifted = mix(7 + (position + 1)), mix(8 + position)
    assert independence(*(uniforms(keys) for keys in shifted)) < 1e-300
    weak = torch.arange(N) << 40
    assert uniformity(uniforms(weak)) < FALSE_ALARM


def test_exponentials_follow_their_law_and_tokens_are_independent() -> None:
    keys = stream_keys(torch.tensor(3), torch.arange(N), Stream.COUPLED)
    values = exponentials(keys, 5)
    for token in range(5):
        assert float(stats.kstest(values[:, token].numpy(), "expon").pvalue) > FALSE_ALARM
    below = 1 - torch.exp(-values.double())
    for a, b in ((0, 1), (1, 2), (0, 4)):
        assert independence(below[:, a], below[:, b]) > FALSE_ALARM
    after = 1 - torch.exp(-exponentials(stream_keys(torch.tensor(3), torch.arange(N) + 1, Stream.COUPLED), 5).double())
    for a, b in ((0, 0), (0, 1), (1, 0)):
        assert independence(below[:, a], after[:, b]) > FALSE_ALARM


def coupled_row(seed: int, position: int, vocab_size: int) -> list[float]:
    key = stream_keys(torch.tensor([seed]), torch.tensor([position]), Stream.COUPLED)
    return exponentials(key, vocab_size)[0].tolist()


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 50)), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_coupled_noise_depends_on_seed_position_and_token_alone(
    rows: list[tuple[int, int]], asked: list[int], vocab_size: int
) -> None:
    """Never on the batch, the row, the order asked, the number of depths, or the vocabulary's size (a prefix)."""
    noise = Noise(torch.tensor([seed for seed, _ in rows]), torch.tensor([position for _, position in rows]))
    for num_depths in asked:
        keys = noise.coupled_keys(num_depths)
        assert keys.shape == (len(rows), num_depths)
        values = exponentials(keys, vocab_size)
        for b, (seed, position) in enumerate(rows):
            for depth in range(num_depths):
                # The token after a node of depth d has position root + d + 1.
                assert values[b, depth].tolist() == coupled_row(seed, position + depth + 1, 9)[:vocab_size]


def test_streams_of_a_step_depend_on_the_root_and_the_node() -> None:
    noise = Noise(torch.tensor([1, 1, 2]), torch.tensor([4, 5, 4]))
    everything = torch.cat([noise.stop(), noise.bonus(), *[noise.draft(node) for node in range(1, 20)]])
    assert len(everything.unique()) == len(everything)
    again = Noise(torch.tensor([2, 1]), torch.tensor([4, 5]))
    assert again.stop().tolist() == noise.stop()[[2, 1]].tolist()
    assert again.draft(3).tolist() == noise.draft(3)[[2, 1]].tolist()
    assert again.bonus().tolist() == noise.bonus()[[2, 1]].tolist()
    numbers = torch.arange(1, 5)
    keys = stream_keys(noise.seeds[:, None], noise.positions[:, None], Stream.RACE, numbers)
    assert noise.race_at(numbers).tolist() == keys.tolist(), "a race has draws of its own"


# The race, in C and in torch


def probs(num_rows: int, vocab_size: int, sharp: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(num_rows, vocab_size, generator=generator) * sharp, -1)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 511, 512, 513, 3000])
@pytest.mark.parametrize("sharp", [0.0, 1.0, 6.0])
def test_race_equals_the_argmax_of_law_over_exponentials(vocab_size: int, sharp: float) -> None:
    distribution = probs(400, vocab_size, sharp)
    distribution[::3, ::2] = 0.0
    keys = stream_keys(torch.tensor(9), torch.arange(400), Stream.COUPLED)
    score = distribution / exponentials(keys, vocab_size)
    winner = race(distribution, keys)
    best = score.amax(-1)
    assert bool((score.gather(1, winner[:, None])[:, 0] >= best * (1 - 1e-6)).all())
    assert float((winner == score.argmax(-1)).float().mean()) > 0.99  # near ties may part: last bits of a logarithm
    alive = distribution.sum(-1) > 0
    assert bool((distribution.gather(1, winner[:, None])[:, 0] > 0)[alive].all()), "no token without mass wins"


@pytest.mark.usefixtures("without_library")
def test_the_torch_race_is_the_argmax() -> None:
    distribution, keys = probs(50, 40, 1.0), stream_keys(torch.tensor(9), torch.arange(50), Stream.COUPLED)
    assert torch.equal(race(distribution, keys), (distribution / exponentials(keys, 40)).argmax(-1))


def test_race_of_nodes_prefixes_and_views() -> None:
    distribution = probs(24, 16, 1.0).view(4, 6, 16)
    keys = stream_keys(torch.arange(4)[:, None], torch.arange(6), Stream.COUPLED)
    winner = race(distribution, keys)
    assert winner.shape == (4, 6)
    assert torch.equal(race(distribution.transpose(0, 1), keys.T), winner.T)
    assert torch.equal(race(distribution[:, 2:3], keys[:, 2:3]), winner[:, 2:3])
    wide = torch.nn.functional.pad(distribution, (0, 5))  # a target's vocabulary padded: the same winners
    assert torch.equal(race(wide, keys), winner)
    scaled = race(distribution * 2.0**-20, keys)
    assert torch.equal(scaled, winner), "any positive scale"


def test_race_at_temperature_0_is_the_token_itself_and_degenerate_rows_are_harmless() -> None:
    distribution = torch.zeros(5, 700)
    distribution[torch.arange(3), torch.tensor([0, 699, 333])] = 1.0
    distribution[4] = math.nan
    winner = race(distribution, stream_keys(torch.tensor(0), torch.arange(5), Stream.COUPLED))
    assert winner[:3].tolist() == [0, 699, 333]
    assert bool(((winner >= 0) & (winner < 700)).all())
    assert not bool((distribution[[3, 4]].gather(1, winner[3:, None]) > 0).any())


@pytest.mark.parametrize("first", [0, 600, 2040])
def test_blocks_without_mass_are_passed_over_and_no_others(first: int) -> None:
    """Mass begins at ``first`` and comes back two blocks later."""
    distribution = torch.zeros(200, 3100)
    distribution[:, first : first + 3] = 0.2
    distribution[:, first + 1030] = 0.25
    keys = stream_keys(torch.tensor(4), torch.arange(200), Stream.COUPLED)
    winner = race(distribution, keys)
    assert torch.equal(winner, (distribution / exponentials(keys, 3100)).argmax(-1))
    assert len(set(winner.tolist())) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_race_draws_from_the_law(dtype: torch.dtype) -> None:
    """Chi-square at a false-alarm rate of 1e-6, with a control that must fail."""
    distribution = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04, 0.0], dtype=dtype)
    draws = 200_000
    keys = stream_keys(torch.tensor(11), torch.arange(draws), Stream.COUPLED)
    counts = torch.bincount(race(distribution.expand(draws, -1), keys), minlength=6).numpy()
    assert counts[5] == 0
    expected = distribution[:5].double().numpy() * draws
    assert float(stats.chisquare(counts[:5], expected, sum_check=False).pvalue) > FALSE_ALARM
    wrong = torch.tensor([0.4, 0.3, 0.19, 0.07, 0.04]).double().numpy() * draws
    assert float(stats.chisquare(counts[:5], wrong, sum_check=False).pvalue) < FALSE_ALARM


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """32 bits of E near 0: a token of mass 1e-5 must not be lost to a coarse tail."""
    draws = 1_000_000
    distribution = torch.tensor([1.0 - 1e-5, 1e-5])
    keys = stream_keys(torch.tensor(2), torch.arange(draws), Stream.COUPLED)
    seen = int(race(distribution.expand(draws, -1), keys).sum())
    low, high = (float(x) for x in stats.poisson.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], 10.0))
    assert low <= seen <= high
    assert seen > 0


def test_gumbel_coupling_accepts_by_its_closed_form() -> None:
    """Monte Carlo of the shared race: sum_j 1 / sum_i max(p_i / p_j, q_i / q_j); independent noise must fail."""
    draws = 100_000
    p, q = (torch.softmax(torch.randn(8, generator=torch.Generator().manual_seed(i)), 0) for i in (1, 2))
    form = sum(1 / float(torch.maximum(p / p[j], q / q[j]).sum()) for j in range(8))
    keys = stream_keys(torch.tensor(4), torch.arange(draws), Stream.COUPLED)
    others = stream_keys(torch.tensor(5), torch.arange(draws), Stream.COUPLED)
    target = race(p.expand(draws, -1), keys)
    accepted = float((target == race(q.expand(draws, -1), keys)).double().mean())
    error = math.sqrt(form * (1 - form) / draws)
    assert abs(accepted - form) < 5 * error
    control = float((target == race(q.expand(draws, -1), others)).double().mean())
    assert abs(control - float((p * q).sum())) < 5 * error
    assert abs(control - form) > 20 * error


def test_a_kernel_that_cannot_be_built_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(build, "load_library", refuse)
    module.race_library.cache_clear()
    try:
        assert module.race_library() is None
        keys = stream_keys(torch.tensor([1]), torch.tensor([2]), Stream.STOP)
        assert unsigned(int(keys)) == naive_key(1, 2, int(Stream.STOP), 0)
    finally:
        module.race_library.cache_clear()
