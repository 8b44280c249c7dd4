"""The verifier ``rejection`` through the whole engine: the joint distribution of three tokens, over many seeds, is the
target's.

Each test is one chi-square test at a false-alarm rate of ALPHA, on fixed seeds: it cannot flicker. The negative controls
are drafters that lie about q, or draw from noise that comes back; the same test must reject them.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

from foretell import Engine, Request, SamplingParams
from foretell.core import deferred
from foretell.core.noise import Noise
from foretell.core.probs import logits_to_probs
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.draft.base import Context, Method
from foretell.draft.shapes import Shape
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from tests.certify import harness
from tests.certify.harness import Echo, Spoilt
from tests.engine.harness import ToyTokenizer, TreeMethod, draft_engine, mixed_requests, outcomes, table
from tests.model.table import TableLM

ALPHA = 1e-6
SAMPLES = 4000
CONTROL_SAMPLES = 1500  # enough for most controls to fail
BATCH = 500
HORIZON = 3


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """The p-value of counts [K] under probs [K]; cells expected below 5 are merged, impossible ones must be empty."""
    total = float(counts.sum())
    assert float(counts[probs == 0].sum()) == 0, "a token of mass 0 was emitted"
    expected = probs * total
    small = (expected < 5) & (probs > 0)
    cells = [(float(counts[i]), float(expected[i])) for i in torch.nonzero((probs > 0) & ~small)[:, 0]]
    if bool(small.any()):
        cells.append((float(counts[small].sum()), float(expected[small].sum())))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def joint(target: TableLM, prompt: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[V ** 3] the target's distribution of the next three tokens."""
    size = target.spec.vocab_size
    probs = torch.zeros([size] * HORIZON, dtype=torch.float64)
    for tokens in itertools.product(range(size), repeat=HORIZON):
        chance = 1.0
        for k in range(HORIZON):
            p = torch.softmax(target.probs_after([*prompt, *tokens[:k]]).log() / temperature, 0)
            chance *= float(p[tokens[k]])
        probs[tokens] = chance
    return probs.flatten()


def law(
    engine: Engine, target: TableLM, samples: int = SAMPLES, *, temperature: float = 1.0, batch_size: int = 2000
) -> float:
    """The p-value of the next three tokens that ``engine`` samples, with consecutive seeds (adjacent ones must be
    independent), under their joint distribution."""
    size, prompt = target.spec.vocab_size, [1, 0]
    params = SamplingParams(max_new_tokens=HORIZON + 2, temperature=temperature)  # longer, so that no guess is cut
    requests = [Request(prompt, replace(params, seed=seed)) for seed in range(samples)]
    counts = torch.zeros([size] * HORIZON, dtype=torch.float64)
    for completion in engine.generate_batch(requests, batch_size=batch_size):
        counts[tuple(completion.token_ids[:HORIZON])] += 1
    return chi_square(counts.flatten(), joint(target, prompt, temperature))


def p_value(target: TableLM, method: Method, gamma: int, *, temperature: float = 1.0, samples: int = SAMPLES) -> float:
    """``law`` under ``rejection`` with chains of ``gamma`` guesses."""
    config = {"method": "draft_model", "num_speculative_tokens": gamma, "verify": "rejection"}
    engine = Engine(target, None, speculative=config, method=method)
    return law(engine, target, samples, temperature=temperature, batch_size=BATCH)


def toy(size: int, seed: int, sharpness: float = 1.2) -> TableLM:
    return TableLM(size, seed=seed, sharpness=sharpness, context=2, num_layers=1, dtype=torch.float64)


@pytest.fixture(autouse=True)
def audited() -> None:
    """The audit of thousands of rows would cost more than the test: the other files do it."""


@pytest.mark.parametrize(("size", "gamma", "temperature"), [(3, 1, 1.0), (4, 2, 1.0), (3, 3, 0.7)])
def test_the_joint_law_is_the_targets(size: int, gamma: int, temperature: float) -> None:
    target = toy(size, seed=3)
    assert p_value(target, DraftModel(toy(size, seed=8)), gamma, temperature=temperature) > ALPHA


