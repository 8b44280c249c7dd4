"""The loss plot: drawn from what a run's folder holds, and only where matplotlib is installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.core.errors import ConfigError
from foretell.train.plot import PLOT, draw_losses, read_log, smooth

matplotlib = pytest.importorskip("matplotlib")


def folder(out: Path, *, slots: int = 3, finished: bool = True) -> Path:
    """Ten steps, slots joining after the fifth, an evaluation at the fourth and at the end."""
    out.mkdir(exist_ok=True)
    held = {"loss": 4.0, "loss_per_slot": 2.0 if slots else None, "conditional": [0.5] * slots, "expected_length": 1.5}
    lines = []
    for step in range(1, 11):
        each = [3.0 / step] * (1 if step <= 5 else slots) if slots else []
        row: dict[str, Any] = {"step": step, "loss": float(sum(each)), "slot_losses": each}
        row["loss_per_slot"] = each[0] if each else None
        lines.append({**row, "held_out": held} if step == 4 else row)
    (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "record.json").write_text(
        json.dumps({"finished": finished, "steps": 10, "result": held if finished else None})
    )
    return out


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_it_is_a_picture(tmp_path: Path, slots: int) -> None:
    from matplotlib.image import imread

    assert draw_losses(folder(tmp_path, slots=slots)) == tmp_path / PLOT
    pixels = imread(tmp_path / PLOT)
    assert pixels.shape[0] > 200
    assert pixels.min() < 0.5  # something is on it
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: (seen.append(self), file.write(b"x")))
    draw_losses(folder(tmp_path))
    top, bottom = seen[0].axes
    lines = {line.get_label(): line for line in top.get_lines()}
    assert {"training, mean of a slot", "training, slot 1", "held-out, mean of a slot"} <= set(lines)
    assert lines["training, mean of a slot"].get_ydata()[5] == pytest.approx(0.5)  # where slots join nothing jumps
    assert lines["held-out, mean of a slot"].get_xdata().tolist() == [4, 10]
    assert [text.get_text() for text in top.texts] == [" 3 slots"]
    assert bottom.get_lines()[0].get_ydata().tolist() == [1.5, 1.5]


def test_a_run_under_way_and_one_without_a_step(tmp_path: Path) -> None:
    assert [step for step, _ in read_log(folder(tmp_path, finished=False))[1]] == [4]
    (tmp_path / "empty").mkdir()
    assert draw_losses(tmp_path / "empty") is None
    assert list((tmp_path / "empty").iterdir()) == []


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'foretell\[plot\]'"):
        draw_losses(folder(tmp_path))


def test_smooth() -> None:
    assert smooth([4.0, 2.0]) == [4.0, 2.0]
    assert smooth([]) == []
    found = smooth([float(at % 2) for at in range(200)])  # of four values
    assert (found[0], found[1], found[3], found[100]) == (0.0, 0.5, 0.5, 0.5)
