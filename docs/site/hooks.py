"""What the site has beside docs/*.md, made while it is built: the front page (README.md), the
reference of the public names, the notebooks, and a page for every other file of the repository that a document links to.

Links are written for the repository, and rewritten here, so that one text serves both.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = {"papers.md"}
"""Pages of the navigation that need not exist."""
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.DOTALL | re.MULTILINE)
GROUPS = {
    "decode": (
        "Decode",
        (
            "engine.engine",
            "engine.request.request",
            "engine.request.result",
            "engine.request.row",
            "core.params",
            "engine.config",
            "engine.event",
        ),
    ),
    "serve": ("Serve", ("service.service", "service.options", "engine.request.submission", "learn.options")),
    "draft": ("Draft", ("draft.base", "draft.config", "draft.shapes", "draft.ngram", "draft.growing")),
    "heads": ("Heads", ("heads.head", "heads.layout", "heads.formats", "heads.teacher")),
    "verify": ("Verify", ("verify",)),
    "trees": ("Trees, noise, distributions", ("core.tree", "core.noise", "core.probs")),
    "models": ("Models", ("model.target",)),
    "errors": ("Errors", ("core.errors",)),
}
"""Pages of the reference: title, and the modules whose public names they have."""


# -- where things are --------------------------------------------------------------------------------------------------


def uri(path: str) -> str:
    """The site's source path of a file of the repository."""
    if path in ("README.md", "docs/README.md"):  # the navigation is the index of the pages
        return "index.md"
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return inside.removesuffix(".ipynb") + ".md" if inside.endswith(".ipynb") else inside
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def rewritten(text: str, path: str, at: str, linked: set[str]) -> str:
    """A document with links of the site. path: of the document, in the repository; at: its source path on the site. Files
    outside docs that it links to are added to ``linked``."""

    def link(found: re.Match[str]) -> str:
        label, target = found.groups()
        name, mark, fragment = target.partition("#")
        if re.match(r"[a-z]+:", target) or not name:
            return found[0]
        goal = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if not (ROOT / goal).is_file():
            return found[0]  # the builder warns of it, which ends a strict build
        if not goal.startswith("docs/"):
            linked.add(goal)
        return f"{label}({posixpath.relpath(uri(goal), posixpath.dirname(at) or '.')}{mark}{fragment})"

    out, last = [], 0
    for fence in FENCE.finditer(text):
        out += [LINK.sub(link, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*out, LINK.sub(link, text[last:])])


# -- the reference -----------------------------------------------------------------------------------------------------


def homes() -> dict[str, str]:
    """Public name -> the module that has it, read from the package without importing it."""
    tree = ast.parse((ROOT / "src/foretell/__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_NAMES":
            by_home: dict[str, str] = ast.literal_eval(node.value)
            return {name: home for home, names in by_home.items() for name in names.split()}
    raise ValueError("foretell/__init__.py has no _NAMES")


def reference() -> Iterator[tuple[str, str]]:
    """(source path, text) of the pages of the reference. Raises ValueError for a public name that no page has."""
    left, lists = homes(), []
    for name, (title, modules) in GROUPS.items():
        mine = [public for public, home in left.items() if home.startswith(modules)]
        mine.sort(key=lambda public: modules.index(next(one for one in modules if left[public].startswith(one))))
        body = "\n\n".join(f"::: foretell.{left[public]}.{public}" for public in mine)
        yield f"reference/{name}.md", f"# {title}\n\nAll of these are imported from `foretell`.\n\n{body}\n"
        lists.append(f"## [{title}]({name}.md)\n\n" + "\n".join(_line(public, left[public], name) for public in mine))
        left = {public: home for public, home in left.items() if public not in mine}
    if left:
        raise ValueError(f"no page of the reference has {sorted(left)}: add their modules to GROUPS")
    head = (
        "# Public names\n\n`from foretell import ...`: what is listed here is the interface; the rest may change.\n\n"
    )
    yield "reference/index.md", head + "\n\n".join(lists) + "\n"


def _line(name: str, home: str, page: str) -> str:
    """An entry of the index: the name and its docstring's first sentence."""
    anchor = f"foretell.{home}.{name}"
    said = _docstring(ROOT / "src/foretell" / home.replace(".", "/"), name)
    first = re.split(r"(?<=[.:])\s", re.sub(r"\s+", " ", said), maxsplit=1)[0] if said else ""
    return f"- [`{name}`]({page}.md#{anchor}){': ' + first if first else ''}"


def _docstring(path: Path, name: str) -> str:
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for at, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(getattr(target, "id", "") == name for target in targets) and at + 1 < len(body):
            after = body[at + 1]
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                return after.value.value
    return ""


# -- notebooks ---------------------------------------------------------------------------------------------------------


def notebook(path: Path) -> str:
    """A notebook as Markdown: its texts, its code, and what was printed when it was last run."""
    out = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        out.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            said = output.get("text") or output.get("data", {}).get("text/plain", [])
            out.append(f"```text\n{''.join(said).rstrip()}\n```")
    name = path.relative_to(ROOT)
    return "\n\n".join(out) + f"\n\nTo run it yourself: `jupyter lab {name}`.\n"


# -- mkdocs ------------------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: the reference's pages are there, optional ones only if they exist."""
    for part in config.nav or []:
        for pages in part.values():
            if isinstance(pages, list):
                pages[:] = [one for one in pages if not _is_missing(one)]
                if any("reference/index.md" in one.values() for one in pages):
                    pages.append(
                        {
                            "Public names by subject": [
                                {title: f"reference/{name}.md"} for name, (title, _) in GROUPS.items()
                            ]
                        }
                    )
    return config


def _is_missing(entry: dict[str, Any]) -> bool:
    return any(
        page in OPTIONAL and not (ROOT / "docs" / page).exists() for page in entry.values() if isinstance(page, str)
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the made pages."""
    linked: set[str] = set()
    texts = {"index.md": rewritten((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", "index.md", linked)}
    texts |= dict(reference())
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        name = str(path.relative_to(ROOT))
        texts[uri(name)] = rewritten(notebook(path), name, uri(name), linked)
    for page in (ROOT / "docs").glob("*.md"):
        rewritten(page.read_text(encoding="utf-8"), f"docs/{page.name}", page.name, linked)
    done: set[str] = {"README.md"}
    while linked - done:
        for path in sorted(linked - done):
            done.add(path)
            texts[uri(path)] = _of_repository(path, linked)
    made = set(_pages(config.nav or []))
    for at, text in texts.items():
        file = File.generated(config, at, content=text)
        if at not in made:
            file.inclusion = file.inclusion.NOT_IN_NAV
        files.append(file)
    return files


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for one in nav.values():
            yield from _pages(one)
    else:
        for one in nav:
            yield from _pages(one)


def _of_repository(path: str, linked: set[str]) -> str:
    """The page of a file outside docs."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # a model card's own head
        return rewritten(text, path, uri(path), linked)
    language = {".py": "python", ".h": "c", ".c": "c"}.get(Path(path).suffix, "text")
    fence = "~~~~~~"
    return f"# `{path}`\n\n{fence}{language}\n{text}{fence}\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of docs/*.md; made pages have theirs already."""
    if page.file.generated_by:
        return markdown
    return rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri, set())
