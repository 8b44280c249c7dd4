"""One decode step, whole: propose, judge (layout, forward, probabilities, verify), advance, commit, observe.

There is no branch by method. A tree of one node is plain decoding by the same path: the baseline of every benchmark
and the reference of every test.
"""

from time import perf_counter

from foretell.core.noise import Noise
from foretell.core.tree import DrawMode, pad_tree
from foretell.draft.base import Drafter
from foretell.draft.shapes import Shape
from foretell.engine.captured import CapturedSteps
from foretell.engine.event import StepEvent
from foretell.engine.judging import judge, most_passes, run
from foretell.engine.state import State, Tapping
from foretell.kernels.bounds import check_tree
from foretell.model.target import Target
from foretell.verify.base import RowVerifiers, Verifier


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
    begun, read = perf_counter(), target.bytes_read
    rows, depth_limit = state.rows, state.depth_limit
    most = most_passes(state, target, drafter, verifier, tapping) if can_run else 1
    ran = run(state, target, drafter, tapping, most) if most > 1 else None
    started = perf_counter()
    noise = Noise(state.seeds, state.length)
    tree = drafter.propose(state, shape, draws, noise)
    if tree.num_nodes > 1:
        check_tree(tree, target.spec.vocab_size)
    if width:
        tree = pad_tree(tree, width)
    proposed = perf_counter()
    judged = None if captured is None else captured.judge(state, tree, verifier, noise, tapping)
    if judged is None:
        multiple = 512 if width else 64
        judged = judge(state, target, tree, verifier, noise, tapping, multiple=multiple, pack=pack, ran=ran)
    taps = tapping.for_drafter(judged.taps)
    commit, moves = state.advance(tree, judged.verdict, taps, packed=judged.packed, following=judged.following)
    passed = perf_counter() - proposed if judged.seconds is None else judged.seconds
    if moves is not None:
        target.commit(*moves)
    drafter.observe(commit)
    return StepEvent(
        rows, judged.evidence, judged.logits, judged.verdict, commit, depth_limit,
        seconds_draft=proposed - started,
        seconds_draft_model=0.0 if state.probe is None else state.probe.seconds_model,
        seconds_target=(started - begun) + passed,
        seconds_rest=perf_counter() - proposed - passed,
        num_passes=1 if ran is None else ran.num_passes,
        num_before=0 if ran is None else ran.num_tokens,
        bytes_read=target.bytes_read - read,
    )  # fmt: skip
