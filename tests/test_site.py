"""The documents as a site: links that hold in both places, every page found, every public name described."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import foretell

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("mkdocs", "mkdocstrings", "pymdownx")
needs_mkdocs = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED), reason="without the extra docs"
)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    pytest.importorskip("mkdocs", reason="without the extra docs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_document_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}  # the repository's own index
    there |= {f"notebooks/{page.stem}.md" for page in (ROOT / "docs/notebooks").glob("*.ipynb")}
    assert there <= named
    assert named - there == {"index.md", "reference/index.md"} | (set() if "papers.md" in there else {"papers.md"})


@pytest.mark.parametrize(
    ("path", "at", "text", "expected"),
    [
        ("README.md", "index.md", "[a](docs/serving.md#measured)", "[a](serving.md#measured)"),
        ("README.md", "index.md", "[a](docs/README.md)", "[a](index.md)"),
        ("README.md", "index.md", "![a](docs/figures/speedup.svg)", "![a](figures/speedup.svg)"),
        (
            "docs/serving.md",
            "serving.md",
            "[a](../src/foretell/core/tree.py)",
            "[a](repository/src/foretell/core/tree.py.md)",
        ),
        ("docs/serving.md", "serving.md", "[a](#measured) [b](https://x.y)", "[a](#measured) [b](https://x.y)"),
        ("docs/serving.md", "serving.md", "```\n[a](../README.md)\n```\n", "```\n[a](../README.md)\n```\n"),
        ("docs/serving.md", "serving.md", "[a](nowhere.md)", "[a](nowhere.md)"),
        ("docs/notebooks/learn.ipynb", "notebooks/learn.md", "[a](../train.md)", "[a](../train.md)"),
    ],
)
def test_links_are_rewritten(hooks: ModuleType, path: str, at: str, text: str, expected: str) -> None:
    linked: set[str] = set()
    assert hooks.rewritten(text, path, at, linked) == expected
    assert linked == ({"src/foretell/core/tree.py"} if "core/tree" in text else set())


def test_the_reference_has_every_public_name_once(hooks: ModuleType) -> None:
    pages = dict(hooks.reference())
    found = re.findall(r"^::: foretell\.\S+\.(\w+)$", "\n".join(pages.values()), re.MULTILINE)
    assert sorted(found) == sorted(foretell.__all__)
    for name in foretell.__all__:
        assert f"[`{name}`]" in pages["reference/index.md"]


def test_a_public_name_without_a_page_is_noticed(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.GROUPS, "errors", ("Errors", ()))
    with pytest.raises(ValueError, match="ConfigError"):
        list(hooks.reference())


@needs_mkdocs
@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Speculative decoding for Hugging Face models" in front
    assert 'src="figures/readme.svg"' in front
    engine = (tmp_path / "reference/decode.html").read_text(encoding="utf-8")
    assert 'id="foretell.engine.engine.Engine.generate"' in engine
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000
