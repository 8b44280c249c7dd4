"""The target's half of a step as one captured graph: layout, pass, draws and verdict, the moves of KV, and what comes next.

``judging.judge`` is the same launch by launch: the slow twin, which also takes all that a graph cannot hold.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretell.core.graphs import RECORDERS, Feed, Graphs, bucket
from foretell.core.noise import Noise
from foretell.core.tree import TokenTree, layout
from foretell.engine.judging import Judged, evidence_of
from foretell.engine.state import State, Tapping, moves_of, pack
from foretell.model.cache import SPARE, KVCache
from foretell.model.target import CausalModel, Target
from foretell.verify.base import RowVerifiers, Verdict, Verifier
from foretell.verify.drawing import MAX_ELEMENTS, draw

READS_HISTORY = "penalties, min_new_tokens and processors of users read the text on the host"


class Outputs(NamedTuple):
    """What a step's graph puts out, of as many rows and nodes as its bucket has."""

    logits: Tensor  # [B, N, V]
    ancestry: Tensor  # [B, N, N] bool
    verdict: tuple[Tensor, ...]  # path [B, N], count, bonus and sound [B]
    taps: Tensor | None  # [B, N, T * H]
    packed: Tensor  # ``state.pack``
    following: Tensor  # [2, B] length and pending token of each row after the step

    def cut(self, num_rows: int, num_nodes: int) -> "Outputs":
        """That of the rows and nodes that are no padding; what the host reads is cut there."""
        rows, nodes = slice(num_rows), slice(num_nodes)
        path, *others = self.verdict
        return Outputs(
            self.logits[rows, nodes],
            self.ancestry[rows, nodes, nodes],
            (path[rows, nodes], *(each[rows] for each in others)),
            None if self.taps is None else self.taps[rows, nodes],
            self.packed,
            self.following[:, rows],
        )


