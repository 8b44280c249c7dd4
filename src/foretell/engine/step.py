"""One decode step, whole: propose, layout, forward, probabilities, verify, commit, observe, advance.

There is no branch by method. A tree of one node is plain decoding by the same path: the baseline of every benchmark
and the reference of every test.
"""

from time import perf_counter

from torch import Tensor

from foretell.core.deferred import Deferred
from foretell.core.noise import Noise
from foretell.core.probs import Paths
from foretell.core.tree import DrawMode, Plan, TokenTree, layout, pad_tree
from foretell.draft.base import Drafter
from foretell.draft.shapes import Shape
from foretell.engine.candidates import candidates
from foretell.engine.captured import CapturedSteps, Judged
from foretell.engine.event import StepEvent
from foretell.engine.run import Run, most_passes, run
from foretell.engine.state import State
from foretell.engine.tapping import Tapping
from foretell.kernels.bounds import check_tree
from foretell.model.target import Target
from foretell.verify.base import Evidence, RowVerifiers, Verdict, Verifier
from foretell.verify.drawing import draw


def step(
    state: State,
    target: Target,
    drafter: Drafter,
    verifier: Verifier | RowVerifiers,
    shape: Shape,
    draws: DrawMode,
    *,
    width: int = 0,
    pack: bool = False,
    tapping: Tapping = Tapping(),  # noqa: B008 (frozen)
    captured: CapturedSteps | None = None,
    can_run: bool = False,
) -> StepEvent:
    """Advance every row by at least one token. Returns the ``StepEvent``.

    width > 0 pads every pass to that many nodes and the attended span to 512 slots, so that plain and speculative
    passes run the very same kernels and agree bit for bit where the kernels are row-invariant. pack lets a model leave
    out the padding of ragged rows. captured: what is launched at once from layout to verdict, where a step can be. can_run:
    several plain steps may be made in one call (``run``); the event is then that of the last. A batch
    whose rows have several drafters and verifiers comes as a ``GroupedDrafter`` and ``RowVerifiers``, which have the
    interface of a single one.
    """
    begun = perf_counter()
    rows, depth_limit, spec = state.rows, state.depth_limit, target.spec
    most = most_passes(state, target, drafter, verifier, tapping) if can_run else 1
    ran = run(state, target, drafter, tapping, most) if most > 1 else None
    started = perf_counter()
    noise = Noise(state.seeds, state.length)
    tree = drafter.propose(state, shape, draws, noise)
    if tree.num_nodes > 1:
        check_tree(tree, spec.vocab_size)
    if width:
        tree = pad_tree(tree, width)
    proposed = perf_counter()
    judged = None if captured is None else captured.judge(state, tree, verifier, tapping, drafter.num_candidates)
    if judged is not None:
        return _of_graph(state, drafter, tree, judged, noise, tapping, (begun, proposed))

    span = state.span(tree.num_nodes, 512 if width else 64)
    is_line = tree.max_children == 1
    plan = layout(tree.parent, state.length, state.capacity, span=span, pack=pack, is_line=is_line)
    layers = (tree.hidden_layer, spec.num_layers)
    ready = perf_counter()
    if ran is None:
        ran = Run(target.forward(tree.tokens, plan, layers=layers, hidden=tree.hidden, taps=tapping.layers))
    output = ran.output
    forwarded = perf_counter()
    assert output.logits is not None

    evidence = _evidence(output.logits, state, tree, plan, noise, tapping.for_verifier(output.taps))
    verdict = ran.verdict or draw(verifier, evidence)
    likely = candidates(output.logits, drafter.num_candidates)
    commit, moves = state.advance(tree, verdict, tapping.for_drafter(output.taps), likely)
    if moves is not None:
        target.commit(*moves)
    drafter.observe(commit)
    return StepEvent(
        rows, evidence, output.logits, verdict, commit, depth_limit,
        seconds_draft=proposed - started,
        seconds_draft_model=0.0 if state.probe is None else state.probe.seconds_model,
        seconds_target=(started - begun) + (forwarded - ready),
        seconds_rest=(ready - proposed) + (perf_counter() - forwarded),
        num_passes=ran.num_passes,
        num_before=ran.num_tokens,
    )  # fmt: skip


def _of_graph(
    state: State, drafter: Drafter, tree: TokenTree, judged: Judged, noise: Noise, tapping: Tapping,
    at: tuple[float, float],
) -> StepEvent:  # fmt: skip
    """The rest of a step whose graph was launched. at: when the step and its graph began."""
    rows, depth_limit, (begun, proposed) = state.rows, state.depth_limit, at
    paths = Paths(tree.tokens, judged.ancestry, tree.parent, is_tree=True)
    # Made anew for each step: an observer reads p of this one.
    deferred = Deferred(judged.logits, state.processors, state.history, paths)
    evidence = Evidence.later(tree, deferred, noise, tapping.for_verifier(judged.taps))
    verdict = Verdict(*judged.verdict)
    commit, _ = state.advance(
        tree, verdict, tapping.for_drafter(judged.taps), judged.candidates,
        packed=judged.packed, following=judged.following,
    )  # fmt: skip
    read = perf_counter()
    drafter.observe(commit)
    return StepEvent(
        rows, evidence, judged.logits, verdict, commit, depth_limit,
        seconds_draft=proposed - begun,
        seconds_draft_model=0.0 if state.probe is None else state.probe.seconds_model,
        seconds_target=read - proposed,
        seconds_rest=perf_counter() - read,
    )  # fmt: skip


def _evidence(logits: Tensor, state: State, tree: TokenTree, plan: Plan, noise: Noise, taps: Tensor | None) -> Evidence:
    """p is made where a verifier or an observer reads it."""
    paths = Paths(tree.tokens, plan.ancestry, tree.parent, is_tree=True)
    return Evidence.later(tree, Deferred(logits, state.processors, state.history, paths), noise, taps)
