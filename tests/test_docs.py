"""The documents say what the code does: links, paths, signatures, the numbers of the walk, figures, plain words."""

import importlib
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

import foretell
from foretell.cli.app import app
from tests import readme

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
WALK = "docs/how-a-step-works.md"

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
SIGNATURE = re.compile(r"<!-- signature: (\S+) -->\n```python\n(.*?)\n```", re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NODE = re.compile(r"^\| (\d) \| `(\S+)` \| (0\.\d+) \| (0\.\d+) \|$", re.MULTILINE)
TOP = ("src/", "tests/", "benchmarks/", "recipes/", "examples/", "docs/")

MANNERED = (
    r"goes? through the motions",
    r"nobody's business",
    r"no gift to",
    r"\bluck\b",
    r"\bseam\b",
    r"\blooks? on;",
    r"\bsay yes\b",
    r"that is all there is to it",
    r"no thought at all",
    r"\bforesaw\b",
    r"without a word",
    r"flatter us",
    r"books (?:clean|up)",
    r"\b(?:mends|mended)\b",
    r"\bin those of\b",
    r"\bof so many\b",
    r"\bbehind (?:a|the) (?:pass|step|trial|guess)\b",
)
"""Phrases that are not plain technical English, as regular expressions."""
FREE = ("docs/help.md",)
"""A generated page: its words are not checked."""


def test_every_command_that_is_to_run_does() -> None:
    """``tests/readme.py``, of which nothing else would say that it leaves a page out."""
    assert sorted(page for page in PAGES if "<!-- run" in read(page)) == sorted(readme.DOCUMENTS)
    text = "<!-- run if ray: --limit 1 -->\n<!-- prints: a|b -->\n```sh\nfoo \\\n --x  # why\nbar\n```\n"
    text += "<!-- run -->\n```python\n1\n```"
    assert readme.blocks(text) == [
        readme.Block("ray", "a|b", "sh", ["foo   --x --limit 1", "bar --limit 1"]), readme.Block("", "", "python", ["1\n"]),
    ]  # fmt: skip
    for page in readme.DOCUMENTS:
        assert read(page).count("<!-- run") == len(readme.blocks(read(page))), page


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def broken_links(page: str, text: str) -> list[str]:
    """Targets of links inside the repository that are not there."""
    broken = []
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        where = (ROOT / page).parent / name if name else ROOT / page
        if not where.exists() or (fragment and fragment not in anchors(where.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def missing_paths(text: str) -> list[str]:
    """Files of the repository named in code spans and commands that are not there (names with a wildcard must match)."""
    named = {span.split()[0].split("::")[0] for span in SPAN.findall(prose(text))}
    named |= set(re.findall(rf"\b(?:python|pytest) ((?:{'|'.join(TOP)})[\w/.-]+)", text))
    paths = {name for name in named if name.startswith(TOP) and not re.search(r"[{}<>]", name)}
    return sorted(name for name in paths if not (list(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()))


def mannered(text: str) -> list[str]:
    """Phrases of the list above that stand in a page."""
    flat = re.sub(r"\s+", " ", prose(text))
    return [found.group() for phrase in MANNERED if (found := re.search(phrase, flat, re.IGNORECASE))]


def find(name: str) -> object:
    """What a dotted name stands for."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            value = getattr(value, part)
        return value
    raise LookupError(name)


def signature(name: str) -> str:
    """A callable's signature without types and ``self``; defaults that are objects are written ``...``."""
    found = find(name)
    assert callable(found)
    given = inspect.signature(found)
    parameters = []
    for parameter in given.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not isinstance(default, int | float | str | tuple | None):
            default = ...
        if parameter.name != "self":
            parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    text = str(given.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return name.rsplit(".", 1)[1] + text.replace("Ellipsis", "...")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths(page: str) -> None:
    assert broken_links(page, read(page)) == []
    if page not in FREE:
        assert missing_paths(read(page)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FREE])
def test_plain_words(page: str) -> None:
    assert mannered(read(page)) == []


def test_the_checks_find_what_is_wrong() -> None:
    text = "# A `b` c\n[x](no.md) [z](#nowhere) `src/no.py` `tests/test_docs.py`\n\nIt goes\nthrough the motions.\n"
    assert broken_links("README.md", text) == ["no.md", "#nowhere"]
    assert anchors(text) == {"a-b-c"}
    assert missing_paths(text + "\n```sh\npython benchmarks/no.py --x\n```\n") == ["benchmarks/no.py", "src/no.py"]
    assert mannered(text) == ["goes through the motions"]


def test_quoted_signatures() -> None:
    quoted = SIGNATURE.findall(read(WALK))
    assert len(quoted) >= 8
    assert [text for _, text in quoted] == [signature(name) for name, _ in quoted]


def test_the_walk_is_what_the_engine_does() -> None:
    """The second step of the walk's run: guesses, q and p of its table, kept path, slots and text."""
    shown: list[dict[str, object]] = []
    engine = foretell.Engine.load("bundled", speculative="draft_model")
    assert engine.tokenizer is not None
    decode = engine.tokenizer.decode
    engine.observes_draft_logits = True

    def look(event: foretell.StepEvent) -> None:
        tree, commit = event.evidence.tree, event.commit
        tokens = tree.tokens[0].tolist()
        q = [(logits[0, 0] / 0.7).softmax(-1) for logits in event.draft_logits]
        shown.append({
            "tokens": [decode([token]) for token in tokens],
            "q": [float(q[node - 1][token]) for node, token in enumerate(tokens) if node],
            "p": [float(event.evidence.p[0, node - 1, token]) for node, token in enumerate(tokens) if node],
            "path": commit.path[0],
            "emitted": [decode([token]) for token in commit.tokens[0]],
            "length": int(commit.length[0]),
        })  # fmt: skip

    engine.observers.append(look)
    completion = engine.generate("def add(a, b):\n    return", temperature=0.7, seed=2, max_new_tokens=32)
    second = shown[1]
    nodes = NODE.findall(read(WALK))
    assert second["tokens"] == [" a", *(text.replace("␣", " ").replace(r"\n", "\n") for _, text, _, _ in nodes)]
    assert second["q"] == pytest.approx([float(q) for *_, q, _ in nodes], abs=2e-3)
    assert second["p"] == pytest.approx([float(p) for *_, p in nodes], abs=2e-3)
    assert (second["path"], second["emitted"], second["length"]) == ([0, 1, 2], [" +", " b", "\n"], 8)
    assert (len(completion.token_ids), len(shown), shown[2]["length"]) == (32, 13, 11)
    assert "32 tokens took 13 steps" in read(WALK)


def _figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_make", ROOT / "docs/figures/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_documents_import_is_there() -> None:
    """Of the package; the notebook took a function from where it was no longer."""
    notebook = json.loads(read("docs/notebooks/learn.ipynb"))
    code = "\n".join(line for cell in notebook["cells"] for line in (*cell["source"], "\n"))
    text = "\n".join((*map(read, PAGES), code))
    found = re.findall(r"^ *from (foretell(?:\.\w+)*) import ([\w, ]+)$", text, re.MULTILINE)
    assert len(found) >= 10
    for module, names in found:
        exec(f"from {module} import {names}", {})  # an ImportError says what is not there


OBJECTS = ("model", "draft", "methods", "bundled", "learn")
"""Folders whose names stand in comments for objects and files too."""
PACKAGE = Path(foretell.__file__).parent
MARKED = re.compile(r"``([^`\n]+)``")


def members(sources: list[str]) -> dict[str, set[str]]:
    """What each class of the package has, by itself or from a class that it is made of: methods, fields, attributes."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for text in sources:
        for name, above, body in re.findall(r"^class (\w+)(.*?):\n((?:(?: .*)?\n)+)", text, re.MULTILINE):
            own.setdefault(name, set()).update(
                re.findall(r"(?<=def )\w+|(?<=self\.)\w+|(?<=^    )\w+", body, re.MULTILINE)
            )
            bases.setdefault(name, set()).update(re.findall(r"\w+", above))
    for _ in range(6):  # longer than any line of classes
        for name, above in bases.items():
            own[name].update(*(own.get(base, set()) for base in above))
    return own


def stale_names(file: Path, text: str, known: dict[str, set[str]], files: set[str]) -> list[str]:
    """Files, modules and attributes that a source names between double backticks, and that are not there. A file is named
    from its own folder or from any other; a class that is not the package's own is somebody else's."""
    found = []
    for name in MARKED.findall(text):
        owner, _, attribute = name.split("(")[0].partition(".")
        if re.fullmatch(r"[\w./]+\.(py|h|c)", name):
            there = "/" in name and (any(each.endswith(f"/{name}") for each in files) or (ROOT / name).exists())
            stale = not there and not (file.parent / name).exists()
        elif owner in known:
            stale = attribute.isidentifier() and attribute not in known[owner]
        elif re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", name) and owner not in OBJECTS and f"/{owner}/__init__.py" in files:
            parts = name.split(".")
            while len(parts) > 1 and not {f"/{'/'.join(parts)}.py", f"/{'/'.join(parts)}/__init__.py"} & files:
                parts.pop()
            rest, module = name.split(".")[len(parts) :], PACKAGE / "/".join(parts)
            source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            stale = bool(rest) and not re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8"))
        else:
            continue
        if stale:
            found.append(name)
    return found


def test_what_comments_name_is_there() -> None:
    """Docstrings and comments of the package named files where they no longer were, and attributes of no class."""
    files = [file for ending in ("py", "h", "c") for file in PACKAGE.rglob(f"*.{ending}")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    known = members([text for file, text in texts.items() if file.suffix == ".py"])
    names = {f"/{file.relative_to(PACKAGE).as_posix()}" for file in files}
    stale = {str(file.relative_to(PACKAGE)): stale_names(file, text, known, names) for file, text in texts.items()}
    assert {name: found for name, found in stale.items() if found} == {}


def test_a_name_that_is_not_there_is_found() -> None:
    known = members(["class A:\n    x: int\n    def __init__(self): self.y = 1\nclass B(A):\n    def f(self): ...\n"])
    files = {"/core/__init__.py", "/core/cachedir.py", "/kernels/race.c"}
    wrong = ["race.c", "draft/race.c", "B.z", "core.no_such_module", "core.cachedir.no_such_name", "B.g(1)"]
    right = [
        "step.py",
        "kernels/race.c",
        "B.x",
        "B.y",
        "B.f(1)",
        "core.cachedir.cache_directory",
        "Other.x",
        "torch.no",
    ]
    text = " ".join(f"``{name}``" for name in (*wrong, *right, "model.layers"))
    assert stale_names(PACKAGE / "engine/loop.py", text, known, files) == wrong


def commands(text: str) -> list[list[str]]:
    """Words of every command of ``foretell`` and ``python`` in a page's blocks."""
    lines = [line for block in SHELL.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    parts = [part for line in lines for part in re.split(r" (?:\||&|&&)(?: |$)|; ", re.split(r"(?:^| )#", line)[0])]
    words = [shlex.split(part) for part in parts if re.match(r" *(?:foretell|python) ", part)]
    return [one[: one.index(">")] if ">" in one else one for one in words]


def unknown(words: list[str]) -> list[str]:
    """What of a command is not there: options of ``foretell``'s by their parser, others' by the sources of their folder."""
    program, name, *rest = words
    if program == "foretell":
        group = typer.main.get_command(app)
        command = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
        if command is None:
            return [name]
        try:
            command.make_parser(typer.Context(command)).parse_args(list(rest))
        except Exception as error:  # typer brings its own click
            return [str(error)]
        return []
    module, options = (rest[0].replace(".", "/"), rest[1:]) if name == "-m" else (name.removesuffix(".py"), rest)
    file, folder = (ROOT / module).with_suffix(".py"), ROOT / module
    if not file.is_file() and not folder.is_dir():
        return [module]
    sources = [each.read_text(encoding="utf-8") for each in (*file.parent.glob("*.py"), *folder.glob("*.py"))]
    given = {word.partition("=")[0] for word in options if word.startswith("--")}
    return sorted(word for word in given if not any(f'"{word}"' in source for source in sources))


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_documents_are_understood(page: str) -> None:
    assert {" ".join(words): wrong for words in commands(read(page)) if (wrong := unknown(words))} == {}


def test_a_command_that_is_not_there_is_found() -> None:
    page = (
        "```sh\nforetell serv x  # a word\nforetell serve --no-such \\\n --port 4\npython -m benchmarks.real --no\n```"
    )
    assert [bool(unknown(words)) for words in commands(page)] == [True, True, True]


def test_what_a_package_needs_is_public() -> None:
    """docs/extend.md: classes, functions and errors that it names are imported from ``foretell``, all errors among them."""
    page = read("docs/extend.md")
    own = set(re.findall(r"^class (\w+)", page, re.MULTILINE))
    named = {
        span.split(".")[0] for span in SPAN.findall(prose(page)) if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)*", span)
    }
    assert len(named) > 10
    assert sorted(name for name in named - own if not hasattr(foretell, name)) == []
    groups = {"methods", "heads", "verifiers", "shapes"}  # of entry points
    called = set(re.findall(r"\bforetell\.([A-Za-z]\w+)", page)) - groups
    assert sorted(name for name in called if not hasattr(foretell, name) and not (PACKAGE / name).is_dir()) == []
    errors = {name for name, value in vars(importlib.import_module("foretell.core.errors")).items()
              if isinstance(value, type) and issubclass(value, foretell.ForetellError)}  # fmt: skip
    assert len(errors) > 8
    assert errors <= set(foretell.__all__)


def figures_known() -> dict[str, tuple[str, ...]]:
    """Figures that a program knows, by the words in which pages say them (as expressions)."""
    from foretell.draft.shapes import MAX_SIZE

    lines = re.findall(r"^(\| .* \| |- .*: )(`[^`]+`(?:, `[^`]+`)*)", read("docs/model-types.md"), re.MULTILINE)
    listed = [group for group, kinds in lines for _ in kinds.split(", ")]
    runs = [group for group in listed if group.startswith("| ")]
    trees = [group for group in runs if group.split(" | ")[1] == "yes"]
    needs = tomllib.loads(read("pyproject.toml"))["project"]
    least = {
        re.split(r"[>=<,]", one)[0]: one.split(">=")[1].split(",")[0] for one in needs["dependencies"] if ">=" in one
    }
    python = needs["requires-python"].removeprefix(">=")
    return {
        r"(\d+) of (?:the )?(\d+) (?:causal )?types\b": (str(len(runs)), str(len(listed))),
        r"(\d+) of them over trees": (str(len(trees)),),
        r"Python ≥ ([\d.]+\d), torch ≥ ([\d.]+\d), transformers ≥ ([\d.]+\d)": (
            python, least["torch"], least["transformers"],
        ),
        r"Python ([\d.]+\d) or later": (python,),
        r"no whole number from 1 to (\d+)": (str(MAX_SIZE),),
    }  # fmt: skip


def wrong_figures(text: str, known: dict[str, tuple[str, ...]]) -> tuple[list[str], int]:
    """(what a page says otherwise, how many it says)."""
    flat = re.sub(r"\s+", " ", text)
    said = [(match, values) for words, values in known.items() for match in re.finditer(words, flat)]
    return [match[0] for match, values in said if match.groups() != values], len(said)


def test_figures_that_a_program_knows() -> None:
    """156 types over trees in one page were 136 in another."""
    known = figures_known()
    found = {page: wrong_figures(read(page), known) for page in PAGES if page not in FREE}
    assert {page: wrong for page, (wrong, _) in found.items() if wrong} == {}
    assert sum(count for _, count in found.values()) >= 8
    assert wrong_figures("136 of them over\ntrees, Python 3.7 or later, 5 types", known) == (
        ["136 of them over trees", "Python 3.7 or later"], 2,
    )  # fmt: skip


def test_the_table_of_floors_is_the_test_s() -> None:
    from tests.test_floors import FLOORS

    rows = re.findall(r"^\| ([\d.]+) \| (`[^|]+`) \|", read("docs/extend.md"), re.MULTILINE)
    assert {name: float(floor) for floor, names in rows for name in re.findall(r"`([^`]+)`", names)} == FLOORS


def test_figures_show_their_tables() -> None:
    pytest.importorskip("matplotlib")
    make = _figures()
    drawn = {path.stem for path in (ROOT / "docs/figures").glob("*.svg")}
    assert drawn == set(make.FIGURES)
    for name, (numbers_of, _, _) in make.FIGURES.items():
        data = numbers_of()
        assert data, name
        assert all(data.values()), name
        text = read(f"docs/figures/{name}.svg")
        assert make.fingerprint(data) in text, f"{name} is stale: python docs/figures/make.py"
        shown_in = [page for page in PAGES if f"figures/{name}.svg" in read(page)]
        assert shown_in, f"no page shows {name}"


def test_a_figure_notices_another_number() -> None:
    pytest.importorskip("matplotlib")
    make = _figures()
    data = make.step_data()
    first = next(iter(data))
    assert make.fingerprint(data) != make.fingerprint({**data, first: [data[first][0] + 0.1]})
    with pytest.raises(ValueError, match="no table"):
        make.table("serving.md", "no such header")


PROMISE = (
    "stays within 2 % of plain decoding, but for small models in 4 or 8 bits: temperature 1 cost 4 %, "
    "the first hundred steps on a busy machine up to half"
)
"""What ``auto`` promises, in the words of every place that says it."""


def test_one_promise_of_speed_everywhere() -> None:
    """It said "never slower" in one place and 4 % in another."""
    told = {page: " ".join(re.sub(r"[\u2500-\u257f]", " ", read(page)).split()) for page in (*PAGES, "pyproject.toml")}
    for page in ("README.md", "pyproject.toml", "docs/serving.md", "docs/help.md"):
        assert told[page].count(PROMISE) == 1, page
    package = Path(foretell.__file__).parent
    sources = {str(file.relative_to(package)): " ".join(file.read_text().split()) for file in package.rglob("*.py")}
    assert PROMISE in sources["cli/commands/serve.py"]
    never = [name for name, text in (told | sources).items() if "never slower" in text.lower()]
    assert never == []


RECORD = re.compile(r"^## (\d+)\. (.+)\n((?:(?!## ).*\n?)*)", re.MULTILINE)


def wrong_records(text: str) -> list[str]:
    """What docs/LOG.md must not have: many or long records, numbers out of order, a record that the index does not list
    (with a clause of its own) by its number, title and place."""
    records = [(int(number), title, body) for number, title, body in RECORD.findall(text)]
    listed = re.findall(r"^- \[(\d+)\. (.+)\]\(#(\S+)\): \S", text, re.MULTILINE)
    long = [f"{number} has {count} words" for number, _, body in records if (count := len(body.split())) > 150]
    missing = [] if 0 < len(records) <= 30 else [f"{len(records)} records"]
    if [number for number, *_ in records] != list(range(1, len(records) + 1)):
        missing.append("numbers")
    if listed != [(str(number), title, *anchors(f"# {number}. {title}\n")) for number, title, _ in records]:
        missing.append("index")
    return long + missing


def test_the_log_holds_few_short_records() -> None:
    assert wrong_records(read("docs/LOG.md")) == []
    index = "- [1. A b](#1-a-b): c\n"
    assert wrong_records(f"{index}\n## 1. A b\n\n{'d ' * 150}\n") == []
    assert wrong_records(f"{index}\n## 1. A b\n\n{'d ' * 151}\n") == ["1 has 151 words"]
    assert wrong_records(f"{index}\n## 2. A b\n") == ["numbers", "index"]
    assert wrong_records("- [1. A b](#1-a-c): c\n\n## 1. A b\n") == ["index"]
    many = range(1, 32)
    listed = "".join(f"- [{number}. A](#{number}-a): c\n" for number in many)
    assert wrong_records(listed + "".join(f"\n## {number}. A\n" for number in many)) == ["31 records"]


MOST_WORDS = 42_181
"""Of all pages of docs but the log: a reader's time is short, and a new page should cost an old paragraph."""


def test_the_documents_stay_short() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    counts = {
        name: len(re.sub(r"<!--.*?-->", "", text).split()) for name, text in pages.items()
    }  # marks of tests apart
    assert sum(counts.values()) - counts["LOG.md"] <= MOST_WORDS, sorted(counts.items(), key=lambda item: -item[1])[:8]


def test_pre_commit_checks_by_the_version_of_the_constraints() -> None:
    hook = re.search(r"ruff-pre-commit\n +rev: v([\d.]+)", read(".pre-commit-config.yaml"))
    assert hook is not None
    assert f"ruff=={hook[1]}\n" in read("constraints.txt")
