"""The rows being decoded: their requests, the emitted tokens, and the length of the cache.

Invariant: the cache holds KV of ``tokens[:, :length]``, slot equal to position; the token at ``length`` is pending.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ModelError, VerifierError
from foretell.core.probs import History, Processors
from foretell.core.tree import TokenTree
from foretell.core.upload import tensor_on
from foretell.draft.base import Commit, Context
from foretell.engine.request.row import Row
from foretell.model.prefill import round_up
from foretell.verify.base import Verdict, pick_layers


@dataclass(frozen=True)
class Tapping:
    """Layers tapped in every step: the drafter's and the verifier's, each layer once."""

    drafter: tuple[int, ...] = ()
    verifier: tuple[int, ...] = ()

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers passed to ``Target.forward``."""
        return tuple(dict.fromkeys((*self.drafter, *self.verifier)))

    def for_drafter(self, taps: Tensor | None) -> Tensor | None:
        """[B, N, T * H] of the drafter's layers, in its order."""
        return pick_layers(taps, self.layers, self.drafter)

    def for_verifier(self, taps: Tensor | None) -> Tensor | None:
        """[B, N, T * H] of the verifier's layers, in its order."""
        return pick_layers(taps, self.layers, self.verifier)

    def pick(self, taps: Tensor, wanted: Sequence[int]) -> Tensor:
        """[B, N, T * H] of some of ``layers``, from the outputs of all."""
        picked = pick_layers(taps, self.layers, wanted)
        assert picked is not None
        return picked


@dataclass
class State(Context):
    """All rows of a batch: the drafter's context, and what only the engine may touch."""

    rows: list[Row]
    seeds: Tensor  # [B] int64
    capacity: int  # cache slots a row
    shape_depths: list[int]  # of the rows' shapes
    is_gated: bool = False  # whether a row may become longer than its method was made for, and has a light part

    @classmethod
    def open(cls, rows: list[Row], processors: Processors, capacity: int) -> "State":
        """The state before a step: each text's last token is pending, all before it are (to be) cached."""
        device = processors.device
        texts = [row.known for row in rows]
        lengths = [len(ids) - 1 for ids in texts]
        return cls(
            history=History(texts, [len(row.prompt_ids) for row in rows]),
            processors=processors,
            length=tensor_on(device, lengths),
            lengths=lengths,
            pending=tensor_on(device, [ids[-1] for ids in texts]),
            predictions=[row.prediction for row in rows],
            depth_limit=[row.depth_limit for row in rows],
            rows=rows,
            seeds=tensor_on(device, [row.seed for row in rows]),
            capacity=capacity,
            shape_depths=[row.choice.shape_depth for row in rows],
            is_gated=any(
                (most := row.choice.method.max_positions) is not None and most < capacity and row.choice.method.light
                for row in rows
            ),
        )

    def span(self, num_nodes: int, multiple: int) -> int:
        """Slots that attention must read for a tree of num_nodes, rounded up so that kernels see few shapes."""
        return min(self.capacity, round_up(max(self.lengths) + num_nodes, multiple))

    def limit(self, caps: Sequence[int] | None, paid: Sequence[int] | None = None, least: float = 0.0) -> None:
        """In the next step row b guesses at most caps[b] deep, as deep as its shape where there are none, and at most
        paid[b] with guesses that cost time; least: see ``Context.least_chance``."""
        self.least_chance = least
        self.paid_limit = None if paid is None else list(paid)
        most = self.shape_depths if caps is None else map(min, caps, self.shape_depths)
        self.depth_limit = list(map(min, self.depth_limit, most))
        if self.is_gated:  # rows whose light parts may go on behind the positions that the others were made for
            paid = self.depth_limit if self.paid_limit is None else self.paid_limit
            self.paid_limit = [min(most, row.trained_room) for most, row in zip(paid, self.rows, strict=True)]

    def emit_plain(self, columns: Sequence[Sequence[int]]) -> list[int]:
        """Emit row b's tokens columns[b] as those of plain steps, until it ends; how many each row took."""
        taken: list[int] = []
        for row, tokens, ids in zip(self.rows, columns, self.history.ids, strict=True):
            count = row.emit(tokens, ["plain"] * len(tokens))
            row.num_steps += count
            row.steps += [(0, 0)] * count
            ids.extend(tokens[:count])
            taken.append(count)
        self.lengths = [len(ids) - 1 for ids in self.history.ids]
        return taken

    def advance(
        self,
        tree: TokenTree,
        verdict: Verdict,
        taps: Tensor | None,
        *,
        packed: Tensor | None = None,
        following: Tensor | None = None,
    ) -> tuple[Commit, tuple[Tensor, Tensor] | None]:
        """Emit the tokens that the verdict keeps. Returns the commit, and (src, dst) slots [B, D] where KV must move.

        The one place of a step where values are read from the device, all at once. A captured graph has them packed, the
        length and pending token of each row after the step as following [2, B], and has moved KV.
        """
        paths: list[list[int]] = []
        emitted: list[list[int]] = []
        guessed: list[int] = []
        over = [row.finish_reason is not None for row in self.rows]  # with an earlier pass of a run
        read = _read(tree, verdict, packed)
        columns = zip(self.rows, *read[:6], strict=True)
        for at, (row, count, bonus, sound, path, tokens, parent) in enumerate(columns):
            if over[at]:
                guessed.append(0)
                paths.append([0])
                emitted.append([])
                continue
            path = path[:count]
            drafted = depth_of(parent)
            guessed.append(sum(above >= 0 for above in parent))
            if not sound:
                known = row.length + count - 1
                fault = verdict.faults[at] if verdict.faults else ""
                row.error = (
                    VerifierError(fault)
                    if fault
                    else ModelError(
                        f"request {row.index}: no token is possible after {known} tokens: "
                        + (
                            getattr(row.params.logits_processor, "error", "")
                            or "the model's logits are not finite, or its processors and banned ids leave nothing to choose"
                        )
                    )
                )
                row.finish_reason = "error"
                paths.append([0])
                emitted.append([])
                continue
            row.num_draft_tokens += guessed[-1]
            row.num_accepted_tokens += count - 1
            source = ["plain"] if drafted == 0 else [f"draft:{row.method}"] * (count - 1) + ["bonus"]
            tokens = [tokens[node] for node in path[1:]] + [bonus]
            row.num_steps += 1
            row.steps.append((drafted, count - 1))
            count_up(row.drafted_per_pos, drafted)
            count_up(row.accepted_per_pos, count - 1, len(row.drafted_per_pos))
            taken = row.emit(tokens, source)
            paths.append(path[:taken])
            emitted.append(tokens[:taken])
        before = self.length
        for ids, tokens in zip(self.history.ids, emitted, strict=True):
            ids.extend(tokens)
        self.lengths = [len(ids) - 1 for ids in self.history.ids]
        self.depth_limit = [row.depth_limit for row in self.rows]
        ended = [row.finish_reason is not None for row in self.rows]
        if not before.is_cpu and not any(ended):
            # The same, from what lies there already; a graph's memory is written over by its next launch.
            after = (before + verdict.count, verdict.bonus) if following is None else following.clone().unbind()
            self.length, self.pending = after
        else:  # a row that ended inside the path keeps no node after its last token: length is cut with the text
            self.length = tensor_on(before.device, self.lengths)
            self.pending = tensor_on(before.device, [ids[-1] for ids in self.history.ids])
        moves = None
        # Else all lie after the committed tokens already.
        if following is None and any(path != list(range(len(path))) for path in paths):
            moves = _moves(before, paths) if before.is_cpu else moves_of(before, verdict)
        ended = [now and not was for now, was in zip(ended, over, strict=True)]
        return Commit(tree, before, paths, emitted, taps, ended, guessed, *read[6:]), moves


