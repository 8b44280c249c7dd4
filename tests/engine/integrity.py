"""The books of the engine, added up between two steps."""

from collections import Counter

import torch

from foretell.engine.batch import Batch
from foretell.engine.loop import Loop
from foretell.engine.prefix import PrefixStore
from foretell.engine.state import State
from foretell.model.blocks import _FIRST, _FREE, BlockCache
from foretell.model.prefill import round_up
from foretell.service.service import Service


def check_service(service: Service) -> None:
    """``check_loop`` on the engine's thread, between two steps."""

    def check() -> None:
        assert service._loop is not None
        check_loop(service._loop)

    service._call(check)


def check_loop(loop: Loop) -> None:
    """Check the invariants. Raises RuntimeError where one is violated."""
    check_batch(loop.batch)
    if loop.prefixes is not None:
        check_prefixes(loop.prefixes)
    waiting = [job.row.request_id for job in (*loop.waiting, *loop.scoring)]
    running = [job.row.request_id for job in loop.running.values()]
    if sorted(waiting + running) != sorted(loop.jobs):
        raise RuntimeError(f"{len(waiting)} wait and {len(running)} run, of {len(loop.jobs)} that have not ended")
    members = {id(row) for row in loop.batch.members}
    if members | {id(one.row) for one in loop.batch.arrivals} != set(loop.running):
        raise RuntimeError("the pool's rows and the running requests differ")
    held = [("scoring", job) for job in loop.scoring] + [("waiting", job) for job in loop.waiting]
    held += [("decoding" if id(job.row) in members else "reading", job) for job in loop.running.values()]
    for phase, job in held:
        if job.phase != phase:
            raise RuntimeError(f"request {job.row.request_id} is held as {phase}, and its phase is {job.phase}")
    if loop.recorder.num_submitted != len(loop.jobs) + sum(loop.recorder.num_finished.values()):
        raise RuntimeError(
            f"{loop.recorder.num_submitted} requests were submitted, {len(loop.jobs)} are present, "
            f"{sum(loop.recorder.num_finished.values())} have ended"
        )
    # A step adds up to its nodes to each row, and with them begins blocks; the next tick makes room for them.
    block = loop.batch.pool.block
    grown = sum(round_up(job.row.choice.num_nodes, block) for job in loop.running.values())
    if len(loop.running) > 1 and loop.used_tokens > loop.limits.kv_tokens + grown:
        raise RuntimeError(f"{loop.used_tokens} slots in use, {loop.limits.kv_tokens} allowed")
    for job in loop.jobs.values():
        if job.row.finish_reason is not None:
            raise RuntimeError(f"request {job.row.request_id} has ended and is still present")
        if job.num_delivered > len(job.row.pieces):
            raise RuntimeError(
                f"request {job.row.request_id}: sent {job.num_delivered} of {len(job.row.pieces)} pieces"
            )


def check_batch(batch: Batch) -> None:
    """Check the invariants. Raises RuntimeError where one is violated."""
    if batch.pool.num_rows != len(batch.members) + len(batch.arrivals):
        raise RuntimeError(
            f"{batch.pool.num_rows} rows of the pool for {len(batch.members)} members, {len(batch.arrivals)} arrivals"
        )
    if isinstance(batch.pool, BlockCache):
        check_blocks(batch.pool)
    stop = 0
    for group in batch.groups:
        if group.start != stop or group.stop <= group.start:
            raise RuntimeError(f"a group has rows [{group.start}, {group.stop}), and the one before it ends at {stop}")
        stop = group.stop
        for row, member in zip(group.rows, batch.members[group.start : group.stop], strict=True):
            if row is not member or row.choice.key != group.key:
                raise RuntimeError(f"request {member.index} stands in another group's rows")
        if group.target.cache.num_rows != group.stop - group.start:
            raise RuntimeError(
                f"a group of {group.stop - group.start} rows has {group.target.cache.num_rows} cache rows"
            )
    if stop != len(batch.members):
        raise RuntimeError(f"{len(batch.members)} members, and the last group ends at {stop}")
    if (batch.state is None) != (not batch.members):
        raise RuntimeError("there must be a state iff there are members")
    if batch.state is not None:
        if [id(row) for row in batch.state.rows] != [id(row) for row in batch.members]:
            raise RuntimeError("the state's rows and the members differ")
        check_state(batch.state)
    for arrival in batch.arrivals:
        if (
            not 0 <= arrival.filled <= arrival.state.lengths[0]
            or arrival.row.token_ids != arrival.state.history.ids[0][len(arrival.row.prompt_ids) :]
        ):
            raise RuntimeError(
                f"request {arrival.row.index}: {arrival.filled} tokens read of {arrival.state.lengths[0]}"
            )
    rows = [id(row) for row in batch.members] + [id(arrival.row) for arrival in batch.arrivals]
    if len(set(rows)) != len(rows):
        raise RuntimeError("a request has two rows")


