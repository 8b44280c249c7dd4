"""What is kept of a served text: its tokens, and the target's distribution of each token that it wrote.

A distribution is held as its most probable tokens with their log probabilities, and the log of what is left: 64 of them
take 6 bytes each instead of 4 for every token of the vocabulary. Hidden states, which are most of a text, are held in 8
bits.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from foretell.heads.stored_outputs import opened, rounded
from foretell.heads.teacher import ComputedBatch, TeacherBatch

Sketch = NDArray[np.float64]
"""[BINS], of length 1."""
BINS = 256
READ = 512
"""Tokens of a prompt that count, the last ones."""
MOST_WEIGHT = 12.0
"""Prompts that a cluster weighs as at most, so that it follows those of late."""


def sketch(prompt: Iterable[int]) -> Sketch:
    """Of token ids."""
    tokens = np.fromiter(prompt, dtype=np.uint64)[-READ:]
    bins = (tokens * np.uint64(0x9E3779B1) >> np.uint64(7)) % np.uint64(BINS)
    found = np.sqrt(np.bincount(bins.astype(np.int64), minlength=BINS))
    length = float(np.linalg.norm(found))
    return found / length if length else found


@dataclass
class Clusters:
    """At most ``most`` of them. Not thread-safe.

    Every prompt begins as a cluster of its own, and where there are too many, those two become one that are
    cheapest to join: n m / (n + m) (1 - cosine), Ward's criterion (1963). So whatever came first keeps no more
    clusters than it deserves: with a threshold instead, the first requests of one kind took all of them, and every
    later kind fell into one.
    """

    most: int
    centres: list[Sketch] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, given: Sketch) -> None:
        """Take in a sketch: as a cluster of its own, where two others are joined for it, or into the nearest."""
        if len(self.centres) < self.most:
            self.centres.append(given)
            self.weights.append(1.0)
            return
        count, centres, weights = self.most, [*self.centres, given], [*self.weights, 1.0]
        unit = np.stack([centre / max(float(np.linalg.norm(centre)), 1e-9) for centre in centres])
        apart, n = 1.0 - unit @ unit.T, np.array(weights)
        cost = apart * n[:, None] * n / (n[:, None] + n)
        cost[np.tril_indices(count + 1)] = np.inf
        into, gone = (int(x) for x in np.unravel_index(int(cost.argmin()), cost.shape))  # into < gone
        total = weights[into] + weights[gone]
        self.centres[into] = (weights[into] * centres[into] + weights[gone] * centres[gone]) / total
        self.weights[into] = min(total, MOST_WEIGHT)
        if gone != count:
            self.centres[gone], self.weights[gone] = given, 1.0

    def of(self, sketches: Sequence[Sketch]) -> list[int]:
        """The nearest cluster of each sketch now; 0 where there is none yet."""
        if not sketches or not self.centres:
            return [0] * len(sketches)
        unit = np.stack([centre / max(float(np.linalg.norm(centre)), 1e-9) for centre in self.centres])
        found: list[int] = (np.stack(sketches) @ unit.T).argmax(1).tolist()
        return found


COLDEST, HOTTEST = 1e-3, 1e3
"""Temperatures between which a law differs from a greedy and from an even one: beyond them a text is learned as one of
those, since logits divided by less, or multiplied by more, are no numbers any more."""
NUM_LAWS = 64  # most probable tokens kept of each distribution
LEAST_TAIL = 1e-7
"""The least mass of the tokens that are not held: half precision knows no less of 1."""


@dataclass(frozen=True)
class Text:
    """A prompt, the target's n tokens after it, and their distributions. T tokens in all."""

    tokens: Tensor  # [T] int32
    start: int  # index of the first token of the response: T - start = n
    temperature: float  # of the request; the distributions are at this one, or at 1 where it is 0
    ids: Tensor  # [n, K] int32 most probable tokens, by rank
    logs: Tensor  # [n, K] float16 their log probabilities
    tail: Tensor  # [n] float16 log probability of all others together
    taps: Tensor | None = None  # of ``kept.rounded``, [T, ...] int8; the last is unused

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = (self.tokens, self.ids, self.logs, self.tail, *(() if self.taps is None else (self.taps,)))
        return sum(each.nbytes for each in held)

    @cached_property
    def sketch(self) -> Sketch:
        """Of its prompt, by which its kind of request is found."""
        return sketch(self.prompt)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its prompt, by which equal requests are known."""
        return tuple(self.tokens[: self.start].tolist())

    @property
    def is_finite(self) -> bool:
        """Whether all that was captured are numbers: half precision holds hidden states up to 65,504."""
        held = (self.logs, self.tail, *(() if self.taps is None else (opened(self.taps),)))
        return all(bool(torch.isfinite(each).all()) for each in held)

    def cut(self, longest: int) -> "Text | None":
        """Its first ``longest`` tokens; None where fewer than two of them are the target's."""
        if len(self.tokens) <= longest:
            return self
        count = longest - self.start
        if count < 2:
            return None
        taps = None if self.taps is None else self.taps[:longest].clone()
        ids, logs, tail = (each[:count].clone() for each in (self.ids, self.logs, self.tail))
        return Text(self.tokens[:longest].clone(), self.start, self.temperature, ids, logs, tail, taps)

    def laws(self, vocab_size: int) -> Tensor:
        """[n, V] float32 log probabilities; what is not held is spread evenly over the other tokens."""
        others = max(1, vocab_size - self.ids.shape[1])
        even = self.tail.float()[:, None] - math.log(others)
        return even.expand(-1, vocab_size).clone().scatter_(1, self.ids.long(), self.logs.float())

    def labeled(self, vocab_size: int) -> ComputedBatch:
        """As training reads it: a batch of one text. Logits are the log probabilities times the temperature, so that a loss
        at that temperature has them back; where no token was written they are 0, and not supervised."""
        length = torch.tensor([len(self.tokens)])
        batch = TeacherBatch(self.tokens.long()[None], length, torch.tensor([self.start]))
        logits = torch.zeros(1, len(self.tokens), vocab_size)
        logits[0, self.start - 1 : self.start - 1 + len(self.ids)] = self.laws(vocab_size) * self.loss_temperature
        taps = torch.zeros(1, len(self.tokens), 0) if self.taps is None else opened(self.taps)[None]
        return ComputedBatch(batch, taps, taps, logits)

    @property
    def loss_temperature(self) -> float:
        """Of both distributions when they are compared: 1 for greedy requests, whose own law says only which is first."""
        return self.temperature or 1.0


