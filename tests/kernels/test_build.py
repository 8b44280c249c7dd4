"""What a built library's name depends on."""

from pathlib import Path

import pytest

from foretoken.kernels import build


def test_a_library_is_built_again_when_an_included_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    source, part = tmp_path / "whole.c", tmp_path / "parts" / "one.h"
    part.parent.mkdir()
    source.write_text('#include "parts/one.h"\nint two(void) { return ONE + 1; }\n')
    part.with_name("again.h").write_text('#include "one.h"\n')  # a circle ends
    part.write_text('#ifndef ONE\n#define ONE 1\n#include "again.h"\n#endif\n')
    first = build._build(source, (), ())
    assert build._build(source, (), ()) == first
    part.write_text('#ifndef ONE\n#define ONE 41\n#include "again.h"\n#endif\n')
    second = build._build(source, (), ())
    assert second != first
    assert build.ctypes.CDLL(str(second)).two() == 42
