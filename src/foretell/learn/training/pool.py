"""All adapters of a service that learn, in one place: this process, or one of its own (``process.py``)."""

import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.core.errors import ConfigError
from foretell.heads import formats
from foretell.heads.head import Head
from foretell.learn.options import MAX_TENANTS, LearnOptions
from foretell.learn.training.student import EndMatrices, Origin, Student
from foretell.learn.training.texts import RawText, Text
from foretell.learn.training.trainer import AdapterTrainer, Event, Version
from foretell.model.load import load_tokenizer

Result = tuple[str, Version | Event]
"""(adapter, what came of its training)."""
NEWEST = 8
"""Texts by which versions are compared where acceptance has fallen."""


class TrainerPool:
    """``piece`` does one text's worth of work for one adapter, in turn. Not thread-safe, but for ``open``: an adapter is
    opened on the thread that takes a request, while others learn; hence the copies of ``trainers``."""

    def __init__(self, options: LearnOptions) -> None:
        self.options = options
        self.trainers: dict[str, AdapterTrainer] = {}
        self.results: deque[Result] = deque()
        self.matrices: EndMatrices | None = None
        self._turns: deque[tuple[str, Iterator[Version | Event | None]]] = deque()

    def ends(self, matrices: EndMatrices) -> None:
        """The target's embedding and head, which origins of heads come without: one copy for all adapters."""
        self.matrices = matrices

    def open(self, adapter: str, origin: Origin) -> None:
        """A new adapter. Raises ConfigError, ModelError."""
        whole = int(self.options.learn_memory_mib * 2**20)
        most = whole if adapter.startswith("/") else whole // MAX_TENANTS  # "/...": all requests together
        with torch.inference_mode(mode=False):  # a new client's first request may come in the middle of decoding
            student = Student(replace(origin, matrices=origin.matrices or self.matrices), self.options)
            self.trainers[adapter] = AdapterTrainer(student, self.options, max_bytes=most // 2)

    def close(self, adapter: str) -> None:
        """Forget an adapter and its texts."""
        self.trainers.pop(adapter, None)
        self._turns = deque(turn for turn in self._turns if turn[0] != adapter)

    def add(self, adapter: str, text: RawText) -> None:
        """A served text."""
        trainer = self.trainers.get(adapter)
        if trainer is None:
            return
        found = text.reduced().cut(trainer.student.longest)
        if found is not None and found.is_finite:
            trainer.add(found)
        elif found is not None and not trainer.num_left_out:  # of one NaN all that is learned becomes NaN
            self.results.append((adapter, {"event": "left out", "reason": "the target's numbers are not finite"}))
        trainer.num_left_out += found is None or not found.is_finite

    def act(self, adapter: str, action: str, number: int = 0, folder: str = "") -> None:
        """pause, resume, wake, revert (to a version), fell (choose among the versions), save (into a folder)."""
        trainer = self.trainers.get(adapter)
        if trainer is None:
            return
        if action in ("pause", "resume"):
            trainer.paused = action == "pause"
        elif action == "wake":
            trainer.wake()
        elif action == "revert":
            trainer.num_reverts += 1
            self._agree(adapter, number, trainer.revert(number))
        elif action == "fell":
            self._choose(adapter, trainer, number)
        elif action == "save":
            try:
                export(trainer.student, trainer.served, Path(folder))
            # A full disk is another error in each library; learning goes on without the file
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                self.results.append((adapter, {"event": "save failed", "reason": reason}))
            else:
                self.results.append((adapter, {"event": "saved", "folder": folder}))
        else:
            raise ConfigError(f"unknown action {action!r}")

    def _agree(self, adapter: str, asked: int, found: int) -> None:
        """A version that serves again, and is not kept here (a later one is on its way): the one before it serves in both
        places."""
        if found != asked:
            self.trainers[adapter].num_reverts += 1
            self.results.append((adapter, {"event": "chosen", "version": found, "instead": asked}))

    def _choose(self, adapter: str, trainer: AdapterTrainer, serving: int) -> None:
        texts: list[Text] = (trainer.fresh or list(trainer.held_out.recent))[-NEWEST:]
        best = (
            trainer.best(texts)
            if texts
            else max([number for number in trainer.versions if number < serving], default=0)
        )
        if best != serving:
            trainer.revert(best)
        trainer.num_reverts += best < serving  # a later version is on its way to the serving side
        self.results.append((adapter, {"event": "chosen", "version": best, "instead": serving}))

    @property
    def has_work(self) -> bool:
        """Whether ``piece`` would do anything."""
        return bool(self._turns) or any(trainer.is_due for trainer in list(self.trainers.values()))

    def piece(self) -> bool:
        """One piece of work; False where there is none."""
        if not self._turns:
            self._turns.extend(
                (adapter, trainer.work()) for adapter, trainer in list(self.trainers.items()) if trainer.is_due
            )
        if not self._turns:
            return False
        adapter, work = self._turns.popleft()
        try:
            result = next(work)
        except StopIteration:
            return True
        if result is not None:
            self.results.append((adapter, result))
        self._turns.append((adapter, work))
        return True

    @property
    def num_bytes(self) -> int:
        """Of all texts that are held."""
        return sum(trainer.num_bytes for trainer in list(self.trainers.values()))


def export(student: Student, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a version's weights whole or not at all: beside the folder first, then in its place. Raises OSError."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        # Half of the bytes and the same guesses: what serves has 4 or 8 bits.
        made: Any = student.module(weights).to(torch.bfloat16)
        if isinstance(made, Head):
            formats.save(made, part, target=student.origin.target, target_name=student.origin.target.name)
        else:
            made.save_pretrained(str(part))
            load_tokenizer(student.origin.init).save_pretrained(str(part))
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
