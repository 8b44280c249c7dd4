"""A folder of packages that exist for one test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell import HEADS, METHODS, SHAPES, VERIFIERS


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path. What lies in it before a registry is first asked is found; all is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (METHODS, VERIFIERS, SHAPES, HEADS):
        registry.forget()
    yield tmp_path
    monkeypatch.undo()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    for registry in (METHODS, VERIFIERS, SHAPES, HEADS):
        registry.forget()
