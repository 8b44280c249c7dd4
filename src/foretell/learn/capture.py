"""Texts as they are served: tokens, the target's logits at every place, and the hidden states that the drafter reads.

Per step the accepted path's logits are gathered into one block of half precision, and the rest (reducing it to the most
probable tokens) is left to the learner. What this takes of the engine's thread is measured and paid from an allowance, so
that capturing all requests, some, or none is decided by what it costs here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from foretell.engine.event import StepEvent
from foretell.engine.request.row import Row
from foretell.engine.state import Tapping
from foretell.engine.threads import Allowance
from foretell.learn.training.texts import RawText


@dataclass
class CaptureState:
    """Carried by a request's row as ``Row.capture``: which adapter its text trains, and what was captured of it."""

    adapter: str  # name of the adapter that guesses for it and learns from it
    taps: tuple[int, ...]  # layers that the drafter reads, in its order
    counts: tuple[int, int] = (0, 0)  # first guesses made by what learns, and kept
    told: tuple[int, int] = (0, 0)  # ... until the end of the last piece (``drift.PIECE``)
    begun: bool = False
    dropped: bool = False  # nothing more is captured of it
    logits: list[Tensor] = field(default_factory=list)  # views [*, V] of the steps' blocks
    num_laws: int = 0
    known_taps: list[tuple[int, Tensor]] = field(default_factory=list)  # (position of the first, [n, T * H] half)
    num_bytes: int = 0

    def drop(self) -> int:
        """Forget what was captured; how many bytes."""
        freed, self.num_bytes = self.num_bytes, 0
        self.dropped, self.logits, self.known_taps = True, [], []
        return freed


