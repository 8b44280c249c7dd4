"""A drafter's tree that does not continue its rows, or does not fit into their room: only its guesses are lost."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from foretell import Engine, Request, SamplingParams, Service, ServiceOptions, Submission
from foretell.core.errors import DrafterError
from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, TokenTree, chain_tree, root_tree
from foretell.draft.base import Capabilities, Context, Drafter, Method
from foretell.draft.shapes import Shape
from foretell.model.target import Target
from tests.engine.harness import VOCAB, ToyTokenizer, outcomes, plain, started, table
from tests.service.test_service import Mailbox

GAMMA = 3


def guesses(context: Context, count: int) -> TokenTree:
    """Chains of zeros."""
    return chain_tree(torch.cat([context.pending[:, None], torch.zeros(context.num_rows, count, dtype=torch.int64)], 1))


def other_roots(context: Context) -> TokenTree:
    return chain_tree((guesses(context, GAMMA).tokens + 1) % VOCAB)


def a_row_more(context: Context) -> TokenTree:
    tokens = guesses(context, GAMMA).tokens
    return chain_tree(torch.cat([tokens, tokens[:1]]))


def wide(context: Context, count: int) -> TokenTree:
    """Roots with so many children."""
    tree = guesses(context, count)
    return replace(tree, parent=tree.parent.clamp(max=0), max_children=None)


def nodeless(context: Context) -> TokenTree:
    none = torch.zeros(context.num_rows, 0, dtype=torch.int64)
    return TokenTree(none, none, none)


WRONG: dict[str, Callable[[Context], TokenTree]] = {
    "nodeless": nodeless,
    "rowless": lambda context: guesses(context, 1).rows(0, 0),
    "rows": a_row_more,
    "overlong": lambda context: guesses(context, 400),
    "wide": lambda context: wide(context, 400),
    "deep": lambda context: guesses(context, GAMMA),  # where less is left to be written, too
    "root": other_roots,
    "lone_root": lambda context: root_tree((context.pending + 1) % VOCAB),
    "no_token": lambda context: root_tree(context.pending + 10**6),
    "type": lambda context: root_tree(context.pending.int()),
    "hidden": lambda context: replace(guesses(context, 0), hidden_layer=1),
}


class Wrong(Method):
    name, capabilities = "wrong", Capabilities("test double", draws=False)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def open(self, context: Context, capacity: int, target: Target) -> Drafter:
        return WrongDrafter(self.kind)


class WrongDrafter(Drafter):
    def __init__(self, kind: str) -> None:
        self.kind, self.steps = kind, 0

    def num_unread(self, context: Context) -> list[int]:
        return [0] * (context.num_rows + (self.kind == "num_unread"))

    @property
    def light_steps(self) -> list[None]:
        return [None] * (1 + (self.kind == "light_steps"))

    def propose(self, context: Context, shape: Shape, draws: DrawMode, noise: Noise) -> TokenTree:
        self.steps += 1
        count = max(0, min(shape.depth, *context.depth_limit))
        return WRONG[self.kind](context) if self.kind in WRONG and self.steps > 2 else guesses(context, count)


def asked() -> list[Request]:
    """Ending at different steps; the drafter's rows are of one group."""
    return [
        Request([1, 2, 3], SamplingParams(max_new_tokens=9, seed=1, ignore_eos=True)),
        Request([4], SamplingParams(max_new_tokens=7, seed=2, ignore_eos=True, temperature=0.7)),
    ]


def engine_of(kind: str, drafter_errors: str = "plain") -> Engine:
    config = {"method": "ngram", "num_speculative_tokens": GAMMA}
    return Engine(table(1), ToyTokenizer(), speculative=config, method=Wrong(kind), drafter_errors=drafter_errors)


@pytest.mark.parametrize("kind", WRONG)
def test_a_tree_that_does_not_fit_costs_its_guesses_alone(kind: str) -> None:
    engine = engine_of(kind)
    found = engine.generate_batch(asked())
    assert outcomes(found) == outcomes(plain(table(1), asked()))
    assert all(one.plain_reason is not None and one.plain_reason.startswith("wrong failed") for one in found)
    assert all(one.num_draft_tokens for one in found), "the steps before were guessed for"


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("overlong", "rows of 401 nodes; expected 1 rows of at most 4"),
        ("deep", "is 3 deep; its depth_limit is 2"),
        ("root", "expected the pending tokens"),
    ],
)
def test_what_is_wrong_is_told(kind: str, told: str) -> None:
    with pytest.raises(DrafterError, match=told):
        engine_of(kind, "raise").generate(asked()[0].prompt, asked()[0].params)


@pytest.mark.parametrize(("kind", "fails"), [("num_unread", True), ("light_steps", False)])
def test_figures_of_other_rows_cost_the_guesses_at_most(kind: str, fails: bool) -> None:
    config = {"method": "ngram", "num_speculative_tokens": GAMMA}
    made = Service(
        Engine(table(1), ToyTokenizer(), speculative=config, method=Wrong(kind)),
        ServiceOptions(speculation="on", max_num_seqs=2, max_model_len=100),
    )
    with started(made):
        box = Mailbox()
        for index, request in enumerate(asked()):
            made.submit(Submission(str(index), request.prompt, replace(request.params, max_new_tokens=3)), box.hear)
        ended = [box.last(str(index)).completion for index in range(2)]
        assert made.healthy
    assert all(one is not None and one.num_tokens == 3 for one in ended)
    assert made.snapshot().drafter_failures.get("wrong", 0) == 2 * fails
