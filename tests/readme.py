"""Run the documents' own commands and Python, verbatim: ``python tests/readme.py`` (continuous integration does).

Every fenced ``sh`` or ``python`` block that follows the comment ``<!-- run -->`` is executed, with the environment's own
programs first on the path; the first that fails ends the run with its output. A block that follows ``<!-- file: NAME -->``
is written to that file of an empty folder first, and the document's blocks then run in that folder; those of a document
without files run in the project's root. What a document installs by pip goes into a folder that is deleted afterwards.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/first-use.md", "docs/extend.md", "docs/add-a-model.md")
BLOCK = re.compile(r"<!-- run -->\n+```(sh|python)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"<!-- file: (\S+) -->\n+```\w+\n(.*?)```", re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of every block that asks to be run."""
    return BLOCK.findall(text)


def files(text: str) -> dict[str, str]:
    """The text of every block that is a file, by its name."""
    return dict(FILE.findall(text))


def environment(scratch: Path) -> dict[str, str]:
    """This process's, with pip's packages in a folder of scratch and without the network for building them."""
    site = str(scratch / "site")
    paths = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FORETELL_SCRATCH": str(scratch),
        "PYTHONPATH": os.pathsep.join(paths),
        "PIP_TARGET": site,
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the wrong way round: 0 is "no isolation"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(name: str) -> int:
    """Run a document; how many blocks ran. Raises SystemExit with the first failure."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found, laid = blocks(text), files(text)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for file, content in laid.items():
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            (scratch / file).write_text(content, encoding="utf-8")
        for language, code in found:
            command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
            done = subprocess.run(
                command, cwd=scratch if laid else ROOT, env=environment(scratch), capture_output=True, text=True,
                timeout=600, check=False,
            )  # fmt: skip
            print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {name}: {code.strip().splitlines()[0]}")
            if done.returncode:
                raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return len(found)


def main() -> int:
    """Run all documents; 0 iff every block succeeds and each document has at least one."""
    counts = {name: run(name) for name in DOCUMENTS}
    print("; ".join(f"{count} blocks of {name} ran" for name, count in counts.items()))
    return 0 if all(counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
