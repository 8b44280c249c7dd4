"""Acceptance over requests, with what was swapped in and taken back: the picture of a learner's history."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError

WINDOW = 12
"""Requests of the running mean."""
COLOURS = {"swap": "C2", "revert": "C3", "drift": "C1", "refused": "0.8"}


def draw_history(state: Mapping[str, Any], file: Path | str) -> Path:
    """Draw what ``Service.learner`` returns, as PNG, SVG or PDF by the file's name. Raises ConfigError where matplotlib is
    not installed or the kind of file is unknown, OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the plot needs matplotlib: pip install 'foretell[plot]'") from None
    file = Path(file)
    kind = file.suffix.removeprefix(".").lower() or "png"
    if kind not in ("png", "svg", "pdf"):
        raise ConfigError(f"--plot {file}: expected a name that ends in .png, .svg or .pdf")
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    history = state["history"]
    axes.plot([one["number"] for one in history], running(history), color="C0", label=f"mean of {WINDOW} requests")
    told: set[str] = set()
    for event in state["events"]:
        name = event["event"]
        if name in COLOURS:
            label = None if name in told else name
            axes.axvline(event["request"], color=COLOURS[name], linewidth=1.0, alpha=0.7, label=label)
            told.add(name)
    axes.set(xlabel="request", ylabel="first guesses kept", ylim=(0.0, 1.0))
    axes.legend(loc="lower right")
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=120)
    file.write_bytes(image.getvalue())
    return file


def running(history: Sequence[Mapping[str, Any]], window: int = WINDOW) -> list[float]:
    """Share of first guesses kept in the last ``window`` requests, after each one."""
    out = []
    for index in range(len(history)):
        last = history[max(0, index - window + 1) : index + 1]
        out.append(sum(one["kept"] for one in last) / max(1, sum(one["guessed"] for one in last)))
    return out
