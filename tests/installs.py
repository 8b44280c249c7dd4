"""Resolve everything that may be installed, for every platform and Python, from the package index alone:
``python tests/installs.py [--index URL]`` (continuous integration does). Nothing is installed.

What is resolved: every line ``pip install`` of the documents, the Makefile, the workflows and the package's own messages,
and every extra of pyproject.toml. Where an extra exists is said by the table of docs/install.md: it must resolve there,
and nowhere else. Only wheels count, as a user need not have a compiler; what some extra has as sources alone is named in
``SOURCES``. The settings of this machine's pip are not read: torch is the index's own, as on anybody's machine.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_34",
    "Linux ARM64": "aarch64-manylinux_2_34",
    "macOS": "aarch64-apple-darwin",
    "Windows": "x86_64-pc-windows-msvc",
}
"""The names of docs/install.md, and uv's."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SOURCES: dict[str, tuple[str, ...]] = {}
"""Packages in Python alone that an extra requires and that have no wheels."""
CONSTRAINTS = "constraints.txt"
TABLE = re.compile(r"^\| `\[([\w-]+)\]` \| [^|]* \| ([^|]*) \|$", re.MULTILINE)
COMMAND = re.compile(r"(\bpip install|\$\(PIP\)) ([^#`\n]*)(#[^\n]*)?")
WORD = re.compile(rf"-c {CONSTRAINTS}|--?[\w-]+|\"[^\"]*\"|'[^']*'|[^\s\"',;:()\\]+")
OURS = re.compile(r"(?:foretell|\.)(?:\[([\w,-]+)\])?|\S+\.whl")
OTHERS = ("torch", "uv")


@dataclass(frozen=True, order=True)
class Install:
    """One command: the extras of this package (none: not this package), other packages, and whether under constraints."""

    ours: bool
    extras: tuple[str, ...]
    others: tuple[str, ...]
    constrained: bool

    def __str__(self) -> str:
        named = [*(["." + (f"[{','.join(self.extras)}]" if self.extras else "")] if self.ours else []), *self.others]
        return f"pip install {'-c constraints.txt ' if self.constrained else ''}{' '.join(named)}"


def read_command(line: str) -> Iterator[Install]:
    """The installs that a line stands for: those it names, and one of each further extra that its comment has in brackets.
    Words that are no packages of these end a command, as in a sentence."""
    for start, words, comment in COMMAND.findall(line):
        constrained = start == "$(PIP)" or f"-c {CONSTRAINTS}" in words
        extras: list[str] = []
        others: list[str] = []
        ours = False
        for word in WORD.findall(words):
            word = word.strip("\"'")
            if found := OURS.fullmatch(word):
                ours = True
                extras += found[1].split(",") if found[1] else []
            elif word in OTHERS:
                others.append(word)
            elif not word.startswith("-"):
                break
        if ours or others:
            yield Install(ours, tuple(extras), tuple(others), constrained)
        for extra in re.findall(r"\[([\w-]+)\]", comment):
            yield Install(True, (extra,), (), constrained)
        yield from read_command(comment)


def documented() -> dict[Install, str]:
    """Every documented install, and the first place that has it."""
    files = [ROOT / "README.md", ROOT / "Makefile", ROOT / "recipes" / "README.md"]
    files += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    files += sorted((ROOT / "src" / "foretell").rglob("*.py"))
    found: dict[Install, str] = {}
    for file in files:
        where = file.relative_to(ROOT).as_posix()
        for line in file.read_text(encoding="utf-8").replace("\\\\[", "[").splitlines():
            found |= {one: where for one in read_command(line) if one not in found}
    return found


def table() -> dict[str, tuple[str, ...]]:
    """Extra -> platforms that have it, by docs/install.md; "all" stands for all."""
    rows = TABLE.findall((ROOT / "docs" / "install.md").read_text(encoding="utf-8"))
    return {
        extra: tuple(name for name in PLATFORMS if where == "all" or name.startswith(tuple(where.split(", "))))
        for extra, where in rows
    }  # fmt: skip


