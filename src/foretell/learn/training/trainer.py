"""One adapter's learning: texts come in, updates are made in small pieces, and what passes the gate goes out.

A pure state machine without clock or thread: ``work`` is a generator whose every piece handles one text, so that the
caller decides when, and for how long, it goes on (``process.py`` in a process of its own, the learner between steps).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from foretell.learn.options import LearnOptions
from foretell.learn.training.gate import LEAST, HeldOut, Verdict, judge, without_gains
from foretell.learn.training.student import Student
from foretell.learn.training.texts import Clusters, ReplayBuffer, Text, kinds_of

PATIENCE = 4  # refusals in a row, after which the learner pauses
REST_TEXTS = 16  # ... until so many texts have come, or acceptance falls
NUM_KINDS = 6
"""Kinds of requests among which what is kept of old texts is shared."""


@dataclass(frozen=True)
class Version:
    """Weights that passed the gate."""

    number: int
    weights: dict[str, Tensor]  # as ``Method.rebuilt`` takes them
    verdict: Verdict
    num_texts: int  # learned from until then
    # After so many reverts it was made: the serving side refuses what was made before its last one.
    num_reverts: int = 0


Event = dict[str, Any]
"""One line of the log: ``event`` is its kind; all are numbers and short sentences, never a client's text."""


