"""Warnings of slots that do not learn: said where they do not, silent where they do."""

import json
from pathlib import Path

import pytest

from foretell.train.slots import logged_losses, warnings_of


def falling(*ends: float, steps: int = 40) -> list[list[float]]:
    """Losses of each slot, from 4 down to its end."""
    return [[4.0 + (end - 4.0) * step / (steps - 1) for end in ends] for step in range(steps)]


def test_slots_that_learn_are_not_warned_of() -> None:
    assert warnings_of([0.62, 0.60, 0.55], [0.66, 0.64, 0.6], falling(1.5, 1.7, 2.0)) == []
    assert warnings_of([0.62], [0.66], []) == [], "a run without a log, or too short for one"
    assert warnings_of([0.15, 0.12], [0.2, 0.15], falling(3.0, 3.2, steps=10)) == []


@pytest.mark.parametrize(
    ("sampled", "greedy", "losses", "said"),
    [
        ([0.6, 0.04], [0.65, 0.03], falling(1.5, 3.0), ["slot 2 does not learn: 0.04 of its guesses would be accepted; "
         "train longer, on more prompts, or num_slots = 1"]),
        ([0.6, 0.2, 0.18], [0.65, 0.25, 0.2], falling(1.5, 3.0, 3.0), ["slot 2 does not learn: 0.25 of its guesses would "
         "be accepted, and 0.65 of slot 1's"]),
        ([0.4, 0.38], [0.4, 0.38], falling(2.0, 3.95), ["slot 2 does not learn: its loss changed by -1 % from the"]),
        ([0.02], [0.01], [], ["slot 1 does not learn: 0.02 of its guesses would be accepted; train longer, on more"]),
    ],
)  # fmt: skip
def test_slots_that_do_not_are(
    sampled: list[float], greedy: list[float], losses: list[list[float]], said: list[str]
) -> None:
    found = warnings_of(sampled, greedy, losses)
    assert len(found) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(found, said, strict=True))


def test_nothing_is_said_of_a_run_of_a_few_steps() -> None:
    assert warnings_of([0.0, 0.0], [0.0, 0.0], falling(3.0, 3.9, steps=19)) == []
    assert len(warnings_of([0.0, 0.0], [0.0, 0.0], falling(3.0, 3.9, steps=20))) == 2


def test_a_slot_that_joined_late_is_judged_by_its_own_steps() -> None:
    early = [[3.0, None] for _ in range(30)]
    late = [[2.0 - step / 60, 4.0 - step / 20] for step in range(30)]
    assert warnings_of([0.5, 0.45], [0.5, 0.45], [*early, *late]) == []


def test_the_log_of_a_run(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert logged_losses(log) == []
    log.write_text("".join(json.dumps({"step": step, "slot_losses": [1.0, None]}) + "\n" for step in range(3)))
    assert logged_losses(log) == [[1.0, None]] * 3
