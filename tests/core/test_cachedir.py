"""Where built kernels lie: the cache variable is obeyed, and where it cannot be written to another directory is found."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from foretell.core.cachedir import _own, cache_directory, kept_directories, other_directory


def test_the_variables_say_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("FORETELL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "foretell"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert not cache_directory().exists()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The system's temporary directory, as /tmp is."""
    if not hasattr(os, "getuid"):
        pytest.skip("this system's temporary directory is the user's own")
    place = tmp_path / "temporary"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    return place


def test_the_other_directory_is_the_users_own_and_kept(temporary: Path) -> None:
    assert len(kept_directories()) == 1, "none is made by looking"
    found = other_directory()
    assert found == temporary / f"foretell-{os.getuid()}"
    assert found.stat().st_mode & 0o777 == 0o700, "nobody else may put a library there"
    assert other_directory() == found
    assert kept_directories() == [cache_directory(), found]


@pytest.mark.parametrize("how", ["mode", "link", "owner", "above", "file"])
def test_no_code_is_read_where_others_may_write(how: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _own.cache_clear()
    path, uid = temporary / f"foretell-{os.getuid()}", os.getuid()
    if how == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(temporary / "elsewhere")
    elif how == "file":
        path.write_text("")
    else:
        path.mkdir(mode=0o700)
    if how == "mode":
        path.chmod(0o770)
    if how == "above":
        temporary.chmod(0o777)
    if how == "owner":
        path.rename(temporary / f"foretell-{uid + 1}")
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert kept_directories() == [cache_directory()]
    found = other_directory()
    assert found.name.startswith("foretell-")
    assert found != temporary / f"foretell-{os.getuid()}"
    assert found.stat().st_mode & 0o777 == 0o700
    assert other_directory() == found, "one for all"
    _own.cache_clear()


@pytest.mark.slow
def test_a_kernel_is_built_there_once(tmp_path: Path) -> None:
    """A read-only home left the machine without kernels, and later compiled them at every start."""
    file = tmp_path / "file"
    file.write_text("")
    code = (
        "import logging; logging.basicConfig(level='INFO', format='%(message)s')\n"
        "from foretell.kernels import small; print(small._cdf_library() is not None)"
    )
    env = {**os.environ, "FORETELL_CACHE": str(file / "below"), "TMPDIR": str(tmp_path)}
    for said in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=200, check=False
        )
        assert done.stdout.strip() == "True", done.stderr
        assert ("below cannot hold compiled kernels; they are kept in" in done.stderr) == said
        assert ("compiled C kernels cdf in " in done.stderr) == said
