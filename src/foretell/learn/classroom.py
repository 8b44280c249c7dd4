"""All adapters of a service that learn, in one place: this process, or one of its own (``worker.py``)."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from foretell.core.errors import ConfigError
from foretell.learn.export import export
from foretell.learn.options import LearnOptions
from foretell.learn.school import Event, School, Version
from foretell.learn.student import Origin, Student
from foretell.learn.texts import RawText, Text

Result = tuple[str, Version | Event]
"""(pupil, what came of its learning)."""
NEWEST = 8
"""Texts by which versions are compared where acceptance has fallen."""


class Classroom:
    """Not thread-safe. ``piece`` does one text's worth of work for one pupil, in turn."""

    def __init__(self, options: LearnOptions) -> None:
        self.options = options
        self.schools: dict[str, School] = {}
        self.results: deque[Result] = deque()
        self._turns: deque[tuple[str, Iterator[Version | Event | None]]] = deque()

    def open(self, pupil: str, origin: Origin) -> None:
        """A new adapter. Raises ConfigError, ModelError."""
        share = int(self.options.learn_memory_mib * 2**20 / (self.options.max_owners * self.options.learn_adapters))
        whole = int(self.options.learn_memory_mib * 2**20)
        most = whole if pupil.startswith("/") else share  # "/...": all requests learn together
        self.schools[pupil] = School(Student(origin, self.options), self.options, max_bytes=most // 2)

    def close(self, pupil: str) -> None:
        """Forget an adapter and its texts."""
        self.schools.pop(pupil, None)
        self._turns = deque(turn for turn in self._turns if turn[0] != pupil)

    def add(self, pupil: str, text: RawText) -> None:
        """A served text."""
        school = self.schools.get(pupil)
        if school is not None:
            school.add(text.reduced(self.options.num_laws))

    def act(self, pupil: str, action: str, number: int = 0, folder: str = "") -> None:
        """pause, resume, wake, revert (to a version), fell (choose among the versions), save (into a folder)."""
        school = self.schools.get(pupil)
        if school is None:
            return
        if action in ("pause", "resume"):
            school.paused = action == "pause"
        elif action == "wake":
            school.wake()
        elif action == "revert":
            school.revert(number)
        elif action == "fell":
            self._choose(pupil, school, number)
        elif action == "save":
            try:
                export(school.student, school.served, Path(folder))
            except OSError as error:
                self.results.append((pupil, {"event": "save failed", "reason": str(error)}))
            else:
                self.results.append((pupil, {"event": "saved", "folder": folder}))
        else:
            raise ConfigError(f"unknown action {action!r}")

    def _choose(self, pupil: str, school: School, serving: int) -> None:
        texts: list[Text] = (school.fresh or list(school.quota.recent))[-NEWEST:]
        best = (
            school.best(texts) if texts else max([number for number in school.versions if number < serving], default=0)
        )
        if best != serving:
            school.revert(best)
        self.results.append((pupil, {"event": "chosen", "version": best, "instead": serving}))

    @property
    def has_work(self) -> bool:
        """Whether ``piece`` would do anything."""
        return bool(self._turns) or any(school.is_due for school in self.schools.values())

    def piece(self) -> bool:
        """One piece of work; False where there is none."""
        if not self._turns:
            self._turns.extend((pupil, school.work()) for pupil, school in self.schools.items() if school.is_due)
        if not self._turns:
            return False
        pupil, work = self._turns.popleft()
        try:
            result = next(work)
        except StopIteration:
            return True
        if result is not None:
            self.results.append((pupil, result))
        self._turns.append((pupil, work))
        return True

    @property
    def num_bytes(self) -> int:
        """Of all texts that are held."""
        return sum(school.num_bytes for school in self.schools.values())
