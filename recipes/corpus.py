"""Turn downloaded Python packages into clean text: documents with a category, split into training and held-out text.

A *document* is one source file: category ``code`` (``.py``) or ``prose`` (``.rst``, ``.txt``, ``.md``). Whole
packages are held out, so that held-out text has no sibling file in the training text; on top of that a few files of
the training packages are held out, chosen by the hash of their content. Nothing here depends on the order of the file
system.

Output, one JSON object a line: ``{"source", "path", "category", "text"}`` in ``train.jsonl``,
``heldout_packages.jsonl`` and ``heldout_files.jsonl``, plus ``manifest.json`` with the sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sysconfig
import tarfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.train.found import clean

HELD_OUT_PACKAGES = frozenset({"flask", "click", "tornado", "werkzeug"})
HELD_OUT_FILE_SHARE = 0.005  # of the files of training packages
CATEGORY_OF_SUFFIX = {".py": "code", ".rst": "prose", ".txt": "prose", ".md": "prose"}
# Paths that are not written by a person for a person to read: locale data, fixtures, vendored or generated files.
SKIP_PATH = re.compile(
    r"(^|/)(locale|locales|fixtures|_vendor|vendor|extern|node_modules|static|data|datasets|idlelib|lib2to3/tests|"
    r"encodings|__pycache__|site-packages|LICENSES?|licenses)(/|$)|\.egg-info/|\.dist-info/|"
    r"(^|/)(requirements[^/]*|SOURCES|top_level|AUTHORS|CONTRIBUTORS|robots|LICENSE[^/]*|COPYING[^/]*)\.(txt|rst|md)$|"
    r"(^|/)(_parser|parsetab|lextab|[^/]*_pb2)\.py$"
)
TESTS_PATH = re.compile(r"(^|/)(tests?|testing|test_[^/]*)(/|$)|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$")


@dataclass(frozen=True)
class Document:
    """One cleaned file."""

    source: str  # package name, or "python" for the standard library
    path: str  # inside the package
    category: str  # "code" or "prose"
    text: str


def archive_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(path inside the package, content) of every candidate file of a wheel or source distribution."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if Path(info.filename).suffix in CATEGORY_OF_SUFFIX:
                    yield info.filename, wheel.read(info)
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            if member.isfile() and Path(member.name).suffix in CATEGORY_OF_SUFFIX:
                handle = sdist.extractfile(member)
                if handle is not None:
                    yield member.name.split("/", 1)[-1], handle.read()


def standard_library_files() -> Iterator[tuple[str, bytes]]:
    """(path, content) of the running Python's own library (the Python licence)."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        yield str(path.relative_to(root)), path.read_bytes()


def package_name(archive: Path) -> str:
    """Normalised distribution name of an archive's file name."""
    return re.split(r"-\d", archive.name)[0].lower().replace("_", "-")


def documents(archives: list[Path], *, keep_tests: bool) -> Iterator[Document]:
    """All cleaned documents, without exact duplicates (by hash of the text)."""
    seen: set[str] = set()
    sources = [(package_name(a), archive_files(a)) for a in sorted(archives)]
    for source, files in [*sources, ("python", standard_library_files())]:
        for path, raw in files:
            if SKIP_PATH.search(path) or (TESTS_PATH.search(path) and not keep_tests):
                continue
            text = clean(raw)
            if text is None or len(text) < 200:
                continue
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen:
                continue
            seen.add(digest)
            yield Document(source, path, CATEGORY_OF_SUFFIX[Path(path).suffix], text)


def split_of(document: Document) -> str:
    """The split that a document belongs to; a function of its source and content alone."""
    if document.source in HELD_OUT_PACKAGES:
        return "heldout_packages"
    draw = int(hashlib.sha256(b"split" + document.text.encode()).hexdigest()[:8], 16) / 16**8
    return "heldout_files" if draw < HELD_OUT_FILE_SHARE else "train"


def main() -> None:
    """Command line: archives in, three files of documents and a manifest out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--archives", type=Path, required=True, help="folder that `recipes.fetch` filled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep-tests", action="store_true", help="keep test files too (more text, less varied)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    archives = [p for p in args.archives.iterdir() if p.name.endswith((".whl", ".tar.gz"))]
    size: dict[str, Counter[str]] = defaultdict(Counter)
    handles = {s: (args.out / f"{s}.jsonl").open("w") for s in ("train", "heldout_packages", "heldout_files")}
    for document in documents(archives, keep_tests=args.keep_tests):
        split = split_of(document)
        handles[split].write(json.dumps(document.__dict__) + "\n")
        size[split][f"{document.source}/{document.category}"] += len(document.text.encode())
    for handle in handles.values():
        handle.close()
    manifest = {split: {"bytes": sum(c.values()), "by_source": dict(sorted(c.items()))} for split, c in size.items()}
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    main()
