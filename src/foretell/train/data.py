"""Batches of texts of similar length: bounded by tokens with padding, and the same in every run of a seed."""

from collections.abc import Sequence

import torch

from foretell.core.noise import derive_seed

POOL = 32
"""Number of batches whose texts are sorted by length together: little padding, and batches stay mixed."""


def epoch_batches(lengths: Sequence[int], batch_tokens: int, *, seed: int, epoch: int) -> list[list[int]]:
    """All texts once, in batches of at most batch_tokens tokens, padding counted (a longer text is a batch alone)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch) & (2**63 - 1))
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1.0, sum(lengths) / max(1, len(lengths)))
    pool = max(1, int(POOL * batch_tokens / mean))
    batches: list[list[int]] = []
    for at in range(0, len(order), pool):
        batches += fill(sorted(order[at : at + pool], key=lambda i: lengths[i]), lengths, batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def sequential_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """All texts in their order."""
    return fill(range(len(lengths)), lengths, batch_tokens)


def fill(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Texts in this order, a batch ended before its padded size would pass batch_tokens."""
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


class Batches:
    """Batch number i of training, from 0 on, epoch after epoch: a pure function of (lengths, batch_tokens, seed, i)."""

    def __init__(self, lengths: Sequence[int], batch_tokens: int, *, seed: int) -> None:
        self._lengths, self._batch_tokens, self._seed = list(lengths), batch_tokens, seed
        self._first = [0]  # number of the first batch of each epoch known so far
        self._held: tuple[int, list[list[int]]] | None = None

    def epoch(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch."""
        if self._held is None or self._held[0] != epoch:
            self._held = (epoch, epoch_batches(self._lengths, self._batch_tokens, seed=self._seed, epoch=epoch))
        return self._held[1]

    def first(self, epoch: int) -> int:
        """Number of an epoch's first batch."""
        while len(self._first) <= epoch:
            self._first.append(self._first[-1] + len(self.epoch(len(self._first) - 1)))
        return self._first[epoch]

    def __getitem__(self, number: int) -> list[int]:
        """The texts of a batch."""
        epoch = max(0, len(self._first) - 2)
        while self.first(epoch) > number:
            epoch -= 1
        while self.first(epoch + 1) <= number:
            epoch += 1
        return self.epoch(epoch)[number - self.first(epoch)]
