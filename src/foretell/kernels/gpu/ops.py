"""The Triton kernels as operators of torch (``torch.ops.foretell``): one entry of a trace, one launch, on CUDA and ROCm.

Their slow twins are the torch branches of their callers, which serve every other device. As operators they are seen by
dispatch modes, and whoever registers an implementation for another device (``register``) runs them there: tests do, by
Triton's interpreter.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BLOCK = 1024
"""Tokens that a program looks at together."""

DRAW_BLOCK, DRAW_WARPS = 4096, 16
"""The same of a draw from logits, by one program a node: a vocabulary of 128,256 is 32 of them, and each waits for
memory."""

HEIGHT = {torch.float32: 16}
"""Most queries of a program of attention by dtype, else 64: products of float32 use no matrix units, and more of them than
16 do not fit in registers (7 KB a thread were spilled at 64)."""

SLOTS_EACH = 512
"""Slots that a program of attention reads: a row of 4,096 and 8 key-value heads keeps 64 programs busy."""

BLOCK_SLOTS = 64
"""Slots that lie side by side where a table says where they lie, and that a program of attention reads at once."""

MOST_NODES = 64
"""Above this a pass is a prompt's, and torch's attention serves it better."""

DISPATCH_KEYS = {"cuda": "CUDA"}
"""torch's dispatch keys of the types of devices that the kernels run on. Tests add one."""

