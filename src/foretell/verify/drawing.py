"""One outcome of a verifier, drawn from the probabilities that it returns: the only place in foretell that does."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from foretell.core.errors import VerifierError
from foretell.kernels.bounds import check_shape
from foretell.kernels.small import invert_cdf
from foretell.verify.base import Evidence, RowVerifiers, Verdict, Verifier, follow
from foretell.verify.contract import checked

MAX_ELEMENTS = 1 << 25
"""Largest B * N * V that one call of a verifier sees (128 MiB a float32 copy of the distributions): more rows come in
turn."""


def draw(verifier: Verifier | RowVerifiers, evidence: Evidence) -> Verdict:
    """Draw one outcome of a verifier, from the streams STOP and BONUS.

    Peak memory beside p and q, which the caller holds: what the verifier makes of at most MAX_ELEMENTS elements of them,
    or of one row where a row alone is larger.

    Raises VocabularyMismatchError for a guess outside the vocabulary of p, and ModelError for an invalid tree
    (``bounds.check_tree``; on an accelerator shapes alone are checked).
    """
    check_shape(evidence.tree, evidence.shape)
    if isinstance(verifier, RowVerifiers):
        starts = (0, *verifier.stops)
        parts = [
            _draw_one(one, evidence.rows(*rows, verifier.taps, one.taps))
            for one, rows in zip(verifier.verifiers, pairwise(starts), strict=True)
        ]
        return _joined(parts)
    return _draw_one(verifier, evidence)


def _draw_one(verifier: Verifier, evidence: Evidence) -> Verdict:
    if not type(verifier).__module__.startswith("foretell."):
        return _draw_foreign(verifier, evidence)
    walked = verifier.walk(evidence)  # no tensors are made for it, however many rows there are
    return _draw_rows(verifier, evidence) if walked is None else walked


def _draw_foreign(verifier: Verifier, evidence: Evidence) -> Verdict:
    """By a rule that is not foretell's own. Where it breaks its contract no row is sound, and the verdict says why: rows
    beside them, of other rules, go on."""
    try:
        return _draw_one(checked(verifier), evidence)
    except VerifierError as error:
        num_rows, num_nodes, _ = evidence.shape
        verdict = Verdict.of([[0]] * num_rows, [0] * num_rows, [False] * num_rows, num_nodes)
        verdict.faults = [str(error)] * num_rows
        return verdict


def _draw_rows(verifier: Verifier, evidence: Evidence) -> Verdict:
    num_rows, num_nodes, vocab_size = evidence.shape
    at_once = max(1, MAX_ELEMENTS // (num_nodes * vocab_size))
    if num_rows <= at_once:
        return _draw(verifier, evidence)
    parts = [
        _draw(verifier, evidence.rows(start, min(start + at_once, num_rows))) for start in range(0, num_rows, at_once)
    ]
    return _joined(parts)


def _joined(parts: Sequence[Verdict]) -> Verdict:
    """The verdicts of one row after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.path, part.count, part.bonus, part.sound) for part in parts), strict=True)
    verdict = Verdict(*(torch.cat(column) for column in columns))
    if any(part.faults for part in parts):
        verdict.faults = [fault for part in parts for fault in part.faults or [""] * len(part.counts)]
    return verdict


def _draw(verifier: Verifier, evidence: Evidence) -> Verdict:
    noise = evidence.noise
    assert noise is not None, "drawing needs noise"
    decided = verifier.decide(evidence)
    if decided is not None:
        at, bonus = decided
        return Verdict(*follow(evidence.tree.parent, at), bonus, evidence.has_mass(at, bonus))
    walk = verifier.stops(evidence)
    at = invert_cdf(walk.stops, noise.stop())
    probs = verifier.residual(evidence, walk, at)
    bonus = invert_cdf(probs, noise.bonus())
    mass = probs.sum(-1) + walk.stops.sum(-1)
    chosen = probs.gather(1, bonus[:, None])[:, 0]
    return Verdict(*follow(evidence.tree.parent, at), bonus, torch.isfinite(mass) & (chosen > 0))
