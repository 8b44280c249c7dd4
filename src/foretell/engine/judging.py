"""From a tree of guesses to a verdict on it: layout, the target's pass, p, and the draws. ``captured.py`` does the same in
one launch.
"""

from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from foretell.core.deferred import Deferred
from foretell.core.noise import Noise
from foretell.core.probs import History, Paths, Processors
from foretell.core.tree import TokenTree, layout, root_tree
from foretell.draft.base import Commit, Drafter
from foretell.engine.state import State, Tapping
from foretell.model.target import Output, Target
from foretell.verify.base import Evidence, RowVerifiers, Verdict, Verifier
from foretell.verify.drawing import draw
from foretell.verify.exact import Exact


@dataclass(frozen=True)
class Run:
    """What was made before the last pass is judged, of several plain passes in one call: where no row guesses and no pass
    is observed, what the engine does between two passes of a small model takes a tenth of their time, in caches that the
    pass has emptied.

    A run is the steps that would have been made one by one: the draws are made within the call, by the same code. A draw
    that the logits alone do not decide ends it, and ``step`` judges the last pass as any other.
    """

    output: Output  # of the last pass
    verdict: Verdict | None = None  # on it, where that is known
    num_passes: int = 1
    num_tokens: int = 0  # emitted after those before the last


def most_passes(
    state: State, target: Target, drafter: Drafter, verifier: Verifier | RowVerifiers, tapping: Tapping
) -> int:
    """How many passes the next call may make: 1 unless every row is decoded plainly, and nothing is asked of a pass but its
    draws. A text begins with single tokens."""
    most, processors = target.model.most_passes, state.processors
    if most == 1 or max(state.depth_limit) > 0 or state.probe is not None or not drafter.can_wait:
        return 1
    if tapping.verifier or not isinstance(verifier, Exact) or not verifier.lazy:
        return 1
    if processors.reads_history or processors.bias is not None:
        return 1
    for row in state.rows:
        if row.params.logprobs is not None or row.submission.trace:
            return 1
        most = min(most, len(row.token_ids), row.max_tokens - len(row.token_ids))
    return max(most, 1)


def run(state: State, target: Target, drafter: Drafter, tapping: Tapping, most: int) -> Run:
    """Make at most ``most`` passes in one call, and emit the tokens that all but the last one drew; the state is then
    the one before that. Rows that ended stay in it, and take no further token."""
    made = target.decode(state.pending, state.length, state.processors, state.seeds, most, tapping.layers)
    output, tokens, lengths, drawn = made.output, made.tokens, made.lengths, made.drawn
    num_passes, num_rows = len(tokens), len(state.rows)
    verdict = None if drawn is None else Verdict.of([[0]] * num_rows, drawn, [True] * num_rows, 1)
    if num_passes == 1:
        return Run(output, verdict)
    columns = tokens[1:].t().tolist()
    taken = state.emit_plain(columns)
    none, before = [0] * num_rows, num_passes - 1
    commits = [
        Commit(
            root_tree(tokens[at]), lengths[at], [[0]] * num_rows,
            [column[at : at + 1] if at < count else [] for column, count in zip(columns, taken, strict=True)],
            None if made.taps is None else tapping.for_drafter(made.taps[at]),
            ended=[row.finish_reason is not None and count == at + 1 for row, count in zip(state.rows, taken, strict=True)],
            guessed=none,
        )
        for at in range(before)
    ]  # fmt: skip
    drafter.observe_all(commits)
    state.length, state.pending = lengths[before], tokens[before]
    return Run(output, verdict, num_passes, sum(taken))


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
