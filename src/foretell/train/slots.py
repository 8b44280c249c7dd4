"""Slots of a drafter that do not learn: what is warned of at the end of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell.core.jsontext import parse_json

LEAST_ACCEPTANCE = 0.1
"""Of a slot, given that those before it were kept: guesses of a slot below it are hardly ever worth a pass."""
LEAST_SHARE = 0.5
"""Of the slot before. Slots of one trained head differ by a few percent; half: it never learned to read its own inputs."""
LEAST_FALL = 0.03
"""Share by which a slot's loss falls in a run in which it learns."""
MIN_STEPS = 20
"""Steps with a slot, below which its loss says nothing."""


def warnings_of(conditional: Sequence[float], conditional_greedy: Sequence[float], losses: Sequence[Any]) -> list[str]:
    """A sentence for each slot that does not learn, in their order.

    conditional, conditional_greedy: held-out acceptance and agreement of each slot, given the slots before. losses: of
    each step the list of its slots' losses, None where a slot had no place; in the order of the steps. Nothing is said
    of a run of fewer than ``MIN_STEPS``.
    """
    if 0 < len(losses) < MIN_STEPS:
        return []
    found = []
    before = 0.0
    for index, (sampled, greedy) in enumerate(zip(conditional, conditional_greedy, strict=True)):
        best = max(sampled, greedy)
        reason = None
        if best < LEAST_ACCEPTANCE:
            reason = f"{best:.2f} of its guesses would be accepted"
        elif index and best < LEAST_SHARE * before:
            reason = f"{best:.2f} of its guesses would be accepted, and {before:.2f} of slot {index}'s"
        elif (change := _change([row[index] for row in losses if len(row) > index])) > -LEAST_FALL:
            reason = f"its loss changed by {100 * change:+.0f} % from the first tenth of its steps to the last"
        if reason is not None:
            fewer = f", or num_slots = {index}" if index else ""
            found.append(f"slot {index + 1} does not learn: {reason}; train longer, on more prompts{fewer}")
        before = best
    return found


def logged_losses(log: Path) -> list[Any]:
    """``slot_losses`` of each step of a run's log.jsonl; empty where there is none."""
    if not log.is_file():
        return []
    rows = [parse_json(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [row["slot_losses"] for row in rows if "slot_losses" in row]


def _change(values: Sequence[float | None]) -> float:
    """By which share the mean of the last tenth differs from that of the first; -1 where there are too few to say."""
    known = [value for value in values if value is not None]
    if len(known) < MIN_STEPS:
        return -1.0
    size = max(1, len(known) // 10)
    first, last = sum(known[:size]) / size, sum(known[-size:]) / size
    return (last - first) / first if first > 0 else -1.0
