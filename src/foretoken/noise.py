"""Keyed noise: every random number of foretoken is a pure function of what it is for.

A stateless counter hash (the finaliser of splitmix64, Steele et al. 2014) of (seed, position, stream, index) gives a
key; a key and a token id give an exponential variate, a key alone a uniform. Only integer operations on int64 come
before the last conversion to floating point, so the bits are the same on every device, in every batch and at every width.

Streams, and why they are keyed as they are:

* COUPLED by (seed, absolute position of the token to be drawn) and token id, by nothing else: never by row, node, draft
  length, padding or draft vocabulary. "Accept iff equal" may share it between drafter and target.
* DRAFT, STOP and BONUS by (seed, position of the step's root, index): a draw that was discarded never comes back in the
  next step, and no two nodes of a step share one. "Accept with min(1, p/q)" needs all of them independent.

Parts are hashed one into the next, never added: with ``seed + position`` adjacent seeds would share a shifted stream.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


class Stream(IntEnum):
    """What a random number is for. Each value is hashed into the key, so streams never meet."""

    COUPLED = 1
    DRAFT = 2
    STOP = 3
    BONUS = 4


def _signed(x: int) -> int:
    """The int64 that has the low 64 bits of x."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 that flips each output bit with probability one half (splitmix64's finaliser)."""
    # >> is arithmetic on int64: the mask makes it logical.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MULTIPLIER_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MULTIPLIER_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def mix_int(x: int) -> int:
    """``mix`` of one Python integer, as an unsigned 64-bit value: the slow twin, and for host-side seeds."""
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
    key = mix(seeds + _signed(_GOLDEN * (int(stream) + 1)))
    key = mix(key ^ mix(positions + _signed(_GOLDEN)))
    if isinstance(index, int) and index == 0:
        return mix(key)
    return mix(key ^ (index * _signed(_MULTIPLIER_1 | 1) if isinstance(index, Tensor) else _signed(index * _MULTIPLIER_1)))


def uniforms(keys: Tensor) -> Tensor:
    """float64 in the open interval (0, 1), one a key, 53 bits."""
    return (((keys >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


@lru_cache(maxsize=8)
def _token_table(vocab_size: int, device: torch.device) -> Tensor:
    # Hashed so that the sum of a key and an entry has no structure in either.
    return mix(torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN))


def exponentials(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 [..., V], rate-1 exponentials E by key and token id; keys int64 [...].

    ``argmax(p / E)`` draws from p, and is the Gumbel-max draw, since -log E is Gumbel: one logarithm fewer, and no
    normalisation. Small E decide, so they are the exact ones: E = -log1p(-w) with w = (h + 1/2) / 2^32 from 32 bits
    has full relative precision down to 1.2e-10; w rounds up to 1 in the other tail, where E is cut at 16.6.
    """
    bits = mix(keys[..., None] + _token_table(vocab_size, keys.device))
    w = (((bits >> 32) & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-w.clamp_(max=1.0 - 2.0**-24))


@dataclass(frozen=True)
class Noise:
    """The noise of one step of B rows. Everything is computed on demand and remembered: a drafter and the verifier
    that ask for the same depth get the same tensor."""

    seeds: Tensor  # [B] int64, one a request
    positions: Tensor  # [B] int64, position of the step's root
    vocab_size: int  # of the target; a drafter with fewer tokens reads the first columns
    _memo: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def coupled_rows(self, num_depths: int) -> Tensor:
        """[B, D, V] float32 exponentials for the tokens that follow nodes of depth 0 .. D-1 (root: 0).

        Whoever first knows how deep a step goes asks for all depths at once: one hash instead of D.
        """
        if not self._memo or self._memo[0].shape[1] < num_depths:
            depth = torch.arange(1, num_depths + 1, device=self.positions.device)
            keys = stream_keys(self.seeds[:, None], self.positions[:, None] + depth, Stream.COUPLED)
            self._memo[:] = [exponentials(keys, self.vocab_size)]
        return self._memo[0][:, :num_depths]

    def coupled(self, depth: int) -> Tensor:
        """[B, V] float32 exponentials for the token that follows a node at this depth."""
        return self.coupled_rows(depth + 1)[:, depth]

    def draft(self, node: int) -> Tensor:
        """[B] float64 uniforms for the draw of node ``node``."""
        return uniforms(stream_keys(self.seeds, self.positions, Stream.DRAFT, node))

    def stop(self) -> Tensor:
        """[B] float64 uniforms that decide where the walk stops."""
        return uniforms(stream_keys(self.seeds, self.positions, Stream.STOP))

    def bonus(self) -> Tensor:
        """[B] float64 uniforms for the extra token."""
        return uniforms(stream_keys(self.seeds, self.positions, Stream.BONUS))
