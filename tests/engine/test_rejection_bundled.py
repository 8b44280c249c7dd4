"""``rejection`` on the bundled pair, real kernels and all: the joint distribution of three tokens is the target's.

top-k 3 leaves 27 texts, whose exact distribution is read off the target by plain forwards, one for each context. Each
test is one chi-square test on fixed seeds at a false-alarm rate of ALPHA; the drafters that lie must fail the same test.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from foretell import Engine, Request, SamplingParams
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, DrawnBy, TokenTree
from foretell.draft.base import Context, Method
from foretell.draft.shapes import Shape
from foretell.methods.draft_model.drafter import DraftModel, ModelDrafter
from foretell.model.load import load_model
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target
from tests.certify.harness import Spoilt
from tests.engine.test_rejection import ALPHA, Tempered, chi_square

SAMPLES, CONTROL_SAMPLES, BATCH, KEPT, HORIZON = 2000, 500, 250, 3, 3
PROMPT = [300, 1200, 45, 700, 262, 554, 262]  # any tokens do: the distribution is conditional on them


class Flattering(ModelDrafter):
    """Proposes its argmax and reports it as drawn from a flatter distribution."""

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        tree = super().propose(context, shape, DrawMode.FIXED, noise)
        if tree.num_nodes == 1:
            return tree
        guessed = tree.parent >= 0
        q = torch.zeros(*tree.tokens.shape, self.num_tokens)
        q[:, :-1] = (0.6 / self.num_tokens) + torch.zeros_like(q[:, :-1]).scatter(2, tree.tokens[:, 1:, None], 0.4)
        return replace(tree, q=q, drawn_by=torch.where(guessed, int(DrawnBy.IID), int(DrawnBy.FIXED)))


@pytest.fixture(scope="module")
def pair() -> tuple[CausalModel, CausalModel]:
    return load_model("bundled/target"), load_model("bundled/draft")


@pytest.fixture(autouse=True)
def audited() -> None:
    """The audit of thousands of rows would cost more than the test: the other files do it."""


def next_distribution(model: CausalModel, ids: list[int]) -> tuple[list[int], list[float]]:
    """The KEPT tokens that may follow ids, and their distribution."""
    logits = feed(Target(model, 1, 64), [ids], [0], head=True)
    best = logits[0, 0].double().topk(KEPT)
    return best.indices.tolist(), torch.softmax(best.values, 0).tolist()


def joint(model: CausalModel) -> dict[tuple[int, ...], float]:
    """Every text of HORIZON tokens that can follow PROMPT, with its probability."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(HORIZON):
        grown: dict[tuple[int, ...], float] = {}
        for text, chance in probs.items():
            for token, p in zip(*next_distribution(model, [*PROMPT, *text]), strict=True):
                grown[(*text, token)] = chance * p
        probs = grown
    return probs


def p_value(target: CausalModel, method: Method, probs: dict[tuple[int, ...], float], samples: int) -> float:
    config = {"method": "draft_model", "num_speculative_tokens": 2, "verify": "rejection"}
    engine = Engine(target, speculative=config, method=method)
    params = SamplingParams(max_new_tokens=HORIZON + 1, top_k=KEPT, ignore_eos=True)
    requests = [Request(PROMPT, replace(params, seed=seed)) for seed in range(samples)]
    counts = dict.fromkeys(probs, 0)
    with torch.inference_mode():
        for completion in engine.generate_batch(requests, batch_size=BATCH):
            text = tuple(completion.token_ids[:HORIZON])
            assert text in counts, "a text outside the target's top-k was emitted"
            counts[text] += 1
    return chi_square(torch.tensor(list(counts.values())).double(), torch.tensor(list(probs.values())).double())


def test_the_joint_law_is_the_targets_and_liars_are_caught(pair: tuple[CausalModel, CausalModel]) -> None:
    target, draft = pair
    probs = joint(target)
    assert len(probs) == KEPT**HORIZON == len(list(product(range(KEPT), repeat=HORIZON)))
    assert p_value(target, DraftModel(draft), probs, SAMPLES) > ALPHA
    # The liars guess with the target itself: a lie about guesses that are never accepted could do no harm.
    for liar in (Flattering, Tempered):
        assert p_value(target, Spoilt(liar, target), probs, CONTROL_SAMPLES) < ALPHA, liar.__name__
