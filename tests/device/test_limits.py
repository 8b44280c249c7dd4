"""Limits of a step on an accelerator: the host reads once, and never waits for a copy to the device.

(``greedy_block`` reads its powers.)
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import SamplingParams
from foretell.core.noise import Noise
from foretell.core.spec import method_words
from foretell.core.tree import DrawnBy, TokenTree
from foretell.methods.hybrid import graft as grafting
from foretell.methods.hybrid.drafter import Worth
from foretell.methods.hybrid.graft import graft_there
from foretell.verify import VERIFIERS
from foretell.verify.base import Evidence
from foretell.verify.lossy.base import Lossy
from foretell.verify.multidraft import KSeq, MultiDraft
from foretell.verify.selection import Importance, Transport
from tests.device.counting import Run, both, engine_on, requests, run
from tests.device.pretend import NAME, device

LONG = SamplingParams(max_new_tokens=18, ignore_eos=True)
FAST = ("none", "draft_model:4", "eagle3:eagle2/size=8", "draft_model:transport:static/branching=3x1", "hybrid")
SLOW = (
    "eagle1", "eagle3", "medusa", "dflash", "kangaroo", "kangaroo:static",
    "ngram", "suffix", "prediction",
    "draft_model:dyspec/size=8", "draft_model:opt_tree", "draft_model:eagle2", "draft_model:sequoia",
    "draft_model:adaptive", "draft_model:specdec", "draft_model:k_seq:static", "draft_model:importance:static",
    "draft_model:traversal:static", "draft_model:block", "draft_model:judge",
    "draft_model:rejection", "draft_model:top_n",
)  # fmt: skip


def assert_lean(found: Run) -> None:
    """One read and no upload that waits, in every step; there are some."""
    assert len(found.steady) > 2
    for step in found.steady:
        assert step.reads.total() == 1, step.reads
        assert not step.uploads, step.uploads


@pytest.mark.parametrize("words", [*FAST, *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW)])
def test_one_read_and_no_upload(words: str) -> None:
    config: dict[str, Any] = method_words(words)[0]
    longer = replace(LONG, max_new_tokens=36)
    other = replace(longer, temperature=0.7, top_k=30, top_p=0.9, presence_penalty=0.3)
    rows = [LONG] if words in FAST else [longer, other]
    assert_lean(run(engine_on(NAME, config), requests(rows)))


def test_grafts_ask_nothing_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of every suffix stand in a head's tree, whatever they are worth: the tokens are the CPU's."""
    grafted: list[int] = []

    def counted(tree: TokenTree, guesses: list[list[int]]) -> TokenTree:
        grafted.append(sum(map(len, guesses)))
        return graft_there(tree, guesses)

    monkeypatch.setattr(grafting, "graft_there", counted)
    monkeypatch.setattr(Worth, "num_grafted", lambda self, score: 2)
    monkeypatch.setattr(Worth, "prefers_suffix", lambda *_: False)
    config = {"method": "hybrid", "second_shape": "eagle2/size=8"}
    given = requests([replace(LONG, temperature=0.0)], ["x = 1; x = 1; x = 1; x"])
    expected, found = both(config, given)
    assert found.tokens == expected.tokens
    assert_lean(found)
    assert sum(grafted) > 0


def test_rows_of_several_methods() -> None:
    """The notes of one group's drafter come with the verdict of all."""
    configs = ["none", method_words("draft_model:dyspec/size=8")[0], "eagle3"]
    given = [replace(one, speculative=config) for one, config in zip(requests([LONG] * 3), configs, strict=True)]
    assert_lean(run(engine_on(NAME, "none"), given))


@pytest.mark.parametrize(
    "name", [name for name, rule in VERIFIERS.items() if isinstance(rule, Lossy) and name != "judge"]
)
def test_a_lossy_rule_tolerates_the_same(name: str) -> None:
    """Of distributions so flat that it tolerates many, and so peaked that it tolerates few."""
    rule, generator = VERIFIERS[name], torch.Generator().manual_seed(1)
    parent = torch.tensor([[-1, 0, 0, 1, 1, 3, 5]] * 16)
    p = torch.softmax(torch.randn(16, 7, 12, generator=generator) * torch.linspace(0.2, 4.0, 16)[:, None, None], -1)
    tokens = torch.randint(0, 12, parent.shape, generator=generator)

    def decided(where: torch.device) -> list[list[int]]:
        tree = TokenTree(tokens.to(where), parent.to(where), torch.zeros_like(tokens).to(where))
        noise = Noise(torch.arange(16).to(where), torch.full((16,), 9).to(where))
        found = rule.decide(Evidence(tree, p.to(where), noise))
        assert found is not None
        return [each.tolist() for each in found]

    assert decided(device()) == decided(torch.device("cpu"))


@pytest.mark.parametrize("rule", [KSeq(), Importance(), Transport()], ids=lambda rule: rule.name)
def test_several_drafts_are_judged_alike_without_a_read(rule: MultiDraft) -> None:
    """Runs of three and of none, a broken row, FIXED children behind a run: the stops and residuals of the CPU."""
    parent = torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 5, -1]] * 3)
    generator = torch.Generator().manual_seed(4)
    p, q = (torch.softmax(torch.randn(3, 9, 40, generator=generator) * 2, -1) for _ in range(2))
    q[:, 2:] = 0.0
    p[2, 0, 3] = torch.nan
    labels = torch.where(parent >= 0, int(DrawnBy.IID), int(DrawnBy.FIXED))
    labels[:, 3] = labels[:, 6:] = DrawnBy.FIXED
    tokens = torch.randint(0, 40, parent.shape, generator=generator)

    def evidence(where: torch.device) -> Evidence:
        tree = TokenTree(tokens.to(where), parent.to(where), labels.to(where), q.to(where), max_children=3)
        return Evidence(tree, p.to(where))

    here, there = evidence(torch.device("cpu")), evidence(device())
    expected, found = rule.stops(here), rule.stops(there)
    torch.testing.assert_close(found.stops.cpu(), expected.stops, rtol=1e-6, atol=1e-7)
    for node in range(8):
        at = torch.full((3,), node)
        left = rule.residual(there, found, at.to(device())).cpu()
        torch.testing.assert_close(left, rule.residual(here, expected, at), rtol=1e-6, atol=1e-7, equal_nan=True)
