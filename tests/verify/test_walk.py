"""The walk in one C call against its slow twin: ``follow_draws`` and the tensors of ``Verdict``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from foretell.core import deferred as module
from foretell.core.deferred import Deferred
from foretell.core.noise import Noise
from foretell.core.params import SamplingParams
from foretell.core.probs import History, Paths, Processors
from foretell.core.tree import TokenTree, chain_tree, layout
from foretell.kernels.build import BuildError, load_library, typed, variants_of
from foretell.kernels.small import FUNCTIONS
from foretell.verify.base import Evidence, Verdict
from foretell.verify.drawing import draw
from foretell.verify.exact import Coupled, Exact, follow_draws

VOCAB = 700
RULES = ({"temperature": 0.0}, {}, {"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2})


def variants() -> list[str]:
    try:
        return variants_of("race")
    except BuildError:
        return []


def random_tree(generator: torch.Generator, rows: int, nodes: int) -> TokenTree:
    """Trees of few different tokens, so that walks are long; with equal siblings and padding."""
    tokens = torch.randint(0, 4, (rows, nodes), generator=generator)
    parent = torch.full((rows, nodes), -1)
    for node in range(1, nodes):
        above = torch.randint(-1, node, (rows,), generator=generator)
        alive = (above <= 0) | (parent.gather(1, above.clamp(min=0)[:, None])[:, 0] >= 0)
        parent[:, node] = torch.where(alive, above, 0)
    return TokenTree(tokens, parent, torch.zeros_like(parent))


def given(tree: TokenTree, logits: Tensor, params: Sequence[SamplingParams], seed: int) -> Evidence:
    rows = len(params)
    length = torch.arange(rows) + 5
    processors = Processors(list(params), vocab_size=VOCAB, end_token_ids=[2], device=torch.device("cpu"))
    history = History([[1] * (6 + row) for row in range(rows)], [3] * rows)
    plan = layout(tree.parent, length, 100)
    deferred = Deferred(logits, processors, history, Paths(tree.tokens, plan.ancestry, tree.parent))
    return Evidence.later(tree, deferred, Noise(torch.arange(rows) * 7 - seed, length), None)


def assert_like_its_twin(evidence: Evidence) -> int:
    """The walk, and where it stops, as the slow twin has them; how many guesses are kept."""
    verdict = Coupled().walk(evidence)
    assert verdict.host is not None
    at, bonus = follow_draws(evidence)
    twin = draw(Untold(), evidence)
    assert twin.host is None
    assert verdict.bonus.tolist() == bonus.tolist() == twin.bonus.tolist()
    assert verdict.sound.tolist() == twin.sound.tolist()
    assert verdict.counts == twin.counts == verdict.count.tolist() == twin.count.tolist()
    for row, count in enumerate(verdict.counts):
        kept = verdict.host[0][row]
        assert kept == verdict.path[row, :count].tolist() == twin.path[row, :count].tolist()
        assert kept[-1] == int(at[row])
        assert sorted(verdict.path[row].tolist()) == list(range(evidence.tree.num_nodes))
    return sum(verdict.counts) - len(verdict.counts)


@dataclass(frozen=True)
class Untold(Coupled):
    """The same rule, without its walk."""

    def walk(self, evidence: Evidence) -> Verdict | None:
        return None


@pytest.mark.parametrize("variant", variants())
def test_walks_of_random_trees_are_those_of_the_slow_twin(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = typed(load_library("race", variant), FUNCTIONS)
    monkeypatch.setattr(module, "race_library", lambda: library)
    generator, kept = torch.Generator().manual_seed(0), 0
    params = [SamplingParams(**rule) for rule in RULES]
    for trial in range(30):
        tree = random_tree(generator, len(params), 1 + trial % 9)
        logits = torch.randn(len(params), tree.num_nodes, VOCAB, generator=generator)
        logits[..., :4] += 9.0
        kept += assert_like_its_twin(given(tree, logits, params, trial))
        part = given(tree, logits, params, trial).rows(1, 4)
        assert (
            draw(Coupled(), part).bonus.tolist()
            == draw(Coupled(), given(tree, logits, params, trial)).bonus[1:4].tolist()
        )
    assert kept > 40, "walks of several nodes"


@pytest.mark.skipif(not variants(), reason="needs the C kernels")
@pytest.mark.parametrize("kind", ["chain", "strided", "wider", "narrower", "one"])
def test_walks_over_memory_of_any_layout(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    params = [SamplingParams()] * 3
    num = 1 if kind == "one" else 5
    width = {"wider": VOCAB + 60, "narrower": VOCAB - 9}.get(kind, VOCAB)
    tokens = torch.randint(0, 3, (3, num), generator=generator)
    tree = chain_tree(tokens)  # its parents are one row's memory, seen three times
    if kind == "strided":
        tree = TokenTree(tokens.repeat_interleave(2, 1)[:, ::2], tree.parent.clone().T.contiguous().T, tree.drawn_by)
    logits = torch.randn(3, 2 * num, width, generator=generator)[:, ::2]
    logits[..., :3] += 9.0
    logits[..., VOCAB:] = 50.0  # beyond the vocabulary: never drawn
    assert assert_like_its_twin(given(tree, logits, params, 0)) > (0 if num > 1 else -1)


@pytest.mark.skipif(not variants(), reason="needs the C kernels")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_the_logits_do_not_decide_is_left_to_the_slow_twin(value: float) -> None:
    tree = chain_tree(torch.tensor([[1, 2, 3], [1, 2, 3]]))
    logits = torch.zeros(2, 3, VOCAB)
    logits[:, 0, 2] = logits[:, 1, 3] = 60.0
    logits[1, 1, 5] = value
    params = [SamplingParams(), SamplingParams()]
    assert Coupled().walk(given(tree, logits, params, 0)) is None
    verdict = draw(Coupled(), given(tree, logits, params, 0))
    twin = draw(Untold(), given(tree, logits, params, 0))
    assert verdict.counts == twin.counts
    assert verdict.counts[0] == 3
    assert verdict.sound.tolist() == twin.sound.tolist()


def test_what_reads_the_text_or_another_type_is_left_to_the_slow_twin() -> None:
    tree = chain_tree(torch.tensor([[1, 2]]))
    logits = torch.randn(1, 2, VOCAB)
    for params in (SamplingParams(repetition_penalty=1.3), SamplingParams(logit_bias={3: 2.0})):
        assert Coupled().walk(given(tree, logits, [params], 0)) is None
    for other in (logits.double(), logits.bfloat16()):
        assert Coupled().walk(given(tree, other, [SamplingParams()], 0)) is None


def test_a_rule_with_choices_of_its_own_is_not_passed_over() -> None:
    class Stubborn(Exact):
        def choices(self, evidence: Evidence) -> Tensor:
            return torch.full(evidence.tree.tokens.shape, 5)

    class Later(Stubborn):
        """Its choices are inherited."""

    evidence = given(chain_tree(torch.tensor([[1, 5]])), torch.zeros(1, 2, VOCAB), [SamplingParams()], 0)
    for rule in (Stubborn(), Later()):
        assert draw(rule, evidence).bonus.tolist() == [5]
        assert draw(rule, evidence).counts == [2]
    assert Coupled.lazy