def _read(tree: TokenTree, verdict: Verdict, packed: Tensor | None) -> tuple[list[Any], ...]:
    """Columns (count, bonus, sound, path, tokens, parent), a value a row, on the host; then the tree's notes, if any."""
    if verdict.host is not None:
        paths, bonus, sound = verdict.host
        return list(map(len, paths)), bonus, sound, paths, tree.tokens.tolist(), tree.parent.tolist()
    if tree.tokens.is_cpu:
        columns = [verdict.count, verdict.bonus, verdict.sound, verdict.path, tree.tokens, tree.parent]
        return tuple(column.tolist() for column in columns)
    packed = pack(tree, verdict) if packed is None else packed
    num_notes = 0 if tree.notes is None else tree.notes.shape[1]
    # A graph's are padded to more nodes: of these no tree has any.
    width, num_nodes = (packed.shape[1] - 3 - num_notes) // 3, tree.num_nodes
    starts = [(3, num_nodes), (3 + width, num_nodes), (3 + 2 * width, num_nodes), (3 + 3 * width, num_notes)]
    rows = packed[: len(tree.tokens)].tolist()
    parts = [[row[start : start + count] for row in rows] for start, count in starts if count]
    return (*([row[column] for row in rows] for column in range(3)), *parts)


def pack(tree: TokenTree, verdict: Verdict) -> Tensor:
    """[B, 3 + 3 N + K] int64: all that the host reads of a step, so that it waits for the device once: count, bonus, sound;
    path, tokens, parents [N] each; the tree's notes [K]."""
    columns = [verdict.count, verdict.bonus, verdict.sound, verdict.path, tree.tokens, tree.parent]
    if tree.notes is not None:
        columns.append(tree.notes)
    return torch.cat([column.long().reshape(len(column), -1) for column in columns], 1)


def depth_of(parent: Sequence[int]) -> int:
    """Depth of the deepest node of one row's tree."""
    depth = [0] * len(parent)
    for node in range(1, len(parent)):
        if parent[node] >= 0:
            depth[node] = depth[parent[node]] + 1
    return max(depth)


def count_up(counters: list[int], reached: int, width: int = 0) -> None:
    """Add one to the first ``reached`` counters, making room for them and for ``width``."""
    counters.extend([0] * (max(reached, width) - len(counters)))
    for position in range(reached):
        counters[position] += 1


def _moves(length: Tensor, paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(src, dst) [B, D] slots to move so that each kept path lies after the committed tokens."""
    width = max(map(len, paths))
    # Past the end of a short path a slot is moved onto itself, which changes nothing.
    nodes = [list(path) + list(range(len(path), width)) for path in paths]
    return length[:, None] + torch.tensor(nodes), length[:, None] + torch.arange(width)


def moves_of(length: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """The same from a verdict's path, on its device, where ended rows move more than they keep."""
    index = torch.arange(verdict.path.shape[1], device=length.device)
    nodes = torch.where(index < verdict.count[:, None], verdict.path, index)
    return length[:, None] + nodes, length[:, None] + index
