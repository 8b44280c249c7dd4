"""The loss plot beside the log: training and held-out loss, and the expected length, by step."""

import io
from pathlib import Path
from typing import Any

from foretell.core.errors import ConfigError
from foretell.core.jsontext import parse_json
from foretell.train import checkpoint
from foretell.train.trainer import LOG, RECORD

PLOT = "loss.png"
SMOOTH = 50
"""The bold line is a running mean over this part of the steps."""


def draw_losses(out: Path | str) -> Path | None:
    """Draw ``loss.png`` from ``log.jsonl`` and ``record.json`` of a run's folder; None, and no file, without a step.

    Losses are means of a slot, so that they stay comparable when slots are added. Raises ConfigError where matplotlib
    is not installed, OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the loss plot needs matplotlib: pip install 'foretell[plot]'") from None
    out = Path(out)
    rows, held = read_log(out)
    if not rows:
        return None
    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    lengths = [(step, found["expected_length"]) for step, found in held if found.get("conditional")]
    axes = figure.subplots(2 if lengths else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1] if lengths else [1])
    top = axes[0, 0]
    steps = [row["step"] for row in rows]
    losses = [_loss(row) for row in rows]
    top.plot(steps, losses, color="C0", alpha=0.3, linewidth=0.8)
    top.plot(steps, smooth(losses), color="C0", label="training, mean of a slot")
    counts = [len(row.get("slot_losses") or []) for row in rows]
    if max(counts) > 1:
        first = [row["slot_losses"][0] for row in rows]
        known = [(step, loss) for step, loss in zip(steps, first, strict=True) if loss is not None]
        top.plot(
            [s for s, _ in known], smooth([y for _, y in known]), color="C2", linestyle="--", label="training, slot 1"
        )
    for at in range(1, len(rows)):
        if counts[at] != counts[at - 1]:
            top.axvline(steps[at], color="0.6", linestyle=":")
            top.annotate(
                f" {counts[at]} slots", (steps[at], 0.98), xycoords=("data", "axes fraction"), va="top", color="0.4"
            )
    if held:
        top.plot(
            [step for step, _ in held],
            [_loss(found) for _, found in held],
            "o-",
            color="C1",
            label="held-out, mean of a slot",
        )
    top.set_ylabel("loss")
    top.legend()
    if lengths:
        axes[1, 0].plot([step for step, _ in lengths], [length for _, length in lengths], "o-", color="C1")
        axes[1, 0].set_ylabel("expected length,\nheld-out")
    axes[-1, 0].set_xlabel("step")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=100)
    part, file = out / f".{PLOT}.part", out / PLOT
    try:
        checkpoint.write_bytes(part, image.getbuffer())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def read_log(out: Path) -> tuple[list[dict[str, Any]], list[tuple[int, dict[str, Any]]]]:
    """(a row a step, [(step, held-out figures)] with the final ones where the run has finished)."""
    log, record = out / LOG, out / RECORD
    rows = [parse_json(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    held = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
    about = parse_json(record.read_text(encoding="utf-8")) if record.exists() else {}
    if about.get("finished") and about.get("result") and rows:
        held.append((about["steps"], about["result"]))
    return rows, held


def smooth(values: list[float]) -> list[float]:
    """Running mean of the last ``len / SMOOTH`` values, at least one; at the beginning of as many as there are."""
    width = max(1, len(values) // SMOOTH)
    return [sum(values[max(0, at - width + 1) : at + 1]) / min(width, at + 1) for at in range(len(values))]


def _loss(found: dict[str, Any]) -> float:
    mean = found.get("loss_per_slot")
    return float(found["loss"] if mean is None else mean)
