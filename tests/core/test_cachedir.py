"""Where built kernels lie: the cache variable is obeyed, and a home that cannot be written to costs a build, no kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretell.core.cachedir import cache_directory, usable_directory


def test_the_variables_say_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    assert usable_directory(cache_directory()) == tmp_path / "own"
    assert (tmp_path / "own").is_dir()
    monkeypatch.delenv("FORETELL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "foretell"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert not cache_directory().exists()


def test_what_cannot_be_written_is_replaced_by_a_directory_of_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    found = usable_directory(file / "below")
    assert found == usable_directory(file / "other"), "one for all"
    assert found.stat().st_mode & 0o777 == 0o700, "nobody else may put a library there"
    assert found.stat().st_uid == os.getuid()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert usable_directory(tmp_path) == found


@pytest.mark.slow
def test_a_kernel_is_built_there(tmp_path: Path) -> None:
    """A read-only home left the machine without kernels."""
    file = tmp_path / "file"
    file.write_text("")
    code = "from foretell.kernels import cdf; print(cdf._cdf_library() is not None)"
    env = {**os.environ, "FORETELL_CACHE": str(file / "below"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=200, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left"