@dataclass(frozen=True)
class RawText:
    """A text as it was captured: logits of every place, not yet reduced to the most probable tokens."""

    tokens: list[int]
    start: int
    temperature: float
    logits: list[Tensor]  # blocks [*, V] half precision, n rows in all
    taps: Tensor | None = None  # [T, layers * H] float16 outputs of the layers that the drafter reads

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self.logits) + (0 if self.taps is None else self.taps.nbytes)

    def reduced(self, num_laws: int = NUM_LAWS) -> Text:
        """The text as it is kept."""
        temperature = min(self.temperature, HOTTEST) if self.temperature >= COLDEST else 0.0
        ids, logs, tail = reduce_laws(torch.cat(self.logits), temperature or 1.0, num_laws)
        taps = None if self.taps is None else rounded(self.taps)
        return Text(torch.tensor(self.tokens, dtype=torch.int32), self.start, temperature, ids, logs, tail, taps)


def reduce_laws(logits: Tensor, temperature: float, num_laws: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [n, K] int32, logs [n, K] float16, tail [n] float16) of logits [n, V]; K = num_laws, at most V."""
    log_p = F.log_softmax(logits.float() / temperature, -1)
    top = log_p.topk(min(num_laws, log_p.shape[-1]), -1)
    rest = (1.0 - top.values.exp().sum(-1)).clamp_min(LEAST_TAIL)
    return top.indices.int(), top.values.clamp_min(-60.0).half(), rest.log().half()


class ReplayBuffer:
    """Texts within a number of bytes: the oldest are dropped. At most ``same`` texts have one prompt, so that a client who
    repeats itself does not crowd out the others."""

    def __init__(self, max_bytes: int, *, same: int = 2) -> None:
        self.max_bytes, self.same, self.num_bytes = max_bytes, same, 0
        self._texts: deque[Text] = deque()

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[Text]:
        return iter(self._texts)

    def add(self, text: Text) -> None:
        """Keep a text, unless it alone is larger than the buffer."""
        alike = [old for old in self._texts if old.prompt == text.prompt]
        if len(alike) >= self.same:
            self._drop(alike[0])
        if text.num_bytes > self.max_bytes:
            return
        self._texts.append(text)
        self.num_bytes += text.num_bytes
        self.within(self.max_bytes)

    def _drop(self, text: Text) -> None:
        index = next(index for index, old in enumerate(self._texts) if old is text)
        del self._texts[index]
        self.num_bytes -= text.num_bytes

    def within(self, max_bytes: int) -> None:
        """Another number of bytes from now on."""
        self.max_bytes = max_bytes
        while self._texts and self.num_bytes > max_bytes:
            self._drop(self._texts[0])

    def sample(self, count: int, pick: Callable[[int], int], kinds: Clusters | None = None) -> list[Text]:
        """At most ``count`` different texts, of every kind with the same chance: what has become rare is not forgotten for
        that. pick(n) is a random number below n."""
        texts, left = list(self._texts), dict[int, list[Text]]()
        for text, kind in zip(texts, kinds_of(texts, kinds), strict=True):
            left.setdefault(kind, []).append(text)
        found: list[Text] = []
        while left and len(found) < count:
            kind = list(left)[pick(len(left))]
            found.append(left[kind].pop(pick(len(left[kind]))))
            if not left[kind]:
                del left[kind]
        return found


def kinds_of(texts: Sequence[Text], kinds: Clusters | None) -> list[int]:
    """The kind of each text's request; all one where none are given."""
    return [0] * len(texts) if kinds is None else kinds.of([text.sketch for text in texts])
