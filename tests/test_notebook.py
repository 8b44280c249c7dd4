"""The notebook runs from top to bottom, offline, and what it says is so."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs/notebooks/learn.ipynb"
MOST_BYTES = 40_000
RUN = """
import sys, nbformat
from nbclient import NotebookClient
made = nbformat.read(sys.argv[1], 4)
NotebookClient(made, timeout=120, kernel_name="python3").execute()
nbformat.write(made, sys.argv[2])
"""


def printed(notebook: dict[str, Any]) -> str:
    cells = notebook["cells"]
    return "".join("".join(output.get("text", ())) for cell in cells for output in cell.get("outputs", ()))


def test_it_is_small_and_has_its_text_outputs() -> None:
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            assert output["output_type"] == "stream", "texts alone: no pictures, no errors"
            assert output["name"] == "stdout"
    assert "certified" in printed(notebook)


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    if not importlib.util.find_spec("nbclient"):
        pytest.skip("without the extra docs")
    out = tmp_path / "run.ipynb"
    environment = {**os.environ, "FORETELL_MODELS": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    text = printed(json.loads(out.read_text(encoding="utf-8")))
    assert "one list:    you agree in 100.0%" in text
    lines = r"^(?:they agreed in|by the formula|the most for a single guess) +(0\.\d+)"
    agreed, formula, most = map(float, re.findall(lines, text, re.MULTILINE))
    assert agreed == pytest.approx(formula, abs=5e-3)  # 200,000 rounds: five standard errors
    assert formula < most
    assert "the same tokens: True" in text
    assert "the same texts: False" not in text
    assert re.search(r"^certified$", text, re.MULTILINE)
