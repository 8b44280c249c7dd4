"""The public surface: one sorted list, importable, and nothing public beside it."""

import subprocess
import sys
from importlib import resources
from types import ModuleType

import foretell


def test_all_is_sorted_and_importable() -> None:
    names = foretell.__all__
    # As ruff sorts: constants, then classes, then functions, each by name.
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert len(names) == len(set(names))
    assert len(names) > 5
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
