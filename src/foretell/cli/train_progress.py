"""What ``foretell train`` shows while it works: a bar, or lines for a log.

Of several processes one alone speaks.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from foretell.cli.errors import say
from foretell.cli.layout import console_of_errors

if TYPE_CHECKING:
    from foretell.train.metrics import Evaluation
    from foretell.train.trainer import Report


LINE_SECONDS = 30.0


def speaks() -> bool:
    """Whether this process is the one that reports progress."""
    return os.environ.get("RANK", "0") == "0"


def bar_text(report: "Report") -> str:
    """Beside the bar: mean loss of a slot, then of each, acceptance by slot and expected length of the newest evaluation.

    The sum over slots, which is minimised, would jump where slots are added.
    """
    text = f"loss {report.loss if report.loss_per_slot is None else report.loss_per_slot:.3f}"
    if len(report.slot_losses) > 1:
        slots = " ".join("-" if loss is None else f"{loss:.2f}" for loss in report.slot_losses)
        text += f" a slot ({slots})"
    text += f" · {report.tokens_per_second:.0f} tok/s"
    held: Evaluation | None = report.evaluation
    if held is not None and held.slots:
        slots = " ".join(f"{slot.conditional:.2f}" for slot in held.slots)
        text += f" · held out: {slots} · length {held.expected_length:.2f}"
    return text


@contextmanager
def training_bar(no_color: bool) -> Iterator[Callable[["Report"], None]]:
    """A bar on stderr while training."""
    with bar("training", no_color) as update:
        yield lambda report: update(min(1.0, report.share), 1.0, bar_text(report))


@contextmanager
def answering_bar(no_color: bool, journal: Path) -> Iterator[Callable[[int, int, int], None]]:
    """A bar on stderr while prompts are answered; after an interrupt, a message with the number of kept answers."""
    done, total = 0, 0
    with bar("answering", no_color) as update:

        def progress(now: int, of: int, written: int) -> None:
            nonlocal done, total
            done, total = now, of
            update(done, total, f"{done}/{total} prompts · {written} tokens")

        try:
            yield progress
        except KeyboardInterrupt:
            kept = f"{done} of {total} answers are kept in {journal}: the same command goes on with the others"
            if speaks():
                say(kept if done else "stopped before the first answer: nothing is kept, the same command begins again")
            raise


@contextmanager
def told_if_interrupted(saved: Callable[[], str]) -> Iterator[None]:
    """A line at Ctrl-C: what is saved, and how to go on; with the notes of whom it stopped."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if speaks():
            say("; ".join([f"stopped: {saved()}", *getattr(stopped, "__notes__", ())]))
        raise


@contextmanager
def bar(what: str, no_color: bool) -> Iterator[Callable[[float, float, str], None]]:
    """A bar on stderr, or, where that is no terminal, a line of it every half minute: enough for a log."""
    if not speaks():
        yield lambda done, total, note: None
        return
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.progress import Progress, TextColumn

    columns = *Progress.get_default_columns(), TextColumn("{task.fields[note]}")
    with Progress(*columns, console=console_of_errors(no_color)) as bars:
        task = bars.add_task(what, total=1.0, note="")
        yield lambda done, total, note: bars.update(task, completed=done, total=total, note=note)


def time_text(seconds: float) -> str:
    """A length of time for people."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _lines(what: str) -> Callable[[float, float, str], None]:
    last = monotonic()
    first: tuple[float, float] | None = (
        None  # the time, and the share done: after a kill a part is done at the beginning
    )

    def update(done: float, total: float, note: str) -> None:
        nonlocal last, first
        share = done / max(total, 1e-9)
        first = first or (monotonic(), share)
        if monotonic() - last >= LINE_SECONDS:
            last = monotonic()
            each = (last - first[0]) / max(share - first[1], 1e-9)
            left = f" · {time_text((1 - share) * each)} left" if share > first[1] else ""
            print(f"{what} {share:.0%}{left} · {note}", file=sys.stderr, flush=True)

    return update
