"""Atomic checkpoints: written to a temporary name, flushed to the disk, renamed; the last two are kept."""

import io
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from foretell.core.errors import ConfigError, TrainError
from foretell.core.journal import first_difference
from foretell.core.jsontext import parse_json
from foretell.core.platform import flush_folder
from foretell.core.whole import write_bytes as write_bytes

FOLDER = "checkpoints"
STATE, ABOUT = "state.pt", "checkpoint.json"


def write_json(file: Path, value: Any) -> None:
    """Write JSON atomically. Raises OSError."""
    part = file.with_name(f".{file.name}.part")
    try:
        write_bytes(part, (json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n").encode())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def found(out: Path) -> list[Path]:
    """Whole checkpoints in a run's folder, oldest first."""
    return sorted(path for path in (out / FOLDER).glob("step-*") if (path / ABOUT).is_file())


def save(out: Path, step: int, state: dict[str, Any], about: dict[str, Any], *, keep: int = 2) -> Path:
    """Write the checkpoint after ``step`` steps. Raises OSError and leaves no partial files; older checkpoints stay
    until it is written."""
    folder = out / FOLDER
    final, part = folder / f"step-{step:08d}", folder / f".step-{step:08d}.part"
    content = io.BytesIO()
    torch.save(state, content)  # to memory first: torch replaces a file's errors by its own
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_bytes(part / STATE, content.getbuffer())
        write_bytes(part / ABOUT, (json.dumps(about, indent=2, default=str) + "\n").encode())
        flush_folder(part)
        if final.exists():
            shutil.rmtree(final)
        part.replace(final)
        flush_folder(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in found(out)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(folder: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, about) of a checkpoint. Raises TrainError where it is damaged."""
    try:
        about: dict[str, Any] = parse_json((folder / ABOUT).read_text(encoding="utf-8"))
        state: dict[str, Any] = torch.load(folder / STATE, map_location=device, weights_only=True)
    except Exception as error:  # torch, zip and JSON each raise their own kinds
        raise TrainError(
            f"checkpoint {folder} cannot be read ({error}): delete it, and the one before is used"
        ) from error
    return state, about


def check_same(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError where the run to resume had other settings, naming the first difference."""
    was, now = ({**each, "options": _trained(each.get("options"))} for each in (was, now))
    difference = first_difference(was, json.loads(json.dumps(now, default=str)))
    if difference is not None:
        key, old, new = difference
        raise ConfigError(
            f"--resume: {key} was {old!r} and now is {new!r}: a resumed run keeps all its arguments; give another "
            "folder for a new run"
        )


def _trained(options: Any) -> Any:
    """A method's options but for those that say how the result is stored: they may change when a run goes on."""
    return {k: v for k, v in options.items() if k != "save_dtype"} if isinstance(options, Mapping) else options


@contextmanager
def patient(tell: Callable[[], None]) -> Iterator[threading.Event]:
    """While inside, the first Ctrl-C sets an event (the step is finished first) and calls tell; the second interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        tell()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