class Capture:
    """Used on the engine's thread alone."""

    def __init__(
        self, allowance: Allowance, *, max_length: int, max_bytes: int, wants: Callable[[], bool] = lambda: True
    ) -> None:
        """max_bytes: of requests in flight; what comes beyond it is not captured. wants: whether one more will do."""
        self.allowance, self.max_length, self.max_bytes, self._wants = allowance, max_length, max_bytes, wants
        self.held_bytes = self.num_skipped = 0
        self.seconds = 0.0
        self._seconds_a_place = 20e-6  # of capturing, running mean
        self._open: dict[int, Row] = {}  # rows that hold something, by id

    def prompt(self, row: Row, start: int, taps: Tensor) -> None:
        """Hidden states of known text."""
        state = row.capture
        if not isinstance(state, CaptureState) or state.dropped or not state.taps or start >= self.max_length:
            return
        if not state.begun and not self._begin(row, state, is_new=not row.token_ids):
            return
        begun = perf_counter()
        self._keep_taps(state, start, taps)
        self._pay(begun)

    def _begin(self, row: Row, state: CaptureState, *, is_new: bool) -> bool:
        """Whether the request is captured: from its first token on, if it fits and the allowance covers it."""
        state.begun = True
        places = min(row.max_tokens, self.max_length - len(row.prompt_ids))
        fits = len(row.prompt_ids) + 1 < self.max_length and self.held_bytes < self.max_bytes and is_new
        if fits and self._wants() and self.allowance.covers(self._seconds_a_place * max(1, places)):
            self._open[id(row)] = row
            return True
        state.drop()
        self.num_skipped += 1
        return False

    def observe(self, event: StepEvent) -> list[tuple[Row, RawText]]:
        """Take in a step. Returns the texts that ended with it."""
        self.allowance.earn(event.seconds)
        begun = perf_counter()
        rows: list[tuple[int, Row, CaptureState, int]] = []  # index, row, state, places of this step
        for index, row in enumerate(event.rows):
            state = row.capture
            if not isinstance(state, CaptureState) or state.dropped:
                continue
            emitted = len(event.commit.tokens[index])
            if row.error is not None:
                self._forget(row, state)
                continue
            if not state.begun and not self._begin(row, state, is_new=len(row.token_ids) == emitted):
                continue
            room = self.max_length - len(row.prompt_ids) - state.num_laws
            places = max(0, min(emitted, room))
            rows.append((index, row, state, places))
        if not rows:
            return []
        self._gather(event, rows)
        ended = [(row, self._finish(row, state)) for _, row, state, _ in rows if row.finish_reason is not None]
        seconds = self._pay(begun)
        count = sum(places for *_, places in rows)
        if count:
            self._seconds_a_place += 0.02 * (seconds / count - self._seconds_a_place)
        if self.held_bytes > self.max_bytes:
            self._make_room()
        return [(row, text) for row, text in ended if text is not None]

    def _gather(self, event: StepEvent, rows: list[tuple[int, Row, CaptureState, int]]) -> None:
        """One block of logits for all rows, less each one's largest so that half precision is finest where p is large."""
        at = [(index, node) for index, _, _, places in rows for node in event.commit.path[index][:places]]
        if not at:
            return
        which, nodes = zip(*at, strict=True)
        picked = event.logits[list(which), list(nodes)]
        block = (picked - picked.amax(-1, keepdim=True)).to("cpu", torch.float16)
        begin = 0
        for index, row, state, places in rows:
            if not places:
                continue
            part = block[begin : begin + places]
            begin += places
            state.logits.append(part)
            state.num_laws += places
            self._count(state, part.nbytes)
            if state.taps and event.commit.taps is not None:
                taps = event.commit.taps[index : index + 1, event.commit.path[index][:places]]
                if event.tap_layers != state.taps:
                    taps = Tapping(event.tap_layers).pick(taps, state.taps)
                position = len(row.prompt_ids) - 1 + state.num_laws - places
                self._keep_taps(state, position, taps[0])

    def _keep_taps(self, state: CaptureState, start: int, taps: Tensor) -> None:
        kept = taps[: max(0, self.max_length - start)].to("cpu", torch.float16, copy=True)
        state.known_taps.append((start, kept))
        self._count(state, kept.nbytes)

    def _count(self, state: CaptureState, num_bytes: int) -> None:
        state.num_bytes += num_bytes
        self.held_bytes += num_bytes

    def _finish(self, row: Row, state: CaptureState) -> RawText | None:
        """The text of a row that ended; None where there is too little of it."""
        logits, known = state.logits, state.known_taps
        self._forget(row, state)
        if state.num_laws < 2:
            return None
        tokens = (row.prompt_ids + row.token_ids)[: len(row.prompt_ids) + state.num_laws]
        taps = _joined(known, len(tokens)) if state.taps else None
        if state.taps and taps is None:
            self.num_skipped += 1
            return None
        return RawText(tokens, len(row.prompt_ids), row.params.temperature, logits, taps)

    def _forget(self, row: Row, state: CaptureState) -> None:
        self.held_bytes -= state.drop()
        self._open.pop(id(row), None)

    def _make_room(self) -> None:
        """Drop what requests hold that ended without a step (cancelled), then the largest."""
        self.sweep()
        while self.held_bytes > self.max_bytes and self._open:
            row = max(self._open.values(), key=lambda one: one.capture.num_bytes)  # type: ignore[attr-defined]
            self._forget(row, row.capture)  # type: ignore[arg-type]
            self.num_skipped += 1

    def clear(self) -> None:
        """Forget all requests: nothing will be learned of them."""
        for row in list(self._open.values()):
            self._forget(row, row.capture)  # type: ignore[arg-type]

    def sweep(self) -> None:
        """Forget requests that ended without a step: cancelled ones, and those that timed out."""
        for row in [row for row in self._open.values() if row.finish_reason is not None]:
            self._forget(row, row.capture)  # type: ignore[arg-type]

    def _pay(self, begun: float) -> float:
        seconds = perf_counter() - begun
        self.seconds += seconds
        self.allowance.charge(seconds)
        return seconds


def _joined(known: list[tuple[int, Tensor]], length: int) -> Tensor | None:
    """[length, T * H] of pieces by position, later ones over earlier; the last position needs none. None where one is
    missing."""
    if not known:
        return None
    out = torch.zeros(length, known[0][1].shape[1], dtype=torch.float16)
    seen = torch.zeros(length, dtype=torch.bool)
    for start, piece in known:
        stop = min(length, start + len(piece))
        if stop > start:
            out[start:stop] = piece[: stop - start]
            seen[start:stop] = True
    return out if bool(seen[: length - 1].all()) else None
