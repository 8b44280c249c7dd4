"""One decode step, whole: propose, layout, forward, probabilities, verify, commit, observe, advance.

There is no branch by method. A tree of one node is plain decoding by the same path: the baseline of every benchmark
and the reference of every test.
"""

from time import perf_counter

import torch
from torch import Tensor

from foretell.core.deferred import Deferred
from foretell.core.noise import Noise
from foretell.core.probs import Paths
from foretell.core.tree import DrawMode, Plan, TokenTree, layout, pad_tree
from foretell.draft.base import Drafter
from foretell.draft.shapes import Shape
from foretell.engine.event import StepEvent
from foretell.engine.state import State
from foretell.engine.tapping import Tapping
from foretell.kernels.bounds import check_tree
from foretell.model.target import Target
from foretell.verify.base import Evidence, RowVerifiers, Verifier
from foretell.verify.drawing import draw

_BLOCK = 64
"""Tokens whose largest logit ranks them together: see ``candidates``."""


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
) -> StepEvent:
    """Advance every row by at least one token. Returns the ``StepEvent``.

    width > 0 pads every pass to that many nodes and the attended span to 512 slots, so that plain and speculative
    passes run the very same kernels and agree bit for bit where the kernels are row-invariant. pack lets a model leave
    out the padding of ragged rows. A batch whose rows have several drafters and verifiers comes as a ``GroupedDrafter``
    and ``RowVerifiers``, which have the interface of a single one.
    """
    begun = perf_counter()
    rows, depth_limit, spec = state.rows, state.depth_limit, target.spec
    noise = Noise(state.seeds, state.length)
    tree = drafter.propose(state, shape, draws, noise)
    if tree.num_nodes > 1:
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

    evidence = _evidence(output.logits, state, tree, plan, noise, tapping.for_verifier(output.taps))
    verdict = draw(verifier, evidence)
    likely = candidates(output.logits, drafter.num_candidates)
    commit, moves = state.advance(tree, verdict, tapping.for_drafter(output.taps), likely)
    if moves is not None:
        target.commit(*moves)
    drafter.observe(commit)
    return StepEvent(
        rows, evidence, output.logits, verdict, commit, depth_limit,
        seconds_draft=proposed - begun,
        seconds_draft_model=0.0 if state.probe is None else state.probe.seconds_model,
        seconds_target=forwarded - ready,
        seconds_rest=(ready - proposed) + (perf_counter() - forwarded),
    )  # fmt: skip


def _evidence(logits: Tensor, state: State, tree: TokenTree, plan: Plan, noise: Noise, taps: Tensor | None) -> Evidence:
    """p is made where a verifier or an observer reads it."""
    paths = Paths(tree.tokens, plan.ancestry, tree.parent, is_tree=True)
    return Evidence.later(tree, Deferred(logits, state.processors, state.history, paths), noise, taps)


def candidates(logits: Tensor, count: int) -> Tensor | None:
    """[..., count] int64: the tokens of the largest logits [..., V], the largest first, for drafters that learn from them
    (``Drafter.num_candidates``); None for a count of 0.

    By logit, not by distribution: at temperature 0 and after filters a distribution has one token or few. Which of
    equal logits comes first is left open: they are guesses. On a CPU ``topk`` takes 0.1 ms a node at V = 32,768, which
    for small models is as much as their layers; so blocks are ranked by their maximum first: the best tokens lie in the
    best blocks.
    """
    if count == 0:
        return None
    num_blocks = logits.shape[-1] // _BLOCK
    if logits.device.type != "cpu" or num_blocks < 2 * count:
        return logits.topk(count).indices
    end = num_blocks * _BLOCK
    # [..., count] indices of blocks.
    blocks = logits[..., :end].reshape(*logits.shape[:-1], num_blocks, _BLOCK).amax(-1).topk(count).indices
    tokens = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2)  # [..., count * 64]
    rest = torch.arange(end, logits.shape[-1]).expand(*logits.shape[:-1], -1)
    tokens = torch.cat([tokens, rest], -1)
    return tokens.gather(-1, logits.gather(-1, tokens).topk(count).indices)
