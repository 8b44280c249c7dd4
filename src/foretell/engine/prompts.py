"""Reading prompts: several texts in one pass, a piece at a time, or taking what is known of them from the prefix store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from foretell.draft.base import Drafter, PromptChunk
from foretell.engine.failures import Failures
from foretell.engine.prefix import PrefixStore
from foretell.engine.request.row import Row, Submission
from foretell.engine.state import State, Tapping
from foretell.model.cache import KVCache
from foretell.model.prefill import PREFILL_CHUNK, feed
from foretell.model.recurrent import RecurrentCache, Saved
from foretell.model.target import CausalModel, Target


@dataclass
class Arrival:
    """A request that has a row of the pool and whose prompt is being read."""

    row: Row
    target: Target  # its own row
    state: State  # of this row alone: the context that its drafter is opened with
    drafter: Drafter
    filled: int = 0  # of ``state.lengths[0]`` tokens
    unread: int = 0  # known tokens that its drafter would read in its next proposal
    first: int = 0  # tokens that were found in the prefix store, with the taps of its method
    taps: list[Tensor] = field(default_factory=list)  # of what has been read after those, for the prefix store ...
    states: dict[int, Saved] = field(default_factory=dict)  # ... and recurrent states at some positions of it

    @property
    def missing(self) -> int:
        """Tokens that the target has not read yet."""
        return self.state.lengths[0] - self.filled


class PromptReader:
    """See the module's docstring. Rows of the pool belong to the batch, which says where they lie."""

    def __init__(
        self, model: CausalModel, pool: KVCache, capacity: int, prefixes: PrefixStore | None, width: int,
        failures: Failures,
    ) -> None:  # fmt: skip
        """width: see ``Batch``. failures: of the prefix store; what that cannot give is read."""
        self._failures = failures
        self.model, self.pool, self.capacity, self.prefixes, self.width = model, pool, capacity, prefixes, width
        # Tokens between two recurrent states that are kept for the prefix store; 0: there are none.
        self._spacing = pool.spacing if prefixes is not None and isinstance(pool, RecurrentCache) else 0
        # (row, position of the first, taps [n, T * H] of its method's prompt_taps), while a prompt is read.
        self.on_prompt: Callable[[Row, int, Tensor], None] | None = None
        self.seconds_drafting = 0.0  # that drafters took to read prompts, in the last ``Batch.read``

    def is_loading(self, row: Row) -> bool:
        """Whether a file with the beginning of its text is being read, beside those that decode."""
        if self.prefixes is not None and not row.has_looked:
            row.has_looked, layers = True, row.choice.method.prompt_taps
            load, owner = self.prefixes.load, row.submission.owner
            row.loading = self._failures.run("prefixes", None, load, row.known[:-1], layers, owner)
        return row.loading is not None and not row.loading.done()

    def reuse(self, arrival: Arrival) -> None:
        """Copy what the prefix store knows of a text."""
        if self.prefixes is None:
            return
        layers = arrival.row.choice.method.prompt_taps
        find, owner = self.prefixes.find, arrival.row.submission.owner
        found = self._failures.run("prefixes", None, find, arrival.row.known[:-1], layers, owner)
        if found is None:
            return
        prefix, count = found
        if self.width:  # whole chunks alone: the rest must be read in the same pass as without the store
            count = prefix.reach(count, PREFILL_CHUNK)
        if not count:
            return
        prefix.copy_into(arrival.target.cache, count)
        arrival.filled = count
        if not arrival.row.num_preemptions:  # a resumed text may be found beyond its prompt, by itself
            arrival.row.num_cached_tokens = count
        arrival.states = {at: saved for at, saved in (prefix.states or {}).items() if at <= count}
        arrival.first = count
        for piece, start, used in prefix.parts(count) if layers else ():
            assert piece.taps is not None
            self._tell(arrival, start, used, piece.taps[:, :used], stored=True)

    def read(
        self, chosen: Sequence[Arrival], counts: Sequence[int], place: int, most: int, *, catch_up: bool
    ) -> tuple[int, list[Arrival]]:
        """One pass over what ``next`` returned for at most ``most`` tokens. place: the pool's row of the first. catch_up:
        see ``Batch.read``. Returns (tokens, those now complete)."""
        if any(counts):
            counts = self._pass(chosen, counts, place)
        for arrival, count in zip(chosen, counts, strict=True):
            arrival.filled += count
            if self._spacing and count:
                self._keep_state(arrival)
            begun = perf_counter()
            arrival.unread = arrival.drafter.catch_up(arrival.state, 0, most) if catch_up else 0
            self.seconds_drafting += perf_counter() - begun
        return sum(counts), [arrival for arrival in chosen if not arrival.missing and not arrival.unread]

    def keep(self, arrival: Arrival, row: KVCache) -> None:
        """Give the KV of a text, as far as it has been read, to the prefix store, if all is known that its method reads."""
        layers, known = arrival.row.choice.method.prompt_taps, arrival.row.known[:-1][: arrival.filled]
        if not layers or arrival.first + sum(taps.shape[1] for taps in arrival.taps) == len(known):
            self.remember(known, row, layers, arrival.taps, arrival.row.submission, arrival.states, arrival.first)

    def keep_answer(self, row: Row, cache: KVCache, drafter: Drafter, place: int) -> None:
        """The same of a row that has decoded: its prompt and what it has written. place: among the drafter's rows."""
        method, known = row.choice.method, row.known[:-1]  # the last token is pending: its KV was never computed
        layers = method.prompt_taps
        if self.prefixes is None or (layers and method.taps != layers):
            return
        after = drafter.taps_of(place) if layers else None
        if layers and after is None:
            return
        first, taps = (0, []) if after is None else (len(known) - len(after), [after[None]])
        saved = cache.save(len(known)) if isinstance(cache, RecurrentCache) else None
        states = {} if saved is None else {saved.position: saved}
        self.remember(known, cache, layers, taps, row.submission, states, first)

    def remember(
        self, ids: list[int], row: KVCache, layers: tuple[int, ...], taps: list[Tensor], asked: Submission,
        states: Mapping[int, Saved], first: int,
    ) -> None:  # fmt: skip
        """Give a text's KV to the prefix store: ids, the row that holds it, hidden states of layers from the token
        ``first`` on, and saved states. asked: whose text it is."""
        if self.prefixes is not None:
            known = states if isinstance(row, RecurrentCache) else None
            joined = taps[0] if len(taps) == 1 else torch.cat(taps, 1) if taps else None
            add = partial(
                self.prefixes.add, ids, row, layers, joined, asked.owner, known, store=asked.store, first=first
            )
            self._failures.run("prefixes", None, add)

    def next(
        self, arrivals: Sequence[Arrival], waiting: Sequence[Arrival], most: int
    ) -> tuple[list[Arrival], list[int]]:
        """The arrivals that the next pass reads, and how many tokens of each: of waiting ones, which stand among arrivals
        in the same order, the first with adjacent rows of the pool, ``most`` tokens in all."""
        chosen: list[Arrival] = []
        counts: list[int] = []
        left, first = most, arrivals.index(waiting[0])
        for arrival, place in zip(waiting, arrivals[first:], strict=False):
            if arrival is not place:
                break
            count = min(arrival.missing, left)
            if self._spacing:  # a state is kept where a pass ends
                count = min(count, self._spacing - arrival.filled % self._spacing)
            if self.width and count:
                count = min(arrival.missing, PREFILL_CHUNK)
                if any(counts):
                    break
            if not count and arrival.missing:
                break
            chosen.append(arrival)
            counts.append(count)
            left -= count
        return chosen, counts

    def _pass(self, chosen: Sequence[Arrival], counts: Sequence[int], place: int) -> list[int]:
        """One pass over the next counts[k] tokens of each arrival, fewer where the pool has no room for the padding of
        shorter ones; how many were read. place: the first one's row of the pool."""
        start = [arrival.filled for arrival in chosen]
        width = min(max(counts), self.capacity - max(start))
        counts = [min(count, width) for count in counts]
        pieces = [
            arrival.state.history.ids[0][at : at + count]
            for arrival, at, count in zip(chosen, start, counts, strict=True)
        ]
        target = chosen[0].target
        if len(chosen) > 1:
            target = Target.of(self.model, self.pool.rows(place, place + len(chosen)))
        layers = tuple(dict.fromkeys(layer for arrival in chosen for layer in arrival.row.choice.method.prompt_taps))

        def tapped(starts: list[int], lengths: list[int], taps: Tensor) -> None:
            for index, (arrival, at, count) in enumerate(zip(chosen, starts, lengths, strict=True)):
                wanted = arrival.row.choice.method.prompt_taps
                if not wanted or not count:
                    continue
                own = Tapping(layers).pick(taps[index : index + 1, :count], wanted)
                self._tell(arrival, at, count, own)
                if self.prefixes is not None:
                    arrival.taps.append(own.clone())

        feed(target, pieces, start, head=False, span_multiple=512 if self.width else 64, taps=layers, on_chunk=tapped)
        return counts

    def _keep_state(self, arrival: Arrival) -> None:
        """Keep the recurrent states after what has been read, every ``spacing`` tokens and at the end."""
        if arrival.missing and arrival.filled % self._spacing:
            return
        assert isinstance(arrival.target.cache, RecurrentCache)
        saved = arrival.target.cache.save(arrival.filled)
        if saved is not None:
            arrival.states.setdefault(saved.position, saved)

    def _tell(self, arrival: Arrival, start: int, count: int, taps: Tensor, *, stored: bool = False) -> None:
        """Hidden states of known text, for its drafter and whoever learns from them."""
        arrival.drafter.read_prompt(PromptChunk([start], [count], taps, stored, self.prefixes is not None))
        if self.on_prompt is not None:
            self.on_prompt(arrival.row, start, taps[0])
