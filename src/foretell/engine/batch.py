"""The rows that one pass decodes, and the rows whose prompts are still being read, with their places in the KV pool.

The pool's rows are ``[decoding, group by group | arriving]``. Rows are added and removed between steps; ``Seats`` says
which row moves where.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from foretell.core.errors import ForetellError
from foretell.core.probs import Processors
from foretell.draft.base import Drafter, Probe
from foretell.draft.none import NoDrafter
from foretell.engine.beginnings import beginnings, in_common, shared
from foretell.engine.captured import captured_steps
from foretell.engine.drafters.groups import Group, GroupedDrafter
from foretell.engine.drafters.guarded import GuardedDrafter
from foretell.engine.drafters.lazy import open_drafter
from foretell.engine.event import Part, StepEvent
from foretell.engine.failures import Failures, RaisedFailures
from foretell.engine.prefix import PrefixStore
from foretell.engine.prompts import Arrival, PromptReader
from foretell.engine.request.row import Row
from foretell.engine.state import State
from foretell.engine.step import step
from foretell.model.cache import KVCache
from foretell.model.target import CausalModel, Target


class Batch:
    """See the module's docstring. Not thread-safe: the engine's thread alone calls it."""

    def __init__(
        self,
        model: CausalModel,
        *,
        max_rows: int,
        capacity: int,
        slots: int | None = None,
        prefixes: PrefixStore | None = None,
        width: int = 0,
        failures: Failures | None = None,
    ) -> None:
        """Room for max_rows rows of capacity slots each, which use ``slots`` at most together, where that is given.

        width: see ``step``; then prompts are read one by one, in chunks that begin at multiples of ``PREFILL_CHUNK``,
        so that a request's passes do not depend on the other requests.
        failures: given, a drafter that raises is counted there and closed (``GuardedDrafter``), its rows go on without
        guesses, and none is opened while its method rests. None: its error is the caller's.
        """
        self._failures = failures
        self.model, self.capacity, self.prefixes, self.width = model, capacity, prefixes, width
        self._new_pool = partial(model.new_pool, max_rows, capacity, slots)
        self._pack = model.spec.device.type == "cpu" and not width
        self._begin()

    def _begin(self) -> None:
        model, width = self.model, self.width
        self.members: list[Row] = []  # being decoded; another list wherever they change
        self.arrivals: list[Arrival] = []
        self.passing: Sequence[Row] = []  # whom the pass is of that is being made
        self.groups: list[Group] = []
        self.state: State | None = None
        self.grouped = GroupedDrafter([])
        self.pool: KVCache = self._new_pool()
        self.pool.clear()
        self.target = Target.of(model, self.pool)
        self.prompts = PromptReader(
            model, self.pool, self.capacity, self.prefixes, width, self._failures or RaisedFailures()
        )
        self.captured = captured_steps(model, self.pool, self.capacity, width)

    def begin_anew(self) -> None:
        """Drop all rows, whatever state they are in, and their memory; then take that again, empty."""
        on_prompt, self.members, self.arrivals, self.groups, self.state = self.prompts.on_prompt, [], [], [], None
        self.grouped = GroupedDrafter([])
        del self.pool, self.target, self.prompts, self.captured
        gc.collect()  # the memory of two pools may not be there
        if self.prefixes is not None:
            self.prefixes.clear()
        self._begin()
        self.prompts.on_prompt = on_prompt

    # -- membership ------------------------------------------------------------------------------------------------

    def processors(self, rows: Sequence[Row]) -> Processors:
        """The sampling parameters of some rows, stacked."""
        spec = self.model.spec
        return Processors(
            [row.params for row in rows],
            vocab_size=spec.vocab_size,
            end_token_ids=spec.eos_token_ids,
            device=spec.device,
        )

    def _open_state(self, rows: list[Row]) -> State:
        return State.open(rows, self.processors(rows), self.capacity)

    def waits(self, row: Row) -> bool:
        """Whether a row should not arrive yet: a prompt that is being read begins as its own does, and will be in the
        prefix store sooner than both would have been read. Agents that begin at once read their system text once. Or its
        beginning is on a disk, and others need not wait for that."""
        if self.members and self.prompts.is_loading(row):
            return True
        if any(arrival.row is row.waits_for for arrival in self.arrivals):
            return True
        row.waits_for = None
        if self.prefixes is None or self.width or not self.arrivals:
            return False
        taps, owner = row.choice.method.prompt_taps, row.submission.owner
        row.beginnings = row.beginnings or beginnings(row.prompt_ids, owner)
        same = [in_common(row.beginnings, one.row.beginnings) for one in self.arrivals]
        if not any(same):  # the usual case, asked in each round: the store is not
            return False
        held = self.prefixes.held(row.known[:-1], taps, owner)
        known = 0 if held is None else held[1]
        for arrival, count in zip(self.arrivals, same, strict=True):
            more = count - known
            if more > 0 and arrival.missing <= 2 * more and arrival.row.choice.method.prompt_taps == taps:
                row.waits_for = arrival.row
        return row.waits_for is not None

    def arrive(self, row: Row) -> Arrival:
        """Give a request a row of the pool. Tokens found in the prefix store are not computed again.

        Raises ConfigError where its parameters name tokens that the model does not have.
        """
        state = self._open_state([row])
        place, reserve = self.pool.num_rows, self.pool.reserve
        self.pool.open_rows(1)
        self.pool.loras[place] = row.lora
        row.beginnings = row.beginnings or beginnings(row.prompt_ids, row.submission.owner)
        if self.pool.reserve != reserve:  # the pool has grown, and lies elsewhere
            self._bind()
        target = Target.of(self.model, self.pool.rows(place, place + 1))
        try:
            self.pool.fit([row.num_slots], place)
            arrival = Arrival(row, target, state, self._open_drafter(row, state, target))
            self.prompts.reuse(arrival)
        except BaseException:  # the pool's rows are those of members and arrivals
            self.pool.keep(torch.arange(place))
            raise
        self.arrivals.append(arrival)
        return arrival

    def _open_drafter(self, row: Row, state: State, target: Target) -> Drafter:
        """A row's drafter. Its choice says whether it rests instead."""
        failures, name = self._failures, row.choice.method.name
        row.choice = replace(row.choice, rests=False)
        if failures is None:
            return open_drafter(row.choice.method, state, self.capacity, target)
        row.draft_error = failures.why_rests(name)
        if not row.draft_error:
            try:
                drafter = open_drafter(row.choice.method, state, self.capacity, target)
                return GuardedDrafter(drafter, name, failures, row.choice.num_nodes)
            except ForetellError:  # the request's own mistake
                raise
            except Exception as error:
                failures.failed(name, error)
                row.draft_error = _failed(name, type(error).__name__)
        row.choice = replace(row.choice, rests=True)
        return NoDrafter()

    def read(self, most: int, *, catch_up: bool, whole: bool = False) -> tuple[int, float]:
        """Read at most ``most`` tokens of the arrivals' texts in one pass; (tokens, seconds). Requests whose text is
        complete decode from the next step on. catch_up: drafters read the text too, where they can. whole: read all texts,
        in several passes if needed."""
        begun, self.prompts.seconds_drafting = perf_counter(), 0.0
        total, ready = 0, list[Arrival]()
        seen: dict[int, Row] = {}
        waiting = list(self.arrivals)
        while waiting:
            chosen, counts = self.prompts.next(self.arrivals, waiting, most)
            self.passing = [arrival.row for arrival in chosen]
            place = len(self.members) + self.arrivals.index(chosen[0])  # the others lie after it
            count, done = self.prompts.read(chosen, counts, place, most, catch_up=catch_up)
            self.passing = []
            total += count
            seen |= {id(arrival): arrival.row for arrival in chosen}
            ready += done
            if not whole:
                break
            read = {id(arrival) for arrival in done}
            waiting = [arrival for arrival in waiting if id(arrival) not in read]
        if ready:
            self._settle(set(), ready)
        seconds = perf_counter() - begun
        for row in seen.values():
            row.seconds_prefill += seconds
        return total, seconds

    def leave(self, rows: Sequence[Row], *, remember: bool) -> None:
        """Free the rows of requests that ended or must wait. remember: the prefix store may keep their text's KV."""
        gone = {id(row) for row in rows}
        self.tell_worked(rows)
        # At a fixed width a store holds what prompts' chunks computed alone: a decode pass may round otherwise.
        for group in self.groups if remember and not self.width else ():
            for place, row in enumerate(group.rows):
                if id(row) in gone:
                    index = group.start + place
                    self.prompts.keep_answer(row, self.pool.rows(index, index + 1), group.drafter, place)
        for index, arrival in enumerate(self.arrivals, len(self.members)):
            if remember and arrival.filled and id(arrival.row) in gone:
                self.prompts.keep(arrival, self.pool.rows(index, index + 1))
        failed = [index for index, row in enumerate(self.members) if id(row) in gone and row.error is not None]
        for place in failed:
            self.pool.scrub(place)
        self._settle(gone, [])

    def tell_worked(self, rows: Sequence[Row]) -> None:
        """Rows have ended: the methods whose drafters have guessed for them, and not failed, work."""
        for row in rows:
            if self._failures is not None and row.num_draft_tokens and not row.draft_error:
                self._failures.worked(row.method)

    def _settle(self, gone: set[int], ready: Sequence[Arrival]) -> None:
        """Rows leave (``gone``, by id), and rows whose text has been read begin to decode: update every drafter, and move
        the rows to their new places."""
        where = {id(row): place for place, row in enumerate([*self.members, *(one.row for one in self.arrivals)])}
        for arrival in ready:
            place = where[id(arrival.row)]
            self.prompts.keep(arrival, self.pool.rows(place, place + 1))
        for group in self.groups:  # a drafter has its group's rows, in the same order
            group.keep([index for index, row in enumerate(group.rows) if id(row) not in gone])
        self.groups = [group for group in self.groups if group.rows]
        for drafter, together in self._joined(ready):
            self._enter(drafter, together)
        decoding = {id(row) for group in self.groups for row in group.rows}
        self.arrivals = [one for one in self.arrivals if id(one.row) not in decoding and id(one.row) not in gone]

        blocks = [group.rows for group in self.groups] + [[one.row for one in self.arrivals]]
        seats = seated([[where[id(row)] for row in rows] for rows in blocks])
        start = 0
        for group, order in zip(self.groups, seats.blocks, strict=False):
            group.keep(order)
            group.start = start
            start = group.stop
        self.arrivals = [self.arrivals[index] for index in seats.blocks[-1]]
        self.members = [row for group in self.groups for row in group.rows]
        used = max([len(row.known) for row in self.members] + [one.filled for one in self.arrivals], default=0)
        self.pool.keep(torch.tensor(seats.order, dtype=torch.int64), min(self.capacity, used))
        self.state = self._open_state(self.members) if self.members else None
        self.grouped = GroupedDrafter(self.groups)
        self._bind()

    def _enter(self, drafter: Drafter, together: Sequence[Arrival]) -> None:
        """Rows with one drafter join a group of their kind, or form one."""
        first, rows = together[0], [arrival.row for arrival in together]
        if drafter.can_join:
            key = first.row.choice.key
            found = next((group for group in self.groups if group.key == key and group.drafter.can_join), None)
            if found is not None:
                found.rows += rows
                found.drafter.join(drafter, self._open_state(found.rows))
                return
        self.groups.append(Group(rows, drafter, first.target))

    def _joined(self, ready: Sequence[Arrival]) -> list[tuple[Drafter, list[Arrival]]]:
        """One drafter for the arrivals of each choice, where rows can join: pairs first, then pairs of pairs, so that many
        arrivals cost no more than a few copies of each row."""
        kinds: dict[Any, list[tuple[Drafter, list[Arrival]]]] = {}
        for arrival in ready:
            key = arrival.row.choice.key if arrival.drafter.can_join else id(arrival)
            kinds.setdefault(key, []).append((arrival.drafter, [arrival]))
        for key, parts in kinds.items():
            while len(parts) > 1:
                merged = []
                for (one, mine), (other, others) in zip(parts[::2], parts[1::2], strict=False):
                    one.join(other, self._open_state([arrival.row for arrival in (*mine, *others)]))
                    merged.append((one, [*mine, *others]))
                parts = merged + parts[len(parts) // 2 * 2 :]
            kinds[key] = parts
        return [part for parts in kinds.values() for part in parts]

    def _bind(self) -> None:
        """Every target sees its own rows of the pool."""
        self.target.cache = self._view(0, len(self.members))
        for group in self.groups:
            whole = group.stop - group.start == len(self.members)
            group.target.cache = self.target.cache if whole else self._view(group.start, group.stop)
        for place, arrival in enumerate(self.arrivals, len(self.members)):
            arrival.target.cache = self.pool.rows(place, place + 1)

    def _view(self, start: int, stop: int) -> KVCache:
        """The pool's rows of members [start, stop), and which of them begin alike."""
        view = self.pool.rows(start, stop)
        view.shared = shared([row.beginnings for row in self.members[start:stop]])
        return view

    # -- decoding --------------------------------------------------------------------------------------------------

    def step(
        self,
        caps: Sequence[int] | None = None,
        paid: Sequence[int] | None = None,
        probe: Probe | None = None,
        least: float = 0.0,
        *,
        can_run: bool = True,
    ) -> StepEvent:
        """One step of all members. Row b guesses at most caps[b] deep; without caps, as deep as its own choice says. paid:
        the most with guesses that cost time, where they are set apart. probe: what drafters write down of this step.
        least: see ``Context.least_chance``. can_run: see ``step``."""
        state, grouped, first = self.state, self.grouped, self.groups[0]
        assert state is not None
        self.passing = self.members
        state.probe, state.graphs = probe, None if self.captured is None else self.captured.graphs
        state.limit(caps, paid, least)
        if self.pool.block > 1:
            self.pool.fit([row.num_slots for row in self.members])
        one = len(self.groups) == 1  # then nothing stands between the step and its drafter
        event = step(
            state, self.target, first.drafter if one else grouped, grouped.verifier,
            first.shape_of(state.depth_limit) if one else first.shape, first.draws,
            width=self.width, pack=self._pack, tapping=grouped.tapping, captured=self.captured,
            can_run=can_run and one and not self.width and not self.arrivals,
        )  # fmt: skip
        self.passing = []
        if self._failures is not None:
            for group in self.groups:
                if failure := group.failure:
                    for row in group.rows:
                        row.draft_error = _failed(group.method.name, failure)
        return event

    def parts(self) -> list[Part]:
        """The drafter and verifier of each group of rows."""
        return [Part(group.start, group.stop, group.method.name, group.shape, group.verifier) for group in self.groups]

    def num_expected(self, asked: Sequence[bool]) -> list[int]:
        """Tokens that logits processors expect next (``expected_of``), of the members that are asked."""
        assert self.state is not None
        return list(map(len, self.state.processors.expected(self.state.history, asked)))

    def num_unread(self) -> list[int]:
        """Known tokens that each member's drafter has not read."""
        assert self.state is not None
        found: list[int] = []
        for group in self.groups:
            found += group.drafter.num_unread(group.context(self.state))
        return found


def _failed(method: str, error: str) -> str:
    return f"{method} failed ({error})"


@dataclass(frozen=True)
class Seats:
    """Which row moves where. Rows of a block (a group, or those being read) count from 0, in the order that they had."""

    blocks: list[list[int]]  # of each block: which of its rows lies at its first place, its second, ...
    # [n] the pool's row, before, of what lies at each place afterwards; rows that are not in it are free
    order: list[int]


def seated(blocks: Sequence[Sequence[int]]) -> Seats:
    """Seats of blocks that lie one after the other. blocks: where the rows of each lie now, in any order. A row that lies
    in its block's range already stays where it is, so few rows are copied."""
    found, order = [], list[int]()
    for old in blocks:
        start = len(order)
        stop = start + len(old)
        staying = {place: row for row, place in enumerate(old) if start <= place < stop}
        moving = iter([row for row, place in enumerate(old) if not start <= place < stop])
        rows = [staying[place] if place in staying else next(moving) for place in range(start, stop)]
        found.append(rows)
        order += [old[row] for row in rows]
    return Seats(found, order)
