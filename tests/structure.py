"""The shape of the source tree: which file imports which, circles among them, and how deep the imports of a folder go.

``python -m tests.structure`` prints a line for every folder of the package, and how long its documents are. With a method
(``auto``, ``hybrid``, ``none``, ...) it also says in how many files the functions lie that one request calls.
"""

import ast
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import foretell

Graph = Mapping[str, frozenset[str]]
"""Files to the files that they import: paths without suffix, such as "engine/loop" and "engine/__init__"."""
ROOT = Path(__file__).parents[1]
PACKAGE = Path(foretell.__path__[0])
PROMPT = "def fibonacci(n):"


def imports(source: str, package: tuple[str, ...]) -> list[str]:
    """Absolute dotted names of all that a file imports, anywhere in it: names of ``from a import b`` as a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{prefix}.{name.name}" for name in node.names]
    return found


def arrows(root: Path) -> dict[str, frozenset[str]]:
    """What each file of the package in a folder imports of it, by any statement: also in functions, also for types."""
    found = (Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in found if path.suffix == ".py"}

    def file_of(name: str) -> str | None:
        top, *rest = name.split(".")
        if top != root.name:
            return None
        # A name is a file, a folder, or a value of the file or folder before it.
        paths = ["/".join([*parts, *end]) for parts in (rest, rest[:-1]) for end in ((), ("__init__",))]
        return next((path for path in paths if path in files), None)

    graph = {}
    for file, path in sorted(files.items()):
        named = imports(path.read_text(encoding="utf-8"), (root.name, *file.split("/")[:-1]))
        graph[file] = frozenset(found for name in named if (found := file_of(name)) not in (None, file))
    return graph


def within(graph: Graph, folder: str) -> dict[str, frozenset[str]]:
    """The files under a folder ("": all), and the arrows among them."""
    inside = {file for file in graph if not folder or file.startswith(f"{folder}/")}
    return {file: frozenset(graph[file] & inside) for file in sorted(inside)}


def components(graph: Graph) -> list[list[str]]:
    """The files in groups that reach each other, each sorted; a group comes after all that it imports (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(file: str) -> None:
        number[file] = low[file] = len(number)
        stack.append(file)
        for other in sorted(graph[file]):
            if other not in number:
                visit(other)
                low[file] = min(low[file], low[other])
            elif other in stack:
                low[file] = min(low[file], number[other])
        if low[file] == number[file]:
            first = stack.index(file)
            found.append(sorted(stack[first:]))
            del stack[first:]

    for file in sorted(graph):
        if file not in number:
            visit(file)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Files that import each other, directly or through others: the groups of more than one."""
    return sorted(group for group in components(graph) if len(group) > 1)


def levels(graph: Graph) -> dict[str, int]:
    """The number of imports in the longest way down from each file; those of one circle stand on one level."""
    level: dict[str, int] = {}
    for group in components(graph):
        below = [level[other] + 1 for file in group for other in graph[file] if other not in group]
        level.update(dict.fromkeys(group, max(below, default=0)))
    return level


def table(root: Path) -> list[tuple[str, int, int, int, int, int, int]]:
    """(folder, its own files, files under it, their lines, levels, arrows and circles among them) of all folders."""
    graph = arrows(root)
    folders = {"", *(parent.as_posix() for file in graph for parent in Path(file).parents if parent != Path())}
    rows = []
    for folder in sorted(folders):
        inside = within(graph, folder)
        own = sum(Path(file).parent == Path(folder) for file in inside)
        lines = sum(len((root / f"{file}.py").read_text(encoding="utf-8").splitlines()) for file in inside)
        deep = max(levels(inside).values()) + 1
        rows.append((folder, own, len(inside), lines, deep, sum(map(len, inside.values())), len(circles(inside))))
    return rows


def words(root: Path) -> dict[str, int]:
    """Words of README.md and of each page of docs."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {page.relative_to(root).as_posix(): len(page.read_text(encoding="utf-8").split()) for page in pages}


def entered(work: Callable[[], object], root: Path = PACKAGE) -> set[str]:
    """The files of a package of which this thread calls functions in ``work``."""
    found: set[str] = set()
    own = f"{root}/"

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            found.add(frame.f_code.co_filename.removeprefix(own).removesuffix(".py"))

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def entered_by(method: str) -> tuple[set[str], set[str]]:
    """Files entered by one ``generate`` of the bundled pair ("auto": its draft), and by the fullest tick of a service
    that decodes the same prompt; each has decoded once before."""
    from foretell import Engine, SamplingParams, Service, ServiceOptions, Submission
    from tests.service.test_service import Mailbox

    mode, name = ("auto", "draft_model") if method == "auto" else ("on", method)
    engine = Engine.load("bundled", speculative=name, speculation=mode)
    asked: Any = {"max_new_tokens": 24, "seed": 1, "ignore_eos": True}
    engine.generate(PROMPT, **asked)
    once = entered(lambda: engine.generate(PROMPT, **asked))

    service, box, ticks = Service(engine, ServiceOptions(speculation=mode, max_num_seqs=1)), Mailbox(), [set[str]()]
    service.start()
    loop: Any = service._loop
    tick = loop.tick
    for number in range(2):
        submission = Submission(str(number), engine.tokenizer.encode(PROMPT), SamplingParams(**asked))
        service.submit(submission, box.hear)
        box.last(str(number), 60.0)
        loop.tick = lambda: ticks.append(entered(tick))
    service.close()
    return once, max(ticks, key=len)


def main() -> None:
    """See the module's docstring."""
    print("| folder | files | all files | lines | levels | arrows | circles |\n|--|--|--|--|--|--|--|")
    for folder, *numbers in table(PACKAGE):
        print(f"| {folder or PACKAGE.name} | {' | '.join(map(str, numbers))} |")
    for circle in circles(arrows(PACKAGE)):
        print(f"a circle of {len(circle)}: {', '.join(circle)}")
    told = words(ROOT)
    print(f"\n{sum(told.values())} words: {', '.join(f'{page} {count}' for page, count in told.items())}")
    for method in sys.argv[1:]:
        once, tick = entered_by(method)
        print(f"{method}: one generate enters {len(once)} files, one tick of a service {len(tick)}")


if __name__ == "__main__":
    main()