def extras() -> list[str]:
    """Those of pyproject.toml."""
    return list(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )


def everything() -> dict[Install, str]:
    """What is documented, and every extra by itself under the constraints; vLLM names its own versions of everything."""
    own = {Install(True, (extra,), (), extra != "vllm"): "pyproject.toml" for extra in extras()}
    return {**own, **documented()}


def exists(install: Install, platform: str) -> bool:
    """Whether the table says that it can be installed there."""
    return all(platform in table()[extra] for extra in install.extras)


def resolve(install: Install, platform: str, python: str, cache: Path, index: str | None) -> str | None:
    """What the resolver said where there is no solution; None where there is one."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--cache-dir", str(cache)]
    command += ["--python-platform", PLATFORMS[platform], "--python-version", python, "--only-binary", ":all:"]
    command += [part for extra in install.extras for name in SOURCES.get(extra, ()) for part in ("--no-binary", name)]
    command += ["--constraint", CONSTRAINTS] if install.constrained else []
    command += ["--default-index", index] if index else []
    command += ["pyproject.toml"] if install.ours else []
    command += [part for extra in install.extras for part in ("--extra", extra)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    environment["MACOSX_DEPLOYMENT_TARGET"] = "14.0"  # torch's
    done = subprocess.run(
        [*command, *(["-"] if install.others else [])], input="\n".join(install.others), cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr.strip() if done.returncode else None


def unreachable(index: str | None, cache: Path) -> str | None:
    """Why the index cannot be asked at all; None where it can. A package without requirements is looked for."""
    said = resolve(Install(False, (), ("packaging",), False), "Linux x86-64", "3.11", cache, index)
    return said if said is not None and re.search(r"fetch|connect|dns|network|timed out", said, re.IGNORECASE) else None


@dataclass(frozen=True)
class Place:
    """Where something is to be installed."""

    platform: str
    python: str
    cache: Path
    index: str | None

    def faults(self, asked: dict[Install, str]) -> list[str]:
        """Everything that is not as documented. A solution of several installs at once is one of each of them, so those
        that exist here are tried together first."""
        faults = []
        for constrained in (True, False):
            here = [one for one in asked if one.constrained == constrained and exists(one, self.platform)]
            alone = [one for one in here if "vllm" in one.extras]  # it may name versions that others do not
            for group in ([one for one in here if one not in alone], *([one] for one in alone)):
                if group and self._said(together(group)) is not None:
                    faults += [f"{asked[one]}: {one}: {said}" for one in group if (said := self._said(one)) is not None]
        for one in asked:
            if not exists(one, self.platform) and self._said(one) is None:
                faults.append(
                    f"{asked[one]}: {one}: it resolves, and docs/install.md says that it does not exist there"
                )
        return [f"FAIL {self.platform}, Python {self.python}, {fault}" for fault in faults]

    def _said(self, install: Install) -> str | None:
        return resolve(install, self.platform, self.python, self.cache, self.index)


def together(group: list[Install]) -> Install:
    """All of them in one command."""
    extras = sorted({extra for one in group for extra in one.extras})
    others = sorted({name for one in group for name in one.others})
    return Install(any(one.ours for one in group), tuple(extras), tuple(others), group[0].constrained)


def main() -> int:
    """0 iff everything resolves where it exists, and nothing where it does not."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--index", help="another package index than the public one")
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args()
    asked = everything()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        if (why := unreachable(args.index, cache)) is not None:
            print(f"NOT CHECKED: the package index cannot be reached, so no installation was resolved: {why[-300:]}")
            return 0
        places = [Place(name, python, cache, args.index) for name in PLATFORMS for python in PYTHONS]
        with ThreadPoolExecutor(args.jobs) as pool:
            faults = [fault for found in pool.map(lambda place: place.faults(asked), places) for fault in found]
    print(*faults, f"{len(asked)} kinds of installation at {len(places)} places, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
