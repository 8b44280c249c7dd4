"""Run the README's own commands and Python, verbatim: ``python tests/readme.py`` (continuous integration does).

Every fenced ``sh`` or ``python`` block that follows the comment ``<!-- run -->`` is executed from the project's root with
the environment's own programs first on the path; the first that fails ends the run with its output.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- run -->\n+```(sh|python)\n(.*?)```", re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of every block that asks to be run."""
    return BLOCK.findall(text)


def main() -> int:
    """Run all of them; 0 iff all succeed and there is at least one."""
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as scratch:
        environment["FORETOKEN_SCRATCH"] = scratch
        for language, code in found:
            command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {code.strip().splitlines()[0]}")
            if done.returncode:
                print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
                return 1
    print(f"{len(found)} blocks of the README ran")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
