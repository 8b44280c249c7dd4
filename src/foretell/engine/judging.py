"""From a tree of guesses to a verdict on it: layout, the target's pass, p, and the draws. ``captured.py`` does the same in
one launch.
"""

from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from foretell.core.deferred import Deferred
from foretell.core.noise import Noise
from foretell.core.probs import History, Paths, Processors
from foretell.core.tree import TokenTree, layout
from foretell.engine.run import Run
from foretell.engine.state import State
from foretell.engine.tapping import Tapping
from foretell.model.target import Target
from foretell.verify.base import Evidence, RowVerifiers, Verdict, Verifier
from foretell.verify.drawing import draw


@dataclass(slots=True)  # not frozen: it is made in every step
class Judged:
    """A tree after the target's pass over it, of B rows and N nodes."""

    logits: Tensor  # [B, N, V] of the target
    evidence: Evidence
    verdict: Verdict
    taps: Tensor | None  # [B, N, T * H]
    # What a captured graph has made too: ``state.pack``, and length and pending token of each row after the step [2, B].
    packed: Tensor | None = None
    following: Tensor | None = None
    seconds: float | None = None  # of the pass; None: it is over when the host has read the verdict


def judge(
    state: State,
    target: Target,
    tree: TokenTree,
    verifier: Verifier | RowVerifiers,
    noise: Noise,
    tapping: Tapping,
    *,
    multiple: int = 64,
    pack: bool = False,
    ran: Run | None = None,
) -> Judged:
    """Launch by launch. multiple: of slots that a pass attends to. pack: see ``layout``. ran: a pass that has been made,
    and its verdict where that is known."""
    plan = layout(
        tree.parent, state.length, state.capacity,
        span=state.span(tree.num_nodes, multiple), pack=pack, is_line=tree.max_children == 1,
    )  # fmt: skip
    layers = (tree.hidden_layer, target.spec.num_layers)
    ready = perf_counter()
    output = None if ran is None else ran.output
    if output is None:
        output = target.forward(tree.tokens, plan, layers=layers, hidden=tree.hidden, taps=tapping.layers)
    seconds = perf_counter() - ready
    assert output.logits is not None
    evidence = evidence_of(
        output.logits, output.taps, tree, plan.ancestry, noise, state.processors, state.history, tapping
    )
    verdict = None if ran is None else ran.verdict
    if verdict is None:
        verdict = draw(verifier, evidence)
    return Judged(output.logits, evidence, verdict, output.taps, seconds=seconds)


def evidence_of(
    logits: Tensor, taps: Tensor | None, tree: TokenTree, ancestry: Tensor, noise: Noise, processors: Processors,
    history: History, tapping: Tapping,
) -> Evidence:  # fmt: skip
    """What a verifier reads of a pass. p is made where a verifier or an observer reads it."""
    paths = Paths(tree.tokens, ancestry, tree.parent, is_tree=True)
    law = Deferred(logits, processors, history, paths)
    return Evidence.later(tree, law, noise, tapping.for_verifier(taps))
