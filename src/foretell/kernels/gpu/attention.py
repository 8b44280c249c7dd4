# mypy: ignore-errors
"""Attention of a tree's nodes over slots on an accelerator, in Triton: what a node sees follows from ``length`` and its
ancestry, and no mask is made.

A few queries meet many keys, so the slots are divided among programs, and what these have found is joined after (Dao et
al., "Flash-Decoding", 2023): sums are float32, of a running maximum (Milakov and Gimelshein, 1805.02867).
"""

import triton
import triton.language as tl

VARY = ("table_row", "num_nodes", "num_tree", "window", "anc_row", "anc_node", "pos_row", "tree_row")
LIE = ("table", "ancestry", "lengths", "positions", "tree_positions")


@triton.jit(do_not_specialize=VARY, do_not_specialize_on_alignment=LIE)  # a tree of another size compiles nothing
def attend_kernel(
    query, table, keys, values, ancestry, lengths, positions, tree_positions, partial, sums,
    table_row, kv_heads, group, num_nodes, num_tree, dim, slots_each, window, scale, cap,
    key_row, key_head, value_row, value_head, anc_row, anc_node, pos_row, tree_row,
    HAS_TABLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program a part of the slots, for some of the queries of a key-value head: their sums so far, the largest score
    and the sum of weights."""
    head, part, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, kv_head = head // kv_heads, head % kv_heads
    length = tl.load(lengths + row)
    num_queries = group * num_nodes
    of_query = block * ROWS + tl.arange(0, ROWS)
    asked = of_query < num_queries
    node = tl.where(asked, of_query % num_nodes, 0)
    at = tl.arange(0, DIM)
    held = at < dim
    q = tl.load(query + (head * num_queries + of_query[:, None]) * dim + at, asked[:, None] & held, 0.0)
    here = tl.load(positions + row * pos_row + node)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    start = part * slots_each
    stop = tl.minimum(start + slots_each, length + num_tree)
    for first in range(start, stop, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        used = slot < stop
        there, where = used, slot
        if HAS_TABLE:  # a block of slots lies together; padding has none
            begin = tl.load(table + row * table_row + first // SLOTS)
            there, where = slot < tl.where(begin < 0, 0, stop), begin + tl.arange(0, SLOTS)
        place = where[:, None].to(tl.int64) * dim + at
        k = tl.load(keys + row * key_row + kv_head * key_head + place, there[:, None] & held, 0.0)
        in_tree = slot - length
        guessed = used & (in_tree >= 0)
        above = tl.load(ancestry + row * anc_row + node[:, None] * anc_node + in_tree, guessed[None, :], 0)
        sees = (used & (in_tree < 0))[None, :] | (above != 0)
        if HAS_WINDOW:
            its = tl.where(guessed, tl.load(tree_positions + row * tree_row + in_tree, guessed, 0), slot)
            sees = sees & (here[:, None] - its < window)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            # tanh by the exponential of what is at most 0: nothing overflows.
            size = tl.exp(-2.0 * tl.abs(score) / cap)
            score = tl.where(score < 0, -cap, cap) * (1.0 - size) / (1.0 + size)
        score = tl.where(sees, score, float("-inf"))
        most = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(most == float("-inf"), 0.0, most)  # a query that has seen nothing yet
        shrunk = tl.exp(best - safe)
        p = tl.exp(score - safe[:, None])
        v = tl.load(values + row * value_row + kv_head * value_head + place, there[:, None] & held, 0.0)
        weight = weight * shrunk + tl.sum(p, 1)
        mixed = mixed * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        best = most
    place = (head * tl.num_programs(1) + part) * num_queries + of_query
    tl.store(partial + place[:, None] * dim + at, mixed, asked[:, None] & held)
    tl.store(sums + place * 2, best, asked)
    tl.store(sums + place * 2 + 1, weight, asked)


@triton.jit
def join_kernel(partial, sums, out, kv_heads, group, num_nodes, num_parts, dim, PARTS: tl.constexpr, DIM: tl.constexpr):
    """One program a query: what all parts have found, as out [B, n, heads, dim]."""
    head, of_query = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, kv_head = head // kv_heads, head % kv_heads
    part, at = tl.arange(0, PARTS), tl.arange(0, DIM)
    real, held = part < num_parts, at < dim
    place = (head * num_parts + part) * (group * num_nodes) + of_query
    best = tl.load(sums + place * 2, real, float("-inf"))
    weight = tl.load(sums + place * 2 + 1, real, 0.0)
    share = tl.exp(best - tl.max(best, 0))
    mixed = tl.load(partial + place[:, None] * dim + at, real[:, None] & held, 0.0)
    mixed = tl.sum(mixed * share[:, None], 0) / tl.sum(weight * share, 0)
    node, in_group = of_query % num_nodes, of_query // num_nodes
    to = ((row * num_nodes + node) * kv_heads + kv_head) * group + in_group
    tl.store(out + to * dim + at, mixed, held)
