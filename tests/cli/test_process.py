"""What only a real process shows: a terminal, Ctrl-C, a closed pipe, a full disk, and how much --help imports."""

import os
import select
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from foretell.cli.output import RESET, TINT

pty = pytest.importorskip("pty", reason="terminals are opened as Unix does")
PROGRAM = [sys.executable, "-m", "foretell.cli.main"]


def environment(**changes: str) -> dict[str, str]:
    """Ours, without what would change the output; one thread."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FORETELL_", "NO_COLOR"))}
    return {**kept, "OMP_NUM_THREADS": "1", "TERM": "xterm", **changes}


def read_until(terminal: int, enough: bytes, seconds: float = 120) -> bytes:
    """What a terminal shows until a text is there, or until it is closed."""
    seen, deadline = b"", monotonic() + seconds
    while monotonic() < deadline and enough not in seen:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break  # closed at the other end
            if not data:
                break
            seen += data
    return seen


def test_terminal_tints_accepted_tokens_and_ctrl_c_restores_it(models: dict[str, Path]) -> None:
    options = ["--target", models["target"], "--draft", models["target"], "--implementation", "lean", "--seed", "1"]
    command = [*PROGRAM, "generate", "def f(", *map(str, options), "--max-new-tokens", "15000"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    assert b"loading" in read_until(ours, b"\x1b[?25h")  # the cursor is back: loaded
    read_until(ours, b"guesses keep the text: checked here")  # what waits has a green sign, too
    shown = read_until(ours, TINT.encode())
    assert TINT.encode() in shown, shown
    os.write(ours, b"\x03")  # Ctrl-C
    shown += read_until(ours, b"steps")
    rest = read_until(ours, b"nothing like this")
    os.close(ours)
    text = (shown + rest).decode(errors="replace")
    assert process.wait(60) == 130
    assert "Traceback" not in text
    body, _, figures = text.partition("interrupted")
    assert "lean fp32" in figures
    assert f"{TINT}tinted{RESET}: guessed by draft_model and accepted" in figures
    assert body.count(RESET) >= 1
    assert body.rindex(RESET) > body.rindex(TINT)


def test_help_and_usage_errors_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, foretell.cli.app as a\n"
        "for args in (['generate', '--help'], ['generate', '--nope'], ['--version'], ['generate', 'x', '-o', '/no/x']):\n"
        "    try: a.app(args)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True, timeout=60)


def test_closed_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [*PROGRAM, "--help"], stdout=writing, stderr=subprocess.PIPE, env=environment(), timeout=60
    )
    os.close(writing)
    assert process.stderr == b""
    assert process.returncode == 1


def test_full_disk_behind_standard_output_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, env=environment(), timeout=60
        )
    assert process.stderr.decode().count("\n") == 1
    assert b"No space left on device" in process.stderr
    assert process.returncode == 1


def test_interrupt_before_anything_began_is_silent() -> None:
    code = (
        "import sys, foretell.cli.main as m\n"
        "import foretell.cli.app as a\n"
        "def interrupted(*args, **options): raise KeyboardInterrupt\n"
        "a.app.__class__.__call__ = interrupted\n"
        "m.main()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60)
    assert (process.returncode, process.stderr) == (130, b"")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("methods >&-", 0, ""),
        ("methods --no-such 2>&-", 2, ""),
        ("methods <&- >&- 2>&-", 0, ""),
        ("generate - --target nowhere <&-", 1, "nowhere"),
    ],
)
def test_standard_streams_that_are_closed(arguments: str, status: int, says: str) -> None:
    """The null device takes their place: no traceback, and no file that is opened later is standard output."""
    shell = f"{sys.executable} -m foretell.cli.main {arguments}"
    done = subprocess.run(["sh", "-c", shell], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    assert says in done.stderr
