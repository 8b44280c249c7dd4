"""Run the documents' own commands and Python, verbatim: ``python tests/readme.py [DOCUMENT ...]``.

Every fenced ``sh`` or ``python`` block that follows the comment ``<!-- run -->`` is executed, a block of ``sh`` command by
command, with the environment's own programs first on the path; the first that fails ends the run with its output.
``<!-- run: OPTIONS -->`` adds options to each command, which make it short, ``<!-- run if NAME -->`` runs a block where a
package is installed, and ``<!-- prints: PATTERN -->`` behind either says what a block prints, as a regular expression. A
block that follows ``<!-- file: NAME -->`` is written to that file of an empty folder first, and the document's blocks then
run in that folder; those of a document without files run in the project's root. What a document installs by pip goes into
a folder that is deleted afterwards.
"""

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md", "docs/first-use.md", "docs/extend.md", "docs/add-a-model.md", "docs/how-a-step-works.md", "docs/papers.md",
    "docs/parallel.md", "docs/ray.md",
)  # fmt: skip
BLOCK = re.compile(
    r"<!-- run(?: if (\w+))?(?:: (.*?))? -->\n+(?:<!-- prints: (.*?) -->\n+)?```(sh|python)\n(.*?)```", re.DOTALL
)
FILE = re.compile(r"<!-- file: (\S+) -->\n+```\w+\n(.*?)```", re.DOTALL)
COMMENT = re.compile(r"\s{2,}# .*$", re.MULTILINE)


class Block(NamedTuple):
    """What is executed together."""

    needs: str  # a package, or ""
    prints: str  # a pattern, or ""
    language: str
    commands: list[str]


def blocks(text: str) -> list[Block]:
    """Every block that asks to be run."""
    made = []
    for needs, options, prints, language, code in BLOCK.findall(text):
        commands = [code]
        if language == "sh":
            lines = COMMENT.sub("", code).replace("\\\n", " ").strip().splitlines()
            commands = [f"{line} {options}".strip() for line in lines]
        made.append(Block(needs, prints, language, commands))
    return made


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
    """Run a document; how many commands ran. Raises SystemExit with the first failure."""
    text = (ROOT / name).read_text(encoding="utf-8")
    laid, ran = files(text), 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for file, content in laid.items():
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            (scratch / file).write_text(content, encoding="utf-8")
        for own in ("examples", "benchmarks"):
            if not (scratch / own).exists():
                (scratch / own).symlink_to(ROOT / own, target_is_directory=True)
        for block in blocks(text):
            if block.needs and find_spec(block.needs) is None:
                print(f"left {name}: {block.commands[0]}: {block.needs} is not installed")
                continue
            printed = ""
            for command in block.commands:
                printed += _run(name, block.language, command, scratch, scratch if laid else ROOT)
                ran += 1
            if block.prints and not re.search(block.prints, printed, re.DOTALL):
                raise SystemExit(
                    f"FAIL {name}: {block.commands[-1]}: it does not print {block.prints!r}:\n{printed[-2000:]}"
                )
    return ran


def _run(name: str, language: str, code: str, scratch: Path, folder: Path) -> str:
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    began = perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment(scratch), capture_output=True, text=True, timeout=600, check=False
    )
    said = f"{name}: {code.strip().splitlines()[0]} ({perf_counter() - began:.0f} s)"
    print(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {said}", flush=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def main(names: list[str]) -> int:
    """Run documents, all if none is named; 0 iff every command succeeds and each document has at least one block."""
    wanted = names or DOCUMENTS
    counts = {name: run(name) for name in wanted}
    print("; ".join(f"{count} commands of {name} ran" for name, count in counts.items()))
    return 0 if all(blocks((ROOT / name).read_text(encoding="utf-8")) for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
