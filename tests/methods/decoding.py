"""Rows of a head's drafter decoded as the engine decodes them, except that the test says which guesses are kept. All that
the drafter told the shapes is written down, to be compared with what training computes on the same tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretell import SamplingParams
from foretell.core.noise import Noise
from foretell.core.probs import History, Processors
from foretell.core.tree import DrawMode, Plan, TokenTree, layout
from foretell.draft.base import Commit, Context, Drafter, PromptChunk
from foretell.draft.shapes import parse_shape
from foretell.heads.head import Head
from foretell.model.prefill import feed
from foretell.model.target import CausalModel, Target
from tests.model.tiny import VOCAB, path_to

CAPACITY = 96


@dataclass
class Pass:
    """What was asked of a drafter at one node of one row, and what it answered."""

    text: list[int]  # committed and pending tokens
    path: list[int]  # drafted tokens down to the node; empty for the root
    logits: Tensor  # [V]
    row: int = 0
    chance: float | None = None  # that the node's own guess is kept, of a drafter that foresees it


class Recording:
    """Put before a drafter: it keeps every answer that a row with room for a guess after it was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.passes: list[Pass] = []
        self.widest = 0

    def begin(self, context: Context, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, base = super().begin(context, limits)  # type: ignore[misc]
        self.asked = [(list(ids), limit) for ids, limit in zip(context.history.ids, limits, strict=True)]
        self.by_column: dict[tuple[int, int], int] = {}
        self.passes += [Pass(ids, [], logits[row, 0], row) for row, (ids, limit) in enumerate(self.asked) if limit]
        return logits, base

    def logits(self, tokens: Tensor, plan: Plan) -> Tensor:
        logits: Tensor = super().logits(tokens, plan)  # type: ignore[misc]
        self.widest = max(self.widest, tokens.shape[1])
        told = getattr(self, "chance", None)
        for row, (text, limit) in enumerate(self.asked):
            for node, token in enumerate(tokens[row].tolist()):
                own = int(plan.slots[row, node] - plan.length[row])
                self.by_column[row, own] = token
                seen = [column for column, sees in enumerate(plan.ancestry[row, node].tolist()) if sees and column]
                if len(seen) == int(plan.positions[row, node] - plan.length[row]) < limit:  # else padding, or a leaf
                    assert seen[-1] == own
                    path = [self.by_column[row, column] for column in seen]
                    chance = None if told is None else float(told[row, node])
                    self.passes.append(Pass(text, path, logits[row, node].clone(), row, chance))
        return logits


@dataclass
class Decoding:
    """Rows, and the last step's ``tree``, ``out`` of the target, ``paths`` and the texts ``before`` it."""

    model: CausalModel
    head: Head
    prompts: list[list[int]]
    drafter_class: Any = None  # (head, model, context, capacity) -> drafter
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def __post_init__(self) -> None:
        num_rows = len(self.prompts)
        lengths = [len(ids) - 1 for ids in self.prompts]
        params = [SamplingParams(temperature=0.9)] * num_rows
        self.context = Context(
            history=History([list(ids) for ids in self.prompts], [len(ids) for ids in self.prompts]),
            processors=Processors(params, vocab_size=VOCAB, end_token_ids=(), device=torch.device("cpu")),
            length=torch.tensor(lengths),
            lengths=lengths,
            pending=torch.tensor([ids[-1] for ids in self.prompts]),
            predictions=[[] for _ in self.prompts],
            depth_limit=[4] * num_rows,
        )
        self.target = Target(self.model, num_rows, CAPACITY)
        self.drafter: Any = self.open()
        known = [ids[:-1] for ids in self.prompts]
        if any(known):
            feed(
                self.target, known, [0] * num_rows, head=False, taps=self.head.taps,
                on_chunk=lambda start, count, taps: self.drafter.read_prompt(PromptChunk(start, count, taps)),
            )  # fmt: skip

    def open(self) -> Drafter:
        drafter: Drafter = self.drafter_class(self.head, self.model, self.context, CAPACITY)
        return drafter

    def step(
        self, shape: str, draws: DrawMode = DrawMode.COUPLED, *, depth_limit: list[int] | None = None, most: int = 4,
        choose: Callable[[int, list[int]], int] | None = None,
    ) -> TokenTree:  # fmt: skip
        """Propose, run the target, keep the path to the node that ``choose`` names of (row, parents), by default a random
        one of at most ``most`` guesses, and a random bonus."""
        context = self.context
        parsed = parse_shape(shape, 4)
        context.depth_limit = [min(limit, parsed.depth) for limit in depth_limit or [100] * context.num_rows]
        noise = Noise(torch.arange(context.num_rows), context.length)
        tree = self.tree = self.drafter.propose(context, parsed, draws, noise)
        tree.check()
        plan = layout(tree.parent, context.length, CAPACITY)
        hidden = {"layers": (tree.hidden_layer, self.model.spec.num_layers), "hidden": tree.hidden}
        asked = {"taps": self.head.taps} if tree.hidden is None else hidden
        out = self.out = self.target.forward(tree.tokens, plan, **asked)
        self.before = [list(ids) for ids in context.history.ids]
        self.paths, tokens = [], []
        for row, (ids, parent) in enumerate(zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True)):
            path = path_to(parent, choose(row, parent)) if choose is not None else self._random_path(parent, most)
            self.paths.append(path)
            tokens.append([ids[node] for node in path[1:]] + [self._draw(VOCAB)])
        width = max(map(len, self.paths))
        nodes = torch.tensor([path + list(range(len(path), width)) for path in self.paths])
        self.target.commit(context.length[:, None] + nodes, context.length[:, None] + torch.arange(width))
        commit = Commit(tree, context.length, self.paths, tokens, out.taps)
        for ids, new in zip(context.history.ids, tokens, strict=True):
            ids += new
        self._renew()
        self.drafter.observe(commit)
        return tree

    def _random_path(self, parent: list[int], most: int) -> list[int]:
        path = [0]
        while len(path) <= most:
            below = [node for node, above in enumerate(parent) if above == path[-1]]
            if not below or self._draw(6) == 0:
                break
            path.append(below[self._draw(len(below))])
        return path

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.random))

    def _renew(self) -> None:
        context = self.context
        context.lengths = [len(ids) - 1 for ids in context.history.ids]
        context.length = torch.tensor(context.lengths)
        context.pending = torch.tensor([ids[-1] for ids in context.history.ids])

    def keep(self, rows: list[int]) -> None:
        old = self.context
        self.context = replace(
            old,
            history=History([old.history.ids[row] for row in rows], [old.history.num_prompt[row] for row in rows]),
            processors=old.processors.keep(rows),
            predictions=[[] for _ in rows],
        )
        self._renew()
        self.target.keep(torch.tensor(rows))
        self.drafter.keep(rows)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Random texts of these lengths."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
