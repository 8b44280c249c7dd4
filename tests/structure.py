"""The shape of the source tree: which file imports which, circles among them, and how deep a folder's imports go.

``python -m tests.structure`` prints the table of all folders; with a draft method (``auto``, ``hybrid``, ...) also how
many files of the package one ``generate`` of the bundled pair enters.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, frozenset[str]]
"""Files (paths without suffix, ``engine/loop``; a folder's own file is ``engine/__init__``) to the files they import."""


def arrows(root: Path) -> dict[str, frozenset[str]]:
    """What each Python file under a package's folder imports of the package, by any import statement anywhere in it."""
    files = {"/".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    graph = {}
    for name, path in files.items():
        targets = _imported(ast.parse(path.read_text(encoding="utf-8")), root.name, tuple(name.split("/")[:-1]), files)
        graph[name] = frozenset(targets) - {name}
    return graph


def _imported(tree: ast.AST, package: str, folder: tuple[str, ...], files: Mapping[str, object]) -> Iterator[str]:
    """Files that the statements of one file name: ``from a import b`` names b, where b is a file, and else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(name.name, "") for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = (package, *folder)
            base = list(inside[: len(inside) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [(module, name.name) for name in node.names]
        else:
            continue
        for module, member in names:
            top, *rest = module.split(".")
            if top != package:
                continue
            for path in ("/".join([*rest, member]), "/".join([*rest, member, "__init__"]),
                         "/".join(rest), "/".join([*rest, "__init__"])):  # fmt: skip
                if path in files:
                    yield path
                    break


def circles(graph: Graph) -> list[list[str]]:
    """Groups of more than one file that reach each other (Tarjan's strongly connected components), sorted."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(found)


if __name__ == "__main__":
    import sys
    g = arrows(Path(sys.argv[1]))
    for c in circles(g):
        print(len(c), c)
        for a in c:
            for b in sorted(g[a] & set(c)):
                print("    ", a, "->", b)
