"""Fetch the packages that the training text comes from: pinned by version and sha256, with the ordinary pip client.

Wheels are asked for as CPython 3.11 on x86-64 Linux, whatever runs this, so that the hashes are the same everywhere.
The standard library comes from the Python that runs `recipes.corpus`: use 3.11 to get the text of the model card.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SDISTS = ["--no-binary", ":all:", "-r", str(HERE / "requirements-sdists.txt")]
WHEELS = [
    *("--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11"),
    *(part for level in ("2014", "_2_24", "_2_27", "_2_28") for part in ("--platform", f"manylinux{level}_x86_64")),
    *("-r", str(HERE / "requirements-wheels.txt")),
]


def fetch(out: Path) -> None:
    """Download all archives to `out`; pip refuses what does not have the pinned hash."""
    out.mkdir(parents=True, exist_ok=True)
    for choice in (SDISTS, WHEELS):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "-d",
                str(out),
                *choice,
            ],
            check=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    fetch(parser.parse_args().out)


if __name__ == "__main__":
    main()
