"""The page docs/help.md, made from ``--help``: ``python -m foretell.cli.helpdoc > docs/help.md``."""

import os
import subprocess
import sys

COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    ("generate",),
    ("chat",),
    ("pull",),
    ("list",),
    ("rm",),
    ("cache",),
    ("doctor",),
    ("explain",),
    ("bench",),
    ("report",),
    ("serve",),
    ("train",),
    ("learn",),
    ("certify",),
    ("methods",),
    ("export",),
    ("vllm-args",),
    ("theory",),
    ("theory", "length"),
    ("theory", "optimum"),
    ("theory", "shape"),
)
HEAD = "# Every command and option\n\nMade by `python -m foretell.cli.helpdoc`; a test fails when it is stale.\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command in COMMANDS:
        title = " ".join(("foretell", *command))
        parts.append(f"## `{title}`\n\n```text\n{_help(command)}\n```\n")
    return "\n".join(parts)


def _help(command: tuple[str, ...]) -> str:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("FORETELL_", "FORCE_COLOR"))}
    plain |= {"TERMINAL_WIDTH": "110", "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    run = [sys.executable, "-m", "foretell.cli.main", *command, "--help"]
    said = subprocess.run(run, env=plain, capture_output=True, encoding="utf-8", check=True).stdout
    return "\n".join(line.rstrip() for line in said.strip("\n").splitlines())


if __name__ == "__main__":
    sys.stdout.write(page())
