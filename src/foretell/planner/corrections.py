"""How far live steps are from the cost table, learned while serving."""

import math
from collections.abc import Sequence


class Corrections:
    """Correction factors of the cost table: for plain passes, guessing passes and each method's drafting. Causes are
    longer contexts, a shared machine, or an inaccurate table.

    Logs of the factors follow a random walk that is mostly common to all of them (a slower machine, longer contexts)
    and a little of each one's own; a Kalman filter holds them, so that a factor without recent observations follows the
    others with a larger variance. Outliers are clipped.
    """

    _COMMON, _OWN = 0.2**2, 0.12**2  # variances at the start, of logs
    _OWN_DRAFT = 0.6**2  # large: an error in the costs of drafting says little about those of passes
    _COMMON_STEP, _OWN_STEP = 0.01**2, 0.003**2  # ... added at each step
    _NOISE = 0.15**2  # of one step's time
    _CLIP = 2.5  # standard deviations
    _MAX_LOG = math.log(50.0)
    _MAX_STREAK, _STREAK_VARIANCE = (
        4,
        0.4**2,
    )  # so many clipped surprises of one sign in a row are no outliers: variance is added
    _PLAIN, _GUESS = 0, 1
    _ENOUGH = 48  # observations of a factor, before it speaks against the table
    _FASTER, _APART = 1.8, 2.5

    def __init__(self, methods: Sequence[str]) -> None:
        self._index = {method: 2 + place for place, method in enumerate(methods)}
        size = 2 + len(methods)
        self._mean = [0.0] * size
        self._cov = [[self._COMMON] * size for _ in range(size)]
        for place, row in enumerate(self._cov):
            row[place] += self._OWN if place <= self._GUESS else self._OWN_DRAFT
        self._streak = [0] * size
        self._seen = [0] * size  # observations of each factor
        self.plain, self.guess = 1.0, 1.0
        self.draft: dict[str, float] = dict.fromkeys(methods, 1.0)

    @property
    def doubt(self) -> float:
        """Standard deviation of log (guessing passes' factor / plain passes' factor)."""
        (plain, both), guess = self._cov[0][:2], self._cov[1][1]
        return math.sqrt(max(plain + guess - 2 * both, 0.0))

    def contradiction(self) -> str | None:
        """What live steps say against the table, after enough of them; None where they agree with it.

        A busy machine makes steps slower than the table says, all alike. Steps that are much faster, or guesses and passes
        that are off by different factors, mean that the table is wrong.
        """
        seen, factors = self._seen, {"plain passes": self.plain, "guessing passes": self.guess}
        for place, (name, factor) in enumerate(factors.items()):
            if seen[place] >= self._ENOUGH and factor < 1 / self._FASTER:
                return f"{name} take {factor:.2f} of what was measured"
        if min(seen[self._PLAIN], seen[self._GUESS]) >= self._ENOUGH:
            apart = self.guess / self.plain
            if not 1 / self._APART <= apart <= self._APART:
                return f"guessing passes take {apart:.2f} times what was measured, compared with plain ones"
        passes = max((seen[place], factor) for place, factor in ((self._PLAIN, self.plain), (self._GUESS, self.guess)))
        for method, place in self._index.items():
            if min(seen[place], passes[0]) < self._ENOUGH:
                continue
            apart = self.draft[method] / passes[1]
            if not 1 / self._APART <= apart <= self._APART:
                return f"guesses of {method} take {apart:.2f} times what was measured, compared with passes"
        return None

    @property
    def plain_spread(self) -> float:
        """Standard deviation of the log of the plain passes' factor."""
        return math.sqrt(max(self._cov[self._PLAIN][self._PLAIN], 0.0))

    def tick(self) -> None:
        """A step has passed."""
        for place, row in enumerate(self._cov):
            for other in range(len(row)):
                row[other] += self._COMMON_STEP
            row[place] += self._OWN_STEP
            if row[place] > 2 * (self._COMMON + self._OWN_DRAFT):  # the variance of what is not observed stays bounded
                self._shrink()

    def _shrink(self) -> None:
        for row in self._cov:
            for other in range(len(row)):
                row[other] *= 0.5

    def observe(self, kind: str, measured: float, predicted: float) -> None:
        """kind: "plain" or "guess", for a pass. predicted: the table's figure, uncorrected."""
        self._learn({"plain": self._PLAIN, "guess": self._GUESS}[kind], measured, predicted)

    def observe_draft(self, method: str, measured: float, predicted: float) -> None:
        """The same for a method's drafting; one that was not measured is skipped."""
        if method in self._index:
            self._learn(self._index[method], measured, predicted)

    def _learn(self, place: int, measured: float, predicted: float) -> None:
        if measured <= 0.0 or predicted <= 0.0:
            return
        self._seen[place] += 1
        spread = self._cov[place][place] + self._NOISE
        most = self._CLIP * math.sqrt(spread)
        surprise = math.log(measured / predicted) - self._mean[place]
        streak = self._streak[place]
        self._streak[place] = 0 if abs(surprise) < most else max(streak, 0) + 1 if surprise > 0 else min(streak, 0) - 1
        if abs(self._streak[place]) >= self._MAX_STREAK:
            self._cov[place][place] += self._STREAK_VARIANCE
            spread += self._STREAK_VARIANCE
            most = self._CLIP * math.sqrt(spread)
        surprise = min(max(surprise, -most), most)
        gains = [row[place] / spread for row in self._cov]
        known = list(self._cov[place])
        for other, gain in enumerate(gains):
            self._mean[other] = min(max(self._mean[other] + gain * surprise, -self._MAX_LOG), self._MAX_LOG)
            row = self._cov[other]
            for column, value in enumerate(known):
                row[column] -= gain * value
        self.plain, self.guess = math.exp(self._mean[0]), math.exp(self._mean[1])
        for method, index in self._index.items():
            self.draft[method] = math.exp(self._mean[index])
