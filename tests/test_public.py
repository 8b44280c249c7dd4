"""The public surface: one sorted list, importable, and nothing public beside it."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType

import foretell


def test_all_are_importable_and_known_to_type_checkers() -> None:
    """By the file that has each: what is imported when it is used, and what type checkers read."""
    names = foretell.__all__
    assert len(names) > 5
    block = next(node for node in ast.parse(Path(foretell.__file__).read_text()).body if isinstance(node, ast.If))
    told = {
        name.asname: line.module.removeprefix("foretell.")
        for line in block.body
        if isinstance(line, ast.ImportFrom) and line.module
        for name in line.names
        if name.asname == name.name
    }
    assert told == foretell._HOMES
    for name in names:
        assert getattr(foretell, name) is not None


def test_all_is_what_is_public() -> None:
    """Classes, functions and constants without an underscore; submodules and imported modules aside."""
    for name in foretell.__all__:
        getattr(foretell, name)  # lazily imported names appear on first use
    hidden = {"TYPE_CHECKING", "Any"}  # typing's, needed by the lazy imports
    public = {
        name
        for name, value in vars(foretell).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in hidden
    }
    assert public == set(foretell.__all__)
    assert set(foretell.__all__) <= set(dir(foretell))


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(foretell, "no_such_name")


def test_star_import() -> None:
    space: dict[str, object] = {}
    exec("from foretell import *", space)
    assert set(foretell.__all__) <= set(space)


def test_importing_the_package_is_cheap() -> None:
    """``foretell --help`` must not wait for torch or transformers."""
    code = "import sys, foretell; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_typed_and_versioned() -> None:
    assert resources.files("foretell").joinpath("py.typed").is_file()
    assert foretell.__version__.count(".") == 2


def test_the_docstring_of_load_names_every_argument() -> None:
    told = inspect.getdoc(foretell.Engine.load) or ""
    names = inspect.signature(foretell.Engine.load).parameters
    assert [name for name in names if not re.search(rf"^{name}: ", told, re.MULTILINE)] == []
