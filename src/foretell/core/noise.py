"""Keyed noise: every random number of foretell is a pure function of its purpose.

A stateless counter hash (the finaliser of splitmix64, Steele et al. 2014) of (seed, position, stream, index) gives a
key; a key and a token id give an exponential variate, a key alone a uniform. Only integer operations on int64 come
before the last conversion to floating point, so the bits are the same on every device, in every batch and at every width.

Streams, and why they are keyed as they are:

* COUPLED by (seed, absolute position of the token to be drawn) and token id, by nothing else: never by row, node, number
  of guesses, padding, draft vocabulary. "Accept iff equal" may share it between drafter and target. Its index is 0.
* DRAFT, RACE, STOP and BONUS by (seed, position of the step's root, index): a draw that was discarded is never
used again in the next step, and no two nodes of a step share one. "Accept with min(1, p/q)" needs all of them
independent.
  DRAFT gives a node the uniform of its own draw, RACE a parent the exponentials by which its children are drawn without
  replacement.

Parts are hashed one into the next, never added: with ``seed + position`` adjacent seeds would share a shifted stream.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.core.upload import tensor_on
from foretell.kernels.gpu.ops import ops
from foretell.kernels.small import race_library

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


class Stream(IntEnum):
    """The purpose of a random number. Each value is hashed into the key, so streams are independent."""

    COUPLED = 1
    DRAFT = 2
    STOP = 3
    BONUS = 4
    RACE = 5


def _signed(x: int) -> int:
    """The int64 that has the low 64 bits of x."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def int64_seed(seed: int) -> int:
    """A user's seed of any size and sign as torch takes it: itself where it fits 64 bits, else its low ones."""
    return _signed(seed)


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 that flips each output bit with probability one half (splitmix64's finaliser)."""
    # >> is arithmetic on int64: the mask makes it logical.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MULTIPLIER_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MULTIPLIER_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def mix_int(x: int) -> int:
    """``mix`` of one Python integer, as an unsigned 64-bit value: the slow reference, also used for host-side seeds."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK64
    return x ^ (x >> 31)


def derive_seed(*parts: int) -> int:
    """One signed 64-bit seed from several integers, e.g. (user seed, index of the sample): hashed, never added."""
    key = 0
    for part in parts:
        key = mix_int(mix_int(key + _GOLDEN) ^ (part & _MASK64))
    return _signed(mix_int(key))


def stream_keys(seeds: Tensor, positions: Tensor, stream: Stream, index: Tensor | int = 0) -> Tensor:
    """int64 keys; seeds, positions and index are int64 and broadcast against each other."""
    if (gpu := ops(seeds.device.type)) is not None:
        made: Tensor = gpu.stream_keys(seeds, positions, _index_tensor(index, seeds.device), int(stream))
        return made
    library = race_library() if seeds.device.type == "cpu" else None
    if library is None:
        key = mix(mix(seeds + _signed(_GOLDEN)) ^ _signed(_MULTIPLIER_2 * int(stream)))
        key = mix(key ^ mix(positions + _signed(_GOLDEN)))
        return mix(
            key ^ (index * _signed(_MULTIPLIER_1) if isinstance(index, Tensor) else _signed(index * _MULTIPLIER_1))
        )
    # A dozen torch operations on a handful of integers would cost more than the kernels of a small model.
    indices = _index_tensor(index, seeds.device)
    if not seeds.dtype == positions.dtype == indices.dtype == torch.int64:
        raise ConfigError(
            f"seeds, positions and index are int64; given {seeds.dtype}, {positions.dtype}, {indices.dtype}"
        )
    seeds, positions, indices = (x.contiguous() for x in torch.broadcast_tensors(seeds, positions, indices))  # type: ignore[no-untyped-call]
    keys = torch.empty_like(positions)
    library.foretell_stream_keys(
        keys.numel(), seeds.data_ptr(), positions.data_ptr(), indices.data_ptr(), int(stream), keys.data_ptr()
    )
    return keys


def _index_tensor(index: Tensor | int, device: torch.device) -> Tensor:
    return index if isinstance(index, Tensor) else _number(index, device)


@lru_cache(maxsize=256)
def _number(number: int, device: torch.device) -> Tensor:
    return tensor_on(device, number)


@lru_cache(maxsize=64)
def _depth_offsets(num_depths: int, device: torch.device) -> Tensor:
    return torch.arange(1, num_depths + 1, device=device)


def uniforms(keys: Tensor) -> Tensor:
    """float64 in the open interval (0, 1), one a key, 52 bits: with 53 the largest would be rounded up to 1."""
    return (((keys >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


@lru_cache(maxsize=8)
def token_table(vocab_size: int, device: torch.device) -> Tensor:
    """[V] int64: what ``kernels/race.c`` adds to a key for each token id. Shared between calls: never write to it."""
    # Hashed so that the sum of a key and an entry has no structure in either.
    return mix(torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN))


def exponentials(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 [..., V], rate-1 exponentials E by key and token id; keys int64 [...].

    ``argmax(p / E)`` draws from p, and is the Gumbel-max draw, since -log E is Gumbel: one logarithm fewer, and no
    normalisation. Small E decide, so they are the exact ones: E = -log1p(-w) with w = (h + 1/2) / 2^32 from 32 bits
    has full relative precision down to 1.2e-10; w rounds up to 1 in the other tail, where E is cut at 16.6.
    """
    bits = mix(keys[..., None] + token_table(vocab_size, keys.device))
    w = (((bits >> 32) & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-w.clamp_(max=1.0 - 2.0**-24))


def _check_keys(probs: Tensor, keys: Tensor) -> None:
    """One key for each row of probs: the kernels read by address."""
    if keys.shape != probs.shape[:-1] or keys.dtype != torch.int64 or keys.device != probs.device:
        raise ConfigError(
            f"a race over distributions {tuple(probs.shape)} on {probs.device} takes int64 keys "
            f"{tuple(probs.shape[:-1])} there; "
            f"given {keys.dtype} {tuple(keys.shape)} on {keys.device}"
        )


def race(probs: Tensor, keys: Tensor) -> Tensor:
    """[...] int64: the token that wins ``argmax(probs / E)`` in each row of probs [..., V], E keyed by keys [...].

    A draw from distribution. Tokens without mass never win against one that has some; in a row without any (or of NaN
    alone) the result is some token without positive mass. float32 rows on the CPU go through ``kernels/race.c`` where it
    was built: 25 times faster than the exponentials of a whole vocabulary, and equal to them up to the last bits of a
    logarithm.
    """
    library = race_library() if probs.device.type == "cpu" and probs.dtype == torch.float32 else None
    _check_keys(probs, keys)
    if library is None:
        gpu = ops(probs.device.type) if probs.dtype != torch.float64 else None
        won: Tensor = (probs / exponentials(keys, probs.shape[-1])).argmax(-1) if gpu is None else gpu.race(probs, keys)
        return won
    probs, keys = probs.contiguous(), keys.contiguous()
    winners = torch.empty_like(keys)
    table = token_table(probs.shape[-1], probs.device)
    library.foretell_race(
        keys.numel(), probs.shape[-1], probs.data_ptr(), keys.data_ptr(), table.data_ptr(), winners.data_ptr()
    )
    return winners


def race_top(probs: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(tokens [..., count] int64, scores [..., count]): the first ``count`` of the race ``argmax(probs / E)``.

    In this order they are ``count`` successive draws without replacement from probs [..., V] (Efraimidis and Spirakis 2006;
    Kool et al. 1903.06059). Where fewer tokens have mass, the rest have scores of at most 0 and are undefined. Ties, of
    probability 0, go to the lower id. float32 rows on the CPU go through ``kernels/race.c``, as in ``race``.
    """
    _check_keys(probs, keys)
    native = _native_top(probs, keys, count)
    if native is not None:
        return native
    gpu = ops(probs.device.type) if probs.dtype != torch.float64 else None
    scores = probs / exponentials(keys, probs.shape[-1]) if gpu is None else gpu.race_scores(probs, keys)
    return _largest(scores, count)


def top(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(tokens [..., count] int64, probabilities [..., count]): the most probable of probs [..., V], ties to the lower id.

    ``Tensor.topk`` promises nothing for ties, and low-precision logits have many. Where fewer tokens have mass, the
    rest have probabilities of at most 0 and are undefined.
    """
    native = _native_top(probs, None, count)
    return native if native is not None else _largest(probs, count)


def _native_top(probs: Tensor, keys: Tensor | None, count: int) -> tuple[Tensor, Tensor] | None:
    """``race_top`` (``top`` without keys) by race.c; None where it does not apply."""
    library = race_library() if probs.device.type == "cpu" and probs.dtype == torch.float32 else None
    if count < 1:
        raise ConfigError(f"count is at least 1; given {count}")
    if library is None:
        return None
    probs, vocab_size = probs.contiguous(), probs.shape[-1]
    keys = None if keys is None else keys.contiguous()
    tokens = torch.empty(*probs.shape[:-1], count, dtype=torch.int64)
    scores = torch.empty(*probs.shape[:-1], count)
    library.foretell_race_top(
        probs.numel() // vocab_size,
        vocab_size,
        probs.data_ptr(),
        None if keys is None else keys.data_ptr(),
        token_table(vocab_size, probs.device).data_ptr(),
        count,
        tokens.data_ptr(),
        scores.data_ptr(),
    )
    return tokens, scores


def _largest(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scores: the slow reference. Only a stable sort sends ties to the lower id; NaN comes
    last."""
    score = torch.nan_to_num(score, nan=-1.0, posinf=torch.inf)
    if count == 1:
        best, token = score.max(-1, keepdim=True)
        return token, best
    best, token = score.sort(dim=-1, descending=True, stable=True)
    best, token = best[..., :count], token[..., :count]
    short = count - token.shape[-1]
    if short > 0:
        best, token = (torch.nn.functional.pad(x, (0, short)) for x in (best, token))
    return token, best


@dataclass(frozen=True)
class Noise:
    """The noise of one step of B rows. It holds only keys, so a drafter and a verifier get equal values for equal
    calls.

    The only source of randomness that a drafter or a verifier may use, so that a seed reproduces a text. It has no
    state. A drafter uses ``coupled_keys`` and the streams DRAFT and RACE, a verifier COUPLED; STOP and BONUS
    are ``verify.drawing.draw``'s own.
    """

    seeds: Tensor  # [B] int64, one a request
    positions: Tensor  # [B] int64, position of the step's root
    _memo: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def coupled_keys(self, num_depths: int) -> Tensor:
        """[B, D] int64 keys of the tokens that follow nodes of depth 0 .. D-1 (root: 0).

        The first caller that knows the depth of a step computes all depths at once: one hash instead of D.
        """
        if not self._memo or self._memo[0].shape[1] < num_depths:
            depth = _depth_offsets(num_depths, self.positions.device)
            self._memo[:] = [stream_keys(self.seeds[:, None], self.positions[:, None] + depth, Stream.COUPLED)]
        return self._memo[0][:, :num_depths]

    def coupled_key(self, row: int, depth: int) -> int:
        """Entry [row, depth] of ``coupled_keys``, on the host: a walk needs few of them, and after a pass, with cold
        caches, the tensors of one call take longer than the draw."""
        if self._memo and depth < self._memo[0].shape[1]:
            return int(self._memo[0][row, depth])
        seed, position = int(self.seeds[row]), int(self.positions[row]) + depth + 1
        # ``stream_keys`` in Python integers, for index 0.
        key = mix_int(mix_int(seed + _GOLDEN) ^ (_MULTIPLIER_2 * int(Stream.COUPLED) & _MASK64))
        return _signed(mix_int(mix_int(key ^ mix_int(position + _GOLDEN))))

    def draft(self, node: int) -> Tensor:
        """[B] float64 uniforms for the draw of node ``node``."""
        return uniforms(stream_keys(self.seeds, self.positions, Stream.DRAFT, node))

    def draft_nodes(self, start: int, count: int) -> Tensor:
        """[B, count] float64: ``draft`` of nodes [start, start + count)."""
        index = _depth_offsets(start + count, self.positions.device)[start:] - 1
        return uniforms(stream_keys(self.seeds[:, None], self.positions[:, None], Stream.DRAFT, index))

    def draft_at(self, numbers: Tensor) -> Tensor:
        """[B, K] float64: ``draft`` of the nodes numbers [K]."""
        return uniforms(stream_keys(self.seeds[:, None], self.positions[:, None], Stream.DRAFT, numbers))

    def race_at(self, numbers: Tensor) -> Tensor:
        """[B, K] int64 keys, one for each of the parents numbers [K]: its children drawn without replacement are the
        first of the race that q runs under it."""
        return stream_keys(self.seeds[:, None], self.positions[:, None], Stream.RACE, numbers)

    def stop(self) -> Tensor:
        """[B] float64 uniforms that decide where the walk stops."""
        return uniforms(stream_keys(self.seeds, self.positions, Stream.STOP))

    def bonus(self) -> Tensor:
        """[B] float64 uniforms for the bonus."""
        return uniforms(stream_keys(self.seeds, self.positions, Stream.BONUS))
