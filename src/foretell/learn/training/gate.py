"""Whether what was learned may serve: held-out texts decide, recent and old ones."""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from foretell.learn.training.texts import Clusters, Text, kinds_of

MIN_GAIN = 0.005  # of held-out acceptance, for a swap
MAX_LOSS = 0.02  # on old held-out texts, against the best that has served
CONFIDENCE = 1.0
"""Standard errors by which the gain on recent texts must exceed zero: one of six lucky updates that gain nothing passes
that, and must gain MIN_GAIN besides."""


LEAST = 4
"""Fewest held-out texts with which the gate decides anything."""


@dataclass(frozen=True)
class Verdict:
    """Means over held-out texts of the expected share of guesses kept, before and after."""

    passes: bool
    reason: str
    old_before: float | None  # None: there are no old ones yet
    old_after: float | None


def judge(recent: tuple[Sequence[float], Sequence[float]], old: tuple[Sequence[float], Sequence[float]]) -> Verdict:
    """The scores of the same texts (before, after). It passes where recent ones gain at least MIN_GAIN, and more than
    their spread explains, and old ones lose at most MAX_LOSS and no more than recent ones gain: requests come back,
    and a drafter that gives a hundredth here for two there has not learned but changed its mind."""
    gains = [after - before for before, after in zip(*recent, strict=True)]
    losses = [before - after for before, after in zip(*old, strict=True)]
    old_before, old_after = (fmean(old[0]), fmean(old[1])) if losses else (None, None)
    gain = fmean(gains) if gains else 0.0
    reason = ""
    if not all(math.isfinite(value) for value in (*recent[1], *old[1])):
        reason = "a score is not finite"
    elif len(gains) < 2:
        reason = f"{len(gains)} held-out texts are too few to say"
    elif gain < MIN_GAIN:
        reason = f"recent texts: {gain:+.4f}, and {MIN_GAIN:+.4f} is asked"
    elif gain <= CONFIDENCE * (error := stdev(gains) / math.sqrt(len(gains))):
        reason = f"recent texts: {gain:+.4f} with a standard error of {error:.4f}"
    elif losses and fmean(losses) > MAX_LOSS:
        reason = f"old texts: {-fmean(losses):+.4f}, and {-MAX_LOSS:+.4f} is allowed"
    elif losses and fmean(losses) > gain:
        reason = f"old texts: {-fmean(losses):+.4f}, more than recent ones gain ({gain:+.4f})"
    return Verdict(not reason, reason, old_before, old_after)


def without_gains(
    before: Sequence[float], after: Sequence[float], is_asked_now: Sequence[bool]
) -> tuple[list[float], list[float]]:
    """Scores of old texts for ``judge``: where those of kinds that recent texts have gain together, they count as
    unchanged. Else a language that is learned hides what another one loses."""
    gain = sum(new - old for old, new, now in zip(before, after, is_asked_now, strict=True) if now)
    counts = [old if now and gain > 0 else new for old, new, now in zip(before, after, is_asked_now, strict=True)]
    return list(before), counts


@dataclass
class HeldOut:
    """Held-out texts: the last ``size`` ones, and as many of all before them, of each kind about the same number, and of a
    kind each with about the same chance. Of fewer, the later half are the last ones, so that old texts count from the
    first swap on. At most two of one prompt: a client who repeats one request decides nothing alone, and one who sends
    very many of a kind takes no place from the others."""

    size: int = 12
    kinds: Clusters | None = None
    recent: deque[Text] = field(default_factory=deque)
    old: list[Text] = field(default_factory=list)
    num_aged: int = 0  # texts that left ``recent``
    max_bytes: int = 2**62  # of both; LEAST of the recent ones are kept in any case

    def takes(self, text: Text, one_in: int) -> bool:
        """Whether a text is to be held out: one in so many, and twice as many until there are old ones enough; by the
        hash of its prompt, so that equal prompts are on one side."""
        held = (*self.recent, *self.old)
        share = min(0.5, 2 / one_in) if len(held) < 2 * self.size else 1 / one_in
        digest = hashlib.sha256(repr(text.prompt).encode()).digest()
        is_marked = int.from_bytes(digest[:8], "big") < share * 2**64
        return is_marked or any(text.prompt == other.prompt for other in held)

    def add(self, text: Text, pick: Callable[[int], int]) -> None:
        """Take in a text; pick(n) is a random number below n."""
        self._take(text, pick)
        while self.num_bytes > self.max_bytes and (self.old or len(self.recent) > LEAST):
            if self.old:
                self.old.pop(pick(len(self.old)))
            else:
                self.recent.popleft()

    @property
    def num_bytes(self) -> int:
        """Of its texts."""
        return sum(text.num_bytes for text in (*self.recent, *self.old))

    def _take(self, text: Text, pick: Callable[[int], int]) -> None:
        alike = [other for other in self.recent if other.prompt == text.prompt]
        if len(alike) >= 2:
            self.recent = deque(other for other in self.recent if other is not alike[0])
        self.recent.append(text)
        if len(self.recent) <= min(self.size, max(LEAST, math.ceil((len(self.recent) + len(self.old)) / 2))):
            return
        aged = self.recent.popleft()
        self.num_aged += 1
        if len(self.old) < self.size:
            self.old.append(aged)
            return
        kinds = kinds_of([*self.old, aged], self.kinds)
        mine, counts = kinds.pop(), Counter(kinds)
        most, have = max(counts.values()), counts[mine]
        if have == 0 or have + 1 < most:  # another kind has more than its share
            crowd = [place for place, kind in enumerate(kinds) if counts[kind] == most]
            self.old[crowd[pick(len(crowd))]] = aged
        elif (place := pick(max(have, self.num_aged * have // self.size))) < have:
            self.old[[place for place, kind in enumerate(kinds) if kind == mine][place]] = aged
