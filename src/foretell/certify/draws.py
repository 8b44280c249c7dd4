"""Check that tokens were drawn from the reported q. A verifier that reads q relies on it, and is biased where they were
not.

Each drawn token becomes a number u = (mass of q before it) + U * q(token), given the siblings struck before it: uniform
and independent if and only if the token came from that distribution (Rosenblatt 1952; U is the certificate's own
noise). Tests, each with a bound that holds for any number of draws, so that the false-alarm rate is at most what is stated:

* ``order``, ``rank``: u with tokens in the order of their ids, and of their probability; Kolmogorov's distance, by the
  Dvoretzky-Kiefer-Wolfowitz inequality with Massart's constant (1990).
* ``heavy``: the sum of q(token) against its expectation, by Freedman's inequality (1975): it detects a wrong
temperature.
* ``pairs``, ``stop``, ``bonus``: whether a draw shares its noise with the next one of the step, or with the noise that
  decides where the walk stops or what is drawn last: u minus the other, modulo 1, is uniform.

Draws from one-hot distributions carry no information and are left out. FIXED and COUPLED nodes are not drawn from q.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foretell.certify.recorder import Text
from foretell.certify.report import DEFECT, Check, Finding, few, verdict_of
from foretell.core.noise import derive_seed
from foretell.core.tree import DrawnBy
from foretell.verify.base import Evidence

DRAWN = (int(DrawnBy.IID), int(DrawnBy.WITHOUT_REPLACEMENT))
NUM_TESTS = 6
ONE_HOT = 1.0 - 1e-6


@dataclass
class DrawChecks:
    """Collects the draws of a run, step by step: a listener of a ``VisitRecorder``."""

    seed: int
    by_id: list[float] = field(default_factory=list)
    by_rank: list[float] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    bonus: list[float] = field(default_factory=list)
    excess: float = 0.0  # sum of q(token) - E q(token)
    variance: float = 0.0
    num_one_hot: int = 0
    impossible: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        """U is drawn from here."""
        self._random = random.Random(derive_seed(self.seed, 3))

    def __call__(self, texts: Sequence[Text], evidence: Evidence) -> None:
        """Look at every drawn node of a step."""
        tree = evidence.tree
        if tree.q is None:
            return
        assert evidence.noise is not None
        stops, bonuses = evidence.noise.stop().tolist(), evidence.noise.bonus().tolist()
        tokens, parents, labels = tree.tokens.tolist(), tree.parent.tolist(), tree.drawn_by.tolist()
        for row, text in enumerate(texts):
            found = []
            for node in range(1, len(parents[row])):
                if labels[row][node] not in DRAWN or parents[row][node] < 0:
                    continue
                before = [
                    tokens[row][other]
                    for other in range(1, node)
                    if parents[row][other] == parents[row][node] and labels[row][other] in DRAWN
                ]
                struck = before if labels[row][node] == DrawnBy.WITHOUT_REPLACEMENT else []
                u = self._one(tree.q[row, parents[row][node]], tokens[row][node], struck, text, node)
                if u is not None:
                    found.append(u)
            # Disjoint pairs are independent of each other; the first draw has a partner in each other stream.
            self.pairs += [(one - two) % 1.0 for one, two in zip(found[::2], found[1::2], strict=False)]
            if found:
                self.stop.append((found[0] - stops[row]) % 1.0)
                self.bonus.append((found[0] - bonuses[row]) % 1.0)

    def _one(self, q: Tensor, token: int, struck: list[int], text: Text, node: int) -> float | None:
        """Record one draw; its u by id (the order in which production inverts), or None where it carries no
        information."""
        probs = q.double().clone()
        probs[struck] = 0.0
        mass = float(probs.sum())
        chance = float(probs[token]) / mass if mass > 0 else math.nan
        if not math.isfinite(mass) or not chance > 0:
            words = f"token {token} was drawn, and its distribution gives it {chance:.3g}"
            self.impossible.append(
                Finding(DEFECT, f"{text.where}, node {node}", words, {"token": token, "seed": text.params.seed})
            )
            return None
        probs /= mass
        if float(probs.max()) > ONE_HOT:
            self.num_one_hot += 1
            return None
        inside = self._random.random() * chance
        above = probs > probs[token]
        above[:token] |= probs[:token] == probs[token]
        u = float(probs[:token].sum()) + inside
        self.by_id.append(u)
        self.by_rank.append(float(probs[above].sum()) + inside)
        square = float((probs * probs).sum())
        self.excess += chance - square
        self.variance += float((probs * probs * probs).sum()) - square * square
        return u

    def check(self, verifier: str, shape: str, alpha: float) -> Check:
        """The verdict at a false-alarm rate of alpha for all tests together."""
        each = alpha / NUM_TESTS
        samples = {"order": self.by_id, "rank": self.by_rank, "pairs": self.pairs}
        samples |= {"stop": self.stop, "bonus": self.bonus}
        # name -> (statistic, bound)
        tests = {name: (kolmogorov(u), kolmogorov_bound(len(u), each)) for name, u in samples.items() if u}
        count = len(self.by_id)
        if count:
            tests["heavy"] = (abs(self.excess) / count, freedman_bound(self.variance, each) / count)
        findings = list(self.impossible)
        for name, (statistic, bound) in tests.items():
            if statistic > bound:
                words = f"test '{name}': {statistic:.4f}, and {bound:.4f} is exceeded with probability {each:.1e}"
                findings.append(Finding(DEFECT, f"{count} draws", words, {"test": name}))
        worst = max(tests, key=lambda name: tests[name][0] / tests[name][1]) if tests else None
        figures = {name: {"statistic": statistic, "bound": bound} for name, (statistic, bound) in tests.items()}
        return Check(
            "draws", verifier, shape, verdict_of(findings, count), count, "draws",
            tests[worst][0] if worst else None, tests[worst][1] if worst else None,
            f"statistic of the test nearest to its bound ({worst})" if worst else "nothing was drawn from a distribution",
            "", few(findings), {"tests": figures, "alpha": alpha, "one_hot": self.num_one_hot},
        )  # fmt: skip


def kolmogorov(u: Sequence[float]) -> float:
    """Largest distance of the empirical distribution from the uniform one."""
    ordered = sorted(u)
    count = len(ordered)
    return max(max((i + 1) / count - x, x - i / count) for i, x in enumerate(ordered))


def kolmogorov_bound(count: int, alpha: float) -> float:
    """Exceeded with probability at most alpha: 2 exp(-2 n d^2)."""
    return math.sqrt(math.log(2.0 / alpha) / (2.0 * count))


def freedman_bound(variance: float, alpha: float) -> float:
    """Of a sum of martingale differences within [-1, 1]: 2 exp(-t^2 / (2 (variance + t / 3))) = alpha, solved for t.

    ``variance`` is the sum of the conditional variances; it is random where earlier draws choose later distributions,
    and the bound is then read at the value found: a small optimism that the stated rate does not cover.
    """
    log = math.log(2.0 / alpha)
    return log / 3.0 + math.sqrt(log * log / 9.0 + 2.0 * variance * log)
