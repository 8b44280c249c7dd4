"""What lies beside a head of its training: read where it is as this project writes it, and never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.doctor.record import read_record


def written(directory: Path, record: Any) -> Path:
    (directory / "record.json").write_text(record if isinstance(record, str) else json.dumps(record))
    return directory


def test_a_record_is_read(tmp_path: Path) -> None:
    record = read_record(written(tmp_path, {"target_hash": "ab", "result": {"conditional": [0.9, 1, 0.5]}}))
    assert record.target_hash == "ab"
    assert record.conditional == (0.9, 1.0, 0.5)  # a slot that always holds is the whole number 1 in some files


@pytest.mark.parametrize(
    "record",
    [
        "no JSON", [], {}, {"result": None}, {"result": {"conditional": None}}, {"result": {"conditional": 0.5}},
        {"result": {"conditional": {"1": 0.5}}}, {"result": {"conditional": [0.9, None, 0.5]}},
        {"result": {"conditional": [0.9, True]}}, {"result": {"conditional": [0.9, 1.5]}}, {"target_hash": 3},
        '{"result": {"conditional": [0.9, NaN]}}',
    ],
)  # fmt: skip
def test_what_is_no_curve_is_none(tmp_path: Path, record: Any) -> None:
    """A value that is left out alone would move those after it to other slots."""
    found = read_record(written(tmp_path, record))
    assert (found.conditional, found.target_hash) == ((), None)


def test_nothing_recorded(tmp_path: Path) -> None:
    found = read_record(tmp_path)
    assert (found.conditional, found.target_hash, found.target.name) == ((), None, None)
