# mypy: ignore-errors
"""Draws on an accelerator, in Triton: keys, the race over probabilities and over logits, the walk, the inverse of a sum.

The twins of ``kernels/race.c``, ``kernels/race_logits.h`` and ``kernels/cdf.c``: the same hash, the same doubles, so
the same tokens but where two scores agree to the last bits of a logarithm. A program handles a row (or a node) alone:
what it draws depends on nothing beside it. ``ops.py`` has the functions that launch them, with their shapes;
``TRITON_INTERPRET=1`` runs them on the CPU.
"""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
LARGEST = tl.constexpr(3.4028234663852886e38)
NEAR = tl.constexpr(1e-4)
"""Above the error of a float32 logarithm, so that a bound that it takes part in holds."""


@triton.jit
def mix(x):
    """splitmix64's finaliser of uint64 x: ``core.noise.mix``."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def stream_key(seed, position, index, stream):
    """``core.noise.stream_keys`` of int64 arguments, as uint64."""
    key = mix(mix(seed.to(tl.uint64, bitcast=True) + GOLDEN) ^ (stream.to(tl.uint64) * SECOND))
    key = mix(key ^ mix(position.to(tl.uint64, bitcast=True) + GOLDEN))
    return mix(key ^ (index.to(tl.uint64, bitcast=True) * FIRST))


@triton.jit
def least_exponential(key, tokens):
    """float32 w <= E of tokens under a key: ``core.noise.exponentials`` before its logarithm."""
    entry = mix((tokens.to(tl.uint64) + 1) * GOLDEN)
    bits = (mix(key + entry) >> 32).to(tl.uint32)
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential(w):
    """float64 E = -log1p(-w). The factor takes the rounding of 1 - w back out (Goldberg 1991, theorem 4)."""
    u = tl.minimum(w, 1.0 - 5.9604644775390625e-08).to(tl.float64)
    rest = 1.0 - u
    lost = 1.0 - rest
    # w is at least 1e-10, and 1 - w is then below 1.
    return -tl.log(rest) * (u / lost)


@triton.jit(do_not_specialize=["stream"])
def keys_kernel(seeds, positions, index, out, num_columns, stream, S0, S1, P0, P1, I0, I1, BLOCK: tl.constexpr):
    """One program a row of out; each argument has strides by row and by column."""
    row = tl.program_id(0)
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_columns
        seed = tl.load(seeds + row * S0 + at * S1, inside, 0)
        position = tl.load(positions + row * P0 + at * P1, inside, 0)
        number = tl.load(index + row * I0 + at * I1, inside, 0)
        key = stream_key(seed, position, number, stream)
        tl.store(out + row * num_columns + at, key.to(tl.int64, bitcast=True), inside)


@triton.jit
def race_kernel(probs, keys, out, vocab_size, BLOCK: tl.constexpr):
    """One program a row: the first token of the largest p / E; 0 where nothing has mass."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    best = tl.full((), -1.0, tl.float32)
    winner = tl.full((), 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        p = tl.load(probs + row * vocab_size + tokens, tokens < vocab_size, -1.0).to(tl.float32)
        w = least_exponential(key, tokens)
        # E >= w, so no token of a block without this beats the best score.
        if tl.max((p > best * w).to(tl.int32), 0) > 0:
            score = tl.div_rn(p, exponential(w).to(tl.float32))
            score = tl.where(p >= 0.0, score, -1.0)
            most, at = tl.max(score, 0, return_indices=True)
            if most > best:
                best = most
                winner = (start + at).to(tl.int64)
    tl.store(out + row, winner)


@triton.jit
def scores_kernel(probs, keys, out, vocab_size, BLOCK: tl.constexpr):
    """One program a block of a row: p / E of every token."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    p = tl.load(probs + row * vocab_size + tokens, inside, 0.0).to(tl.float32)
    score = tl.div_rn(p, exponential(least_exponential(key, tokens)).to(tl.float32))
    tl.store(out + row * vocab_size + tokens, score, inside)


@triton.jit
def load_logits(z, start, vocab_size, BLOCK: tl.constexpr):
    """float32 logits of a block: NaN and what is beyond the vocabulary as -inf, +inf as the largest number."""
    tokens = start + tl.arange(0, BLOCK)
    x = tl.load(z + tokens, tokens < vocab_size, float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def largest_logit(z, vocab_size, BLOCK: tl.constexpr):
    """(value, index) of the largest logit, the first of equal ones; index -1 where all are -inf."""
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), -1, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        most, at = tl.max(load_logits(z, start, vocab_size, BLOCK), 0, return_indices=True)
        if most > best:
            best = most
            winner = (start + at).to(tl.int64)
    return best, winner


@triton.jit
def kth_logit(z, vocab_size, k, BLOCK: tl.constexpr):
    """The k-th largest logit, -inf where fewer are above it: four digits of its order, the highest first."""
    digits = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.uint32)
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, vocab_size, BLOCK):
            x = load_logits(z, start, vocab_size, BLOCK)
            bits = x.to(tl.uint32, bitcast=True)
            # Ordered as the floats are: negative ones turned over (not by ~, which Triton 3.7 interprets with an overflow).
            order = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
            inside = start + tl.arange(0, BLOCK) < vocab_size
            if shift < 24:
                inside = inside & ((order >> (shift + 8)) == (prefix >> (shift + 8)))
            counts += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=inside)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(at_least >= k, digits, 0), 0)
        k -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
    bits = tl.where(prefix >= 0x80000000, prefix & 0x7FFFFFFF, prefix ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def race_above(z, vocab_size, inverse, shift, least, above, key, BLOCK: tl.constexpr):
    """(token, y) of the largest y - log E among those with y = (z - shift) * inverse >= least and > above; token -1 where
    there is none."""
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), -1, tl.int64)
    value = tl.full((), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        y = (load_logits(z, start, vocab_size, BLOCK) - shift) * inverse
        kept = (y >= least) & (y > above)
        if tl.max(kept.to(tl.int32), 0) > 0:
            w = least_exponential(key, start + tl.arange(0, BLOCK))
            y = tl.where(kept, y, 0.0)
            bound = y - tl.log(w) + NEAR + 1e-6 * tl.abs(y)
            if tl.max((kept & (bound > best)).to(tl.int32), 0) > 0:
                score = tl.where(kept, y.to(tl.float64) - tl.log(exponential(w)), float("-inf"))
                most, at = tl.max(score, 0, return_indices=True)
                if most > best:
                    best = most
                    winner = (start + at).to(tl.int64)
                    value = tl.max(tl.where(tl.arange(0, BLOCK) == at, y, float("-inf")), 0)
    return winner, value


@triton.jit
def masses(z, vocab_size, inverse, shift, least, here, top, BLOCK: tl.constexpr):
    """(all, more) float64: the sums of exp(y - top) over y >= least, and over those above ``here`` alone."""
    everything = tl.full((), 0.0, tl.float64)
    more = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        y = (load_logits(z, start, vocab_size, BLOCK) - shift) * inverse
        e = tl.exp((y - top).to(tl.float64))
        everything += tl.sum(tl.where(y >= least, e, 0.0), 0)
        more += tl.sum(tl.where((y >= least) & (y > here), e, 0.0), 0)
    return everything, more


@triton.jit(do_not_specialize=["stream"])
def node_keys_kernel(seeds, positions, parents, out, num_nodes, stream, BLOCK: tl.constexpr):
    """One program a row: the key of the token that follows each node of a tree; positions are the roots'."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < num_nodes
    at = tl.where(inside, node, 0).to(tl.int64)
    depth = at * 0
    while tl.max(at, 0) > 0:
        at = tl.load(parents + row * num_nodes + at, at > 0, -1)
        depth += (at >= 0).to(tl.int64)
    position = tl.load(positions + row) + 1 + depth
    key = stream_key(tl.load(seeds + row), position, depth * 0, stream)
    tl.store(out + row * num_nodes + node, key.to(tl.int64, bitcast=True), inside)


@triton.jit
def draw_kernel(logits, warps, keys, out, num_nodes, vocab_size, by_row, by_node, impossible, BLOCK: tl.constexpr):
    """One program a node: the token that wins the race of what temperature, top-k, top-p and min-p make of its logits;
    ``impossible`` where none can."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1).to(tl.int64)
    key = tl.load(keys + row * num_nodes + node).to(tl.uint64, bitcast=True)
    z = logits + row * by_row + node * by_node
    inverse = tl.load(warps + row * 4)
    top_p = tl.load(warps + row * 4 + 1)
    min_p = tl.load(warps + row * 4 + 2)
    top_k = tl.load(warps + row * 4 + 3)
    most, drawn = largest_logit(z, vocab_size, BLOCK)
    if (inverse > 0.0) & (drawn >= 0):
        # What a temperature near 0 would make infinite is compared with the largest.
        shift = tl.where(tl.abs(most * inverse) <= LARGEST, 0.0, most)
        top = (most - shift) * inverse
        kept = tl.full((), float("-inf"), tl.float32)
        if (top_k > 0) & (top_k < vocab_size):
            kept = (kth_logit(z, vocab_size, top_k.to(tl.int32), BLOCK) - shift) * inverse
        least = kept
        if min_p > 0.0:
            least = tl.maximum(kept, (top.to(tl.float64) + tl.log(min_p.to(tl.float64))).to(tl.float32))
        above = tl.full((), float("-inf"), tl.float32)
        drawn, here = race_above(z, vocab_size, inverse, shift, least, above, key, BLOCK)
        # No sorting: the winner over all is asked whether the tokens above it hold less than top-p. If not, neither it
        # nor any less probable one is kept, and the race is run again among those above it.
        asking = top_p < 1.0
        while asking:
            everything, more = masses(z, vocab_size, inverse, shift, kept, here, top, BLOCK)
            asking = (here < top) & (more >= top_p * everything)
            if asking:
                above = here
                drawn, here = race_above(z, vocab_size, inverse, shift, least, above, key, BLOCK)
    tl.store(out + row * num_nodes + node, tl.where(drawn < 0, impossible, drawn))


@triton.jit
def walk_kernel(drawn, tokens, parents, out, num_nodes, BLOCK: tl.constexpr):
    """One program a row: out [3 + N] is the number of kept nodes, the token after them, whether it is possible, and all
    nodes, those that are kept first, the root before its child."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < num_nodes
    token = tl.load(tokens + row * num_nodes + node, inside, -1)
    parent = tl.load(parents + row * num_nodes + node, inside, -1)
    order = tl.where(node == 0, 0, -1)  # of a kept node its depth, else -1
    at = tl.full((), 0, tl.int64)
    bonus = tl.load(drawn + row * num_nodes)
    count = tl.full((), 1, tl.int32)
    walking = bonus >= 0
    while walking:
        # Of equal siblings the first counts; a node comes after its parent.
        child = tl.min(tl.where((parent == at) & (token == bonus) & (node > 0) & inside, node, BLOCK), 0)
        walking = child < num_nodes
        if walking:
            order = tl.where(node == child, count, order)
            count += 1
            at = child.to(tl.int64)
            bonus = tl.load(drawn + row * num_nodes + child)
            walking = bonus >= 0
    rest = (inside & (order < 0)).to(tl.int32)
    order = tl.where(order < 0, count + tl.cumsum(rest, 0) - 1, order)
    out += row * (3 + num_nodes)
    tl.store(out, count.to(tl.int64))
    tl.store(out + 1, tl.maximum(bonus, 0))
    tl.store(out + 2, (bonus >= 0).to(tl.int64))
    tl.store(out + 3 + order, node.to(tl.int64), inside)


@triton.jit
def cdf_kernel(probs, uniforms, out, vocab_size, BLOCK: tl.constexpr):
    """One program a row: the first token of positive mass at which the sum exceeds ``uniform`` of the total."""
    row = tl.program_id(0).to(tl.int64)
    p = probs + row * vocab_size
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(p + tokens, tokens < vocab_size, 0.0).to(tl.float64), 0)
    point = tl.load(uniforms + row) * total
    reached = tl.full((), 0.0, tl.float64)
    winner = vocab_size - 1
    start = 0
    while start < vocab_size:
        tokens = start + tl.arange(0, BLOCK)
        mass = tl.load(p + tokens, tokens < vocab_size, 0.0).to(tl.float64)
        end = reached + tl.sum(mass, 0)  # added as the total was: the point is below the last of them
        if end > point:
            sums = reached + tl.cumsum(mass, 0)
            last = tl.max(tl.where(mass > 0.0, tokens, 0), 0)  # where the scan rounds below the sum
            winner = tl.min(tl.where((sums > point) & (mass > 0.0), tokens, last), 0)
            start = vocab_size
        reached = end
        start += BLOCK
    tl.store(out + row, winner.to(tl.int64))