def check_state(state: State) -> None:
    """Check the invariants. Raises RuntimeError with both values where they differ. Reads the device: for tests and
    debugging."""
    if state.length.tolist() != state.lengths:
        raise RuntimeError(f"length on the device {state.length.tolist()}, on the host {state.lengths}")
    for row, ids, length, pending in zip(
        state.rows, state.history.ids, state.lengths, state.pending.tolist(), strict=True
    ):
        if ids != row.prompt_ids + row.token_ids:
            raise RuntimeError(f"request {row.index}: history and prompt + output differ")
        if length != len(ids) - 1 or pending != ids[-1]:
            raise RuntimeError(f"request {row.index}: {len(ids)} tokens, length {length}, pending {pending}")
        if length + 1 > state.capacity:
            raise RuntimeError(f"request {row.index}: length {length} exceeds {state.capacity} slots")
        if [piece.token_id for piece in row.pieces] != row.token_ids:
            raise RuntimeError(f"request {row.index}: {len(row.token_ids)} tokens, {len(row.pieces)} pieces")


def check_blocks(cache: BlockCache) -> None:
    """Check the invariants, and the table on the device. Raises RuntimeError where one is violated."""
    taken = [block for row in cache._taken for block in row]
    if sorted(taken + cache._free) != list(range(_FIRST, _FIRST + cache.num_blocks)):
        raise RuntimeError(f"blocks {sorted(taken)} are taken and {sorted(cache._free)} free, of {cache.num_blocks}")
    if any(cache._taken[cache.num_rows :]):
        raise RuntimeError("a row that is not in use has blocks")
    expected = torch.full_like(cache._host, _FREE)
    for row, blocks in enumerate(cache._taken):
        expected[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int64) * cache.block
    if not torch.equal(cache.table.cpu(), expected):
        raise RuntimeError("the table on the device is not what rows have taken")


def check_prefixes(store: PrefixStore) -> None:
    """Check the invariants. Raises RuntimeError where one is violated."""
    users = Counter(id(piece) for prefix in store._prefixes.values() for piece, _ in prefix.pieces)
    pieces = {id(piece): piece for prefix in store._prefixes.values() for piece, _ in prefix.pieces}
    held = sum(piece.num_bytes for piece in pieces.values())
    for prefix in store._prefixes.values():
        held += sum(saved.num_bytes for saved in (prefix.states or {}).values())
        if sum(used for _, used in prefix.pieces) != len(prefix.ids):
            raise RuntimeError("the pieces of a prefix do not hold its text")
    if any(piece.users != users[key] for key, piece in pieces.items()):
        raise RuntimeError("a piece counts other users than it has")
    if held != store.num_bytes or held > store.max_bytes:
        raise RuntimeError(f"prefixes hold {held} bytes, {store.num_bytes} are counted, {store.max_bytes} allowed")
    if store.num_tokens != sum(len(prefix.ids) for prefix in store._prefixes.values()):
        raise RuntimeError(f"{store.num_tokens} tokens are counted, and the prefixes hold another number")
    if any(number not in store._prefixes for number in store._blocks.values()):
        raise RuntimeError("a block refers to a prefix that was removed")
