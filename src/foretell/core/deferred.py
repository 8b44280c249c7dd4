"""p after every node of a tree, computed when it is asked for: a verifier that walks visits a few nodes of many.

``Deferred.draw`` draws the token after some nodes, mostly without a softmax (``kernels/race_logits.h``); ``Deferred.at``
makes the distributions of some nodes, ``Deferred.probs`` of all. All three agree bit for bit with
``logits_to_probs`` of all nodes followed by ``race``: the slow twin.
"""

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from foretell.core.noise import Noise, Stream, race, token_table
from foretell.core.probs import History, Paths, Processors, logits_to_probs, process_logits
from foretell.core.tree import TokenTree
from foretell.kernels.gpu.ops import ops
from foretell.kernels.small import race_library


class Deferred:
    """The distributions [B, N, V] after N nodes of each row, from logits [B, N, V']. What it is made of must not change
    while it is used, but for the history's lists, which may grow."""

    def __init__(self, logits: Tensor, processors: Processors, history: History, paths: Paths) -> None:
        """As ``logits_to_probs`` takes them."""
        self.logits, self.processors, self.history, self.paths = logits, processors, history, paths
        # Steps lengthen the texts in place, and an observer may ask after the step.
        self._lengths = [len(ids) for ids in history.ids] if processors.reads_history else None
        self._drawn: dict[tuple[int, int], tuple[int, bool]] = {}  # the last draw after (row, node)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, N, V)."""
        return *self.logits.shape[:2], self.processors.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """That of the distributions."""
        return torch.float64 if self.logits.dtype == torch.float64 else torch.float32

    @cached_property
    def probs(self) -> Tensor:
        """[B, N, V] of all nodes."""
        return logits_to_probs(self.logits, self.processors, self._history(), self.paths)

    def at(self, row: int, node: int) -> Tensor:
        """[V] of one node."""
        if "probs" in self.__dict__:
            return self.probs[row, node]
        logits, history, paths = self._node(row, node)
        return logits_to_probs(logits, self.processors.part(row, row + 1), history, paths)[0, 0]

    def draw(self, rows: Sequence[int], nodes: Sequence[int], keys: Sequence[int]) -> list[tuple[int, bool]]:
        """The token that wins the race ``argmax p / E`` after node nodes[k] of row rows[k], E keyed by keys[k] (signed
        64 bits), and whether it has a probability above 0; for each k."""
        drawn = self._quick(rows, nodes, keys)
        out = []
        for row, node, key, token in zip(rows, nodes, keys, drawn, strict=True):
            found = (token, True)
            if token < 0:
                p = self.at(row, node)
                winner = race(p[None], torch.tensor([key]))
                found = int(winner), bool(p[winner] > 0)
            self._drawn[row, node] = found
            out.append(found)
        return out

    def walk(self, tree: TokenTree, noise: Noise) -> list[tuple[list[int], int]] | None:
        """For each row the nodes that the target's own draws of the stream COUPLED lead through, the root first, and the
        draw after the last of them, which has a probability above 0: ``verify.exact.follow_draws`` in one call, where
        float32 logits decide all of these draws; None elsewhere."""
        library, processors, logits = race_library(), self.processors, self.logits
        by_row, by_node, by_token = logits.stride()
        if library is None or not logits.is_cpu or logits.dtype != torch.float32 or by_token != 1:
            return None
        if processors.reads_history or processors.bias is not None:
            return None
        tokens, parents = tree.tokens, tree.parent
        num_rows, num_nodes = tokens.shape
        if num_nodes > 1 and not tokens.stride(1) == parents.stride(1) == 1:
            tokens, parents = tokens.contiguous(), parents.contiguous()
        seeds, positions = noise.seeds.contiguous(), noise.positions.contiguous()
        found = (ctypes.c_int64 * (num_rows * (2 + num_nodes)))()
        library.foretell_walk(
            num_rows, num_nodes, min(logits.shape[-1], processors.vocab_size), logits.data_ptr(), by_row, by_node,
            processors.warps, token_table(processors.vocab_size, logits.device).data_ptr(),
            tokens.data_ptr(), tokens.stride(0), parents.data_ptr(), parents.stride(0),
            seeds.data_ptr(), positions.data_ptr(), int(Stream.COUPLED), found,
        )  # fmt: skip
        out = []
        for start in range(0, len(found), 2 + num_nodes):
            count = found[start]
            if not count:
                return None
            out.append((found[start + 2 : start + 2 + count], found[start + 1]))
        return out

    def draw_all(self, keys: Tensor, *, impossible: int = 0) -> Tensor | None:
        """[B, N] int64: the token that wins the race after every node, E keyed by keys [B, N]; ``impossible`` where no
        token has a probability. None where no kernel of an accelerator draws from these logits."""
        gpu, processors = ops(self.logits.device.type), self.processors
        if gpu is None or self.logits.dtype == torch.float64:
            return None
        logits = self.logits[..., : processors.vocab_size]  # a token without a column has no probability
        if processors.reads_history or processors.bias is not None:
            logits = process_logits(self.logits, processors, self._history(), self.paths)
        drawn: Tensor = gpu.draw(logits, processors.warp_table, keys, impossible)
        return drawn

    def walk_all(self, tree: TokenTree, noise: Noise) -> Tensor | None:
        """``walk`` on an accelerator, without a host read: int64 [B, 3 + N], a row of which is the number of kept nodes,
        the draw after them, 1 where that has a probability (else 0), and all nodes, those that are kept first."""
        gpu = ops(self.logits.device.type)
        if gpu is None:
            return None
        keys = gpu.node_keys(noise.seeds, noise.positions, tree.parent, int(Stream.COUPLED))
        drawn = self.draw_all(keys, impossible=-1)
        return None if drawn is None else gpu.walk(drawn, tree.tokens, tree.parent)

    def has_mass(self, row: int, node: int, token: int) -> bool:
        """Whether a token has a probability above 0 after a node."""
        drawn = self._drawn.get((row, node))
        return drawn[1] if drawn is not None and drawn[0] == token else bool(self.at(row, node)[token] > 0)

    def slice(self, start: int, stop: int) -> "Deferred":
        """That of rows [start, stop)."""
        processors, paths = self.processors, self.paths
        ids = self._history().ids[start:stop]
        parts = History(ids, self.history.num_prompt[start:stop], (self.history, start))
        parent = None if paths.parent is None else paths.parent[start:stop]
        return Deferred(
            self.logits[start:stop],
            processors.part(start, stop),
            parts,
            Paths(paths.tokens[start:stop], paths.ancestry[start:stop], parent, paths.is_tree),
        )

    def _quick(self, rows: Sequence[int], nodes: Sequence[int], keys: Sequence[int]) -> list[int]:
        """The drawn tokens, negative where the logits alone do not decide."""
        library, processors, logits = race_library(), self.processors, self.logits
        if library is None or logits.dtype == torch.float64:
            return [-1] * len(rows)
        num_columns = min(logits.shape[-1], processors.vocab_size)  # a token without a column has no probability
        offsets = [k * num_columns for k in range(len(rows))]
        places = list(zip(rows, nodes, strict=True))
        if processors.reads_history or processors.bias is not None:
            num_columns = processors.vocab_size
            offsets = [k * num_columns for k in range(len(rows))]
            parts = [
                process_logits(given[0], processors.part(row, row + 1), *given[1:])
                for row, given in ((row, self._node(row, node)) for row, node in places)
            ]
            logits = torch.cat(parts)
        elif logits.dtype == torch.float32 and logits.stride(-1) == 1:
            by_row, by_node, _ = logits.stride()
            offsets = [row * by_row + node * by_node for row, node in places]
        else:
            logits = torch.stack([logits[row, node, :num_columns].float() for row, node in places])
        asked = [number for place in zip(rows, offsets, keys, strict=True) for number in place]
        found = (ctypes.c_int64 * len(asked))(*asked)
        table = token_table(processors.vocab_size, logits.device)
        library.foretell_draw_logits(
            len(rows), num_columns, logits.data_ptr(), processors.warps, table.data_ptr(), found
        )
        return found[0::3]

    def _node(self, row: int, node: int) -> tuple[Tensor, History, Paths]:
        """What ``logits_to_probs`` takes for one node of one row."""
        paths = self.paths
        history = History([self._ids(row)], self.history.num_prompt[row : row + 1], (self.history, row))
        return (
            self.logits[row : row + 1, node : node + 1],
            history,
            Paths(paths.tokens[row : row + 1], paths.ancestry[row : row + 1, node : node + 1]),
        )

    def _ids(self, row: int) -> list[int]:
        ids = self.history.ids[row]
        return ids if self._lengths is None or len(ids) == self._lengths[row] else ids[: self._lengths[row]]

    def _history(self) -> History:
        ids = [self._ids(row) for row in range(len(self.history.ids))]
        return History(ids, self.history.num_prompt, (self.history, 0))
