"""How far live steps are from the cost table, learned while serving."""

import math
from collections.abc import Sequence


class Corrections:
    """Correction factors of the cost table: for plain passes, guessing passes and each method's drafting. Causes are
    longer contexts, a shared machine, or an inaccurate table.

    The log of a factor is a part that all have in common (a slower machine, longer contexts) and a part of its own (what
    the table has wrong). Each part falls back towards 0, the table's word, with a memory of ``MEMORY`` steps; a Kalman
    filter holds them. So a factor without recent observations follows the others, and what a few odd steps said of it is
    forgotten. Outliers are clipped.

    Plain passes of other numbers of rows than those that were seen first have a part of their own besides, by powers of
    two: a table may have one of its cells wrong, and guesses that stand by it would never show it.
    """

    MEMORY = 2000.0  # steps after which a part without observations has faded to 1 / e
    _COMMON_START = 0.2**2  # variances, of logs: of the common part at the start ...
    _COMMON, _OWN = 0.32**2, 0.12**2  # ... and of the parts where nothing was seen for long
    _OWN_DRAFT = 0.6**2  # large: an error in the costs of drafting says little about those of passes
    _OWN_SIZE, _SIZE_DRIFT = 0.3**2, 0.01**2  # of the part of a number of rows: at the start, and added by each step
    _NOISE = 0.15**2  # of one step's time
    _CLIP = 2.5  # standard deviations
    _MAX_LOG = math.log(50.0)
    _MAX_STREAK = 2  # so many clipped surprises of one sign in a row are no outliers: variance is added ...
    _STREAK_VARIANCE = 0.8**2  # ... to the common part where passes differ: mostly the machine is slower for a while
    _PLAIN, _GUESS = 0, 1
    _ENOUGH = 48  # observations of a factor, before it speaks against the table
    _FASTER, _APART = 1.8, 2.5

    def __init__(self, methods: Sequence[str]) -> None:
        self._index = {method: 2 + place for place, method in enumerate(methods)}
        # Lists: the calls of numpy on a few numbers take longer than the sums, the more so after a pass.
        own = [self._OWN, self._OWN] + [self._OWN_DRAFT] * len(methods)
        self._mean = [0.0] * (1 + len(own))  # the common part, then each factor's own
        self._still = [self._COMMON, *own]  # variance of each part where nothing was seen for long
        start = [self._COMMON_START, *own]
        self._cov = [
            [start[row] if row == column else 0.0 for column in range(len(start))] for row in range(len(start))
        ]
        self._ticks = 0  # steps that mean and covariance have not been told of
        self._streak = [0] * len(own)
        self._seen = [0] * len(own)  # observations of each factor
        self._sizes: dict[int, tuple[float, float]] = {}  # (mean, variance) of the log, by ``_size`` of the rows
        self.plain, self.guess = 1.0, 1.0
        self.draft: dict[str, float] = dict.fromkeys(methods, 1.0)

    def doubt(self, batch: int) -> float:
        """Standard deviation of log (guessing passes' factor / plain passes' factor), for a number of rows."""
        plain, guess = 1 + self._PLAIN, 1 + self._GUESS
        both = self._covariance(plain, plain) + self._covariance(guess, guess) - 2.0 * self._covariance(plain, guess)
        return math.sqrt(max(both, 0.0) + self._of_size(batch)[1])

    def knows_size(self, batch: int) -> bool:
        """Whether plain passes of about that many rows were seen, or none of any number."""
        return not self._sizes or _size(batch) in self._sizes

    def plain_of(self, batch: int) -> float:
        """The factor of plain passes of that many rows."""
        return self.plain * math.exp(self._of_size(batch)[0])

    def _of_size(self, batch: int) -> tuple[float, float]:
        return self._sizes.get(_size(batch), (0.0, self._OWN_SIZE if self._sizes else 0.0))

    def observe_plain(self, measured: float, predicted: float, batch: int) -> None:
        """A plain pass of that many rows. predicted: the table's figure, uncorrected."""
        if measured <= 0.0 or predicted <= 0.0:
            return
        mean, variance = self._of_size(batch)
        if variance:
            spread = variance + self.plain_spread**2 + self._NOISE
            most = self._CLIP * math.sqrt(spread)
            surprise = math.log(measured / predicted) - math.log(self.plain) - mean
            gain = variance / spread
            mean += gain * min(max(surprise, -most), most)
            variance = (1.0 - gain) * variance + self._SIZE_DRIFT
        self._sizes[_size(batch)] = mean, variance
        self._learn(self._PLAIN, measured * math.exp(-mean), predicted)

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
        plain = 1 + self._PLAIN
        both = self._covariance(0, 0) + 2.0 * self._covariance(0, plain) + self._covariance(plain, plain)
        return math.sqrt(max(both, 0.0))

    def _covariance(self, one: int, other: int) -> float:
        """Of two parts as of now, ``_settle`` or not."""
        share = math.exp(-2.0 * self._ticks / self.MEMORY)
        return self._cov[one][other] * share + (self._still[one] * (1.0 - share) if one == other else 0.0)

    def tick(self, count: int = 1) -> None:
        """So many steps have passed."""
        self._ticks += count

    def _settle(self) -> None:
        """The steps that have passed: each part falls back, and is known less."""
        if not self._ticks:
            return
        keep = math.exp(-self._ticks / self.MEMORY)
        self._ticks = 0
        share = keep * keep
        self._mean = [mean * keep for mean in self._mean]
        for place, row in enumerate(self._cov):
            self._cov[place] = row = [value * share for value in row]
            row[place] += self._still[place] * (1.0 - share)

    def observe_guess(self, measured: float, predicted: float) -> None:
        """A pass over guesses."""
        self._learn(self._GUESS, measured, predicted)

    def observe_draft(self, method: str, measured: float, predicted: float) -> None:
        """The same for a method's drafting; one that was not measured is skipped."""
        if method in self._index:
            self._learn(self._index[method], measured, predicted)

    def _learn(self, place: int, measured: float, predicted: float) -> None:
        if measured <= 0.0 or predicted <= 0.0:
            return
        self._settle()
        self._seen[place] += 1
        own, cov = 1 + place, self._cov
        with_factor = [common + mine for common, mine in zip(cov[0], cov[own], strict=True)]  # the parts' covariances
        spread = with_factor[0] + with_factor[own] + self._NOISE
        most = self._CLIP * math.sqrt(spread)
        surprise = math.log(measured / predicted) - self._mean[0] - self._mean[own]
        streak = self._streak[place]
        self._streak[place] = 0 if abs(surprise) < most else max(streak, 0) + 1 if surprise > 0 else min(streak, 0) - 1
        if abs(self._streak[place]) >= self._MAX_STREAK:
            place_of = 0 if place <= self._GUESS else own
            cov[place_of][place_of] += self._STREAK_VARIANCE
            with_factor[place_of] += self._STREAK_VARIANCE
            spread += self._STREAK_VARIANCE
            most = self._CLIP * math.sqrt(spread)
        by = min(max(surprise, -most), most) / spread
        limit = self._MAX_LOG
        self._mean = mean = [
            min(max(at + by * part, -limit), limit) for at, part in zip(self._mean, with_factor, strict=True)
        ]
        for index, part in enumerate(with_factor):
            gain = part / spread
            cov[index] = [value - gain * other for value, other in zip(cov[index], with_factor, strict=True)]
        common = mean[0]
        self.plain, self.guess = math.exp(common + mean[1 + self._PLAIN]), math.exp(common + mean[1 + self._GUESS])
        for method, factor in self._index.items():
            self.draft[method] = math.exp(common + mean[1 + factor])


def _size(batch: int) -> int:
    """Of numbers of rows within a factor of two."""
    return max(batch - 1, 0).bit_length()