def test_fixed_trees_keep_the_law() -> None:
    """Deterministic guesses, side branches and duplicates included."""
    target = toy(3, seed=3)

    def guess(ids: list[int], depth: int) -> list[tuple[int, int]]:
        return (
            [(0, (ids[-1] + 1) % 3), (0, 2), (0, 2), (1, 0), (3, 1), (4, 1)] if depth > 2 else [(0, 1)] * min(depth, 1)
        )

    assert p_value(target, TreeMethod(guess), 8) > ALPHA


class Tempered(harness.Tempered):
    power = 2.0


class OtherSource(ModelDrafter):
    """Says that it draws from a uniform distribution, but proposes the argmax of another."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, DrawMode.FIXED, noise)
        size = self.num_tokens
        q = torch.full((context.num_rows, tree.num_nodes, size), 1.0 / size, dtype=torch.float64)
        labels = torch.full_like(tree.drawn_by, int(DrawnBy.IID))
        labels[:, 0] = DrawnBy.FIXED
        return replace(tree, q=q, drawn_by=labels)


class Stale(Noise):
    """Draws of the drafter that are keyed by seed alone: a discarded draw comes back in the next step."""

    def draft(self, node: int) -> torch.Tensor:
        return Noise(self.seeds, torch.zeros_like(self.positions)).draft(1)


class Reusing(ModelDrafter):
    """Draws with noise that it used in the step before."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        return super().propose(context, shape, draws, Stale(noise.seeds, noise.positions))


@pytest.mark.parametrize("spoilt", [Tempered, OtherSource, Reusing, Echo])
def test_negative_controls_fail(spoilt: type[ModelDrafter]) -> None:
    target = toy(3, seed=3)
    samples = SAMPLES if spoilt is Tempered else CONTROL_SAMPLES  # it is the least wrong
    assert p_value(target, Spoilt(spoilt, toy(3, seed=8)), 1, samples=samples) < ALPHA


def test_reported_q_is_what_tokens_were_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: the very tensors, with the row's own processors."""
    seen: list[torch.Tensor] = []

    def spy(*args: object, **options: object) -> torch.Tensor:
        probs: torch.Tensor = logits_to_probs(*args, **options)  # type: ignore[arg-type]
        seen.append(probs[:, 0].clone())
        return probs

    monkeypatch.setattr(deferred, "logits_to_probs", spy)
    trees: list[TokenTree] = []

    class Watched(ModelDrafter):
        def propose(self, context: Context, shape: Shape, how: DrawnBy, noise: Noise) -> TokenTree:
            seen.clear()
            tree = super().propose(context, shape, how, noise)
            if tree.q is not None:
                trees.append(tree)
                drawn = tree.drawn_by[:, 1:] == DrawnBy.IID  # [B, N - 1]; rows near their limit get fewer guesses
                for i, probs in enumerate(seen):
                    assert torch.equal(tree.q[drawn[:, i], i], probs[drawn[:, i]])
                    assert bool((tree.q[~drawn[:, i], i] == 0).all())
                assert bool((tree.q[:, -1] == 0).all())
                assert bool((tree.q[:, :-1].gather(2, tree.tokens[:, 1:, None])[..., 0][drawn] > 0).all())
            return tree

    config = {"method": "draft_model", "num_speculative_tokens": 4, "verify": "rejection"}
    engine = Engine(table(), ToyTokenizer(), speculative=config, method=Spoilt(Watched, table(blur=0.5)))
    engine.generate_batch(mixed_requests())
    assert trees


@pytest.mark.parametrize("gamma", [1, 4])
def test_text_does_not_depend_on_company(gamma: int) -> None:
    """With ``rejection`` the text depends on the drafter and its length, but not on who else is in the batch."""
    engine = draft_engine(table(), table(blur=0.5), gamma, verify="rejection")
    alone = outcomes(engine.generate_batch(mixed_requests(), batch_size=1))
    for batch_size in (3, 8):
        assert outcomes(engine.generate_batch(mixed_requests(), batch_size=batch_size)) == alone


def test_full_acceptance_where_the_draft_is_the_target() -> None:
    engine = draft_engine(table(), table(), 5, verify="rejection")
    for completion in engine.generate_batch(mixed_requests()):
        assert completion.num_accepted_tokens == completion.num_draft_tokens