class AdapterTrainer:
    """See the module's docstring."""

    def __init__(self, student: Student, options: LearnOptions, *, max_bytes: int) -> None:
        """max_bytes: of all texts that are held."""
        self.student, self.options = student, options
        self._most = max_bytes
        self._share = max_bytes // 3  # of texts that are new, and that are held out: what they leave is for the replay
        self._is_full = False  # a text more would be too much for its share
        self.replay = ReplayBuffer(max_bytes)
        self.kinds = Clusters(NUM_KINDS)
        self.held_out = HeldOut(kinds=self.kinds, max_bytes=self._share)
        self.fresh: list[Text] = []  # not learned from yet
        self.num_left_out = 0  # texts that cannot be learned from
        self.num_texts = self.num_updates = self.num_refused = self.number = 0
        self.num_reverts = 0  # that the serving side knows of
        self._num_returns = 0  # to an earlier version
        self.refusals = 0  # in a row
        self.resting = 0  # texts until it goes on
        self.paused = False
        self.served = student.weights()
        self.versions: dict[int, dict[str, Tensor]] = {0: self.served}  # the base and the last two
        self._scores: dict[int, tuple[dict[str, Tensor], Text, float]] = {}  # held-out texts by the served weights
        self._best: dict[int, tuple[Text, float]] = {}  # ... by the best version that served; the text keeps its id
        self._random = random.Random(options.seed)

    @property
    def num_bytes(self) -> int:
        """Bytes of texts that are held."""
        held = [*self.fresh, *self.held_out.recent, *self.held_out.old]
        return self.replay.num_bytes + sum(text.num_bytes for text in held)

    def add(self, text: Text) -> None:
        """A served text: to learn from, or, one in ``held_out`` by the hash of its prompt, for the gate."""
        self.num_texts += 1
        self.kinds.add(text.sketch)
        if self.resting:
            self.resting -= 1
        if self.held_out.takes(text, self.options.held_out):
            self.held_out.add(text, self._random.randrange)
        else:
            self._await(text)
        self.replay.within(self._most - self.num_bytes + self.replay.num_bytes)

    def _await(self, text: Text) -> None:
        self.fresh.append(text)
        # Where it cannot keep up, or they are large, the oldest are only kept for later.
        while len(self.fresh) > 1 and (
            len(self.fresh) > 4 * self.options.learn_every or self._fresh_bytes > self._share
        ):
            self.replay.add(self.fresh.pop(0))
            self._is_full = True

    @property
    def _fresh_bytes(self) -> int:
        return sum(text.num_bytes for text in self.fresh)

    @property
    def is_due(self) -> bool:
        """Whether an update would begin now: there are texts enough, or no room for more."""
        has_enough = len(self.fresh) >= self.options.learn_every or self._is_full
        return not self.paused and not self.resting and has_enough

    def wake(self) -> None:
        """Acceptance fell: there is something to learn, rest or not."""
        self.resting = self.refusals = 0

    def work(self) -> Iterator[Version | Event | None]:
        """One update where one is due: None after each text, at its end an event, and the version that passed. It ends
        where an earlier version is gone back to meanwhile: what it learned was made of what is given up."""
        if not self.is_due:
            return
        began = self._num_returns
        for found in self._update():
            yield found
            if self._num_returns != began:
                return

    def _update(self) -> Iterator[Version | Event | None]:
        options = self.options
        count = options.learn_every
        new, self.fresh = self.fresh[:count], self.fresh[count:]
        self._is_full = False
        replayed = self.replay.sample(options.replay, self._random.randrange, self.kinds)
        texts = [*new, *replayed]
        self._random.shuffle(texts)
        tokens = self.student.renew(new)
        for text in new:
            self.replay.add(text)
        lost = 0.0
        for begin in range(0, len(texts), options.batch_texts):
            batch = texts[begin : begin + options.batch_texts]
            for text in batch:
                lost += self.student.learn(text, 1.0 / len(batch))
                yield None
            self.student.apply()
        self.num_updates += 1
        update: Event = {"event": "update", "update": self.num_updates, "loss": lost / max(1, len(texts)),
                         "new": len(new), "replayed": len(replayed), "new_tokens": tokens}  # fmt: skip
        yield update
        yield from self._gate()

    def _gate(self) -> Iterator[Version | Event | None]:
        recent, old = list(self.held_out.recent), list(self.held_out.old)
        if len(recent) < LEAST:
            return
        learned, served = self.student.weights(), self.served
        asked = self.student.between(served, learned)
        after, before = dict[int, float](), dict[int, float]()  # by the text's id
        for text in (*recent, *old):
            # Texts come and versions may be compared between two pieces, so the weights are put in each time.
            after[id(text)] = self._score(asked, text, learned)
            yield None
            known_score = self._scores.get(id(text))
            if known_score is None or known_score[0] is not served or known_score[1] is not text:
                known_score = (served, text, self._score(served, text, learned))
                yield None
            self._scores[id(text)] = known_score
            before[id(text)] = known_score[2]
        self._scores = {id(text): self._scores[id(text)] for text in (*recent, *old)}
        # Of old texts the best that a version has served with: else every swap may lose a little, and many lose much.
        best = {key: max(score, self._best.get(key, (None, 0.0))[1]) for key, score in before.items()}
        self._best = {id(text): (text, best[id(text)]) for text in (*recent, *old)}
        pairs = [
            ([scores[id(text)] for text in texts], [after[id(text)] for text in texts])
            for scores, texts in ((before, recent), (best, old))
        ]
        kinds, now = kinds_of(old, self.kinds), set(kinds_of(recent, self.kinds))
        pairs[1] = without_gains(*pairs[1], [kind in now for kind in kinds])
        verdict = judge(pairs[0], pairs[1])
        if verdict.passes:
            self.student.load(asked)  # from which learning goes on
            yield self._publish(asked, verdict)
            return
        self.num_refused += 1
        self.refusals += 1
        rests = self.refusals >= PATIENCE
        if rests:  # what four gates refused is dropped
            self.student.load(self.served)
            self.refusals, self.resting = 0, REST_TEXTS
        yield {"event": "refused", "rests": rests, **asdict(verdict)}

    def _score(self, weights: dict[str, Tensor], text: Text, then: dict[str, Tensor]) -> float:
        """Of a text by these weights; afterwards the student has the weights ``then``."""
        self.student.load(weights)
        try:
            return self.student.score(text)
        finally:
            self.student.load(then)

    def _publish(self, weights: dict[str, Tensor], verdict: Verdict) -> Version:
        self.number += 1
        self.refusals = 0
        self.served = weights
        self.versions[self.number] = weights
        for number in sorted(self.versions)[1:-2]:
            del self.versions[number]
        return Version(self.number, self.student.checkpoint(weights), verdict, self.num_texts, self.num_reverts)

    def revert(self, number: int) -> int:
        """Go on from an earlier version, which serves again, or from the last one before it that is kept; returns its
        number. Later ones are given up, as they are where it serves."""
        number = max(known for known in self.versions if known <= max(0, number))
        for later in [known for known in self.versions if known > number]:
            del self.versions[later]
        self.served = self.versions[number]
        self.student.load(self.served)
        self.student.forget()
        self.refusals = 0
        self._num_returns += 1
        return number

    def best(self, texts: Sequence[Text]) -> int:
        """Of the versions kept, the number of the one with the highest mean score on these texts."""
        learned = self.student.weights()
        means: dict[int, float] = {}
        try:
            for number, weights in self.versions.items():
                self.student.load(weights)
                means[number] = sum(self.student.scores(texts)) / max(1, len(texts))
        finally:
            self.student.load(learned)
        return max(means, key=lambda number: (means[number], number))
