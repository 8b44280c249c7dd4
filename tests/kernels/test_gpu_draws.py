"""The Triton draws against their twins: in Triton's interpreter here, and compiled for two cards without one."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.core.noise import Noise, Stream, exponentials, race, stream_keys
from foretell.core.probs import process_logits
from foretell.core.tree import DrawnBy, TokenTree, depths
from foretell.kernels.gpu import ops
from foretell.kernels.gpu.ops import register
from foretell.kernels.small import invert_cdf
from foretell.verify import Coupled, Evidence, draw
from foretell.verify.exact import has_distribution, target_draws
from tests.core.test_deferred import PARAMS, made
from tests.verify.random_trees import random_parent


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """Draws from logits look at several blocks of the small vocabularies here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "DRAW_BLOCK", 1024)
        yield register("CPU")


def test_keys_are_those_of_the_twin(gpu: Any) -> None:
    seeds = torch.tensor([-3, 0, 2**62, -(2**63), 2**63 - 1])
    columns = torch.arange(70)
    for stream in Stream:
        expected = stream_keys(seeds[:, None], columns, stream, 3)
        assert torch.equal(gpu.stream_keys(seeds[:, None], columns, torch.tensor(3), int(stream)), expected)
        assert torch.equal(
            gpu.stream_keys(seeds[:, None], columns[:1], columns, int(stream)),
            stream_keys(seeds[:, None], columns[:1], stream, columns),
        )
        assert torch.equal(gpu.stream_keys(seeds, seeds, seeds, int(stream)), stream_keys(seeds, seeds, stream, seeds))


def distributions(num_rows: int, vocab_size: int) -> Tensor:
    p = torch.softmax(3 * torch.randn(num_rows, vocab_size), -1)
    p[:, 1::3] = 0
    p[-1] = 0
    p[-1, vocab_size - 1] = 1
    return p


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 2600])
def test_winners_of_the_race(gpu: Any, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    p = distributions(24, vocab_size)
    keys = stream_keys(torch.arange(24), torch.tensor(5), Stream.RACE)
    assert torch.equal(gpu.race(p, keys), race(p, keys))
    scores, expected = gpu.race_scores(p, keys), p / exponentials(keys, vocab_size)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=0)
    assert torch.equal(gpu.race(torch.zeros(2, vocab_size), keys[:2]), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(gpu.race(p.bfloat16(), keys), race(p.bfloat16().float(), keys))


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 2600])
def test_inverse_of_the_sum(gpu: Any, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    p, uniform = distributions(40, vocab_size), torch.rand(40, dtype=torch.float64)
    uniform[:2] = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    drawn = gpu.invert_cdf(p, uniform)
    assert torch.equal(drawn[2:], invert_cdf(p, uniform)[2:])
    # At the ends the order of adding may decide, but never for a token without mass.
    assert bool((p.gather(1, drawn[:, None]) > 0).all())


@pytest.mark.parametrize("name", [*PARAMS, "together"])
def test_draws_from_logits(gpu: Any, name: str) -> None:
    """Every filter alone and in one batch: the winners of the race over the twin's probabilities."""
    params = list(PARAMS.values()) if name == "together" else [PARAMS[name]]
    for seed in range(1 if name == "together" else 3):
        deferred, twin, keys = made(params, seed)
        processed = process_logits(deferred.logits, deferred.processors, deferred.history, deferred.paths)
        drawn = gpu.draw(processed, deferred.processors.warp_table, keys, -1)
        assert torch.equal(drawn, race(twin(), keys))


@pytest.mark.filterwarnings(
    "ignore:overflow encountered"
)  # the interpreter's: 1e30 squared is infinite, as it should be
def test_logits_that_are_no_numbers(gpu: Any) -> None:
    inf, nan = math.inf, math.nan
    keys = stream_keys(torch.arange(6)[None], torch.tensor(1), Stream.COUPLED)
    rows = torch.full((6, 40), -inf)
    rows[1, 7] = 0.0
    rows[2, 3:5] = torch.tensor([nan, 1.0])
    rows[3, [3, 9]] = inf
    rows[4] = 1e30
    rows[4, 11] = 1.5e30
    rows[5] = nan
    for warp in ([0.0, 1, 0, 0], [1.0, 1, 0, 0], [1.0, 0.5, 0.1, 3], [1e30, 1, 0, 0]):
        drawn = gpu.draw(rows[None], torch.tensor([warp]), keys, -1)[0].tolist()
        assert drawn[:3] == [-1, 7, 4]
        assert drawn[3] in ((3,) if warp[0] == 0 else (3, 9))
        assert drawn[4:] == [11, -1]


def test_the_walk_is_that_of_the_verifier(gpu: Any) -> None:
    """Random trees, padded, with equal siblings: nodes kept, bonus and soundness as ``Coupled`` decides them."""
    choose, vocab_size, width, count = random.Random(3), 3, 9, 60
    parents = []
    for _ in range(count):
        parent = random_parent(choose, choose.randint(1, width))
        parents.append(parent + [-1] * (width - len(parent)))
    parent = torch.tensor(parents)
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(count, width, vocab_size), -1)
    p[::7, 1] = 0  # no distribution: the row is unsound where the walk ends there
    noise = Noise(torch.arange(count), torch.arange(count) * 3)
    tree = TokenTree(torch.randint(vocab_size, parent.shape), parent, torch.full_like(parent, DrawnBy.FIXED))
    keys = gpu.node_keys(noise.seeds, noise.positions, parent, int(Stream.COUPLED))
    assert torch.equal(keys, noise.coupled_keys(width).gather(1, depths(parent)))
    evidence = Evidence(tree, p, noise)
    drawn = target_draws(evidence)
    drawn = torch.where(has_distribution(p, drawn), drawn, -1)
    found, expected = gpu.walk(drawn, tree.tokens, parent), draw(Coupled(), evidence)
    assert found[:, 0].tolist() == expected.counts
    assert found[:, 2].bool().tolist() == expected.sound.tolist()
    assert found[:, 1][expected.sound].tolist() == expected.bonus[expected.sound].tolist()
    for row, count in enumerate(expected.counts):
        assert found[row, 3 : 3 + count].tolist() == expected.path[row, :count].tolist()
        assert sorted(found[row, 3:].tolist()) == list(range(width))
    assert len(set(expected.counts)) > 3
    assert not bool(expected.sound.all())
