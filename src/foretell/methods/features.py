"""Hidden states of the target that a drafter has received and not read yet."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretell.draft.base import Commit, PromptChunk

TOGETHER = 32
"""Positions of a row whose features are made at once, at least, where nobody asks for them ..."""
MOST_BYTES = 2**21
"""... and as many as have taps of that many bytes: of a row that never guesses they are mostly not made at all."""


class FeatureBuffer:
    """Features of each row's committed positions, in order, until they are taken.

    Those of a prompt and of steps without guesses are made of their taps when they are asked for, or many at a time: a
    fusion then reads its matrix once for many positions, which alone takes a percent of a small target's pass, and is not
    made at all for a row that ends before. After a step with guesses the next one mostly asks for them: they are made at
    once, as long as their taps are near.

    Invariant: row b holds those of positions [start[b], start[b] + count[b]); earlier ones were taken. Features
    of positions [0, length) are known before a step, so start + count == length between steps, for every row.
    """

    def __init__(self, num_rows: int, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        """prepare maps a block of taps [B, n, T * H] to features [B, n, F]; it must treat positions independently.
        Default: the taps themselves."""
        self.prepare = prepare
        self.start = [0] * num_rows
        self.count = [0] * num_rows
        self._pieces: list[list[Tensor]] = [[] for _ in range(num_rows)]  # each [n, F]
        self._taps: list[list[Tensor]] = [[] for _ in range(num_rows)]  # each [n, T * H], of the positions after those
        self._later: list[Tensor] = []  # each [B, 1, T * H], of every row's positions after those
        self._unmade = [0] * num_rows  # of how many positions there are taps
        self._block: Tensor | None = None  # [B, n, F] whose rows are all that is held: the usual case, no copy at all

    @property
    def ends(self) -> list[int]:
        """[B] how many positions of each row have a known feature, taken ones included."""
        return [start + count for start, count in zip(self.start, self.count, strict=True)]

    def read_prompt(self, chunk: PromptChunk) -> None:
        """Take in a chunk of each row's prompt. It must begin where the row's known features end."""
        taps = chunk.taps if chunk.taps.is_cpu else chunk.taps.clone()  # a captured graph writes them over
        self._add(taps, chunk.count, chunk.start, wait=True)

    def observe(self, commit: Commit) -> None:
        """Take in the features of the kept nodes: the root's, which was pending, and those of the accepted tokens."""
        assert commit.taps is not None, "a method that declares no taps receives none"
        taps, paths = commit.taps, commit.path
        if commit.tree.num_nodes == 1 and self.prepare is not None:
            # Two calls: each is slow after a pass that has emptied the caches.
            for row, (piece, path) in enumerate(zip(taps.clone().unbind(), paths, strict=True)):
                self._wait(row, [piece], len(path))
            return
        counts = [len(path) for path in paths]
        width = max(counts)
        leading = all(path[-1] == len(path) - 1 for path in paths)  # a path ascends: it is then 0, 1, 2, ...
        if leading:
            block = taps[:, :width].clone()  # the next pass may overwrite taps, and prepare may return a view
        elif len(paths) == 1:
            block = taps.index_select(1, torch.tensor(paths[0], device=taps.device))
        else:
            nodes = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=taps.device)
            block = taps[torch.arange(len(paths), device=taps.device)[:, None], nodes]
        self._add(block, counts)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """The same of several steps without guesses, whose taps are kept as they are."""
        if self.prepare is None or any(commit.tree.num_nodes > 1 for commit in commits):
            for commit in commits:
                self.observe(commit)
            return
        self._block = None
        self._later += [commit.taps for commit in commits if commit.taps is not None]
        self.count = [count + len(commits) for count in self.count]
        self._unmade = [count + len(commits) for count in self._unmade]
        for row in range(len(self.count)):
            self._make_many(row)

    def _gather(self) -> None:
        """Give each row its own of what came for all."""
        if self._later:
            pieces = torch.cat(self._later, 1).unbind()
            self._later = []
            for held, piece in zip(self._taps, pieces, strict=True):
                held.append(piece)

    def _wait(self, row: int, pieces: Sequence[Tensor], count: int) -> None:
        """Taps [n, T * H] of a row's next ``count`` positions, of which features are made when they are asked for."""
        if not count:
            return
        self._gather()
        self._block = None
        self._taps[row] += pieces
        self._unmade[row] += count
        self.count[row] += count
        self._make_many(row)

    def _make_many(self, row: int) -> None:
        """Make a row's features, where it has many taps."""
        if self._unmade[row] >= TOGETHER:
            one = self._taps[row][0] if self._taps[row] else self._later[0]
            if self._unmade[row] * one.shape[-1] * one.element_size() >= MOST_BYTES:
                self._make([row])

    def _add(
        self, block: Tensor, counts: Sequence[int], starts: Sequence[int] | None = None, *, wait: bool = False
    ) -> None:
        """Row b's first counts[b] features of a block [B, n, T * H]. wait: they are made when they are asked for."""
        self._gather()
        wait = wait and self.prepare is not None
        late = wait or any(self._taps)  # they are made in order
        if not late and self.prepare is not None:
            block = self.prepare(block)
        if not late:
            self._block = None if any(self.count) else block
        for row, count in enumerate(counts):
            if not count:
                continue
            end = self.start[row] + self.count[row]
            if starts is not None and starts[row] != end:
                raise RuntimeError(f"row {row}: features from position {starts[row]} on, and {end} are known")
            if late:
                self._wait(row, [block[row, :count]], count)
            else:
                self._pieces[row].append(block[row, :count])
                self.count[row] += count

    def _make(self, rows: Sequence[int]) -> None:
        """The features of these rows' taps."""
        self._gather()
        waiting = [piece for row in rows for piece in self._taps[row]]
        if not waiting:
            return
        taps = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        made = taps if self.prepare is None else self.prepare(taps[None])[0]
        for row in rows:
            if count := self._unmade[row]:
                self._pieces[row].append(made[:count])
                self._taps[row], self._unmade[row], made = [], 0, made[count:]

    def take(self, wanted: Sequence[int] | None = None) -> tuple[Tensor | None, list[int], list[int]]:
        """All that is held of the rows where wanted[b] is not 0 (default: of all), which then hold nothing.

        Returns (features [B, n, F] with n = max(count), padded on the right with anything finite; start [B] the position
        of each row's first feature; count [B], 0 where a row was not wanted). Features are None where n is 0. They
        share memory at most with results of earlier calls, so the caller may keep them.
        """
        rows = range(len(self.count))
        asked = [wanted is None or bool(wanted[row]) for row in rows]
        counts = [count if ask else 0 for count, ask in zip(self.count, asked, strict=True)]
        starts = list(self.start)
        if not any(counts):
            return None, starts, counts
        features: Tensor
        if self._block is not None and counts == self.count:
            features = self._block
        elif len(counts) == 1:
            self._make([0])
            pieces = self._pieces[0]
            features = (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None]
        else:
            self._make([row for row in rows if counts[row]])
            empty = next(pieces[0] for pieces in self._pieces if pieces)[:0]
            held = [torch.cat(pieces) if count else empty for pieces, count in zip(self._pieces, counts, strict=True)]
            features = pad_sequence(held, batch_first=True)
        for row in rows:
            if counts[row]:
                self._pieces[row], self._taps[row], self._unmade[row] = [], [], 0
                self.start[row] += counts[row]
                self.count[row] = 0
        self._block = None
        return features, starts, counts

    def take_first(self, row: int, most: int) -> Tensor | None:
        """[n, F] the first n = min(most, count) features that are held of one row, which then holds the others; None where
        n is 0."""
        self._make([row])
        pieces, taken = self._pieces[row], []
        wanted = num_taken = min(most, self.count[row])
        if wanted <= 0:
            return None
        while wanted:
            piece = pieces.pop(0)
            if len(piece) > wanted:
                pieces.insert(0, piece[wanted:])
                piece = piece[:wanted]
            taken.append(piece)
            wanted -= len(piece)
        self.start[row] += num_taken
        self.count[row] -= num_taken
        self._block = None
        return torch.cat(taken)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self._gather()
        self._pieces, self._taps = [self._pieces[row] for row in rows], [self._taps[row] for row in rows]
        self._unmade = [self._unmade[row] for row in rows]
        self.start = [self.start[row] for row in rows]
        self.count = [self.count[row] for row in rows]
        self._block = None

    def join(self, other: "FeatureBuffer") -> None:
        """Append the rows of another buffer, whose ``prepare`` is the same; it is not used afterwards."""
        self._gather()
        other._gather()
        self._pieces += other._pieces
        self._taps += other._taps
        self._unmade += other._unmade
        self.start += other.start
        self.count += other.count
        self._block = None
