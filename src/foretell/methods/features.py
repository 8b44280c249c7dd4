"""Hidden states of the target that a drafter has received and not read yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretell.core.upload import tensor_on
from foretell.draft.base import Commit, Drafter, PromptChunk

TOGETHER = 32
"""Positions of a row whose features are made at once, at least, where nobody asks for them ..."""
MOST_BYTES = 2**21
"""... and as many as have taps of that many bytes: of a row that never guesses they are mostly not made at all."""
MOST_KEPT_BYTES = 2**25
"""Of an answer's taps for the prefix store, which no budget counts. A longer answer (3,000 tokens of a 0.5B model) is read
again."""


@dataclass(slots=True)
class Unread:
    """What is held of one row: features of positions [start, start + count); earlier ones were taken."""

    start: int = 0
    count: int = 0
    stored: list[Tensor] = field(default_factory=list)  # each [n, T * H], of the first positions; others hold them too
    made: list[Tensor] = field(default_factory=list)  # each [n, F]
    taps: list[Tensor] = field(default_factory=list)  # each [n, T * H], of the positions after those
    num_taps: int = 0  # positions that there are taps of, here or for all rows
    kept: list[Tensor] | None = None  # taps after the prompt, each [n, T * H], where the prefix store will ask for them
    num_kept: int = 0  # of their positions

    def hold(self, taps: Tensor) -> None:
        """Keep those of further positions [n, T * H], unless they become too many."""
        if self.kept is not None:
            self.kept.append(taps)
            self.num_kept += len(taps)
            if self.num_kept * taps.shape[1] * taps.element_size() > MOST_KEPT_BYTES:
                self.kept = None


class FeatureBuffer:
    """Features of each row's committed positions, in order, until they are taken.

    Those of a prompt and of steps without guesses are made of their taps when they are asked for, or many at a time: a
    fusion then reads its matrix once for many positions, which alone takes a percent of a small target's pass, and is not
    made at all for a row that ends before. After a step with guesses the next one mostly asks for them: they are made at
    once, as long as their taps are near.

    Invariant: features of positions [0, length) are known before a step, so start + count == length between steps, for
    every row.
    """

    def __init__(self, num_rows: int, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        """prepare maps a block of taps [B, n, T * H] to features [B, n, F]; it must treat positions independently.
        Default: the taps themselves."""
        self.prepare = prepare
        self.rows = [Unread() for _ in range(num_rows)]
        self._later: list[Tensor] = []  # each [B, 1, T * H], of every row's positions after its own taps
        self._block: Tensor | None = None  # [B, n, F] whose rows are all that is held: the usual case, no copy at all

    @property
    def ends(self) -> list[int]:
        """[B] how many positions of each row have a known feature, taken ones included."""
        return [row.start + row.count for row in self.rows]

    @property
    def num_taken(self) -> int:
        """Of the row of which most positions were taken; 0 without rows."""
        return max((row.start for row in self.rows), default=0)

    def read_prompt(self, chunk: PromptChunk) -> None:
        """Take in a chunk of each row's prompt. It must begin where the row's known features end."""
        if chunk.kept:
            for row in self.rows:
                row.kept = row.kept or []
        only_stored = not any(row.start or row.made or row.num_taps for row in self.rows)
        if chunk.stored and self.prepare is not None and only_stored and chunk.start == self.ends:
            # Their features are made when they are asked for, however many they are: waiting costs no memory.
            for row, taps, count in zip(self.rows, chunk.taps.unbind(), chunk.count, strict=True):
                row.stored += [taps[:count]] if count else []
                row.count += count
            return
        taps = chunk.taps if chunk.taps.is_cpu else chunk.taps.clone()  # a captured graph writes them over
        self._add(taps, chunk.count, chunk.start, wait=True)

    def observe(self, commit: Commit) -> None:
        """Take in the features of the kept nodes: the root's, which was pending, and those of the accepted tokens."""
        assert commit.taps is not None, "a method that declares no taps receives none"
        taps, paths = commit.taps, commit.path
        if commit.tree.num_nodes == 1 and self.prepare is not None:
            # Two calls: each is slow after a pass that has emptied the caches.
            for row, piece, path in zip(self.rows, taps.clone().unbind(), paths, strict=True):
                self._wait(row, piece, len(path))
                row.hold(piece)
            return
        counts = [len(path) for path in paths]
        width = max(counts)
        leading = all(path[-1] == len(path) - 1 for path in paths)  # a path ascends: it is then 0, 1, 2, ...
        if leading:
            block = taps[:, :width].clone()  # the next pass may overwrite taps, and prepare may return a view
        elif len(paths) == 1:
            block = taps.index_select(1, tensor_on(taps.device, paths[0]))
        else:
            nodes = tensor_on(taps.device, [path + [0] * (width - len(path)) for path in paths])
            block = taps[torch.arange(len(paths), device=taps.device)[:, None], nodes]
        self._gather()
        for row, piece, count in zip(self.rows, block, counts, strict=True):
            row.hold(piece[:count])
        self._add(block, counts)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """The same of several steps without guesses, whose taps are kept as they are."""
        if self.prepare is None or any(commit.tree.num_nodes > 1 for commit in commits):
            for commit in commits:
                self.observe(commit)
            return
        self._block = None
        self._later += [commit.taps for commit in commits if commit.taps is not None]
        for row in self.rows:
            row.count += len(commits)
            row.num_taps += len(commits)
        for row in self.rows:
            self._make_many(row)

    def _gather(self) -> None:
        """Give each row its own of what came for all."""
        if self._later:
            pieces = torch.cat(self._later, 1).unbind()
            self._later = []
            for row, piece in zip(self.rows, pieces, strict=True):
                row.taps.append(piece)
                row.hold(piece)

    def _wait(self, row: Unread, taps: Tensor, count: int) -> None:
        """Taps [n, T * H] of a row's next ``count`` positions, of which features are made when they are asked for."""
        if not count:
            return
        self._gather()
        self._block = None
        row.taps.append(taps)
        row.num_taps += count
        row.count += count
        self._make_many(row)

    def _make_many(self, row: Unread) -> None:
        """Make a row's features, where it has many taps."""
        if row.num_taps >= TOGETHER:
            one = row.taps[0] if row.taps else self._later[0]
            if row.num_taps * one.shape[-1] * one.element_size() >= MOST_BYTES:
                self._make([row], stored=False)

    def _add(
        self, block: Tensor, counts: Sequence[int], starts: Sequence[int] | None = None, *, wait: bool = False
    ) -> None:
        """Row b's first counts[b] features of a block [B, n, T * H]. wait: they are made when they are asked for."""
        self._gather()
        late, is_empty = wait and self.prepare is not None, True
        for row in self.rows:
            late = late or bool(row.taps or row.stored)  # they are made in order
            is_empty = is_empty and not row.count
        if not late:
            block = block if self.prepare is None else self.prepare(block)
            self._block = block if is_empty else None
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            if not count:
                continue
            if starts is not None and starts[index] != (end := row.start + row.count):
                raise RuntimeError(f"row {index}: features from position {starts[index]} on, and {end} are known")
            if late:
                self._wait(row, block[index, :count], count)
            else:
                row.made.append(block[index, :count])
                row.count += count

    def _make(self, rows: Sequence[Unread], *, stored: bool = True) -> None:
        """The features of these rows' taps; stored: of those too that others hold."""
        self._gather()
        for row in rows if stored else ():
            if row.stored and self.prepare is not None:
                row.made = [*(self.prepare(piece[None])[0] for piece in row.stored), *row.made]
                row.stored = []
        waiting = [piece for row in rows for piece in row.taps]
        if not waiting:
            return
        taps = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        made = taps if self.prepare is None else self.prepare(taps[None])[0]
        for row in rows:
            if count := row.num_taps:
                row.made.append(made[:count])
                row.taps, row.num_taps, made = [], 0, made[count:]

    def take(self, wanted: Sequence[int] | None = None) -> tuple[Tensor | None, list[int], list[int]]:
        """All that is held of the rows where wanted[b] is not 0 (default: of all), which then hold nothing.

        Returns (features [B, n, F] with n = max(count), padded on the right with anything finite; start [B] the position
        of each row's first feature; count [B], 0 where a row was not wanted). Features are None where n is 0. They
        share memory at most with results of earlier calls, so the caller may keep them.
        """
        starts = [row.start for row in self.rows]
        counts = held = [row.count for row in self.rows]
        if wanted is not None:
            counts = [count if ask else 0 for count, ask in zip(held, wanted, strict=True)]
        taken = [row for row, count in zip(self.rows, counts, strict=True) if count]
        if not taken:
            return None, starts, counts
        features: Tensor
        if self._block is not None and counts == held:
            features = self._block
        elif len(counts) == 1:
            self._make(taken)
            made = taken[0].made
            features = (made[0] if len(made) == 1 else torch.cat(made))[None]
        else:
            self._make(taken)
            empty = taken[0].made[0][:0]
            parts = [torch.cat(row.made) if count else empty for row, count in zip(self.rows, counts, strict=True)]
            features = pad_sequence(parts, batch_first=True)
        for row in taken:
            row.made, row.taps, row.num_taps = [], [], 0
            row.start += row.count
            row.count = 0
        self._block = None
        return features, starts, counts

    def take_first(self, row: int, most: int) -> Tensor | None:
        """[n, F] the first n = min(most, count) features that are held of one row, which then holds the others; None where
        n is 0."""
        held = self.rows[row]
        self._make([held])
        pieces, taken = held.made, []
        wanted = num_taken = min(most, held.count)
        if wanted <= 0:
            return None
        while wanted:
            piece = pieces.pop(0)
            if len(piece) > wanted:
                pieces.insert(0, piece[wanted:])
                piece = piece[:wanted]
            taken.append(piece)
            wanted -= len(piece)
        held.start += num_taken
        held.count -= num_taken
        self._block = None
        return torch.cat(taken)

    def taps_of(self, row: int) -> Tensor | None:
        """See ``Drafter.taps_of``."""
        self._gather()
        kept = self.rows[row].kept
        return torch.cat(kept) if kept else None

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self._gather()
        self.rows = [self.rows[row] for row in rows]
        self._block = None

    def join(self, other: "FeatureBuffer") -> None:
        """Append the rows of another buffer, whose ``prepare`` is the same; it is not used afterwards."""
        self._gather()
        other._gather()
        self.rows += other.rows
        self._block = None


class FeatureDrafter(Drafter):
    """A drafter that reads a target's features, each committed position's once. Rejected nodes leave none."""

    can_wait = True
    features: FeatureBuffer

    def read_prompt(self, chunk: PromptChunk) -> None:
        """Keep the known text's features."""
        self.features.read_prompt(chunk)

    def observe(self, commit: Commit) -> None:
        """Keep the features of the nodes that were kept."""
        self.features.observe(commit)

    def observe_all(self, commits: Sequence[Commit]) -> None:
        """See ``Drafter``."""
        self.features.observe_all(commits)

    def taps_of(self, row: int) -> Tensor | None:
        """See ``Drafter``."""
        return self.features.taps_of(row)
