# mypy: ignore-errors
"""What stands between a decoder's products on an accelerator, in Triton: norms, and rotations that write keys and values.

Sums are float32, and results are rounded where the torch twin (``model/llama/run/lean.py``) rounds them. A program handles
a node alone, so its bits depend on nothing beside it.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, weight, out, size, eps, BLOCK: tl.constexpr):
    """One program a row of x [T, size]: its root mean square norm (Zhang and Sennrich, 1910.07467) times weight."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, inside, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    factor = tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + at, value * scale * factor, inside)


@triton.jit
def place_kernel(
    qkv, weight, cos, sin, growth, slots, table, queries, keys, values,
    table_row, num_nodes, by_node, heads, kv_heads, dim, eps, key_row, key_head, value_row, value_head,
    HAS_NORM: tl.constexpr, HAS_GROWTH: tl.constexpr, HAS_TABLE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a head of a node: a query or key is normed and turned; keys and values go to their slot, queries below
    the others of their key-value head."""
    item = tl.program_id(0).to(tl.int64)  # row * num_nodes + node
    head = tl.program_id(1).to(tl.int64)
    row = item // num_nodes
    node = item % num_nodes
    at = tl.arange(0, BLOCK)
    inside = at < dim
    vector = qkv + item * by_node + head * dim
    x = tl.load(vector + at, inside, 0.0)
    slot = tl.load(slots + item)
    if HAS_TABLE:
        slot = tl.load(table + row * table_row + slot // SLOTS) + slot % SLOTS
    written = at < tl.where(slot < 0, 0, dim)  # nothing of what has no block
    if head >= heads + kv_heads:
        place = values + row * value_row + (head - heads - kv_heads) * value_head + slot * dim
        tl.store(place + at, x, written)
    else:
        half = dim // 2
        other = tl.where(at < half, at + half, at - half)
        swapped = tl.load(vector + other, inside, 0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / dim + eps)
            factor = tl.load(weight + head * dim + at, inside, 0.0).to(tl.float32)
            its = tl.load(weight + head * dim + other, inside, 0.0).to(tl.float32)
            x = (wide * scale * factor).to(x.dtype)
            swapped = (swapped.to(tl.float32) * scale * its).to(x.dtype)
        turn = tl.load(cos + item * dim + at, inside, 0.0).to(tl.float32)
        across = tl.load(sin + item * dim + at, inside, 0.0).to(tl.float32)
        kept = (x.to(tl.float32) * turn).to(x.dtype)
        x = (kept.to(tl.float32) + swapped.to(tl.float32) * across).to(x.dtype)
        if head >= heads:
            tl.store(keys + row * key_row + (head - heads) * key_head + slot * dim + at, x, written)
        else:
            if HAS_GROWTH:
                x = (x.to(tl.float32) * tl.load(growth + item).to(tl.float32)).to(x.dtype)
            place = (row * heads + head) * num_nodes + node
            tl.store(queries + place * dim + at, x, inside)