class CapturedSteps:
    """The graphs of one batch: one for each bucket of rows, nodes and slots, and for each way of judging."""

    def __init__(self, graphs: Graphs, model: CausalModel, pool: KVCache, capacity: int) -> None:
        """pool: the memory of all rows, of which capacity slots hold text and guesses."""
        self.graphs, self.model, self.pool, self.capacity = graphs, model, pool, capacity
        self._memory = pool.memory

    def why_not(self, state: State, verifier: Verifier | RowVerifiers, tree: TokenTree) -> str:
        """Why a step cannot be launched as one graph; "" where it can."""
        if state.processors.reads_history:
            return READS_HISTORY
        if isinstance(verifier, RowVerifiers):
            return "rows of one batch are guessed or judged in several ways"
        if verifier.waits:
            return f"the rule {verifier.name!r} reads values on the host"
        if not type(verifier).__module__.startswith("foretell."):
            return f"the rule {verifier.name!r} is a package's"
        rows, nodes = self._size(state, tree)
        if nodes > SPARE:
            return f"a tree has more than {SPARE} nodes"
        if rows * nodes * state.processors.vocab_size > MAX_ELEMENTS:
            return f"more than {MAX_ELEMENTS} probabilities are judged in parts"
        return ""

    def _size(self, state: State, tree: TokenTree) -> tuple[int, int]:
        return min(bucket(state.num_rows), self.pool.reserve), bucket(tree.num_nodes)

    def judge(
        self, state: State, tree: TokenTree, verifier: Verifier | RowVerifiers, noise: Noise, tapping: Tapping
    ) -> Judged | None:
        """None where the step cannot be launched so. What it returns is valid until the next step."""
        if reason := self.why_not(state, verifier, tree):
            self.graphs.skipped(reason)
            return None
        assert isinstance(verifier, Verifier)
        if self.pool.memory != self._memory:
            self.graphs.forget()
            self._memory = self.pool.memory
        rows, nodes = self._size(state, tree)
        # Padding is written behind the text of a row that has no room for it, and so are rows that nobody decodes.
        span = min(bucket(max(state.lengths) + nodes, 64), self.capacity + SPARE)
        processors = self.graphs.processors(state.processors, rows)
        optional = {"q": tree.q, "hidden": tree.hidden, "notes": tree.notes}
        given = {name: each for name, each in optional.items() if each is not None}
        names = list(given)
        most = tree.max_children  # as it is: rules with a noise for each child read it
        layer, history = tree.hidden_layer, state.history  # the graph keeps no tree of a step
        key = (
            rows, nodes, span, id(verifier), processors.kind, layer, most, tapping,
            *((name, each.dtype, each.shape[2:]) for name, each in given.items()),
            None if tree.notes is None else tree.notes.shape[1],
        )  # fmt: skip

        def judged(
            tokens: Tensor, parent: Tensor, labels: Tensor, length: Tensor, seeds: Tensor, *others: Tensor
        ) -> Outputs:
            held: dict[str, Any] = dict(zip(names, others, strict=True))
            whole = TokenTree(tokens, parent, labels, hidden_layer=layer, max_children=most, **held)
            target = Target.of(self.model, self.pool.rows(0, rows))
            plan = layout(parent, length, self.capacity, span=span, is_line=most == 1)
            layers = (whole.hidden_layer, self.model.spec.num_layers)
            output = target.forward(tokens, plan, layers=layers, hidden=whole.hidden, taps=tapping.layers)
            assert output.logits is not None
            evidence = evidence_of(
                output.logits, output.taps, whole, plan.ancestry, Noise(seeds, length), processors, history, tapping
            )
            verdict = draw(verifier, evidence)
            if most != 1:  # of a line all lies after the committed tokens already
                target.commit(*moves_of(length, verdict))
            return Outputs(
                output.logits,
                plan.ancestry,
                (verdict.path, verdict.count, verdict.bonus, verdict.sound),
                output.taps,
                pack(whole, verdict),
                torch.stack([length + verdict.count, verdict.bonus]),
            )

        shape = (rows, nodes)
        feeds = [
            Feed(tree.tokens, shape),
            Feed(tree.parent, shape, -1),
            Feed(tree.drawn_by, shape),
            Feed(state.length, (rows,), self.capacity),
            Feed(state.seeds, (rows,), constant=True),
        ]
        for name, each in given.items():
            wide = (rows, each.shape[1]) if name == "notes" else (*shape, *each.shape[2:])
            feeds.append(Feed(each, wide, -1 if name == "notes" else 0))
        # What a self-drafter wrote in its layers is moved, and not written again: that cannot be done twice.
        twice = most == 1 or not layer
        whole = self.graphs.run(key, feeds, judged, outcome=(lambda made: made.packed) if twice else None)
        made = whole.cut(state.num_rows, tree.num_nodes)
        # Made anew for each step: an observer reads p of this one.
        evidence = evidence_of(made.logits, made.taps, tree, made.ancestry, noise, state.processors, history, tapping)
        return Judged(made.logits, evidence, Verdict(*made.verdict), made.taps, made.packed, made.following)


def graphs_of(model: CausalModel, width: int) -> str | None:
    """ "auto" where steps of a model are launched as captured graphs, else "off" and why; None on a device without them."""
    if model.spec.device.type not in RECORDERS:
        return None
    if not model.spec.cuda_graphs:
        return "off"
    if width:
        return "off: every pass has one width"
    if model.loras:
        return "off: rows have adapters"
    if model.spec.implementation != "lean":
        return f"off: implementation {model.spec.implementation!r} decides on the host what it launches"
    return "off: several processes run the model" if model.is_shared else "auto"


def captured_steps(model: CausalModel, pool: KVCache, capacity: int, width: int) -> CapturedSteps | None:
    """The captured steps of a batch; None where there are none."""
    if graphs_of(model, width) != "auto":
        return None
    return CapturedSteps(Graphs(model.spec.device), model, pool, capacity)