_SIGNATURES = {
    "stream_keys": "(Tensor seeds, Tensor positions, Tensor index, int stream) -> Tensor",
    "race": "(Tensor probs, Tensor keys) -> Tensor",
    "race_scores": "(Tensor probs, Tensor keys) -> Tensor",
    "invert_cdf": "(Tensor probs, Tensor uniform) -> Tensor",
    "node_keys": "(Tensor seeds, Tensor positions, Tensor parents, int stream) -> Tensor",
    "draw": "(Tensor logits, Tensor warps, Tensor keys, int impossible) -> Tensor",
    "norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "place": "(Tensor qkv, Tensor? weight, float eps, Tensor cos, Tensor sin, Tensor? growth, Tensor slots,"
    " Tensor? table, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
    "attend": "(Tensor query, Tensor? table, Tensor keys, Tensor values, Tensor ancestry, Tensor length, Tensor positions,"
    " Tensor tree_positions, int span, int window, float scale, float cap) -> Tensor",
    "walk": "(Tensor drawn, Tensor tokens, Tensor parents) -> Tensor",
}


@lru_cache
def ops(device_type: str) -> Any | None:
    """``torch.ops.foretell`` where its kernels run on a device; None elsewhere, and where Triton is not installed."""
    key = DISPATCH_KEYS.get(device_type)
    return None if key is None or find_spec("triton") is None else register(key)


@lru_cache
def register(key: str) -> Any:
    """``torch.ops.foretell`` with its kernels for one dispatch key of torch. Imports Triton."""
    for name in _SIGNATURES:
        _library().impl(name, globals()[f"_{name}"], key)  # type: ignore[no-untyped-call]
    return torch.ops.foretell


@lru_cache
def _library() -> torch.library.Library:
    library = torch.library.Library("foretell", "DEF")  # type: ignore[no-untyped-call]
    for name, signature in _SIGNATURES.items():
        library.define(name + signature)  # type: ignore[no-untyped-call]
    return library


def _kernels(name: str) -> Any:
    """A module of kernels; they need Triton."""
    return import_module(f"foretell.kernels.gpu.{name}")


def _stream_keys(seeds: Tensor, positions: Tensor, index: Tensor, stream: int) -> Tensor:
    """int64 keys of int64 seeds, positions and index, broadcast; at most two dimensions."""
    parts = torch.broadcast_tensors(seeds, positions, index)  # type: ignore[no-untyped-call]
    shape = parts[0].shape
    parts = [part if part.ndim == 2 else part[None] if part.ndim == 1 else part.reshape(1, 1) for part in parts]
    out = seeds.new_empty(shape)
    num_rows, num_columns = parts[0].shape
    strides = [stride for part in parts for stride in part.stride()]
    if out.numel():
        _kernels("draws").keys_kernel[(num_rows,)](*parts, out, num_columns, stream, *strides, BLOCK=64)
    return out


def _race(probs: Tensor, keys: Tensor) -> Tensor:
    """[...] int64 winners of probs [..., V] under int64 keys [...]: ``core.noise.race``."""
    probs, out = probs.contiguous(), torch.empty(keys.shape, dtype=torch.int64, device=keys.device)
    if keys.numel():
        _kernels("draws").race_kernel[(keys.numel(),)](probs, keys.contiguous(), out, probs.shape[-1], BLOCK=BLOCK)
    return out


def _race_scores(probs: Tensor, keys: Tensor) -> Tensor:
    """[..., V] float32 p / E."""
    probs = probs.contiguous()
    out = torch.empty(probs.shape, dtype=torch.float32, device=probs.device)
    if keys.numel():
        grid = (keys.numel(), -(-probs.shape[-1] // BLOCK))
        _kernels("draws").scores_kernel[grid](probs, keys.contiguous(), out, probs.shape[-1], BLOCK=BLOCK)
    return out


def _invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B] int64: ``kernels.small.invert_cdf``."""
    out = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    if len(probs):
        _kernels("draws").cdf_kernel[(len(probs),)](
            probs.contiguous(), uniform.contiguous(), out, probs.shape[1], BLOCK=BLOCK
        )
    return out


def _node_keys(seeds: Tensor, positions: Tensor, parents: Tensor, stream: int) -> Tensor:
    """[B, N] int64 keys of the tokens that follow the nodes of trees [B, N]; seeds and positions, of the roots, [B]."""
    parents = parents.contiguous()
    num_rows, num_nodes = parents.shape
    out = torch.empty_like(parents)
    if out.numel():
        _kernels("draws").node_keys_kernel[(num_rows,)](
            seeds.contiguous(), positions.contiguous(), parents, out, num_nodes, stream, BLOCK=_at_least(num_nodes)
        )
    return out


def _draw(logits: Tensor, warps: Tensor, keys: Tensor, impossible: int) -> Tensor:
    """[B, N] int64: the token that wins the race in each of logits [B, N, V] under keys [B, N]; ``impossible`` where no
    token can. warps: ``Processors.warp_table``."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, num_nodes, vocab_size = logits.shape
    out = torch.empty(keys.shape, dtype=torch.int64, device=keys.device)
    if keys.numel():
        _kernels("draws").draw_kernel[(num_rows, num_nodes)](
            logits, warps, keys.contiguous(), out,
            num_nodes, vocab_size, *logits.stride()[:2], impossible, BLOCK=DRAW_BLOCK, num_warps=DRAW_WARPS,
        )  # fmt: skip
    return out


def _walk(drawn: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """[B, 3 + N] int64: the walk of exact match down each row's tree by the tokens drawn after its nodes, all [B, N].

    A row is the number of kept nodes, the token drawn after them, 1 where that is possible (else 0), and the nodes, those
    that are kept first, the root before its child.
    """
    num_rows, num_nodes = parents.shape
    out = parents.new_empty(num_rows, 3 + num_nodes)
    if num_rows:
        _kernels("draws").walk_kernel[(num_rows,)](
            drawn.contiguous(), tokens.contiguous(), parents.contiguous(), out, num_nodes, BLOCK=_at_least(num_nodes)
        )
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H] x of any float type, its rows' mean square 1, times weight [H]."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    if x.numel():
        _kernels("layers").norm_kernel[(x.numel() // size,)](x, weight, out, size, eps, BLOCK=_at_least(size))
    return out


def _place(
    qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, growth: Tensor | None, slots: Tensor,
    table: Tensor | None, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """[B, heads, n, D] queries of qkv [B, n, (heads + 2 kv heads) * D], turned; keys and values [B, kv heads, S, D] of one
    layer are written at slots [B, n]; with a table, where that says (``model.blocks``).

    weight: [heads + kv heads, D] of a norm of each head, or None. cos and sin: [B, n, 1, D], the first half of sin
    negated. growth: a factor of queries [B, n, 1, 1], or None.
    """
    qkv, slots = qkv.contiguous(), slots.contiguous()
    num_rows, num_nodes, width = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    heads = width // dim - 2 * kv_heads
    queries = qkv.new_empty(num_rows, heads, num_nodes, dim)
    if qkv.numel():
        _kernels("layers").place_kernel[(num_rows * num_nodes, heads + 2 * kv_heads)](
            qkv, qkv if weight is None else weight, cos.contiguous(), sin.contiguous(),
            qkv if growth is None else growth.contiguous(), slots, slots if table is None else table, queries, keys, values,
            0 if table is None else table.stride(0), num_nodes, width, heads, kv_heads, dim, eps,
            *keys.stride()[:2], *values.stride()[:2],
            HAS_NORM=weight is not None, HAS_GROWTH=growth is not None, HAS_TABLE=table is not None, SLOTS=BLOCK_SLOTS,
            BLOCK=_at_least(dim),
        )  # fmt: skip
    return queries


def _attend(
    query: Tensor, table: Tensor | None, keys: Tensor, values: Tensor, ancestry: Tensor, length: Tensor, positions: Tensor,
    tree_positions: Tensor, span: int, window: int, scale: float, cap: float,
) -> Tensor:  # fmt: skip
    """[B, n, heads * D] of queries [B, heads, n, D] over the first ``span`` slots of keys and values [B, kv heads, S, D],
    which with a table lie where that says.

    The rest is a ``Plan``'s: ancestry [B, n, N], length [B], positions [B, n], tree_positions [B, N]. window: how many
    positions a query sees, 0: all; cap: scores pass cap * tanh(score / cap), 0: none.
    """
    query, ancestry = query.contiguous(), ancestry.contiguous()
    num_rows, heads, num_nodes, dim = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    num_queries, num_parts = group * num_nodes, -(-span // SLOTS_EACH)
    out = query.new_empty(num_rows, num_nodes, heads * dim)
    if not query.numel():
        return out
    partial = query.new_empty(num_rows * kv_heads, num_parts, num_queries, dim, dtype=torch.float32)
    sums = partial.new_empty(num_rows * kv_heads, num_parts, num_queries, 2)
    rows = min(max(16, _at_least(num_queries)), HEIGHT.get(query.dtype, 64))
    kernels, wide = _kernels("attention"), max(16, _at_least(dim))
    kernels.attend_kernel[(num_rows * kv_heads, num_parts, -(-num_queries // rows))](
        query, length if table is None else table, keys, values, ancestry.view(torch.uint8), length.contiguous(), positions,
        tree_positions, partial, sums, 0 if table is None else table.stride(0), kv_heads, group,
        num_nodes, ancestry.shape[2], dim, SLOTS_EACH, window, scale, cap,
        *keys.stride()[:2], *values.stride()[:2], *ancestry.stride()[:2], positions.stride(0), tree_positions.stride(0),
        HAS_TABLE=table is not None, HAS_WINDOW=window > 0, HAS_CAP=cap > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        ROWS=rows, SLOTS=BLOCK_SLOTS, DIM=wide,
    )  # fmt: skip
    kernels.join_kernel[(num_rows * kv_heads, num_queries)](
        partial, sums, out, kv_heads, group, num_nodes, num_parts, dim, PARTS=_at_least(num_parts), DIM=wide
    )
    return out


def _at_least(count: int) -> int:
    """The next power of 2."""
    return 1 << (count - 1).bit_length()
