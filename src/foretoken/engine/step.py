"""One decode step, whole: propose, layout, forward, warp, verify, commit, observe, advance.

There is no branch by method. A tree of one node is plain decoding by the same path: the baseline of every benchmark
and the oracle of every test.
"""

from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from foretoken.bounds import check_tree
from foretoken.draft.base import Commit, Drafter
from foretoken.draft.shape import Shape
from foretoken.engine.candidates import candidates
from foretoken.engine.state import State
from foretoken.engine.tapping import Tapping
from foretoken.model.target import Target
from foretoken.noise import Noise
from foretoken.sampling import Paths, warp
from foretoken.tree import Draws, layout, pad_tree
from foretoken.verify.law import Evidence, Panel, Verdict, Verifier, draw


@dataclass(frozen=True)
class StepReport:
    """What one step did, and where its time went (host clock: on an accelerator, work is queued, not done, by then)."""

    commit: Commit
    verdict: Verdict
    seconds_draft: float  # proposing, the draft model's passes included
    seconds_target: float  # the target's pass
    seconds_rest: float  # layout, laws, verification, commit, bookkeeping
    logits: Tensor  # [B, N, V] of the target, before any processor: valid until its next pass
    p: Tensor  # [B, N, V] after them


def step(
    state: State,
    target: Target,
    drafter: Drafter,
    verifier: Verifier | Panel,
    shape: Shape,
    draws: Draws,
    *,
    width: int = 0,
    pack: bool = False,
    tapping: Tapping = Tapping(),  # noqa: B008 (frozen)
) -> StepReport:
    """Advance every row by at least one token.

    width > 0 pads every pass to that many nodes and the attended span to 512 slots, so that plain and speculative
    passes run the very same kernels and agree bit for bit where the kernels are row-invariant. pack lets a model leave
    out the padding of ragged rows. A batch whose rows have several drafters and verifiers comes as an ``Ensemble`` and a
    ``Panel``: to this page they are one of each.
    """
    begun = perf_counter()
    spec = target.spec
    noise = Noise(state.seeds, state.length)
    tree = drafter.propose(state, shape, draws, noise)
    check_tree(tree, spec.vocab_size)
    if width:
        tree = pad_tree(tree, width)
    proposed = perf_counter()

    span = state.span(tree.num_nodes, 512 if width else 64)
    plan = layout(tree.parent, state.length, state.capacity, span=span, pack=pack)
    layers = (tree.hidden_layer, spec.num_layers)
    ready = perf_counter()
    output = target.forward(tree.tokens, plan, layers=layers, hidden=tree.hidden, taps=tapping.layers)
    forwarded = perf_counter()
    assert output.logits is not None

    p = warp(output.logits, state.processors, state.history, Paths(tree.tokens, plan.ancestry, tree.parent))
    verdict = draw(verifier, Evidence(tree, p, noise, tapping.for_verifier(output.taps)))
    likely = candidates(output.logits, drafter.num_candidates)
    commit, moves = state.advance(tree, verdict, tapping.for_drafter(output.taps), likely)
    if moves is not None:
        target.commit(*moves)
    drafter.observe(commit)
    ended = perf_counter()
    rest = (ready - proposed) + (ended - forwarded)
    return StepReport(commit, verdict, proposed - begun, forwarded - ready, rest, output.logits, p)
